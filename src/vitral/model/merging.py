"""Token merging for inference ("Token Merging: Your ViT But Faster", arXiv 2210.09461): alike tokens become one.

    faster = merged(network, 8)       # 8 tokens fewer after the attention of each block
    logits = faster(images)

Between attention and MLP each block splits the patches into two sets, by turns. Every token of the first finds the one
of the second whose key, averaged over heads, has the smallest angle to its own; the `count` pairs that are most alike
are merged into their mean, weighted by how many patches each token stands for. Attention counts a token as that many
(the logarithm of its size is added to its scores), and so does pooling. Class token, distillation token and registers
are never merged. Nothing is trained: the weights are those of the network given.

With rotary positions, which the paper has not, keys are compared as attention sees them, turned, and a merged token
stands in the middle of what it stands for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.errors import UsageError
from vitral.model.packed import sharing
from vitral.model.position import Grid, RotaryPosition
from vitral.model.vit import Block, ViT, ViTConfig


def merged(network: nn.Module, count: int) -> Merged:
    """A network with the weights of this one that merges `count` tokens in each block. `network` is plain, packed or
    quantized, and stays as it is. `UsageError` for one without tokens, and for a negative count.
    """
    if not isinstance(network, ViT):
        raise UsageError("only a ViT has tokens to merge", hint="leave --merge out")
    if count < 0:
        raise UsageError(f"{count} tokens cannot be merged", hint="--merge 8, or 0 for none")
    return Merged(network, count)


class Merged(nn.Module):
    """What `merged` makes: images (B, C, H, W) in, logits (B, K) out. There are no masks."""

    def __init__(self, network: ViT, count: int):
        super().__init__()
        self.network, self.count = network, count
        blocks: Any = network.blocks
        self.blocks = nn.ModuleList(_watched(block) for block in blocks)
        self.train(network.training)  # or who asks this module gets the wrong answer, and may pass it on to its parts

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, K)."""
        x, sizes = self.transform(*self.network.embed(images))
        return self.network.classify(self.pool(x, sizes))

    def transform(self, x: Tensor, grid: Grid) -> tuple[Tensor, Tensor | None]:
        """Tokens (B, M, D) after the last block, and how many patches each stands for, (B, M); None where it is one."""
        network, prefix = self.network, self.network.config.prefix
        position, rotation = network.position, network._rotation(grid, x.device)
        sizes: Tensor | None = None
        places = None
        if isinstance(position, RotaryPosition):
            places = position.places(grid, prefix).float().to(x.device).expand(len(x), -1, -1)
        blocks: Any = self.blocks
        for block in blocks:
            read = network.config.read if network.lean and block is blocks[-1] else None
            seen = _Seen(sizes)
            x = block.gather(x, seen, rotation, read)
            fewer = min(self.count, (x.shape[1] - prefix) // 2)
            if read is None and fewer > 0:
                sizes = x.new_ones(x.shape[:2], dtype=torch.float32) if sizes is None else sizes
                where = destinations(seen.keys, prefix, fewer)
                mean = partial(weighted_mean, sizes=sizes, where=where, length=x.shape[1] - fewer)
                x = mean(x)
                if isinstance(position, RotaryPosition) and places is not None:
                    places = mean(places)
                    cos, sin = position.turned(places[:, None], network.config.dim // network.config.heads)
                    rotation = cos, sin
                sizes = summed(sizes[..., None], where, x.shape[1])[..., 0]
            x = block.process(x)
        return x, sizes

    def pool(self, x: Tensor, sizes: Tensor | None) -> Tensor:
        """`ViT.pool`, in which a token counts as the patches that it stands for."""
        network, config = self.network, self.network.config
        if sizes is None or config.pool != "map":
            return network.pool(x, None if sizes is None else sizes[:, config.prefix :])
        x = network.norm(x) if config.final_norm == "tokens" else x
        x = network.attn_pool(x, _bias(sizes, x.dtype))
        return network.fc_norm(x) if config.final_norm == "pooled" else x


def tokens_left(config: ViTConfig, count: int, blocks: int) -> int:
    """How many tokens there are after so many blocks."""
    patches = config.grid[0] * config.grid[1]
    for _ in range(blocks):
        patches -= min(count, patches // 2)
    return config.prefix + patches


def destinations(keys: Tensor, prefix: int, count: int) -> Tensor:
    """Where each token goes when `count` of them are merged: (B, N), numbers below N - count.

    `keys` (B, N, d). The order is that of the authors' code: first the `prefix` tokens, then what is left of the first
    set, then the second.
    """
    keys = F.normalize(keys.float(), dim=-1)
    N, device = keys.shape[1], keys.device
    first, second = slice(prefix + prefix % 2, None, 2), slice(prefix + 1 - prefix % 2, None, 2)
    nearness, partner = (keys[:, first] @ keys[:, second].transpose(1, 2)).max(-1)
    most = nearness.argsort(dim=1, descending=True, stable=True)[:, :count]
    goes = torch.zeros_like(nearness, dtype=torch.bool).scatter_(1, most, True)
    start = prefix + goes.shape[1] - count  # of the second set
    where = torch.arange(N, device=device).repeat(len(keys), 1)
    where[:, first] = torch.where(goes, start + partner, prefix - 1 + (~goes).cumsum(1))
    where[:, second] = torch.arange(start, N - count, device=device)
    return where


def weighted_mean(x: Tensor, sizes: Tensor, where: Tensor, length: int) -> Tensor:
    """Tokens (B, N, D) to (B, length, D): the mean of those that go to the same place, weighted by `sizes` (B, N)."""
    weights = sizes[..., None]
    return (summed(x * weights, where, length) / summed(weights, where, length)).to(x.dtype)


def summed(x: Tensor, where: Tensor, length: int) -> Tensor:
    """Tokens (B, N, D) to (B, length, D): the sum of those that go to the same place."""
    B, _, D = x.shape
    rows = where + length * torch.arange(B, device=x.device)[:, None]
    return x.new_zeros(B * length, D).index_add_(0, rows.flatten(), x.flatten(0, 1)).view(B, length, D)


@dataclass
class _Seen:
    """What goes to a block's attention in the place of a mask, and what it has seen there: one for each call, so that
    several threads may predict at once.
    """

    sizes: Tensor | None
    keys: Tensor = torch.empty(0)
    """(B, N, d), averaged over heads."""


def _watched(block: Block) -> Block:
    """The block with an attention that takes a `_Seen` for a mask."""
    twin = sharing(block)
    twin._modules["attn"] = attn = sharing(block.attn)
    attn.__dict__["attend"] = partial(_attend, block.attn.attend)
    return twin


def _attend(plain: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, seen: _Seen) -> Tensor:
    """`Attention.attend` in proportion to sizes."""
    seen.keys = k.mean(1)
    return plain(q, k, v, None if seen.sizes is None else _bias(seen.sizes, q.dtype))


def _bias(sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of keys, (B, 1, 1, N): exp makes a factor of it."""
    return sizes.log().to(dtype)[:, None, None]
