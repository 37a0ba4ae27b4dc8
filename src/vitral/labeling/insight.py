"""Suggestions, doubts and accuracy from features and labels, as pure functions of arrays.

`insight(features, labels, …)` fits the classifiers of `vitral.evaluation.probe` to the labels that there are. Each
labeled image is predicted by a fit to other images only, so these predictions measure the accuracy, calibrate the
suggestions, and find labels that are likely wrong by the computation of `data check --labels`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vitral.data.checks.groups import folds_of
from vitral.evaluation import probe
from vitral.evaluation.calibration import fit_temperature
from vitral.evaluation.enough import FOR_ADVICE
from vitral.evaluation.intervals import count_groups, proportion_interval, wilson_interval
from vitral.evaluation.label_errors import LIKELY, estimate
from vitral.evaluation.unknown import threshold_of
from vitral.inference.unknown import fit_statistics, mahalanobis
from vitral.labeling.next_images import next_images

FEWEST = 3
"""Images of a class from which it is suggested, if another class has as many."""
SURE = 0.95
"""Probability above which all suggestions can be accepted at once."""
HELD_OUT = 0.2
"""Fraction of the images that are shown without a suggestion."""
FEWEST_TO_HOLD_OUT = 50
"""Images from which some are held out."""
MORE = 50
"""Further labels of which the gain is estimated."""
HOTTEST = 50.0
"""Highest temperature of suggestions."""
_HALVINGS = 30
_LEAST = float(np.finfo(np.float64).tiny)  # in place of a probability of 0
_FOLDS = 5
_KNOWN = 0.99  # of the labeled images are like their class by the threshold of "unlike all"
_CURVE = (0.25, 0.5)


@dataclass(frozen=True, eq=False)
class Labels:
    """The labels of n images as arrays."""

    labels: np.ndarray
    """(n,) class of each image; -1 for none, and for images that are set aside."""
    checked: np.ndarray
    """(n,) True for labels that a person chose or confirmed."""
    open: np.ndarray
    """(n,) True for images that wait for a label."""
    held: np.ndarray
    """(n,) True for images that are held out."""
    classes: int


@dataclass(frozen=True, eq=False)
class Accuracy:
    """Accuracy of predictions of checked images by fits to other images."""

    labels: np.ndarray
    """(m,) checked labels."""
    predicted: np.ndarray
    """(m,) classes."""
    groups: np.ndarray
    """(m,) equal for images that belong together."""

    @property
    def right(self) -> np.ndarray:
        """(m,) True for a correct prediction."""
        return self.labels == self.predicted

    def to_json(self) -> dict[str, object]:
        """Return counts, accuracy and interval; no accuracy for fewer than 30 images or groups."""
        count = len(self.labels)
        groups = count_groups(self.groups, count)
        plain: dict[str, object] = {"images": count, "groups": groups, "right": int(self.right.sum())}
        if groups >= FOR_ADVICE:
            interval = proportion_interval(self.right, self.groups)
            plain |= {"accuracy": float(self.right.mean()), "interval": list(interval)}
        return plain


@dataclass(frozen=True, eq=False)
class Insight:
    """Suggestions for n images, doubts about their labels, and accuracy."""

    suggested: np.ndarray
    """(n,) class that is suggested for an image without a label, or predicted for a labeled one; -1 for none."""
    probability: np.ndarray
    """(n,) its probability, calibrated by cross-validation; 0 for none."""
    doubt: np.ndarray
    """(n,) probability that the label is wrong; 0 for images without a label."""
    unlike: np.ndarray
    """(n,) True for images that resemble no class."""
    crossed: Accuracy | None = None
    """Cross-validation on checked labels."""
    held: Accuracy | None = None
    """On held-out images, whose labels were chosen without a suggestion."""
    sure: tuple[int, int] = (0, 0)
    """Right ones and all of the checked images that cross-validation predicts above `SURE`."""
    curve: tuple[tuple[int, float], ...] = ()
    """(labels, accuracy), ascending."""
    next: tuple[int, ...] = ()
    """Numbers of the waiting images whose labels teach most, in order (`vitral.labeling.next_images`)."""
    fitted: probe.Fitted | None = None
    """The classifier that suggests; None before there is one."""
    temperature: float = 1.0
    """Temperature of its probabilities."""

    @classmethod
    def nothing(cls, count: int) -> Insight:
        """Return the insight without labels."""
        zeros = np.zeros(count)
        return cls(np.full(count, -1), zeros, zeros, np.zeros(count, bool))

    def to_json(self, classes: int) -> dict[str, object]:
        """Return plain data for the page, with percentages as whole numbers."""
        plain: dict[str, object] = {
            "suggested": self.suggested.tolist(),
            "percent": np.floor(100 * self.probability).astype(int).tolist(),
            "doubt": np.floor(100 * self.doubt).astype(int).tolist(),
            "unlike": np.flatnonzero(self.unlike).tolist(),
            "next": list(self.next),
            "sure": list(self.sure),
            "curve": [list(one) for one in self.curve],
            "forecast": forecast(self.curve),
        }
        for name, one in (("crossed", self.crossed), ("held_out", self.held)):
            plain[name] = None if one is None else one.to_json()
        if self.crossed is not None:
            table = np.zeros((classes, classes), int)
            np.add.at(table, (self.crossed.labels, self.crossed.predicted), 1)
            plain["confusion"] = table.tolist()
        return plain


def insight(features: np.ndarray, groups: np.ndarray, given: Labels) -> Insight:
    """Compute the insight from features (n, D), with NaN for images that have none, and groups (n,).

    Nothing is suggested before two classes have `FEWEST` images that are not held out.
    """
    there = ~np.isnan(features[:, 0])
    known = np.flatnonzero(there & (given.labels >= 0) & ~given.held)
    labels = given.labels[known]
    found = Insight.nothing(len(features))
    if (np.bincount(labels, minlength=given.classes) >= FEWEST).sum() < 2:
        return found
    rows = np.zeros(features.shape)
    scale = probe.Scale.of(features[there])
    rows[there] = scale(features[there])
    own = np.unique(groups[known], return_inverse=True)[1]
    folds = folds_of(labels, own, max(2, min(_FOLDS, len(np.unique(own)))))
    regressed, strength = probe.out_of_fold(rows[known], labels, given.classes, folds, ready=True)
    crossed = probe.mixed(regressed, probe.discriminant(rows[known], labels, given.classes, folds, ready=True))
    predictable = _predictable(labels, folds)  # others are predicted as labeled, because nothing is known
    doubts = _doubts(len(features), known, labels, crossed)
    temperature = _temperature(crossed[predictable], labels[predictable], own[predictable])
    crossed = tempered(crossed, temperature)
    predict = probe.fitted(rows[known], labels, given.classes, strength, scale)
    suggested, probability = found.suggested.copy(), found.probability.copy()
    waiting = np.flatnonzero(there & given.open & ~given.held)
    for numbers, values in ((known, crossed), (waiting, tempered(predict(features[waiting]), temperature))):
        suggested[numbers], probability[numbers] = values.argmax(1), values.max(1)
    unlike = np.zeros(len(features), bool)
    unlike[waiting] = unlike_all(rows[known], labels, folds, rows[waiting])
    measured = predictable & given.checked[known]
    right, sure = crossed.argmax(1) == labels, measured & (crossed.max(1) > SURE)
    held = np.flatnonzero(there & given.held & given.checked & (given.labels >= 0))
    return Insight(
        suggested,
        probability,
        doubts,
        unlike,
        Accuracy(labels[measured], crossed[measured].argmax(1), own[measured]),
        Accuracy(given.labels[held], predict(features[held]).argmax(1), groups[held]) if len(held) else None,
        (int(right[sure].sum()), int(sure.sum())),
        curve(rows[known], labels, given.classes, folds, strength, measured) if measured.sum() >= FOR_ADVICE else (),
        tuple(next_images(rows, known, waiting, probability)),
        predict,
        temperature,
    )


def _predictable(labels: np.ndarray, folds: np.ndarray) -> np.ndarray:
    """(n,) True for images whose class has images in other folds."""
    predictable = np.zeros(len(labels), bool)
    for fold in np.unique(folds):
        inside = folds == fold
        predictable[inside] = np.isin(labels[inside], labels[~inside])
    return predictable


def _temperature(probabilities: np.ndarray, labels: np.ndarray, groups: np.ndarray) -> float:
    """Return the temperature of the lowest loss, or one that makes the predictions less sure if few labels say so.

    Six right predictions of six do not show that the next are right. So the mean probability of the predictions is at
    most the lower end of the accuracy's interval of one standard deviation.
    """
    if not len(labels):
        return HOTTEST
    count = count_groups(groups, len(labels))
    right = (probabilities.argmax(1) == labels).mean() * count
    expected = wilson_interval(right, count, z=1)[0]
    fit = fit_temperature(np.log(np.maximum(probabilities, _LEAST)), labels, count)
    low, high = fit, HOTTEST
    if tempered(probabilities, fit).max(1).mean() <= expected:
        return fit
    for _ in range(_HALVINGS):  # the mean probability falls as the temperature rises
        middle = math.sqrt(low * high)
        if tempered(probabilities, middle).max(1).mean() > expected:
            low = middle
        else:
            high = middle
    return high


def tempered(probabilities: np.ndarray, temperature: float) -> np.ndarray:
    """Return probabilities (n, K) at a temperature."""
    values = np.maximum(probabilities, _LEAST) ** (1 / temperature)
    return values / values.sum(1, keepdims=True)


def _doubts(count: int, known: np.ndarray, labels: np.ndarray, crossed: np.ndarray) -> np.ndarray:
    """(count,) probability that a label is wrong; none with few labels, or features that hardly tell classes apart."""
    doubt = np.zeros(count)
    weak = (crossed.argmax(1) == labels).mean() < min(0.6, 3 / len(np.unique(labels)))
    if len(labels) >= FOR_ADVICE and not weak:
        doubt[known] = estimate(labels, crossed).doubt
    return doubt


def likely_wrong(found: Insight) -> np.ndarray:
    """Return the numbers of images whose label is likely wrong, worst first."""
    numbers = np.flatnonzero(found.doubt > LIKELY)
    return numbers[np.argsort(-found.doubt[numbers], kind="stable")]


def unlike_all(rows: np.ndarray, labels: np.ndarray, folds: np.ndarray, new: np.ndarray) -> np.ndarray:
    """(m,) True for new rows that are farther from every class than 99% of the labeled images (n, D) are.

    Labeled images are compared with the classes of other folds. Too few of them, and nothing is unlike.
    """
    if len(labels) < FOR_ADVICE or not len(new):
        return np.zeros(len(new), bool)
    own = np.zeros(len(labels))
    for fold in np.unique(folds):
        inside = folds == fold
        own[inside] = _distances(rows[~inside], labels[~inside], rows[inside])
    return _distances(rows, labels, new) > threshold_of(own, _KNOWN)


def _distances(rows: np.ndarray, labels: np.ndarray, new: np.ndarray) -> np.ndarray:
    import torch

    return mahalanobis(torch.from_numpy(new), fit_statistics(rows, labels)).numpy().astype(np.float64)


def curve(
    rows: np.ndarray, labels: np.ndarray, classes: int, folds: np.ndarray, strength: float, measured: np.ndarray
) -> tuple[tuple[int, float], ...]:
    """Return the accuracy of the logistic regression for a quarter, half and all of the labels of the other folds."""
    order = np.random.default_rng(0).permutation(len(labels))
    points = []
    for fraction in (*_CURVE, 1.0):
        used = np.zeros(len(labels), bool)
        used[order[: math.ceil(fraction * len(labels))]] = True

        def fit(x: np.ndarray, y: np.ndarray) -> probe.Linear:
            return probe.regression(x, y, classes, strength)

        found = probe.predicted_by_others(rows, labels, classes, folds, fit, used)
        number = round(used.sum() * (1 - 1 / len(np.unique(folds))))
        points.append((number, float((found.argmax(1) == labels)[measured].mean())))
    return tuple(points)


def forecast(points: tuple[tuple[int, float], ...]) -> float | None:
    """Return the accuracy that `MORE` labels would probably bring: the error falls as a power of their number.

    None without a curve, and if it does not rise: too little is known then.
    """
    if len(points) < 2 or points[-1][1] <= points[0][1] or points[-1][1] >= 1:
        return None
    numbers, errors = np.array(points).T[0], np.maximum(1 - np.array(points).T[1], 1e-3)
    slope = float(np.polyfit(np.log(numbers), np.log(errors), 1)[0])
    last = numbers[-1]
    return float(1 - errors[-1] * ((last + MORE) / last) ** min(slope, 0.0))


def hold_out(groups: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """Draw the images (n,) that are shown without a suggestion, from a mask of candidates: whole groups, at random."""
    numbers = np.flatnonzero(candidates)
    if len(groups) < FEWEST_TO_HOLD_OUT or not len(numbers):
        return np.zeros(0, int)
    names = np.random.default_rng(0).permutation(np.unique(groups[numbers]))
    drawn = names[: round(HELD_OUT * len(names))]
    return numbers[np.isin(groups[numbers], drawn)]


def neighbors(features: np.ndarray, image: int, among: np.ndarray, most: int = 3) -> np.ndarray:
    """Return the numbers of the images of a mask (n,) that are most similar to one, the nearest first."""
    order = by_similarity(features, image)
    kept = among[order] & (order != image)
    return order[kept][:most]


def by_similarity(features: np.ndarray, image: int) -> np.ndarray:
    """Return all images (n,), the most similar to one first, itself in front; images without features come last."""
    cosines = _cosines(features, features[image])
    cosines[image] = np.inf
    return np.argsort(-cosines, kind="stable")


def nearest_to(features: np.ndarray, new: np.ndarray, among: np.ndarray, most: int = 6) -> np.ndarray:
    """Return the numbers of the images of a mask (n,) that are most similar to new features (D,), the nearest first."""
    cosines = np.where(among, _cosines(features, new), -np.inf)
    order = np.argsort(-cosines, kind="stable")[:most]
    return order[np.isfinite(cosines[order])]


def _cosines(features: np.ndarray, one: np.ndarray) -> np.ndarray:
    """Return the cosine similarity (n,) of features (n, D) to one (D,); minus infinity for images without features."""
    lengths = np.linalg.norm(features, axis=1) * np.linalg.norm(one)
    cosines = features @ one / np.maximum(lengths, 1e-12)
    return np.where(np.isnan(cosines), -np.inf, cosines)
