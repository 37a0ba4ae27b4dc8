"""Say which library cannot be imported, and what to install."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType

from vitral.errors import MissingExtraError

REQUIRED = {
    "torch": "torch",
    "torchvision": "torchvision",
    "numpy": "numpy",
    "PIL": "pillow",
    "safetensors": "safetensors",
    "huggingface_hub": "huggingface_hub",
    "sklearn": "scikit-learn",
    "matplotlib": "matplotlib",
    "jinja2": "jinja2",
    "rich": "rich",
    "xxhash": "xxhash",
}
"""Module → the package that has it, of those that vitral requires."""
_PAIR = ("torch", "torchvision")
"""Packages that fit each other only in certain versions, and from one index."""
_NO_MEMORY = ("failed to map segment", "cannot allocate memory", "not enough memory", "memoryerror")


def import_failure(error: BaseException) -> MissingExtraError | None:
    """Return the error for a library that is missing or broken; None if `error` does not come from an import of one."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if isinstance(error, ModuleNotFoundError) and (missing := _top(error.name or "")) in REQUIRED:
        return MissingExtraError(f"{missing} is not installed", why=reason, hint=_install(missing))
    if (name := _importing(error.__traceback__)) is None:
        return None
    what = f"{name} cannot be imported: {reason}"
    if any(words in reason.lower() for words in _NO_MEMORY):
        hint = "ulimit -v unlimited, or end other programs"
        return MissingExtraError(what, why="there is too little memory or address space", hint=hint)
    both = f": {' with '.join(filter(None, map(_installed, _PAIR)))}" if name in _PAIR else ""
    return MissingExtraError(what, why=f"its installation is broken{both}", hint=_install(name))


def _importing(traceback: TracebackType | None) -> str | None:
    """Return the innermost library whose module was being executed, other than Python's and vitral's own."""
    found = None
    while traceback is not None:
        frame = traceback.tb_frame
        name = _top(str(frame.f_globals.get("__name__", "")))
        own = name in ("vitral", "__main__", "") or name in sys.stdlib_module_names
        if frame.f_code.co_name == "<module>" and not own:
            found = name
        traceback = traceback.tb_next
    return found


def _top(module: str) -> str:
    return module.partition(".")[0]


def _install(name: str) -> str:
    if name in _PAIR:
        return "pip install --force-reinstall torch torchvision, both from one index: https://pytorch.org/get-started"
    return f"pip install --force-reinstall {REQUIRED.get(name, name)}"


def _installed(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return ""
