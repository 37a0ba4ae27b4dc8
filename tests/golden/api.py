"""The public names of vitral with their signatures, as text that does not depend on the modules they live in."""

from __future__ import annotations

import inspect
from typing import Any

import vitral

_CALLED = ("__call__", "__getitem__", "__iter__", "__len__", "__enter__", "__exit__")
"""Methods without a name that are part of how a class is used."""


_LINE = 120
"""Characters of a signature that stays on one line."""


class _Bare(str):
    """An annotation that prints without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def listing() -> str:
    """Every name of `vitral.__all__`: its kind and signature, and of a class the members that vitral defines."""
    return "\n".join(line for name in vitral.__all__ for line in _about(name, getattr(vitral, name)))


def _about(name: str, value: Any) -> list[str]:
    if not inspect.isclass(value):
        return [f"def {name}{_signature(value)}"]
    ours = [part for part in value.__mro__ if part.__module__.partition(".")[0] == "vitral"]
    bases = [part.__name__ for part in value.__mro__ if part not in ours and part is not object]
    lines = [f"class {name}{_signature(value)}" + f": {', '.join(bases)}" * bool(bases)]
    members = {member: found for part in reversed(ours) for member, found in vars(part).items()}
    for member in sorted(members):
        if member in _CALLED or not member.startswith("_"):
            lines += [f"    {line}" for line in _member(member, members[member])]
    return lines


def _member(name: str, value: Any) -> list[str]:
    if isinstance(value, (staticmethod, classmethod)):
        return [f"{type(value).__name__} {name}{_signature(value.__func__)}"]
    if inspect.isfunction(value):
        return [f"def {name}{_signature(value)}"]
    getter = getattr(value, "fget", None) or getattr(value, "func", None)  # property, cached_property
    if getter is not None:
        return [f"property {name}{_signature(getter)}"]
    return [f"attribute {name}"]


def _signature(function: Any) -> str:
    """The signature on one line, or, where it is long, each parameter on its own: a difference shows which one."""
    found = inspect.signature(function)
    parameters = [
        one.replace(annotation=_bare(one.annotation), default=_default(one.default))
        for one in found.parameters.values()
    ]
    bare = found.replace(parameters=parameters, return_annotation=_bare(found.return_annotation))
    if len(str(bare)) <= _LINE:
        return str(bare)
    returned = str(bare.replace(parameters=[])).removeprefix("()")
    return "".join(["(", *(f"\n        {one.kind.description}: {one}" for one in parameters), f"\n    ){returned}"])


def _bare(annotation: Any) -> Any:
    if annotation is inspect.Signature.empty:
        return annotation
    return _Bare(getattr(annotation, "__qualname__", None) or str(annotation))


def _default(value: Any) -> Any:
    """A default as it prints; of classes and functions the name alone, since modules move."""
    if value is inspect.Signature.empty or not hasattr(value, "__qualname__"):
        return value
    return _Bare(value.__qualname__)
