"""torch's SGD with momentum."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from vitral.distributed.tensors import is_sharded
from vitral.training.optimizers.rule import DecayRule, Groups, OptimizerOptions, Rates, UpdateRule, fused


def sgd(groups: Groups, run: OptimizerOptions) -> list[Optimizer]:
    """SGD with momentum, as the paper fine-tunes (Table 4)."""
    kernels = fused(groups) and not any(is_sharded(p) for g in groups for p in g["params"])
    return [torch.optim.SGD(groups, lr=run.peak_lr, momentum=run.momentum, fused=kernels)]


def _as_much_per_step(rates: Rates) -> float:
    """Weights shrink as much in a step as with the recipe's optimizer, which decouples the decay."""
    return rates.decay * rates.recipe_lr * (1 - rates.momentum) / (rates.lr or rates.recipe_lr)


SGD = UpdateRule(
    "SGD", sgd, relative_rate=30, decay=DecayRule(_as_much_per_step, "adds it to the gradient"), moments=1
)  # its step was not tested as a captured graph
