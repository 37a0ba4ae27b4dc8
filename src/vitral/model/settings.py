"""Settings of a network: attributes of its modules that are neither tensors nor parts, such as a norm's epsilon.

A file has tensors and a configuration, so a setting that was changed on a module has no place in it. Here a network is
compared with one newly built from its configuration.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitral.errors import UsageError
from vitral.kernels import REFERENCE, Linear
from vitral.model.decoder import EncoderDecoder
from vitral.model.foreign import Foreign
from vitral.model.registry import ModelConfig, Network, network

SWITCHES = ("checkpointing", "any_size", "prune_last_block", "fp32_residual")
"""Settings of a network that change how it computes and not its results; a copy of it keeps them."""
_NO_SETTINGS = frozenset((*vars(nn.Module()), "cache", "observer"))
"""Attributes that every module has, or that change in use, and not what is computed."""
_PLAIN = frozenset((bool, int, float, str, bytes, type(None), torch.dtype, torch.device))


def settings_of(part: object) -> dict[str, object]:
    """Return name → value of the settings of one module, as plain values that `==` compares."""
    own = vars(part) if hasattr(part, "__dict__") else {}
    return {name: plain(one) for name, one in own.items() if name not in _NO_SETTINGS and not _is_table(one)}


def _is_table(value: object) -> bool:
    return isinstance(value, Tensor) and (value.numel() != 1 or value.is_meta)


def plain(value: object) -> Any:
    """Return a value that is equal for objects with the same content: functions by their code, objects of vitral by
    their settings, objects of other libraries by their class.
    """
    if type(value) in _PLAIN or isinstance(value, bool | int | float | str | bytes | type):
        return value
    if isinstance(value, np.generic | Tensor):
        return value.item()
    if isinstance(value, tuple | list):
        return tuple(map(plain, value))
    if isinstance(value, set | frozenset):
        return frozenset(map(plain, value))
    if isinstance(value, Mapping):
        return {plain(key): plain(one) for key, one in value.items()}
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, value.tobytes()
    if isinstance(value, functools.partial):
        return "partial", plain(value.func), plain(value.args), plain(value.keywords)
    if callable(value):
        return getattr(value, "__code__", None) or getattr(value, "__qualname__", type(value))
    if type(value).__module__.partition(".")[0] == "vitral":
        return type(value), settings_of(value)
    return type(value)


def changed_setting(model: Network, config: ModelConfig | None = None) -> str:
    """Describe the first part or setting that differs from a network newly built from `config` (default: its own), such
    as "'blocks.0.norm1.eps' is 0.5, not 1e-06"; empty if there is none.
    """
    fresh = _fresh(config or model.config)
    parts: dict[str, nn.Module] = dict(model.named_modules())
    for name in (*parts, *(name for name in fresh if name not in parts)):
        if name not in fresh:
            return f"'{name}' is no part of such a network"
        if name not in parts:
            return f"'{name}' is missing"
        kind, settings = fresh[name]
        part = parts[name]
        if type(part) is not kind and not (kind is Linear and type(part) is nn.Linear):
            return f"'{name or 'the network'}' is {type(part).__name__}, not {kind.__name__}"
        if found := _difference(part, settings, _SEPARATE.get(name, ())):
            return f"'{name}.{found[0]}' is {found[1]}" if name else f"'{found[0]}' is {found[1]}"
    return ""


_SEPARATE = {"": (*SWITCHES, "config"), "encoder": SWITCHES, "head": ("out_features",)}
"""Part → settings that are no difference: a head of other outputs is found by `check_head`."""


def _difference(part: nn.Module, fresh: Mapping[str, object], separate: Sequence[str]) -> tuple[str, str] | None:
    """Return the name of the first setting that differs, and both values as text; `separate` settings may differ."""
    own = settings_of(part)
    for name in {**fresh, **own}:
        if name in separate or (name == "backend" and _is_known(part)):
            continue
        if name not in own:
            return name, f"missing, and was {_shown(fresh[name])}"
        if name not in fresh and not hasattr(type(part), name):
            continue  # a note of its user: no method of the class reads it
        if name not in fresh:
            return name, f"{_shown(own[name])}, and was not set"
        if own[name] != fresh[name]:
            return name, f"{_shown(own[name])}, not {_shown(fresh[name])}"
    return None


def _is_known(part: nn.Module) -> bool:
    """True for a backend that computes what its class states: one of the kernels, or a search of texts."""
    known = (*REFERENCE, *REFERENCE.values())
    return isinstance(part, EncoderDecoder) or any(part.backend is one for one in known)


def _shown(value: object) -> str:
    text = getattr(value, "co_name", None) or getattr(value, "__name__", None) or repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


@functools.lru_cache(maxsize=16)
def _fresh(config: ModelConfig) -> dict[str, tuple[type, dict[str, object]]]:
    """Return name → class and settings of the parts of a network newly built from this configuration."""
    with torch.device("meta"):
        built = network(config)
    return {name: (type(part), settings_of(part)) for name, part in built.named_modules()}


def outputs_of(model: nn.Module) -> int | None:
    """Return the number of outputs of the head; None for a network without one, or with another layer in its place."""
    head = model.head if isinstance(model, Foreign) else model._modules.get("head")
    return head.out_features if isinstance(head, nn.Linear) else None


def check_head(model: nn.Module, classes: int) -> None:
    """Raise `UsageError` if the head has other outputs than there are classes: it was replaced."""
    outputs = outputs_of(model)
    if outputs is not None and classes and outputs != classes:
        raise replaced_head(outputs, classes)


def replaced_head(outputs: int, classes: int) -> UsageError:
    """Return the error for a network with another number of outputs than classes."""
    return UsageError(
        f"the network has {outputs} outputs, and there are names for {classes} classes",
        why="its head was replaced",
        hint=f"name them: vitral.load(network, classes=[…]), with {outputs} names",
    )
