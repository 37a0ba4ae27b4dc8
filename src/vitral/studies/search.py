"""Run a search: trials one after another, each an ordinary run, the next one drawn from the results so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from vitral.errors import UsageError
from vitral.studies.results import Outcome, Results, check_held_out, read_results
from vitral.studies.sampling import UNPRUNED, Past, check_installed, is_hopeless, median_at, propose, step_of
from vitral.studies.study import Cell, Study, StudyFolder, shown
from vitral.training.callbacks import Callback, Epoch, RunStart

Tell = Callable[[str], None]

Train = Callable[[Cell, Tell, Callback], Outcome]
"""Train a cell, or go on with it, followed by the callback."""


class Pruned(Exception):  # noqa: N818 - not an error
    """A trial is stopped before its end: `why`, the validation accuracy after each of its epochs, and the epochs that
    it was planned for.
    """

    def __init__(self, why: str, curve: tuple[float, ...], epochs: int):
        self.why, self.curve, self.epochs = why, curve, epochs
        super().__init__(why)


def search(study: Study, place: StudyFolder, train: Train, save: Callable[[Results], None], tell: Tell) -> Results:
    """Train the trials of a search that are not finished, until there are `study.trials` or the time is up.

    The same folder gives the same trials, also if the search was killed in between; finished ones are left as they
    are. Trials are chosen by validation accuracy alone. `save` gets the results after each trial.
    """
    check_installed()
    results = _checked(read_results(study, place))
    if ended := sum(one.ended for one in results.outcomes):
        tell(f"{ended} of at most {study.trials} trials are finished")
    while not results.finished:
        outcomes = [one for one in results.outcomes if one.ended]
        cells = [one.cell for one in results.outcomes]
        past = [_past(study, one) for one in outcomes]
        if len(cells) == len(outcomes):
            cells.append(study.trial(len(cells), propose(study, past)))
            place.write_trials(cells)
        cell, number = cells[len(outcomes)], f"{len(outcomes) + 1}/{study.trials}"
        pruner = _Pruner(partial(_reason, study, past), _by_epoch(study))
        outcome = train(cell, partial(_numbered, tell, number, cell), pruner)
        results = _checked(Results(study, (*outcomes, outcome)))
        save(results)
        if not outcome.ended:  # another process trains it
            break
    return results


def _checked(results: Results) -> Results:
    if bad := next((one for one in results.outcomes if one.done and one.accuracy is None), None):
        why = f"{bad.cell.name} has no validation images"
        raise UsageError("there is nothing to choose by", why=why, hint="--set val_fraction=0.1")
    check_held_out(results.outcomes)
    return results


def _numbered(tell: Tell, number: str, cell: Cell, line: str) -> None:
    values = " ".join(f"{name}={shown(value)}" for name, value in cell.factors.items())
    tell(f"{number} {line}  {values}")


def _by_epoch(study: Study) -> bool:
    """True if all trials have the same number of epochs."""
    return "epochs" not in study.vary and (study.minutes is None or "epochs" in study.options)


def _past(study: Study, one: Outcome) -> Past:
    epochs = one.planned_epochs or len(one.curve)
    curve = {step_of(k, epochs, _by_epoch(study)): value for k, value in enumerate(one.curve, 1)}
    return Past(one.cell.factors, one.accuracy if one.done else None, curve)


def _reason(study: Study, past: Sequence[Past], curve: Mapping[int, float]) -> str:
    """Return the reason to stop a trial; "" to go on."""
    if sum(one.accuracy is not None for one in past) < UNPRUNED or not is_hopeless(study, past, curve):
        return ""
    median = median_at(past, max(curve))
    return f"{max(curve.values()):.2%} by then, below the median of {median:.2%}" if median is not None else "no value"


class _Pruner(Callback):
    """Stop a trial after an epoch if there is a reason to."""

    def __init__(self, reason: Callable[[Mapping[int, float]], str], by_epoch: bool):
        self.reason, self.by_epoch = reason, by_epoch
        self.epochs = 0
        self.values = list[float]()

    def on_run_start(self, run: RunStart) -> None:
        self.epochs = run.options["epochs"]
        self.values = [line["val_accuracy"] for line in run.history if "val_accuracy" in line]

    def on_epoch_end(self, line: Epoch, best: bool) -> None:
        if "val_accuracy" not in line:
            return
        self.values.append(line["val_accuracy"])
        curve = {step_of(k, self.epochs, self.by_epoch): value for k, value in enumerate(self.values, 1)}
        if len(self.values) < self.epochs and (why := self.reason(curve)):
            raise Pruned(why, tuple(self.values), self.epochs)
