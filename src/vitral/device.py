"""Choose device and precision, and derive seeds. No other module decides these."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vitral.errors import UsageError
from vitral.system import cpu_flags, cpu_name, excluded_cpu_flags, memory_bytes
from vitral.wording import count

Precision = Literal["fp32", "bf16"]


# Below this width, casting to bf16 costs a CPU more than its matrix units save (docs/log/training-speed.md).
BF16_MIN_DIM_ON_CPU = 16


@dataclass(frozen=True)
class Machine:
    """The device and the precision that a network computes with."""

    device: torch.device
    precision: Precision
    reason: str
    caution: str = ""
    """A drawback of a precision that the user requested; else empty."""
    planned_bytes: int = 0
    """Memory of a device that is only planned for; 0 for one that is here."""

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context for forward passes: matrix products in `precision`, the rest in fp32."""
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def with_precision(self, precision: str, dim: int | None = None) -> Machine:
        """Return the same device at another precision, chosen as in `choose`."""
        return _at_precision(self.device, precision, dim)

    @property
    def hardware(self) -> str:
        """The name of the GPU or CPU."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return "Apple GPU" if self.device.type == "mps" else cpu_name()

    @property
    def name(self) -> str:
        """The name of the GPU, or of the CPU with its number of threads."""
        if self.device.type != "cpu":
            return self.hardware
        threads = torch.get_num_threads()
        return f"{self.hardware}, {threads} {'thread' if threads == 1 else 'threads'}"


def choose(device: str = "auto", precision: str = "auto", dim: int | None = None) -> Machine:
    """Choose the device and the precision.

    `auto` takes a GPU if there is one, and bf16 if the device has instructions for it and the network is wide enough
    (`dim`) to gain. fp16 is never chosen: a CPU is about 100 times slower at it. Raises `UsageError` for a missing
    device and for an unsupported precision.
    """
    return _at_precision(_device(device), precision, dim)


def _at_precision(target: torch.device, precision: str, dim: int | None) -> Machine:
    if precision not in ("auto", "fp32", "bf16"):
        why = "fp16 needs loss scaling, and a CPU is about 100 times slower at it" if precision == "fp16" else None
        raise UsageError(
            f"unknown precision '{precision}'",
            why=why,
            hint="--precision bf16, fp32 or auto; int8 is for predictions, after vitral quantize",
        )
    if precision == "fp32":
        return Machine(target, "fp32", "requested")
    if precision == "bf16":
        slow = target.type == "cpu" and bool(cpu_flags()) and not has_bf16(target)  # only Linux lists CPU flags
        caution = "bf16 is slower than fp32 on this CPU, which has no instructions for it" * slow
        return Machine(target, "bf16", "; ".join(filter(None, ("requested", caution))), caution)
    unit = "CPU" if target.type == "cpu" else "GPU"
    if not has_bf16(target):
        excluded = target.type == "cpu" and not excluded_cpu_flags().isdisjoint(_BF16_FLAGS)
        why = "ATEN_CPU_CAPABILITY or ONEDNN_MAX_CPU_ISA excludes the CPU's bf16 instructions"
        return Machine(target, "fp32", why if excluded else f"the {unit} does not support the 16-bit format bf16")
    if target.type == "cpu" and dim == 0:
        return Machine(target, "fp32", "a network of another library may lose accuracy in bf16")
    if target.type == "cpu" and dim is not None and dim < BF16_MIN_DIM_ON_CPU:
        return Machine(target, "fp32", f"at width {dim} casting costs more than bf16 gains")
    return Machine(target, "bf16", f"the {unit} supports the 16-bit format bf16")


def _device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"unknown device '{name}'", hint="--device auto, cpu, cuda or mps") from None
    missing = (device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()) or (
        device.type == "mps" and not torch.backends.mps.is_available()
    )
    if missing or device.type not in ("cpu", "cuda", "mps"):
        raise UsageError(f"no device '{name}' on this machine", why=_why_missing(device), hint="--device auto")
    return device


def _why_missing(device: torch.device) -> str | None:
    """Say if torch or the card is missing, for a GPU by CUDA."""
    if device.type != "cuda":
        return None
    if not (torch.version.cuda or torch.version.hip):
        return f"torch {torch.__version__} is built without CUDA: pip install torch from an index that has it"
    if seen := torch.cuda.device_count():
        return f"torch sees {count(seen, 'GPU')}, from cuda:0 on"
    return f"torch {torch.__version__} is built for GPUs and sees none: nvidia-smi lists those that the driver knows"


def has_bf16(device: torch.device) -> bool:
    """True if the device has instructions for bf16 products; without them a CPU is much slower than in fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        return not cpu_flags().isdisjoint(_BF16_FLAGS)
    return False


_BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Disable an enclosing `Machine.autocast`."""
    if not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


@contextlib.contextmanager
def plain_modes() -> Iterator[None]:
    """Compute as a new program does: with gradients, without autocast, in fp32 and on the CPU by default.

    For functions that users call: the caller may be inside `torch.inference_mode` or `torch.autocast`, or have set
    another default device, or another default dtype, which holds for all threads.
    """
    dtype = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda", "mps"):
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if dtype != torch.float32:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, dtype)
        stack.enter_context(cpu_by_default())
        yield


def cpu_by_default() -> AbstractContextManager[object]:
    """Make new tensors on the CPU where no device is named, also if the caller has set another default device."""
    return contextlib.nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


@contextlib.contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Compute with so many CPU threads inside the block; None leaves them as they are."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def synchronize(device: torch.device | str) -> None:
    """Wait until the device has finished all queued work."""
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()


def widest(device: torch.device) -> torch.dtype:
    """Return float64, or float32 for an Apple GPU (mps), which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def to_float64(x: Tensor) -> Tensor:
    """Convert to float64, on the CPU if `x` is on an Apple GPU (mps), which has no float64."""
    return (x.cpu() if x.device.type == "mps" else x).double()


def dot_float64(x: Tensor, y: Tensor) -> Tensor:
    """Return Σ x y over the last axis, (…,) float64 on the CPU; computed on the device unless it is mps."""
    return (to_float64(x) * to_float64(y)).sum(-1).cpu()


def total_bytes(device: torch.device) -> int:
    """Return the memory of a GPU in bytes; for other devices, the memory that this process may use."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else memory_bytes()


def out_of_memory(error: Exception) -> bool:
    """True if torch raises `error` when a device runs out of memory."""
    in_message = any(words in str(error) for words in _NO_MEMORY)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or in_message


_NO_MEMORY = ("not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED")
"""Phrases in a plain `RuntimeError` for a CPU, an Apple GPU or a CUDA library without memory."""


def derive_seed(*parts: int) -> int:
    """Derive one seed from several numbers, such as seed, epoch and step: randomness depends only on the position."""
    # SeedSequence treats (1,) and (1, 0) as equal; a leading count distinguishes them.
    words = [len(parts), *(part & 0xFFFFFFFF for part in parts)]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0]) >> 1


def seed_everything(*parts: int) -> None:
    """Seed every generator that torch uses, on all devices, from `derive_seed(*parts)`."""
    torch.manual_seed(derive_seed(*parts))


@contextlib.contextmanager
def global_generators() -> Iterator[None]:
    """Let the block seed torch's global generators, and restore their state afterwards.

    Raises `UsageError` if another thread of this process is inside such a block: both would draw from the same
    generators, and neither would get the numbers of its seed.
    """
    if not _generators.acquire(blocking=False):
        raise UsageError(
            "another training runs in this process",
            why="both would draw from torch's global random generators, so that neither could be repeated",
            hint="one after the other, or a process for each",
        )
    try:
        gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        _generators.release()


_generators = threading.RLock()


@contextlib.contextmanager
def seeded(*parts: int) -> Iterator[None]:
    """Seed torch's CPU generator from `parts` inside the block, and restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(*parts))
        yield
