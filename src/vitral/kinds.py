"""Check values by their annotated types: fields of configurations and of runs, and arguments of public functions.

Values from JSON, environment variables and argparse are often text, and the text "False" is true.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import os
from collections import abc
from collections.abc import Callable, Container, Iterable, Mapping
from inspect import Parameter, Signature
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from vitral.errors import UsageError, type_of, unknown
from vitral.spoken import Choices, learn

P = ParamSpec("P")
T = TypeVar("T")


@functools.cache
def kinds_of(annotated: object) -> Mapping[str, Any]:
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


def matches(value: object, kind: object) -> bool:
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
    return UsageError(f"{title} cannot be {shown}", why=f"it takes {kind}", hint=hint)


def checked(
    function: Callable[P, T],
    *,
    but: tuple[str, ...] = (),
    options: Mapping[str, Parameter] = MappingProxyType({}),
    unlisted: Container[str] = (),
    others: bool = False,
) -> Callable[P, T]:
    """Check the arguments of a public function by its annotations, except those in `but`, which it checks itself.

    `options` are the keywords that its `**options` stand for: `inspect.signature` and `help` list them, except the
    `unlisted` ones, which the function refuses itself. Raises `UsageError` for a value of another type, and for an
    unknown keyword, with the nearest parameters. A text that is none of the choices is left to the function, and so
    are the values of `options` and, with `others`, unknown keywords. Objects with a path, such as a finished run, are
    passed on as `Path`.
    """
    signature = inspect.signature(function)
    names = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    any_keyword = others or (not options and any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()))
    known = [name for name in (*names, *options) if name != "self"]
    learn(lambda: {name: choices_of(kinds_of(function).get(name)) for name in known if name not in options})

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not any_keyword and (bad := [name for name in kwargs if name not in known]):
            listed = [name for name in known if name not in unlisted]
            raise unknown_keyword("option" if options else "argument", bad[0], listed)
        given = dict(zip(names, args, strict=False)) | kwargs
        for name in (name for name in names if name in given and name not in but):
            _check(function, name, given[name])
        return cast(Callable[..., T], function)(
            *map(as_path, args), **{name: as_path(value) for name, value in kwargs.items()}
        )

    if options:
        shown = {name: one for name, one in options.items() if name not in unlisted}
        call.__signature__ = _with_options(signature, shown)  # type: ignore[attr-defined]
    return call


def as_path(value: Any) -> Any:
    """Return the path of an object that has one, such as `os.DirEntry`; other values as they are."""
    if isinstance(value, os.PathLike) and not isinstance(value, Path):
        path: str | bytes = os.fspath(value)
        return Path(path) if isinstance(path, str) else value
    return value


def _with_options(signature: Signature, options: Mapping[str, Parameter]) -> Signature:
    """Replace `**options` by the keywords that it stands for."""
    own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    return signature.replace(
        parameters=[*own, *(one for name, one in options.items() if name not in signature.parameters)]
    )


class _Chosen:
    """The default of an option whose value depends on another one, such as the name of the network."""

    def __repr__(self) -> str:
        return "..."


CHOSEN = _Chosen()


def keywords(kinds: Mapping[str, object], default: object = CHOSEN) -> dict[str, Parameter]:
    """Return a keyword parameter for each name and type, for `checked`."""
    learn(lambda: {name: choices_of(kind) for name, kind in kinds.items()})
    return {
        name: Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind) for name, kind in kinds.items()
    }


def keywords_of(function: Callable[..., object]) -> dict[str, Parameter]:
    """Return the keyword parameters of a function, with its types themselves instead of their names."""
    kinds, named = kinds_of(function), inspect.signature(function).parameters.values()
    return {one.name: one.replace(annotation=kinds[one.name]) for one in named if one.kind is one.KEYWORD_ONLY}


def choices_of(kind: object) -> Choices:
    """Return the texts among which an annotated type lets choose; None for a switch."""
    inner = [
        one for one in (get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)) if one is not NoneType
    ]
    if inner == [bool]:
        return None
    return frozenset(value for one in inner if get_origin(one) is Literal for value in get_args(one))


def source_of(kind: object) -> str:
    """Write an annotated type as source code, with classes by their bare names."""
    inner, origin = get_args(kind), get_origin(kind)
    if kind is NoneType:
        return "None"
    if kind is Ellipsis:
        return "..."
    if origin in (Union, UnionType):
        return " | ".join(map(source_of, sorted(inner, key=lambda one: one is NoneType)))
    if origin is Literal:
        return f"Literal[{', '.join(map(_quoted, inner))}]"
    if origin is abc.Callable:
        takes = "..." if inner[0] is Ellipsis else f"[{', '.join(map(source_of, inner[0]))}]"
        return f"Callable[{takes}, {source_of(inner[1])}]"
    name = getattr(origin or kind, "__name__", str(kind))
    return f"{name}[{', '.join(map(source_of, inner))}]" if inner else name


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def unknown_keyword(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """Return the error for an unknown keyword, with the nearest known ones, also by its name in other programs."""
    known = list(known)
    others = {other: own for other, own in NAMES_ELSEWHERE.items() if own in known}
    return unknown(kind, name, known, elsewhere=others)


def _of_python(value: object) -> object:
    """Convert a number of NumPy to one of Python."""
    return value.item() if isinstance(value, numbers.Number) and hasattr(value, "item") else value


def _check(function: Callable[..., object], name: str, value: object) -> None:
    kind = kinds_of(function).get(name, Any)
    value = _of_python(value)
    choice = isinstance(value, str) and any(get_origin(one) is Literal for one in (kind, *get_args(kind)))
    if not (choice or matches(value, kind)):
        hint = f"{name}=True or {name}=False" if kind is bool else None
        raise wrong_kind(name, value, function.__annotations__[name], hint)


def named_fields(config: type[T]) -> type[T]:
    """Let a dataclass raise `UsageError` for an unknown field, with the nearest ones, instead of a bare `TypeError`."""
    annotated: Any = config
    original: Any = config.__init__
    fields = list(inspect.signature(original).parameters)[1:]
    learn(lambda: {name: choices_of(kinds_of(annotated).get(name)) for name in fields})

    @functools.wraps(original)
    def __init__(self: object, *args: object, **kwargs: object) -> None:  # noqa: N807 - it becomes the method of this name
        if bad := [name for name in kwargs if name not in fields]:
            raise unknown_keyword("option", bad[0], fields)
        original(self, *args, **kwargs)

    config.__init__ = __init__  # type: ignore[method-assign]
    return config


NAMES_ELSEWHERE = {
    "learning_rate": "lr",
    "batch": "batch_size",
    "bs": "batch_size",
    "wd": "weight_decay",
    "opt": "optimizer",
    "optim": "optimizer",
    "img_size": "image_size",
    "input_size": "image_size",
    "size": "image_size",
    "num_epochs": "epochs",
    "sched": "schedule",
    "scheduler": "schedule",
    "lr_scheduler": "schedule",
    "warmup_epochs": "warmup",
    "clip_grad": "clip",
    "grad_clip": "clip",
    "grad_accum_steps": "accumulate",
    "smoothing": "label_smoothing",
    "reprob": "erase",
    "random_erasing": "erase",
    "model_ema": "ema",
    "num_workers": "workers",
    "transforms": "augment",
    "criterion": "loss",
    "loss_fn": "loss",
    "pretrained": "init",
    "checkpoint": "init",
    "weights": "init",
    "output": "out",
    "output_dir": "out",
    "save_dir": "out",
    "val_split": "val_fraction",
    "patience": "early_stop",
    "random_seed": "seed",
    "dtype": "precision",
    "amp": "precision",
    "arch": "model",
    "recipe": "method",
    "topk": "top",
    "k": "top",
}
"""Names of these options in other programs or functions, suggested in error messages but not accepted."""
