"""Networks that their user changed, which engines with kernels of their own would compute unchanged."""

from __future__ import annotations

from torch import nn

from vitral.errors import UsageError
from vitral.weights.in_memory import modification


def stepped_aside(network: nn.Module, engine: str, integers: bool) -> str:
    """Return a note if the network is not as its class is written, so that the module itself computes it; else "".

    Raises `UsageError` if an engine that does not know of the change was requested.
    """
    if engine in ("plain", "compiled") or not (changed := modification(network)):
        return ""
    if engine != "auto" or integers:
        wanted = "int8" if integers else f"engine {engine}"
        why = f"{changed}, which its kernels do not know of"
        raise UsageError(f"{wanted} cannot compute this network", why=why, hint="--engine plain")
    return f"{changed}: computed by the network itself, without faster engines"
