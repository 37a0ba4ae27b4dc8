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


def cache_folder(kind: str) -> Path:
    """Return `vitral/KIND` in the user's cache folder (`$XDG_CACHE_HOME`, else `~/.cache`)."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "vitral" / kind
