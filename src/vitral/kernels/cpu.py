"""C++ kernels for CPUs with AVX512_BF16: dense layers, GELU backward and attention in bf16.

For prediction there are also fused blocks, with dense layers in bf16 or int8.

oneDNN, which PyTorch calls for these, reaches 75 to 90% of the peak of AMD CPUs, less with few rows, and has no
attention kernel with a fast backward. `cpu.cpp` is compiled at first use, in about seven seconds, and cached. Without a
C++ compiler, and on other CPUs, `ready` is False and PyTorch computes everything.

Unless noted otherwise, tensors are contiguous, bf16, on a CPU, and have passed `supports_linear` or
`supports_attention`: kernels see pointers only. Attention scores may be up to 10⁸.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from ctypes import c_long
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit import is_tracing  # type: ignore[attr-defined]

from vitral.kernels.cpu_library import AttentionShapes, BlockStruct, LayerStruct, NormStruct, is_supported, load_library

LANES, _PANEL, _CHUNK = 16, 64, 96  # as in cpu.cpp
_NONE, _ERF, _TANH = 0, 1, 2


def ready() -> bool:
    """True if the CPU has the instructions, no AMX for oneDNN, and the compiled kernels pass the self-test."""
    if not _self_test.cache_info().currsize and torch._C._len_torch_dispatch_stack():
        return False  # tensors of a dispatch mode may have no values to test with
    return _self_test()


@cache
def _self_test() -> bool:
    if not is_supported():
        return False
    try:
        load_library()
        return _matches_torch()
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError):
        return False


def supports_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, width: int | None = None) -> bool:
    """True if `dense` and its backward support x (…, in) and a weight (out, in), bf16 or fp32.

    With `width`, x will be reshaped to rows of that width first.
    """
    if not _are_plain_cpu(x, weight, bias) or weight.dtype not in (torch.bfloat16, torch.float32) or weight.ndim != 2:
        return False
    if (width or x.shape[-1]) != weight.shape[1] or not (bias is None or bias.shape == weight.shape[:1]):
        return False  # torch raises the error
    return x.numel() > 0 and _are_aligned(*weight.shape) and ready()


def supports_attention(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True if `attention` supports these q, k and v (B, H, tokens, d)."""
    if not _are_plain_cpu(q, k, v) or not q.dtype == k.dtype == v.dtype == torch.bfloat16:
        return False
    if not q.numel() or not k.numel():
        return False
    if k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        return False
    return all(x.stride(3) == 1 and x.stride(2) % 2 == 0 for x in (q, k, v)) and _are_aligned(q.shape[3]) and ready()


def supports_qkv(qkv: Tensor) -> bool:
    """True if `attention` supports the q, k and v of a contiguous (B, N, 3, H, d), checked without creating views."""
    if not _are_plain_cpu(qkv) or qkv.dtype != torch.bfloat16:
        return False
    return qkv.numel() > 0 and _are_aligned(qkv.shape[4]) and ready()


def supports_layer_norm(weight: Tensor, bias: Tensor | None) -> bool:
    """True if `layer_norm` supports this weight and bias."""
    if bias is None or not weight.dtype == bias.dtype == torch.bfloat16:
        return False
    return _are_plain_cpu(weight, bias) and _are_aligned(len(weight)) and ready()


def as_input(x: Tensor, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Check and return the input x (…, width) of a packed network, contiguous; `RuntimeError` if unsupported.

    A packed network has no fallback to PyTorch, since only these kernels know its layout.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        why = "there are no gradients (torch.inference_mode, or no_grad)"
    elif not _are_plain_cpu(x) or not runs_eagerly(x):
        why = "it cannot be traced, compiled, transformed or counted"
    elif x.dtype != dtype or x.shape[-1] != width:
        why = f"got {x.dtype} {tuple(x.shape)}, want {dtype} of width {width}"
    else:
        return x.contiguous()
    raise RuntimeError(f"a network packed for this CPU is for prediction only: {why}")


def _are_plain_cpu(*tensors: Tensor | None) -> bool:
    """True for tensors on a CPU, not of a subclass, whose values may be elsewhere, and outside torch.compile."""
    if torch.compiler.is_compiling():
        return False
    return all(x is None or (type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu") for x in tensors)


def _are_aligned(*widths: int) -> bool:
    """True if all widths are multiples of the vector width."""
    return not any(width % LANES for width in widths)


def runs_eagerly(*tensors: Tensor) -> bool:
    """True outside compilation, tracing, dispatch modes and functorch, none of which see these kernels.

    The tensors must have storage, too. The result may differ between forward and backward, so tensors saved for
    backward must not depend on it.
    """
    if torch.compiler.is_compiling() or is_tracing():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    return all(map(torch._C._has_storage, tensors))


def pack(weight: Tensor) -> Tensor:
    """Pack a weight (out, in), bf16 or fp32, into the bf16 layout with which `dense` computes x Wᵀ."""
    return _packed(load_library().pack_weight, weight, *weight.shape)


def pack_transposed(weight: Tensor) -> Tensor:
    """Pack a weight (out, in) into the layout with which `dense` computes g W."""
    return _packed(load_library().pack_transposed_weight, weight, weight.shape[1], weight.shape[0])


def _packed(kernel: Any, weight: Tensor, columns: int, depth: int) -> Tensor:
    packed = weight.new_empty(-(-columns // _PANEL) * _PANEL * depth, dtype=torch.bfloat16)
    fp32 = weight.dtype == torch.float32
    kernel(weight.data_ptr(), fp32, *weight.shape, packed.data_ptr(), torch.get_num_threads())
    return packed


def dense(x: Tensor, packed: Tensor, columns: int, bias: Tensor | None = None, other: Tensor | None = None) -> Tensor:
    """x (…, depth) times a packed weight, + `bias` (columns), + `other` (…, columns): (…, columns)."""
    out = x.new_empty(*x.shape[:-1], columns)
    _dense(x, packed, bias, other, None, out, _NONE)
    return out


def dense_gelu(x: Tensor, packed: Tensor, columns: int, bias: Tensor | None, tanh: bool) -> Tensor:
    """GELU of the output of `dense`."""
    out = x.new_empty(*x.shape[:-1], columns)
    _dense(x, packed, bias, None, None, out, _TANH if tanh else _ERF)
    return out


def dense_then_gelu(x: Tensor, packed: Tensor, columns: int, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
    """The output of `dense`, and its GELU."""
    hidden, out = (x.new_empty(*x.shape[:-1], columns) for _ in range(2))
    _dense(x, packed, bias, None, hidden, out, _TANH if tanh else _ERF)
    return hidden, out


def _dense(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    hidden: Tensor | None,
    out: Tensor,
    activation: int,
) -> None:
    depth, columns = x.shape[-1], out.shape[-1]
    pointers = (x.data_ptr(), packed.data_ptr(), *map(_pointer, (bias, other, hidden)), out.data_ptr())
    load_library().dense(*pointers, x.numel() // depth, columns, depth, activation, torch.get_num_threads())


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@dataclass(frozen=True)
class Layer:
    """A packed dense layer for prediction, in bf16 or, from `int8_layer`, in int8."""

    outputs: int
    inputs: int
    packed: Tensor
    bias: Tensor | None
    """(out), bf16."""
    start: Tensor | None = None
    """Initial value of the sums, (out) int32: the contribution of the input's zero point."""
    factor: Tensor | None = None
    """Scale of the sums, (out) fp32."""
    shift: Tensor | None = None
    """Bias, added after the scale, (out) fp32."""
    inverse_scale: float = 0.0
    zero_point: float = 0.0
    """Quantized input: x · inverse_scale + zero_point, uint8."""

    @property
    def as_struct(self) -> LayerStruct:
        """C struct of pointers, valid as long as this layer exists."""
        pointers = map(_pointer, (self.packed, self.bias, self.start, self.factor, self.shift))
        return LayerStruct(*pointers, self.inverse_scale, self.zero_point)


def int8_layer(weight: Tensor, steps: Tensor, bias: Tensor, step: float, zero: int) -> Layer:
    """A layer with an int8 weight (out, in) of scales `steps` (out), for uint8 inputs of scale `step` and zero point
    `zero`. Both sides are multiples of 16.
    """
    start = (-zero * weight.sum(1)).int()
    packed = pack(weight.contiguous().view(torch.bfloat16))  # a pair of bf16 has the layout of four bytes
    shift = bias.float().contiguous()
    return Layer(len(weight), weight.shape[1], packed, None, start, steps * step, shift, 1 / step, float(zero))


def dense_int8(
    x: Tensor,
    layer: Layer,
    dtype: torch.dtype,
    *,
    other: Tensor | None = None,
    gelu: str = "",
    quantization: tuple[float, int] = (1.0, 0),
) -> Tensor:
    """Output (…, out) of an `int8_layer` for x (…, in) uint8, in bf16, fp32 or uint8.

    With `gelu` ("none": by erf, or "tanh") its GELU; with `other` (…, out) fp32 their sum. `quantization` is scale and
    zero point of a uint8 output.
    """
    depth, columns = layer.inputs, layer.outputs
    out = x.new_empty(*x.shape[:-1], columns, dtype=dtype)
    scale, zero_point = quantization
    options = (_DTYPES[dtype], 1 / scale, zero_point, x.numel() // depth, columns, depth, _GELU[gelu])
    x = as_input(x, depth, torch.uint8)
    other = None if other is None else as_input(other, columns, torch.float32)
    pointers = (x.data_ptr(), layer.as_struct, _pointer(other), out.data_ptr())
    load_library().dense_integers(*pointers, *options, torch.get_num_threads())
    return out


_DTYPES = {torch.bfloat16: 0, torch.float32: 1, torch.uint8: 2}
_GELU = {"": _NONE, "none": _ERF, "tanh": _TANH}


class Block:
    """A fused pre-norm block with GELU for prediction, without masks and rotations.

    Tokens are fp32 with int8 layers, otherwise bf16.
    """

    def __init__(
        self,
        heads: int,
        scale: float,
        tanh: bool,
        norms: Sequence[tuple[Tensor, Tensor, float]],
        layers: Sequence[Layer],
    ):
        """`norms` are weight, bias (bf16) and epsilon of both norms; `layers` are qkv, proj, fc1 and fc2."""
        norms = [(weight.detach().clone(), bias.detach().clone(), eps) for weight, bias, eps in norms]
        self._arguments = heads, scale, tanh, norms, layers  # keeps alive the memory that the struct points to
        _, proj, fc1, _ = layers
        self.width, self.int8 = proj.outputs, proj.start is not None
        self.dtype = torch.float32 if self.int8 else torch.bfloat16
        each = (NormStruct * 2)(*(NormStruct(weight.data_ptr(), bias.data_ptr(), eps) for weight, bias, eps in norms))
        sizes = self.width, heads, fc1.outputs, _TANH if tanh else _ERF
        self._block = BlockStruct(*sizes, scale, each, *(layer.as_struct for layer in layers))

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild copies, so that their pointers refer to their own tensors."""
        return Block, self._arguments

    def attention_branch(self, x: Tensor, num_queries: int | None) -> Tensor:
        """Equation 2 of x (B, N, D): (B, N, D), or its first `num_queries` tokens only."""
        if x.ndim != 3:
            raise RuntimeError(f"tokens are (B, N, D), got {tuple(x.shape)}")
        x = as_input(x, self.width, self.dtype)
        residual = x if num_queries is None else x[:, :num_queries].contiguous()
        out = torch.empty_like(residual)
        pointers = (x.data_ptr(), residual.data_ptr(), out.data_ptr())
        sizes = (*x.shape[:2], residual.shape[1])
        load_library().block_attention(self._block, self.int8, *pointers, *sizes, torch.get_num_threads())
        return out

    def mlp_branch(self, x: Tensor) -> Tensor:
        """Equation 3 of x (…, D)."""
        x = as_input(x, self.width, self.dtype)
        out, rows = torch.empty_like(x), x.numel() // self.width
        pointers = (x.data_ptr(), out.data_ptr())
        load_library().block_mlp(self._block, self.int8, *pointers, rows, torch.get_num_threads())
        return out


def patches(images: Tensor, size: tuple[int, int], layer: Layer) -> Tensor:
    """Equation 1, `x_p E`, of images (B, C, rows · p, columns · q): (B, rows · columns, D)."""
    (B, C, H, W), (p, q) = images.shape, size
    if C * p * q != layer.inputs or H % p or W % q:
        raise RuntimeError(f"no patches of {p}×{q} with {layer.inputs} values in {tuple(images.shape)}")
    out = images.new_empty(B, (H // p) * (W // q), layer.outputs)
    pointers = (images.data_ptr(), layer.packed.data_ptr(), _pointer(layer.bias), out.data_ptr())
    load_library().patches(*pointers, B, C, H // p, W // q, p, q, layer.outputs, torch.get_num_threads())
    return out


def weight_gradient(gradient: Tensor, x: Tensor, bias: bool) -> tuple[Tensor, Tensor | None]:
    """Gradients, in fp32, of a weight (out, in) and, with `bias`, of a bias (out), from the gradient of the output (…,
    out)."""
    columns, depth = gradient.shape[-1], x.shape[-1]
    rows, library = x.numel() // depth, load_library()
    packed_rows = library.weight_gradient_rows(rows)
    left = x.new_empty(-(-columns // _CHUNK) * _CHUNK * packed_rows)
    right = x.new_empty(-(-depth // _PANEL) * _PANEL * packed_rows)
    weight = x.new_empty(columns, depth, dtype=torch.float32)
    total = x.new_empty(columns, dtype=torch.float32) if bias else None
    outputs = (weight.data_ptr(), _pointer(total))
    pointers = (gradient.data_ptr(), x.data_ptr(), *outputs, left.data_ptr(), right.data_ptr())
    library.weight_gradient(*pointers, rows, columns, depth, torch.get_num_threads())
    return weight, total


def dense_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, needs_grad: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients, where `needs_grad`, of x (…, in), weight (out, in) and bias, from the gradient of the output (…,
    out)."""
    of_x, of_weight, of_bias = needs_grad[:3]
    grad_x = dense(gradient, pack_transposed(weight), weight.shape[1]) if of_x else None
    if not of_weight:
        return grad_x, None, gradient.reshape(-1, gradient.shape[-1]).float().sum(0) if of_bias else None
    return grad_x, *weight_gradient(gradient, x, of_bias)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`F.layer_norm` of x (…, D) over its last dimension."""
    out, columns = torch.empty_like(x), x.shape[-1]
    pointers = (each.data_ptr() for each in (x, weight, bias, out))
    load_library().layer_norm(*pointers, x.numel() // columns, columns, eps, torch.get_num_threads())
    return out


def gelu_backward(gradient: Tensor, x: Tensor, tanh: bool) -> Tensor:
    """Gradient of x from the gradient of GELU(x)."""
    out = torch.empty_like(x)
    pointers = (gradient.data_ptr(), x.data_ptr(), out.data_ptr())
    load_library().gelu_backward(*pointers, x.numel(), _TANH if tanh else _ERF, torch.get_num_threads())
    return out


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, lse: bool = False) -> tuple[Tensor, Tensor | None]:
    """softmax(q kᵀ · scale) v, (B, H, queries, d), of q (B, H, queries, d), k and v (B, H, keys, d).

    Only the last dimension of q, k and v must be contiguous. In the memory of the result, heads of a token are
    adjacent. With `lse` also the base-2 logarithm of each query's sum over keys, (B, H, queries), for
    `attention_backward`.
    """
    B, H, queries, d = q.shape
    out = q.new_empty(B, queries, H, d).transpose(1, 2)
    sums = q.new_empty(B, H, queries, dtype=torch.float32) if lse else None
    pointers = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), _pointer(sums))
    load_library().attention(_shapes(q, k, v, out, scale), *pointers)
    return out, sums


def attention_backward(qkv: Tensor, out: Tensor, gradient: Tensor, lse: Tensor, scale: float) -> Tensor:
    """Gradient of qkv (B, N, 3, H, d) from that of `out` (B, N, H, d), the output of `attention`."""
    result = torch.empty_like(qkv)
    q, k, v = _heads(qkv)
    pointers = (each.data_ptr() for each in (q, k, v, out, gradient, lse, *_heads(result)))
    load_library().attention_backward(_shapes(q, k, v, out.transpose(1, 2), scale), *pointers)
    return result


def _heads(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
    return q, k, v


def _shapes(q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float) -> AttentionShapes:
    (B, H, queries, d), keys = q.shape, k.shape[2]
    strides = ((c_long * 3)(*each.stride()[:3]) for each in (q, k, v, out))
    return AttentionShapes(B, H, queries, keys, d, *strides, scale, torch.get_num_threads())


@torch.no_grad()
@torch.autocast("cpu", enabled=False)  # the caller may be under one
def _matches_torch() -> bool:
    """True if small products, attention, a norm, patches and blocks match torch in fp32, up to rounding."""
    generator = torch.Generator("cpu").manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").bfloat16()

    x, weight, gradient, bias, qkv = randn(37, 80), randn(80, 80), randn(37, 80), randn(80), randn(2, 21, 3, 2, 32)
    x32, weight32, gradient32, bias32 = x.float(), weight.float(), gradient.float(), bias.float()
    results = (
        dense(x, pack(weight), 80, bias),
        dense(x, pack_transposed(weight32), 80),
        dense_gelu(x, pack(weight), 80, bias, False),
        weight_gradient(gradient, x, False)[0],
        attention(*_heads(qkv), 0.2)[0],
        layer_norm(x, bias, bias, 1e-6),
        patches(x.view(1, 1, 37, 80), (1, 80), Layer(80, 80, pack(weight), bias)),
    )
    expected = (
        x32 @ weight32.T + bias32,
        x32 @ weight32,
        F.gelu(x32 @ weight32.T + bias32),
        gradient32.T @ x32,
        F.scaled_dot_product_attention(*_heads(qkv.float()), scale=0.2),
        F.layer_norm(x32, (80,), bias32, bias32, 1e-6),
        (x32 @ weight32.T + bias32)[None],
    )
    close = all(torch.allclose(a.float(), b, rtol=0.02, atol=0.1) for a, b in zip(results, expected, strict=True))
    return close and _block_matches_torch(x[None], (weight / 9).bfloat16(), bias)


def _block_matches_torch(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """True if a block with a single weight (D, D) matches torch: in bf16 up to rounding, in int8 up to a few steps."""
    D, heads = len(weight), len(weight) // LANES
    x32, weight32, bias32 = x.float(), weight.float(), bias.float()

    def norm_linear(y: Tensor) -> Tensor:
        return F.linear(F.layer_norm(y, (D,), bias32, bias32, 1e-6), weight32, bias32)

    mixed = norm_linear(x32).unflatten(2, (heads, -1)).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(mixed, mixed, mixed, scale=0.2).transpose(1, 2).flatten(2)
    middle = x32 + F.linear(mixed, weight32, bias32)
    expected = middle + F.linear(F.gelu(norm_linear(middle)), weight32, bias32)

    def close(layer: Callable[[int], Layer], within: float) -> bool:
        norms = [(bias, bias, 1e-6)] * 2
        block = Block(heads, 0.2, False, norms, [layer(3), layer(1), layer(1), layer(1)])
        result = block.mlp_branch(block.attention_branch(x.to(block.dtype), None))
        return torch.allclose(result.float(), expected, rtol=0.02, atol=within)

    def bf16(times: int) -> Layer:
        return Layer(times * D, D, pack(weight.repeat(times, 1)), bias.repeat(times))

    def int8(times: int) -> Layer:
        steps = (weight32.abs().amax(1) / 127).repeat(times)
        quantized = (weight32.repeat(times, 1) / steps[:, None]).round().char()
        return int8_layer(quantized, steps, bias32.repeat(times), 0.08, 128)

    return close(bf16, 0.1) and close(int8, 0.3)
