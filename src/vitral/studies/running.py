"""Run a study: train every cell that has no result yet, one after another."""

from __future__ import annotations

import functools
import os
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from vitral import activity
from vitral.atomic import write_text
from vitral.data import load
from vitral.data.targets import require_one_class
from vitral.digest import sealed_json
from vitral.errors import Interrupted, RunError, TrainingError
from vitral.kinds import checked
from vitral.studies.conclusions import FROM_NOTHING
from vitral.studies.results import MEASURED_ON, ON_VALIDATION, Outcome, Results, check_held_out, read_outcome
from vitral.studies.search import Pruned, Tell, search
from vitral.studies.study import Cell, Study, StudyFolder
from vitral.training.callbacks import Callback, RunStart
from vitral.training.plan import Plan
from vitral.training.run_folder import RunFolder
from vitral.wording import count, duration
from vitral.workflows.planning.plan import reopen
from vitral.workflows.planning.run_data import load_run_data
from vitral.workflows.running.start_digests import WHAT, changed_starts
from vitral.workflows.tasks import TASKS
from vitral.workflows.train import train


@checked
def run_study(study: Study, folder: str | Path, *, tell: Tell = lambda line: None) -> Results:
    """Train the runs of a study that are not finished, and return the results; results.csv is written after each.

    A finished run is left as it is, a begun one resumes. A run that diverges is recorded and left. One that another
    process is training is left to it, so that several processes may share a study. `tell` gets a line for each run.
    Raises `Interrupted` when the user stops, with the command that continues; and the errors of `vitral.train`.
    """
    place = StudyFolder(folder)
    _check_images(study, place)
    place.open(study)
    if study.design.searches:
        return _search(study, place, tell)
    outcomes = {cell.name: read_outcome(cell, place) for cell in study.cells}
    left = [cell for cell in study.cells if outcomes[cell.name].status in ("open", "begun")]
    if len(left) < len(study.cells):
        tell(f"{len(study.cells) - len(left)} of {len(study.cells)} runs are finished")
    if left and os.path.exists(study.data):
        dataset = load(study.data, tasks=tuple(TASKS))
        require_one_class(dataset.targets, study.data, "a study")  # other tasks have no accuracy
    if left:
        tell(f"{count(len(left), 'run')} to train{_each(study, len(study.cells))}")
        if study.start:
            tell(FROM_NOTHING)
    for done, cell in enumerate(left):
        number, began = f"{study.cells.index(cell) + 1}/{len(study.cells)}", time.perf_counter()
        numbered = functools.partial(lambda number, line: tell(f"{number} {line}"), number)
        outcome = _run(cell, place, numbered, (_Following(f"{number} {cell.name}"),))
        outcomes[cell.name] = outcome
        for name, one in outcomes.items():  # other processes may have finished some: the last one reports all runs
            if one.status in ("open", "begun"):
                outcomes[name] = read_outcome(one.cell, place)
        check_held_out(list(outcomes.values()))
        if not done and (rest := (len(left) - 1) * (time.perf_counter() - began)):
            tell(f"about {duration(rest)} left for {len(left) - 1} more")
        write_results(Results(study, tuple(outcomes[one.name] for one in study.cells)), place)
    return write_results(Results(study, tuple(outcomes[one.name] for one in study.cells)), place)


def _each(study: Study, runs: int) -> str:
    """Describe the time of each run."""
    share = duration(60 * (study.minutes or 0) / runs)
    return f" of {share} each, and some 10 to 30 s more to plan, measure and report it" if study.minutes else ""


class _Following(Callback):
    """Say how far a run is: its own lines are silent."""

    def __init__(self, name: str):
        self.name, self.epochs = name, ""
        activity.tell(name)

    def on_run_start(self, start: RunStart) -> None:
        self.epochs = f" of {start.options['epochs']}"

    def on_epoch_start(self, epoch: int, batches: int, done: int) -> None:
        activity.tell(f"{self.name}: epoch {epoch + 1}{self.epochs}", passing=True)


def _check_images(study: Study, place: StudyFolder) -> None:
    """Raise `RunError` if the images are not those of the runs that are there: the table would compare two data sets.

    One run is enough, since each was checked against an earlier one. Data that are not there any more are left to the
    runs that need them. Initial weights and a teacher are compared likewise, those of each path once.
    """
    runs = [run for path in sorted(place.cells.glob("*")) if (run := RunFolder(path)).config.is_file()]
    if runs and os.path.exists(study.data) and not (own := load_run_data(runs[0].read_plan())).continues:
        what = "the images of the study have changed"
        raise RunError(what, where=place.path, why="; ".join(own.changes), hint=_RESTORE)
    plans = dict[tuple[str, ...], tuple[Plan, RunFolder]]()
    for run in runs:
        with suppress(RunError):  # another process begins it
            plan = run.read_plan()
            plans.setdefault(tuple(path for name in WHAT if (path := plan.located(name))), (plan, run))
    for used, (plan, run) in plans.items():
        needed = (*used, *([plan.located("data")] if "data" in plan.paths else []))
        if used and all(os.path.exists(os.path.expanduser(path)) for path in needed):
            _check_start(plan, run)


def _check_start(plan: Plan, run: RunFolder) -> None:
    for _, error in changed_starts(reopen(plan), run):
        raise RunError(error.what, where=error.where, why="runs of the study began with others", hint=_RESTORE)


_RESTORE = "restore them, or another --out"


def _search(study: Study, place: StudyFolder, tell: Tell) -> Results:
    def trained(cell: Cell, tell: Tell, callback: Callback) -> Outcome:
        return _run(cell, place, tell, (callback, _Following(cell.name)), ON_VALIDATION)

    def save(results: Results) -> None:
        write_results(results, place)

    tell(f"at most {count(study.trials, 'trial')}{_each(study, study.trials)}")
    return write_results(search(study, place, trained, save, tell), place)


def write_results(results: Results, place: StudyFolder) -> Results:
    """Write results.csv, and return the results."""
    write_text(place.results, results.to_csv())
    return results


def _run(
    cell: Cell,
    place: StudyFolder,
    tell: Tell,
    callbacks: Sequence[Callback] = (),
    splits: Sequence[str] = MEASURED_ON,
) -> Outcome:
    """Train one cell, or go on with it; `splits` are those to measure it on, the first that the run has."""
    started = time.perf_counter()
    try:
        _train(cell, place, callbacks)
    except Interrupted as stopped:
        raise Interrupted(f"vitral study resume {shlex.quote(str(place.path))}", saved=True) from stopped
    except Pruned as stopped:
        record = {
            "status": "pruned",
            "why": stopped.why,
            "curve": stopped.curve,
            "planned_epochs": stopped.epochs,
            "seconds": time.perf_counter() - started,
        }
        write_text(place.outcome(cell), sealed_json(record))
        tell(f"{cell.name}  stopped after epoch {len(stopped.curve)} of {stopped.epochs}: {stopped.why}")
        return read_outcome(cell, place, splits)
    except TrainingError as error:
        if "memory" in error.what:  # not a result of the network: another try may have more
            raise
        write_text(place.outcome(cell), sealed_json({"status": "failed", "why": error.what}))
        tell(f"{cell.name}  failed: {error.what}")
        return read_outcome(cell, place, splits)
    except RunError as error:
        if "another process" not in error.what:
            raise
        tell(f"{cell.name}  left to the process that trains it")
        return read_outcome(cell, place, splits)
    outcome = read_outcome(cell, place, splits)
    measured = f"accuracy {outcome.accuracy:.2%}" if outcome.accuracy is not None else "no held-out images"
    tell(f"{cell.name}  {measured}  {duration(time.perf_counter() - started)}")
    return outcome


def _train(cell: Cell, place: StudyFolder, callbacks: Sequence[Callback]) -> None:
    run = RunFolder(place.cell(cell))
    if run.is_run():
        train(out=run.path, resume=True, quiet=True, callbacks=callbacks)
    else:
        train(out=run.path, quiet=True, callbacks=callbacks, **cell.options)
