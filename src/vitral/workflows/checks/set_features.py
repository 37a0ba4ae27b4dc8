"""Features of all images of a data set, for the checks that compare images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from vitral.data import DataSet, Split
from vitral.data.checks.findings import Place
from vitral.data.loader import Progress
from vitral.device import choose
from vitral.errors import DataError
from vitral.inference.options import AUTO, InferenceOptions
from vitral.recipes.stats import dataset_stats
from vitral.weights.read.references import BACKBONE, built_in
from vitral.workflows.tables.features import FeatureCache, readable_features


@dataclass(frozen=True, eq=False)
class SetFeatures:
    """Features of the readable images of a data set, split after split."""

    dataset: DataSet
    """The readable images; `left_out` names the others."""
    places: tuple[Place, ...]
    """Of each image, numbered as in the whole data set."""
    values: np.ndarray
    """(n, D) float64."""

    @property
    def labels(self) -> np.ndarray:
        """(n,) labels."""
        return np.concatenate([images.labels for images in self.dataset.splits.values()])


def set_features(
    dataset: DataSet,
    weights: str = BACKBONE,
    options: InferenceOptions = AUTO,
    *,
    skip: bool = False,
    every_size: bool = False,
    cache: FeatureCache | None = None,
    progress: Progress | None = None,
) -> SetFeatures:
    """Compute the features of all images.

    Large photographs enter a built-in model at the best of its sizes, or with `every_size` at each of them, and their
    features are concatenated. `skip` leaves out unreadable images; otherwise they raise `DataError`.
    """
    own = built_in(weights)
    sizes = own.feature_sizes if own else ()
    adapted: list[dict[str, object]] = [{}]
    if sizes and "train" in dataset.splits and min(dataset_stats(dataset).size) > 0.8 * sizes[0]:
        adapted = [{"image_size": size} for size in (sizes if every_size else sizes[:1])]
    several = [_features(dataset, weights, options, skip, cache, progress, one) for one in adapted]
    return replace(several[0], values=np.concatenate([one.values for one in several], axis=1))


def _features(
    dataset: DataSet,
    weights: str,
    options: InferenceOptions,
    skip: bool,
    cache: FeatureCache | None,
    progress: Progress | None,
    adapted: Mapping[str, object],
) -> SetFeatures:
    predictor = replace(options, precision="fp32").load(weights, **adapted)
    machine = choose(options.device, options.precision, dim=predictor.network.config.dim)
    splits, values = dict[str, Split](), list[np.ndarray]()
    places, lost = list[Place](), list[str]()
    for name, images in dataset.splits.items():
        try:
            found, splits[name], kept = readable_features(predictor, machine, images, cache, skip, progress)
        except DataError as error:
            hint = f"add --bad-images skip, or list all of them: vitral data check {dataset.source}"
            raise DataError(str(error.what), where=dataset.source, why=error.why, hint=hint) from error
        values.append(found.numpy())
        lost += [images.names[i] for i in np.setdiff1d(np.arange(len(images)), kept)]
        places += [Place(name, i, images.names[i], dataset.classes[images.labels[i]]) for i in kept.tolist()]
    readable = replace(dataset, splits=splits, left_out=(*dataset.left_out, *lost))
    return SetFeatures(readable, tuple(places), np.concatenate(values).astype(np.float64))
