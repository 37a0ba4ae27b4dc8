"""Operators of a network, dispatched to the fastest available kernel.

Every function matches its counterpart in PyTorch up to rounding. It decides by device, dtype, autocast and grad mode if
a kernel applies, and never uses one under export, tracing or functorch.

    linear(x, layer)                layer(x), of a dense layer
    linear_part(x, layer, i, j)     layer(x)[..., i:j]
    linear_gelu(x, layer)           F.gelu(layer(x))
    attention(q, k, v, …)           F.scaled_dot_product_attention(q, k, v, …)
    patch_embed(x, conv)            conv(x).flatten(2).transpose(1, 2)
    residual_stream(x)              x, in the autocast dtype on a GPU

A module declares the function that it calls as its `backend`. `reference_ops(network)` sets the counterparts instead.
Layers are PyTorch's own classes, so that tools that look for `nn.Linear` by type find them. A kernel uses a layer's
weights without calling it only if the layer is `untouched`; otherwise the layer is called. This package imports no
network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from vitral.kernels import dense, fused, reference

__all__ = [
    "REFERENCE",
    "attention",
    "linear",
    "linear_gelu",
    "linear_part",
    "patch_embed",
    "reference_ops",
    "residual_stream",
    "untouched",
]


Linear = nn.Linear
"""The class of dense layers in whole modules that earlier versions pickled."""


def linear(x: Tensor, layer: nn.Module) -> Tensor:
    """`layer(x)` of a dense layer, x (…, in) to (…, out)."""
    if torch.compiler.is_compiling() or not untouched(layer, nn.Linear):
        y: Tensor = layer(x)
        return y
    return _product(layer)(x, layer.weight, layer.bias)


def linear_part(x: Tensor, layer: nn.Linear, start: int, stop: int) -> Tensor:
    """Outputs `start` to `stop` only, (…, stop - start), of a dense layer that is `untouched`."""
    return _product(layer)(x, layer.weight[start:stop], None if layer.bias is None else layer.bias[start:stop])


def _product(layer: nn.Linear) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """The function of x, weight and bias that computes a layer: `dense.linear`, or `F.linear` by `reference_ops`."""
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = vars(layer).get("backend", dense.linear)
    return product


def linear_gelu(x: Tensor, layer: nn.Module, approximate: str = "none") -> Tensor:
    """GELU of a dense layer, `F.gelu(layer(x))`, by erf ("none") or by its tanh approximation ("tanh")."""
    if _by_kernels(layer) and fused.supports_linear_gelu(x, layer.weight, layer.bias):
        return fused.linear_gelu(x, layer.weight, layer.bias, approximate == "tanh")
    return F.gelu(linear(x, layer), approximate=approximate)


def _by_kernels(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """True for a dense layer that is `untouched`, without `reference_ops`."""
    return untouched(layer, nn.Linear) and _product(layer) is dense.linear


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
    attention: reference.attention,
    patch_embed: reference.patch_embed,
}
"""Backend → its counterpart in PyTorch."""


def reference_ops(network: nn.Module) -> None:
    """Make a network use PyTorch's own operators: slower, and the reference that kernels are tested against."""
    module: Any
    for module in network.modules():
        if type(module) is nn.Linear:
            vars(module)["backend"] = F.linear  # read by `linear` and `linear_gelu`
        elif (backend := getattr(module, "backend", None)) in REFERENCE:
            module.backend = REFERENCE[backend]


Layer = TypeVar("Layer", bound=nn.Module)


def untouched(layer: nn.Module, kind: type[Layer]) -> TypeGuard[Layer]:
    """True if `layer` is exactly `kind`, with no hooks, no patched `forward` and no tensor subclass as a parameter."""
    if type(layer) is not kind or "forward" in vars(layer):
        return False
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    if any(hooks) or _has_any_global_hook():
        return False
    if torch.compiler.is_compiling():  # parameters are then stand-ins of another class
        return True
    if layer._compiled_call_impl is not None or kind.forward is not _FORWARD.get(kind, kind.forward):
        return False
    return all(type(one) in (Tensor, nn.Parameter, type(None)) for one in layer._parameters.values())


_FORWARD: dict[type[nn.Module], Callable[..., Tensor]] = {kind: kind.forward for kind in (nn.Linear, nn.Conv2d)}
"""`forward` of PyTorch's classes, which other libraries replace for all layers at once."""
