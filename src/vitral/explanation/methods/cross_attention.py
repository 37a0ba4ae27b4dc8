"""Attention of a decoder from each token of a text to the image: the mean over heads, and over blocks or of one block.

It shows from which patches the decoder read when it chose a token, not the content that it read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitral.explanation.capture import attention_of
from vitral.explanation.methods.method import Maps, Method, patches_of
from vitral.model import EncoderDecoder


@torch.no_grad()
def cross_attention(model: EncoderDecoder, images: Tensor, targets: Tensor, *, layer: int | None = None) -> Maps:
    """Maps (B, T, rows, columns) for the tokens `targets` (B, T) of a text, by all blocks or by block `layer`.

    The map of a token is from the pass that chose it: its query is the token before it.
    """
    blocks: Any = model.decoder.blocks
    crosses = [block.cross for block in blocks] if layer is None else [blocks[layer].cross]
    found: list[Tensor] = []

    def observe(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor) -> None:
        found.append(attention_of(q, k, mask, q.shape[-1] ** -0.5).mean(1))

    start = targets.new_full((len(targets), 1), model.config.decoder.start_token)
    before = [cross.observer for cross in crosses]
    try:
        for cross in crosses:
            cross.observer = observe
        model(images, torch.cat([start, targets], dim=1)[:, :-1])
    finally:
        for cross, one in zip(crosses, before, strict=True):
            cross.observer = one
    return Maps(patches_of(torch.stack(found).mean(0), model.encoder, images).cpu())


CROSS_ATTENTION = Method(
    "cross-attention",
    cross_attention,
    "cross-attention of the decoder",
    "Attention Is All You Need, section 3.2.3",
    routing=True,
    caution="where the decoder looked, not why it chose this character",
)
