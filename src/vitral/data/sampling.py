"""The order of training images by a sampler of the user: a torch sampler, or a function of the labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Sampler

from vitral.device import seeded
from vitral.errors import UsageError, type_of

_HINT = "sampling=function, where function(labels) returns a weight for each image, or a torch sampler"


def weights_or_sampler(part: Any, labels: np.ndarray) -> np.ndarray | Sampler[int]:
    """Return the weight of each training image (n,), or the sampler that draws their numbers.

    `part` is a sampler, or a function of the labels, with a row for each image, to one of both. Raises `UsageError`.
    """
    found = part if isinstance(part, Sampler) else _called(part, labels)
    if isinstance(found, Sampler):
        return found
    try:
        weights = np.asarray(found.cpu() if isinstance(found, Tensor) else found, np.float64)
    except (TypeError, ValueError):
        raise UsageError(f"your sampling returned {type_of(found)}", hint=_HINT) from None
    if weights.shape != (len(labels),) or not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
        why = f"it returned an array {weights.shape} for {len(labels):,} training images"
        hint = "one weight per image: finite, not negative, and not all zero"
        raise UsageError("your sampling makes no weights", why=why, hint=hint)
    return weights


def _called(function: Callable[..., object], labels: np.ndarray) -> object:
    try:
        return function(labels)
    except Exception as error:  # code of the user may raise anything
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UsageError("your sampling fails for the training labels", why=why, hint=_HINT) from error


def drawn(sampler: Iterable[int], images: int, *seed: int) -> np.ndarray:
    """Return the numbers of the images of an epoch in order, (m,) int64: a function of the seed.

    Raises `UsageError` for numbers outside of the `images` of the training split.
    """
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(seed[-1])
    with seeded(*seed):
        numbers = list(sampler)
    if batches := [one for one in numbers if not hasattr(one, "__index__")]:
        why, hint = f"it draws {type_of(batches[0])}", "pass the sampler inside, and batch_size"
        raise UsageError("your sampler does not draw the number of an image at a time", why=why, hint=hint)
    order = np.array(numbers, np.int64)
    if not len(order) or order.min() < 0 or order.max() >= images:
        why = f"there are {images:,} training images, without those that are held out"
        found = f"draws image {order.max():,}" if len(order) else "draws no image"
        raise UsageError(
            f"your sampler {found}", why=why, hint="pass a function of the labels: sampling=lambda labels: …"
        )
    return order
