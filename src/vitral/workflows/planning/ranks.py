"""Planning steps for several ranks: what they can share, and how."""

from __future__ import annotations

import dataclasses
from typing import Literal

from vitral.data.targets import targets_of
from vitral.device import Machine
from vitral.distributed.ranks import current
from vitral.distributed.strategies import parts_of
from vitral.errors import UsageError
from vitral.model import ForeignConfig
from vitral.pretraining.methods import METHODS
from vitral.recipes.table import UNSUPPORTED
from vitral.training.options import Run
from vitral.training.plan import Choice
from vitral.wording import memory_size
from vitral.workflows.planning.draft import Draft
from vitral.workflows.planning.memory import rank_bytes, training_bytes

SHARD_ABOVE = 0.5
"""Share of a rank's memory that weights, gradients and moments may take before they are shared out."""


def choose_strategy(draft: Draft) -> Draft:
    """Choose how ranks share a step. Raises `UsageError` for a strategy that the run does not allow."""
    run, together = draft.run, current().together
    if not together and run.strategy != "auto":
        raise UsageError("--strategy is for several ranks", why="this is one process", hint="--nproc 2, or torchrun")
    if not together:
        return draft
    check_strategy(run, draft.machine)
    held, available = training_bytes(run, draft.config, draft.machine)[0], rank_bytes(draft.machine)
    needs = f"weights, gradients and moments take {memory_size(held)} of a rank's {memory_size(available)}"
    if run.strategy != "auto":
        return draft.change(Choice("strategy", run.strategy, f"requested; {needs}{_share(run.strategy, held)}"))
    fits = held <= SHARD_ABOVE * available
    why = "" if fits else _refusal(dataclasses.replace(run, strategy="fsdp"), draft.machine)
    if fits or why:
        reason = f"{needs}; each rank keeps all of them: {why}" if why else needs
        return draft.change(Choice("strategy", "ddp", reason), strategy="ddp")
    name = _sharded(run, draft.machine, held, available)
    return draft.change(Choice("strategy", name, needs + _share(name, held)), strategy=name)


def check_strategy(run: Run, machine: Machine) -> None:
    """Raise `UsageError` for a strategy that is not possible here, or that the run does not allow."""
    if why := _refusal(run, machine):
        hint = "--strategy fsdp" if run.strategy == "hsdp" and not _unsharded(run) else "--strategy ddp"
        raise UsageError(f"--strategy {run.strategy} does not go with this run", why=why, hint=hint)


Sharded = Literal["hsdp", "fsdp", "offload"]


def _sharded(run: Run, machine: Machine, held: int, available: int) -> Sharded:
    """Return the first strategy of which a rank can hold its part; fsdp if there is none."""
    candidates: tuple[Sharded, ...] = ("hsdp", "fsdp")
    for name in candidates:
        allowed = not _refusal(dataclasses.replace(run, strategy=name), machine)
        if allowed and held / parts_of(name, current()) <= SHARD_ABOVE * available:
            return name
    return "fsdp" if _refusal(dataclasses.replace(run, strategy="offload"), machine) else "offload"


def _share(name: str, held: int) -> str:
    """Describe a rank's part."""
    parts = parts_of(name, current())
    where = {"hsdp": "; divided within each machine, ", "offload": "; kept in the CPU's memory, "}
    shared = parts > 1 or name == "offload"
    return f"{where.get(name, '; divided among the ranks, ')}{memory_size(held / parts)} per rank" if shared else ""


def _refusal(run: Run, machine: Machine) -> str:
    """Return the reason that the run's strategy is not possible; "" if it is."""
    if run.strategy in ("auto", "ddp"):
        return ""
    if run.strategy == "hsdp" and current().machines == 1:
        return "all ranks are on one machine, or machines have different numbers of them"
    if run.strategy == "offload" and machine.device.type != "cuda":
        return f"on {machine.device.type}, there is no other memory to move the network to"
    return _unsharded(run)


def _unsharded(run: Run) -> str:
    """Return the reason that a run's tensors cannot be shared out; "" if they can."""
    if targets_of(run.task).sequence:
        return "not tested with a decoder of text"
    if run.pack or run.patch_sizes:
        return "with --pack or --patch-sizes, a step does not use all parts of the network"
    return "compiled steps were not tested with sharding" if run.compile else ""


def share_batches(draft: Draft) -> Draft:
    """Report the share of each rank. Raises `UsageError` for a run that ranks cannot share."""
    ranks, run = current(), draft.run
    if not ranks.together:
        return draft
    if why := _unshared(draft):
        raise UsageError("several ranks are not supported here", why=why, hint="leave out --nproc, or torchrun")
    if "batch_size" in UNSUPPORTED.get(run.recipe, ()):
        why = f"--recipe {run.recipe} does not train in steps"
        raise UsageError("nothing for several ranks to share", why=why, hint="leave out --nproc, or torchrun")
    batch = min(run.batch_size, draft.images)
    if batch < ranks.count:
        why = f"batches have {batch} images, for {ranks.count} ranks"
        raise UsageError("a rank would have no image", why=why, hint=f"--batch-size {ranks.count}, or fewer ranks")
    least, rest = divmod(batch, ranks.count)
    images = f"{least} to {least + 1}" if rest else str(least)
    why = f"each process computes {images} of a batch's {batch} images; the number of processes changes no result"
    return draft.change(Choice("ranks", str(ranks.count), why))


def _unshared(draft: Draft) -> str:
    """Return the reason that ranks cannot share the batches of a run; "" if they can."""
    run, config = draft.run, draft.config
    if isinstance(config, ForeignConfig):
        return "networks of other libraries draw random numbers of their own"
    if run.recipe in METHODS and run.compile:
        return "compiled steps of pretraining are not tested with several ranks"
    drops = any(getattr(config, name, 0.0) for name in ("dropout", "drop_path"))
    if run.pack and drops:
        return "dropout acts on packed sequences, so it would depend on which images share a sequence"
    if run.recipe == "dino" and run.checkpointing and drops:
        return "with --checkpointing, recomputed blocks would use other dropout masks than in the forward pass"
    return ""
