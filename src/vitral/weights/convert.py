"""Write weights as files of other libraries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vitral.data.images.preprocessing import Preprocessing
from vitral.data.targets import DEFAULT_TASK
from vitral.device import plain_modes
from vitral.errors import UsageError, WeightsError, unknown
from vitral.kinds import checked, keywords_of
from vitral.model import BiTConfig, EncoderDecoderConfig, ForeignConfig, ViTConfig
from vitral.model.edited import edited
from vitral.model.position import POSITIONS
from vitral.weights import native
from vitral.weights.fitted import NUMBERS
from vitral.weights.formats import FORMATS, huggingface_code, huggingface_writing
from vitral.weights.load import read
from vitral.weights.native import Weights
from vitral.weights.notes import Alarm
from vitral.weights.preprocessing_configs import (
    DEFAULTS,
    differences,
    from_huggingface,
    from_timm,
    to_huggingface,
    to_timm,
)
from vitral.weights.report import LoadReport

_BIT = "-bit"  # files of ResNets are a separate format: jax-bit beside jax


def _for_transformers(weights: Weights, path: Path) -> Sequence[Path]:
    """Write for a class of transformers, else with a modeling file: in fp32, because transformers computes in the
    dtype of the file, and a CPU in fp16 not at all.
    """
    state = {name: one.float() if one.is_floating_point() else one for name, one in weights.state.items()}
    weights = dataclasses.replace(weights, state=state)
    try:
        return huggingface_writing.write(weights, path)
    except WeightsError as error:
        return huggingface_code.write(weights, path, error.why or error.what)


_WRITERS = {
    **{name: one.write for name, one in FORMATS.items() if one.write is not None},
    "hf": _for_transformers,
    "hf" + _BIT: _for_transformers,
}
TARGETS = ("native", *(name for name in _WRITERS if not name.endswith(_BIT)))
"""Formats that can be written."""


@partial(checked, options=keywords_of(read))
@plain_modes()
def convert(source: str | Path | nn.Module, target: str | Path, to: str, **options: Any) -> LoadReport:
    """Convert weights to a file of another library.

    Args:
        source: A run folder, a weights file of any known format, `timm:NAME`, `hf:ORG/NAME`, or a network in memory.
        target: The new file or folder.
        to: The format: `native`, `timm`, `hf`, `torchvision`, `jax`, `mae` or `dino`.
        options: Facts that the file does not contain, and changes to the network, as for `vitral.load`.

    Returns:
        The load report, which lists every tensor that was read and the files that were written.

    Raises:
        UsageError: The target exists, or the format is not known.
        WeightsError: The weights cannot be read, or the other library has no such network.

    Example:
        print(vitral.convert("runs/photos", "photos-hf", "hf").written)
    """
    loaded = read(source, **options)
    written = tuple(str(path) for path in write(loaded.weights, target, to))
    notes = lost(loaded.weights, to)
    if to != "native" and (changed := edited()):
        notes.append(Alarm(f"WARNING for {to}: {changed}, and its network computes without that"))
    if any(path.endswith(huggingface_code.MODELING) for path in written):
        notes.append(_CUSTOM)
    return dataclasses.replace(loaded.account.noted(*notes), written=written)


_CUSTOM = (
    f"transformers has no class for this network and runs {huggingface_code.MODELING} instead: "
    'pipeline("image-classification", model=FOLDER, trust_remote_code=True)'
)


def lost(weights: Weights, to: str) -> list[str]:
    """Warn about preprocessing that a file for `to` cannot carry: the most common way to lose accuracy."""
    own = weights.preprocessing
    if to not in _PREPROCESSING:
        return []
    return [*_preprocessing_lost(own, to), *_output_lost(weights, to)]


def _output_lost(weights: Weights, to: str) -> list[str]:
    """Note a temperature that is part of the written head, and what stays behind; warn about an answer that it cannot
    give.
    """
    notes, output = [], weights.output
    if (temperature := output.get("temperature", 1.0)) != 1:
        divided = "factor on the bounded logits" if getattr(weights.config, "logits_tanh", False) else "head"
        how = f"the {divided} is divided by the temperature {temperature:.4g}"
        notes.append(f"{how}, so that probabilities are the same")
    if behind := [NUMBERS[name] for name in ("scores", "cuts") if output.get(name)]:
        notes.append(f"{' and '.join(behind)} stay behind: --to native keeps them")
    if output.get("unknown"):
        notes.append(Alarm(f"WARNING for {to}: its files cannot state the threshold of unknown images"))
    return notes


def _preprocessing_lost(own: Preprocessing, to: str) -> list[str]:
    carried, used = to in _CARRY_PREPROCESSING, _PREPROCESSING[to](own)
    found = differences(own, used) if own.channels == 3 or carried else ["channels"]
    if own.levels is not None and own.levels == used.levels:  # in a field of vitral's own
        found.append("levels of 16 bits: {:,} to {:,}".format(*own.levels))
    if not found:
        return _rounding(own, used, to)
    reason = "its files cannot state" if carried else "its files state no preprocessing, and its default differs"
    return [Alarm(f"WARNING for {to}: {reason}: {'; '.join(found)}")]


def _rounding(own: Preprocessing, used: Preprocessing, to: str) -> list[str]:
    """Warn if the same rule makes other pixels, because sides and offsets are rounded in another way."""
    if own.native or own.channels != used.channels:
        return []
    largest = 0
    for height, width in _SIDES:
        image = _pattern(height, width, own.channels)
        pixels = (recipe.geometry(image).int() for recipe in (own, used))
        largest = max(largest, int(next(pixels).sub(next(pixels)).abs().max()))
    if not largest:
        return []
    sizes = ", ".join(f"{height} × {width}" for height, width in _SIDES)
    why = "sides and the center are rounded in another way"
    note = f"WARNING for {to}: {why}: its pixels differ by up to {largest} of 255 levels (a pattern of {sizes})"
    return [Alarm(note)]


_SIDES = ((480, 641), (641, 480), (375, 500), (333, 250))


def _pattern(height: int, width: int, channels: int) -> np.ndarray:
    """A smooth drawing of waves a few pixels long, as details of photographs are: uint8 (H, W, C)."""
    y, x = np.mgrid[0:height, 0:width]
    waves = np.sin(x / 5) + np.sin(y / 7) + np.sin((x + 2 * y) / 11)
    return np.repeat(np.rint(127.5 + 42 * waves)[..., None], channels, -1).astype(np.uint8)


_CARRY_PREPROCESSING = ("timm", "hf")
_PREPROCESSING: Mapping[str, Callable[[Preprocessing], Preprocessing]] = {
    "timm": lambda own: from_timm(to_timm(own)),
    "hf": lambda own: from_huggingface(to_huggingface(own)),
    "torchvision": lambda own: DEFAULTS["torchvision"](own.image_size),
    "jax": lambda own: DEFAULTS["jax"](own.image_size),
    "mae": lambda own: DEFAULTS["mae"](own.image_size),
    "dino": lambda own: DEFAULTS["deit"](own.image_size),
}
"""Preprocessing that the program will apply: as stated by the file, else its default."""


@checked
@plain_modes()
def save(
    model: nn.Module,
    path: str | Path,
    *,
    classes: Sequence[str] | None = None,
    preprocessing: Preprocessing | None = None,
) -> Path:
    """Save a network in memory as a file that every command reads.

    Args:
        model: A network of vitral, timm, torchvision or transformers.
        path: The new file, such as `pets.safetensors`, or a new folder.
        classes: Names of the outputs, in their order.
        preprocessing: How images were prepared in training (default: the usual preprocessing of the
            network's library, at its image size).

    Returns:
        The file.

    Raises:
        UsageError: The network has another number of outputs than there are classes, or the target exists.
        WeightsError: vitral cannot read this network.

    Example:
        model = vitral.create("Ti/16", classes=2, image_size=64)
        vitral.save(model, "pets.safetensors", classes=["cat", "dog"])
    """
    weights = read(model, classes=classes).weights
    if preprocessing is not None:
        weights = dataclasses.replace(weights, preprocessing=preprocessing)
    (file,) = write(weights, path, "native")
    return file


def write(weights: Weights, target: str | Path, to: str) -> Sequence[Path]:
    """Write `weights` in the format `to` and return the files.

    Raises `UsageError` for an unknown format, `WeightsError` with the reason if that program has no such network.
    """
    if to not in TARGETS:
        raise unknown("format to write", to, TARGETS)
    path = Path(target)
    if path.exists() and (path.is_file() or any(path.iterdir())):
        raise UsageError("the target exists already", where=path, hint="choose another target, or remove it")
    if to == "native":
        path = path if path.suffix else path / "model.safetensors"
        native.save(path, weights)
        return [path]
    if weights.task != DEFAULT_TASK:
        why = f"it is of --task {weights.task}, and other programs would read its outputs as classes"
        raise WeightsError(f"this network cannot be written for {to}", why=why, hint="--to native")
    if isinstance(weights.config, ForeignConfig):
        why = f"its network is {weights.config.source}; load model.safetensors into it, without “body.” in the names"
        raise WeightsError(f"this network cannot be written for {to}", why=why, hint="--to native")
    if isinstance(weights.config, EncoderDecoderConfig):
        why = "it reads text; only vitral's own file holds its two networks and its vocabulary"
        raise WeightsError(f"this network cannot be written for {to}", why=why, hint="--to native")
    writer = _WRITERS.get(to + _BIT if isinstance(weights.config, BiTConfig) else to)
    if writer is None:
        raise WeightsError(f"a BiT cannot be written for {to}", why="vitral does not have this format", hint="--to hf")
    if getattr(weights.config, "conv_stem", None) is not None and to != "hf":
        why = "it has a convolutional stem, which other libraries do not support"
        hint = "use --to hf, with a modeling file, or train a network without a stem: vitral train … --model Ti/16"
        raise WeightsError(f"this network cannot be written for {to}", why=why, hint=hint)
    try:
        return writer(at_temperature_one(materialized(weights)), path)
    except WeightsError as error:
        if error.hint:
            raise
        hint = "--to native writes any network"
        raise WeightsError(error.what, where=error.where, why=error.why, hint=hint) from error


def at_temperature_one(weights: Weights) -> Weights:
    """Divide the logits by the temperature of the probabilities, since other programs know the softmax alone: by the
    heads, or where a tanh bounds what they compute, by the factor after it.

    Other fitted numbers stay behind (`lost`): those programs have no place for them, and an energy is of other logits.
    """
    temperature = weights.output.get("temperature", 1.0)
    weights = dataclasses.replace(weights, output={}, statistics={})
    if temperature == 1:
        return weights
    if isinstance(weights.config, ViTConfig) and weights.config.logits_tanh:
        config = dataclasses.replace(weights.config, logit_scale=weights.config.logit_scale / temperature)
        return dataclasses.replace(weights, config=config)
    heads = [name for name in weights.state if name.split(".")[0] in ("head", "head_dist")]
    state = {**weights.state, **{name: weights.state[name].float() / temperature for name in heads}}
    return dataclasses.replace(weights, state=state)


def materialized(weights: Weights) -> Weights:
    """Turn computed positions into a learned table: other programs compute them differently, or not at all."""
    config = weights.config
    if not isinstance(config, ViTConfig) or config.position != "sincos":
        return weights
    table = POSITIONS["sincos"].table(config.grid, config.dim)
    if table is None:
        return weights
    prefix = torch.zeros(int(config.cls_token) + int(config.dist_token), config.dim)
    learned = dataclasses.replace(config, position="learned", cls_position=True)
    return dataclasses.replace(
        weights, config=learned, state={**weights.state, "pos_embed": torch.cat([prefix, table])[None]}
    )
