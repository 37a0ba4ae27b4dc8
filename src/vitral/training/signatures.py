"""The options of a run as keywords of `vitral.train` and `vitral.pretrain`: types, choices, and their docstring."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Sampler

from vitral.data.images.preprocessing import INTERPOLATIONS
from vitral.kinds import keywords, kinds_of, source_of
from vitral.model.config import Activation, Pool
from vitral.model.position import POSITIONS
from vitral.spoken import in_python
from vitral.training.optimizers import OPTIMIZERS
from vitral.training.options import Run
from vitral.training.other_words import ALSO
from vitral.training.own_metrics import OwnMetric

F = TypeVar("F", bound=Callable[..., Any])

GROUPS = {
    "Data": "data",
    "Task": "task",
    "Network": "model",
    "Preprocessing and augmentation": "resize",
    "Training": "epochs",
    "Pretraining without labels": "mask",
    "Execution": "device",
}
"""Title of each group of options → its first field of `Run`."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "optimizer": tuple(OPTIMIZERS),
    "position": tuple(POSITIONS),
    "interpolation": tuple(INTERPOLATIONS),
    "pool": get_args(Pool),
    "activation": get_args(Activation),
    "precision": ("auto", "bf16", "fp32"),
}
"""Texts that `Run` looks up in a table."""

_OWN: dict[str, Any] = {
    "loss": Callable[[Tensor, Tensor], Tensor],
    "augment": Callable[[Any], Any],
    "optimizer": Callable[[Any], Optimizer | Sequence[Optimizer]],
    "sampling": Sampler[int] | Callable[[np.ndarray], Any],
    "model": nn.Module | Callable[..., nn.Module],
}
"""Options that also take code of the user, and what it is."""
_PATHS = ("data_root", "init", "teacher", "class_order", "out")
_LISTS = {tuple[str, ...]: Sequence[str], tuple[int, ...]: Sequence[int], tuple[float, ...]: Sequence[float]}


def _kind(name: str, kind: Any) -> Any:
    """Return the type of an option as a caller may give it; None lets the plan choose."""
    if name in _CHOICES:
        return Literal[_CHOICES[name]] | _OWN.get(name) | None
    if name == "metrics":
        return Mapping[str, OwnMetric] | Sequence[OwnMetric] | Sequence[str] | None
    if name in _PATHS:
        return str | Path | None
    if get_origin(kind) is tuple:
        return _LISTS.get(kind, kind) | None
    return kind | _OWN.get(name) | None


KINDS = {name: _kind(name, kind) for name, kind in kinds_of(Run).items() if name != "data"}
"""Option → type, in the order of `Run`."""
OPTIONS = keywords({**KINDS, **{other: _OWN[own] | None for other, own in ALSO.items()}}, default=None)
"""The keywords of `vitral.train`."""
PRETRAIN_OPTIONS = {name: one for name, one in OPTIONS.items() if name != "recipe"}
"""The keywords of `vitral.pretrain`, whose method is its recipe."""


_IN_PYTHON = {"minutes": "time limit of training and validation; vitral plans as many epochs as fit"}
"""Option → its meaning for functions, if it differs from the one for commands, which also count all other time."""


def with_listing(function: F) -> F:
    """Append the options of its signature to the docstring of a function, in groups, each with type and meaning."""
    about = inspect.cleandoc(function.__doc__ or "")
    lines = "\n".join(_lines(inspect.signature(function).parameters))
    function.__doc__ = f"{about}\n\nOptions; the plan chooses those that are left out or None.\n{lines}\n"
    return function


def _lines(names: Container[str]) -> Iterator[str]:
    titles, title = {first: title for title, first in GROUPS.items()}, ""
    for field in dataclasses.fields(Run):
        title = titles.get(field.name, title)
        if field.name in OPTIONS and field.name in names:
            if title:  # of a group that is not empty
                yield f"\n{title}:\n"
                title = ""
            kind = source_of(KINDS[field.name]).removesuffix(" | None")
            about = _IN_PYTHON.get(field.name) or in_python(field.metadata["help"])
            yield f"- `{field.name}` ({kind}): {about}"
    yield "\nOther names of the same options:\n"
    yield from (f"- `{other}`: {own}" for other, own in ALSO.items() if own in names)
