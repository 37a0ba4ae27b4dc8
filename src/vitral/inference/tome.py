"""Token merging (ToMe) for inference: "Token Merging: Your ViT But Faster", arXiv 2210.09461.

    faster = merged(network, 8)       # 8 tokens fewer after the attention of each block
    logits = faster(images)

Between attention and MLP, each block splits the patches alternately into two sets. Each token of the first set is
matched to the token of the second set with the most similar key, averaged over heads, by cosine. The `count` most
similar pairs are merged into their mean, weighted by size, the number of patches that a token represents. Attention
weights tokens by size (log(size) is added to the scores), and so does pooling. Class token, distillation token and
registers are never merged. Nothing is trained: the weights are those of the network.

With rotary positions, which the paper does not cover, keys are compared after rotation, and a merged token gets the
mean position of its patches.
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
from vitral.inference.packed import shallow_copy
from vitral.model.config import ViTConfig
from vitral.model.position import Grid, RotaryPosition
from vitral.model.vit import Block, ViT


def merged(network: nn.Module, count: int) -> Merged:
    """A network with the same weights that merges `count` tokens in each block.

    `network` may be packed or quantized, and stays as it is. `UsageError` for a network without tokens, and for a
    negative count.
    """
    if not isinstance(network, ViT):
        raise UsageError("only a ViT has tokens to merge", hint="leave --merge out")
    if network.config.rope is not None:
        why = "a merged token has a fractional position, and these rotary positions are integers"
        raise UsageError("tokens of this network cannot be merged", why=why, hint="leave --merge out")
    if count < 0:
        raise UsageError(f"{count} tokens cannot be merged", hint="--merge 8, or 0 for none")
    return Merged(network, count)


class Merged(nn.Module):
    """Token-merging form of a network: images (B, C, H, W) to logits (B, K), without masks."""

    def __init__(self, network: ViT, count: int):
        super().__init__()
        self.network, self.count = network, count
        blocks: Any = network.blocks
        self.blocks = nn.ModuleList(_with_merging_attention(block) for block in blocks)
        self.train(network.training)  # nn.Module starts in training mode, which callers may read and propagate

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, K)."""
        x, sizes = self.transform(*self.network.embed(images))
        return self.network.classify(self.pool(x, sizes))

    def transform(self, x: Tensor, grid: Grid) -> tuple[Tensor, Tensor | None]:
        """Tokens (B, M, D) after the last block, and their sizes in patches (B, M); None if nothing was merged."""
        network, prefix = self.network, self.network.config.prefix
        position, rotation = network.position, network.rotations(grid, x.device)[0]
        sizes: Tensor | None = None
        places = None
        if isinstance(position, RotaryPosition):
            places = position.coordinates(grid, prefix).float().to(x.device).expand(len(x), -1, -1)
        blocks: Any = self.blocks
        for block in blocks:
            num_queries = network.config.num_queries if network.prune_last_block and block is blocks[-1] else None
            state = _MergeState(sizes)
            x = block.attention_branch(x, state, rotation, num_queries)
            fewer = min(self.count, (x.shape[1] - prefix) // 2)
            if num_queries is None and fewer > 0:
                sizes = x.new_ones(x.shape[:2], dtype=torch.float32) if sizes is None else sizes
                where = destinations(state.keys, prefix, fewer)
                mean = partial(weighted_mean, sizes=sizes, where=where, length=x.shape[1] - fewer)
                x = mean(x)
                if isinstance(position, RotaryPosition) and places is not None:
                    places = mean(places)
                    cos, sin = position.cos_sin(places[:, None], network.config.dim // network.config.heads)
                    rotation = cos, sin
                sizes = summed(sizes[..., None], where, x.shape[1])[..., 0]
            x = block.mlp_branch(x)
        return x, sizes

    def pool(self, x: Tensor, sizes: Tensor | None) -> Tensor:
        """`ViT.pool`, weighted by the sizes of tokens."""
        network, config = self.network, self.network.config
        if sizes is None or config.pool != "map":
            return network.pool(x, None if sizes is None else sizes[:, config.prefix :])
        x = network.norm(x) if config.final_norm == "tokens" else x
        bias = _bias(sizes, x.dtype)
        if not config.pool_prefix:
            bias[..., : config.prefix] = -torch.inf
        x = network.attn_pool(x, bias)
        return network.fc_norm(x) if config.final_norm == "pooled" else x


def tokens_left(config: ViTConfig, count: int, blocks: int) -> int:
    """Number of tokens after `blocks` blocks."""
    patches = config.grid[0] * config.grid[1]
    for _ in range(blocks):
        patches -= min(count, patches // 2)
    return config.prefix + patches


def destinations(keys: Tensor, prefix: int, count: int) -> Tensor:
    """New index of each token after merging `count` of them: (B, N), below N - count.

    `keys` (B, N, d). The order is that of the authors' code: the `prefix` tokens, the remaining tokens of the first
    set, the second set.
    """
    keys = F.normalize(keys.float(), dim=-1)
    N, device = keys.shape[1], keys.device
    first, second = slice(prefix + prefix % 2, None, 2), slice(prefix + 1 - prefix % 2, None, 2)
    similarity, partner = (keys[:, first] @ keys[:, second].transpose(1, 2)).max(-1)
    most = similarity.argsort(dim=1, descending=True, stable=True)[:, :count]
    is_merged = torch.zeros_like(similarity, dtype=torch.bool).scatter_(1, most, True)
    start = prefix + is_merged.shape[1] - count  # new index of the second set
    where = torch.arange(N, device=device).repeat(len(keys), 1)
    where[:, first] = torch.where(is_merged, start + partner, prefix - 1 + (~is_merged).cumsum(1))
    where[:, second] = torch.arange(start, N - count, device=device)
    return where


def weighted_mean(x: Tensor, sizes: Tensor, where: Tensor, length: int) -> Tensor:
    """Tokens (B, N, D) to (B, length, D): the mean by new index, weighted by `sizes` (B, N)."""
    weights = sizes[..., None]
    return (summed(x * weights, where, length) / summed(weights, where, length)).to(x.dtype)


def summed(x: Tensor, where: Tensor, length: int) -> Tensor:
    """Tokens (B, N, D) to (B, length, D): the sum by new index."""
    B, _, D = x.shape
    rows = where + length * torch.arange(B, device=x.device)[:, None]
    return x.new_zeros(B * length, D).index_add_(0, rows.flatten(), x.flatten(0, 1)).view(B, length, D)


@dataclass
class _MergeState:
    """Sizes for a block's attention, and the keys that it records, passed in place of a mask.

    Each call has its own state, so that threads can predict concurrently.
    """

    sizes: Tensor | None
    keys: Tensor = torch.empty(0)
    """(B, N, d), averaged over heads."""


def _with_merging_attention(block: Block) -> Block:
    """Shallow copy of a block, whose attention takes a `_MergeState` in place of a mask."""
    twin = shallow_copy(block)
    twin._modules["attn"] = attn = shallow_copy(block.attn)
    attn.backend = partial(_attention, block.attn.backend)
    return twin


def _attention(
    backend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: _MergeState,
    dropout_p: float = 0.0,
    *,
    scale: float,
) -> Tensor:
    """Proportional attention by another backend; records the keys."""
    attn_mask.keys = k.mean(1)
    bias = None if attn_mask.sizes is None else _bias(attn_mask.sizes, q.dtype)
    return backend(q, k, v, attn_mask=bias, dropout_p=dropout_p, scale=scale)


def _bias(sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """log(size), (B, 1, 1, N), to add to scores, so that softmax weights keys by size."""
    return sizes.log().to(dtype)[:, None, None]
