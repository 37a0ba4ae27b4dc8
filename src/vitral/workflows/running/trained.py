"""Finished runs, read back in Python."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from vitral.console import Described, html_table
from vitral.epoch_metrics import of_pretraining, of_training
from vitral.errors import RunError
from vitral.frames import Rows
from vitral.inference.loading import load
from vitral.inference.predictor import Predictor
from vitral.kinds import checked
from vitral.pretraining.methods import METHODS
from vitral.training.callbacks import Epoch
from vitral.training.own_metrics import figures_of
from vitral.training.run_folder import RunFolder
from vitral.wording import natural
from vitral.workflows.tasks import evaluation_of, task_of

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

_HEIGHT = 600
"""Height of a report in a notebook, in pixels."""


@dataclass(frozen=True)
class Report:
    """The report of a run: a page of HTML, which a notebook shows inline."""

    path: Path

    def _repr_html_(self) -> str:
        page = html.escape(self.path.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" width="100%" height="{_HEIGHT}" sandbox="allow-scripts"></iframe>'


@dataclass(frozen=True, repr=False)
class TrainedRun(Described):
    """A finished run: its folder, and `result` as in result.json.

    You can pass it wherever vitral expects the path of a run folder, as in `vitral.evaluate(run)`.

    Example:
        run = vitral.runs("runs")["photos"]
        print(run.result["val_accuracy"], run.best, run.history)
        print(run.predictor("cat.jpg"))
    """

    folder: Path
    result: Mapping[str, Any]

    def __fspath__(self) -> str:
        return str(self.folder)

    @classmethod
    def read(cls, folder: str | Path) -> TrainedRun:
        """Read a finished run. Raises `RunError` for a folder that is not one, or is damaged."""
        run = RunFolder(folder)
        run.read_config()  # the error says what is missing
        if not run.result.is_file():
            hint = f"vitral train --out {run.path} --resume"
            raise RunError("the run is not finished", where=run.path, why="there is no result.json in it", hint=hint)
        return cls(run.path, run.read_result())

    @cached_property
    def predictor(self) -> Predictor:
        """The best weights, ready to use."""
        return load(self.folder)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of config.json: every option in `run`, the plan with its reasons, the data, the machine."""
        return RunFolder(self.folder).read_config()

    @cached_property
    def history(self) -> Rows[Epoch]:
        """The metrics of each epoch: a list of dicts, whose `to_frame()` is a pandas data frame."""
        return Rows(RunFolder(self.folder).read_history())

    @property
    def best(self) -> Epoch | None:
        """The epoch of `history` whose weights were kept; None if they come from no epoch, as with a linear probe."""
        number = self.result.get("best_epoch")
        return next((line for line in self.history if line.get("epoch") == number), None)

    def figures(self) -> dict[str, Figure]:
        """Return the training curves as figures of matplotlib, by title, such as "Loss"; none for a single epoch."""
        from vitral.evaluation.figures import draw_curves  # matplotlib takes a second to import

        run, best = RunFolder(self.folder).read_plan().run, self.result.get("best_epoch")
        if run.recipe in METHODS:
            metrics = of_pretraining()
        else:
            metrics = of_training((*task_of(run.task).figures, *figures_of(run.metrics)))
        drawn = draw_curves(self.history, best if self.result.get("keep") != "last" else None, metrics)
        return {one.title: one.figure for one in drawn}

    def report(self) -> Report:
        """Return the report. Raises `RunError` if the run has none."""
        path = RunFolder(self.folder).report
        if not path.is_file():
            hint = f"vitral train --out {self.folder} --resume writes it"
            raise RunError("the run has no report", where=path, hint=hint)
        return Report(path)

    def described(self) -> dict[str, str]:
        """Return the facts that `repr` and notebooks show, as a dict from name to text."""
        about = {name: str(self.result[name]) for name in ("model", "data") if name in self.result}
        return {"folder": repr(str(self.folder)), **about, **self.measured()}

    def measured(self) -> dict[str, str]:
        """Split → its headline, such as the accuracy with its interval."""
        return {
            split: f"{split}: {evaluation_of(self.result[split]).headline()}"
            for split in ("val", "test")
            if split in self.result
        }


class Runs(Sequence[TrainedRun]):
    """Finished runs of a folder, in the order of their names: by number, or by the name of their folder.

    Example:
        runs = vitral.runs("runs")
        print(runs["photos"].result["val_accuracy"], runs.to_frame())
    """

    def __init__(self, found: Sequence[TrainedRun]):
        self._found = tuple(found)

    def __len__(self) -> int:
        return len(self._found)

    @overload
    def __getitem__(self, which: int | str) -> TrainedRun: ...

    @overload
    def __getitem__(self, which: slice) -> Runs: ...

    def __getitem__(self, which: int | str | slice) -> TrainedRun | Runs:
        if isinstance(which, slice):
            return Runs(self._found[which])
        if isinstance(which, int):
            return self._found[which]
        named = {run.folder.name: run for run in self}
        if which not in named:
            raise KeyError(f"no finished run is called {which!r}; there are {', '.join(named) or 'none'}")
        return named[which]

    def __iter__(self) -> Iterator[TrainedRun]:
        return iter(self._found)

    def table(self) -> Rows[dict[str, Any]]:
        """Return one row per run: its name, and the numbers and texts in its result.json, such as `val_accuracy`."""
        return Rows(
            dict[str, Any](run=run.folder.name)
            | {name: value for name, value in run.result.items() if isinstance(value, str | int | float)}
            for run in self
        )

    def to_frame(self) -> pandas.DataFrame:
        """Return `table()` as a pandas data frame. Raises `MissingExtraError` if pandas is not installed."""
        return self.table().to_frame()

    def __repr__(self) -> str:
        return "\n".join(map(repr, self)) or "no finished runs"

    def _repr_html_(self) -> str:
        rows = [(run.folder.name, html.escape(", ".join(run.measured().values()))) for run in self]
        return html_table("Finished runs", rows)


@checked
def runs(folder: str | Path = "runs") -> Runs:
    """Read the finished runs in a folder, sorted by name.

    Folders that are not runs, and runs that are not finished or damaged, are left out.

    Args:
        folder: The folder that contains the run folders.

    Returns:
        The runs, by number or by the name of their folder.

    Raises:
        RunError: There is no such folder.

    Example:
        best = max(vitral.runs("runs"), key=lambda run: run.result["val_accuracy"])
    """
    place = Path(folder)
    if not place.is_dir():
        raise RunError("there is no such folder", where=place, hint="vitral train makes runs, in runs/")
    found = []
    for path in sorted(place.iterdir(), key=lambda path: natural(path.name)):
        try:
            found.append(TrainedRun.read(path))
        except RunError:
            continue
    return Runs(found)
