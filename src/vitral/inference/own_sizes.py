"""Logits of prepared images: of a batch of one size, or of images of their own sizes, packed into sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import UsageError
from vitral.model.packing import packed_logits


def network_logits(
    network: nn.Module, preprocessing: Preprocessing, images: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Logits (B, K) fp32 of prepared images uint8 on the network's device."""
    if preprocessing.native:
        own: Any = network  # `only_plain` and the plan admit only a ViT
        return packed_logits(own, [image.to(dtype) for image in preprocessing.own_sizes(images)]).float()
    logits: Tensor = network(preprocessing.standardize(images).to(dtype))
    return logits.float()


def refuse_own_sizes(preprocessing: Preprocessing, command: str, source: str = "") -> None:
    """Raise `UsageError` for a network of images of their own sizes, which `command` does not support yet."""
    if preprocessing.native:
        hint = "vitral predict, or vitral evaluate"
        raise UsageError(f"vitral {command} does not support this run", where=source or None, why=_WHY, hint=hint)


_WHY = "its network takes images of their own sizes, packed into sequences (--pack)"


def only_plain(preprocessing: Preprocessing, engine: str, int8: bool, tta: str) -> bool:
    """True for images of their own sizes, which only the plain engine computes. Raises `UsageError` for other options
    with them.
    """
    if not preprocessing.native:
        return False
    asked = {
        f"--engine {engine}": engine not in ("auto", "plain"),
        "--precision int8": int8,
        f"--tta {tta}": tta != "none",
    }
    if bad := [name for name, on in asked.items() if on]:
        raise UsageError(f"this run does not support {bad[0]}", why=_WHY, hint="leave it out")
    return True
