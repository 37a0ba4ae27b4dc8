"""Cache folders and run folders."""

from __future__ import annotations

import os
from pathlib import Path

from vitral import bounded

RUN_FILES = frozenset({"config.json", "metrics.jsonl"})
"""Files in every run folder after the first epoch."""
EXPORT = "export.json"
"""Record of an export, in its folder."""


def is_run(folder: Path) -> bool:
    """True if `folder` is a run folder. Folders from model hubs also have a config.json, but without a run in it."""
    try:
        return "run" in bounded.read(folder / "config.json")
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
    """Return `vitral/KIND` in the user's cache folder (`$XDG_CACHE_HOME`, else `~/.cache`)."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "vitral" / kind
