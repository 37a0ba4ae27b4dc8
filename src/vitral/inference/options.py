"""Options of a predictor that commands and measurements pass on together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from vitral.inference.loading import load
from vitral.inference.predictor import Predictor


@dataclass(frozen=True)
class InferenceOptions:
    """The options of `vitral.load` that choose the computation; `load` checks them."""

    device: str = "auto"
    precision: str = "auto"
    engine: str = "auto"
    tta: str = "none"
    patch_size: int | None = None
    """None: the network's own."""
    beams: int = 1
    class_order: str | None = None
    """Order of classes whose names the weights do not state (`vitral.weights.load.read`)."""
    levels: tuple[int, int] | None = None
    """Black and white of images with more than 8 bits; None: those of the weights."""

    def load(self, model: str | Path | nn.Module, **adapted: Any) -> Predictor:
        """Load a predictor of `model` with these options; `adapted` are further ones of `vitral.load`."""
        return load(model, **{name: value for name, value in vars(self).items() if value is not None}, **adapted)


AUTO = InferenceOptions()
"""The defaults of `vitral.load`."""
