"""Integrated gradients: the gradient's mean on the straight way from a baseline to the picture, times the difference,
for any network (Sundararajan et al., ICML 2017, arXiv 1703.01365). The values add up to the difference of the logits.
The baseline is zeros after standardisation: the mean colour.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from vitral.errors import UsageError
from vitral.explanation.methods.gradients import gradients_of, way_to
from vitral.explanation.methods.method import Maps, Method, target_logits

Rule = Literal["gauss-legendre", "trapezoid"]


@torch.enable_grad()
def integrated_gradients(
    model: nn.Module, images: Tensor, targets: Tensor, *, steps: int = 32, rule: Rule = "gauss-legendre"
) -> Maps:
    """Maps (B, T, rows, columns), signed, summed over the channels and pixels of each patch. `steps` points of the
    quadrature `rule`, one forward pass each. Completeness is |Σ − (f(x) − f(0))| / |f(x) − f(0)|: what the quadrature
    misses.
    """
    way, total = way_to(model, images), torch.zeros((), device=images.device)
    for place, weight in zip(*quadrature(rule, steps), strict=True):
        x, logits = way.at(place)
        found = [gradient for (gradient,) in gradients_of(logits, targets, [x])]
        total = total + weight * torch.stack(found, dim=1).float()
    values = way.products(total)
    with torch.no_grad():
        gained = target_logits(way.at(1.0)[1], targets) - target_logits(way.at(0.0)[1], targets)
    gained = gained.cpu()
    missing = (values.double().sum((2, 3)) - gained).abs() / gained.abs().clamp_min(torch.finfo(torch.float).tiny)
    return Maps(values, missing.float())


def quadrature(rule: Rule, steps: int) -> tuple[list[float], list[float]]:
    """Places in [0, 1] and their weights, which sum to 1."""
    if rule not in ("gauss-legendre", "trapezoid"):
        raise UsageError(f"there is no quadrature rule '{rule}'", hint="gauss-legendre or trapezoid")
    if steps < 1 + (rule == "trapezoid"):
        raise UsageError(f"{steps} steps are too few for the {rule} rule")
    if rule == "trapezoid":
        weights = np.full(steps, 1 / (steps - 1))
        weights[[0, -1]] /= 2
        return np.linspace(0, 1, steps).tolist(), weights.tolist()
    places, weights = np.polynomial.legendre.leggauss(steps)
    return ((places + 1) / 2).tolist(), (weights / 2).tolist()


INTEGRATED_GRADIENTS = Method(
    "integrated-gradients", integrated_gradients, "integrated gradients",
    "Sundararajan et al., arXiv 1703.01365, equation 1", signed=True, any_network=True, passes=lambda patches: 96,
)  # fmt: skip
