"""Parts of evaluations that figures draw: bins of the confidence, scores of a predicted number."""

from __future__ import annotations

from dataclasses import dataclass

from vitral.evaluation.intervals import Interval


@dataclass(frozen=True)
class CalibrationBin:
    """Images with a confidence in (lower, upper]; `confidence` and `accuracy` are their means (0 if none)."""

    lower: float
    upper: float
    images: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class NumberScore:
    """Scores of one number, in its own units."""

    name: str
    r2: float | None
    """Share of the variance that is explained; below 0 is worse than the mean. None if all images have the same."""
    mae: float
    """Mean absolute error."""
    mae_interval: Interval
    """95% interval of the mean absolute error by Student's t over groups; both ends are `mae` for a single one."""
    rmse: float
    """Root of the mean squared error, to which large errors contribute more."""
    bias: float
    """Mean of predicted minus true."""
    mae_of_mean: float
    """Mean absolute error of always predicting the mean of these images."""
