"""Answers that are sure: those with a probability above which the wanted share of answers is right.

El-Yaniv and Wiener 2010, "On the Foundations of Noise-free Selective Classification"; Geifman and El-Yaniv 2017,
"Selective Classification for Deep Neural Networks". `evaluation.calibration.cuts_of` makes the cuts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from vitral.errors import UsageError
from vitral.wording import count


@dataclass(frozen=True)
class Cut:
    """A probability, and the validation images whose predicted class has at least that."""

    probability: float
    images: int
    right: int
    """Images of them that are predicted correctly."""
    promised: float
    """Share of correct answers to expect on new images: the share of these images if one more of them, or one more
    group, were wrong.
    """
    low: float
    """Lower end of the 95% interval of the share of correct answers."""
    high: float

    def describe(self, validation: str) -> str:
        """Return words for the user; `validation` counts the validation images: "300 images in 40 groups"."""
        share = self.right / self.images
        found = f"{share:.1%} of them correct (95% interval {self.low:.1%} to {self.high:.1%})"
        return f"sure from a probability of {self.probability:.1%}: {self.images:,} of {validation}, {found}"


def cut_for(right: float, cuts: Sequence[Cut], validation: str) -> Cut:
    """Return the cut with the most images of those that promise a share `right` of correct answers.

    `cuts` are in descending order of their images. Raises `UsageError` if none promises it.
    """
    if not 0 < right < 1:
        raise UsageError(f"--right must be between 0 and 1, not {right:g}", hint="--right 0.95")
    if not cuts:
        why = "they are chosen on the validation images at the end of a training run"
        raise UsageError("these weights have no thresholds for --right", why=why, hint="vitral train DATA")
    for cut in cuts:
        if cut.promised >= right:
            return cut
    best = cuts[-1]
    surest = f"the {count(best.images, 'surest', 'surest')} of {validation}: {best.right:,} are correct"
    possible = math.floor(100 * best.promised) / 100
    instead = f"--right {possible:g}, or " if possible else ""
    raise UsageError(
        f"no answer is sure enough for --right {right:g}",
        why=f"{surest}, which promises {best.promised:.1%} for new images",
        hint=f"{instead}train with more validation images: vitral train DATA --val-fraction 0.3",
    )


def cuts_to_json(cuts: Sequence[Cut]) -> list[list[float]]:
    """Return a row for each cut, to save with the weights."""
    return [list(astuple(cut)) for cut in cuts]


def cuts_from_json(saved: Mapping[str, Any]) -> tuple[Cut, ...]:
    """Invert `cuts_to_json` for the field `cuts`. Raises `ValueError` or `TypeError` for damaged rows."""
    cuts = []
    for probability, images, right, promised, low, high in saved.get("cuts", ()):
        if not 0 <= int(right) <= int(images) or not int(images):
            raise ValueError(f"{right} of {images} validation images are correct")
        cuts.append(Cut(float(probability), int(images), int(right), float(promised), float(low), float(high)))
    return tuple(cuts)
