"""Train: from options to a run folder with weights, metrics and a report."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from vitral.console import stderr
from vitral.data import DataSet
from vitral.data.checks.validate import left_out
from vitral.data.tables_in_memory import Examples, as_path
from vitral.device import choose, cpu_threads, global_generators, plain_modes
from vitral.distributed.environment import restarted
from vitral.distributed.ranks import Ranks, joined
from vitral.errors import Interrupted, RunError, UsageError, VitralError
from vitral.folders import same_path
from vitral.kinds import checked
from vitral.model.own import OWN_PARTS, put_in_place, stands_for
from vitral.pretraining.methods import command
from vitral.stopping import stop_raises
from vitral.trackers import create_trackers
from vitral.training.callbacks import Callback, check_callbacks
from vitral.training.options import Run, checked_options
from vitral.training.own_metrics import parts_of
from vitral.training.plan import Plan
from vitral.training.progress import print_plan
from vitral.training.run_folder import RunFolder
from vitral.training.signatures import OPTIONS, with_listing
from vitral.weights.load import locate
from vitral.wording import flag
from vitral.workflows.planning.job import Job
from vitral.workflows.planning.plan import default_folder, load_given, own_data, plan_run, reopen
from vitral.workflows.planning.ranks import check_strategy
from vitral.workflows.planning.run_data import load_run_data
from vitral.workflows.planning.start import AUTO, NONE
from vitral.workflows.running.execute import check_overwrite, finished, run_job
from vitral.workflows.running.records import path_entry
from vitral.workflows.running.start_digests import changed_starts
from vitral.workflows.running.trained import TrainedRun


@with_listing
@partial(checked, but=("callbacks", "data"), options=OPTIONS)
def train(
    data: str | Path | DataSet | Examples | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    callbacks: Sequence[Callback] = (),
    began: float | None = None,
    **options: object,
) -> TrainedRun:
    """Train a network on images and return the run. The plan chooses all options that you leave out.

    The run folder holds the weights, the metrics and a report. Ctrl-C and SIGTERM save the run.

    Under torchrun all processes call this function and train together. The first one plans, prints, writes, and calls
    the callbacks. If one process fails, the others raise `Elsewhere`. Processes that torchrun starts again resume the
    run.

    Args:
        data: A path, the name of a data set, or data in memory: a torch Dataset of (image, label), arrays (images,
            labels), a DataFrame with paths and labels, a Hugging Face data set, or a dict of these by split. Leave it
            out for a `recipe` with data of its own, and to resume the run in `out`.
        resume: Continue the stopped run in `out`. On a CPU, the result is bit-identical to a run without a stop.
        overwrite: Replace an existing run.
        quiet: Print nothing.
        callbacks: Objects whose methods are called during the run, after the trackers that `log` adds. A run does not
            store them: pass them again to resume.
        began: Start of the time limit `minutes`, as a value of `time.monotonic()`; the limit then covers planning and
            the report, too. By default, it covers training and validation.
        options: Fields of `vitral.Run`, which are listed below. The folder `out` is by default runs/NAME.

    Returns:
        The finished run.

    Raises:
        UsageError: An option has a wrong name or value, or does not fit the others.
        DataError: The images cannot be read, or the labels are not clear.
        WeightsError: The initial weights are missing, damaged, or do not fit.
        RunError: The run folder exists already, or there is no run to resume.
        Interrupted: You stopped the run. It is a `KeyboardInterrupt`, and its text says how to go on.

    Example:
        run = vitral.train("photos/", epochs=2, out="runs/pets")
        print(run.result["val_accuracy"])
    """
    if resume and overwrite:
        why = "one resumes the existing run, the other replaces it"
        raise UsageError("--resume and --overwrite are mutually exclusive", why=why, hint="leave one out")
    given = checked_options({name: value for name, value in options.items() if value is not None})
    if data is not None:
        given["data"] = as_path(data)
    check_callbacks(callbacks)
    if lacks_data(given, resume):
        raise no_data("train")
    with stop_raises(), plain_modes(), global_generators(), joined(given.get("device", "auto")) as ranks:
        console = stderr(quiet=quiet or not ranks.main)
        try:
            again = any(ranks.exchange(restarted()))  # torchrun passes it to the ranks of one machine only
            if resume or (again and ranks.share(lambda: folder_of(given).is_run())):
                return _resume(given, console, callbacks, ranks)
            return _start(given, console, overwrite, callbacks, ranks, began)
        except Interrupted:
            raise
        except KeyboardInterrupt:
            restart = command(given) + (" --resume" if resume else "")
            raise Interrupted(restart, saved=False) from None


def lacks_data(given: Mapping[str, object], resume: bool) -> bool:
    """True if nothing says which images to train on: no data, no recipe with data of its own, no run to resume."""
    if "data" in given or (resume and given.get("out")):
        return False
    return own_data(given, choose("cpu")) == Run.data


def no_data(function: str) -> UsageError:
    """Return the error of a function of Python that gets no data."""
    hint = f'vitral.{function}("photos/"), or vitral.{function}("digits") to try it'
    return UsageError(f"vitral.{function} needs data", why="no folder, file or name of a data set is given", hint=hint)


def _start(
    given: dict[str, Any],
    console: Console,
    overwrite: bool,
    callbacks: Sequence[Callback],
    ranks: Ranks,
    began: float | None,
) -> TrainedRun:
    callbacks = [*_trackers(given.get("log", ()), console), *callbacks] if ranks.main else []
    jobs: list[Job] = []

    def check(path: str, run: Run | None = None) -> None:
        if (folder := RunFolder(path)).exists():
            folder.check_unlocked()
            check_overwrite(folder, overwrite, run)

    def planned() -> Plan:
        job = plan_run(given, began, check)
        check(job.run.out or "", job.run)
        if job.unreadable:
            console.print(left_out(job.unreadable), highlight=False, soft_wrap=True, markup=False)
        print_plan(console, job.plan)
        jobs.append(job)
        return job.plan

    plan = ranks.share(planned)
    job = jobs[0] if jobs else reopen(plan)
    folder = RunFolder(job.run.out or "")
    with cpu_threads(job.run.threads):
        return run_job(job, folder, console, command(given), callbacks=callbacks, overwrite=overwrite)


def _resume(given: dict[str, Any], console: Console, callbacks: Sequence[Callback], ranks: Ranks) -> TrainedRun:
    done = ranks.share(lambda: _plan_to_resume(given, console))
    if isinstance(done, TrainedRun):
        return done
    plan, path = done
    folder, job = RunFolder(path), reopen(plan)
    if ranks.together and "strategy" in given:
        ranks.share(lambda: check_strategy(job.run, job.machine))
    ranks.share(lambda: _check_start(job, folder))
    callbacks = [*_trackers(given.get("log", plan.run.log), console), *callbacks] if ranks.main else []
    with cpu_threads(job.run.threads):
        return run_job(job, folder, console, plan.command, callbacks=callbacks, resume=True)


def _plan_to_resume(given: dict[str, Any], console: Console) -> tuple[Plan, Path] | TrainedRun:
    """Return the plan of the run and its folder, or the run if it is finished already."""
    given = checked_options(given)
    Run(**given)  # report invalid options first
    folder = folder_of(given)
    if not folder.path.exists():
        raise RunError("there is no run to resume", where=folder.path, hint="leave out --resume to start one")
    kept = folder.read_plan()
    folder.check_unlocked()
    plan = _relocate(kept, given.get("data"))
    _put_parts_in_place(given, plan.run)
    differing = [name for name, value in given.items() if name not in _FREE and not _same_value(plan, name, value)]
    if differing:
        name = differing[0]
        raise UsageError(
            f"--resume cannot change options of the run; {flag(name)} differs",
            where=folder.path,
            why=f"it was {getattr(plan.run, name)}",
            hint=f"leave out that option, or start a new run: --init {shlex.quote(str(folder.path))} --out …",
        )
    if plan is not kept:
        record = folder.read_config()
        record["paths"] = {**record.get("paths", {}), **path_entry("data", plan.paths["data"], folder.path)}
        record["command"] = plan.command
        folder.write(folder.config, json.dumps(record, indent=2) + "\n")
        console.print(f"the run's data are now at {plan.located('data')}", highlight=False, soft_wrap=True)
    if folder.is_finished():
        locate(folder.path)  # raises if the weights are missing
        return finished(folder, console)
    if "strategy" in given:
        plan = dataclasses.replace(plan, run=dataclasses.replace(plan.run, strategy=given["strategy"]))
    return plan, folder.path


_FREE = ("log", "out", "strategy")
"""Options that may differ when a run is resumed."""


def folder_of(given: Mapping[str, Any]) -> RunFolder:
    """Return the run folder of these options, without --out by the name of the data."""
    if out := given.get("out"):
        return RunFolder(out)
    return RunFolder(default_folder(given, load_given(given, choose(given.get("device", "auto")))))


def _trackers(names: Sequence[str], console: Console) -> list[Callback]:
    names = [names] if isinstance(names, str) else names
    return create_trackers(
        names, lambda line: console.print(line, style="yellow", highlight=False, soft_wrap=True, markup=False)
    )


def _relocate(plan: Plan, data: str | None) -> Plan:
    """Return the plan with a new path of its data, if `data` has the contents that the run began with."""
    there = os.path.expanduser(data or "")
    if plan.fingerprint is None or not os.path.exists(there) or _same_value(plan, "data", data):
        return plan
    moved = dataclasses.replace(
        plan,
        paths={**plan.paths, "data": os.path.realpath(there)},
        command=plan.command.replace(shlex.quote(plan.run.data), shlex.quote(str(data)), 1),
    )
    try:
        own = load_run_data(moved)
    except VitralError:  # no images
        return plan
    if own.continues:
        return moved
    if not os.path.exists(os.path.expanduser(plan.located("data"))):
        raise own.changed(f"restore them, or {moved.restart_hint}")
    return plan


def _check_start(job: Job, folder: RunFolder) -> None:
    """Raise `RunError` for another teacher, and for other initial weights unless a checkpoint replaces them."""
    for option, error in changed_starts(job, folder):
        if option != "init" or not folder.last.is_file():
            raise error


def _put_parts_in_place(given: Mapping[str, Any], run: Run) -> None:
    """Let the run use the parts of this process that are passed again, under the names that it kept."""
    pairs = [(value, getattr(run, name)) for name, value in given.items() if name in (*OWN_PARTS, "data")]
    if len(given.get("metrics", ())) == len(run.metrics):
        pairs += zip(parts_of(given.get("metrics", ())).values(), parts_of(run.metrics).values(), strict=True)
    for value, kept in pairs:
        if stands_for(value, kept):
            put_in_place(value, kept)


def _same_value(plan: Plan, name: str, value: Any) -> bool:
    """True if an option has the value that the run began with; a path may be written differently."""
    if name == "init" and value == AUTO:
        return True
    kept = getattr(plan.run, name)
    if name == "metrics":
        return len(kept) == len(value) and all(map(_same_metric, kept, value))
    if stands_for(value, kept):
        return True
    if name in ("data", "data_root", "init", "teacher") and value and same_path(value, plan.located(name) or ""):
        return True
    return bool(_canonical(name, kept) == _canonical(name, value))


def _same_metric(kept: str, value: str) -> bool:
    (name, before), (other, now) = kept.split("=", 1), value.split("=", 1)
    return name == other and (before == now or stands_for(now, before))


def _canonical(name: str, value: Any) -> object:
    """Return the canonical form of a value that can be given in several forms."""
    if name == "data":
        return Path(value)  # photos and photos/
    if name in ("mean", "std") and isinstance(value, (tuple, list)):
        return value[0] if len(set(value)) == 1 else tuple(value)
    if name == "init":
        return None if value == NONE else value
    return (value, value) if name == "image_size" and isinstance(value, int) else value
