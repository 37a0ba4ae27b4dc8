"""The variables that give a process its rank, set by a launcher. Imports no torch."""

from __future__ import annotations

import os

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Set for every rank, to place it among the others."""


def launched() -> bool:
    """True if torchrun, or another launcher with its variables, started this process as one of several ranks."""
    return all(name in os.environ for name in NAMES)


def restarted() -> bool:
    """True if the launcher started the ranks again, with the same words, after one of them ended."""
    return launched() and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def is_follower() -> bool:
    """True for all ranks but the first, which plans, prints and writes for all."""
    return launched() and os.environ["RANK"] != "0"
