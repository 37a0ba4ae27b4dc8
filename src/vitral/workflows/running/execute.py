"""Execute a job: train, evaluate, report."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import Sampler

from vitral import activity
from vitral.console import counting
from vitral.data.checks.findings import Unreadable
from vitral.data.checks.validate import left_out, readable
from vitral.data.loader import Batches
from vitral.data.parts import Part
from vitral.data.sampling import weights_or_sampler
from vitral.device import seed_everything
from vitral.distributed.ranks import Ranks, current
from vitral.distributed.strategies import strategy_of
from vitral.errors import Interrupted, RunError, UsageError
from vitral.inference.logits import gathered_logits
from vitral.inference.outputs import Output, output_of
from vitral.inference.predictor import Predictor
from vitral.kernels import reference_ops
from vitral.model import Network
from vitral.model.own import is_own, own_part
from vitral.model.summary import summarize
from vitral.pretraining.distill import KeptFeatures
from vitral.pretraining.method import Following, Method
from vitral.pretraining.methods import METHODS, needs_teacher
from vitral.system import HostLoad, cpu_contention, keep_freed_memory
from vitral.training.callbacks import Callback, Callbacks, Epoch, RunStart, asks_for_logits
from vitral.training.compiling import CompiledObjective, Stopwatch, compiler_timed
from vitral.training.loop import Averaged, EpochEnd, State, fit
from vitral.training.objectives.classification import balanced_weights
from vitral.training.objectives.objective import TwoPartObjective
from vitral.training.optimizer_set import OptimizerSet
from vitral.training.options import Run
from vitral.training.own_metrics import figures_of, measure_own
from vitral.training.plan import Choice
from vitral.training.progress import RESIDENCY_HINT, ConsoleListener, widget_bar
from vitral.training.run_folder import RunFolder
from vitral.training.schedule import planned_epochs
from vitral.training.step import step_of
from vitral.weights import native
from vitral.weights.files import read_tensors
from vitral.wording import flag
from vitral.workflows.evaluate import caution_of
from vitral.workflows.planning.job import Job
from vitral.workflows.planning.memory import eval_batch_size, out_of_memory_reported
from vitral.workflows.planning.throughput import decoding_suffices, planned_again, replanning
from vitral.workflows.running import pretraining
from vitral.workflows.running.build import initial_model, objective_of
from vitral.workflows.running.first_answer import first_answer
from vitral.workflows.running.linear_probe import fit_probe
from vitral.workflows.running.records import (
    facts,
    report_guarded,
    resume_command,
    write_config,
    write_held_out,
    write_result,
)
from vitral.workflows.running.restore import restore
from vitral.workflows.running.running import Running
from vitral.workflows.running.saving import Saving, save_metrics, save_weights
from vitral.workflows.running.teaching import kept_features
from vitral.workflows.running.trained import TrainedRun
from vitral.workflows.tables.features import FeatureCache
from vitral.workflows.tasks import task_of
from vitral.workflows.tasks.task import Metrics


def finished(folder: RunFolder, console: Console) -> TrainedRun:
    console.print(f"{folder.path} is already finished; nothing to do.")
    return TrainedRun(folder.path, folder.read_result())


def check_overwrite(folder: RunFolder, overwrite: bool, run: Run | None) -> None:
    if not overwrite:
        resume = "" if folder.is_finished() else "--resume to continue it, "
        out = f"--out {shlex.quote(folder.next_free())} for another folder"
        hint = f"add {resume}{out}, or --overwrite to replace it"
        raise RunError("the run folder already exists", where=folder.path, hint=hint)
    if not folder.is_run():
        why = "it is not a run folder"
        raise RunError(
            "refusing to overwrite this folder", where=folder.path, why=why, hint="choose another folder with --out"
        )
    for name in ("data", "init", "teacher"):
        needed = os.path.expanduser(getattr(run, name, None) or "")
        if os.path.exists(needed) and Path(needed).resolve().is_relative_to(folder.path.resolve()):
            why = f"it contains {'the training data' if name == 'data' else flag(name)}, {needed}"
            raise RunError(
                "refusing to overwrite this folder", where=folder.path, why=why, hint="choose another folder with --out"
            )


def run_job(
    job: Job,
    folder: RunFolder,
    console: Console,
    typed: str,
    *,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    overwrite: bool = False,
) -> TrainedRun:
    ranks = current()
    importlib.import_module("vitral.workflows.running.figures")  # if the report cannot be drawn, fail before training
    others = HostLoad()
    with out_of_memory_reported(job.run, job.config, by_steps=False):
        running = _set_up(job, folder, console, typed, Callbacks(callbacks if ranks.main else ()), ranks)
    # a resumed run is bit-identical only with the same number of threads, so do not suggest another
    if not resume and job.machine.device.type == "cpu" and not ranks.together and (warning := cpu_contention(others)):
        console.print(warning, style="yellow", highlight=False, soft_wrap=True)
    _check_images(running)
    with folder.locked() if ranks.main else contextlib.nullcontext():
        if done := ranks.share(lambda: _opened(running, resume, overwrite)):
            return done
        if resume:
            restore(running, by_steps=job.run.recipe not in TRAINERS)
        try:
            with _followed(running) as ended:
                with out_of_memory_reported(job.run, job.config, by_steps=job.run.recipe not in TRAINERS):
                    chosen = TRAINERS.get(job.run.recipe, _fit)(running)
                return ended((_pretrained if job.run.recipe in METHODS else _finish)(running, chosen))
        except KeyboardInterrupt:
            raise Interrupted(resume_command(running), saved=folder.last.is_file()) from None
        finally:
            for batches in running.batches.values():
                batches.close()


def _opened(running: Running, resume: bool, overwrite: bool) -> TrainedRun | None:
    """Check the locked folder again, since it may have changed before; return the run if it is finished already."""
    folder = running.folder
    if resume:
        return finished(folder, running.console) if folder.is_finished() else None
    if folder.exists():
        check_overwrite(folder, overwrite, running.job.run)
    write_config(running)
    write_held_out(running)
    return None


def _check_images(running: Running) -> None:
    """Raise `RunError` on a rank that reads other training images than the first rank."""
    if running.ranks.share(lambda: running.trained_on) != running.trained_on:
        why = "it reads other names or labels, or cannot read some"
        hint = "the same data on every machine"
        raise RunError("other training images than rank 0", where=running.job.run.data, why=why, hint=hint)


@contextlib.contextmanager
def _followed(running: Running) -> Iterator[Callable[[TrainedRun], TrainedRun]]:
    """Tell the callbacks that the run begins and ends; yield a function to pass the finished run through."""
    finished: list[TrainedRun] = []

    def ended(trained: TrainedRun) -> TrainedRun:
        finished.append(trained)
        return trained

    options, history = running.job.run.to_json(), tuple(running.state.history)
    running.callback.on_run_start(RunStart(running.folder.path, options, history, running.samples, running.state.model))
    try:
        yield ended
    finally:
        running.callback.on_run_end(finished[0].result if finished else None)


def _fit(running: Running) -> tuple[Choice, ...]:
    """Train in steps from the current state to the end."""
    job, state, run = running.job, running.state, _run_of_steps(running)
    objective: TwoPartObjective = objective_of(job, lambda: state.step, _kept(running))
    with ExitStack() as stack:
        watch = Stopwatch()
        if run.compile:
            running.console.print("compiling: the first step takes longer", style="dim")
            objective = CompiledObjective(objective, running.strategy.module)
            watch = stack.enter_context(compiler_timed())
        epochs = planned_epochs(run, state.history)
        figures = (*task_of(run.task).figures, *figures_of(run.metrics))
        progress = stack.enter_context(ConsoleListener(running.console, epochs, figures))
        warn = partial(running.console.print, style="yellow", highlight=False, soft_wrap=True)
        saving = Saving(running)
        stack.callback(saving.keep_best)
        first_answer(running)
        end = EpochEnd(
            validate=_validation(running),
            save=saving,
            score=task_of(run.task).score,
            plan_again=replanning(running),
            compiling=watch.seconds,
        )
        step = step_of(state.model, state.optimizer, objective, job.machine, run, warn, running.strategy)
        bar = widget_bar(running.console, epochs)
        widget = [] if bar is None else [stack.enter_context(bar)]
        listener = Callbacks([progress, *widget, running.callback])
        fit(state, run, running.batches["train"], step, end, listener=listener, ranks=running.ranks)
        saving.finish()
    return planned_again(state)


def _run_of_steps(running: Running) -> Run:
    """Return the run without compiled or captured steps if callbacks ask for logits, which those do not show.

    Raises `UsageError` for a run whose network does not return logits of whole batches.
    """
    run = running.job.run
    if not asks_for_logits(running.callback):
        return run
    if run.pack or run.patch_sizes or run.recipe in METHODS:
        option = "--pack" if run.pack else "--patch-sizes" if run.patch_sizes else "pretraining"
        why = "its steps do not compute logits of one batch of images"
        raise UsageError(f"{option} does not support callbacks with on_logits", why=why, hint="leave out on_logits")
    if run.compile or run.graphs:
        running.console.print("a callback asks for logits: steps are not compiled or captured", style="dim")
    return dataclasses.replace(run, compile=False, graphs=False)


def _kept(running: Running) -> KeptFeatures | None:
    """The features of a teacher that are kept on disk; None for other runs."""
    return kept_features(running) if needs_teacher(running.job.run.recipe) else None


def _probe(running: Running) -> tuple[Choice, ...]:
    """Fit a head to the features of the frozen network. There is no intermediate state to save."""
    job, state, batches = running.job, running.state, running.batches
    with counting(running.console, "features", sum(len(batches[side].split) for side in ("train", "val"))) as progress:
        probe = fit_probe(
            state.model,
            batches["train"],
            batches["val"],
            len(job.dataset.classes),
            job.machine,
            balanced=job.run.class_weights == "balanced",
            cache=FeatureCache(),
            progress=progress,
            tell=lambda line: running.console.print(line, highlight=False, soft_wrap=True),
        )
    probe.write_into(state.model)
    state.history = cast("list[Epoch]", probe.history)  # a line per C
    state.best = cast("Epoch", probe.best)
    state.seconds = probe.seconds
    save_metrics(running)
    save_weights(running, probe.best, state.evaluated.state_dict())
    tried = ", ".join(f"{line['C']:g} {line['val_accuracy']:.1%}" for line in probe.history)
    return (Choice("C", f"{probe.best['C']:g}", f"the best on validation: {tried}"),)


TRAINERS: Mapping[str, Callable[[Running], tuple[Choice, ...]]] = {"linear-probe": _probe}
"""Recipes that do not train in steps. Each writes metrics and weights, and returns its choices."""


def _set_up(job: Job, folder: RunFolder, console: Console, typed: str, callback: Callback, ranks: Ranks) -> Running:
    job, batches = _readable_batches(job, console)
    run, machine = job.run, job.machine
    if machine.device.type == "cpu":
        keep_freed_memory()
    seed_everything(run.seed)
    model = initial_model(job)
    model.checkpointing = run.checkpointing
    averaged = Following(model) if isinstance(model, Method) else Averaged(model, run.ema) if run.ema else None
    strategy = strategy_of(model, ranks, run.strategy)
    if isinstance(averaged, Averaged):  # a method that follows its own steps is shared out already
        strategy.shard(averaged.module)
    state = State(model, OptimizerSet(model, run), averaged)
    return Running(job, folder, console, typed, batches, state, callback, strategy, ranks)


def _readable_batches(job: Job, console: Console) -> tuple[Job, dict[str, Batches]]:
    """Create the batches of all splits. Unreadable images are left out or an error, as `Run.bad_images` says."""
    batches = {split: _batches(job, split, console) for split in job.dataset.splits}
    bad = [
        Unreadable(split, index, error.name, error.why or "")
        for split, one in batches.items()
        for index, error in one.unreadable
    ]
    if not bad:
        job = _report_left_out(job, console)
        lines = [f"training images: {batches['train'].residency}"]
        lines += [f"{split} images: {one.damage}" for split, one in batches.items() if split != "train" and one.damage]
        for line in lines:
            console.print(line, style="dim", highlight=False, soft_wrap=True, markup=False)
        if (rate := batches["train"].decoding_rate) and job.run.recipe not in TRAINERS:
            enough, message = decoding_suffices(job, rate)
            text = message if enough else f"{message}. {RESIDENCY_HINT}"
            console.print(text, style="dim", highlight=False, soft_wrap=True)
        return job, batches
    hint = f"restore them, or {job.plan.restart_hint} with --bad-images skip" if job.plan.command else None
    dataset = readable(job.dataset, bad, job.run.bad_images, hint, job.run.max_bad)
    return _readable_batches(dataclasses.replace(job, dataset=dataset), console)


def _report_left_out(job: Job, console: Console) -> Job:
    """Add the left-out images to the plan, for the report, and print them unless already printed before the plan."""
    if not job.dataset.left_out:
        return job
    note = left_out(job.dataset.left_out)
    if set(job.dataset.left_out) != set(job.unreadable):
        console.print(note, highlight=False, soft_wrap=True, markup=False)
    choices = {c.name: c for c in (*job.plan.choices, Choice("unreadable", note, "--bad-images skip"))}
    return dataclasses.replace(job, plan=dataclasses.replace(job.plan, choices=tuple(choices.values())))


def _batches(job: Job, split: str, console: Console) -> Batches:
    run, training = job.run, split == "train" and job.run.recipe not in TRAINERS
    images, ranks = job.dataset[split], current()
    eval_size = eval_batch_size(job.config, job.machine.device)
    weights = _drawn_by(job) if training else None
    with counting(console, f"reading {split}", len(images)) as progress:
        return Batches(
            images,
            run.preprocessing,
            batch_size=run.batch_size if training else eval_size,
            device=job.machine.device,
            augmentation=run.augmentation if training else None,
            seed=run.seed,
            weights=weights if isinstance(weights, np.ndarray) else None,
            sampler=weights if isinstance(weights, Sampler) else None,
            residency=run.residency,
            workers=run.workers,
            check=run.bad_images == "skip",
            progress=progress,
            part=Part(ranks.number, ranks.count, ranks.local_count),
            views=run.teacher_views,
        )


def _drawn_by(job: Job) -> np.ndarray | Sampler[int] | None:
    """Return the weight of each training image, or a sampler of the user; None if each is drawn once per epoch."""
    labels = job.dataset["train"].labels
    if is_own(job.run.sampling):
        return weights_or_sampler(own_part("sampling", job.run.sampling), labels)
    if job.run.sampling == "balanced":
        return balanced_weights(labels, len(job.dataset.classes))[labels]
    return None


def _validation(running: Running) -> Callable[[nn.Module], dict[str, float]]:
    if running.job.run.recipe in METHODS:
        return pretraining.measure(running)
    return lambda model: _validate(model, running)


def _pretrained(running: Running, _: tuple[Choice, ...]) -> TrainedRun:
    pretraining.finish(running)
    return TrainedRun(running.folder.path, running.folder.read_result())


def _validate(model: nn.Module, running: Running) -> dict[str, float]:
    if "val" not in running.batches:
        return {}
    val = running.batches["val"]
    logits = gathered_logits(model, val, running.job.machine, running.ranks)

    run, labels = running.job.run, val.split.labels
    task = task_of(run.task)

    def validated() -> dict[str, float]:
        output = task.output(running.job.dataset)
        own = measure_own(run.metrics, task.answers(logits, output), labels)
        return task.validate(logits, labels, output) | {f"val_{name}": value for name, value in own.items()}

    return running.ranks.share(validated)


def _finish(running: Running, chosen: tuple[Choice, ...]) -> TrainedRun:
    """Evaluate the best weights, write result.json and report.html."""
    activity.tell("measuring the best weights")
    job, ranks = running.job, running.ranks
    tensors, header = ranks.share_tensors(lambda: read_tensors(running.folder.weights))
    weights = native.whole(running.folder.weights, tensors, header)
    model = native.build(weights).to(job.machine.device)
    if job.run.plain:
        reference_ops(model)
    measured = {
        split: gathered_logits(model, running.batches[split], job.machine, ranks)
        for split in ("val", "test")
        if split in job.dataset.splits
    }
    return ranks.share(lambda: _write_result(running, model, weights, measured, chosen))


def _write_result(
    running: Running, model: Network, weights: native.Weights, logits: Mapping[str, Tensor], chosen: tuple[Choice, ...]
) -> TrainedRun:
    """Write result.json and report.html; `logits` are of the best weights, for each split."""
    task = task_of(running.job.run.task)
    result: dict[str, object] = {
        **facts(running, sum(p.numel() for p in model.parameters())),
        "classes": len(running.job.dataset.classes),
        "best_epoch": weights.trained.get("epoch"),
        "keep": running.job.run.keep,
    }
    last: _Measured | None = None
    output = _fitted(running, weights, logits)
    for split, logit in logits.items():
        values, images = output.values(logit).numpy(), running.batches[split].split
        last = _Measured(split, output, values, task.measure(values, images.labels, output, images.groups))
        result |= task.summary(split, last.metrics)
        own = measure_own(running.job.run.metrics, task.answers(logit, output), images.labels)
        result |= {f"{split}_{name}": value for name, value in own.items()}
        result[split] = last.metrics.to_json()
    write_result(running, result)
    with report_guarded(running):
        _report(running, model, result, chosen, last)
    return TrainedRun(running.folder.path, result)


def _fitted(running: Running, weights: native.Weights, logits: Mapping[str, Tensor]) -> Output:
    """Return the output with what is chosen on the validation images, and save it with the weights."""
    output = output_of(weights.classes, weights.output, weights.statistics)
    if "val" in logits:
        images = running.batches["val"].split
        output = task_of(running.job.run.task).fitted(output, logits["val"], images.labels, images.groups)
    if (fields := output.to_json()) != weights.output:
        native.save(running.folder.weights, dataclasses.replace(weights, output=fields, statistics={}))
    return output


@dataclass(frozen=True, eq=False)
class _Measured:
    """Predictions and metrics of the best weights on a split."""

    split: str
    output: Output
    values: np.ndarray
    metrics: Metrics


def _report(
    running: Running, model: Network, result: Mapping[str, object], chosen: tuple[Choice, ...], last: _Measured | None
) -> None:
    """Write the report; `last` is the split that it shows."""
    from vitral.evaluation.report import SAMPLES, ReportContent, write_report  # `run_job` has imported it

    activity.tell("drawing the report")
    job, summary = running.job, summarize(model)
    content = ReportContent(
        title=job.dataset.name,
        command=running.command,
        result=result,
        plan=(*job.plan.choices, *chosen),
        history=running.state.history,
        layers=summary.to_json()["layers"],
        samples=running.samples(SAMPLES),
    )
    if last is not None:
        machine = dataclasses.replace(job.machine, precision="fp32")  # avoid casting the weights
        predictor = Predictor(model, job.run.preprocessing, job.dataset.classes, machine=machine, output=last.output)
        content = dataclasses.replace(content, evaluated_on=last.split, caution=caution_of(last.split, job.run))
        images = running.batches[last.split].split.with_levels(job.run.levels)
        content = task_of(job.run.task).page(content, predictor, last.values, images, last.metrics, summary.flops)
        content = dataclasses.replace(content, measured=(*content.measured, *figures_of(job.run.metrics)))
    write_report(running.folder.report, content)
