"""Tell if someone watches or changes a part of a network, which then computes all that PyTorch would.

The head of a network with a class token reads that token only, so the last block computes no other one
(`ViT.prune_last_block`). A hook or a part of another library may read the other tokens, or mix them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.module import _has_any_global_hook


def pooled_queries(network: Any) -> int | None:
    """Return the number of leading tokens that the last block of a ViT computes; None for all.

    These are the tokens that the head reads, unless someone watches the block or the final norm.
    """
    wanted: int | None = network.config.num_queries
    if wanted is None or not network.prune_last_block or is_watched(network.blocks[-1]):
        return None
    return None if network.config.final_norm == "tokens" and is_watched(network.norm) else wanted


def is_watched(module: nn.Module) -> bool:
    """True if hooks, observers, methods or parts that are not vitral's may see or change what a module computes.

    Hooks of vitral do not count: it sets `prune_last_block` to False for those that read all tokens.
    """
    if _has_foreign_global_hook() or _is_changed(module):
        return True
    return any(is_watched(part) for part in module._modules.values() if part is not None)


def _has_foreign_global_hook() -> bool:
    """True if someone watches all modules; torch's counter of FLOPs counts what runs, and changes nothing."""
    if not _has_any_global_hook():
        return False
    return any(_is_foreign(hook) for kind in _GLOBAL for hook in getattr(torch_module, kind).values())


_GLOBAL = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


def _is_changed(part: nn.Module) -> bool:
    """As `is_watched`, without the parts inside."""
    kind = type(part)
    if kind is not nn.Linear and kind is not nn.LayerNorm and not kind.__module__.startswith(_SILENT):
        return True
    hooks = part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks
    if torch.compiler.is_compiling():  # torch.compile traces this function, but no loop over attributes
        return "forward" in vars(part) or any(hooks)
    if any(_is_foreign(hook) for of_kind in hooks for hook in of_kind.values()):
        return True
    own = vars(part)
    for name in own.keys() - _USUAL:
        declared = name == "observer" or isinstance(getattr(kind, name, None), FunctionType)
        if declared and own[name] is not None and _is_foreign(own[name]):
            return True
    return False


_USUAL = frozenset(vars(nn.Module()))
"""Attributes of every module."""

_SILENT = ("vitral.", "torch.distributed.", "torch.utils.module_tracker")
"""Modules whose hooks and parts need no other tokens: FSDP gathers weights, a tracker notes names."""


def _is_foreign(function: Callable[..., object]) -> bool:
    return not _home(function).startswith(_SILENT)


def foreign_hooks(module: nn.Module) -> list[Callable[..., object]]:
    """List the forward hooks of a module, without those that only observe, such as vitral's in another thread."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return [hook for hook in hooks if _home(hook) not in _OBSERVERS and not _home(hook).startswith("vitral.")]


_OBSERVERS = {"transformers.utils.output_capturing"}  # stay after `output_attentions=True`, and change nothing


def _home(function: object) -> str:
    """Name of the module of a function, or of the one that a partial calls."""
    return str(getattr(getattr(function, "func", function), "__module__", ""))
