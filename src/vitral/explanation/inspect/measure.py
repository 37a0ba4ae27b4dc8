"""Attention distance, token norms and CKA, measured together in one forward pass per batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from vitral.errors import UsageError, unknown
from vitral.explanation.capture import Captured, Layer, capture, require_vit
from vitral.explanation.inspect.attention_distance import PREFIXES, AttentionDistance, AttentionObserver, Prefix
from vitral.explanation.inspect.cka import LEAST_FOR_CKA, Likeness, LikenessObserver
from vitral.explanation.inspect.norms import NormsObserver, TokenNorms
from vitral.explanation.methods.method import quiet
from vitral.model import ViT

_MAX_ATTENTION_VALUES = 2**25  # of a batch in one layer
_MAX_TOKEN_VALUES = 2**27  # of a batch in all layers
_MAX_BATCH = 32


def attention_distance(
    model: nn.Module, images: Tensor, *, prefix: Prefix = "drop", layers: Sequence[int] | None = None
) -> AttentionDistance:
    """Attention distance (ViT paper, D.7, Figures 7 right and 11) and entropy of standardized images (B, C, H, W).

    Distances are between centers of patches in pixels. The paper does not specify the treatment of the class token.
    `prefix="drop"`: queries and keys are patches, and each row is divided by its sum; queries without attention to any
    patch do not count. `"keep"`: prefix tokens remain as keys at distance 0, so that attention to the class token
    counts as near. For the distance this equals dropping them without the division.

    Raises `UsageError` without images, for values that are not finite, and for invalid layers.
    """
    result = measure(model, images, prefix=prefix, layers=layers, parts=("attention",)).attention
    assert result is not None
    return result


def token_norms(model: nn.Module, images: Tensor, *, layers: Sequence[int] | None = None) -> TokenNorms:
    """Euclidean norms of tokens after each block. Registers were introduced to absorb outliers (arXiv 2309.16588).

    A patch is an outlier if its norm exceeds twice the median and the median + 6 × the median absolute deviation of all
    patches of its layer. Without the second bound, the tail of a wide distribution would count; without the first, the
    tail of a narrow one. The paper sets its bound by eye. Raises as `attention_distance`.
    """
    result = measure(model, images, layers=layers, parts=("norms",)).norms
    assert result is not None
    return result


def cka(
    model: nn.Module, images: Tensor, *, layers: Sequence[int] | None = None, batch_size: int | None = None
) -> Likeness:
    """Linear centered kernel alignment (CKA) between the input of the first block and the output of each block.

    CKA(X, Y) = HSIC(K, L) / √(HSIC(K, K) HSIC(L, L)) with K = X Xᵀ, L = Y Yᵀ (Kornblith et al. 2019, arXiv 1905.00414).
    The representation of an image is the concatenation of its tokens, as in Raghu et al. 2021 (arXiv 2108.08810). HSIC
    is the unbiased estimate of Song et al. 2012, averaged over minibatches of at least 4 images (Nguyen et al. 2021,
    arXiv 2010.15327), so its expectation does not depend on the batch size. Smaller batches are left out. Values can be
    slightly below 0. Raises as `attention_distance`, and `UsageError` for fewer than 4 images.
    """
    result = measure(model, images, layers=layers, parts=("cka",), batch_size=batch_size).likeness
    assert result is not None
    return result


class _Observer(Protocol):
    def attention(self, layer: Layer, attention: Tensor) -> None: ...
    def tokens(self, captured: Captured) -> None: ...


@dataclass(frozen=True, eq=False)
class Measured:
    """Results of `measure`; None for parts that were not requested."""

    attention: AttentionDistance | None = None
    norms: TokenNorms | None = None
    likeness: Likeness | None = None


PARTS = ("attention", "norms", "cka")


def measure(
    model: nn.Module,
    images: Tensor,
    *,
    parts: Sequence[str] = PARTS,
    prefix: Prefix = "drop",
    layers: Sequence[int] | None = None,
    batch_size: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Measured:
    """Compute `attention_distance`, `token_norms` and `cka` of standardized images (B, C, H, W) in one pass.

    By default the batch size is chosen to fit memory, for the attention of one layer and the tokens of all layers.
    """
    network = require_vit(model)
    if prefix not in PREFIXES:
        raise unknown("choice for prefix tokens:", prefix, PREFIXES)
    check_images(images)
    if "cka" in parts and len(images) < LEAST_FOR_CKA:
        raise UsageError(f"{len(images)} images are too few to compare layers", why=f"CKA needs {LEAST_FOR_CKA}")
    if batch_size is not None and batch_size < (LEAST_FOR_CKA if "cka" in parts else 1):
        raise UsageError(f"batches of {batch_size} are too small", why=f"CKA needs {LEAST_FOR_CKA} images at a time")
    if layers is not None and not len(layers):
        raise UsageError("no layers to look at", why="the list is empty")
    size = images.shape[2] // network.config.patch[0], images.shape[3] // network.config.patch[1]
    attention, norms, likeness = (
        AttentionObserver(network, size, prefix),
        NormsObserver(network, size),
        LikenessObserver(),
    )
    observers: dict[str, _Observer] = {"attention": attention, "norms": norms, "cka": likeness}
    active = [observers[part] for part in parts]
    numbers = _pass(network, images, active, layers, batch_size or _fitting(network, size), progress)
    return Measured(
        attention.result(numbers, len(images)) if "attention" in parts else None,
        norms.result(numbers, len(images)) if "norms" in parts else None,
        likeness.result(numbers, len(images)) if "cka" in parts else None,
    )


def check_images(images: Tensor) -> None:
    """Refuse empty sets of images, and values that are not finite."""
    if images.ndim != 4 or not len(images):
        raise UsageError("there are no images to measure on", why=f"got a tensor of shape {tuple(images.shape)}")
    if not images.isfinite().all():
        bad = int((~images.isfinite().flatten(1).all(1)).sum())
        raise UsageError("images with values that are not finite", why=f"{bad} of {len(images)}; masked or damaged?")


def _pass(
    network: ViT,
    images: Tensor,
    observers: Sequence[_Observer],
    layers: Sequence[int] | None,
    batch_size: int,
    progress: Callable[[int], None] | None,
) -> tuple[int, ...]:
    """Run the network over batches and update the observers. Returns the numbers of the captured layers."""
    needs_attention = any(isinstance(one, AttentionObserver) for one in observers)
    needs_tokens = not all(isinstance(one, AttentionObserver) for one in observers)

    def update(layer: Layer, attention: Tensor) -> None:
        for observer in observers:
            observer.attention(layer, attention)

    weight = next(network.parameters())
    with torch.no_grad(), quiet(network):
        # Batches are nearly equal, so that the last one is not too small for an estimate.
        for batch in images.tensor_split(-(-len(images) // batch_size)):
            reduce = update if needs_attention else None
            with capture(network, layers, attention=False, tokens=needs_tokens, reduce=reduce) as captured:
                network(batch.to(weight.device, weight.dtype))
            for observer in observers:
                observer.tokens(captured)
            if progress is not None:
                progress(len(batch))
    return captured.layers


def _fitting(network: ViT, grid: tuple[int, int]) -> int:
    """Batch size that fits memory; at least twice the minimum of CKA, so that equal batches never have fewer."""
    config, tokens = network.config, grid[0] * grid[1] + network.config.prefix
    of_maps = _MAX_ATTENTION_VALUES // (config.heads * tokens * tokens)
    of_tokens = _MAX_TOKEN_VALUES // ((config.depth + 1) * tokens * config.dim)
    return min(_MAX_BATCH, max(2 * LEAST_FOR_CKA, min(of_maps, of_tokens)))
