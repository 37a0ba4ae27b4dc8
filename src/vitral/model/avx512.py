"""Dense layers, GELU's way back and attention in bf16, on a processor with AVX512_BF16, by kernels of our own (C++),
and for predictions whole blocks, also with dense layers in integers.

oneDNN, which computes these in torch, reaches three quarters to nine tenths of what AMD's processors can do, less the
fewer rows there are, and attention has no kernel there whose way back is fast. `avx512.cpp` is compiled where it is
first asked for, in some seven seconds, and kept in the user's cache. Without a C++ compiler, and on other processors,
`ready` is False and torch computes everything.

Tensors are bf16 on a CPU and contiguous, unless it says otherwise, and as `serves` and `attends` want them: kernels see
nothing but pointers. Scores of attention may be up to 10⁸.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import POINTER, c_float, c_int, c_long, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit import is_tracing  # type: ignore[attr-defined]

from vitral.folders import cache_folder

LANES, _PANEL, _CHUNK = 16, 64, 96  # as in the source
_NONE, _ERF, _TANH = 0, 1, 2
SOURCE = Path(__file__).with_name("avx512.cpp")
_FLAGS = (
    *("-std=c++17", "-O2", "-shared", "-fPIC", "-fopenmp", "-w"),
    *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mavx512vnni"),
    *("-mavx2", "-mfma"),
)


def ready() -> bool:
    """Whether this processor has the instructions, oneDNN no better ones (AMX), and what was compiled says what torch
    says.
    """
    if not _tried.cache_info().currsize and torch._C._len_torch_dispatch_stack():
        return False  # whose tensors may have no numbers to try it with
    return _tried()


@cache
def _tried() -> bool:
    if not _wanted():
        return False
    try:
        _library()
        return _agrees()
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError):
        return False


def serves(x: Tensor, weight: Tensor, bias: Tensor | None = None, width: int | None = None) -> bool:
    """Whether `dense` and what belongs to it compute a layer with this weight (out, in), bf16 or fp32, of x (…, in);
    with `width`, of the numbers of x once they lie in rows as wide as that.
    """
    if not _whole(x, weight, bias) or weight.dtype not in (torch.bfloat16, torch.float32) or weight.ndim != 2:
        return False
    if (width or x.shape[-1]) != weight.shape[1] or not (bias is None or bias.shape == weight.shape[:1]):
        return False  # torch says what is wrong
    return x.numel() > 0 and _even(*weight.shape) and ready()


def attends(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `attention` is for these (B, H, tokens, d)."""
    if not _whole(q, k, v) or not q.dtype == k.dtype == v.dtype == torch.bfloat16 or not q.numel() or not k.numel():
        return False
    if k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        return False
    return all(x.stride(3) == 1 and x.stride(2) % 2 == 0 for x in (q, k, v)) and _even(q.shape[3]) and ready()


def norms(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `layer_norm` is for these."""
    if bias is None or not weight.dtype == bias.dtype == torch.bfloat16:
        return False
    return _whole(weight, bias) and _even(len(weight)) and ready()


def taken(x: Tensor, width: int, kind: torch.dtype = torch.bfloat16) -> Tensor:
    """x (…, width) as kernels read it, for networks that are laid out: nothing else knows how they lie. `RuntimeError`
    where it cannot be.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        why = "there are no gradients (torch.inference_mode, or no_grad)"
    elif not _whole(x) or not unwatched(x):
        why = "it cannot be traced, compiled, transformed or counted"
    elif x.dtype != kind or x.shape[-1] != width:
        why = f"got {x.dtype} {tuple(x.shape)}, want {kind} of width {width}"
    else:
        return x.contiguous()
    raise RuntimeError(f"a network that is laid out for this processor is for predictions: {why}")


def _whole(*tensors: Tensor | None) -> bool:
    """Whether these are tensors on a CPU, and no subclass of them, whose numbers may be elsewhere."""
    if torch.compiler.is_compiling():
        return False
    return all(x is None or (type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu") for x in tensors)


def _even(*widths: int) -> bool:
    return not any(width % LANES for width in widths)


def unwatched(*tensors: Tensor) -> bool:
    """Whether nobody follows what is computed at this moment who would not see these kernels, and the tensors have
    numbers. What is kept for the way back must not depend on it: it may be another answer there.
    """
    if torch.compiler.is_compiling() or is_tracing():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    return all(map(torch._C._has_storage, tensors))


def _wanted() -> bool:
    """Told by the processor's name, as `linear._mkl_is_slow`: there it was measured."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        about = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return False
    flags = next((line for line in about.splitlines() if line.startswith("flags")), "").split()
    return "AuthenticAMD" in about and {"avx512_bf16", "avx512_vnni"} <= {*flags} and "amx_bf16" not in flags


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


def told() -> str:
    """What to say where the kernels were compiled in this process, which takes seconds; else nothing."""
    return f"kernels for this processor were compiled first: {_seconds[0]:.1f} s, and are kept" if _seconds else ""


_seconds: list[float] = []


def _compiled(compiler: str, folder: Path) -> Path:
    started = time.perf_counter()
    handle, name = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        command = [compiler, *_FLAGS, str(SOURCE), "-o", name]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
    except BaseException:
        Path(name).unlink()
        raise
    _seconds[:] = [time.perf_counter() - started]
    return Path(name)


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, c_long) for name in ("pictures", "heads", "queries", "keys", "width")),
        *((name, c_long * 3) for name in ("q", "k", "v", "out")),
        *(("scale", c_float), ("threads", c_int)),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("packed", "bias", "start", "factor", "shift")),
        *((name, c_float) for name in ("finer", "zero")),
    )


class _Norm(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("eps", c_float))


class _Block(ctypes.Structure):
    _fields_ = (
        *((name, c_long) for name in ("width", "heads", "hidden", "activation")),
        ("scale", c_float),
        ("norms", _Norm * 2),
        *((name, _Layer) for name in ("qkv", "proj", "fc1", "fc2")),
    )


def _loaded(path: Path) -> Any:
    library = ctypes.CDLL(str(path))
    p, n = c_void_p, c_long
    signatures = {
        "pack_weight": (p, c_int, n, n, p, c_int),
        "pack_transposed_weight": (p, c_int, n, n, p, c_int),
        "dense": (p, p, p, p, p, p, n, n, n, n, c_int),
        "dense_integers": (p, POINTER(_Layer), p, p, n, c_float, c_float, n, n, n, n, c_int),
        "weight_gradient": (p, p, p, p, p, p, n, n, n, c_int),
        "layer_norm": (p, p, p, p, n, n, c_float, c_int),
        "gelu_backward": (p, p, p, n, n, c_int),
        "attention": (POINTER(_Attention), p, p, p, p, p),
        "attention_backward": (POINTER(_Attention), p, p, p, p, p, p, p, p, p),
        "block_gather": (POINTER(_Block), c_int, p, p, p, n, n, n, c_int),
        "block_process": (POINTER(_Block), c_int, p, p, n, c_int),
        "patches": (p, p, p, p, n, n, n, n, n, n, n, c_int),
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


@dataclass(frozen=True)
class Layer:
    """A dense layer of a network for predictions, laid out: in bf16, or by `integers` in these."""

    outputs: int
    inputs: int
    packed: Tensor
    bias: Tensor | None
    """(out), bf16."""
    start: Tensor | None = None
    """What sums begin with, (out) int32: what the zero point of what enters makes of them."""
    factor: Tensor | None = None
    """Of a sum, (out) fp32."""
    shift: Tensor | None = None
    """What is added then."""
    finer: float = 0.0
    zero: float = 0.0
    """x · finer + zero is the byte that stands for a number."""

    @property
    def described(self) -> _Layer:
        """For as long as this layer is there."""
        return _Layer(
            *map(_place, (self.packed, self.bias, self.start, self.factor, self.shift)), self.finer, self.zero
        )


def integers(weight: Tensor, steps: Tensor, bias: Tensor, step: float, zero: int) -> Layer:
    """A layer with an int8 weight (out, in), both multiples of 16, of `steps` (out), for bytes of `step` and `zero`."""
    start = (-zero * weight.sum(1)).int()
    packed = pack(weight.contiguous().view(torch.bfloat16))  # what lies as pairs may be fours of bytes
    shift = bias.float().contiguous()
    return Layer(len(weight), weight.shape[1], packed, None, start, steps * step, shift, 1 / step, float(zero))


def dense_integers(
    x: Tensor,
    layer: Layer,
    kind: torch.dtype,
    *,
    other: Tensor | None = None,
    gelu: str = "",
    then: tuple[float, int] = (1.0, 0),
) -> Tensor:
    """What a layer in `integers` says to x (…, in) uint8, after GELU if it is wanted ("none": by erf, or "tanh"),
    + `other` (…, out) fp32, as bf16, fp32 or uint8, of which `then` are step and zero: (…, out).
    """
    depth, columns = layer.inputs, layer.outputs
    out = x.new_empty(*x.shape[:-1], columns, dtype=kind)
    what = (_KINDS[kind], 1 / then[0], then[1], x.numel() // depth, columns, depth, _GELU[gelu])
    x = taken(x, depth, torch.uint8)
    other = None if other is None else taken(other, columns, torch.float32)
    places = (x.data_ptr(), layer.described, _place(other), out.data_ptr())
    _library().dense_integers(*places, *what, torch.get_num_threads())
    return out


_KINDS = {torch.bfloat16: 0, torch.float32: 1, torch.uint8: 2}
_GELU = {"": _NONE, "none": _ERF, "tanh": _TANH}


class Block:
    """A pre-norm block with GELU for predictions, without masks and rotations. With layers in `integers` its tokens are
    fp32, else bf16.
    """

    def __init__(
        self,
        heads: int,
        scale: float,
        tanh: bool,
        norms: Sequence[tuple[Tensor, Tensor, float]],
        layers: Sequence[Layer],
    ):
        """`norms` are weight, bias (bf16) and epsilon of two, `layers` qkv, proj, fc1 and fc2."""
        norms = [(weight.detach().clone(), bias.detach().clone(), eps) for weight, bias, eps in norms]
        self._made_of = heads, scale, tanh, norms, layers  # what it points to
        _, proj, fc1, _ = layers
        self.width, self.integers = proj.outputs, proj.start is not None
        self.kind = torch.float32 if self.integers else torch.bfloat16
        each = (_Norm * 2)(*(_Norm(weight.data_ptr(), bias.data_ptr(), eps) for weight, bias, eps in norms))
        sizes = self.width, heads, fc1.outputs, _TANH if tanh else _ERF
        self._block = _Block(*sizes, scale, each, *(layer.described for layer in layers))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy points to tensors of its own."""
        return Block, self._made_of

    def gather(self, x: Tensor, read: int | None) -> Tensor:
        """Equation 2 of x (B, N, D): (B, N, D), or only the first `read` tokens of it."""
        if x.ndim != 3:
            raise RuntimeError(f"tokens are (B, N, D), got {tuple(x.shape)}")
        x = taken(x, self.width, self.kind)
        other = x if read is None else x[:, :read].contiguous()
        out = torch.empty_like(other)
        places = (x.data_ptr(), other.data_ptr(), out.data_ptr())
        sizes = (*x.shape[:2], other.shape[1])
        _library().block_gather(self._block, self.integers, *places, *sizes, torch.get_num_threads())
        return out

    def process(self, x: Tensor) -> Tensor:
        """Equation 3 of x (…, D)."""
        x = taken(x, self.width, self.kind)
        out, rows = torch.empty_like(x), x.numel() // self.width
        places = (x.data_ptr(), out.data_ptr())
        _library().block_process(self._block, self.integers, *places, rows, torch.get_num_threads())
        return out


def patches(images: Tensor, size: tuple[int, int], layer: Layer) -> Tensor:
    """Equation 1, `x_p E`, of images (B, C, rows · p, columns · q): (B, rows · columns, D)."""
    (B, C, H, W), (p, q) = images.shape, size
    if C * p * q != layer.inputs or H % p or W % q:
        raise RuntimeError(f"no patches of {p}×{q} with {layer.inputs} numbers in {tuple(images.shape)}")
    out = images.new_empty(B, (H // p) * (W // q), layer.outputs)
    places = (images.data_ptr(), layer.packed.data_ptr(), _place(layer.bias), out.data_ptr())
    _library().patches(*places, B, C, H // p, W // q, p, q, layer.outputs, torch.get_num_threads())
    return out


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
        return through, None, gradient.reshape(-1, gradient.shape[-1]).float().sum(0) if of_bias else None
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
    """Whether small products, attention, a norm, patches and blocks are what torch computes in fp32, to rounding."""
    generator = torch.Generator("cpu").manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").bfloat16()

    x, weight, gradient, bias, qkv = drawn(37, 80), drawn(80, 80), drawn(37, 80), drawn(80), drawn(2, 21, 3, 2, 32)
    wide, tall, slope, shift = x.float(), weight.float(), gradient.float(), bias.float()
    found = (
        dense(x, pack(weight), 80, bias),
        dense(x, pack_transposed(tall), 80),
        dense_gelu(x, pack(weight), 80, bias, False),
        weight_gradient(gradient, x, False)[0],
        attention(*_heads(qkv), 0.2)[0],
        layer_norm(x, bias, bias, 1e-6),
        patches(x.view(1, 1, 37, 80), (1, 80), Layer(80, 80, pack(weight), bias)),
    )
    wanted = (
        wide @ tall.T + shift,
        wide @ tall,
        F.gelu(wide @ tall.T + shift),
        slope.T @ wide,
        F.scaled_dot_product_attention(*_heads(qkv.float()), scale=0.2),
        F.layer_norm(wide, (80,), shift, shift, 1e-6),
        (wide @ tall.T + shift)[None],
    )
    close = all(torch.allclose(a.float(), b, rtol=0.02, atol=0.1) for a, b in zip(found, wanted, strict=True))
    return close and _blocks_agree(x[None], (weight / 9).bfloat16(), bias)


def _blocks_agree(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Whether a block of tokens x (1, N, D), all of whose layers have one weight (D, D), is what torch computes: in
    bf16 to rounding, in integers to a few of their steps.
    """
    D, heads = len(weight), len(weight) // LANES
    wide, tall, shift = x.float(), weight.float(), bias.float()

    def enter(y: Tensor) -> Tensor:
        return F.linear(F.layer_norm(y, (D,), shift, shift, 1e-6), tall, shift)

    mixed = enter(wide).unflatten(2, (heads, -1)).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(mixed, mixed, mixed, scale=0.2).transpose(1, 2).flatten(2)
    middle = wide + F.linear(mixed, tall, shift)
    wanted = middle + F.linear(F.gelu(enter(middle)), tall, shift)

    def near(layer: Callable[[int], Layer], within: float) -> bool:
        norms = [(bias, bias, 1e-6)] * 2
        block = Block(heads, 0.2, False, norms, [layer(3), layer(1), layer(1), layer(1)])
        found = block.process(block.gather(x.to(block.kind), None))
        return torch.allclose(found.float(), wanted, rtol=0.02, atol=within)

    def whole(times: int) -> Layer:
        steps = (tall.abs().amax(1) / 127).repeat(times)
        return integers((tall.repeat(times, 1) / steps[:, None]).round().char(), steps, shift.repeat(times), 0.08, 128)

    halves = near(lambda times: Layer(times * D, D, pack(weight.repeat(times, 1)), bias.repeat(times)), 0.1)
    return halves and near(whole, 0.3)
