"""Operators of a network, dispatched to the fastest available kernel.

Every function matches its counterpart in PyTorch up to rounding. It decides by device, dtype, autocast and grad mode if
a kernel applies, and never uses one under export, tracing or functorch.

    linear(x, weight, bias)         F.linear(x, weight, bias)
    linear_gelu(x, layer)           F.gelu(layer(x))
    attention(q, k, v, …)           F.scaled_dot_product_attention(q, k, v, …)
    patch_embed(x, conv)            conv(x).flatten(2).transpose(1, 2)
    residual_stream(x)              x, in the autocast dtype on a GPU

A module declares the function that it calls as its `backend`. `reference_ops(network)` sets the counterparts instead.
This package imports no network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from vitral.kernels import dense, fused, reference
from vitral.kernels.dense import linear

__all__ = [
    "REFERENCE",
    "Linear",
    "attention",
    "linear",
    "linear_gelu",
    "patch_embed",
    "reference_ops",
    "residual_stream",
    "untouched",
]


class Linear(nn.Linear):
    """`nn.Linear`: x Wᵀ + b for x (…, in)."""

    backend: Callable[[Tensor, Tensor, Tensor | None], Tensor] = staticmethod(linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.backend(x, self.weight, self.bias)

    def part(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Outputs `start` to `stop` only, (…, stop - start)."""
        return self.backend(x, self.weight[start:stop], None if self.bias is None else self.bias[start:stop])


def linear_gelu(x: Tensor, layer: nn.Module, approximate: str = "none") -> Tensor:
    """GELU of a dense layer, `F.gelu(layer(x))`, by erf ("none") or by its tanh approximation ("tanh")."""
    if _is_dense(layer) and fused.supports_linear_gelu(x, layer.weight, layer.bias):
        return fused.linear_gelu(x, layer.weight, layer.bias, approximate == "tanh")
    return F.gelu(layer(x), approximate=approximate)


def _is_dense(layer: nn.Module) -> TypeGuard[Linear]:
    """True for an unmodified `Linear`, whose weight a kernel may use without calling it."""
    return isinstance(layer, Linear) and layer.backend is linear and untouched(layer, Linear)


def attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, *, scale: float
) -> Tensor:
    """softmax(q kᵀ · scale) v, (B, H, queries, d), of q (B, H, queries, d), k and v (B, H, keys, d).

    `attn_mask` is bool, True where a key counts, or values to add to the scores. If q, k and v are the parts of one
    tensor, a kernel writes their gradients into one tensor, too.
    """
    if attn_mask is None and not dropout_p:
        if (qkv := fused.joined(q, k, v)) is not None and fused.supports_qkv_attention(qkv):
            return fused.qkv_attention(qkv, scale).unflatten(2, qkv.shape[3:]).transpose(1, 2)
        if reference.explicit_is_faster(q, k) and fused.supports_attention(q, k, v):
            return fused.attention(q, k, v, scale)
    return reference.attention(q, k, v, attn_mask, dropout_p, scale=scale)


def patch_embed(x: Tensor, conv: nn.Module, features: bool = False) -> Tensor:
    """Tokens (B, rows × columns, D) of x (B, C, H, W), by a convolution whose stride is its kernel size.

    Such a convolution is one matrix product. `features` is True for the output of a stem, whose memory layout suits a
    convolution on a CPU.
    """
    if isinstance(conv, nn.Conv2d) and untouched(conv, nn.Conv2d) and dense.supports_patches(x, conv, features):
        return dense.patches(x, conv)
    return reference.patch_embed(x, conv)


def residual_stream(x: Tensor) -> Tensor:
    """Cast tokens to the autocast dtype on a GPU; elsewhere return them unchanged."""
    if x.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        return x.to(torch.get_autocast_dtype("cuda"))
    return x


REFERENCE: dict[object, Callable[..., Tensor]] = {
    linear: F.linear,
    attention: reference.attention,
    patch_embed: reference.patch_embed,
}
"""Backend → its counterpart in PyTorch. `linear_gelu` follows its layer."""


def reference_ops(network: nn.Module) -> None:
    """Make a network use PyTorch's own operators: slower, and the reference that kernels are tested against."""
    module: Any
    for module in network.modules():
        if (backend := getattr(module, "backend", None)) in REFERENCE:
            module.backend = REFERENCE[backend]


def untouched(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """True if `layer` is exactly `kind`, with no hooks and no patched `forward`."""
    if type(layer) is not kind or "forward" in vars(layer):
        return False
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return not any(hooks) and not _has_any_global_hook()
