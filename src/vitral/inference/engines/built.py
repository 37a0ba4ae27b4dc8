"""A module that an engine built, kept while the network stays the same; and networks that their user changed, which
engines with kernels of their own would compute unchanged.
"""

from __future__ import annotations

import operator

import torch
import xxhash
from torch import Tensor, nn

from vitral.errors import UsageError
from vitral.model import Foreign, Network
from vitral.model.edited import edited
from vitral.model.settings import changed_setting, settings_of
from vitral.model.watched import foreign_hooks
from vitral.weights.in_memory import modification


class Held:
    """The network of a predictor, and the fact that others may hold it, too: only then can it change between calls."""

    def __init__(self, network: Network, lent: bool = True):
        self.network, self.lent = network, lent


class Snapshot:
    """The tensors of a network at one moment, with their versions and a digest of their values.

    A version counts changes by torch's operators. `.data`, fused optimizers and numpy views write without counting.
    """

    def __init__(self, source: nn.Module):
        self.tensors = tensors_of(source)
        self.versions, self.digest = _versions(self.tensors), digest_of(self.tensors)
        self._counts = [0 if t.is_inference() else t._version for t in self.tensors]
        self._kinds = [(t.device, t.dtype) for t in self.tensors]

    def is_same(self, other: Snapshot) -> bool:
        """True if the tensors are the same objects at the same places, with the same values."""
        return self._has_tensors_of(other) and self.versions == other.versions and self.digest == other.digest

    def has_values_of(self, other: Snapshot) -> bool:
        """True if the values are the same; a move to another device or dtype is no change."""
        if self._kinds == other._kinds:
            return self.digest == other.digest
        return self._has_tensors_of(other) and self._counts == other._counts

    def _has_tensors_of(self, other: Snapshot) -> bool:
        return len(self.tensors) == len(other.tensors) and all(map(operator.is_, self.tensors, other.tensors))


class Built:
    """A module built by an engine, with the network's tensors that it was built from."""

    def __init__(self, snapshot: Snapshot, network: nn.Module):
        self.snapshot, self.network = snapshot, network


def _versions(tensors: list[Tensor]) -> list[tuple[int, int]]:
    return [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors]


def digest_of(tensors: list[Tensor]) -> bytes:
    """Return a digest of all values, at the speed of memory: 128 bits by XXH3 on a CPU, 64 by a sum on a GPU."""
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        values = tensor.detach()
        if values.is_meta:  # it has none
            continue
        if values.device.type == "cpu":
            digest.update(values.contiguous().flatten().view(torch.uint8).numpy().data)
        else:
            digest.update(_weighted_sum(values).to_bytes(8, "little", signed=True))
    return digest.digest()


def _weighted_sum(values: Tensor) -> int:
    """Sum of the values as integers, each times an odd number that depends on its place, modulo 2⁶⁴."""
    bits = values.contiguous().flatten().view(_INTEGERS[values.element_size()]).long()
    places = torch.arange(len(bits), device=bits.device) * _ODD
    return int((bits * (places | 1)).sum())


_ODD = 0x1E3779B97F4A7C15
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a value → integers of that size."""


def structure_of(network: nn.Module) -> list[object]:
    """Return what tells that a module was replaced, or got another setting, dtype, hook, method or backend, since an
    earlier call.
    """
    found, modules = list[object](), [network]
    while modules:
        module = modules.pop()
        hooks = foreign_hooks(module) if module._forward_hooks or module._forward_pre_hooks else ()
        dtypes = {tensor.dtype for tensor in module._parameters.values() if tensor is not None}
        own = vars(module)
        found += [type(module), settings_of(module), own.get("backend"), own.get("observer"), dtypes, *hooks]
        modules += [m for m in module._modules.values() if m is not None]
    return found


def tensors_of(network: nn.Module) -> list[Tensor]:
    """Return the current parameters and buffers; a caller may replace any of them, and any module."""
    found, modules = list[Tensor](), [network]
    while modules:
        module = modules.pop()
        found += [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
        modules += [m for m in module._modules.values() if m is not None]
    return found


def stepped_aside(network: Network, engine: str, integers: bool) -> str:
    """Return a note if the network is not as its class is written, so that the module itself computes it; else "".

    Raises `UsageError` if an engine that does not know of the change was requested.
    """
    if engine in ("plain", "compiled"):
        return ""
    own = isinstance(network, Foreign) and engine == "auto" and not integers  # the module computes itself anyway
    if not (changed := edited() or modification(network) or ("" if own else changed_setting(network))):
        return ""
    if engine != "auto" or integers:
        wanted = "int8" if integers else f"engine {engine}"
        why = f"{changed}, which its kernels do not know of"
        raise UsageError(f"{wanted} cannot compute this network", why=why, hint="--engine plain")
    return f"{changed}: computed by the network itself, without faster engines"
