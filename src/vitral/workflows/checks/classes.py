"""Find pairs of classes that look like one, by features of a network.

For each pair, a classifier separates the images of both classes. Each image is predicted by a fold that was fitted
without it. The area under the ROC curve (AUC) is near one half for a class that was split at random, however many
images it has. A pair is listed if its AUC and one standard error of it (Hanley and McNeil 1982) are within `ALIKE`, and
if the features separate most pairs of the set: weak features support no claim. docs/log/checks.md has the figures, also
of a class that looks like two, which features did not reveal.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from vitral.data.checks.findings import AlikeClasses
from vitral.data.checks.groups import folds_of
from vitral.evaluation.probe import discriminant
from vitral.evaluation.unknown import placements
from vitral.workflows.checks.set_features import SetFeatures

ALIKE = 0.65
"""AUC and its standard error, together, up to which two classes look like one."""
APART = 0.8
"""Median AUC of all pairs, from which the features tell classes apart."""
FEWEST = 20
"""Images from which a class is compared."""
MOST_CLASSES = 100
"""Classes up to which pairs are compared: time grows with their square."""


def alike_classes(found: SetFeatures) -> list[AlikeClasses]:
    """Return the pairs of classes that look like one, the most alike first."""
    if not found.dataset.targets.one_class:
        return []
    classes, labels = found.dataset.classes, found.labels
    large = np.flatnonzero(np.bincount(labels, minlength=len(classes)) >= FEWEST).tolist()
    if not 3 <= len(large) <= MOST_CLASSES:  # a single pair has no other to compare with
        return []
    logs = np.log(discriminant(found.values, labels, len(classes), folds_of(labels, None, 5)) + 1e-12)
    pairs = []
    for one, other in combinations(large, 2):
        scores = logs[:, other] - logs[:, one]
        auc, error = auc_with_error(scores[labels == other], scores[labels == one])
        pairs.append((auc, error, AlikeClasses(classes[one], classes[other], auc)))
    if np.median([auc for auc, _, _ in pairs]) < APART:
        return []
    alike = [pair for auc, error, pair in pairs if auc + error <= ALIKE]
    return sorted(alike, key=lambda pair: pair.auc)


def auc_with_error(positive: np.ndarray, negative: np.ndarray) -> tuple[float, float]:
    """Return the area under the ROC curve, and its standard error."""
    auc = float(placements(positive, negative).mean())
    n, m = len(positive), len(negative)
    of_positive = (n - 1) * (auc / (2 - auc) - auc**2)
    of_negative = (m - 1) * (2 * auc**2 / (1 + auc) - auc**2)
    return auc, float(np.sqrt((auc * (1 - auc) + of_positive + of_negative) / (n * m)))
