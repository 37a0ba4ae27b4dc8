"""Replace the head of a network."""

from __future__ import annotations

from torch import nn

from vitral.errors import UsageError


def reset_head(network: nn.Module, name: str, features: int, classes: int, bias: float) -> None:
    """Replace a head by a new one of zeros, with `classes` outputs on the device of the network; 0 removes it."""
    if classes < 0:
        raise UsageError("classes cannot be negative")
    if not classes:
        network._modules.pop(name, None)
        return
    first = next(network.parameters())
    head = nn.Linear(features, classes, device=first.device, dtype=first.dtype)
    nn.init.zeros_(head.weight)
    nn.init.constant_(head.bias, bias)
    setattr(network, name, head)
