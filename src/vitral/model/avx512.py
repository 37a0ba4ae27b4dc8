"""Dense layers, GELU's way back and attention in bf16, on a processor with AVX512_BF16, by kernels of our own (C++).

oneDNN, which computes these in torch, reaches three quarters to nine tenths of what AMD's processors can do, less the
fewer rows there are, and attention has no kernel there whose way back is fast. `avx512.cpp` is compiled where it is
first asked for, in two or three seconds, and kept in the user's cache. Without a C++ compiler, and on other processors,
`ready` is False and torch computes everything.

Tensors are bf16 on a CPU and contiguous, unless it says otherwise; widths are multiples of 16 (`fits`).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from ctypes import POINTER, c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.folders import cache_folder

LANES, _PANEL, _CHUNK = 16, 64, 96  # as in the source
_NONE, _ERF, _TANH = 0, 1, 2
SOURCE = Path(__file__).with_name("avx512.cpp")
_FLAGS = (
    *("-std=c++17", "-O2", "-shared", "-fPIC", "-fopenmp", "-w"),
    *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mavx2", "-mfma"),
)


@cache
def ready() -> bool:
    """Whether this processor has the instructions, oneDNN no better ones (AMX), and what was compiled says what torch
    says.
    """
    if not _wanted():
        return False
    try:
        _library()
        return _agrees()
    except (OSError, AttributeError, subprocess.SubprocessError):
        return False


def fits(x: Tensor, *widths: int) -> bool:
    """Whether a tensor is one whose numbers can be read, and matrices are as wide as the kernels want them."""
    if type(x) not in (Tensor, nn.Parameter) or x.device.type != "cpu" or torch._C._len_torch_dispatch_stack():
        return False
    return not any(width % LANES for width in widths) and x.numel() > 0


def _wanted() -> bool:
    """Told by the processor's name, as `linear._mkl_is_slow`: there it was measured."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        about = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return False
    flags = next((line for line in about.splitlines() if line.startswith("flags")), "").split()
    return "AuthenticAMD" in about and "avx512_bf16" in flags and "amx_bf16" not in flags


@cache
def _library() -> Any:
    """What the source compiles to; `OSError` or `SubprocessError` where that fails."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++", "c++"))), None)
    if compiler is None:
        raise OSError("no C++ compiler")
    source = SOURCE.read_bytes()
    key = hashlib.sha256(b"\0".join((source, compiler.encode(), *map(str.encode, _FLAGS)))).hexdigest()[:16]
    kept = cache_folder("kernels") / f"avx512-{key}.so"
    with suppress(OSError):  # it is not there, or damaged
        return _loaded(kept)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        return _loaded(_compiled(compiler, kept.parent).replace(kept))
    except OSError:  # the cache cannot be written to
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            return _loaded(_compiled(compiler, Path(folder)))


def _compiled(compiler: str, folder: Path) -> Path:
    handle, name = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        command = [compiler, *_FLAGS, str(SOURCE), "-o", name]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
    except subprocess.SubprocessError:
        Path(name).unlink()
        raise
    return Path(name)


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, c_long) for name in ("pictures", "heads", "queries", "keys", "width")),
        *((name, c_long * 3) for name in ("q", "k", "v", "out")),
        *(("scale", c_float), ("threads", c_int)),
    )


def _loaded(path: Path) -> Any:
    library = ctypes.CDLL(str(path))
    p, n = c_void_p, c_long
    signatures = {
        "pack_weight": (p, c_int, n, n, p, c_int),
        "pack_transposed_weight": (p, c_int, n, n, p, c_int),
        "dense": (p, p, p, p, p, p, n, n, n, n, c_int),
        "weight_gradient": (p, p, p, p, p, p, n, n, n, c_int),
        "layer_norm": (p, p, p, p, n, n, c_float, c_int),
        "gelu_backward": (p, p, p, n, n, c_int),
        "attention": (POINTER(_Attention), p, p, p, p, p),
        "attention_backward": (POINTER(_Attention), p, p, p, p, p, p, p, p, p),
    }
    for name, kinds in signatures.items():
        getattr(library, name).argtypes = kinds
        getattr(library, name).restype = None
    library.weight_gradient_rows.argtypes, library.weight_gradient_rows.restype = (n,), n
    return library


def pack(weight: Tensor) -> Tensor:
    """A weight (out, in), bf16 or fp32, laid out in bf16 for `dense` to compute x Wᵀ."""
    return _packed(_library().pack_weight, weight, *weight.shape)


def pack_transposed(weight: Tensor) -> Tensor:
    """The same for g W."""
    return _packed(_library().pack_transposed_weight, weight, weight.shape[1], weight.shape[0])


def _packed(how: Any, weight: Tensor, columns: int, depth: int) -> Tensor:
    packed = weight.new_empty(-(-columns // _PANEL) * _PANEL * depth, dtype=torch.bfloat16)
    fp32 = weight.dtype == torch.float32
    how(weight.data_ptr(), fp32, *weight.shape, packed.data_ptr(), torch.get_num_threads())
    return packed


def dense(x: Tensor, packed: Tensor, columns: int, bias: Tensor | None = None, other: Tensor | None = None) -> Tensor:
    """x (…, depth) times what is packed, + `bias` (columns), + `other` (…, columns): (…, columns)."""
    out = x.new_empty(*x.shape[:-1], columns)
    _dense(x, packed, bias, other, None, out, _NONE)
    return out


def dense_gelu(x: Tensor, packed: Tensor, columns: int, bias: Tensor | None, tanh: bool) -> Tensor:
    """GELU of what `dense` computes."""
    out = x.new_empty(*x.shape[:-1], columns)
    _dense(x, packed, bias, None, None, out, _TANH if tanh else _ERF)
    return out


def dense_then_gelu(x: Tensor, packed: Tensor, columns: int, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
    """What `dense` computes, and GELU of that."""
    before, out = (x.new_empty(*x.shape[:-1], columns) for _ in range(2))
    _dense(x, packed, bias, None, before, out, _TANH if tanh else _ERF)
    return before, out


def _dense(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    before: Tensor | None,
    out: Tensor,
    activation: int,
) -> None:
    depth, columns = x.shape[-1], out.shape[-1]
    places = (x.data_ptr(), packed.data_ptr(), *map(_place, (bias, other, before)), out.data_ptr())
    _library().dense(*places, x.numel() // depth, columns, depth, activation, torch.get_num_threads())


def _place(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def weight_gradient(gradient: Tensor, x: Tensor, bias: bool) -> tuple[Tensor, Tensor | None]:
    """In fp32 the gradient of a layer's weight (out, in), and that of its bias (out) if wanted, from x (…, in) and
    the gradient (…, out) of what the layer says.
    """
    columns, depth = gradient.shape[-1], x.shape[-1]
    rows, library = x.numel() // depth, _library()
    at_once = library.weight_gradient_rows(rows)
    left = x.new_empty(-(-columns // _CHUNK) * _CHUNK * at_once)
    right = x.new_empty(-(-depth // _PANEL) * _PANEL * at_once)
    weight = x.new_empty(columns, depth, dtype=torch.float32)
    total = x.new_empty(columns, dtype=torch.float32) if bias else None
    places = (gradient.data_ptr(), x.data_ptr(), weight.data_ptr(), _place(total), left.data_ptr(), right.data_ptr())
    library.weight_gradient(*places, rows, columns, depth, torch.get_num_threads())
    return weight, total


def dense_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients that are wanted of x (…, in), the weight (out, in), bf16 or fp32, and the bias of a layer, from the
    `gradient` (…, out) of what it says.
    """
    of_x, of_weight, of_bias = wanted[:3]
    through = dense(gradient, pack_transposed(weight), weight.shape[1]) if of_x else None
    if not of_weight:
        return through, None, gradient.flatten(0, -2).float().sum(0) if of_bias else None
    return through, *weight_gradient(gradient, x, of_bias)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`F.layer_norm` of x (…, D) over its last dimension."""
    out, columns = torch.empty_like(x), x.shape[-1]
    places = (each.data_ptr() for each in (x, weight, bias, out))
    _library().layer_norm(*places, x.numel() // columns, columns, eps, torch.get_num_threads())
    return out


def gelu_backward(gradient: Tensor, x: Tensor, tanh: bool) -> Tensor:
    """The gradient of x from that of GELU(x)."""
    out = torch.empty_like(x)
    places = (gradient.data_ptr(), x.data_ptr(), out.data_ptr())
    _library().gelu_backward(*places, x.numel(), _TANH if tanh else _ERF, torch.get_num_threads())
    return out


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, lse: bool = False) -> tuple[Tensor, Tensor | None]:
    """softmax(q kᵀ · scale) v of q (B, H, queries, d), k and v (B, H, keys, d), whose last dimension alone need be
    contiguous: (B, H, queries, d), where heads of one token lie side by side; and for `attention_backward` the
    logarithms to base 2 (B, H, queries) of the sums over keys.
    """
    B, H, queries, d = q.shape
    out = q.new_empty(B, queries, H, d).transpose(1, 2)
    sums = q.new_empty(B, H, queries, dtype=torch.float32) if lse else None
    places = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), _place(sums))
    _library().attention(_shapes(q, k, v, out, scale), *places)
    return out, sums


def attention_backward(qkv: Tensor, out: Tensor, gradient: Tensor, lse: Tensor, scale: float) -> Tensor:
    """The gradient of qkv (B, N, 3, H, d) from that of `out` (B, N, H, d), what `attention` says of them."""
    found = torch.empty_like(qkv)
    q, k, v = _heads(qkv)
    places = (each.data_ptr() for each in (q, k, v, out, gradient, lse, *_heads(found)))
    _library().attention_backward(_shapes(q, k, v, out.transpose(1, 2), scale), *places)
    return found


def _heads(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
    return q, k, v


def _shapes(q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float) -> _Attention:
    (B, H, queries, d), keys = q.shape, k.shape[2]
    strides = ((c_long * 3)(*each.stride()[:3]) for each in (q, k, v, out))
    return _Attention(B, H, queries, keys, d, *strides, scale, torch.get_num_threads())


@torch.no_grad()
@torch.autocast("cpu", enabled=False)  # whoever asks may be under one
def _agrees() -> bool:
    """Whether small products and attention are what torch computes in fp32, to rounding."""
    generator = torch.Generator().manual_seed(0)
    x, weight, gradient = (torch.randn(n, 48, generator=generator).bfloat16() for n in (37, 48, 37))
    qkv = torch.randn(2, 21, 3, 2, 32, generator=generator).bfloat16()
    found = (
        dense(x, pack(weight), 48),
        dense(x, pack_transposed(weight), 48),
        weight_gradient(gradient, x, False)[0],
        attention(*_heads(qkv), 0.2)[0],
    )
    wide, tall, slope = x.float(), weight.float(), gradient.float()
    mixed = F.scaled_dot_product_attention(*_heads(qkv.float()), scale=0.2)
    wanted = (wide @ tall.T, wide @ tall, slope.T @ wide, mixed)
    return all(torch.allclose(a.float(), b, rtol=0.02, atol=0.05) for a, b in zip(found, wanted, strict=True))
