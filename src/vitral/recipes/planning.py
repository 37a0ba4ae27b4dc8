"""From what a person typed to a complete run: the recipe decides, given options win, every choice has its reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vitral.compiler import lacking
from vitral.console import flag
from vitral.data import DataSet, load
from vitral.data.contents import Contents
from vitral.data.dataset import check_classes
from vitral.data.transforms import Preprocessing
from vitral.device import Machine, choose
from vitral.errors import UsageError, VitralError, unknown
from vitral.model import WRITE_UPS, BiTConfig, ModelConfig, ViTConfig, avx512, network
from vitral.model import config as model_config
from vitral.model.schema import pair
from vitral.model.summary import summarize
from vitral.model.variants import named
from vitral.recipes.facts import Facts, facts
from vitral.recipes.pace import epochs_within
from vitral.recipes.room import in_parts
from vitral.recipes.run_data import own_data, split_for
from vitral.recipes.table import CHECKS, RECIPES, RESIZES, UNREAD
from vitral.training.compiling import whether
from vitral.training.distillation import order_of
from vitral.training.run import MODEL_OPTIONS, Choice, Plan, Run, checked_options
from vitral.training.schedule import computed_share
from vitral.training.step import recordable
from vitral.weights.load import Loaded, fit, read
from vitral.weights.preprocessing import differences


@dataclass(frozen=True)
class Job:
    """A run that is ready to be carried out."""

    plan: Plan
    dataset: DataSet
    config: ModelConfig
    machine: Machine
    init: Loaded | None = None
    """The weights to start from, made to fit, where a run begins from some."""
    teacher: Loaded | None = None
    """The network to learn from, where there is one; a run that is reopened has it only once it goes on."""

    @property
    def run(self) -> Run:
        return self.plan.run


def plan_run(options: dict[str, Any]) -> Job:
    """Read the data, ask the recipe, let the given `options` (fields of `Run`) win, and give each choice its reason."""
    given = checked_options(options)
    Run(**given)  # what makes no sense by itself is said before data are read
    for name in UNREAD.get(given.get("recipe", ""), ()):
        if name in given:
            raise UsageError(f"{flag(name)} means nothing to --recipe {given['recipe']}", hint="leave it out")
    if given.get("minutes") is not None and "epochs" in given:
        raise UsageError("--minutes and --epochs both say how long to train", hint="leave one out")
    dataset = load_given(given)
    check_classes(dataset)
    machine = choose(given.get("device", "auto"))
    known = facts(dataset)
    count = max(1, round(known.images * given.get("train_share", 1.0)))
    known = dataclasses.replace(known, images=count, epochs=given.get("epochs"), kept=_kept(dataset, given))
    job = resolve(_recipe(given)(known, machine), given, dataset)
    return job if job.run.minutes is None else _in_time(job, known, machine, given, dataset)


def _kept(dataset: DataSet, given: dict[str, Any]) -> int | None:
    """How many pictures are left to learn from, where the recipe cuts no other share; None where nothing can be cut."""
    splitting = {name: value for name, value in given.items() if name in _SPLITTING}
    try:
        return len(split_for(Run(**splitting), dataset, [])["train"])
    except VitralError:  # told once it is known that the recipe does cut
        return None


_SPLITTING = ("val_fraction", "train_share", "val_share", "seed")


def _in_time(job: Job, known: Facts, machine: Machine, given: dict[str, Any], dataset: DataSet) -> Job:
    """The job planned anew for as many epochs as its time allows: how long a run is decides more than its length."""
    epochs, told = epochs_within(job, job.run.minutes)  # type: ignore[arg-type]  # there is a time
    plan = _recipe(given)(dataclasses.replace(known, epochs=epochs), machine)
    if plan.run.epochs > epochs:  # a recipe that has its own length
        plan = dataclasses.replace(plan, run=dataclasses.replace(plan.run, epochs=epochs))
    job = resolve(plan, given, dataset)
    why = told if job.run.epochs == epochs else f"{told}; the recipe takes no more than {job.run.epochs}"
    choices = {choice.name: choice for choice in (*job.plan.choices, Choice("epochs", str(job.run.epochs), why))}
    return dataclasses.replace(job, plan=dataclasses.replace(job.plan, choices=tuple(choices.values())))


def load_given(given: dict[str, Any]) -> DataSet:
    """The data that were named, else those that the recipe is for."""
    start = Run(**{k: v for k, v in given.items() if k in ("data", "data_root")})
    return load(given.get("data") or _recipe(given)(_NO_FACTS, choose("cpu")).run.data, root=start.data_root)


def _recipe(given: dict[str, Any]) -> Callable[[Facts, Machine], Plan]:
    name = given.get("recipe", "finetune" if given.get("init") else "small")
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]


_NO_FACTS = Facts(images=1, classes=2, size=(224, 224), uniform=True, channels=3, imbalance=1.0)


def resolve(plan: Plan, given: dict[str, Any], dataset: DataSet) -> Job:
    """The recipe's plan with the given options in it, made consistent, on this data."""
    changes, reasons = dict(given), []
    for name, value in given.items():
        if name not in ("data", "data_root", "out", "recipe"):
            reasons.append(Choice(name.replace("_", " "), _shown(value), "you asked"))
    loaded = _initial(given, dataset.classes, plan.run) if given.get("init") else None
    if loaded:
        changes |= _from_weights(loaded, plan.run, given, reasons)
    elif (model := given.get("model", plan.run.model)) in WRITE_UPS:
        if model != plan.run.model:  # a recipe's own options are for the network that it chose
            changes |= {k: None for k in MODEL_OPTIONS if k not in given}
        own = {k: getattr(WRITE_UPS[model], k) for k in ("image_size", "channels") if k not in given}
        changes |= own
        reasons += [Choice(k.replace("_", " "), _shown(value), f"that of {model}") for k, value in own.items()]
    elif "model" in given:
        changes |= _of_kind(named(model)[0], plan.run, given, reasons)
        if "image_size" not in given:
            changes |= _fitting_size(model, plan.run, reasons)
    run = dataclasses.replace(plan.run, **{"data": dataset.source, **changes})
    _ = run.preprocessing  # a mean or std of another number of channels is refused before any work
    whole, dataset = dataset, split_for(run, dataset, reasons)
    run = _with_a_scale(run, given, reasons)
    teacher = teacher_of(run.teacher, run.channels, dataset.classes)
    if teacher is None and (alone := [name for name in ("distill_weight", "distill_temperature") if name in given]):
        hint = "--teacher RUN_OR_WEIGHTS, or leave it out"
        raise UsageError(f"{flag(alone[0])} means nothing without a teacher", hint=hint)
    config = _config(run, len(dataset.classes), loaded)
    if run.recipe in CHECKS:
        CHECKS[run.recipe](dataset, config)
    machine = choose(run.device, run.precision, dim=config.dim)
    if "batch_size" not in UNREAD.get(run.recipe, ()):
        run = in_parts(run, config, machine, len(dataset["train"]), given, reasons)
    _check_norms(run, config, len(dataset["train"]))
    run = _whitened(run, config, given, reasons)
    run = _without_shifts(run, config, given, reasons)
    run = _with_compiling(run, config, machine, len(dataset["train"]), reasons)
    run = _with_graphs(run, machine, reasons)
    reasons += _consequences(run, machine, dataset)
    reasons += _fewer_operations(run, config)
    if teacher:
        run = dataclasses.replace(run, teacher=teacher.reference)
        reasons.append(_taught(run, config, teacher))
    kept = [choice for choice in plan.choices if _holds(choice, plan.run, run)]
    told = {choice.name: choice for choice in (*kept, *reasons)}  # each name once: the later one knows more
    run = dataclasses.replace(run, out=run.out or f"runs/{dataset.name}")
    plan = Plan(run, tuple(told.values()), contents=Contents.of(whole, dataset))
    return Job(plan, dataset, config, machine, loaded, teacher)


TOLD_BY: dict[str, tuple[str, ...]] = {
    "augmentation": ("augment", "randaugment", "erase", "epochs"),
    "batch": ("batch_size", "accumulate"),
    "crop": ("crop", "crop_area", "flip"),
    "geometry": ("crop", "crop_area", "shift"),
    "mirror": ("flip",),
    "optimizer": ("optimizer", "lr"),
    "pooling": ("pool",),
    "smoothing": ("label_smoothing", "ema"),
    "train share": ("train_share", "val_share"),
}
"""A recipe's choice → the fields of the run that it tells of, where its name is not just that of one."""


def _holds(choice: Choice, recipes: Run, run: Run) -> bool:
    """Whether what the recipe chose is what is done; a plan with a line that was overruled would lie."""
    fields = TOLD_BY.get(choice.name, (choice.name.replace(" ", "_"),))
    return all(getattr(recipes, name, None) == getattr(run, name, None) for name in fields)


def reopen(plan: Plan) -> Job:
    """The job of a run that was planned before: the same choices, nothing decided anew. `DataError` where its data are
    no longer what they were.
    """
    own = own_data(plan)
    if own.changes:
        raise own.changed(f"put them back as they were, or {plan.anew}")
    run = plan.run
    again = {"init": plan.located("init"), "image_size": run.image_size, "channels": run.channels}
    loaded = _initial(again, own.dataset.classes, run) if run.init else None
    config = _config(run, len(own.dataset.classes), loaded)
    return Job(plan, own.dataset, config, choose(run.device, run.precision, dim=config.dim), loaded)


def teacher_of(reference: str | None, channels: int, classes: tuple[str, ...]) -> Loaded | None:
    """The teacher of a run, read anew; `UsageError` where its classes are not the data's."""
    if reference is None:
        return None
    loaded = read(reference, channels=channels)
    order_of(classes, loaded.weights.classes, reference)
    return loaded


def _taught(run: Run, config: ModelConfig, teacher: Loaded) -> Choice:
    """What the teacher is, and what it costs beside a training step, which is about three forward passes."""
    weights = teacher.weights
    own, adds = (summarize(of) for of in (config, weights.config))
    name = weights.trained.get("model", f"{teacher.format}'s")
    share = adds.flops / (3 * own.flops)
    size = _shown(weights.preprocessing.image_size)
    why = (
        f"{run.distill_weight:g} of the loss at temperature {run.distill_temperature:g}; at {size} it adds "
        f"{adds.flops / 1e9:.3g} GFLOPs a picture, {share:.0%} of a step's own"
    )
    return Choice("teacher", f"{name}, {adds.parameters:,} parameters ({run.teacher})", why)


def _fewer_operations(run: Run, config: ModelConfig) -> list[Choice]:
    """What is left out of training pictures."""
    found = []
    patch: tuple[int, int] | None = getattr(config, "patch", None)
    if run.start_size is not None:
        _check_start(run, patch)
        assert patch is not None  # or it was refused
        why = (
            f"grows by whole patches in two thirds of the steps; {computed_share(run, patch):.0%} of the pixels in all"
        )
        found.append(Choice("start size", f"{_shown(run.start)} to {_shown(run.size)}", why))
    if patch and (dropped := getattr(config, "patch_dropout", 0.0)):
        count = run.size[0] // patch[0] * (run.size[1] // patch[1])
        why = f"training computes {max(1, round(count * (1 - dropped)))} of {count} patches, evaluation all of them"
        found.append(Choice("patch dropout", f"{dropped:g}", why))
    return found


def _check_start(run: Run, patch: tuple[int, int] | None) -> None:
    """Pictures grow by whole patches, to a size that is not smaller."""
    if patch is None:
        why = f"pictures grow by whole patches, and {run.model} has none"
        raise UsageError("--start-size is for networks with patches", why=why, hint="leave it out")
    sides = list(zip(run.start, run.size, patch, strict=True))
    if any(start % p or start > full for start, full, p in sides):
        near = [min(max(1, round(start / p)) * p, full) for start, full, p in sides]
        raise UsageError(
            f"training cannot begin at {_shown(run.start)} pixels",
            why=f"pictures grow by whole patches of {_shown(patch)} to {_shown(run.size)}",
            hint=f"--start-size {near[0] if near[0] == near[1] else f'{near[0]} {near[1]}'}",
        )


def _config(run: Run, classes: int, loaded: Loaded | None) -> ModelConfig:
    if loaded is None:
        return model_config(run.model, classes=classes, **run.model_changes())
    changes = {name: getattr(run, name) for name in _FREE if getattr(run, name) is not None}
    return dataclasses.replace(loaded.weights.config, **changes)


_FREE = ("dropout", "drop_path", "patch_dropout")
"""Options of the network that are not in its weights: training may change them."""


def _initial(given: dict[str, Any], names: tuple[str, ...], recipes: Run) -> Loaded:
    """The weights to start from, at the size that is asked for or is part of the recipe; with a fresh head where the
    data have other classes.
    """
    loaded = read(given["init"], channels=given.get("channels"))
    size = given.get("image_size")
    if size is None and recipes.recipe in RESIZES:
        patch = pair(getattr(loaded.weights.config, "patch_size", 1))
        size = tuple(n // p * p for n, p in zip(recipes.size, patch, strict=True))
    loaded = fit(loaded, image_size=size)
    if loaded.weights.classes == names:
        return loaded
    return fit(loaded, classes=len(names), new_head=True)


def _from_weights(loaded: Loaded, recipes: Run, given: dict[str, Any], reasons: list[Choice]) -> dict[str, Any]:
    """What a network that exists already decides: its shape and how it wants its pictures.

    `UsageError` for a shape that is asked for and cannot be had. Pictures may be prepared otherwise, with a warning:
    it is the commonest way to lose accuracy without a word.
    """
    weights, init = loaded.weights, given["init"]
    own = {field.name: getattr(weights.preprocessing, field.name) for field in dataclasses.fields(Preprocessing)}
    has = vars(weights.config)  # what the network has not at all, as a ResNet --dropout, is None: nothing goes with it
    for name in MODEL_OPTIONS:
        if name in given and (name not in _FREE or name not in has) and given[name] != has.get(name):
            typed, why = f"{flag(name)} {_shown(given[name])}", f"the network in it has {has.get(name)}"
            raise UsageError(f"{typed} does not go with --init {init}", why=why, hint="leave it out")
    model = str(weights.trained.get("model", f"{loaded.format}'s"))
    if given.get("model", model) != model:
        typed, why = f"--model {given['model']}", f"the network in it is {model}"
        raise UsageError(f"{typed} does not go with --init {init}", why=why, hint="leave it out")
    reasons += [
        Choice("model", model, f"{init} decides the network and its preprocessing"),
        Choice("weights", loaded.account.counted(), "; ".join(loaded.account.remarkable()) or "as they were"),
        Choice("image size", _shown(weights.preprocessing.image_size), f"that of {init}"),
        Choice("channels", str(weights.preprocessing.channels), f"those of {init}"),
    ]
    asked = {name: _spread(name, given[name], weights.config.channels) for name in own if name in given}
    used = dataclasses.replace(weights.preprocessing, **asked)
    if told := differences(weights.preprocessing, used):
        reasons.append(Choice("WARNING", "pictures otherwise", f"than {init} was trained with: {'; '.join(told)}"))
    of_kind = _of_kind(type(weights.config), recipes, given, reasons)
    free = {name: None for name in MODEL_OPTIONS if name not in given}
    return {**of_kind, **free, **own, **asked, "model": model, "init": loaded.reference}


def _of_kind(kind: type[ModelConfig], recipes: Run, given: dict[str, Any], reasons: list[Choice]) -> dict[str, Any]:
    """What a recipe chose for a ViT and a network of another kind has no use for."""
    changes: dict[str, Any] = {n: None for n in MODEL_OPTIONS if not hasattr(kind, n) and n not in given}
    if kind is BiTConfig and recipes.optimizer == "muon" and "optimizer" not in given:
        changes["optimizer"] = "adamw"
        if "lr" not in given:
            changes["lr"] = 1e-3
        why = "muon is for the matrices of a transformer's blocks; a ResNet has convolutions"
        reasons.append(Choice("optimizer", f"adamw, {changes.get('lr', given.get('lr')):g}", why))
    return changes


def _spread(name: str, value: Any, channels: int) -> Any:
    """A value in its full form: both sides of a size, every channel of a mean."""
    count = {"image_size": 2, "mean": channels, "std": channels}.get(name)
    return (value,) * count if count and not isinstance(value, tuple) else value


def _fitting_size(model: str, run: Run, reasons: list[Choice]) -> dict[str, Any]:
    """The recipe's image size, rounded up to whole patches of the model that was asked for."""
    patch = pair(named(model)[1].get("patch_size", 1))
    size = tuple(-(-n // p) * p for n, p in zip(run.size, patch, strict=True))
    if size != run.size:
        reasons.append(Choice("image size", _shown(size), f"rounded up to whole patches of {model}"))
    return {"image_size": size}


def _check_norms(run: Run, config: ModelConfig, pictures: int) -> None:
    """A stem's norms need more than one place in a batch: `UsageError` for a batch of one picture of one token."""
    one = 1 in (run.batch_size, pictures % run.batch_size)
    if one and isinstance(config, ViTConfig) and config.conv_stem and config.grid == (1, 1):
        why = "the stem makes one token of it, and its norms are over a batch"
        raise UsageError("a batch of one picture has nothing to be normalised by", why=why, hint="--image-size 32")


def _whitened(run: Run, config: ModelConfig, given: dict[str, Any], reasons: list[Choice]) -> Run:
    """A first layer is whitened where there is one that begins anew; `UsageError` where it is asked for and is not."""
    stem = getattr(config, "conv_stem", ())
    if run.whiten and stem and not run.init:
        why = "a first layer that tells pixels' variations apart need not be learned (arXiv 2404.00498)"
        reasons.append(Choice("first layer", "whitened", why))
        return run
    if given.get("whiten"):
        why = f"{run.init} has learned it already" if stem else f"{run.model} has no convolutional stem"
        raise UsageError("there is no layer to whiten", why=why, hint="leave out --whiten, or --model C+Micro/8")
    return dataclasses.replace(run, whiten=False)


def _without_shifts(run: Run, config: ModelConfig, given: dict[str, Any], reasons: list[Choice]) -> Run:
    """A very small network has no room to learn what shifts teach: mnist-7562 loses 0.6 points by them on MNIST
    (docs/log.md).
    """
    if run.recipe != "small" or run.crop != "shift" or "crop" in given:
        return run
    with torch.device("meta"):
        parameters = sum(p.numel() for p in network(config).parameters())
    if parameters >= SHIFTS_NEED:
        return run
    reasons.append(Choice("geometry", "as they are", f"{parameters:,} parameters are too few to learn from shifts"))
    return dataclasses.replace(run, crop="none")


SHIFTS_NEED = 20_000
"""Parameters below which small pictures are not shifted: 7,850 lose by it, 426,920 gain."""


def _with_a_scale(run: Run, given: dict[str, Any], reasons: list[Choice]) -> Run:
    """Logits that a tanh keeps within ±1 leave a loss of log(1 + 9 e⁻²) at best with ten classes, and no probability
    above 45 %: the default recipe gives such a network a scale, and what smoothing is for it has already.
    """
    bounded = getattr(WRITE_UPS.get(run.model), "logits_tanh", False)
    if run.recipe != "small" or run.init or not bounded or "logit_scale" in given:
        return run
    why = "within ±1, where the network's tanh keeps them, logits hardly tell classes apart"
    reasons.append(Choice("logit scale", f"{BOUNDED_SCALE:g}", why))
    changes: dict[str, Any] = {"logit_scale": BOUNDED_SCALE}
    if "label_smoothing" not in given:
        changes["label_smoothing"] = 0.0
        reasons.append(Choice("smoothing", "weights averaged", "bounded logits are smooth enough"))
    return dataclasses.replace(run, **changes)


BOUNDED_SCALE = 8.0
"""Of logits within ±1: 4 to 20 are alike on MNIST (docs/log.md)."""


def _with_compiling(run: Run, config: ModelConfig, machine: Machine, pictures: int, reasons: list[Choice]) -> Run:
    """The run with the choice made whether its network is compiled; `UsageError` where it is to be and cannot."""
    if "compile" in UNREAD.get(run.recipe, ()):
        return run
    if run.compile and (why := lacking(machine.device)):
        raise UsageError("--compile does not go on this machine", why=why, hint="leave it out, or apt install g++")
    if run.compile is not None:
        return run
    on, why = whether(machine, config, run.epochs * pictures)
    reasons.append(Choice("compile", "on" if on else "off", why))
    return dataclasses.replace(run, compile=on)


def _with_graphs(run: Run, machine: Machine, reasons: list[Choice]) -> Run:
    """The run with the choice made whether its steps are recorded; `UsageError` where they are to be and cannot."""
    if "graphs" in UNREAD.get(run.recipe, ()):
        return run
    on, why = recordable(run, machine.device)
    if run.graphs and not on:
        raise UsageError("--graphs does not go in this run", why=why, hint="leave it out")
    if run.graphs is not None:
        return run
    if machine.device.type == "cuda":
        reasons.append(Choice("graphs", "on" if on else "off", why))
    return dataclasses.replace(run, graphs=on)


def _consequences(run: Run, machine: Machine, dataset: DataSet) -> list[Choice]:
    """What follows from the other choices."""
    found = []
    if run.lr_batch is not None and run.lr_batch != run.step_batch:
        why = f"{run.lr:g} is meant for batches of {run.lr_batch}; yours is {run.step_batch}: scaled in proportion"
        found.append(Choice("learning rate", f"{run.peak_lr:g}", why))
    ours = machine.device.type == "cpu" and machine.precision == "bf16" and not run.plain and avx512.ready()
    why = "; ".join(filter(None, (f"{machine.reason}, and kernels of ours", avx512.told()))) if ours else machine.reason
    found.append(Choice("precision", f"{machine.precision} on {machine.name}", why))
    counts = [int((dataset["train"].labels == k).sum()) for k in range(len(dataset.classes))]
    if max(counts) > 5 * max(min(counts), 1) and run.class_weights == "none" and run.sampling == "shuffle":
        why = f"classes have {min(counts):,} to {max(counts):,} pictures; if the rare ones matter: --sampling balanced"
        found.append(Choice("class balance", "left as it is", why))
    return found


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "×".join(map(str, value)) if isinstance(value, tuple) else str(value)
