"""Estimate memory before building the network: micro-batches for training, batch size for evaluation.

If memory still runs out, the error says what to type.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch

from vitral.data.loader import MEMORY_SHARE
from vitral.device import Machine, out_of_memory, total_bytes
from vitral.distributed.ranks import current
from vitral.distributed.strategies import parts_of
from vitral.errors import TrainingError, UsageError
from vitral.model import ModelConfig, ViTConfig, with_image_size
from vitral.model.config_base import pair
from vitral.model.summary import summarize
from vitral.pretraining.methods import METHODS
from vitral.recipes.table import UNSUPPORTED
from vitral.training.optimizers import rule_of
from vitral.training.options import Run
from vitral.training.plan import Choice
from vitral.wording import memory_size
from vitral.workflows.planning.draft import Draft

SHARE = {"cuda": 0.9}
"""Share of the memory to plan with. For system memory 0.7, because the system and other programs need some."""
STEP_FACTORS = {("cpu", "bf16"): 1.1, ("cuda", "bf16"): 0.8}
"""Memory of a training step, as a multiple of the activations in fp32; 1.5 for all others. Measured: 0.9 to 1.1 on CPUs
in bf16, 1.4 to 1.5 on CPUs in fp32, 0.7 on an H200 in bf16 (benchmarks/RESULTS.md).
"""
CHECKPOINTED_SHARE = 0.25
"""Share of that with `--checkpointing`: the input of each block, and one block at a time."""
EVAL_BATCH = 256
"""Largest batch for evaluation."""


class Needs(NamedTuple):
    """Memory needs of a network, in bytes."""

    weights: int
    activations: int
    """Activations of one image, summed over all layers, in fp32."""
    inference: int
    """Peak memory of predicting one image: its pixels and some of the largest outputs."""


@lru_cache(64)
def needs(config: ModelConfig) -> Needs:
    """Estimate the memory needs from the network's layers, without building it."""
    summary = summarize(config)
    outputs = sorted((4 * math.prod(one.output_shape) for one in summary.layers if one.output_shape), reverse=True)
    return Needs(summary.parameter_bytes, summary.activation_bytes, 2 * (sum(outputs[:3]) + summary.input_bytes))


def eval_batch_size(config: ModelConfig, device: torch.device) -> int:
    """Return the batch size for evaluation: 256, or fewer if they need more than a quarter of the memory."""
    budget = total_bytes(device) // 4
    if EVAL_BATCH * _upper_bound(config) <= budget:
        return EVAL_BATCH  # the exact estimate takes a second to import
    return max(1, min(EVAL_BATCH, budget // needs(config).inference))


def _upper_bound(config: ModelConfig) -> float:
    """Return an upper bound on `Needs.inference` from the sizes alone; infinite if there is no simple one."""
    if not isinstance(config, ViTConfig) or config.stem is not None:
        return math.inf
    pixels: float = math.prod(config.image)
    tokens = math.prod(config.grid) + config.prefix
    values = pixels * config.channels + tokens * (4 * config.mlp_dim + 3 * config.dim)
    for channels, stride in config.conv_stem or ():
        values += 3 * channels * (pixels if config.conv_pool else pixels / stride**2)
        pixels /= stride**2
    return 8 * values


def fit_memory(draft: Draft) -> Draft:
    """Split batches that do not fit into micro-batches, with the same number of images per step.

    A stated batch size is kept, with a warning. Raises `UsageError` if not even one image fits. Runs with frozen layers
    are not changed, because these need less memory than estimated here.
    """
    run, config, machine = draft.run, draft.config, draft.machine
    if run.patch_sizes and isinstance(config, ViTConfig):  # the smallest patches have the most tokens
        config = dataclasses.replace(config, patch_size=min(run.patch_sizes))
    if run.freeze or "batch_size" in UNSUPPORTED.get(run.recipe, ()):
        return draft
    ranks, total = current(), rank_bytes(machine)
    held, image = training_bytes(run, config, machine)
    held = rank_share(run.strategy, held, config)
    if held + image > total:
        raise _too_large(run, config, machine, total)
    share = SHARE.get(machine.device.type, 0.7)
    most = max(1, int((share * total - held - _resident(run, machine, draft.images, total)) // image)) * ranks.count
    batch = min(run.batch_size, draft.images)
    if batch <= most:
        return draft
    least = -(-batch // most)
    parts = next((n for n in range(least, 2 * least) if batch % n == 0), least)  # equal, but not tiny
    size, count = batch // parts, run.accumulate * parts
    takes = f"{batch} images need about {memory_size(held + batch * image)}, and {memory_size(total)} are available"
    if draft.given.keys() & {"batch_size", "accumulate", "graphs"}:
        why = f"{takes}; --batch-size {size} --accumulate {count} needs less"
        return draft.change(Choice("memory", "may not suffice", why))
    stem = f"; the batch norms of the stem see {size} images at a time" if getattr(config, "conv_stem", None) else ""
    why = f"{takes}: {size * count} images per step, in micro-batches of {size}{stem}"
    return draft.change(Choice("batch", f"{count} × {size}", why), batch_size=size, accumulate=count)


def rank_bytes(machine: Machine) -> int:
    """Return the memory of a rank: its GPU's, or its share of this machine's."""
    total = machine.planned_bytes or total_bytes(machine.device)
    return total if machine.device.type == "cuda" else total // current().local_count


def rank_share(strategy: str, held: int, config: ModelConfig) -> int:
    """Return the bytes that a rank's device holds of weights, gradients and moments, `held` in all."""
    if strategy == "offload":  # the blocks that are computed, and the one that is fetched meanwhile
        return 2 * needs(config).weights // max(1, getattr(config, "depth", 1))
    return held // parts_of(strategy, current())


def training_bytes(run: Run, config: ModelConfig, machine: Machine) -> tuple[int, int]:
    """Return the memory of training for weights and optimizer, and per image of a step, in bytes."""
    of = needs(config)
    copies = 2 + rule_of(run.optimizer).moments + bool(run.ema)  # weights, gradients, moments, averaged weights
    factor = STEP_FACTORS.get((machine.device.type, machine.precision), 1.5)
    share = CHECKPOINTED_SHARE if run.checkpointing and _recomputes(config) else 1
    views = METHODS[run.recipe].views(run, config) if run.recipe in METHODS else 1  # type: ignore[arg-type]
    return copies * of.weights, round(of.activations * factor * share * views)


def _recomputes(config: ModelConfig) -> bool:
    """True if `--checkpointing` saves most activations: the convolutions of a stem are not recomputed."""
    return not getattr(config, "conv_stem", None)


def _resident(run: Run, machine: Machine, images: int, total: int) -> int:
    """Return the bytes of images kept in the same memory; images for random crops are larger than the crop."""
    cropped = run.crop == "random-resized"
    if run.residency in ("stream", "cache") or (cropped and machine.device.type == "cuda"):
        return 0
    size = images * run.channels * math.prod(run.size) * (4 if cropped else 1)
    return size if size < MEMORY_SHARE * total else 0  # larger sets stay on disk


def _too_large(run: Run, config: ModelConfig, machine: Machine, total: int) -> UsageError:
    def fits(run: Run, config: ModelConfig) -> bool:
        return sum(training_bytes(run, config, machine)) < SHARE.get(machine.device.type, 0.7) * total

    patch = max(pair(getattr(config, "patch_size", 1)))
    sides = [max(run.size) // part // patch * patch for part in (2, 4, 8, 16, 32)]
    smaller = (side for side in sides if side and fits(run, with_image_size(config, side)))
    hints = ["--checkpointing"] if fits(dataclasses.replace(run, checkpointing=True), config) else []
    hints += [f"--image-size {side}" for side in itertools.islice(smaller, 1)]
    hints += ["start from a smaller network with --init" if run.init else "choose a smaller --model"]
    held, image = training_bytes(run, config, machine)
    pixels = "×".join(map(str, run.size))
    why = (
        f"training needs about {memory_size(held)} for weights and optimizer and {memory_size(image)} per image; "
        f"available: {memory_size(total)}"
    )
    return UsageError(
        f"{run.model} at {pixels} pixels does not fit into memory",
        why=why,
        hint=f"use {', or '.join(hints)}" if hints[0].startswith("--") else ", or ".join(hints),
    )


@contextlib.contextmanager
def out_of_memory_reported(run: Run, config: ModelConfig, *, by_steps: bool) -> Iterator[None]:
    """Convert an out-of-memory error inside the block to a `TrainingError` with options that need less memory.

    `by_steps` is True if the run trains in steps. On a CPU the system may kill the process before torch can raise.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        pixels = "×".join(map(str, run.size))
        hints = ["a smaller --image-size", "a smaller network" if run.init else "a smaller --model"]
        if by_steps and not run.checkpointing and _recomputes(config):
            hints.insert(0, "--checkpointing")
        if by_steps and run.batch_size > 1:
            hints.insert(0, f"--batch-size {run.batch_size // 2} --accumulate {2 * run.accumulate}")
        what = f"batches of {run.batch_size}" if by_steps else "images"
        why = f"the device ran out of memory with {what} of {pixels} pixels"
        hint = f"start a new run (--overwrite, or choose another --out) with {', or '.join(hints)}"
        raise TrainingError("not enough memory", why=why, hint=hint) from None
