"""Plan a run: the recipe decides, given options override it, and every choice has a reason.

options → machine → data → split → recipe → `STEPS` → job
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vitral import activity
from vitral.data import DataSet, load
from vitral.data.checks.fingerprint import Fingerprint
from vitral.data.checks.groups import near_held_out, near_sets, with_near
from vitral.data.checks.validate import drop_unopened, readable, sample_unreadable
from vitral.data.images.depth import leveled
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.label_table import labels_beside
from vitral.data.sources.unlabeled import load_images
from vitral.data.targets import TEXT, Labeling, targets_of
from vitral.device import Machine, choose, cpu_threads
from vitral.errors import RunError, UsageError, unknown
from vitral.evaluation.enough import TO_CHOOSE_AN_EPOCH
from vitral.evaluation.intervals import count_groups
from vitral.folders import is_run
from vitral.model import create
from vitral.pretraining.methods import METHODS, needs_teacher
from vitral.recipes.stats import DatasetStats, dataset_stats, find_finished_runs
from vitral.recipes.table import CHECKS, RECIPES, UNSUPPORTED
from vitral.training.options import DECODER_OPTIONS, LABEL_OPTIONS, PRETRAINING_OPTIONS, Run, checked_options
from vitral.training.plan import Choice, Plan
from vitral.training.run_folder import RunFolder
from vitral.weights.read.published import Published
from vitral.weights.read.references import built_in
from vitral.wording import count, flag, in_groups, natural
from vitral.workflows.planning.compute import (
    check_foreign,
    check_norms,
    drop_shifts,
    plan_task,
    report_consequences,
    report_pruning,
    scale_logits,
    suit_probe,
    suit_rate,
    use_compiler,
    use_graphs,
    whiten,
)
from vitral.workflows.planning.draft import Draft, Step, format_value
from vitral.workflows.planning.earlier import SPLIT_OPTIONS, find_earlier, trained_on_held_out
from vitral.workflows.planning.job import Job
from vitral.workflows.planning.memory import fit_memory
from vitral.workflows.planning.network import (
    build_config,
    check_library,
    initial_weights,
    read_initial,
    read_teacher,
    report_teacher,
    take_network,
    teacher_of,
    to_config,
)
from vitral.workflows.planning.own_parts import own_parts
from vitral.workflows.planning.patches import choose_plain_patches, flex_patches, pack_images
from vitral.workflows.planning.ranks import choose_strategy, share_batches
from vitral.workflows.planning.run_data import RunData, cuts_validation, load_run_data, split_for
from vitral.workflows.planning.start import AUTO, NONE, choose_start
from vitral.workflows.planning.teacher import keep_features, time_features
from vitral.workflows.planning.threads import choose_threads
from vitral.workflows.planning.throughput import epochs_within, features_seconds, probe_within
from vitral.workflows.tasks import TASKS


def plan_run(
    options: dict[str, object], began: float | None = None, check: Callable[[str], None] = lambda folder: None
) -> Job:
    """Plan a run with the given `options` (fields of `Run`) for its data and this machine. Its minutes count from
    `began`, of `time.monotonic()`, with planning and report; by default they are for training and validation alone.
    `check` is called with the run folder before anything is measured.
    """
    activity.tell("looking at the images")
    given = check_given(options)
    machine = choose(given.get("device", "auto"))
    labeled = given.get("recipe") not in METHODS
    skip, most = given.get("bad_images") == "skip", given.get("max_bad")
    loaded = load_given(given, machine)
    check(given.get("out") or default_folder(given, loaded))
    dataset, unreadable = check_images(loaded, skip, labeled, most)
    draft = draft_run(given, dataset, machine)
    job = resolve(draft)
    activity.tell("timing trial steps")
    job = choose_threads(job)
    if job.run.minutes is not None:
        with cpu_threads(job.run.threads):
            by_steps = "epochs" not in UNSUPPORTED.get(job.run.recipe, ())
            job = _fit_time(job, draft, began) if by_steps else probe_within(job)
    if needs_teacher(job.run.recipe):
        with cpu_threads(job.run.threads):
            job = time_features(job)
    return dataclasses.replace(job, unreadable=unreadable)


def check_given(options: dict[str, object]) -> dict[str, Any]:
    """Check the options as far as possible without data, and return them."""
    given = checked_options(options)
    reads_text = targets_of(Run(**given).task).sequence
    if reads_text:
        given = {"recipe": TEXT.task, **given}
    if reads_text != (given.get("recipe") == TEXT.task):
        needs = ("--task text", "--recipe text", "leave out --recipe")
        option, needed, hint = needs if reads_text else ("--recipe text", "--task text", "--task text")
        raise UsageError(f"{option} needs {needed}", hint=hint)
    for name in UNSUPPORTED.get(given.get("recipe", ""), ()):
        if name in given:
            what = "--method" if given["recipe"] in METHODS else "--recipe"
            raise UsageError(f"{what} {given['recipe']} does not support {flag(name)}", hint="leave it out")
    allowed = DECODER_OPTIONS if reads_text else ()
    alone = [name for name in PRETRAINING_OPTIONS if name in given and name not in allowed]
    if given.get("recipe") not in METHODS and alone:
        raise UsageError(f"{flag(alone[0])} is for vitral pretrain", hint="leave it out")
    if given.get("recipe") in METHODS and (alone := [name for name in LABEL_OPTIONS if name in given]):
        raise UsageError(f"{flag(alone[0])} is for labels, which pretraining does not read", hint="leave it out")
    if given.get("recipe") in METHODS:
        check_library(given.get("model", ""))
    if needs_teacher(given.get("recipe")) and "teacher" not in given:
        hint = "--teacher backbone, or a run, a file, timm:NAME or hf:ORG/NAME"
        raise UsageError(f"--method {given['recipe']} needs a --teacher", hint=hint)
    if given.get("max_bad") is not None and given.get("bad_images") != "skip":
        why, hint = "without it any unreadable image stops the run", "--bad-images skip --max-bad 100"
        raise UsageError("--max-bad goes with --bad-images skip", why=why, hint=hint)
    if given.get("minutes") is not None and "epochs" in given:
        raise UsageError("--minutes and --epochs are mutually exclusive", hint="leave one out")
    return given


def load_given(given: Mapping[str, Any], machine: Machine) -> DataSet:
    """Load the named data, by default those of the recipe, with stated levels or those of floats."""
    start = Run(**{k: v for k, v in given.items() if k in ("data", "data_root")})
    name = given.get("data") or own_data(given, machine)
    if given.get("recipe") in METHODS:
        return leveled(load_images(name, root=start.data_root), given.get("levels"))
    wanted = Labeling(
        given.get("task"),
        given.get("label_separator"),
        tuple(given.get("targets", ())),
        given.get("class_folders", "auto"),
    )
    return leveled(load(name, root=start.data_root, wanted=wanted, tasks=tuple(TASKS)), given.get("levels"))


def own_data(given: Mapping[str, object], machine: Machine) -> str:
    """Return the data that the recipe reads unless others are given: those of its experiment, else `Run.data`."""
    return find_recipe(given)(_NO_STATS, machine).run.data


def default_folder(given: Mapping[str, object], dataset: DataSet) -> str:
    """Return the run folder without --out. Training on the images of a pretraining run has another one."""
    return f"runs/{dataset.name}-pretrain" if given.get("recipe") in METHODS else f"runs/{dataset.name}"


_NO_STATS = DatasetStats(images=1, classes=2, size=(224, 224), uniform=True, channels=3, imbalance=1.0)


def check_images(
    dataset: DataSet, skip: bool, labeled: bool = True, most: int | None = None
) -> tuple[DataSet, tuple[str, ...]]:
    """Return the data, and the names of the images that a quick check finds unreadable.

    Unreadable images are an error without `skip`, and with it if a class or a split has no others, or if they are more
    than `most`. The check comes first, so that planning and measuring the throughput are not wasted.
    """
    if skip:
        dataset = drop_unopened(dataset)
    if labeled:
        dataset.targets.check(dataset.classes, dataset.source)
    bad = sorted(sample_unreadable(dataset), key=lambda one: (one.split, natural(one.name)))
    readable(dataset, bad, "skip" if skip else "error", most=most)
    return dataset, (*dataset.left_out, *(one.name for one in bad))


def find_recipe(given: Mapping[str, Any]) -> Callable[[DatasetStats, Machine], Plan]:
    """Return the named recipe; by default that of the initial weights, else "small"."""
    start = given.get("init", NONE)
    own = built_in(start)
    tuned = own.recipe if own and own.recipe else "finetune"
    name = given.get("recipe") or ("small" if start in (NONE, AUTO) else tuned)
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]


def draft_run(given: Mapping[str, Any], dataset: DataSet, machine: Machine) -> Draft:
    """Split the data and call the recipe.

    The recipe is called twice, because the split depends on its options, and its options may depend on the number of
    images left for training.
    """
    stats = dataset_stats(dataset)
    count = max(1, round(stats.images * given.get("train_share", 1.0)))
    runs = find_finished_runs(dataset, stats)
    stats = dataclasses.replace(stats, images=count, epochs=given.get("epochs"), finished_runs=runs)
    seconds_of = partial(_seconds_of, given, dataset, machine)
    init, start = choose_start(given, dataset.targets.task, stats, machine, seconds_of)
    given = {**{name: value for name, value in given.items() if name != "init"}, **init}
    recipe = find_recipe(given)
    splitting = {name: given[name] for name in SPLIT_OPTIONS if name in given}
    run = dataclasses.replace(recipe(stats, machine).run, **splitting)
    activity.tell("comparing the images, for near-duplicates")
    near = near_sets(dataset["train"]) if cuts_validation(run, dataset) else ()
    held_out = {} if run.recipe in METHODS else near_held_out(dataset)
    earlier = find_earlier(given, dataset, given.get("out") or default_folder(given, dataset), run)
    split, choices = split_for(run, with_near(dataset, {"train": near, **held_out}), earlier.kept if earlier else ())
    stats = dataclasses.replace(stats, train_images=len(split["train"]))
    plan = recipe(stats, machine)
    return Draft(
        given,
        dataset,
        split,
        choices,
        stats,
        machine,
        plan,
        plan.run,
        start=start,
        near=near,
        near_held_out=held_out,
        earlier=earlier,
    )


def _seconds_of(given: Mapping[str, Any], dataset: DataSet, machine: Machine, published: Published) -> float:
    """Return the seconds in which this machine computes the features of all images with published weights."""
    activity.tell(f"timing {published.model} on a few images")
    with torch.random.fork_rng([]):
        model = create(published.model)
    machine = machine.with_precision(given.get("precision", "auto"), dim=model.config.dim)
    return features_seconds(model, dataset, Preprocessing(model.config.image), machine)


def _fit_time(job: Job, draft: Draft, began: float | None) -> Job:
    """Plan again for as many epochs as the time allows, because other options depend on the number of epochs."""
    epochs, measured, seconds = epochs_within(job, began)
    if draft.earlier and (before := draft.earlier.epochs_of(job)) is not None:
        epochs, measured = before, f"the same number as in {draft.earlier.folder}; {measured}"
    stats = dataclasses.replace(draft.stats, epochs=epochs)
    plan = find_recipe(draft.given)(stats, draft.machine)
    if plan.run.epochs > epochs:  # a recipe with a fixed number of epochs
        plan = dataclasses.replace(plan, run=dataclasses.replace(plan.run, epochs=epochs))
    run = dataclasses.replace(plan.run, threads=job.run.threads)
    again = dataclasses.replace(draft, stats=stats, recipe=plan, run=run, init=job.init, teacher=job.teacher)
    threads = [choice for choice in job.plan.choices if choice.name == "threads"]
    job = resolve(again)
    why = measured if job.run.epochs == epochs else f"{measured}; the recipe allows at most {job.run.epochs} epochs"
    choices = {
        choice.name: choice for choice in (*job.plan.choices, *threads, Choice("epochs", str(job.run.epochs), why))
    }
    most = find_recipe(draft.given)(dataclasses.replace(draft.stats, epochs=_ANY_NUMBER), draft.machine).run.epochs
    plan = dataclasses.replace(job.plan, choices=tuple(choices.values()), most_epochs=most, training_seconds=seconds)
    return dataclasses.replace(job, plan=plan)


_ANY_NUMBER = 1_000_000
"""Epochs that no recipe allows, unless it has no limit."""


def resolve(draft: Draft) -> Job:
    """Apply all steps to the draft."""
    for step in STEPS:
        draft = step(draft)
    return finish(draft)


def state_given(draft: Draft) -> Draft:
    """Add a line for each option stated by the user."""
    names = [name for name in draft.given if name not in ("data", "data_root", "init", "out", "recipe")]
    shown = {n: _range(draft.given[n]) if n == "levels" else format_value(draft.given[n]) for n in names}
    start = [draft.start] if draft.start else []
    return draft.change(*start, *(Choice(n.replace("_", " "), value, "requested") for n, value in shown.items()))


def take_split(draft: Draft) -> Draft:
    """Add the lines of the split."""
    return draft.change(*draft.split_choices, *([draft.earlier.choice()] if draft.earlier else []))


def keep_last(draft: Draft) -> Draft:
    """Keep the last averaged weights where validation images are too few to choose an epoch.

    The best of many epochs on few images is so by chance: its accuracy there is well above that on new images.
    """
    run, val = draft.run, draft.dataset.splits.get("val")
    if "keep" in draft.given or val is None or not run.ema or run.early_stop or run.recipe in METHODS:
        return draft
    groups = count_groups(val.groups, len(val))
    if groups >= TO_CHOOSE_AN_EPOCH:
        return draft
    few = in_groups(len(val), groups, "validation image")
    why = f"the last weights are saved: {few} are too few to choose the best epoch (fewer than {TO_CHOOSE_AN_EPOCH})"
    return draft.change(Choice("keep", "last", why), keep="last")


def report_leak(draft: Draft) -> Draft:
    """Warn of initial weights of a run that learned from labels of the same data, and held out other images."""
    place = Path(draft.given["init"]) if draft.init else None
    if place is None or not is_run(place):
        return draft
    try:
        before = RunFolder(place).read_plan()
    except RunError:  # weights load without it
        return draft
    known, run, init = before.fingerprint, before.run, draft.given["init"]
    if known is None or run.recipe in METHODS:
        return draft
    if not known.may_overlap(Fingerprint.of(draft.whole, draft.dataset)):
        if not trained_on_held_out(RunFolder(place), draft.dataset):
            return draft
        trained = f"{init} was trained on images that are held out here"
        why = f"{trained}, so the accuracy would be too high. Use another --init"
        return draft.change(Choice("leak", "yes", why))
    same = f"--split-seed {run.seed if run.split_seed is None else run.split_seed}"
    same += f" --val-fraction {run.val_fraction}" if run.val_fraction is not None else ""
    why = f"{init} may have been trained on images that are held out here; {same} holds out the same images as {init}"
    return draft.change(Choice("leak", "possible", why))


def report_source(draft: Draft) -> Draft:
    """Add a line with the notes of the source, such as images that it left out."""
    notes = [*draft.whole.notes, *([] if draft.run.recipe in METHODS else labels_beside(draft.whole.source))]
    return draft.change(Choice("data", count(len(notes), "note"), "; ".join(notes))) if notes else draft


def report_depth(draft: Draft) -> Draft:
    """Add a line on images of more than 8 bits, and the levels of floats. Raises `DataError` if almost nothing is left
    of them, or if floats have no sure range.
    """
    levels, depth = draft.run.levels, draft.stats.depth
    if depth is None:
        why = "--levels has no effect, because no sampled image is a gray image with more than 8 bits"
        return draft if levels is None else draft.change(Choice("levels", _range(levels), why))
    if levels is None and (levels := depth.levels_of_floats(draft.whole.source)) is not None:
        return draft.change(Choice("levels", _range(levels), depth.note(levels)), levels=levels)
    depth.check(levels, draft.whole.source)
    return draft.change(Choice("depth", "8 bits", depth.note(levels)))


def _range(levels: tuple[int, int]) -> str:
    return f"{levels[0]:,} to {levels[1]:,}"


def check_recipe(draft: Draft) -> Draft:
    """Refuse data or a network that the recipe does not support."""
    if draft.run.recipe in CHECKS:
        CHECKS[draft.run.recipe](draft.dataset, draft.config, draft.run)
    return draft


def set_precision(draft: Draft) -> Draft:
    """Choose the precision, which depends on the width of the network."""
    machine = draft.machine.with_precision(draft.run.precision, dim=draft.config.dim)
    return dataclasses.replace(draft, machine=machine)


STEPS: tuple[Step, ...] = (
    state_given,
    own_parts,
    initial_weights,
    choose_plain_patches,
    take_network,
    suit_rate,
    pack_images,
    take_split,
    keep_last,
    report_leak,
    report_source,
    report_depth,
    scale_logits,
    read_teacher,
    build_config,
    flex_patches,
    check_recipe,
    set_precision,
    check_foreign,
    choose_strategy,
    fit_memory,
    share_batches,
    check_norms,
    suit_probe,
    whiten,
    drop_shifts,
    use_compiler,
    use_graphs,
    report_consequences,
    plan_task,
    report_pruning,
    report_teacher,
    keep_features,
)
"""Steps from the recipe's run to a consistent one. Each is a function of the draft alone."""


def finish(draft: Draft) -> Job:
    """Create the job, with each choice once and without those of the recipe that were overridden."""
    kept = [choice for choice in draft.recipe.choices if _holds(choice, draft.recipe.run, draft.run)]
    choices = {choice.name: choice for choice in (*kept, *draft.choices)}  # later choices override earlier ones
    run = dataclasses.replace(draft.run, out=draft.run.out or default_folder(draft.given, draft.dataset))
    contents = Fingerprint.of(draft.whole, draft.dataset)
    paths = {"earlier": str(draft.earlier.folder.resolve())} if draft.earlier else {}
    plan = Plan(
        run,
        tuple(choices.values()),
        paths,
        contents,
        draft.near,
        draft.near_held_out,
        kept=draft.earlier.kept if draft.earlier else (),
    )
    return Job(plan, draft.dataset, draft.config, draft.machine, draft.init, draft.teacher)


EXPLAINS: dict[str, tuple[str, ...]] = {
    "augmentation": ("augment", "randaugment", "erase", "epochs"),
    "averaging": ("ema",),
    "batch": ("batch_size", "accumulate"),
    "crop": ("crop", "crop_area", "flip"),
    "crops": ("crop_area", "local_crops"),
    "decoder": ("decoder_depth", "decoder_dim"),
    "geometry": ("crop", "crop_area", "shift"),
    "method": ("recipe",),
    "mirror": ("flip",),
    "optimizer": ("optimizer", "lr"),
    "pooling": ("pool",),
    "train share": ("train_share", "val_share"),
}
"""Choices of recipes → the fields of the run that they explain, if the name is not that of one field."""


def _holds(choice: Choice, proposed: Run, run: Run) -> bool:
    """True if the run still has the value that the recipe chose."""
    fields = EXPLAINS.get(choice.name, (choice.name.replace(" ", "_"),))
    return all(getattr(proposed, name, None) == getattr(run, name, None) for name in fields)


def reopen(plan: Plan) -> Job:
    """Return the job of a saved run, with the same choices and its teacher. Raises `DataError` if its data have
    changed.
    """
    own = load_run_data(plan)
    if not own.continues:
        raise own.changed(f"restore them, or {plan.restart_hint}")
    return job_on(plan, own)


def job_on(plan: Plan, own: RunData) -> Job:
    """Return the job of a saved run on its own data."""
    run = plan.run
    given = {"task": run.task, "init": plan.located("init"), "image_size": run.image_size, "channels": run.channels}
    given |= {name: getattr(run, name) for name in (*DECODER_OPTIONS, "class_order")}
    loaded = read_initial(given, own.dataset, run) if run.init else None
    config = to_config(run, own.dataset, loaded)
    teacher = teacher_of(plan.located("teacher"), run, own.dataset.classes)
    return Job(plan, own.dataset, config, choose(run.device, run.precision, dim=config.dim), loaded, teacher)
