"""Parts of a run that the user wrote: a loss, an augmentation, a network … An option names each as `MODULE:FUNCTION`.

What no file of Python code defines, such as a lambda or an object, is named `here:NAME` and stays in this process.
A file must not run code by itself. A function is called only if it was named on this machine before (`trusted`).
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vitral import bounded
from vitral.errors import UsageError, unknown
from vitral.folders import cache_folder
from vitral.wording import flag

TRUST = "VITRAL_TRUST"
"""Environment variable: functions that may be called, as `MODULE:FUNCTION`, separated by commas."""
OWN_PARTS = ("model", "loss", "augment", "sampling", "optimizer")
"""Options whose value may be code of the user."""
HERE = "here"
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*|here:[A-Za-z_]\w*\.\d+")
_AS_OBJECTS = ("loss", "augment")
"""Options for which a class stands for the object that it makes without arguments."""
_here: dict[str, Any] = {}
"""Name → object that only this process has."""


def is_own(value: object) -> bool:
    """True for `MODULE:FUNCTION` and `here:NAME`."""
    return isinstance(value, str) and _FUNCTION.fullmatch(value) is not None


def is_here(value: str) -> bool:
    """True for a part that only this process has."""
    return value.startswith(f"{HERE}:")


def name_of(option: str, part: object) -> str:
    """Return the name of a function, a class or an object: `MODULE:FUNCTION` if it can be imported by it."""
    module, name = getattr(part, "__module__", None), getattr(part, "__qualname__", "")
    if module != "__main__" and name.isidentifier() and getattr(sys.modules.get(str(module)), name, None) is part:
        return f"{module}:{name}"
    label = re.sub(r"\W+", "_", name.rpartition(".")[2] or type(part).__name__).strip("_")
    if isinstance(part, type) and option in _AS_OBJECTS:
        part = _object_of(option, part)
    return _named(f"{HERE}:{option}_{label}", part)


def _named(name: str, part: object) -> str:
    """Keep a part of this process under a name, or under NAME.2, NAME.3 … if another part has it."""
    numbered = itertools.chain([name], (f"{name}.{number}" for number in itertools.count(2)))
    free = next(one for one in numbered if _here.get(one, part) is part)
    _here[free] = part
    return free


def stands_for(given: object, kept: object) -> bool:
    """True if a part of this process may go on in a run that kept the name of one: both are called the same.

    Data may be called otherwise, as a run compares what is in them.
    """
    if not (isinstance(given, str) and isinstance(kept, str) and is_here(given) and is_here(kept)):
        return False
    first, second = given.partition(".")[0], kept.partition(".")[0]
    return first == second or all(one.startswith(f"{HERE}:data_") for one in (first, second))


def put_in_place(given: str, kept: str) -> None:
    """Let a run that kept one name of this process use the part of another."""
    _here[kept] = _here[given]


def own_part(option: str, name: str) -> Any:
    """Return the part that an option names. Raises `UsageError` for one that cannot be found or was never named."""
    if is_here(name):
        if name not in _here:
            why = f"{name.partition(':')[2]} was an object of another Python process, and no file holds its code"
            hint = f"vitral.train(out=…, resume=True, {option}=…) in a program that has it"
            hint += ", or vitral.evaluate(RUN, data)" if option == "data" else ""
            raise UsageError(f"the run needs your {option} again", why=why, hint=hint)
        return _here[name]
    module, _, function = name.partition(":")
    imported = _module(module, _folder_of(name))
    if not callable(found := getattr(imported, function, None)):
        known = [key for key, one in vars(imported).items() if callable(one) and not key.startswith("_")]
        raise unknown(f"function of {module}", function, known, hint=f"{flag(option)} MODULE:FUNCTION")
    return found


def own_function(option: str, name: str) -> Callable[..., Any]:
    """Return a function or an object to call; a class is called once, without arguments, to make one."""
    return _made(option, name) if not is_here(name) else own_part(option, name)


@functools.cache
def _made(option: str, name: str) -> Callable[..., Any]:
    part = own_part(option, name)
    return _object_of(option, part) if isinstance(part, type) else part


def _object_of(option: str, part: type) -> Any:
    """Make an object of a class without arguments. Raises `UsageError` if it needs some."""
    try:
        return part()
    except TypeError as error:
        hint = f"{option}={part.__name__}(…)"
        raise UsageError(f"your {option} is a class that needs arguments", why=str(error), hint=hint) from error


def trusted() -> Path:
    """The file of functions that were named on this machine: `MODULE:FUNCTION` → the folder it was named in."""
    return cache_folder("functions") / "trusted.json"


def folder_to_import(name: str) -> str:
    """Return the folder from which the module of a function is imported; this folder if it is not imported yet."""
    module = name.partition(":")[0]
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return os.getcwd()
    above = module.count(".") + (Path(file).name == "__init__.py")
    return str(Path(file).resolve().parents[above])


def _folder_of(source: str) -> str:
    """Folder to import the module from. Raises `UsageError` for a function that was never named on this machine."""
    try:
        record: Mapping[str, str] = bounded.read(trusted())
    except (OSError, ValueError):
        record = {}
    if source in record:
        return str(record[source])
    if source in os.environ.get(TRUST, "").split(","):
        return os.getcwd()
    why = "a file by itself must not run code"
    hint = f"if you trust it: {TRUST}={source} vitral …, in the folder of its module"
    raise UsageError(f"the run uses {source}, which was never named here", why=why, hint=hint)


def _module(name: str, folder: str) -> Any:
    """Import a module, from `folder` too."""
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UsageError(f"cannot import '{name}'", where=folder, why=reason) from error
    finally:
        sys.path.remove(folder)
