"""Carrying a run out: from a plan to a run folder with weights, metrics and a report."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import os
import platform
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from vitral import __version__
from vitral.console import command_line, flag, stderr
from vitral.data.check import Unreadable, left_out, readable
from vitral.data.contents import digest
from vitral.data.loader import Batches
from vitral.device import OthersWork, crowded, keep_freed_memory, seed_everything
from vitral.errors import Interrupted, RunError, UsageError, VitralError, WeightsError
from vitral.evaluation.metrics import Evaluation, measure
from vitral.model import Network, ViT
from vitral.model.linear import plainly
from vitral.model.summary import summarize
from vitral.predict import Predictor, load, logits_of
from vitral.recipes.evaluation import CAUTION
from vitral.recipes.features import FeatureCache
from vitral.recipes.learning import begin, objective_of
from vitral.recipes.pace import keeps_up
from vitral.recipes.planning import Job, load_given, plan_run, reopen, teacher_of
from vitral.recipes.probe import fit_probe
from vitral.recipes.room import at_once, memory_told
from vitral.recipes.run_data import own_data
from vitral.training.compiling import CompiledObjective, Stopwatch, compiler_timed
from vitral.training.loop import Averaged, State, fit
from vitral.training.objective import Halves, balanced_weights
from vitral.training.optimizers import OptimizerSet
from vitral.training.progress import KEEP_THEM, ConsoleListener, counting, print_plan
from vitral.training.run import Choice, Plan, Run, RunFolder, checked_options
from vitral.training.schedule import image_size
from vitral.training.step import step_of
from vitral.weights import native
from vitral.weights.files import write_text
from vitral.weights.load import locate
from vitral.weights.references import is_demo


@dataclass(frozen=True)
class TrainedRun:
    """A finished run: its folder, and `result` as in result.json."""

    folder: Path
    result: Mapping[str, Any]

    @cached_property
    def predictor(self) -> Predictor:
        """The best weights, ready to use."""
        return load(self.folder)


def train(
    data: str | Path | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    **options: Any,
) -> TrainedRun:
    """Train on `data` and return the run; `options` are fields of `vitral.Run`, all others follow from the data.

    The run folder is `out`, by default runs/NAME. `resume` goes on from where it stopped, to the same bits; `overwrite`
    replaces a run that is there. Raises the errors of `vitral.errors`; Ctrl-C saves and raises `Interrupted`.
    """
    if resume and overwrite:
        why = "one goes on with the run that is there, the other replaces it"
        raise UsageError("--resume and --overwrite do not go together", why=why, hint="leave one out")
    given = {name: value for name, value in options.items() if value is not None}
    if data is not None:
        given["data"] = str(data)
    console = stderr(quiet=quiet)
    return _resume(given, console) if resume else _start(given, console, overwrite)


def _start(given: dict[str, Any], console: Console, overwrite: bool) -> TrainedRun:
    job = plan_run(given)
    folder = RunFolder(job.run.out or "")
    if folder.exists():
        folder.check_free()
        _make_way(folder, overwrite, job.run)
    print_plan(console, job.plan)
    return _carry_out(job, folder, console, command(given), overwrite=overwrite)


def _ended(folder: RunFolder, console: Console) -> TrainedRun:
    console.print(f"{folder.path} is finished already; nothing to do.")
    return TrainedRun(folder.path, folder.read_result())


def _make_way(folder: RunFolder, overwrite: bool, run: Run) -> None:
    if not overwrite:
        free = next(f"{folder.path}-{n}" for n in range(2, 10_000) if not RunFolder(f"{folder.path}-{n}").exists())
        hint = f"--resume, --out {shlex.quote(free)} or --overwrite (in Python resume=True, out=…, overwrite=True)"
        raise RunError("the run folder exists already", where=folder.path, hint=hint)
    if not folder.is_run():
        why = "it is no run folder, and is not ours to replace"
        raise RunError("will not overwrite this", where=folder.path, why=why, hint="another --out")
    for name in ("data", "init", "teacher"):
        needed = os.path.expanduser(getattr(run, name) or "")
        if os.path.exists(needed) and Path(needed).resolve().is_relative_to(folder.path.resolve()):
            why = f"{'what is learned from' if name == 'data' else flag(name)}, {needed}, is in it"
            raise RunError("will not overwrite this", where=folder.path, why=why, hint="another --out")


def _resume(given: dict[str, Any], console: Console) -> TrainedRun:
    given = checked_options(given)
    Run(**given)  # what makes no sense by itself is said first
    folder = RunFolder(given.get("out") or f"runs/{load_given(given).name}")
    if not folder.path.exists():
        raise RunError("there is no run to go on with", where=folder.path, hint="without --resume one begins")
    kept = folder.read_plan()
    folder.check_free()
    plan = _found_again(kept, given.get("data"))
    differing = [name for name, value in given.items() if name != "out" and not _same_value(plan, name, value)]
    if differing:
        name = differing[0]
        raise UsageError(
            f"--resume goes on with the run as it was; {flag(name)} differs",
            where=folder.path, why=f"it was {getattr(plan.run, name)}",
            hint=f"without that option, or a new run: --init {shlex.quote(str(folder.path))} --out …",
        )  # fmt: skip
    if plan is not kept:
        _remember_the_move(plan, folder)
        console.print(f"its data are at {plan.located('data')} now", highlight=False, soft_wrap=True)
    if folder.result.is_file():
        locate(folder.path)  # it has its weights, or says so
        return _ended(folder, console)
    job = reopen(plan)
    job = dataclasses.replace(job, teacher=teacher_of(plan.located("teacher"), job.run.channels, job.dataset.classes))
    _check_teacher(job, folder)
    return _carry_out(job, folder, console, plan.command, resume=True)


def _found_again(plan: Plan, data: str | None) -> Plan:
    """The plan of a run whose data have moved to where they are typed now: what they hold tells that it is they."""
    there = os.path.expanduser(data or "")
    if plan.contents is None or not os.path.exists(there) or _same_value(plan, "data", data):
        return plan
    moved = dataclasses.replace(
        plan, paths={**plan.paths, "data": os.path.realpath(there)},
        command=plan.command.replace(shlex.quote(plan.run.data), shlex.quote(str(data)), 1),
    )  # fmt: skip
    try:
        own = own_data(moved)
    except VitralError:  # no pictures at all
        return plan
    if not own.changes:
        return moved
    if not os.path.exists(os.path.expanduser(plan.located("data"))):
        raise own.changed(f"put them back as they were, or {moved.anew}")
    return plan


def _remember_the_move(plan: Plan, folder: RunFolder) -> None:
    """The run folder keeps the new place of the data."""
    record = json.loads(folder.config.read_text("utf-8"))
    record["paths"] = {**record.get("paths", {}), **_way("data", plan.paths["data"], folder.path)}
    record["command"] = plan.command
    write_text(folder.config, json.dumps(record, indent=2) + "\n")


def _check_teacher(job: Job, folder: RunFolder) -> None:
    """The teacher must be the one that the run began with, or the run would not end as it would have."""
    if job.teacher is None:
        return
    began = json.loads(folder.config.read_text("utf-8")).get("teacher", {}).get("digest")
    if began != native.digest(job.teacher.weights.state):
        why = "the run began with other weights in that place"
        hint = f"put them back, or {job.plan.anew}"
        raise RunError("the teacher has changed", where=job.run.teacher, why=why, hint=hint)


def _same_value(plan: Plan, name: str, value: Any) -> bool:
    """Whether an option was the same when the run began; a path may have another spelling."""
    if name in ("data", "data_root", "init", "teacher") and value and os.path.exists(there := plan.located(name) or ""):
        here = os.path.expanduser(value)
        if os.path.exists(here) and os.path.samefile(here, os.path.expanduser(there)):
            return True
    return bool(_plain(name, getattr(plan.run, name)) == _plain(name, value))


def _plain(name: str, value: Any) -> Any:
    """The one form of a value that can be given in several."""
    if name == "data":
        return Path(value)  # photos and photos/
    if name in ("mean", "std") and isinstance(value, (tuple, list)):
        return value[0] if len(set(value)) == 1 else tuple(value)
    return (value, value) if name in ("image_size", "start_size") and isinstance(value, int) else value


def command(given: Mapping[str, Any]) -> str:
    """The command line that these options are."""
    data = [given["data"]] if "data" in given else []
    return command_line("train", data, {name: value for name, value in given.items() if name != "data"})


@dataclass(frozen=True)
class _Running:
    """What carrying out a job works with."""

    job: Job
    folder: RunFolder
    console: Console
    command: str
    batches: Mapping[str, Batches]
    state: State

    @cached_property
    def learned_from(self) -> str:
        """A digest of the training pictures' names and labels, without those that cannot be read."""
        return digest(self.job.dataset["train"], self.job.dataset.classes)


def _carry_out(
    job: Job, folder: RunFolder, console: Console, typed: str, *, resume: bool = False, overwrite: bool = False
) -> TrainedRun:
    importlib.import_module("vitral.recipes.looking")  # what draws the report: if it is broken, better now than then
    others = OthersWork()
    with memory_told(job.run, job.config, by_steps=False):
        running = _set_up(job, folder, console, typed)
    # a run that goes on ends with the same bits only with as many threads as it began with
    if not resume and job.machine.device.type == "cpu" and (told := crowded(others)):
        console.print(told, style="yellow", highlight=False, soft_wrap=True)
    with folder.held():  # what was seen of it before may have changed
        if resume and folder.result.is_file():
            return _ended(folder, console)
        if resume:
            _go_on(running)
        else:
            if folder.exists():
                _make_way(folder, overwrite, job.run)
            _open_folder(running)
        try:
            with memory_told(job.run, job.config, by_steps=job.run.recipe not in LEARNERS):
                chosen = LEARNERS.get(job.run.recipe, _fit)(running)
            return _finish(running, chosen)
        except KeyboardInterrupt:
            again = f"vitral train --out {shlex.quote(str(folder.path))} --resume"
            raise Interrupted(again, saved=folder.last.is_file()) from None
        finally:
            for batches in running.batches.values():
                batches.close()


def _go_on(running: _Running) -> None:
    """Stand where the run stopped. One that has saved nothing stands at its beginning."""
    state, folder, plan = running.state, running.folder, running.job.plan
    if not folder.last.is_file():
        if plan.run.recipe not in LEARNERS and (done := folder.epochs()) > 1:  # after the first one it may be cut short
            hint = f"put a copy of it there, or {plan.anew}"
            raise RunError("what the run saved is gone", where=folder.last, why=f"it did {done} epochs", hint=hint)
        return
    try:
        identity = state.load(folder.last)
        if state.best:  # its weights are in the file alone: better read now than at the end
            native.read(folder.weights)
    except WeightsError as error:
        what, hint = f"what the run saved cannot be read: {error.what}", f"put a copy of it there, or {plan.anew}"
        raise RunError(what, where=error.where, why=error.why, hint=hint) from error
    except (KeyError, RuntimeError) as error:
        hint = f"restore config.json as it was, or {plan.anew}"
        raise RunError(
            "the saved state does not fit the run", where=folder.last, why=str(error)[:200], hint=hint
        ) from error
    if plan.contents and identity.get("pictures", running.learned_from) != running.learned_from:
        why = "it leaves out what cannot be read, and these are others than when it stopped"
        hint = f"put the pictures back as they were, or {plan.anew}"
        raise RunError("the run's pictures are not those that it learned from", where=folder.path, why=why, hint=hint)
    running.console.print(f"going on from epoch {state.epoch + 1}, batch {state.batch}")


def _fit(running: _Running) -> tuple[Choice, ...]:
    """Train from where the state stands to the end, step by step."""
    job, state, run = running.job, running.state, running.job.run
    size = _growing(job, running.batches["train"])
    objective: Halves = objective_of(job, size and (lambda: size(state.step)))
    with ExitStack() as stack:
        watch = Stopwatch()
        if run.compile:
            running.console.print("compiling: the first step takes longer", style="dim")
            objective = CompiledObjective(objective, state.model)
            watch = stack.enter_context(compiler_timed())
        listener = stack.enter_context(ConsoleListener(running.console, run.epochs))
        saving = _Saving(running)
        stack.callback(saving.keep_best)
        fit(
            state, run, job.machine, running.batches["train"], objective, lambda model: _validate(model, running),
            save=saving, listener=listener, size=size, compiling=watch.seconds,
            step=step_of(state.model, state.optimizer, objective, job.machine, run, _say(running)),
        )  # fmt: skip
        saving.finish()
    return ()


def _say(running: _Running) -> Callable[[str], None]:
    return lambda line: running.console.print(line, style="yellow", highlight=False, soft_wrap=True)


def _growing(job: Job, train: Batches) -> Callable[[int], tuple[int, int]] | None:
    """Height and width of training pictures at a step, where they grow."""
    run, patch = job.run, getattr(job.config, "patch", None)
    if run.start_size is None or patch is None:
        return None
    return lambda step: image_size(run, patch, step, math.ceil(len(train) / run.accumulate))


def _probe(running: _Running) -> tuple[Choice, ...]:
    """Fit a head to the features of the network as it is, all at once: there is no state to save on the way."""
    job, state, batches = running.job, running.state, running.batches
    with counting(running.console, "features", sum(len(batches[side].split) for side in ("train", "val"))) as progress:
        found = fit_probe(
            state.model, batches["train"], batches["val"], len(job.dataset.classes), job.machine,
            balanced=job.run.class_weights == "balanced", cache=FeatureCache(), progress=progress,
            tell=lambda line: running.console.print(line, highlight=False, soft_wrap=True),
        )  # fmt: skip
    found.write_into(state.model)
    state.history, state.best, state.seconds = found.history, found.best, found.seconds
    _save_metrics(running)
    _save_weights(running, found.best, state.evaluated.state_dict())
    tried = ", ".join(f"{line['C']:g} {line['val_accuracy']:.1%}" for line in found.history)
    return (Choice("C", f"{found.best['C']:g}", f"the best on validation: {tried}"),)


LEARNERS: Mapping[str, Callable[[_Running], tuple[Choice, ...]]] = {"linear-probe": _probe}
"""Recipes that do not learn by steps; each leaves metrics and weights, and returns what it chose on the way."""


def _set_up(job: Job, folder: RunFolder, console: Console, typed: str) -> _Running:
    job, batches = _readable_batches(job, console)
    run, machine = job.run, job.machine
    if machine.device.type == "cpu":
        keep_freed_memory()
    seed_everything(run.seed)
    model = begin(job)
    model.checkpointing = run.checkpointing
    if isinstance(model, ViT):
        model.any_size = run.start_size is not None
    state = State(model, OptimizerSet(model, run))
    if run.ema:
        state.averaged = Averaged(model, run.ema)
    return _Running(job, folder, console, typed, batches, state)


def _readable_batches(job: Job, console: Console) -> tuple[Job, dict[str, Batches]]:
    """The batches of all splits. Unreadable pictures are an error that names them, or are left out, as the run says."""
    batches = {split: _batches(job, split, console) for split in job.dataset.splits}
    bad = [
        Unreadable(split, index, error.name, error.why or "")
        for split, found in batches.items()
        for index, error in found.unreadable
    ]
    if not bad:
        console.print(f"training pictures: {batches['train'].residency}", style="dim", highlight=False)
        if (rate := batches["train"].decoding_rate) and job.run.recipe not in LEARNERS:
            enough, told = keeps_up(job, rate)
            console.print(told + f". {KEEP_THEM}" * (not enough), style="dim", highlight=False, soft_wrap=True)
        return job, batches
    back = f"put them back as they were, or {job.plan.anew} with --bad-images skip" if job.plan.command else None
    dataset = readable(job.dataset, bad, job.run.bad_images, back)
    told = left_out([one.name for one in bad])
    console.print(told, highlight=False, soft_wrap=True, markup=False)
    choices = {c.name: c for c in (*job.plan.choices, Choice("unreadable", told, "--bad-images skip"))}
    plan = dataclasses.replace(job.plan, choices=tuple(choices.values()))  # the page on the run tells it
    return _readable_batches(dataclasses.replace(job, dataset=dataset, plan=plan), console)


def _batches(job: Job, split: str, console: Console) -> Batches:
    run, training = job.run, split == "train" and job.run.recipe not in LEARNERS
    pictures = job.dataset[split]
    together = at_once(job.config, job.machine.device)
    weights = None
    if training and run.sampling == "balanced":
        weights = balanced_weights(pictures.labels, len(job.dataset.classes))[pictures.labels]
    with counting(console, f"reading {split}", len(pictures)) as progress:
        return Batches(
            pictures, run.preprocessing, batch_size=run.batch_size if training else together, device=job.machine.device,
            augmentation=run.augmentation if training else None, seed=run.seed, weights=weights,
            residency=run.residency, workers=run.workers, progress=progress,
        )  # fmt: skip


def _median_rate(state: State) -> float | None:
    """Pictures a second of a typical epoch; None where there was none."""
    rates = [line["images_per_second"] for line in state.history if "images_per_second" in line]
    return float(np.median(rates)) if rates else None


def _open_folder(running: _Running) -> None:
    folder, plan = running.folder, running.job.plan
    folder.clear()
    record = {
        "command": running.command,
        "run": plan.run.to_json(),
        "plan": [asdict(choice) for choice in plan.choices],
        "paths": _ways(plan.run, folder.path),
        "versions": versions(),
    }
    if running.job.init:
        record["init"] = running.job.init.account.to_json()
    if teacher := running.job.teacher:
        record["teacher"] = {"reference": teacher.reference, "digest": native.digest(teacher.weights.state)}
    if plan.contents:
        record["data"] = plan.contents.to_json()
    write_text(folder.config, json.dumps(record, indent=2) + "\n")


def _ways(run: Run, folder: Path) -> dict[str, str]:
    """From a run's folder to what its options name by a path, so that all of it can move together."""
    ways: dict[str, str] = {}
    for name in ("data", "data_root", "init", "teacher"):
        path = os.path.expanduser(getattr(run, name) or "")
        if os.path.exists(path) and not (name in ("init", "teacher") and is_demo(path)):
            ways |= _way(name, path, folder)
    return ways


def _way(name: str, path: str, folder: Path) -> dict[str, str]:
    with contextlib.suppress(ValueError):  # on Windows there is none to another drive
        return {name: os.path.relpath(os.path.realpath(path), os.path.realpath(folder))}
    return {}


def versions() -> dict[str, str]:
    """What the run was made with."""
    packages = {name: version(name) for name in ("torch", "torchvision", "numpy", "pillow")}
    return {"vitral": __version__} | packages | {"python": platform.python_version()}


def _validate(model: nn.Module, running: _Running) -> dict[str, float]:
    if "val" not in running.batches:
        return {}
    val = running.batches["val"]
    logits = logits_of(model, val, running.job.machine)
    labels = torch.from_numpy(np.asarray(val.split.labels))
    accuracy = (logits.argmax(1) == labels).double().mean()
    return {"val_loss": float(F.cross_entropy(logits, labels)), "val_accuracy": float(accuracy)}


class _Saving:
    """What a run keeps on disk: metrics and the best weights, then the state that refers to them. After an epoch that
    is quicker than its saving the next ones wait, so that saving takes a twentieth of a run at most; the best weights
    of an epoch that is not saved are kept as a copy on the device.
    """

    def __init__(self, running: _Running):
        self.running = running
        self._took, self._last = 0.0, -math.inf
        self._best: tuple[Mapping[str, Any], dict[str, Tensor]] | None = None
        self._behind = False

    def __call__(self, state: State, best: bool, must: bool = False) -> None:
        """After an epoch, or where a person stopped: then it `must` be."""
        self._behind = True
        if must or time.perf_counter() - self._last >= self._took / SAVING:
            line = state.history[-1] if best else None
            self._write(line, state.evaluated.state_dict() if best else {})
        elif best:
            weights = {name: value.detach().clone() for name, value in state.evaluated.state_dict().items()}
            self._best = state.history[-1], weights

    def finish(self) -> None:
        """Write what was not."""
        if self._behind:
            self._write(None, {})

    def keep_best(self) -> None:
        """Write the best weights and the metrics, where the state is no longer worth it."""
        if self._best:
            _save_metrics(self.running)
            _save_weights(self.running, *self._best)

    def _write(self, line: Mapping[str, Any] | None, weights: dict[str, Tensor]) -> None:
        started = time.perf_counter()
        _save_metrics(self.running)
        if line is not None:
            _save_weights(self.running, line, weights)
        else:
            self.keep_best()
        self._best, self._behind = None, False
        identity = {"seed": self.running.job.run.seed, "pictures": self.running.learned_from}
        self.running.state.save(self.running.folder.last, identity)
        self._last = time.perf_counter()
        self._took = self._last - started


SAVING = 0.05
"""Share of a run's time that saving may take."""


def _save_metrics(running: _Running) -> None:
    write_text(running.folder.metrics, "".join(json.dumps(line) + "\n" for line in running.state.history))


def _save_weights(running: _Running, line: Mapping[str, Any], state: dict[str, Tensor]) -> None:
    """Weights, with the line of the metrics that they belong to."""
    job = running.job
    about = {"data": job.run.data, "model": job.run.model, "recipe": job.run.recipe}
    trained = {**about, **line, "versions": versions()}
    weights = native.Weights(job.config, state, job.run.preprocessing, job.dataset.classes, trained)
    native.save(running.folder.weights, weights)


def _finish(running: _Running, chosen: tuple[Choice, ...]) -> TrainedRun:
    """Measure the best weights, write result.json and report.html."""
    job, folder, state = running.job, running.folder, running.state
    weights = native.read(folder.weights)
    model = native.build(weights).to(job.machine.device)
    if job.run.plain:
        plainly(model)
    result: dict[str, Any] = {
        "model": job.run.model,
        "data": job.run.data,
        "parameters": sum(p.numel() for p in model.parameters()),
        "classes": len(job.dataset.classes),
        "images": {name: len(split) for name, split in job.dataset.splits.items()},
        "best_epoch": weights.trained.get("epoch"),
        "epochs": state.epoch or None,
        "seconds": state.seconds,
        **({"compile_seconds": state.compile_seconds} if state.compile_seconds else {}),
        "images_per_second": _median_rate(state),
        "device": job.machine.name,
        "precision": job.machine.precision,
        "seed": job.run.seed,
        "command": running.command,
        "versions": versions(),
    }
    last: _Measured | None = None
    for split in (name for name in ("val", "test") if name in job.dataset.splits):
        batches = running.batches[split]
        probabilities = logits_of(model, batches, job.machine).softmax(1).numpy()
        last = _Measured(split, probabilities, measure(probabilities, batches.split.labels, job.dataset.classes))
        result[f"{split}_accuracy"] = last.evaluation.accuracy
        result[split] = last.evaluation.to_json()
    _report(running, model, result, chosen, last)
    write_text(folder.result, json.dumps(result, indent=2) + "\n")
    return TrainedRun(folder.path, result)


@dataclass(frozen=True, eq=False)
class _Measured:
    """What the best weights came to on a split."""

    split: str
    probabilities: np.ndarray
    evaluation: Evaluation


def _report(
    running: _Running, model: Network, result: dict[str, Any], chosen: tuple[Choice, ...], last: _Measured | None
) -> None:
    """Write the page about the run; `last` is the split that it is about."""
    from vitral.evaluation.report import ReportContent, write_report  # `_carry_out` has imported it
    from vitral.recipes.looking import confident_mistakes, look_inside

    job, summary = running.job, summarize(model)
    content = ReportContent(
        title=job.dataset.name, command=running.command, result=result, plan=(*job.plan.choices, *chosen),
        history=running.state.history, layers=summary.to_json()["layers"],
    )  # fmt: skip
    if last is not None:
        pictures = running.batches[last.split].split
        mistakes = confident_mistakes(last.probabilities, pictures, job.dataset.classes)
        machine = dataclasses.replace(job.machine, precision="fp32")  # else the weights would be cast
        predictor = Predictor(model, job.run.preprocessing, job.dataset.classes, machine=machine)
        content = dataclasses.replace(
            content, evaluation=last.evaluation, evaluated_on=last.split, caution=CAUTION.get(last.split, ""),
            mistakes=mistakes, **vars(look_inside(predictor, mistakes, pictures, summary.flops)),
        )  # fmt: skip
    write_report(running.folder.report, content)
