"""Print results to standard output and everything else to standard error."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from vitral import activity
from vitral.console import command_line, stdout
from vitral.wording import printable

if TYPE_CHECKING:
    from vitral.inference.predictor import Predictor


def print_text(text: str) -> None:
    """Print a line of a result."""
    activity.end()
    print(printable(text))


def print_json(value: object) -> None:
    """Print a result as JSON."""
    activity.end()
    print(json.dumps(value, indent=2))


class Result(Protocol):
    """A result that prints itself."""

    def to_json(self) -> Mapping[str, object]: ...

    @property
    def print_table(self) -> Callable[..., None]: ...


class Named(Protocol):
    """A prediction of one image, of any task."""

    @property
    def name(self) -> str: ...

    def cells(self, count: int, /) -> list[str]: ...


def print_result(result: Result, format: str, **table: object) -> None:
    """Print a result as JSON or as a table, with the options `table` of its `print_table`."""
    if format == "json":
        print_json(result.to_json())
    else:
        result.print_table(stdout(), **table)


def print_prediction(prediction: Named, top: int) -> None:
    """Print an image's name and what is predicted: of one class per image, the `top` most probable ones."""
    from vitral.wording import shown

    print_text(f"{shown(prediction.name)}\t" + "\t".join(prediction.cells(top)))


def print_predictor_notes(predictor: Predictor) -> None:
    """Print the assumptions about the weights, the reason for a fallback engine, and a note on unfinished training."""
    from vitral.training.run_folder import unfinished
    from vitral.weights.notes import Caution

    if predictor.account and predictor.account.assumed:
        say(f"Weights  {predictor.account.assumed}")
    for note in predictor.account.notes if predictor.account else ():
        if isinstance(note, Caution):
            say(f"Weights  {note}")
    if predictor.note:
        say(f"Engine   {predictor.note}")
    if note := unfinished(predictor.source):
        say(f"note: {note}")


def unread(failed: int, total: int, more: str = "") -> int:
    """Report images that could not be read, if any; return the exit code."""
    if failed:
        say(f"{failed:,} of {total:,} could not be read{more}")
    return 1 if failed else 0


def print_notes(notes: Iterable[str]) -> None:
    """Print notes on the images or the result to standard error."""
    for note in notes:
        say(f"note: {note}")


def resuming(name: str, function: Callable[..., int], words: list[str], typed: Mapping[str, object]) -> str:
    """Return the words that resume a command: its options, without those at their defaults, and `--resume`."""
    defaults = {parameter: one.default for parameter, one in inspect.signature(function).parameters.items()}
    options = {option: value for option, value in typed.items() if value != defaults[option]}
    return command_line(name, words, {**options, "resume": True})


def program() -> str:
    """Return the command that runs vitral: its name, or its path if the shell does not find the name."""
    own = os.path.basename(sys.argv[0]) == "vitral" and not shutil.which("vitral")
    return os.path.relpath(sys.argv[0]) if own else "vitral"


def python() -> str:
    """Return the command that runs this Python: its name, or its path if the shell does not find it or vitral."""
    named = program() == "vitral" and shutil.which("python")
    return "python" if named else shlex.quote(os.path.relpath(sys.executable))


def say(text: str) -> None:
    """Print a line to standard error; on a terminal, sentences are broken between words."""
    activity.end()
    text = printable(text)
    if text.startswith(_SENTENCES) and sys.stderr.isatty():
        columns = shutil.get_terminal_size().columns
        text = textwrap.fill(text, columns, break_long_words=False, break_on_hyphens=False, subsequent_indent="  ")
    print(text, file=sys.stderr, flush=True)


_SENTENCES = ("note: ", "Accuracy ")
"""Beginnings of lines without a path or a command to copy, which stay whole."""
