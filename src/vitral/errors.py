"""Errors for the user.

    VitralError                 what, where, why, what to type; exit code 2
    ├── UsageError              invalid request: unknown name, option or size
    ├── DataError               invalid data
    │   └── ImageError          one image cannot be read; `.name` is its name
    ├── WeightsError            a weights file is damaged, of an unknown format, or does not fit the model
    ├── RunError                a run folder exists, is missing, or is not one
    ├── TrainingError           training cannot continue (non-finite loss, out of memory)
    ├── WriteError              a file cannot be written (disk full, no permission)
    ├── MissingExtraError       an optional package is not installed
    ├── RankError               one of several ranks failed; the message names it
    └── ExportError             an export does not compute what its network computes; exit code 1

`Interrupted` is a `KeyboardInterrupt`: the user pressed Ctrl-C and the state is saved; exit code 130. `Elsewhere` is no
`VitralError` either: another rank reports the error.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable, Mapping

from vitral.spoken import spoken
from vitral.wording import count, flag, some


class VitralError(Exception):
    """An error message of at most five lines: what, where, why, what to type.

    `what` is a short clause without a period. The other parts are optional, one line each.

    Example:
        try:
            vitral.train("photos/", epoch=3)
        except vitral.VitralError as error:
            print(error)
    """

    exit_code = 2

    def __init__(self, what: str, *, where: object = None, why: str | None = None, hint: str | None = None):
        self.what, self.where, self.why, self.hint = what, where, why, hint
        parts = (("where", where), ("why", why), ("try", hint))
        # Each part stays on one line: file names may contain newlines, and messages of libraries often do.
        lines = [what, *(f"  {label}: {part}" for label, part in parts if part is not None)]
        super().__init__("\n".join(" ".join(line.splitlines()) for line in lines))

    def __str__(self) -> str:
        """Return the message with its options as the caller types them: `--lr` in a shell, `lr` in Python."""
        lines = super().__str__().split("\n")
        return "\n".join(spoken(line, hint=line.startswith("  try: ")) for line in lines)


class UsageError(VitralError, ValueError):
    """The request is invalid."""


class DataError(VitralError, ValueError):
    """The data are invalid."""


class ImageError(DataError):
    """One image cannot be read; `name` identifies it, and is the place unless `where` is another one."""

    def __init__(self, name: str, why: str, *, where: str | None = None, hint: str | None = None):
        self.name = name
        super().__init__("cannot read image", where=where or name, why=why, hint=hint)


SKIP_HINT = "leave unreadable images out with --bad-images skip"


def unreadable(names: Iterable[str], *, where: object = None, hint: str = SKIP_HINT) -> DataError:
    """Return the error of a command that needs all images; `names`, with reasons if they are known."""
    names = list(names)
    return DataError(count(len(names), "unreadable image"), where=where, why=some(names), hint=hint)


def none_readable(names: Iterable[str], *, where: object = None) -> DataError:
    """Return the error of a command of whose images none can be read."""
    return DataError("no readable image", where=where, why=some(names))


class WeightsError(VitralError, ValueError):
    """A weights file is damaged, of an unknown format, or does not fit the model."""


class RunError(VitralError):
    """A run folder already exists, is missing, or is not one."""


class TrainingError(VitralError, RuntimeError):
    """Training cannot continue; the saved state is kept."""


class WriteError(VitralError, OSError):
    """A file cannot be written; an existing one is unchanged."""


class MissingExtraError(VitralError, ImportError):
    """An optional package is not installed."""


class ExportError(VitralError):
    """The exported network computes something else than its source; nothing was written."""

    exit_code = 1

    def __init__(self, what: str, *, where: object, why: str, hint: str, proof: object):
        self.proof = proof
        """`vitral.export.proof.Proof`: the figures of the comparison."""
        super().__init__(what, where=where, why=why, hint=hint)


class RankError(VitralError, RuntimeError):
    """One of several ranks failed; the message begins with its number, machine and position."""


class Elsewhere(Exception):  # noqa: N818 - not an error
    """This rank ends because another one failed, which reports the error."""

    exit_code = 2


class Interrupted(KeyboardInterrupt):
    """The user pressed Ctrl-C, or the process received SIGTERM. `command` resumes from the saved state, or restarts the
    run if nothing was saved.

    `except Exception` does not catch it, so that a loop over runs ends with the run that was stopped.
    """

    exit_code = 130

    def __init__(self, command: str, *, saved: bool = True):
        self.command, self.saved = command, saved
        status = "stopped and saved; to go on" if saved else "stopped before anything was saved; to restart"
        super().__init__(f"{status}: {command}")

    def _render_traceback_(self) -> list[str]:
        """One line in place of the traceback in notebooks: stopping a run is no mistake."""
        return [f"{self}; in Python: vitral.train(out=…, resume=True)" if self.saved else str(self)]


class VitralWarning(UserWarning):
    """A note on an answer, which commands print themselves."""


def warn(message: str) -> None:
    """Warn at the line that called vitral."""
    frame, level = sys._getframe(1), 2
    inside = {"vitral", "contextlib"}  # decorators of vitral are contextlib's
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in inside:
        frame, level = frame.f_back, level + 1
    warnings.warn(spoken(message), VitralWarning, stacklevel=level)


def unknown(
    kind: str, name: object, known: Iterable[str], hint: str | None = None, elsewhere: Mapping[str, str] | None = None
) -> UsageError:
    """Return the error for an unknown name, with the nearest known names. `elsewhere` maps names in other programs to
    known names. Without a hint, the nearest name is the one to use.
    """
    names = sorted(known)
    meant = {**(elsewhere or {}), **{one: one for one in names}}
    near = dict.fromkeys(meant[one] for one in nearest(str(name), meant))
    listed = f"known: {', '.join(names[:12])}{' …' if len(names) > 12 else ''}"
    reasons = [f"nearest: {', '.join(near)}"] if near else []
    reasons += [listed] if len(near) < len(names) <= _FEW or not near else []
    hint = hint or (f"use {next(iter(near))}" if near else None)
    return UsageError(f"unknown {kind} '{name}'", why="; ".join(reasons), hint=hint)


def check_positive(**options: tuple[int, int]) -> None:
    """Refuse an option below 1; each is given as its value and one to type instead."""
    for name, (value, example) in options.items():
        if value < 1:
            raise UsageError(f"{flag(name)} must be at least 1, not {value}", hint=f"{flag(name)} {example}")


def type_of(value: object) -> str:
    """Return the name of a value's type with its article: "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def empty(what: str, hint: str) -> UsageError:
    """Return the error for an empty path or name: `Path("")` would be the current folder."""
    return UsageError(f"{what} is empty", why="an unset shell variable expands to an empty word", hint=hint)


def nearest(name: str, known: Iterable[str], least: float = 0.6) -> list[str]:
    """Return up to three known names similar to `name`, best first, dropping those much less similar than the best.
    Case is ignored. `least` is the minimum similarity, 0 to 1.
    """
    lower = {one.lower(): one for one in known}
    matches = difflib.get_close_matches(name.lower(), lower, n=3, cutoff=least)
    ratios = [difflib.SequenceMatcher(None, one, name.lower()).ratio() for one in matches]  # not symmetric: keep order
    return [lower[one] for one, ratio in zip(matches, ratios, strict=True) if ratio >= ratios[0] - _FAR_BEHIND]


_FAR_BEHIND = 0.15
_FEW = 8  # up to this many known names are all listed after the nearest
