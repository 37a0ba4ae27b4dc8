"""Find near-duplicates by features of a network: `vitral data check DATA --near`.

They find what the perceptual hash does not look for, if the network knows such images: stronger crops, rotations, other
light and colors, images below 32 pixels. How many is measured on changed copies of the user's own images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image, ImageEnhance
from torch import Tensor

from vitral.data import DataSet
from vitral.data.checks.findings import DataCheck, NearPair, Place
from vitral.data.dataset import spread
from vitral.data.loader import Progress
from vitral.errors import DataError
from vitral.inference.inputs import Item, Record
from vitral.inference.options import AUTO, InferenceOptions
from vitral.inference.predictor import Predictor
from vitral.inference.stream import stream
from vitral.model import ViT
from vitral.weights.read.references import BACKBONE

STRANGERS = 3.09
"""Deviations above the median similarity of nearest images: one of a thousand of a normal distribution is higher."""
SAMPLED = 200
"""Images of which changed copies are made."""
LOW = 0.3
"""Mean share of changed copies below which other weights are advised."""
_PER_AXIS = 4  # images for each axis of the whitened features
_PARTNERS = 20  # most similar images of each image that are listed
_BLOCK = 1024
_BATCH = 64


def _crop(image: Image.Image) -> Image.Image:
    width, height = (round(0.75 * side) for side in image.size)
    return image.crop((image.width - width, 0, image.width, height))


CHANGES: Mapping[str, Callable[[Image.Image], Image.Image]] = {
    "cropped to 75%": _crop,
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "rotated by 10°": lambda image: image.rotate(10, Image.Resampling.BICUBIC),
    "darker": lambda image: ImageEnhance.Brightness(image).enhance(0.6),
}
"""Changed copies that are made of sampled images, to measure how many are found."""


@dataclass(frozen=True)
class FeatureSearch:
    """Result of the search."""

    weights: str
    least: float
    """Least cosine of the features of a pair."""
    recall: dict[str, float]
    """Change → share of changed copies of sampled images that are found."""
    pairs: tuple[NearPair, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """The measured shares, and advice if they are low."""
        shares = ", ".join(f"{name} {share:.0%}" for name, share in self.recall.items())
        found = f"{len(self.pairs):,} pairs by features of {self.weights}; of changed copies they find: {shares}"
        weak = np.mean(list(self.recall.values())) < LOW
        advice = "the features hardly separate copies from other images: name other weights, as --init timm:NAME"
        return (found, advice) if weak else (found,)

    def to_json(self) -> dict[str, object]:
        """Plain data, without the pairs, which are among those of the report."""
        return {"weights": self.weights, "least": self.least, "pairs": len(self.pairs), "recall": self.recall}


def search_features(
    dataset: DataSet,
    report: DataCheck,
    weights: str = BACKBONE,
    options: InferenceOptions = AUTO,
    *,
    progress: Progress | None = None,
) -> FeatureSearch:
    """Find pairs that are more similar by features than strangers are, without those in `report`.

    Raises `DataError` for unreadable images, and for fewer than three.
    """
    total = sum(map(len, dataset.splits.values()))
    if report.unreadable or total < 3:
        why = f"{len(report.unreadable):,} are unreadable" if report.unreadable else f"there are {total}"
        raise DataError("--near compares three or more readable images", where=dataset.source, why=why)
    predictor = replace(options, precision="fp32").load(weights)
    places = _places(dataset)
    raw = _features(predictor, [Item(one.name, Record(dataset[one.split], one.index)) for one in places], progress)
    rows = whitening(raw)
    vectors = rows(raw)
    partners, cosines = most_similar(vectors)
    least = least_similarity(cosines.max(1))
    recall = dict.fromkeys(CHANGES, 0.0)
    chosen = spread(total, SAMPLED)
    for name, copies in _changed(dataset, predictor, [places[i] for i in chosen]):
        recall[name] = float(((rows(copies) * vectors[chosen]).sum(1) >= least).mean())
    known = _known(dataset, report)
    pairs = tuple(
        NearPair(places[first], places[second], value, mirrored=False)
        for first, second, value in similar_pairs(partners, cosines, least)
        if (first, second) not in known
    )
    return FeatureSearch(weights, least, recall, pairs)


def whitening(features: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function from features (m, D) to unit vectors in which these features (n, D) vary equally everywhere.

    A classifier's features differ by class above all: without it, images of one class resemble copies.
    """
    mean = features.mean(0)
    _, scales, axes = np.linalg.svd(features - mean, full_matrices=False)
    kept = max(1, min(int((scales > 1e-4 * scales[0]).sum()), len(features) // _PER_AXIS))
    turn = axes[:kept].T / np.maximum(scales[:kept], 1e-12)

    def rows(values: np.ndarray) -> np.ndarray:
        turned = (values - mean) @ turn
        return (turned / np.maximum(np.linalg.norm(turned, axis=1, keepdims=True), 1e-12)).astype(np.float32)

    return rows


def least_similarity(nearest: np.ndarray) -> float:
    """Return the cosine that one of a thousand images has with a stranger, from that of each with its nearest image.

    By median and median deviation of arctanh: near-duplicates among less than a third of the images change it little.
    """
    z = np.arctanh(np.clip(nearest.astype(np.float64), -1 + 1e-7, 1 - 1e-7))
    middle = float(np.median(z))
    return float(np.tanh(middle + STRANGERS * 1.4826 * np.median(np.abs(z - middle))))


def most_similar(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the most similar others of each of the unit vectors (n, D), at most 20, and their cosines: (n, m) each."""
    most = min(_PARTNERS, len(vectors) - 1)
    partners, values = [], []
    for start in range(0, len(vectors), _BLOCK):
        cosines = vectors[start : start + _BLOCK] @ vectors.T
        cosines[np.arange(len(cosines)), start + np.arange(len(cosines))] = -1  # with itself
        partners.append(np.argpartition(-cosines, most - 1, axis=1)[:, :most])
        values.append(np.take_along_axis(cosines, partners[-1], 1))
    return np.concatenate(partners), np.concatenate(values)


def similar_pairs(partners: np.ndarray, cosines: np.ndarray, least: float) -> list[tuple[int, int, float]]:
    """Return the pairs (first, second, cosine) of `most_similar` with at least this cosine, the highest first."""
    found: dict[tuple[int, int], float] = {}
    for one, column in np.argwhere(cosines >= least).tolist():
        other = int(partners[one, column])
        found[min(one, other), max(one, other)] = float(cosines[one, column])
    return sorted(((*pair, value) for pair, value in found.items()), key=lambda one: (-one[2], one[0], one[1]))


def _changed(dataset: DataSet, predictor: Predictor, chosen: Sequence[Place]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each change with the features of copies of the chosen images."""
    images = [dataset[place.split].image(place.index) for place in chosen]
    opened = [Image.fromarray(one[:, :, 0] if one.shape[2] == 1 else one) for one in images]
    for name, change in CHANGES.items():
        yield name, _features(predictor, [Item(name, change(one)) for one in opened])


def _features(predictor: Predictor, items: Sequence[Item], progress: Progress | None = None) -> np.ndarray:
    """Return the features (n, D) of images: mean and deviation of the patches after the first block of a ViT, and the
    input of the head of another network. First blocks separate single images better than last ones, which separate
    classes.
    """

    @torch.inference_mode()
    def compute(images: Tensor) -> np.ndarray:
        if progress:
            progress(len(images))
        if not isinstance(predictor.network, ViT):
            return predictor.features(images).numpy()
        patches = _first_block(predictor, predictor.network, images)
        return torch.cat([patches.mean(1), patches.std(1)], 1).cpu().numpy()

    rows = stream(items, predictor.prepare, compute, _BATCH)
    return np.stack([np.asarray(row) for _, row in rows])


def _first_block(predictor: Predictor, model: ViT, images: Tensor) -> Tensor:
    """Return the patches (B, N, D) after the first block; the others are not computed."""
    images = images.to(predictor.machine.device)
    tokens, grid = model.embed(predictor.preprocessing.standardize(images).to(next(model.parameters()).dtype))
    rotation = model.rotations(grid, tokens.device)[0]
    tokens = model.blocks[0](tokens, None, rotation, None)
    return tokens[:, model.config.prefix :].float()


def _places(dataset: DataSet) -> list[Place]:
    return [
        Place(split, index, images.names[index], dataset.classes[label])
        for split, images in dataset.splits.items()
        for index, label in enumerate(images.labels.tolist())
    ]


def _known(dataset: DataSet, report: DataCheck) -> set[tuple[int, int]]:
    """Return the pairs in a report, by number over all splits."""
    starts = dict(zip(dataset.splits, np.cumsum([0, *map(len, dataset.splits.values())]).tolist(), strict=False))
    groups = [*report.duplicates, *((one.first, one.second) for one in report.near)]
    numbers = [sorted(starts[place.split] + place.index for place in group) for group in groups]
    return {(a, b) for group in numbers for i, a in enumerate(group) for b in group[i + 1 :]}
