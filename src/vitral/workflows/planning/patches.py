"""Planning steps of `--pack` (images of their own sizes) and `--patch-sizes` (one network for several patch sizes)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vitral.data.targets import targets_of
from vitral.errors import UsageError
from vitral.model import ModelConfig, ViTConfig
from vitral.model.config_base import pair
from vitral.model.variants import config_fields
from vitral.pretraining.methods import METHODS
from vitral.training.plan import Choice
from vitral.wording import flag
from vitral.workflows.planning.draft import Draft, format_value

PLAIN = {"C+Femto": "Pico", "C+Micro": "Nano"}
"""Networks of recipes with a convolutional stem, whose batch norms need images of one size → plain patches instead."""

_PACKED: dict[str, Any] = {
    "resize": "native",
    "resize_size": None,
    "crop": "none",
    "mixup": 0.0,
    "cutmix": 0.0,
    "teacher": None,
    "patch_sizes": (),
    "drop_path": 0.0,
    "patch_dropout": 0.0,
    "whiten": False,
    "compile": False,
    "graphs": False,
}
"""Options that packed images fix, with their values."""


def choose_plain_patches(draft: Draft) -> Draft:
    """Replace a recipe's network with a convolutional stem, unless the user names one."""
    name, _, patch = draft.run.model.partition("/")
    if (
        not (draft.given.get("pack") or draft.given.get("patch_sizes"))
        or "model" in draft.given
        or draft.init
        or not name.startswith("C+")
    ):
        return draft
    model = f"{PLAIN.get(name, name.removeprefix('C+'))}/{'4' if patch == '8' else patch}"
    sizes = "--pack keeps images at different sizes" if draft.given.get("pack") else "--patch-sizes resizes the patches"
    why = f"without a convolutional stem, because {sizes}"
    return draft.change(Choice("model", model, why), model=model)


def pack_images(draft: Draft) -> Draft:
    """Fix the options of packed images. Raises `UsageError` for those that do not go with them."""
    run, given = draft.run, draft.given
    if not given.get("pack") and run.resize != "native":
        if alone := [name for name in ("pack_min_size", "pack_drop", "multiple") if name in given]:
            raise UsageError(f"{flag(alone[0])} requires --pack", hint=f"add --pack, or leave out {flag(alone[0])}")
        return draft
    if "pack" in given and not given["pack"]:
        packed = "--resize native", "it implies --pack"
        option, why = packed if "resize" in given else (f"--init {run.init}", "that network was trained with --pack")
        raise UsageError(f"--no-pack contradicts {option}", why=why, hint="--resize letterbox")
    _check(draft)
    _refuse_others("--pack", given, _PACKED, "images of different sizes are packed into sequences")
    patch = _patch(draft)
    why = (
        f"up to {format_value(run.size)} pixels, in whole patches of {format_value(patch)}; images of one sequence do "
        "not attend to each other"
    )
    drawn = f"; longest side at random, from {run.pack_min_size} pixels up" if run.pack_min_size else ""
    choices = [Choice("pack", f"images keep their aspect ratio and size{drawn}", why)]
    if run.pack_drop:
        first, last = run.pack_drop
        choices.append(
            Choice("pack drop", f"{first:g} to {last:g}", "share of patches dropped, from first to last step")
        )
    return draft.change(*choices, pack=True, multiple=patch, **_PACKED)


def _check(draft: Draft) -> None:
    run = draft.run
    if run.recipe in METHODS or run.recipe == "linear-probe":
        why, hint = "it needs images of one size", "--resize letterbox" if run.init else "leave it out"
        raise UsageError(f"{run.recipe} does not support --pack", why=why, hint=hint)
    if targets_of(run.task).sequence:
        why = "its decoder reads images of one size"
        raise UsageError(f"--task {run.task} does not support --pack", why=why, hint="leave it out")


def _patch(draft: Draft) -> tuple[int, int]:
    """Return the patch size of the network, which must be a ViT of plain patches."""
    if draft.init:
        kind: type[ModelConfig] = type(draft.init.weights.config)
        fields = vars(draft.init.weights.config)
    else:
        kind, fields = config_fields(draft.run.model)
    if kind is not ViTConfig or fields.get("stem") is not None or fields.get("conv_stem") is not None:
        why = "packing needs a ViT without convolutions before the patches"
        raise UsageError(f"--pack does not support {draft.run.model}", why=why, hint="--model Nano/4, or S/16")
    tall, wide = pair(fields.get("patch_size", ViTConfig.patch_size))
    return tall, wide


_FLEXIBLE: dict[str, Any] = dict.fromkeys(("checkpointing", "whiten", "compile", "graphs", "pack"), False)
"""Options that a network of several patch sizes fixes, with their values."""


def flex_patches(draft: Draft) -> Draft:
    """Check the patch sizes, and fix the options that do not go with them."""
    run, given, config = draft.run, draft.given, draft.config
    sizes = tuple(sorted(set(run.patch_sizes)))
    if not sizes:
        return draft
    _refuse_others("--patch-sizes", given, _FLEXIBLE, "each step resizes the patches")
    if not isinstance(config, ViTConfig) or config.hybrid:
        why = "it has no patch embedding that could be resized"
        raise UsageError(f"--patch-sizes does not support {run.model}", why=why, hint="--model Nano/16, or S/16")
    least = math.lcm(*sizes, *config.patch)
    if bad := [size for size in sizes if any(n % size for n in run.size)]:
        fitting = max(1, round(max(run.size) / least)) * least
        what = f"images of {run.size[0]}×{run.size[1]} pixels cannot be divided into patches of {bad[0]} pixels"
        raise UsageError(what, hint=f"--image-size {fitting}")
    shown = " ".join(map(str, sizes))
    why = (
        "each batch uses one of these sizes, drawn at random; the weights are stored for patches of "
        f"{config.patch[0]} pixels (FlexiViT, arXiv 2212.08013)"
    )
    return draft.change(Choice("patch sizes", shown, why), patch_sizes=sizes, **_FLEXIBLE)


def _refuse_others(option: str, given: Mapping[str, object], fixed: Mapping[str, object], why: str) -> None:
    """Raise `UsageError` for a given option with another value than the one that `option` fixes."""
    for name, value in fixed.items():
        if name in given and given[name] != value:
            raise UsageError(f"{option} does not support {flag(name)}", why=why, hint="leave it out")
