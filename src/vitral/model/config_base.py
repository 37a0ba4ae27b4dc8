"""Base of all configurations: conversion to and from plain data, and type checks."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Self, get_args, get_origin

from vitral.errors import UsageError, unknown
from vitral.kinds import kinds_of, matches

MAX_SIDE = 1 << 14
"""Largest side of an image in pixels, so that a damaged header cannot allocate all the memory."""
_LARGEST = {
    "image_size": MAX_SIDE,
    "channels": 1_000,
    "classes": 10_000_000,
    "dim": 100_000,
    "depth": 1_000,
    "heads": 100_000,
    "mlp_dim": 1_000_000,
    "registers": 1_000,
    "layers": 1_000,
    "width": 1_000,
}
"""Field → largest accepted value. A larger one is a typo or damage, and would overflow or run forever."""


class ConfigBase:
    """Base of frozen dataclasses that are read from files. An unknown field raises `UsageError`."""

    def to_json(self) -> dict[str, Any]:
        """Plain data for `from_json`."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Build from the output of `to_json`. An unknown field raises `UsageError`."""
        fields = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if extra := [name for name in data if name not in fields]:
            raise unknown("field of a model's configuration", extra[0], fields)
        kinds = kinds_of(cls)  # type: ignore[arg-type]  # classes are hashable
        return cls(**{name: _nested(value, kinds[name]) for name, value in data.items()})

    def check_kinds(self) -> None:
        """Raise `UsageError` if a field has the wrong type, or a text that is not one of its choices."""
        for name, kind in kinds_of(type(self)).items():  # type: ignore[arg-type]  # likewise
            value, choices = getattr(self, name), get_args(kind)
            if get_origin(kind) is Literal:
                if value not in choices:
                    raise unknown(name.replace("_", " "), value, choices)
            elif not matches(value, kind):
                raise UsageError(
                    f"{name} cannot be {value!r}", why=f"it is of the kind {getattr(kind, '__name__', kind)}"
                )

    def _check_bounds(self) -> None:
        """Raise `UsageError` for a size above `_LARGEST`."""
        for name, most in _LARGEST.items():
            value = getattr(self, name, None) or 0
            if (largest := max(value if isinstance(value, tuple) else (value,), default=0)) > most:
                raise UsageError(f"{name.replace('_', ' ')} must be at most {most:,}, not {largest}")


def _nested(value: object, kind: object) -> object:
    """Convert a JSON value: an object to the field's configuration, if it has one, and lists to tuples."""
    configs = [one for one in get_args(kind) or (kind,) if isinstance(one, type) and issubclass(one, ConfigBase)]
    return configs[0].from_json(value) if configs and isinstance(value, dict) else _tuples(value)


def _tuples(value: object) -> object:
    """Convert JSON lists to tuples, recursively."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """Height and width of a size; an integer is a square. `UsageError` for anything else."""
    sides = (size, size) if isinstance(size, int) else size
    if not isinstance(sides, list | tuple) or len(sides) != 2 or any(type(side) is not int for side in sides):
        raise UsageError(f"a size is a whole number or (height, width), not {size!r}")
    return sides[0], sides[1]
