"""A module that an engine built, kept while the network stays the same; and networks that their user changed, which
engines with kernels of their own would compute unchanged.
"""

from __future__ import annotations

import operator

from torch import Tensor, nn

from vitral.errors import UsageError
from vitral.model.edited import edited
from vitral.model.watched import foreign_hooks
from vitral.weights.in_memory import modification


class Built:
    """A module built by an engine, with the tensors that it was built from and their versions."""

    def __init__(self, tensors: list[Tensor], network: nn.Module):
        self.tensors, self.versions, self.network = tensors, _versions(tensors), network

    def is_current(self, tensors: list[Tensor]) -> bool:
        """True if these are the same tensors, unchanged."""
        same = len(tensors) == len(self.tensors) and all(map(operator.is_, tensors, self.tensors))
        return same and _versions(tensors) == self.versions


def stamps_of(tensors: list[Tensor]) -> list[tuple[int, int]]:
    """Return what tells that a tensor was replaced or written to; a move to another device or dtype is neither."""
    return [(id(t), 0 if t.is_inference() else t._version) for t in tensors]


def _versions(tensors: list[Tensor]) -> list[tuple[int, int]]:
    return [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors]


def structure_of(network: nn.Module) -> list[object]:
    """Return what tells that a module was replaced, or got a hook, a method or a backend of its own, since an earlier
    call.
    """
    found, modules = list[object](), [network]
    while modules:
        module = modules.pop()
        own = vars(module)
        hooks = foreign_hooks(module) if module._forward_hooks or module._forward_pre_hooks else ()
        found += [type(module), len(own), own.get("backend"), *hooks]
        modules += [m for m in module._modules.values() if m is not None]
    return found


def tensors_of(network: nn.Module) -> list[Tensor]:
    """Return the current parameters and buffers; a caller may replace any of them, and any module.

    This runs at every call, so it avoids torch's own iterators, which take nearly twice as long.
    """
    found, modules = list[Tensor](), [network]
    while modules:
        module = modules.pop()
        found += [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
        modules += [m for m in module._modules.values() if m is not None]
    return found


def stepped_aside(network: nn.Module, engine: str, integers: bool) -> str:
    """Return a note if the network is not as its class is written, so that the module itself computes it; else "".

    Raises `UsageError` if an engine that does not know of the change was requested.
    """
    if engine in ("plain", "compiled") or not (changed := edited() or modification(network)):
        return ""
    if engine != "auto" or integers:
        wanted = "int8" if integers else f"engine {engine}"
        why = f"{changed}, which its kernels do not know of"
        raise UsageError(f"{wanted} cannot compute this network", why=why, hint="--engine plain")
    return f"{changed}: computed by the network itself, without faster engines"
