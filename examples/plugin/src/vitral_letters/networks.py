"""Networks by name: `--model letters:mlp` is a multilayer perceptron on all pixels."""

from __future__ import annotations

from torch import nn

from vitral.errors import unknown
from vitral.model import ForeignConfig


def build(name: str, config: ForeignConfig) -> nn.Module:
    """Build the network of this name for the sizes of a run. `UsageError` if there is none."""
    if name != "mlp":
        raise unknown("network of letters", name, ["mlp"])
    rows, columns = config.image
    return nn.Sequential(
        nn.Flatten(), nn.Linear(config.channels * rows * columns, 32), nn.GELU(), nn.Linear(32, config.classes)
    )
