"""Take the results home: of a trained run a table of predictions for the other images, a web page, and ONNX; without a
run, the page on which visitors teach the same classes.

Each is a command of vitral in a process of its own, as a person would type it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitral.atomic import write_text
from vitral.errors import UsageError
from vitral.labeling.process import Process
from vitral.labeling.session import Session
from vitral.web import serving_command
from vitral.wording import shown

KINDS = ("table", "web", "onnx", "teach")
_UNREADABLE = 1
"""Exit code of `vitral predict` for a table whose column `error` names images that cannot be read."""


@dataclass(frozen=True)
class _Made:
    """A command that makes something."""

    run: Path | None
    """The run of which it is made; None if it needs none."""
    process: Process
    result: Path


class Home:
    """The latest command of each kind."""

    def __init__(self, session: Session, program: Sequence[str], page: Path):
        """`page` is the folder of the page that is made without a run."""
        self.session, self.program, self.page = session, program, page
        self._made: dict[str, _Made] = {}

    def end(self) -> None:
        """End what is not done."""
        for one in self._made.values():
            one.process.end()

    def make(self, kind: str, run: Path | None) -> None:
        """Begin to make one of `KINDS`, of a run or for `teach` without one.

        Raises `UsageError` without the run, while it is being made, and for a table if no image is left for it.
        """
        if kind not in KINDS:
            raise UsageError(f"'{kind[:40]}' cannot be made", hint=", ".join(KINDS))
        before = self._made.get(kind)
        if before is not None and before.process.code is None:
            raise UsageError("it is being made already", hint="wait until it is done")
        if kind == "teach":
            run, (words, result) = None, self._page()
        elif run is None:
            raise UsageError("no run is done yet", hint="train first")
        else:
            words, result = self._table(run) if kind == "table" else _export(kind, run)
        if before is not None:
            before.process.end()
        self._made[kind] = _Made(run, Process(self.program, words), result)

    def _page(self) -> tuple[list[str], Path]:
        """Name the classes for the page on which visitors teach."""
        classes = self.session.state.classes
        words = ["label", "--export", str(self.page), "--overwrite", *(["--classes", *classes] if classes else [])]
        return words, self.page

    def _table(self, run: Path) -> tuple[list[str], Path]:
        """List the images that have no label, for `vitral predict`."""
        if not (rest := self.rest()):
            raise UsageError("every image has a label", hint="open other images with vitral label")
        listed, result = run / "rest.txt", run / "predictions.csv"
        write_text(listed, "".join(f"{path}\n" for path in rest))
        result.unlink(missing_ok=True)  # what is there afterwards is new
        return ["predict", str(run), str(listed), "--out", str(result)], result

    def rest(self) -> list[str]:
        """Return the paths of images without a label; excluded ones are left out."""
        session = self.session
        marks = enumerate(session.state.marks)
        return [
            session.path(i)
            for i, mark in marks
            if mark.checked != "excluded" and (not mark.label or mark.checked == "unsure") and i not in session.missing
        ]

    def to_json(self, run: Path | None) -> dict[str, Any]:
        """Return the state of each of `KINDS`, of this run: `none`, `running`, `done` with path, `failed` with why."""
        return {kind: self._one(self._made.get(kind), run) for kind in KINDS}

    def _one(self, made: _Made | None, run: Path | None) -> dict[str, str]:
        if made is None or made.run not in (None, run):
            return {"state": "none"}
        code = made.process.code
        if code is None:
            return {"state": "running"}
        if code == 0 or (code == _UNREADABLE and made.result.is_file()):
            plain = {"state": "done", "path": shown(str(made.result)), "next": _next(made.result)}
            return {**plain, "note": made.process.error() if code else ""}
        return {"state": "failed", "why": made.process.error()}


def _export(kind: str, run: Path) -> tuple[list[str], Path]:
    result = run / "export" / kind
    return ["export", str(run), "--to", kind, "--out", str(result), "--overwrite"], result


def _next(result: Path) -> str:
    """Return the command that opens a web page; "" for what a person opens otherwise."""
    is_page = (result / "index.html").is_file()
    return serving_command(result) if is_page else ""
