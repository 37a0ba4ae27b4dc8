"""Compile and load the C++ kernels of `cpu.cpp`."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from ctypes import POINTER, c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from vitral.digest import check, with_digest
from vitral.folders import cache_folder
from vitral.system import cpu_flags, is_amd

SOURCE = Path(__file__).with_name("cpu.cpp")
_FLAGS = (
    *("-std=c++17", "-O2", "-shared", "-fPIC", "-fopenmp", "-w"),
    *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mavx512vnni"),
    *("-mavx2", "-mfma"),
)


def is_supported() -> bool:
    """True for AMD CPUs with AVX512_BF16 and VNNI and without AMX, by name: the kernels were measured there."""
    flags = cpu_flags()
    return (
        sys.platform.startswith("linux")
        and is_amd()
        and {"avx512_bf16", "avx512_vnni"} <= flags
        and "amx_bf16" not in flags
    )


@cache
def load_library() -> Any:
    """Load the compiled library, from the cache if it is there; `OSError` or `SubprocessError` if compiling fails."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++", "c++"))), None)
    if compiler is None:
        raise OSError("no C++ compiler")
    source = SOURCE.read_bytes()
    key = hashlib.sha256(b"\0".join((source, compiler.encode(), *map(str.encode, _FLAGS)))).hexdigest()[:16]
    cached = cache_folder("kernels") / f"avx512-{key}.so"
    with suppress(OSError, ValueError):  # it is missing or damaged
        check(cached.read_bytes())
        return _loaded(cached)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        return _loaded(_compiled(compiler, cached.parent).replace(cached))
    except OSError:  # the cache is not writable
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            return _loaded(_compiled(compiler, Path(folder)))


def compile_note() -> str:
    """Note on the time that compiling took, if this process compiled the kernels; else an empty string."""
    return f"kernels for this CPU compiled in {_seconds[0]:.1f} s, cached" if _seconds else ""


_seconds: list[float] = []


def _compiled(compiler: str, folder: Path) -> Path:
    started = time.perf_counter()
    handle, name = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        command = [compiler, *_FLAGS, str(SOURCE), "-o", name]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
        Path(name).write_bytes(with_digest(Path(name).read_bytes()))  # a loader ignores bytes after the library
    except BaseException:
        Path(name).unlink()
        raise
    _seconds[:] = [time.perf_counter() - started]
    return Path(name)


class AttentionShapes(ctypes.Structure):
    _fields_ = (
        *((name, c_long) for name in ("images", "heads", "queries", "keys", "width")),
        *((name, c_long * 3) for name in ("q", "k", "v", "out")),
        *(("scale", c_float), ("threads", c_int)),
    )


class LayerStruct(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("packed", "bias", "start", "factor", "shift")),
        *((name, c_float) for name in ("inverse_scale", "zero_point")),
    )


class NormStruct(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("eps", c_float))


class BlockStruct(ctypes.Structure):
    _fields_ = (
        *((name, c_long) for name in ("width", "heads", "hidden", "activation")),
        ("scale", c_float),
        ("norms", NormStruct * 2),
        *((name, LayerStruct) for name in ("qkv", "proj", "fc1", "fc2")),
    )


def _loaded(path: Path) -> Any:
    library = ctypes.CDLL(str(path))
    p, n = c_void_p, c_long
    signatures = {
        "pack_weight": (p, c_int, n, n, p, c_int),
        "pack_transposed_weight": (p, c_int, n, n, p, c_int),
        "dense": (p, p, p, p, p, p, n, n, n, n, c_int),
        "dense_integers": (p, POINTER(LayerStruct), p, p, n, c_float, c_float, n, n, n, n, c_int),
        "weight_gradient": (p, p, p, p, p, p, n, n, n, c_int),
        "layer_norm": (p, p, p, p, n, n, c_float, c_int),
        "gelu_backward": (p, p, p, n, n, c_int),
        "attention": (POINTER(AttentionShapes), p, p, p, p, p),
        "attention_backward": (POINTER(AttentionShapes), p, p, p, p, p, p, p, p, p),
        "block_attention": (POINTER(BlockStruct), c_int, p, p, p, n, n, n, c_int),
        "block_mlp": (POINTER(BlockStruct), c_int, p, p, n, c_int),
        "patches": (p, p, p, p, n, n, n, n, n, n, n, c_int),
    }
    for name, kinds in signatures.items():
        getattr(library, name).argtypes = kinds
        getattr(library, name).restype = None
    library.weight_gradient_rows.argtypes, library.weight_gradient_rows.restype = (n,), n
    return library
