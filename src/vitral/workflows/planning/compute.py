"""Planning steps about computation: norms, whitening, augmentation for tiny networks, compiling, CUDA graphs."""

from __future__ import annotations

import torch

from vitral.device import seeded
from vitral.distributed.ranks import current
from vitral.errors import UsageError
from vitral.inference.engines.compiled import unavailable_reason
from vitral.kernels import cpu, cpu_library
from vitral.model import WRITE_UPS, Foreign, ForeignConfig, ViTConfig, network, summarize
from vitral.model.own import is_own
from vitral.pretraining.methods import METHODS
from vitral.recipes.table import UNSUPPORTED
from vitral.training.compiling import should_compile
from vitral.training.optimizers import OPTIMIZERS
from vitral.training.optimizers.rule import Rates
from vitral.training.plan import Choice
from vitral.training.step import can_capture
from vitral.wording import flag
from vitral.workflows.planning.draft import Draft
from vitral.workflows.planning.own_parts import own_rates
from vitral.workflows.tasks import task_of

SHIFTS_MIN_PARAMETERS = 20_000
"""Parameters below which small images are not shifted: 7,850 lose accuracy by it, 426,920 gain."""
TANH_LOGIT_SCALE = 8.0
"""Scale of logits bounded to ±1; 4 to 20 work equally well on MNIST (docs/log/accuracy.md)."""


def scale_logits(draft: Draft) -> Draft:
    """Scale logits that a tanh bounds to ±1, and turn label smoothing off.

    With ten classes, unscaled logits allow a loss of log(1 + 9 e⁻²) at best and no probability above 45%. Bounded
    logits make label smoothing unnecessary.
    """
    run, given = draft.run, draft.given
    bounded = getattr(WRITE_UPS.get(run.model), "logits_tanh", False)
    if run.recipe != "small" or run.init or not bounded or "logit_scale" in given:
        return draft
    why = "the network's tanh bounds logits to ±1, too close together to separate classes"
    draft = draft.change(Choice("logit scale", f"{TANH_LOGIT_SCALE:g}", why), logit_scale=TANH_LOGIT_SCALE)
    if "label_smoothing" in given:
        return draft
    why = "bounded logits need no label smoothing"
    return draft.change(Choice("label smoothing", "0", why), label_smoothing=0.0)


def check_norms(draft: Draft) -> Draft:
    """Refuse batches of one image with one token: the batch norms of a stem need more than one value."""
    run, config = draft.run, draft.config
    one = 1 in (run.batch_size, draft.images % run.batch_size)
    if one and isinstance(config, ViTConfig) and config.conv_stem and config.grid == (1, 1):
        why = "the stem reduces the image to one token, but batch normalization needs more than one value"
        raise UsageError("cannot normalize a batch of one image", why=why, hint="--image-size 32")
    return draft


def check_foreign(draft: Draft) -> Draft:
    """Build a network of another library and compute an image. Refuse options that it does not have."""
    run, config, given = draft.run, draft.config, draft.given
    if not isinstance(config, ForeignConfig):
        return draft
    for name in ("checkpointing", "layer_decay", "plain"):
        if given.get(name):
            why = f"{config.source} is used as it is"
            raise UsageError(f"{flag(name)} is for vitral's own networks", why=why, hint="leave it out")
    summarize(config)  # raises for a network that cannot be built, or computes no logits of these classes
    with seeded(0):
        normalizes = Foreign(config).has_batch_norm()
    draft = draft.change(layer_decay=None)
    last = draft.images % run.batch_size
    if not normalizes or 1 not in (run.batch_size, last):
        return draft
    size = next(size for size in range(max(run.batch_size - 1, 2), 1 << 20) if draft.images % size != 1)
    why = f"{draft.images:,} images in batches of {run.batch_size} end in a batch of one, which batch norms cannot use"
    if "batch_size" in given:
        raise UsageError("cannot normalize a batch of one image", why=why, hint=f"--batch-size {size}")
    return draft.change(Choice("batch", str(size), why), batch_size=size)


def whiten(draft: Draft) -> Draft:
    """Whiten a randomly initialized first layer. Raises `UsageError` if whitening is requested but not possible."""
    run, stem = draft.run, getattr(draft.config, "conv_stem", ())
    if run.whiten and stem and not run.init:
        why = "a first layer that decorrelates the pixels need not be trained (arXiv 2404.00498)"
        return draft.change(Choice("first layer", "whitened", why))
    if draft.given.get("whiten"):
        why = f"{run.init} already contains a trained first layer" if stem else f"{run.model} has no convolutional stem"
        raise UsageError(
            "cannot whiten the first layer",
            why=why,
            hint="leave out --whiten, or choose a convolutional stem with --model C+Micro/8",
        )
    return draft.change(whiten=False)


def drop_shifts(draft: Draft) -> Draft:
    """Turn random shifts off for a tiny network, which lacks the capacity for them: mnist-7562 loses 0.6 points on
    MNIST (docs/log/accuracy.md).
    """
    run = draft.run
    if run.recipe != "small" or run.crop != "shift" or "crop" in draft.given:
        return draft
    with torch.device("meta"):
        parameters = sum(p.numel() for p in network(draft.config).parameters())
    if parameters >= SHIFTS_MIN_PARAMETERS:
        return draft
    why = f"{parameters:,} parameters are too few to benefit from shifts"
    return draft.change(Choice("geometry", "none", why), crop="none")


def suit_probe(draft: Draft) -> Draft:
    """Leave out the probe of the initial weights where there can be none. Raises `UsageError` if it is requested."""
    run = draft.run
    if not run.probe:
        return draft
    reasons = {
        "random weights have nothing to probe": not run.init,
        "it needs validation images": "val" not in draft.dataset.splits,
        f"it predicts one class per image, not {run.task}": not draft.dataset.targets.one_class,
        "several processes train together": current().count > 1,
        "the images are packed, or patches have several sizes": bool(run.pack or run.patch_sizes),
        "a tanh bounds the logits": getattr(draft.config, "logits_tanh", False),
    }
    why = next((reason for reason, holds in reasons.items() if holds), "")
    if why and draft.given.get("probe"):
        raise UsageError("a linear probe does not fit this run", why=why, hint="leave out --probe")
    return draft.change(probe=False) if why else draft


def use_compiler(draft: Draft) -> Draft:
    """Choose torch.compile if it makes the run faster. Raises `UsageError` if it is requested but not available."""
    run, machine = draft.run, draft.machine
    if "compile" in UNSUPPORTED.get(run.recipe, ()):
        return draft
    if run.compile and (why := unavailable_reason(machine.device)):
        raise UsageError("--compile is not available on this machine", why=why, hint="leave it out, or apt install g++")
    if run.compile is not None:
        return draft
    if current().together:
        why = "torch.compile was not measured with several processes; --compile turns it on"
        return draft.change(Choice("compile", "off", why), compile=False)
    on, why = should_compile(machine, draft.config, run.epochs * draft.images)
    return draft.change(Choice("compile", "on" if on else "off", why), compile=on)


def use_graphs(draft: Draft) -> Draft:
    """Choose CUDA graphs if steps can be captured. Raises `UsageError` if they are requested but cannot be."""
    run, machine = draft.run, draft.machine
    if "graphs" in UNSUPPORTED.get(run.recipe, ()):
        return draft
    on, why = can_capture(run, machine.device)
    if isinstance(draft.config, ForeignConfig) and run.graphs is None:
        on, why = False, f"not tested with {draft.config.source}"
    if current().together:
        on, why = False, "CUDA graphs are not supported with several processes"
    if run.graphs and not on:
        raise UsageError("--graphs is not available in this run", why=why, hint="leave it out")
    if run.graphs is not None:
        return draft
    choices = [Choice("graphs", "on" if on else "off", why)] if machine.device.type == "cuda" else []
    return draft.change(*choices, graphs=on)


def suit_rate(draft: Draft) -> Draft:
    """Scale the recipe's learning rate and weight decay to an optimizer that the user names in place of the recipe's.

    Each optimizer's `UpdateRule` says by how much.
    """
    own, named = draft.recipe.run, draft.given.get("optimizer", draft.recipe.run.optimizer)
    if is_own(named):
        return own_rates(draft)
    rule = OPTIMIZERS[named]
    ratio = rule.relative_rate / OPTIMIZERS[own.optimizer].relative_rate
    if ratio != 1 and "lr" not in draft.given:
        lr, batches = float(f"{own.lr * ratio:.2g}"), f" for batches of {own.lr_batch}" if own.lr_batch else ""
        why = f"{own.lr:g} is for {own.optimizer}, scaled to {named}"
        draft = draft.change(Choice("lr", f"{lr:g}{batches}", why), lr=lr)
    if rule.decay and own.weight_decay and "weight_decay" not in draft.given:
        rates = Rates(own.weight_decay, own.lr, draft.run.lr, draft.run.momentum)
        decay = float(f"{rule.decay.suited(rates):.2g}")
        why = f"{own.weight_decay:g} is for {own.optimizer}; {named} {rule.decay.why}"
        draft = draft.change(Choice("weight decay", f"{decay:g}", why), weight_decay=decay)
    return draft


def report_consequences(draft: Draft) -> Draft:
    """Report the scaled learning rate and the precision."""
    run, machine, choices = draft.run, draft.machine, []
    if run.lr_batch is not None and run.lr_batch != run.step_batch:
        why = f"{run.lr:g} is for batches of {run.lr_batch}, scaled linearly to batches of {run.step_batch}"
        choices.append(Choice("learning rate", f"{run.peak_lr:g}", why))
    own_kernels = machine.device.type == "cpu" and machine.precision == "bf16" and not run.plain and cpu.ready()
    why = machine.reason
    if own_kernels:
        why = "; ".join(filter(None, (f"{why}, which vitral's kernels use", cpu_library.compile_note())))
    choices.append(Choice("precision", f"{machine.precision} on {machine.hardware}", why))
    return draft.change(*choices)


def plan_task(draft: Draft) -> Draft:
    """Add the choices of the task; pretraining reads no labels."""
    return draft if draft.run.recipe in METHODS else task_of(draft.run.task).plan(draft)


def report_pruning(draft: Draft) -> Draft:
    """Report the share of patches that training computes."""
    run, config, choices = draft.run, draft.config, []
    patch: tuple[int, int] | None = getattr(config, "patch", None)
    if patch and (dropped := getattr(config, "patch_dropout", 0.0)):
        count = run.size[0] // patch[0] * (run.size[1] // patch[1])
        why = f"training computes {max(1, round(count * (1 - dropped)))} of {count} patches, evaluation all of them"
        choices.append(Choice("patch dropout", f"{dropped:g}", why))
    return draft.change(*choices)
