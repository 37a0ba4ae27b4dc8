"""Principal components of the patch filters (Figure 7, left)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitral.errors import UsageError
from vitral.explanation.capture import require_vit, wide
from vitral.explanation.inspect.plain import PlainData
from vitral.model.conv_stem import ConvStem
from vitral.model.resnet import HybridStem


@dataclass(frozen=True, eq=False)
class PatchFilters(PlainData):
    """Principal components of the first layer's kernels."""

    components: np.ndarray
    """(n, C, p, q): principal components of the kernels, largest variance first, each of length 1."""
    explained: np.ndarray
    """(n,): share of the kernels' variance of each component."""
    kernels: np.ndarray
    """(D, C, p, q): the kernels. Not in `to_json`, since they are in the weights."""
    source: str
    """Layer of the kernels."""
    notes: tuple[str, ...] = ()

    _left_out = ("kernels",)


def patch_filters(model: nn.Module, components: int = 28) -> PatchFilters:
    """Principal components of the D patch kernels as vectors of C·p·q values (ViT paper, 4.5 and Figure 7 left).

    There are at most min(D, C·p·q) components. Their signs are arbitrary, so the largest value of each is made
    positive. A hybrid cuts patches from features, so the kernels belong to the ResNet's root. They are standardized as
    in its forward pass. Raises `UsageError` for a network without attention and for fewer than 1 component.
    """
    network = require_vit(model)
    if components < 1:
        raise UsageError(f"{components} components", why="there must be at least one")
    notes: list[str] = []
    embed: Any = network.patch_embed
    with torch.no_grad():
        if embed.hybrid:
            source, weight = _first(embed.backbone)
            notes.append(f"the network reads the image through convolutions: the filters are kernels of the {source}")
        else:
            source, weight = "patch embedding", embed.proj.weight
    kernels = wide(weight.detach()).cpu().double().numpy()
    if kernels.shape[1] not in (1, 3):
        notes.append(
            f"{kernels.shape[1]} channels: the image shows the first three as red, green and blue"
            if kernels.shape[1] > 3
            else "two channels: the image shows them as red and green"
        )
    principal, explained = _principal(kernels.reshape(len(kernels), -1), components)
    shape = (len(principal), *kernels.shape[1:])
    return PatchFilters(
        principal.reshape(shape).astype(np.float32), explained, kernels.astype(np.float32), source, tuple(notes)
    )


def _first(backbone: HybridStem | ConvStem) -> tuple[str, Tensor]:
    """Name and kernels of the layer that reads the image, as used in its forward pass."""
    if isinstance(backbone, ConvStem):
        return "first convolution 3×3 of its stem", backbone.layers[0].conv.weight  # type: ignore[union-attr, return-value]
    return "root convolution 7×7 of its ResNet, stride 2", backbone.stem.conv.standardized()


def _principal(vectors: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Components (n, F) with deterministic signs, and shares of the variance (n,)."""
    count = min(count, *vectors.shape)
    total = vectors.var(axis=0).sum() * len(vectors)
    if len(vectors) < 2 or total == 0:  # nothing varies
        return np.zeros((0, vectors.shape[1])), np.zeros(0)
    from sklearn.decomposition import PCA  # takes a second to import

    pca = PCA(count, svd_solver="full").fit(vectors)
    principal = pca.components_
    largest = np.take_along_axis(principal, np.abs(principal).argmax(axis=1)[:, None], axis=1)
    return principal * np.where(largest < 0, -1, 1), pca.explained_variance_ * (len(vectors) - 1) / total
