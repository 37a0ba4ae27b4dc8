"""Where what is made once and can be made again is kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """`vitral/KIND` in the user's cache (`$XDG_CACHE_HOME`, else `~/.cache`)."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "vitral" / kind
