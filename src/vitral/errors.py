"""Everything that vitral refuses to do, and how it says so.

    VitralError                 what, where, why, what to type; exit code 2
    ├── UsageError              the request makes no sense: unknown name, option or size
    ├── DataError               the data are not what they should be
    │   └── ImageError          one picture cannot be read; `.name` says which
    ├── WeightsError            a weights file is damaged, foreign or does not fit
    ├── RunError                a run folder exists, is missing or is not one
    ├── TrainingError           training cannot go on (non-finite loss, disk full)
    └── MissingExtraError       an optional package is not installed

`Interrupted` stands beside the tree: a person pressed Ctrl-C, the state is saved, exit code 130.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


class VitralError(Exception):
    """One mistake in at most five lines: what, where, why, what to type.

    `what` is a short clause without a full stop; the other parts are optional, one line each.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: object = None, why: str | None = None, hint: str | None = None):
        self.what, self.where, self.why, self.hint = what, where, why, hint
        parts = (("where", where), ("why", why), ("try", hint))
        # A part never breaks the line: a file name may hold a newline, a library's message often does.
        lines = [what, *(f"  {label}: {part}" for label, part in parts if part is not None)]
        super().__init__("\n".join(" ".join(line.splitlines()) for line in lines))


class UsageError(VitralError, ValueError):
    """The request makes no sense as it stands."""


class DataError(VitralError, ValueError):
    """The data are not what they should be."""


class ImageError(DataError):
    """One picture cannot be read; `name` says which."""

    def __init__(self, name: str, why: str, *, hint: str | None = None):
        self.name = name
        super().__init__("cannot read picture", where=name, why=why, hint=hint)


class WeightsError(VitralError, ValueError):
    """A weights file is damaged, of another kind, or does not fit the model."""


class RunError(VitralError):
    """A run folder exists already, is missing, or is not one."""


class TrainingError(VitralError, RuntimeError):
    """Training cannot go on; what was saved before stays."""


class MissingExtraError(VitralError, ImportError):
    """An optional package is not installed."""


class Interrupted(Exception):  # noqa: N818 - it is no error
    """A person pressed Ctrl-C; `command` goes on from the state that is `saved`, or begins anew where none is."""

    exit_code = 130

    def __init__(self, command: str, *, saved: bool = True):
        self.command, self.saved = command, saved
        super().__init__(command)


def unknown(
    kind: str, name: object, known: Iterable[str], hint: str | None = None, elsewhere: Mapping[str, str] | None = None
) -> UsageError:
    """The error for a name that is in no table, with the nearest names that are. `elsewhere` has names that other
    programs give to what is in the table.
    """
    names = sorted(known)
    meant = {**(elsewhere or {}), **{one: one for one in names}}
    near = dict.fromkeys(meant[one] for one in nearest(str(name), meant))
    listed = f"known: {', '.join(names[:12])}{' …' if len(names) > 12 else ''}"
    shown = [f"nearest: {', '.join(near)}"] if near else []
    shown += [listed] if len(near) < len(names) <= _FEW or not near else []
    return UsageError(f"unknown {kind} '{name}'", why="; ".join(shown), hint=hint)


def empty(what: str, hint: str) -> UsageError:
    """The error for a path or a name without a letter: `Path("")` would be the current folder."""
    return UsageError(f"{what} is empty", why="a variable of the shell that is not set leaves such a word", hint=hint)


def nearest(name: str, known: Iterable[str], least: float = 0.6) -> list[str]:
    """Up to three known names that look like this one, the most alike first; none that is far behind it. Capitals do
    not count. `least` is the likeness, 0 to 1, below which a name is no candidate.
    """
    lower = {one.lower(): one for one in known}
    found = difflib.get_close_matches(name.lower(), lower, n=3, cutoff=least)
    alike = [difflib.SequenceMatcher(None, one, name.lower()).ratio() for one in found]  # in this order: it matters
    return [lower[one] for one, ratio in zip(found, alike, strict=True) if ratio >= alike[0] - _FAR_BEHIND]


_FAR_BEHIND = 0.15
_FEW = 8  # names that are all told, beside the nearest
