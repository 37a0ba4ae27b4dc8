"""Raw attention: what the head's token looks at in one layer, averaged over heads. Shown so often, and worth so little
alone: it says where that layer fetched something from, not what it was nor what it was good for (arXiv 1902.10186).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitral.explanation.capture import POOL, capture, plain
from vitral.explanation.methods.method import Maps, Method, patches_of, readout
from vitral.model import ViT


@torch.no_grad()
def raw_attention(model: ViT, images: Tensor, targets: Tensor, *, layer: int = -1) -> Maps:
    """Maps (B, T, rows, columns), the same for every target: the attention of what the head reads, in `layer`."""
    network = plain(model)
    with capture(network, [layer]) as seen:
        network(images)
    attention = seen.attention(layer % len(network.blocks)).mean(1)
    pooled = seen.attention(POOL) if network.config.pool == "map" else None
    row = readout(network, attention.shape[-1], len(images), images.device, pooled)
    maps = patches_of((row[:, None] @ attention)[:, 0], network, images).cpu()
    return Maps(maps[:, None].expand(-1, targets.shape[1], -1, -1))


ATTENTION = Method(
    "attention", raw_attention, "attention of the last layer", "ViT paper, Figure 6 (one layer of it)", routing=True
)
