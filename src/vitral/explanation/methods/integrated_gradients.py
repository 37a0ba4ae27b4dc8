"""Integrated gradients: mean gradient on the straight path from a baseline to the image, times their difference.

For any network (Sundararajan et al., ICML 2017, arXiv 1703.01365). The values sum to the difference of the logits. The
baseline is 0 after standardization, the mean color.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from vitral.errors import UsageError
from vitral.explanation.methods.gradients import gradients_of, path_to
from vitral.explanation.methods.method import Maps, Method, target_logits

Rule = Literal["gauss-legendre", "trapezoid"]


@torch.enable_grad()
def integrated_gradients(
    model: nn.Module, images: Tensor, targets: Tensor, *, steps: int = 32, rule: Rule = "gauss-legendre"
) -> Maps:
    """Signed maps (B, T, rows, columns), summed over the channels and pixels of each patch.

    `steps` is the number of points of the quadrature `rule`, with one forward pass each. Completeness is
    |Σ − (f(x) − f(0))| / |f(x) − f(0)|, the error of the quadrature.
    """
    path, total = path_to(model, images), torch.zeros((), device=images.device)
    for position, weight in zip(*quadrature(rule, steps), strict=True):
        x, logits = path.at(position)
        gradients = [gradient for (gradient,) in gradients_of(logits, targets, [x])]
        total = total + weight * torch.stack(gradients, dim=1).float()
    values = path.products(total)
    with torch.no_grad():
        expected = target_logits(path.at(1.0)[1], targets) - target_logits(path.at(0.0)[1], targets)
    expected = expected.cpu()
    sums = values.cpu().double().sum((2, 3))
    error = (sums - expected).abs() / expected.abs().clamp_min(torch.finfo(torch.float).tiny)
    return Maps(values, error.float())


def quadrature(rule: Rule, steps: int) -> tuple[list[float], list[float]]:
    """Positions in [0, 1] and their weights, which sum to 1."""
    if rule not in ("gauss-legendre", "trapezoid"):
        raise UsageError(f"there is no quadrature rule '{rule}'", hint="gauss-legendre or trapezoid")
    if steps < 1 + (rule == "trapezoid"):
        raise UsageError(f"{steps} steps are too few for the {rule} rule")
    if rule == "trapezoid":
        weights = np.full(steps, 1 / (steps - 1))
        weights[[0, -1]] /= 2
        return np.linspace(0, 1, steps).tolist(), weights.tolist()
    positions, weights = np.polynomial.legendre.leggauss(steps)
    return ((positions + 1) / 2).tolist(), (weights / 2).tolist()


INTEGRATED_GRADIENTS = Method(
    "integrated-gradients",
    integrated_gradients,
    "integrated gradients",
    "Sundararajan et al., arXiv 1703.01365, equation 1",
    signed=True,
    any_network=True,
    passes=lambda patches: 96,
)
