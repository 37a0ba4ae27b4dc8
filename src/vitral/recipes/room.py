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
from vitral.model import ModelConfig
from vitral.model.schema import pair
from vitral.model.summary import summarize
from vitral.training.run import Choice, Run

SHARE = 0.7
"""Of the memory, what a run is planned with: the system and other programs need some, and a step takes no even amount.
"""
COPIES = 6
"""Of the weights in fp32: themselves, gradients, two moments, the averaged and the best ones."""
KEPT = {"bf16": 1.1, "fp32": 1.5}
"""What a training step takes, as a multiple of what its layers hand on in fp32. On processors it was 1.4 to 1.5 in fp32
and 0.9 to 1.1 in bf16, on an H200 0.7 (benchmarks/RESULTS.md).
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
    return max(1, min(AT_ONCE, total_bytes(device) // 4 // needs(config).passing))


def in_parts(
    run: Run, config: ModelConfig, machine: Machine, pictures: int, given: dict[str, Any], reasons: list[Choice]
) -> Run:
    """The run with batches that fit, and as many of them a step as make the same step. A batch that was asked for stays
    as it is, with a warning. `UsageError` where not even one picture fits.
    """
    total = total_bytes(machine.device)
    held, picture = _training(config, machine, run.checkpointing)
    if held + picture > total:
        raise _too_large(run, config, machine, total)
    resident = pictures * run.channels * math.prod(run.size)
    resident = resident if resident < MEMORY_SHARE * total else 0  # else they lie on the disk
    most = max(1, int((SHARE * total - held - resident) // picture))
    if run.batch_size <= most:
        return run
    least = -(-run.batch_size // most)
    parts = next((n for n in range(least, 2 * least) if run.batch_size % n == 0), least)  # equal, but not tiny
    size, count = run.batch_size // parts, run.accumulate * parts
    takes = f"{_gib(held + run.batch_size * picture)} of {_gib(total)} of memory"
    if "batch_size" in given:
        told = f"it takes some {takes}; --batch-size {size} --accumulate {count} makes the same steps"
        reasons.append(Choice("WARNING", "a batch that may not fit", told))
        return run
    why = f"a step of {run.step_batch} in parts: {run.batch_size} at once would take some {takes}"
    reasons.append(Choice("batch", f"{count} × {size}", why))
    return dataclasses.replace(run, batch_size=size, accumulate=count)


def _training(config: ModelConfig, machine: Machine, checkpointing: bool) -> tuple[int, int]:
    """What training holds throughout, and what a step takes for each picture."""
    of = needs(config)
    recomputed = checkpointing and not getattr(config, "conv_stem", None)  # convolutions are not computed again
    return COPIES * of.weights, round(of.kept * KEPT[machine.precision] * (RECOMPUTED if recomputed else 1))


def _too_large(run: Run, config: ModelConfig, machine: Machine, total: int) -> UsageError:
    def fits(config: ModelConfig, checkpointing: bool) -> bool:
        return sum(_training(config, machine, checkpointing)) < SHARE * total

    patch = max(pair(getattr(config, "patch_size", 1)))
    sides = [max(run.size) // part // patch * patch for part in (2, 4, 8, 16, 32)]
    smaller = (side for side in sides if side and fits(dataclasses.replace(config, image_size=side), run.checkpointing))
    ways = ["--checkpointing"] if fits(config, True) else []
    ways += [f"--image-size {side}" for side in itertools.islice(smaller, 1)] + ["a smaller --model"]
    held, picture = _training(config, machine, run.checkpointing)
    pixels = "×".join(map(str, run.size))
    why = f"training takes some {_gib(held)} for its weights and {_gib(picture)} for a picture, of {_gib(total)}"
    return UsageError(f"{run.model} at {pixels} pixels does not fit into the memory", why=why, hint=", or ".join(ways))


@contextlib.contextmanager
def memory_told(run: Run) -> Iterator[None]:
    """Within, memory that runs out is a `TrainingError` with a batch that takes less. (On a processor the system may
    end the process before anyone can tell.)
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        why = f"the device has no more for batches of {run.batch_size} at {'×'.join(map(str, run.size))} pixels"
        hint = "--checkpointing, a smaller --image-size or a smaller --model"
        if run.batch_size > 1:
            half = -(-run.batch_size // 2)
            hint = f"--batch-size {half} --accumulate {2 * run.accumulate} makes the same steps; or {hint}"
        raise TrainingError("not enough memory", why=why, hint=hint) from None


def _gib(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB"
