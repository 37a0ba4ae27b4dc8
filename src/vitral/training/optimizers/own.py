"""An optimizer of the user: a class of torch, or a function of parameter groups that returns an optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from vitral.errors import UsageError, type_of
from vitral.model.own import is_here, own_part
from vitral.training.optimizers.rule import Groups, OptimizerOptions, UpdateRule


def own_rule(name: str) -> UpdateRule:
    """Return the rule of an optimizer that an option names as `MODULE:FUNCTION` or `here:NAME`."""
    title = name.partition(":")[2]
    if is_here(name):
        title = title.removeprefix("optimizer_")
    return UpdateRule(title, partial(_build, own_part("optimizer", name)))


def _build(function: Callable[..., object], groups: Groups, run: OptimizerOptions) -> list[Optimizer]:
    """Call the function with groups that have the rates of the run. Its optimizer may group the parameters anew."""
    peak = run.peak_lr
    stated = [{**group, "lr": peak * group["factor"]} for group in groups]
    names = {id(p): name for group in groups for p, name in zip(group["params"], group["names"], strict=True)}
    optimizers = _called(function, stated)
    held = [p for one in optimizers for group in one.param_groups for p in group["params"]]
    if missing := [name for key, name in names.items() if key not in set(map(id, held))]:
        why = f"it holds {len(held)} of {len(names)} trainable parameters; {missing[0]} is missing"
        hint = "pass all groups to the optimizer; --freeze keeps parameters as they are"
        raise UsageError("your optimizer leaves parameters out", why=why, hint=hint)
    if others := sum(id(p) not in names for p in held):
        raise UsageError(f"your optimizer holds {others} parameters that the network does not train")
    for group in (group for one in optimizers for group in one.param_groups):
        group["names"] = [names[id(p)] for p in group["params"]]
        group["factor"] = float(group["lr"]) / peak if peak else 1.0
    return optimizers


def _called(function: Callable[..., Any], groups: Groups) -> list[Optimizer]:
    try:
        made = function(groups)
    except Exception as error:  # code of the user may raise anything
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        hint = "optimizer=torch.optim.SGD, or lambda groups: torch.optim.SGD(groups, lr=0.1)"
        raise UsageError("your optimizer cannot be made of parameter groups", why=why, hint=hint) from error
    optimizers = list(made) if isinstance(made, list | tuple) else [made]
    if not optimizers or not all(isinstance(one, Optimizer) for one in optimizers):
        why = f"it returned {type_of(made)}"
        hint = "return the optimizer: lambda groups: torch.optim.SGD(groups, lr=0.1)"
        raise UsageError("your optimizer is not a torch.optim.Optimizer", why=why, hint=hint)
    return optimizers


@dataclass(frozen=True)
class Defaults:
    """The rates that an optimizer has of its own."""

    lr: float
    weight_decay: float | None
    """None if it has none."""


def defaults_of(name: str) -> Defaults:
    """Try an optimizer of the user on two small parameters, and return its own rates.

    Raises `UsageError` if it cannot be made, cannot take a step or has no learning rate.
    """
    parameters = [torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))]
    groups: Groups = [
        {"params": [one], "names": [f"tried.{number}"], "factor": 1.0, "hidden": False}
        for number, one in enumerate(parameters)
    ]
    optimizers = _called(own_part("optimizer", name), groups)
    for one in parameters:
        one.grad = torch.zeros_like(one)
    try:
        for optimizer in optimizers:
            optimizer.step()
            for state in optimizer.state.values():
                [torch.as_tensor(value) for value in state.values() if value is not None]
    except Exception as error:  # code of the user may raise anything
        needs = "closure" in inspect.signature(optimizers[0].step).parameters and "closure" in str(error)
        why = "its step needs a closure" if needs else f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UsageError("your optimizer cannot take a step", why=why) from error
    found = [group for one in optimizers for group in one.param_groups]
    if any(not isinstance(group.get("lr"), float | int | torch.Tensor) for group in found):
        raise UsageError("your optimizer has no learning rate", why="the schedule sets the rate `lr` of each group")
    decays = [float(group["weight_decay"]) for group in found if "weight_decay" in group]
    return Defaults(max(float(group["lr"]) for group in found), max(decays) if decays else None)
