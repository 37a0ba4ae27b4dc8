"""Metrics of texts read from images: lines exactly right, character and word error rates, with intervals.

The character error rate is the number of characters to insert, delete or replace, over the number of characters in the
right texts; the word error rate is the same for words. A rate may be above 1, if more is read than there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from vitral.console import table
from vitral.errors import DataError
from vitral.evaluation.intervals import Groups, Interval, count_groups, proportion_interval
from vitral.evaluation.metrics import GROUPED, Measured, is_wider

_RESAMPLES = 1_000
"""Bootstrap samples of the lines, or of their groups, from which an error rate's interval is computed."""


@dataclass(frozen=True, repr=False)
class TextEvaluation(Measured):
    """Metrics of texts; intervals are of 95%."""

    images: int
    groups: int
    accuracy: float
    """Share of texts that are exactly right."""
    accuracy_interval: Interval
    cer: float
    """Character error rate."""
    cer_interval: Interval
    wer: float
    """Word error rate."""
    wer_interval: Interval
    characters: int
    """In the right texts."""
    confidence: float
    """Mean probability of the texts read; of a calibrated network it equals the accuracy."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `from_json`."""
        plain = asdict(self)
        return {"task": "text"} | {name: list(one) if isinstance(one, tuple) else one for name, one in plain.items()}

    @classmethod
    def from_json(cls, plain: Mapping[str, object]) -> TextEvaluation:
        """Invert `to_json`. Raises `DataError` for a missing or invalid part."""
        plain = {name: value for name, value in plain.items() if name != "task"}
        plain.setdefault("groups", plain.get("images"))
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in plain.items()}
        try:
            return cls(**values)
        except TypeError as error:
            raise DataError("not an evaluation of texts", why=str(error)) from error

    @property
    def widened(self) -> bool:
        return is_wider(self.accuracy_interval, self.accuracy, self.images)

    def headline(self) -> str:
        """The main metrics in a line."""
        (low, high), (least, most) = self.accuracy_interval, self.cer_interval
        exact = f"Exactly right {self.accuracy:.2%} ({low:.1%} to {high:.1%})"
        return f"{exact}, character errors {self.cer:.2%} ({least:.2%} to {most:.2%})"

    def print_table(self, console: Console) -> None:
        """Print all metrics."""
        rows = table(header=False)
        rows.add_column(style="bold")
        rows.add_column(justify="right")
        rows.add_column(style="dim")
        of = f"{self.counted('line')}, {self.characters:,} characters"
        rows.add_row("exact lines", f"{self.accuracy:.2%}", f"{_interval(self.accuracy_interval)}, {of}")
        if self.widened:
            rows.add_row("", "", GROUPED)
        rows.add_row("character errors", f"{self.cer:.2%}", _interval(self.cer_interval))
        rows.add_row("word errors", f"{self.wer:.2%}", _interval(self.wer_interval))
        rows.add_row("confidence", f"{self.confidence:.2%}", "mean over lines; if calibrated, equal to exact lines")
        console.print(rows)


def _interval(interval: Interval) -> Text:
    return Text(f"95% interval {interval[0]:.2%} to {interval[1]:.2%}")


def measure_texts(
    read: Sequence[str], right: Sequence[str], confidences: Sequence[float], groups: Groups = None
) -> TextEvaluation:
    """Compute the metrics of texts `read` from images whose texts are `right`.

    `groups` (n,) are equal for images that belong together, which the intervals count. Raises `DataError` without
    images.
    """
    if not right:
        raise DataError("no images to measure on", why="the split is empty")
    exact = np.array([one == other for one, other in zip(read, right, strict=True)])
    cer, cer_interval, characters = _rate(read, right, groups)
    wer, wer_interval, _ = _rate([one.split() for one in read], [one.split() for one in right], groups)
    return TextEvaluation(
        images=len(right),
        groups=count_groups(groups, len(right)),
        accuracy=int(exact.sum()) / len(right),
        accuracy_interval=proportion_interval(exact, groups),
        cer=cer,
        cer_interval=cer_interval,
        wer=wer,
        wer_interval=wer_interval,
        characters=characters,
        confidence=float(np.mean(confidences)),
    )


def _rate(read: Sequence[Sequence[str]], right: Sequence[Sequence[str]], groups: Groups) -> tuple[float, Interval, int]:
    """Error rate, its interval over resampled groups of lines, and the number of characters or words."""
    errors = np.array([edits(one, other) for one, other in zip(read, right, strict=True)], np.float64)
    sizes = np.array([len(one) for one in right], np.float64)
    if groups is not None and count_groups(groups, len(right)) < len(right):
        place = np.unique(groups, return_inverse=True)[1]
        errors, sizes = (np.bincount(place, each).astype(np.float64) for each in (errors, sizes))
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(sizes), size=(_RESAMPLES, len(sizes)), dtype=np.int32)
    rates = errors[drawn].sum(1) / np.maximum(sizes[drawn].sum(1), 1)
    low, high = np.quantile(rates, [0.025, 0.975])
    return float(errors.sum() / max(sizes.sum(), 1)), (float(low), float(high)), int(sizes.sum())


def edits(one: Sequence[str], other: Sequence[str]) -> int:
    """Levenshtein distance: the least number of parts to insert, delete or replace to get `other` from `one`."""
    before = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        now = [i]
        for j, b in enumerate(other, 1):
            now.append(min(before[j] + 1, now[j - 1] + 1, before[j - 1] + (a != b)))
        before = now
    return before[-1]
