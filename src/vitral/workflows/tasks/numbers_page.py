"""Sections of a report about numbers."""

from __future__ import annotations

import numpy as np

from vitral.data import Split
from vitral.evaluation.figures import residuals, scatter
from vitral.evaluation.metrics import GROUPED
from vitral.evaluation.numbers import NumbersEvaluation
from vitral.evaluation.sections import Example, Grid, Headline, Section

_WORST = 24


def headline(measured: NumbersEvaluation) -> Headline:
    value = "—" if measured.r2 is None else f"{measured.r2:.3f}"
    alike = f"; {GROUPED}" if measured.widened else ""
    return Headline("R²", value, f"{measured.headline()}, on {measured.counted()}{alike}.")


def sections(measured: NumbersEvaluation, values: np.ndarray, images: Split) -> list[Section]:
    """Return the scores of each number, figures of its errors, and the images with the largest ones."""
    return [_scores(measured), _figures(measured, values, images), _worst(measured, values, images)]


def _scores(measured: NumbersEvaluation) -> Section:
    rows = [
        [
            one.name,
            "—" if one.r2 is None else f"{one.r2:.3f}",
            f"{one.mae:.4g}",
            f"{one.mae_interval[0]:.4g} to {one.mae_interval[1]:.4g}",
            f"{one.rmse:.4g}",
            f"{one.bias:+.3g}",
            f"{one.mae_of_mean:.4g}",
        ]
        for one in measured.per_number
    ]
    headings = ("number", "R²", "MAE", "95% interval", "RMSE", "bias", "MAE of the mean")
    note = (
        "R²: share of the variance that is explained. MAE: mean absolute error, with an interval by Student's t. Bias: "
        "mean of predicted minus true. The last column is the error of always predicting the mean of these images."
    )
    return Section("numbers", "Numbers", note, [Grid("In the units of the table", headings, rows)])


def _figures(measured: NumbersEvaluation, values: np.ndarray, images: Split) -> Section:
    plots = []
    for k, score in enumerate(measured.per_number):
        plots += [draw(score, values[:, k], images.labels[:, k], k) for draw in (scatter, residuals)]
    note = (
        "For a perfect network, all points lie on the diagonal, and all errors on the line at 0. Errors along a slope "
        "mean that large and small numbers are systematically wrong."
    )
    return Section("errors", "Predicted and true", note, plots=plots)


def _worst(measured: NumbersEvaluation, values: np.ndarray, images: Split) -> Section:
    """The images with the largest errors, relative to the mean error of each number."""
    errors = np.abs(values - images.labels) / np.maximum([one.mae for one in measured.per_number], 1e-300)
    order = np.argsort(-errors.max(1), kind="stable")[:_WORST]
    examples = [
        Example(
            images.image(int(i), 3),
            "; ".join(
                f"{name} {values[i, k]:.4g}, true {images.labels[i, k]:.4g}" for k, name in enumerate(measured.classes)
            ),
            images.names[int(i)],
        )
        for i in order
    ]
    return Section("mistakes", "Largest errors", "Check these for wrong numbers.", examples=examples)
