"""One class an image: probabilities by softmax with a temperature, sets of classes that cover the true one, and answers
that are sure.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from vitral.errors import UsageError
from vitral.inference.outputs.output import Output
from vitral.inference.predictions import Columns, Prediction
from vitral.inference.sure import Cut, cut_for, cuts_from_json, cuts_to_json
from vitral.inference.unknown import Detector
from vitral.weights.fitted import CHANGES, not_fitted
from vitral.wording import in_groups

_ENOUGH = 100
"""Validation images, or groups of them, from which the share of sets with the true class is reliable."""


def require_head(names: Sequence[str]) -> None:
    """Raise `UsageError` for a network without classes, or with a single one, of which a softmax is always 1."""
    if not names:
        raise UsageError(
            "this network ends in features",
            why="it has no head with classes",
            hint="vitral embed, or evaluate with --knn or --few-shot; or a head: vitral train DATA --init WEIGHTS",
        )
    if len(names) == 1:
        raise UsageError(
            "this network has one output",
            why="no file states if it is a probability or a number",
            hint="add problem_type to the config.json beside it, or train a head: vitral train DATA --init WEIGHTS",
        )


@dataclass(frozen=True)
class Classes(Output):
    """Probabilities of classes that exclude each other."""

    temperature: float = 1.0
    """Divisor of the logits, fitted on validation images; 1 changes nothing."""
    scores: tuple[float, ...] = ()
    """1 - p of the labels of the validation images, ascending, for conformal sets; empty if there are none."""
    groups: int | None = None
    """Groups of the validation images that belong together; None if each image is on its own."""
    threshold: float | None = None
    """Largest 1 - p of the classes in a set; None predicts no sets."""
    unknown: Detector | None = None
    """Detector of images of no known class; with None no image is unknown."""
    unfitted: str = ""
    """The change of the network after which there are no scores (`vitral.weights.fitted`)."""
    integers: bool = False
    """True for numbers that were fitted in int8."""
    cuts: tuple[Cut, ...] = ()
    """Cuts of sure answers among which `sure` chooses; empty without validation images."""
    cut: Cut | None = None
    """Images below this cut are not sure; with None every image gets a class."""
    task = "class"
    one_class = True
    noun, explained = "classes", "class was predicted"

    def values(self, logits: Tensor) -> Tensor:
        require_head(self.names)
        return logits.softmax(1) if self.temperature == 1 else (logits / self.temperature).softmax(1)

    def prediction(self, name: str, values: np.ndarray) -> Prediction:
        values, score = np.split(values, [len(self.names)])  # `Predictor.rows` appends the score of the detector
        unknown = bool(score[0] > self.unknown.threshold) if self.unknown else None
        sure = bool(values.max() >= self.cut.probability) if self.cut else None
        return Prediction(name, self.names, values, self.threshold, unknown, sure)

    def answers(self, comparable: np.ndarray) -> np.ndarray:
        return comparable.argmax(1)

    def describe(self, answer: np.ndarray) -> str:
        return self.names[int(answer)]

    def meaning(self) -> dict[str, object]:
        divided = f" of the logits / {self.temperature:g}" if self.temperature != 1 else ""
        return {"probabilities": f"softmax over classes{divided}"}

    def columns(self, top: int = 1, all: bool = False) -> Columns:
        return Columns(self.names, top, all, self.threshold, self.unknown is not None, self.cut is not None)

    def covering(self, coverage: float) -> Classes:
        """Return this output with sets that contain the true class of a share `coverage` of all images.

        The set of an image has the classes with 1 - p up to the ⌈(n + 1) · coverage⌉-th smallest score of n validation
        images, and the most probable class in any case. For images that are exchangeable with those, the true class is
        in it with a probability of at least `coverage`: on average over images and validation sets, not for each
        class. Of images in G groups it is the ⌈n (G + 1) / G · coverage⌉-th, since only groups are exchangeable; the
        probability then holds for many groups ("CDF pooling" of Dunn, Wasserman and Ramdas 2022, "Distribution-Free
        Prediction Sets for Two-Layer Hierarchical Models"). Raises `UsageError` if there are too few validation images
        or groups, and after a change of the network.
        """
        if not 0 < coverage < 1:
            raise UsageError(f"--coverage must be between 0 and 1, not {coverage:g}", hint="--coverage 0.95")
        if self.unfitted:
            raise not_fitted("scores", self.unfitted)
        count, of = len(self.scores), "images"
        groups = count
        if self.groups is not None:
            groups, of = self.groups, "images of different groups"
        rank = math.ceil(round(count * (groups + 1) * coverage / max(groups, 1), 9))
        if not count or rank > count:
            fewest = math.ceil(round(coverage / (1 - coverage), 9))
            why = f"they have {in_groups(count, groups)}" if count else "they have none: train with a validation split"
            hint = f"--coverage {math.floor(100 * groups / (groups + 1)) / 100:g}" if count else "vitral train DATA"
            raise UsageError(f"{coverage:.4g} needs weights with {fewest:,} validation {of}", why=why, hint=hint)
        return replace(self, threshold=self.scores[rank - 1])

    def few(self) -> str:
        """Return a note on sets that fewer than 100 validation images, or groups, chose; "" for sets from more.

        Over validation sets the share of new images with the true class in their set has a beta distribution (Vovk
        2012, "Conditional Validity of Inductive Conformal Predictors"); of images in groups approximately.
        """
        independent = len(self.scores) if self.groups is None else self.groups
        if self.threshold is None or independent >= _ENOUGH:
            return ""
        from scipy.stats import beta  # takes a moment to import

        inside = bisect_right(self.scores, self.threshold) / len(self.scores) * independent
        low, high = beta.ppf((0.025, 0.975), inside, independent + 1 - inside)
        share = f"the true class may be in the sets of {low:.0%} to {high:.0%} of new images"
        return f"only {self.validation} choose the sets: {share}"

    def sure(self, right: float) -> Classes:
        """Return this output with answers of which a share `right` is correct; to other images they are "not sure".

        An image is sure if its predicted class has at least the probability of the cut with the most validation images
        of those that promise this share (`vitral.inference.sure`). Raises `UsageError` if none promises it, and after a
        change of the network.
        """
        if self.unfitted:
            raise not_fitted("cuts", self.unfitted)
        return replace(self, cut=cut_for(right, self.cuts, self.validation))

    @property
    def validation(self) -> str:
        """The validation images that the numbers were fitted to, in words: "300 validation images in 40 groups"."""
        images = len(self.scores)
        return in_groups(images, images if self.groups is None else self.groups, "validation image")

    def always_known(self) -> Classes:
        """Return this output without a threshold for unknown images."""
        return replace(self, unknown=None)

    def to_json(self) -> dict[str, object]:
        calibrated: dict[str, object] = {"temperature": self.temperature} if self.temperature != 1 else {}
        calibrated |= {"scores": list(self.scores)} if self.scores else {}
        calibrated |= {"groups": self.groups} if self.groups is not None else {}
        calibrated |= {"unfitted": self.unfitted} if self.unfitted else {}
        calibrated |= {"integers": True} if self.integers else {}
        calibrated |= {"unknown": self.unknown.to_json()} if self.unknown else {}
        calibrated |= {"cuts": cuts_to_json(self.cuts)} if self.cuts else {}
        return {"task": "class", **calibrated} if calibrated else {}

    @classmethod
    def from_json(cls, names: Sequence[str], saved: Mapping[str, Any]) -> Classes:
        temperature = float(saved.get("temperature", 1.0))
        if not (math.isfinite(temperature) and temperature > 0):
            raise ValueError(f"a temperature of {temperature}")
        unknown = Detector.from_json(saved["unknown"], saved["statistics"]) if "unknown" in saved else None
        scores, unfitted = tuple(map(float, saved.get("scores", ()))), str(saved.get("unfitted", ""))
        if unfitted and unfitted not in CHANGES:
            raise ValueError(f"sets of classes after the change '{unfitted}'")
        groups = int(saved["groups"]) if "groups" in saved else None
        if groups is not None and groups < 1:
            raise ValueError(f"{groups} groups of validation images")
        return cls(
            tuple(names),
            temperature,
            scores,
            groups,
            unknown=unknown,
            unfitted=unfitted,
            integers=bool(saved.get("integers")),
            cuts=cuts_from_json(saved),
        )
