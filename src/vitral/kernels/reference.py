"""PyTorch's own operators with the signatures of backends: for `reference_ops`, and as fallback without a kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.kernels import random


def attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, *, scale: float
) -> Tensor:
    """softmax(q kᵀ · scale) v, by PyTorch's fused kernel or, where faster, by explicit matrix products."""
    if not explicit_is_faster(q, k) and not (dropout_p and random.current()):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, scale=scale)
    q, k, v = (q * scale).contiguous(), k.contiguous(), v.contiguous()  # otherwise each product makes its own copy
    scores = masked(q @ k.transpose(-2, -1), attn_mask)
    return random.dropout(scores.softmax(dim=-1), dropout_p, True) @ v


def explicit_is_faster(q: Tensor, k: Tensor) -> bool:
    """True for bf16 on a CPU and at most 2048 keys.

    There the fused backward is 3 to 6 times slower at the sequence lengths of images (docs/log/kernels.md). Longer
    sequences stay fused, since their scores would fill the memory.
    """
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and k.shape[-2] <= 2048


def masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Apply a mask to scores as `F.scaled_dot_product_attention` does: bool, or values to add."""
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


def patch_embed(x: Tensor, conv: nn.Module, features: bool = False) -> Tensor:
    """Tokens (B, rows × columns, D) of x (B, C, H, W), by a convolution."""
    tokens: Tensor = conv(x)
    return tokens.flatten(2).transpose(1, 2)
