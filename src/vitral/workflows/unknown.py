"""Measure the detection of images of no known class, and save a threshold: `vitral evaluate RUN --unknown FOLDER`."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from vitral.console import expect, table
from vitral.data import Split
from vitral.data.dataset import spread
from vitral.data.loader import Progress
from vitral.data.same import same_images
from vitral.errors import ImageError, UsageError, none_readable, unreadable
from vitral.evaluation.enough import FOR_A_FIT
from vitral.evaluation.intervals import count_groups
from vitral.evaluation.metrics import GROUPED
from vitral.evaluation.unknown import Separation, separate, threshold_of
from vitral.inference.inputs import Item, Items, Record
from vitral.inference.outputs import output_of
from vitral.inference.outputs.classes import Classes
from vitral.inference.outputs.output import require_classes
from vitral.inference.own_sizes import refuse_own_sizes
from vitral.inference.predictor import Predictor
from vitral.inference.sources import count, find
from vitral.inference.stream import stream
from vitral.inference.unknown import SCORES, Detector, Statistics, fit_statistics, scored
from vitral.training.run_folder import RunFolder
from vitral.weights import native
from vitral.weights.fitted import CHANGES, holds
from vitral.wording import in_groups
from vitral.workflows.evaluate import Evaluated
from vitral.workflows.planning.run_data import load_run_data

MOST = 20_000
"""Training images from which the distance of features is fitted; of more, as many evenly spaced ones."""
_BATCH = 64
_PROBES = 16
"""Validation images that are looked for among the evaluated ones."""


@dataclass(frozen=True, eq=False)
class UnknownImages:
    """Separation of unknown images from the evaluated ones by each score."""

    source: str
    images: int
    groups: int
    """Groups of unknown images that belong together; as many as images if each is on its own."""
    known: int
    """Number of evaluated images."""
    known_groups: int
    """Groups of them, likewise."""
    share: float
    """Share of the validation images that stay known at the thresholds."""
    scores: dict[str, Separation]
    detector: Detector | None
    """The best score with its threshold; None without validation images of a run."""
    unreadable: tuple[str, ...]
    """Unknown images that were left out."""
    notes: tuple[str, ...]

    @property
    def best(self) -> str:
        """The score with the highest AUROC."""
        return max(self.scores, key=lambda name: self.scores[name].auroc)

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        scores = {name: one.to_json() for name, one in self.scores.items()}
        return {
            "data": self.source,
            "images": self.images,
            "groups": self.groups,
            "known": self.known,
            "known_groups": self.known_groups,
            "share": self.share,
            "scores": scores,
            "best": self.best,
            "saved": self.detector is not None,
            "unreadable": list(self.unreadable),
            "notes": list(self.notes),
        }

    def print_table(self, console: Console) -> None:
        """Print one line for each score, and the meaning of the last two columns."""
        rows = table()
        rows.add_column("score")
        columns = ("AUROC", "95% interval", "unknown found", "known kept")
        for name in columns[: 4 if self.detector else 2]:
            rows.add_column(name, justify="right")
        for name, one in self.scores.items():
            low, high = one.auroc_interval
            shares = [f"{share:.1%}" for share in (one.unknown_found, one.known_kept) if share is not None]
            rows.add_row(name, f"{one.auroc:.2%}", f"{low:.1%} to {high:.1%}", *shares)
        console.print(rows)
        unknown = in_groups(self.images, self.groups, "unknown image")
        console.print(f"{unknown} against the {self.known:,} above", highlight=False)
        if self.groups < self.images or self.known_groups < self.known:
            console.print(GROUPED, highlight=False)
        if self.detector:
            console.print(f"at the threshold that keeps {self.share:.4g} of the validation images", highlight=False)


def check_options(folder: str, share: float) -> None:
    """Raise `UsageError` for a share that is none, `DataError` for a folder without images."""
    if not 0 < share < 1:
        raise UsageError(f"--known-share must be between 0 and 1, not {share:g}", hint="--known-share 0.95")
    find([folder], "evaluate")


def check_network(predictor: Predictor) -> None:
    """Raise `UsageError` for another task than one class per image, images of their own sizes, and a network that is
    changed, such as by averaged views: the threshold is saved for the network as it was trained.
    """
    require_classes(predictor.output, "--unknown", "leave it out")
    refuse_own_sizes(predictor.preprocessing, "evaluate --unknown", predictor.source)
    if bad := [change for change in predictor.changes if not holds("unknown", [change])]:
        where, undo = CHANGES[bad[0]]
        why = "it is saved with the weights, for the network as it was trained"
        raise UsageError(f"--unknown measures no threshold {where}", why=why, hint=undo)


def evaluate_unknown(
    evaluated: Evaluated,
    folder: str | Path,
    share: float = 0.95,
    progress: Progress | None = None,
    *,
    bad_images: str = "error",
) -> UnknownImages:
    """Measure how well the images of `folder` are separated from those of an evaluation.

    The threshold of each score keeps `share` of the validation images of the network's run; features are compared with
    those of its training images. With `bad_images` "skip" unreadable images are left out. Weights without a run have
    only the scores of logits, and no threshold. Raises `UsageError` as `check_network`, and `DataError` if an image of
    `folder` is unreadable, with "skip" if all are.
    """
    predictor = evaluated.predictor
    check_network(predictor)
    train, val, notes = _run_images(predictor)
    sources = find([str(folder)], "evaluate")
    held_out = len(evaluated.images) + (0 if val is None else len(val))
    expect(progress, count(sources) + held_out + (0 if train is None else min(len(train), MOST)))
    statistics = _statistics(predictor, train, progress) if train is not None else {}
    names = SCORES if statistics else SCORES[:2]

    def score(items: Iterable[Item]) -> tuple[dict[str, np.ndarray], np.ndarray, list[str]]:
        return _scores(predictor, items, names, statistics, progress)

    unknown, alike, bad = score(Items(sources))
    if not len(alike):
        raise none_readable(bad, where=folder)
    if bad and bad_images == "error":
        raise unreadable(bad, where=folder)
    known = score(_items(evaluated.images))[0]
    kept = score(_items(val))[0] if val is not None else {}
    thresholds = {name: threshold_of(values, share) for name, values in kept.items()}
    groups = evaluated.images.groups, alike
    found = {name: separate(known[name], unknown[name], thresholds.get(name), groups) for name in names}
    if val is not None and any(same_images(val, evaluated.images, _PROBES)):
        notes += ("the known images set the threshold: known kept may be lower on new images",)
    result = UnknownImages(
        str(folder),
        len(alike),
        count_groups(alike, len(alike)),
        evaluated.evaluation.images,
        evaluated.evaluation.groups,
        share,
        found,
        None,
        tuple(bad),
        notes,
    )
    if not thresholds:
        return result
    best = result.best
    detector = Detector(best, thresholds[best], statistics if best == "distance" else {})
    return dataclasses.replace(result, detector=detector)


def save(run: str | Path, detector: Detector) -> None:
    """Save a threshold with the weights of a run; an earlier one is replaced. Raises `RunError` while it is trained."""
    folder = RunFolder(run)
    with folder.locked():
        weights = native.read(folder.weights)
        output = output_of(weights.classes, weights.output, weights.statistics)
        assert isinstance(output, Classes)
        fields = dataclasses.replace(output, unknown=detector).to_json()
        native.save(folder.weights, dataclasses.replace(weights, output=fields, statistics=dict(detector.statistics)))


def _run_images(predictor: Predictor) -> tuple[Split | None, Split | None, tuple[str, ...]]:
    """Return the training and the validation images of the network's run, and notes."""
    folder = RunFolder(predictor.source)
    if not folder.is_run():
        return None, None, ("no run: no distance of features, and no threshold is saved",)
    own = load_run_data(folder.read_plan())
    splits = own.dataset.splits
    if "val" not in splits:
        return splits["train"], None, ("no threshold is saved: the run has no validation images",)
    val = splits["val"]
    groups = count_groups(val.groups, len(val))
    few = f"only {in_groups(len(val), groups, 'validation image')}: the threshold is unreliable"
    notes = (own.check_split("val"), few if groups < FOR_A_FIT else "")
    return splits["train"], val, tuple(filter(None, notes))


def _statistics(predictor: Predictor, train: Split, progress: Progress | None) -> Statistics:
    """Fit the statistics of the features of training images."""
    chosen = spread(len(train), MOST)
    rows = list(predictor.stream_features(_items(train, chosen, progress), batch_size=_BATCH))
    readable = [number for number, (_, row) in enumerate(rows) if not isinstance(row, ImageError)]
    features = np.stack([np.asarray(rows[number][1]) for number in readable])
    return fit_statistics(features, np.asarray(train.labels)[chosen[readable]])


def _scores(
    predictor: Predictor,
    items: Iterable[Item],
    names: tuple[str, ...],
    statistics: Statistics,
    progress: Progress | None,
) -> tuple[dict[str, np.ndarray], np.ndarray, list[str]]:
    """Return each score (n,) of the readable images, their groups (n,), equal for equal pixels, and the names of the
    others.
    """
    seen: dict[bytes, int] = {}
    groups: list[int] = []

    def compute(images: Tensor) -> np.ndarray:
        logits = predictor.logits(images)
        values = predictor.output.values(logits)
        hashes = [hashlib.blake2b(one.tobytes(), digest_size=20).digest() for one in images.cpu().numpy()]
        groups.extend(seen.setdefault(one, len(seen)) for one in hashes)
        parts = values, logits, lambda: predictor.features(images), statistics
        found = [scored(name, *parts).cpu() for name in names]
        if progress:
            progress(len(images))
        return torch.stack(found, 1).numpy()

    rows: list[np.ndarray] = []
    unreadable: list[str] = []
    for name, row in stream(items, predictor.prepare, compute, _BATCH):
        if isinstance(row, ImageError):
            unreadable.append(name)
        else:
            rows.append(row)
    columns = np.stack(rows) if rows else np.zeros((0, len(names)), np.float32)
    return {name: columns[:, number] for number, name in enumerate(names)}, np.array(groups, np.int64), unreadable


def _items(images: Split, chosen: np.ndarray | None = None, progress: Progress | None = None) -> Iterable[Item]:
    for index in range(len(images)) if chosen is None else chosen.tolist():
        if progress:
            progress(1)
        yield Item(images.names[index], Record(images, index))
