"""Metrics of numbers: R², mean absolute error with its interval, root of the mean squared error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console

from vitral.console import table
from vitral.errors import DataError, UsageError
from vitral.evaluation.intervals import Groups, count_groups, mean_interval
from vitral.evaluation.metrics import GROUPED, Measured, plain_text
from vitral.evaluation.scores import NumberScore


@dataclass(frozen=True, eq=False, repr=False)
class NumbersEvaluation(Measured):
    """Metrics computed by `measure_numbers`."""

    images: int
    groups: int
    r2: float | None
    """Mean over the numbers that vary."""
    per_number: tuple[NumberScore, ...]

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(score.name for score in self.per_number)

    def headline(self) -> str:
        """The main metrics in a line."""
        errors = (
            f"{one.name} MAE {one.mae:.4g} ({one.mae_interval[0]:.4g} to {one.mae_interval[1]:.4g})"
            for one in self.per_number
        )
        return ", ".join([f"R² {_r2(self.r2)}", *errors])

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `json`, which `from_json` reads back without loss."""
        scores = [{**asdict(one), "mae_interval": list(one.mae_interval)} for one in self.per_number]
        return {"task": "numbers", "images": self.images, "groups": self.groups, "r2": self.r2, "per_number": scores}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> NumbersEvaluation:
        """Invert `to_json`. Raises `DataError` for a missing or invalid part."""
        try:
            scores = [{**one, "mae_interval": tuple(one["mae_interval"])} for one in plain["per_number"]]
            images = int(plain["images"])
            groups = int(plain.get("groups", images))
            return cls(images, groups, plain["r2"], tuple(NumberScore(**one) for one in scores))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError("not an evaluation of numbers", why=f"{type(error).__name__}: {error}") from error

    def print_table(self, console: Console) -> None:
        """Print the metrics of each number."""
        rows = table(f"{self.counted()}; MAE with its 95% interval")
        rows.add_column("number")
        for heading in ("R²", "MAE", "interval", "RMSE", "bias", "MAE of the mean"):
            rows.add_column(heading, justify="right")
        for one in self.per_number:
            interval = f"{one.mae_interval[0]:.4g} to {one.mae_interval[1]:.4g}"
            figures = (f"{one.rmse:.4g}", f"{one.bias:+.3g}", f"{one.mae_of_mean:.4g}")
            rows.add_row(plain_text(one.name), _r2(one.r2), f"{one.mae:.4g}", interval, *figures)
        console.print(rows)
        if self.widened:
            console.print(plain_text(GROUPED, "dim"))


def measure_numbers(
    predicted: np.ndarray, numbers: np.ndarray, names: Sequence[str], groups: Groups = None
) -> NumbersEvaluation:
    """Compute the metrics of predicted numbers (n, T) for the true ones (n, T).

    `groups` (n,) are equal for images that belong together, which the intervals count. Raises `UsageError` for other
    shapes or values that are not finite, `DataError` without images.
    """
    predicted, numbers = np.asarray(predicted, np.float64), np.asarray(numbers, np.float64)
    if predicted.shape != numbers.shape or predicted.ndim != 2 or predicted.shape[1] != len(names):
        why = f"predicted {predicted.shape}, true {numbers.shape}, {len(names)} names"
        raise UsageError("shapes of predicted and true numbers do not match", why=why, hint="(n, T) and T names")
    if not len(numbers):
        raise DataError("no images to measure on", why="the split is empty")
    if not np.isfinite(predicted).all():
        raise UsageError("predicted numbers are not finite", why="the model has diverged", hint="use a lower --lr")
    scores = tuple(_score(name, predicted[:, k], numbers[:, k], groups) for k, name in enumerate(names))
    varying = [one.r2 for one in scores if one.r2 is not None]
    r2 = float(np.mean(varying)) if varying else None
    return NumbersEvaluation(len(numbers), count_groups(groups, len(numbers)), r2, scores)


def _score(name: str, predicted: np.ndarray, true: np.ndarray, groups: Groups) -> NumberScore:
    errors, centered = predicted - true, true - true.mean()
    absolute, variance = np.abs(errors), float(np.square(centered).sum())
    mae = float(absolute.mean())
    low, high = mean_interval(absolute, groups)
    return NumberScore(
        str(name),
        1 - float(np.square(errors).sum()) / variance if variance else None,
        mae,
        (max(0.0, low), high),
        float(np.sqrt(np.square(errors).mean())),
        float(errors.mean()),
        float(np.abs(centered).mean()),
    )


def _r2(value: float | None) -> str:
    return "—" if value is None else f"{value:.3f}"
