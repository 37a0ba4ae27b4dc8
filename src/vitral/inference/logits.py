"""Logits of a whole split, on one rank or several."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitral.data.loader import Batches
from vitral.device import Machine
from vitral.distributed.ranks import Ranks
from vitral.distributed.tensors import has_shards
from vitral.inference.own_sizes import network_logits
from vitral.model.modes import evaluating


@torch.inference_mode()
def logits_of(model: nn.Module, batches: Batches, machine: Machine) -> Tensor:
    """Return logits (n, K), fp32 on the CPU, of a split in its order. Training mode is restored."""
    return torch.cat(batch_logits(model, batches, machine)).cpu()


def batch_logits(model: nn.Module, batches: Batches, machine: Machine) -> list[Tensor]:
    """Return logits (B, K), fp32, of each batch of this rank. Training mode is restored."""
    shards = has_shards(model)
    # FSDP keeps tensors from one call to the next, which must not be inference tensors
    with evaluating(model), torch.no_grad() if shards else torch.inference_mode(), machine.autocast():
        found = [network_logits(model, batches.preprocessing, batch.images) for batch in batches.epoch()]
        if shards and len(found) < -(-len(batches) // batches.part.count):  # the others still call it once
            shape = 1, batches.preprocessing.channels, *batches.preprocessing.image_size
            model(torch.zeros(shape, device=machine.device))
    return found


def gathered_logits(model: nn.Module, batches: Batches, machine: Machine, ranks: Ranks) -> Tensor:
    """Return `logits_of` a split, of which each rank computes some batches; on all ranks but the first none, (0, K)."""
    logits = batch_logits(model, batches, machine)
    if ranks.count == 1:
        return torch.cat(logits).cpu()
    every = ranks.collect_in_turn([one.cpu() for one in logits])
    return torch.zeros(0, 0) if every is None else torch.cat(every)
