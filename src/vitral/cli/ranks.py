"""Commands on several ranks of this machine: `--nproc N`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vitral.cli.options import Option, options_of
from vitral.console import command_line
from vitral.containers import limit_threads
from vitral.distributed.environment import launched
from vitral.distributed.launch import RESUME, launch

NPROC = Option("nproc", int, "processes on this machine, each with its own GPU or part of the cores", None)

AGAIN = {
    "train": RESUME,
    "pretrain": RESUME,
    "predict": "--resume keeps the rows that are written",
    "evaluate": "repeat the command",
}
"""Commands that ranks can share, and what to do after a rank was lost."""


def shared_options(command: Callable[..., object]) -> list[Option]:
    """Return the options of a command that ranks can share: its parameters, and `--nproc` before the last one."""
    *first, last = options_of(command)
    return [*first, NPROC, last]


def run(
    name: str, options: Sequence[Option], given: Mapping[str, Any], command: Callable[..., int], debug: bool
) -> int:
    """Run a command; with `nproc` as so many ranks, which run the same words without it, and `--debug` as given."""
    rest = {key: value for key, value in given.items() if key != NPROC.name}
    count = given.get(NPROC.name)
    if count is None or launched():
        limit_threads()
        return command(**rest)
    return launch([*words_of(name, options, rest), *["--debug"] * debug], count, AGAIN[name])


def words_of(name: str, options: Sequence[Option], given: Mapping[str, object]) -> list[str]:
    """Return the words of a command with these values."""
    standing: list[object] = []
    for option in options:
        if option.is_positional and (value := given.get(option.name)) is not None:
            standing += value if isinstance(value, tuple) else [value]
    places = {option.name for option in options if option.is_positional}
    typed = {key: value for key, value in given.items() if key not in places and value is not None}
    return shlex.split(command_line(name, standing, typed))[1:]
