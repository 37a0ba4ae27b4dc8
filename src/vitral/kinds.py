"""Check values by their annotated types: fields of configurations and of runs, and arguments of public functions.

Values from JSON, environment variables and argparse are often text, and the text "False" is true.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import os
from collections import abc
from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from vitral.errors import UsageError, type_of, unknown

P = ParamSpec("P")
T = TypeVar("T")


@functools.cache
def kinds_of(annotated: Any) -> Mapping[str, Any]:
    """Return name → annotated type of a dataclass or a function; cached, because annotations are text to evaluate.

    Names of packages that are imported for annotations alone, such as pandas, are of any type.
    """
    absent: dict[str, Any] = {}
    while True:
        try:
            return get_type_hints(annotated, localns=absent)
        except NameError as error:
            absent[str(error.name)] = _Absent()


class _Absent:
    """A package that is not imported: all its types are `Any`."""

    def __getattr__(self, name: str) -> Any:
        return Any


def matches(value: object, kind: Any) -> bool:
    """True if `value` is of the annotated type `kind`; a float may be an int, and an int is no bool."""
    inner, origin = get_args(kind), get_origin(kind)
    if origin in (Union, UnionType):
        return any(matches(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if origin is tuple:
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis and isinstance(value, tuple) else inner
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(matches, value, kinds))
    if origin is abc.Sequence:  # a range or an array of NumPy, too
        listed = hasattr(value, "__len__") and hasattr(value, "__getitem__")
        listed = listed and not isinstance(value, str | bytes | dict)
        return listed and all(matches(_of_python(one), inner[0]) for one in cast(Any, value))
    if kind is bool or isinstance(value, bool):
        return type(value) is kind or kind in (Any, object)
    return isinstance(value, _ABSTRACT.get(kind, origin or kind)) if kind is not Any else True


_ABSTRACT: Mapping[Any, Any] = {float: float | int, Path: os.PathLike}
"""Type in an annotation → the types that count as it."""


def wrong_kind(title: str, value: object, kind: str, hint: str | None = None) -> UsageError:
    """Return the error for a value of another type than the annotated one; `title` names what has it."""
    shown = f"{value!r:.60}, {type_of(value)}" if isinstance(value, str) else f"{value!r:.60}"
    return UsageError(f"{title} cannot be {shown}", why=f"it is {kind}", hint=hint)


def checked(function: Callable[P, T], *, but: tuple[str, ...] = ()) -> Callable[P, T]:
    """Check the arguments of a public function by its annotations, except those in `but`, which it checks itself.

    Raises `UsageError` for a value of another type, and for an unknown keyword, with the nearest parameters. A text
    that is none of the choices is left to the function, too.
    """
    signature = inspect.signature(function)
    names = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not any_keyword and (bad := [name for name in kwargs if name not in names]):
            raise unknown("argument", bad[0], [name for name in names if name != "self"])
        given = dict(zip(names, args, strict=False)) | kwargs
        for name in (name for name in names if name in given and name not in but):
            _check(function, name, given[name])
        return function(*args, **kwargs)

    return call


def _of_python(value: object) -> object:
    """Convert a number of NumPy to one of Python."""
    return value.item() if isinstance(value, numbers.Number) and hasattr(value, "item") else value


def _check(function: Callable[..., Any], name: str, value: object) -> None:
    kind = kinds_of(function).get(name, Any)
    value = _of_python(value)
    choice = isinstance(value, str) and any(get_origin(one) is Literal for one in (kind, *get_args(kind)))
    if not (choice or matches(value, kind)):
        hint = f"{name}=True or {name}=False" if kind is bool else None
        raise wrong_kind(name, value, function.__annotations__[name], hint)


def named_fields(config: type[T]) -> type[T]:
    """Let a dataclass raise `UsageError` for an unknown field, with the nearest ones, instead of a bare `TypeError`."""
    original: Any = config.__init__
    fields = list(inspect.signature(original).parameters)[1:]

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it becomes the method of this name
        if bad := [name for name in kwargs if name not in fields]:
            raise unknown("option", bad[0], fields)
        original(self, *args, **kwargs)

    config.__init__ = __init__  # type: ignore[method-assign]
    return config
