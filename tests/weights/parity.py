"""Does a published network compute the same here? One table of cases, each a source's own program with random weights.

A case writes the source's file or folder and computes its logits; `test_parity.py` loads what was written and compares.
A format of `vitral.weights.formats.FORMATS` without a case here fails the suite. Cases live in `cases_*.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Size = tuple[int, int]


@dataclass(frozen=True)
class Case:
    """A source's network with random weights."""

    write: Callable[[Path], Path]
    """Write its file or folder into this folder; gives what is to be loaded."""
    logits: Callable[[Tensor], Tensor]
    """What the source computes from standardised pictures (B, C, H, W), of any size in `sizes`."""
    sizes: tuple[Size, ...]
    """The network's own image size first, then others that the source can compute too."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What must be said when loading because the file does not tell it."""
    channels: int = 3


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter at random, none at its initial zero or one, and in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.5 if parameter.ndim == 1 else 0.2))
    return model.eval()
