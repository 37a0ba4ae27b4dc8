"""Measures of features in pretraining: accuracy of simple classifiers, if there are labels, and signs of collapse."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.data import DataSet, Split
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batches
from vitral.device import Machine
from vitral.errors import TrainingError
from vitral.evaluation.fewshot import least_squares
from vitral.evaluation.neighbors import knn
from vitral.inference.features import head_features

SAMPLED = 1000
"""Most images of each split that are measured after an epoch."""
NEIGHBORS = 20
RIDGE = 2.0**10
"""λ of the linear probe's least squares, as in big_vision's few-shot evaluation."""
LEAST_SPREAD, LEAST_RANK = 0.02, 1.5
"""Spread and rank of the features below which they have collapsed: a healthy run has several times as much."""


def monitored(dataset: DataSet) -> tuple[Split, ...]:
    """Evenly spaced images that are measured after each epoch: of training and, with labels, of validation."""
    labeled = len(dataset.classes) > 1 and "val" in dataset.splits
    return tuple(dataset[name].spread(SAMPLED) for name in (("train", "val") if labeled else ("train",)))


class Monitor:
    """Measures the features of evenly spaced images of the training and the validation split.

    With at least two classes and a validation split, the labels of the sampled training images fit two classifiers,
    whose accuracy is measured on the sampled validation images. They are k nearest neighbors, and least squares (a
    linear probe in closed
    form). Labels change nothing in training.
    """

    def __init__(self, dataset: DataSet, preprocessing: Preprocessing, machine: Machine, batch_size: int):
        self.machine, self.classes = machine, len(dataset.classes)
        self.batches = [
            Batches(split, preprocessing, batch_size=batch_size, device=machine.device) for split in monitored(dataset)
        ]

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Measure `feature_rank`, `feature_spread` and, with labels, `knn_accuracy` and `probe_accuracy`."""
        features = [self._features(model, batches) for batches in self.batches]
        measured = {"feature_rank": effective_rank(features[0]), "feature_spread": spread(features[0])}
        return {**measured, **(self._accuracies(features) if len(features) > 1 else {})}

    def _accuracies(self, features: list[Tensor]) -> dict[str, float]:
        (train, val), labels = features, [np.asarray(batches.split.labels) for batches in self.batches]
        truth = torch.from_numpy(labels[1])
        near = knn(train, labels[0], val, NEIGHBORS, classes=self.classes)
        linear = least_squares(train, torch.from_numpy(labels[0]), val, self.classes, RIDGE)
        scores = {"knn_accuracy": near, "probe_accuracy": linear}
        return {name: float((of.argmax(1) == truth).double().mean()) for name, of in scores.items()}

    def _features(self, model: nn.Module, batches: Batches) -> Tensor:
        parts = [head_features(model, one.images, batches.preprocessing, self.machine) for one in batches.epoch()]
        return torch.cat(parts)


def effective_rank(features: Tensor) -> float:
    """Number of directions that features (n, D) vary in: exp of the entropy of the singular values' shares, after
    centering (RankMe, arXiv 2210.02885, which does not center). From 1 to min(n - 1, D); 0 if they do not vary.
    """
    values = torch.linalg.svdvals((features - features.mean(0)).double())
    if float(values.sum()) <= 1e-9 * max(1.0, float(features.double().norm())):
        return 0.0
    shares = values / values.sum()
    return float(torch.exp(-(shares * shares.clamp(min=1e-30).log()).sum()))


def spread(features: Tensor) -> float:
    """Deviation of features (n, D) of length 1, averaged over D, times √D: 1 if they point everywhere, 0 if all point
    in one direction (SimSiam, arXiv 2011.10566, section 4.1).
    """
    unit = F.normalize(features.double(), dim=1)
    return float(unit.std(0, correction=0).mean() * unit.shape[1] ** 0.5)


ENTROPIES = ("usage_entropy", "target_entropy")
"""Metrics of dino, as shares of their maximum."""
LEAST_USAGE, MOST_UNSURE = 0.02, 0.995
"""Usage of prototypes below which all images have the same one, and entropy above which no image has one."""


def check_collapse(measured: Mapping[str, float], advice: str) -> None:
    """Raise `TrainingError` with `advice` if the features no longer tell images apart, or if the teacher of dino does
    not.
    """
    rank, spread = measured["feature_rank"], measured["feature_spread"]
    usage, unsure = measured.get("usage_entropy", 1.0), measured.get("target_entropy", 0.0)
    if usage < LEAST_USAGE or unsure > MOST_UNSURE:
        what = "all images get the same prototype" if usage < LEAST_USAGE else "no image prefers a prototype"
        why = f"of their largest values, the entropy of the prototypes in use is {usage:.3f}, of one image {unsure:.3f}"
        raise TrainingError(f"the teacher has collapsed: {what}", why=why, hint=advice)
    if rank >= LEAST_RANK and spread >= LEAST_SPREAD:
        return
    raise TrainingError(
        "the features have collapsed: images can no longer be distinguished",
        why=f"they vary in {rank:.1f} directions (rank), with a spread of {spread:.3f} of 1",
        hint=advice,
    )
