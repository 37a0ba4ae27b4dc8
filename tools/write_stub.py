"""Write `src/vitral/__init__.pyi`: the public names for editors and type checkers, with every option of each function.

python -m tools.write_stub
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import vitral
from vitral.kinds import kinds_of, source_of

ROOT = Path(__file__).resolve().parents[1]
STUB = ROOT / "src/vitral/__init__.pyi"
HEADER = '"""Public names of vitral, with every option of each function; written by `python -m tools.write_stub`."""\n'


def stub() -> str:
    """Return the text of the file. Classes are imported; functions are written with their whole signatures."""
    public = {name: getattr(vitral, name) for name in vitral.__all__}
    functions = {name: value for name, value in public.items() if inspect.isfunction(value)}
    imports = {"from vitral._version import __version__ as __version__", "from typing import Any, Literal"}
    imports |= {
        "from collections.abc import Callable, Mapping, Sequence",
        "from os import PathLike",
        "from pathlib import Path",
    }
    for name in public.keys() - functions.keys():
        home, _, inner = vitral._HOME[name].partition(":")
        imports.add(f"from {home} import {inner or name} as {name}")
    for function in functions.values():
        classes = {one for kind in _kinds(function).values() for one in _classes(kind)}
        imports |= {f"from {one.__module__} import {one.__name__}" for one in classes if one.__name__ not in public}
    names = "".join(f"    {name!r},\n" for name in public)
    definitions = [_definition(name, function) for name, function in functions.items()]
    return _formatted("\n".join([HEADER, *sorted(imports), f"__all__ = [\n{names}]\n", *definitions]))


def _kinds(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the type of each argument and, by "return", of the result."""
    kinds = kinds_of(inspect.unwrap(function))
    named = inspect.signature(function).parameters.values()
    return {one.name: kinds.get(one.name, one.annotation) for one in named} | {"return": kinds["return"]}


def _definition(name: str, function: Callable[..., Any]) -> str:
    kinds, lines = _kinds(function), []
    for one in inspect.signature(function).parameters.values():
        if one.kind is one.KEYWORD_ONLY and "*" not in lines:
            lines.append("*")
        default = "" if one.default is one.empty else f" = {_default(one.default)}"
        lines.append(f"{one.name}: {_accepted(kinds[one.name])}{default}")
    about = inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0]
    parameters = "".join(f"    {line},\n" for line in lines)
    return f'def {name}(\n{parameters}) -> {source_of(kinds["return"])}:\n    """{about}"""\n'


def _accepted(kind: Any) -> str:
    """Write the type of an argument: whatever has a path is accepted for `Path`, as `vitral.kinds.matches` does."""
    return re.sub(r"\bPath\b", "PathLike[str]", source_of(kind))


def _default(value: object) -> str:
    return repr(value) if isinstance(value, str | int | float | None | tuple) else "..."


def _classes(kind: Any) -> Iterator[type]:
    """Yield the classes in a type that a module must import."""
    if isinstance(kind, list):
        parts: Iterable[Any] = kind
    elif get_origin(kind) is Literal:
        parts = ()
    else:
        parts, named = get_args(kind), get_origin(kind) or kind
        if isinstance(named, type) and named.__module__ not in (
            "builtins",
            "typing",
            "pathlib",
            "collections.abc",
            "types",
        ):
            yield named
    for one in parts:
        yield from _classes(one)


def _formatted(text: str) -> str:
    for command in (("check", "--fix", "--quiet", "--exit-zero"), ("format", "--quiet")):
        words = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(STUB), "-"]
        text = subprocess.run(words, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return text


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
