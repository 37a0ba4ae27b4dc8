"""Figures of predicted numbers: predicted over true, and the errors that remain."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from vitral.data.dataset import spread
from vitral.evaluation.figures import _FONT, _SIZE_INCHES, FIRST, MUTED, Plot, _dress, _inline
from vitral.evaluation.numbers import NumberScore

_MOST_POINTS = 2_000


def scatter(score: NumberScore, predicted: np.ndarray, true: np.ndarray, number: int) -> Plot:
    """Plot predicted over true numbers (n,), with the diagonal on which both are equal."""
    figure = Figure(figsize=_SIZE_INCHES)
    axes = figure.subplots()
    low, high = float(min(true.min(), predicted.min())), float(max(true.max(), predicted.max()))
    axes.plot([low, high], [low, high], color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
    rows = spread(len(true), _MOST_POINTS)
    axes.plot(true[rows], predicted[rows], linestyle="", marker="o", markersize=3.5, alpha=0.6, color=FIRST)
    _dress(axes, "predicted")
    axes.set_xlabel("true", fontfamily=_FONT, fontsize=10.5, color=MUTED)
    r2 = "" if score.r2 is None else f"R² {score.r2:.3f}, "
    alt = f"{score.name} predicted over true, from {low:.4g} to {high:.4g}; {r2}mean absolute error {score.mae:.4g}."
    return Plot(score.name, _inline(figure, f"scatter-{number}"), alt)


def residuals(score: NumberScore, predicted: np.ndarray, true: np.ndarray, number: int) -> Plot:
    """Plot the errors, predicted minus true, over the predicted numbers (n,)."""
    figure = Figure(figsize=_SIZE_INCHES)
    axes = figure.subplots()
    axes.axhline(0, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
    rows, errors = spread(len(true), _MOST_POINTS), predicted - true
    axes.plot(predicted[rows], errors[rows], linestyle="", marker="o", markersize=3.5, alpha=0.6, color=FIRST)
    _dress(axes, "predicted - true")
    axes.set_xlabel("predicted", fontfamily=_FONT, fontsize=10.5, color=MUTED)
    low, middle, high = (float(np.quantile(errors, share)) for share in (0.05, 0.5, 0.95))
    alt = f"Errors of {score.name}: median {middle:+.3g}, nine in ten from {low:+.3g} to {high:+.3g}."
    return Plot(f"{score.name}, residuals", _inline(figure, f"residual-{number}"), alt)
