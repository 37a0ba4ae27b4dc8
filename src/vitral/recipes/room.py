"""What fits into the machine's memory, reckoned before anything is built: how many pictures a step takes at a time, and
how many are predicted together. Where memory runs out all the same, what to type.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from vitral.data.loader import MEMORY_SHARE
from vitral.device import Machine, out_of_memory, total_bytes
from vitral.errors import TrainingError, UsageError
from vitral.model import ModelConfig, ViTConfig
from vitral.model.schema import pair
from vitral.model.summary import summarize
from vitral.training.run import Choice, Run

SHARE = {"cuda": 0.9}
"""Of the memory, what a run is planned with; of a machine's own 0.7: the system and other programs need some."""
MOMENTS = {"sgd": 1}
"""What an optimizer keeps, in copies of the weights; the others two."""
KEPT = {("cpu", "bf16"): 1.1, ("cuda", "bf16"): 0.8}
"""What a training step takes, as a multiple of what its layers hand on in fp32. On processors it was 0.9 to 1.1 in bf16
and 1.4 to 1.5 in fp32, which is taken for all else too; on an H200 in bf16 0.7 (benchmarks/RESULTS.md).
"""
RECOMPUTED = 0.25
"""Of that, what is left with `--checkpointing`: the input of each block, and one block at a time."""
AT_ONCE = 256
"""Pictures that are predicted together where there is room."""


class Needs(NamedTuple):
    """What a network takes of memory, in bytes."""

    weights: int
    kept: int
    """What its layers hand on of one picture, each layer's once, in fp32."""
    passing: int
    """What is there at one time in a prediction of one picture: its pixels, and some of the largest outputs."""


@lru_cache(64)
def needs(config: ModelConfig) -> Needs:
    """Reckoned from the network's layers, without building it."""
    found = summarize(config)
    outputs = sorted((4 * math.prod(layer.output_shape) for layer in found.layers if layer.output_shape), reverse=True)
    return Needs(found.parameter_bytes, found.activation_bytes, 2 * (sum(outputs[:3]) + found.input_bytes))


def at_once(config: ModelConfig, device: torch.device) -> int:
    """How many pictures are predicted together: 256, or as many as a quarter of the memory holds."""
    room = total_bytes(device) // 4
    if AT_ONCE * _at_most(config) <= room:
        return AT_ONCE  # what is exact takes a second to import
    return max(1, min(AT_ONCE, room // needs(config).passing))


def _at_most(config: ModelConfig) -> float:
    """A bound on `Needs.passing` from the sizes alone, where there is an easy one."""
    if not isinstance(config, ViTConfig) or config.stem is not None:
        return math.inf
    pixels: float = math.prod(config.image)
    tokens = math.prod(config.grid) + config.prefix
    numbers = pixels * config.channels + tokens * (4 * config.mlp_dim + 3 * config.dim)
    for channels, stride in config.conv_stem or ():
        numbers += 3 * channels * (pixels if config.conv_pool else pixels / stride**2)
        pixels /= stride**2
    return 8 * numbers


def in_parts(
    run: Run, config: ModelConfig, machine: Machine, pictures: int, given: dict[str, Any], reasons: list[Choice]
) -> Run:
    """The run with batches that fit, and as many of them a step as make steps of as many pictures. What was asked for
    stays as it is, with a warning. `UsageError` where not even one picture fits. What is frozen keeps less than can be
    told here, and is let be.
    """
    if run.freeze:
        return run
    total = total_bytes(machine.device)
    held, picture = _training(run, config, machine)
    if held + picture > total:
        raise _too_large(run, config, machine, total)
    share = SHARE.get(machine.device.type, 0.7)
    most = max(1, int((share * total - held - _resident(run, machine, pictures, total)) // picture))
    batch = min(run.batch_size, pictures)
    if batch <= most:
        return run
    least = -(-batch // most)
    parts = next((n for n in range(least, 2 * least) if batch % n == 0), least)  # equal, but not tiny
    size, count = batch // parts, run.accumulate * parts
    takes = f"{batch} pictures at once take some {_shown(held + batch * picture)}, and there are {_shown(total)}"
    if given.keys() & {"batch_size", "accumulate", "graphs"}:
        told = f"{takes}; --batch-size {size} --accumulate {count} takes less"
        reasons.append(Choice("memory", "may not suffice", told))
        return run
    norms = ", and the stem's norms are over a part" if getattr(config, "conv_stem", None) else ""
    why = f"{takes}: steps of {size * count} in parts{norms}"
    reasons.append(Choice("batch", f"{count} × {size}", why))
    return dataclasses.replace(run, batch_size=size, accumulate=count)


def _training(run: Run, config: ModelConfig, machine: Machine) -> tuple[int, int]:
    """What training holds throughout, and what a step takes for each picture."""
    of = needs(config)
    copies = 2 + MOMENTS.get(run.optimizer, 2) + bool(run.ema)  # weights, gradients, moments, averaged weights
    kept = KEPT.get((machine.device.type, machine.precision), 1.5)
    return copies * of.weights, round(of.kept * kept * (RECOMPUTED if run.checkpointing and _recomputes(config) else 1))


def _recomputes(config: ModelConfig) -> bool:
    """Whether `--checkpointing` saves most of what a step takes: the convolutions of a stem are not computed again."""
    return not getattr(config, "conv_stem", None)


def _resident(run: Run, machine: Machine, pictures: int, total: int) -> int:
    """Pictures that lie in the same memory throughout; those that are cropped at random have room around them."""
    cropped = run.crop == "random-resized"
    if run.residency in ("stream", "cache") or (cropped and machine.device.type == "cuda"):
        return 0
    found = pictures * run.channels * math.prod(run.size) * (4 if cropped else 1)
    return found if found < MEMORY_SHARE * total else 0  # else they lie on the disk


def _too_large(run: Run, config: ModelConfig, machine: Machine, total: int) -> UsageError:
    def fits(run: Run, config: ModelConfig) -> bool:
        return sum(_training(run, config, machine)) < SHARE.get(machine.device.type, 0.7) * total

    patch = max(pair(getattr(config, "patch_size", 1)))
    sides = [max(run.size) // part // patch * patch for part in (2, 4, 8, 16, 32)]
    smaller = (side for side in sides if side and fits(run, dataclasses.replace(config, image_size=side)))
    ways = ["--checkpointing"] if fits(dataclasses.replace(run, checkpointing=True), config) else []
    ways += [f"--image-size {side}" for side in itertools.islice(smaller, 1)]
    ways += ["weights of a smaller network" if run.init else "a smaller --model"]
    held, picture = _training(run, config, machine)
    pixels = "×".join(map(str, run.size))
    why = (
        f"training takes some {_shown(held)} for its weights and {_shown(picture)} for a picture, and there are "
        f"{_shown(total)}"
    )
    return UsageError(f"{run.model} at {pixels} pixels does not fit into the memory", why=why, hint=", or ".join(ways))


@contextlib.contextmanager
def memory_told(run: Run, config: ModelConfig, *, by_steps: bool) -> Iterator[None]:
    """Within, memory that runs out is a `TrainingError` with what takes less; `by_steps` where the run learns so. (On a
    processor the system may end the process before anyone can tell.)
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        pixels = "×".join(map(str, run.size))
        ways = ["a smaller --image-size", "weights of a smaller network" if run.init else "a smaller --model"]
        if by_steps and not run.checkpointing and _recomputes(config):
            ways.insert(0, "--checkpointing")
        if by_steps and run.batch_size > 1:
            ways.insert(0, f"--batch-size {run.batch_size // 2} --accumulate {2 * run.accumulate}")
        what = f"batches of {run.batch_size}" if by_steps else "pictures"
        why = f"the device has no more, with {what} of {pixels} pixels"
        hint = f"a new run (--overwrite, or another --out) with {', or '.join(ways)}"
        raise TrainingError("not enough memory", why=why, hint=hint) from None


def _shown(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"
