"""Planning steps about the network: initial weights, named models, the configuration, a teacher."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vitral.data import DataSet
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.targets import targets_of
from vitral.errors import UsageError
from vitral.model import WRITE_UPS, BiTConfig, EncoderDecoderConfig, ModelConfig, ViTConfig
from vitral.model import config as model_config
from vitral.model.config_base import pair
from vitral.model.foreign import is_foreign
from vitral.model.summary import summarize
from vitral.model.variants import config_fields
from vitral.pretraining.methods import METHODS, needs_teacher
from vitral.recipes.table import RESIZES
from vitral.training.distillation import class_order
from vitral.training.optimizers import OPTIMIZERS
from vitral.training.options import MODEL_OPTIONS, Run
from vitral.training.plan import Choice
from vitral.weights.load import fit, read
from vitral.weights.loaded import Loaded
from vitral.weights.naming import with_classes
from vitral.weights.notes import LeftOut
from vitral.weights.preprocessing_configs import differences
from vitral.weights.read.references import built_in, starting_recipes
from vitral.wording import flag
from vitral.workflows.planning.draft import Draft, format_value
from vitral.workflows.planning.initial_reader import InitialReader, read_reader
from vitral.workflows.tasks.text import text_config

_REGULARIZATION = ("dropout", "drop_path", "patch_dropout")
"""Network options without weights, so that training may change them."""


def initial_weights(draft: Draft) -> Draft:
    """Read the initial weights."""
    if not draft.given.get("init") or draft.init:
        return draft
    given = {"task": draft.whole.targets.task, **draft.given}
    return dataclasses.replace(draft, init=read_initial(given, draft.dataset, draft.recipe.run))


def class_names(run: Run, dataset: DataSet) -> tuple[str, ...]:
    """Names of the classes that a run's network has; none in pretraining."""
    return () if run.recipe in METHODS else dataset.classes


def check_library(source: str) -> None:
    """Raise `UsageError` for a network of another library, before it is built without classes."""
    if is_foreign(source):
        why = "pretraining needs to know the patch embedding and the blocks, and other libraries do not mark them"
        raise UsageError(f"{source} cannot be pretrained", why=why, hint="use a network of vitral: --model Nano/4")


def read_initial(given: Mapping[str, object], dataset: DataSet, proposed: Run) -> Loaded:
    """Read the weights, at the given size, else at the recipe's if it fixes one; with a new head for other classes.

    Notes on fitted numbers are left out: the run fits its own.
    """
    loaded = _read_initial(given, dataset, proposed)
    return dataclasses.replace(loaded, account=loaded.account.without(LeftOut))


def _read_initial(given: Mapping[str, Any], dataset: DataSet, proposed: Run) -> Loaded:
    task = given.get("task") or proposed.task
    if targets_of(task).sequence:
        return read_reader(given, dataset, proposed)
    names = class_names(proposed, dataset)
    loaded = read(given["init"], channels=given.get("channels"), class_order=given.get("class_order"))
    if proposed.recipe in METHODS:
        check_library(getattr(loaded.weights.config, "source", ""))
    size = given.get("image_size")
    if size is None and proposed.recipe in (*RESIZES, *starting_recipes()):
        patch = pair(getattr(loaded.weights.config, "patch_size", 1))
        size = tuple(n // p * p for n, p in zip(proposed.size, patch, strict=True))
    loaded = fit(loaded, image_size=size)
    if loaded.weights.classes == names and loaded.weights.task == task:
        return loaded
    if task == loaded.weights.task and targets_of(task).one_class and (kept := with_classes(loaded, names)):
        return kept
    return fit(loaded, classes=len(names), new_head=True)


def take_network(draft: Draft) -> Draft:
    """Set the options that follow from the network: of the initial weights, a write-up, or another named model."""
    given, proposed = draft.given, draft.recipe.run
    changes: dict[str, object] = {}
    if draft.init:
        draft, changes = _from_weights(draft, draft.init)
    elif (model := given.get("model", proposed.model)) in WRITE_UPS:
        if model != proposed.model:  # a recipe's options apply only to its own network
            changes |= {name: None for name in MODEL_OPTIONS if name not in given}
        own = {k: getattr(WRITE_UPS[model], k) for k in ("image_size", "channels") if k not in given}
        changes |= own
        why = f"as defined for {model}"
        draft = draft.change(*(Choice(k.replace("_", " "), format_value(v), why) for k, v in own.items()))
    elif "model" in given:
        draft, changes = _drop_unsupported(draft, config_fields(model)[0])
        if "image_size" not in given:
            draft, size = _fitting_size(draft, model)
            changes |= size
    draft = draft.change(**{"data": draft.whole.source, "task": draft.whole.targets.task, **given, **changes})
    _ = draft.run.preprocessing  # refuse a mean or std with the wrong number of channels early
    return draft


def _from_weights(draft: Draft, loaded: Loaded) -> tuple[Draft, dict[str, Any]]:
    """Return the options that existing weights determine: the shape of the network and its preprocessing.

    Raises `UsageError` for a stated shape that contradicts them. Other preprocessing is allowed, but warned of: it is
    the most common cause of a silent loss of accuracy.
    """
    given, weights, init = draft.given, loaded.weights, draft.given["init"]
    own = {field.name: getattr(weights.preprocessing, field.name) for field in dataclasses.fields(Preprocessing)}
    has = vars(weights.config)  # a ResNet has no dropout, for example
    for name in MODEL_OPTIONS:
        if name in given and (name not in _REGULARIZATION or name not in has) and given[name] != has.get(name):
            stated = f"{flag(name)} {format_value(given[name])}"
            why = f"its network has {has[name]}" if name in has else "its network has no such option"
            raise UsageError(f"{stated} contradicts --init {init}", why=why, hint="leave it out")
    included = built_in(init)
    named = "the built-in model" if included and included.recipe else str(init)
    model = str(weights.trained.get("model", f"{loaded.format}'s"))
    if given.get("model", model) != model:
        stated, why = f"--model {given['model']}", f"its network is {model}"
        raise UsageError(f"{stated} contradicts --init {init}", why=why, hint="leave it out")
    reads_text = isinstance(loaded, InitialReader)
    why_size = "the size of the lines, in whole patches" if reads_text else f"the input size of {named}"
    size = Choice("image size", format_value(weights.preprocessing.image_size), why_size)
    own_size = next((one for one in draft.recipe.choices if (one.name, one.value) == (size.name, size.value)), size)
    channels = weights.preprocessing.channels
    draft = draft.change(
        Choice("model", model, f"the network of {named}; images are prepared as in its training"),
        Choice("weights", loaded.account.counts_text(), _changes_of(loaded) or "unchanged"),
        own_size,
        Choice("channels", str(channels), f"{'gray' if channels == 1 else 'color'} images, as {named} expects them"),
    )
    overrides = {name: _spread(name, given[name], weights.config.channels) for name in own if name in given}
    used = dataclasses.replace(weights.preprocessing, **overrides)
    if changed := differences(weights.preprocessing, used):
        why = f"{named} was trained with other settings: {'; '.join(changed)}"
        warning = Choice("WARNING", "preprocessing differs", why)
        draft = draft.change(warning)
    draft, dropped = _drop_unsupported(draft, type(weights.config))
    unset = {name: None for name in MODEL_OPTIONS if name not in given}
    draft, reader = _decoder_options(draft, loaded)
    return draft, {**dropped, **unset, **own, **overrides, **reader, "model": model, "init": loaded.reference}


def _changes_of(loaded: Loaded) -> str:
    """Describe what was changed in the weights; for the built-in model in words that need no names of tensors."""
    account = loaded.account
    if built_in(loaded.reference) and account.fresh and "resized" not in account.counts():
        return "tensors (arrays of weights); the last layer, the head, is new, because your classes are different"
    return "; ".join(account.highlights())


def _decoder_options(draft: Draft, loaded: Loaded) -> tuple[Draft, dict[str, Any]]:
    """The options of a decoder that the weights determine, and a learning rate for a network that reads already."""
    decoder = loaded.decoder if isinstance(loaded, InitialReader) else None
    if decoder is None:
        return draft, {}
    own: dict[str, object] = {"decoder_dim": decoder.dim, "decoder_depth": decoder.depth}
    draft = draft.change(Choice("decoder", f"{decoder.depth} blocks", f"as in {draft.given['init']}"))
    if not {"lr", "optimizer"} & set(draft.given):
        own["lr"] = draft.recipe.run.lr / 10
        why = "a tenth of the usual rate, because the weights already read these characters"
        draft = draft.change(Choice("optimizer", f"{draft.recipe.run.optimizer}, {own['lr']:g}", why))
    return draft, own


def _drop_unsupported(draft: Draft, kind: type[ModelConfig]) -> tuple[Draft, dict[str, Any]]:
    """Drop the recipe's options that this kind of network does not have."""
    given, proposed = draft.given, draft.recipe.run
    changes: dict[str, Any] = {n: None for n in MODEL_OPTIONS if not hasattr(kind, n) and n not in given}
    if kind is not ViTConfig and OPTIMIZERS[proposed.optimizer].hidden_matrices:
        usual: dict[str, Any] = {"optimizer": "adamw", "lr": 1e-3}
        plan = dataclasses.replace(draft.recipe, run=dataclasses.replace(proposed, **usual))
        draft = dataclasses.replace(draft, recipe=plan)
        changes |= {name: given.get(name, value) for name, value in usual.items()}
        if "optimizer" not in given:
            has = "a ResNet has convolutions" if kind is BiTConfig else "the blocks of other libraries are not known"
            why = f"{proposed.optimizer} is for the matrices of transformer blocks; {has}"
            draft = draft.change(Choice("optimizer", f"adamw, {changes['lr']:g}", why))
    return draft, changes


def _spread(name: str, value: object, channels: int) -> Any:
    """Expand a value to both sides of a size, or to every channel of a mean."""
    count = {"image_size": 2, "mean": channels, "std": channels}.get(name)
    return (value,) * count if count and not isinstance(value, tuple) else value


def _fitting_size(draft: Draft, model: str) -> tuple[Draft, dict[str, Any]]:
    """Round the recipe's image size up to whole patches of the stated model."""
    patch = pair(config_fields(model)[1].get("patch_size", 1))
    size = tuple(-(-n // p) * p for n, p in zip(draft.recipe.run.size, patch, strict=True))
    if size != draft.recipe.run.size:
        draft = draft.change(Choice("image size", format_value(size), f"rounded up to whole patches of {model}"))
    return draft, {"image_size": size}


def read_teacher(draft: Draft) -> Draft:
    """Read the teacher. Raises `UsageError` for distillation options without a teacher."""
    given, run = draft.given, draft.run
    teacher = draft.teacher or teacher_of(run.teacher, run, draft.dataset.classes)
    if teacher is None and (alone := [name for name in ("distill_weight", "distill_temperature") if name in given]):
        hint = f"add --teacher RUN_OR_WEIGHTS, or leave out {flag(alone[0])}"
        raise UsageError(f"{flag(alone[0])} requires a teacher", hint=hint)
    if teacher is not None and needs_teacher(run.recipe):
        return _of_features(dataclasses.replace(draft, teacher=teacher), teacher)
    return dataclasses.replace(draft, teacher=teacher)


def _of_features(draft: Draft, teacher: Loaded) -> Draft:
    """Check that a network has features to teach. One without classes has no logits."""
    if teacher.weights.classes:
        return draft
    if alone := [name for name in ("distill_weight", "distill_temperature") if name in draft.given]:
        why = f"{teacher.reference} has no classes, and so no logits"
        raise UsageError(f"{flag(alone[0])} has no effect", why=why, hint="leave it out")
    return draft.change(distill_weight=0.0)


def teacher_of(reference: str | None, run: Run, classes: tuple[str, ...]) -> Loaded | None:
    """Read the teacher of a run, if any. Raises `UsageError` if it cannot teach: in training if its classes are not
    those of the data, in pretraining if it reads text.
    """
    if reference is None:
        return None
    loaded = read(reference, channels=run.channels)
    if run.recipe not in METHODS:
        class_order(classes, loaded.weights.classes, reference)
    elif isinstance(loaded.weights.config, EncoderDecoderConfig):
        why = "it reads text, and has no feature vector of an image"
        raise UsageError("this network cannot teach", where=reference, why=why, hint="--teacher backbone")
    return loaded


def build_config(draft: Draft) -> Draft:
    """Build the configuration of the network."""
    return dataclasses.replace(draft, network=to_config(draft.run, draft.dataset, draft.init))


def to_config(run: Run, dataset: DataSet, loaded: Loaded | None) -> ModelConfig:
    """Return the configuration of a run's network: that of the weights, or of the named model."""
    changes = {name: getattr(run, name) for name in _REGULARIZATION if getattr(run, name) is not None}
    if isinstance(loaded, InitialReader):
        return text_config(
            run, dataset, dataclasses.replace(loaded.weights.config, **changes), loaded.decoder, project=loaded.project
        )
    if targets_of(run.task).sequence:
        named = model_config(run.model, classes=0, **{**run.model_changes(), "pool": "mean"})
        return text_config(run, dataset, named)
    if loaded is None:
        return model_config(run.model, classes=len(class_names(run, dataset)), **run.model_changes())
    return dataclasses.replace(loaded.weights.config, **changes)


def report_teacher(draft: Draft) -> Draft:
    """Report the teacher and its cost relative to a training step, which is about three forward passes."""
    if draft.teacher is None:
        return draft
    run, teacher, weights = draft.run, draft.teacher, draft.teacher.weights
    own, adds = (summarize(of) for of in (draft.config, weights.config))
    name = weights.trained.get("model", f"{teacher.format}'s")
    share = adds.flops / (3 * own.flops)
    size = format_value(weights.preprocessing.image_size)
    what = f"{run.distill_weight:g} of the loss at temperature {run.distill_temperature:g}"
    if needs_teacher(run.recipe):
        what = (
            f"{what} is for its logits, the rest for its features"
            if weights.classes
            else "the network learns to reproduce its features"
        )
    cost = f"{adds.flops / 1e9:.3g} GFLOPs per image at {size}, {share:.0%} of a training step"
    why = f"{what}; it adds {cost}"
    choice = Choice("teacher", f"{name}, {adds.parameters:,} parameters ({teacher.reference})", why)
    return draft.change(choice, teacher=teacher.reference)
