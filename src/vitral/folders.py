"""Cache folders and run folders."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import stat
import tempfile
from pathlib import Path

from vitral import bounded

RUN_FILES = frozenset({"config.json", "metrics.jsonl"})
"""Files in every run folder after the first epoch."""
EXPORT = "export.json"
"""Record of an export, in its folder."""


def is_run(folder: Path) -> bool:
    """True if `folder` is a run folder. Folders from model hubs also have a config.json, but without a run in it."""
    try:
        return "run" in bounded.read(folder / "config.json", file_names=True)
    except (OSError, ValueError, TypeError):
        return (folder / "metrics.jsonl").is_file()  # a run whose config.json is damaged


def can_write(path: Path) -> bool:
    """True if this user may write `path`, or make it in the nearest folder above it that exists."""
    return os.access(next(one for one in (path, *path.absolute().parents) if one.exists()), os.W_OK)


def same_path(one: str | Path, other: str | Path) -> bool:
    """True if two paths, or names of data sets, are the same: as typed, or because both lead to one file or folder."""
    first, second = (os.path.expanduser(one), os.path.expanduser(other))
    return first == second or (os.path.exists(first) and os.path.exists(second) and os.path.samefile(first, second))


def cache_folder(kind: str) -> Path:
    """Return `vitral/KIND` in the user's cache folder: `$XDG_CACHE_HOME`, else `~/.cache`, else `substitute()`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or _of_home() or substitute(), "vitral", kind)


def settle_caches() -> str:
    """Let other libraries, too, cache where this user can write; return a note, "" for a user with such a home."""
    if os.environ.get("XDG_CACHE_HOME") or _of_home():
        return ""
    os.environ["XDG_CACHE_HOME"] = substitute()
    for variable, folder in {"HOME": "", "MPLCONFIGDIR": "matplotlib", "TRITON_CACHE_DIR": "triton"}.items():
        os.environ.setdefault(variable, os.path.join(substitute(), folder))
    return f"no home to write to: caches are in {substitute()}; XDG_CACHE_HOME=FOLDER names another place"


def _of_home() -> str:
    """Return `~/.cache`; "" if this user has no home, as in a container that runs as another user, or cannot write."""
    folder = os.path.expanduser("~/.cache")
    if folder.startswith("~"):
        return ""
    there = folder
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    return folder if os.path.exists(os.path.join(folder, "vitral")) or os.access(there, os.W_OK) else ""


@functools.cache
def substitute() -> str:
    """Create and return a cache folder in the system's folder for temporary files, for this user only.

    Programs are loaded from caches: a folder that another user has made there is not used, but a new one until the end.
    """
    folder = os.path.join(tempfile.gettempdir(), f"vitral-{os.getuid() if hasattr(os, 'getuid') else 'cache'}")
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        status = os.lstat(folder)
        if os.name == "nt" or _is_private(status):
            return folder
    except OSError:
        pass
    folder = tempfile.mkdtemp(prefix="vitral-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _is_private(status: os.stat_result) -> bool:
    """True for a folder of this user that nobody else can write to."""
    others = stat.S_IWGRP | stat.S_IWOTH
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & others
