"""Raw attention of one layer, averaged over heads.

Widely shown, but weak evidence: it tells from where a layer reads, not what it reads or if that matters for the
prediction (arXiv 1902.10186).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitral.explanation.capture import POOL, capture, require_vit
from vitral.explanation.methods.method import Maps, Method, patches_of, readout
from vitral.model import ViT


@torch.no_grad()
def raw_attention(model: ViT, images: Tensor, targets: Tensor, *, layer: int = -1) -> Maps:
    """Maps (B, T, rows, columns), the same for every target: attention in `layer` of the tokens that the head reads."""
    network = require_vit(model)
    with capture(network, [layer]) as captured:
        network(images)
    attention = captured.attention(layer % len(network.blocks)).mean(1)
    pooled = captured.attention(POOL) if network.config.pool == "map" else None
    row = readout(network, attention.shape[-1], len(images), images.device, pooled)
    maps = patches_of((row[:, None].to(attention.dtype) @ attention)[:, 0], network, images).cpu()
    return Maps(maps[:, None].expand(-1, targets.shape[1], -1, -1))


ATTENTION = Method(
    "attention", raw_attention, "attention of the last layer", "ViT paper, Figure 6 (one layer of it)", routing=True
)
