"""The variables that give a process its rank, set by a launcher. Imports no torch."""

from __future__ import annotations

import os

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Set for every rank, to place it among the others."""


NPROC = "VITRAL_NPROC"
"""Set by `--nproc` for the ranks that it starts."""


def launched() -> bool:
    """True if torchrun, or another launcher with its variables, started this process as one of several ranks."""
    return all(name in os.environ for name in NAMES)


def restarted() -> bool:
    """True if the launcher started the ranks again, with the same words, after one of them ended."""
    return launched() and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def with_nproc(command: str) -> str:
    """Add the `--nproc` that started this rank to a command that goes on with its work."""
    count = os.environ.get(NPROC) if launched() else None
    return f"{command} --nproc {count}" if count else command


def is_follower() -> bool:
    """True for all ranks but the first, which plans, prints and writes for all."""
    return launched() and os.environ["RANK"] != "0"
