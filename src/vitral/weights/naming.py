"""Class names that a caller gives to weights, and a head in the order of given classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from vitral.errors import UsageError
from vitral.model import BiTConfig, ViTConfig
from vitral.weights import class_names
from vitral.weights.fitted import still_fitted
from vitral.weights.loaded import Loaded
from vitral.weights.native import Weights
from vitral.weights.notes import OfClassNames
from vitral.wording import some


def given_names(changes: dict[str, Any], new_head: bool) -> tuple[str, ...]:
    """Take names of classes out of `changes`; none if `classes` is a number or missing. `UsageError` for others."""
    given = changes.get("classes")
    if given is None or isinstance(given, int):
        return ()
    hint = 'classes=["cat", "dog"]'
    if isinstance(given, str) or not all(isinstance(name, str) for name in given) or not given:
        raise UsageError("classes is a number, or a list of names", hint=hint)
    if new_head:
        raise UsageError("a new head has no names yet", hint=f"classes={len(given)}, new_head=True")
    if len(set(given)) < len(given):
        raise UsageError("two classes have the same name", why=f"of {some(sorted(given))}", hint=hint)
    del changes["classes"]
    return tuple(given)


def named(loaded: Loaded, names: tuple[str, ...]) -> Loaded:
    """Return the weights with these names of their classes, if there are any; `UsageError` for another number."""
    if not names:
        return loaded
    account, outputs = loaded.account, loaded.weights.config.classes
    if len(names) != outputs:
        what = f"there are {len(names)} names, and the network has {outputs} outputs"
        raise UsageError(what, where=account.source, hint=f"classes=[…], with {outputs} names")
    weights = dataclasses.replace(loaded.weights, classes=names)
    account = dataclasses.replace(account.without(OfClassNames), nameless=False)
    return dataclasses.replace(loaded, weights=weights, account=account)


def with_classes(loaded: Loaded, names: Sequence[str]) -> Loaded | None:
    """Give the head a row for each of these classes, in their order: its own for a class that it knows by name, zeros
    for a new one. None if it knows none of them, or is of another library.
    """
    weights = loaded.weights
    places = class_names.match(names, weights.classes)
    known = [index for index in places if index is not None]
    if not known or not isinstance(weights.config, ViTConfig | BiTConfig):
        return None
    state = dict(weights.state)
    rows = torch.tensor([-1 if index is None else index for index in places])
    for name in [name for name in state if name.split(".")[0] in ("head", "head_dist")]:
        old = state[name]
        state[name] = old.new_zeros(len(names), *old.shape[1:])
        state[name][rows >= 0] = old[rows[rows >= 0]]
    new = [name for name, index in zip(names, places, strict=True) if index is None]
    note = f"the head already knows {len(known)} of your {len(names)} classes"
    if new:
        note += f"; the others start from zero: {some(new)}"
    config = dataclasses.replace(weights.config, classes=len(names))
    output, account = still_fitted(weights, loaded.account.noted(note), "head")
    adapted = Weights(config, state, weights.preprocessing, tuple(names), weights.trained, output)
    return dataclasses.replace(loaded, weights=adapted, account=account)
