"""What the configurations of all networks share: plain data in and out, and no value of another kind."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from vitral.errors import UsageError, unknown


class Schema:
    """The base of a frozen dataclass that may come from a file. A field it does not know raises `UsageError`."""

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` is the way back."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Read `to_json`'s form. The schema is closed: a field that is not known raises `UsageError`."""
        fields = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if extra := [name for name in data if name not in fields]:
            raise unknown("field of a model's configuration", extra[0], fields)
        return cls(**{name: _tuples(value) for name, value in data.items()})

    def check_kinds(self) -> None:
        """Refuse a value of another kind: a misspelt choice must not fall through to some other branch."""
        for name, kind in get_type_hints(type(self)).items():
            value, choices = getattr(self, name), get_args(kind)
            if get_origin(kind) is Literal:
                if value not in choices:
                    raise unknown(name.replace("_", " "), value, choices)
            elif not _is(value, kind):
                raise UsageError(
                    f"{name} cannot be {value!r}", why=f"it is of the kind {getattr(kind, '__name__', kind)}"
                )


def _tuples(value: Any) -> Any:
    """JSON has lists for what is a tuple here."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _is(value: object, kind: Any) -> bool:
    if type(None) in get_args(kind):
        return value is None or any(_is(value, one) for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is tuple:
        return type(value) is tuple and _fit(value, get_args(kind))
    return kind not in _KINDS or type(value) in _KINDS[kind]


def _fit(values: tuple[Any, ...], kinds: tuple[Any, ...]) -> bool:
    if kinds[-1] is Ellipsis:
        return all(_is(value, kinds[0]) for value in values)
    return len(values) == len(kinds) and all(map(_is, values, kinds))


_KINDS: dict[Any, tuple[type, ...]] = {
    int: (int,),
    bool: (bool,),
    str: (str,),
    float: (float, int),
}


def pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """Height and width; an integer stands for a square. `UsageError` for anything else."""
    sides = (size, size) if isinstance(size, int) else size
    if not isinstance(sides, list | tuple) or len(sides) != 2 or any(type(side) is not int for side in sides):
        raise UsageError(f"a size is a whole number or (height, width), not {size!r}")
    return sides[0], sides[1]
