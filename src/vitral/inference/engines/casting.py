"""A copy of a network in another dtype."""

from __future__ import annotations

import copy

import torch
from torch import nn

from vitral.model import Network


def dtype_of(network: nn.Module) -> torch.dtype:
    """Return the dtype of the first parameter."""
    return next(network.parameters()).dtype


def is_of_dtype(network: nn.Module, dtype: torch.dtype) -> bool:
    """True if all parameters and buffers have this dtype, without those of integers."""
    floats = (tensor for tensor in (*network.parameters(), *network.buffers()) if tensor.is_floating_point())
    return all(tensor.dtype == dtype for tensor in floats)


def cast_copy(network: Network, dtype: torch.dtype) -> Network:
    """Return a copy of a network in another dtype, with its hooks; the network itself if it has this dtype."""
    if is_of_dtype(network, dtype):
        return network
    memo = hooks_of(network)
    for tensor in (*network.parameters(), *network.buffers()):
        cast = tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach().clone()
        # A plain deep copy would hold another one in the old dtype meanwhile.
        memo[id(tensor)] = nn.Parameter(cast, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else cast
    return copy.deepcopy(network, memo)


def hooks_of(network: nn.Module) -> dict[int, object]:
    """Return a memo with which `copy.deepcopy` shares hooks: what they keep is for their owner to see."""
    hooks = [(*one._forward_hooks.values(), *one._forward_pre_hooks.values()) for one in network.modules()]
    return {id(hook): hook for each in hooks for hook in each}
