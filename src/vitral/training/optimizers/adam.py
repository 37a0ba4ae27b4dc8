"""torch's AdamW and Adam."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from vitral.training.optimizers.rule import DecayRule, Groups, OptimizerOptions, UpdateRule, fused


def adamw(groups: Groups, run: OptimizerOptions) -> list[Optimizer]:
    """AdamW: decoupled weight decay (arXiv 1711.05101)."""
    return [torch.optim.AdamW(groups, lr=run.peak_lr, betas=(run.momentum, run.beta2), fused=fused(groups))]


def adam(groups: Groups, run: OptimizerOptions) -> list[Optimizer]:
    """Adam; weight decay, if set, is L2 in the gradient."""
    return [torch.optim.Adam(groups, lr=run.peak_lr, betas=(run.momentum, run.beta2), fused=fused(groups))]


ADAMW = UpdateRule("AdamW", adamw, capturable=True)
ADAM = UpdateRule(
    "Adam",
    adam,
    # Adam divides by the gradient's size, so that no decay in the gradient shrinks weights as AdamW's does
    decay=DecayRule(lambda rates: 0.0, "adds it to the gradient"),
    capturable=True,
)
