"""Features of a frozen network, computed once and cached, and their accuracy with simple classifiers.

The head is not used, so the classes of the data need not be those of the network.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from vitral._version import __version__
from vitral.console import table
from vitral.data import DataSet, Split
from vitral.data.checks.groups import with_copies
from vitral.data.checks.validate import left_out
from vitral.data.dataset import relative_names
from vitral.data.files import file_numbers
from vitral.data.images.decode import DECODING
from vitral.data.images.depth import leveled
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batches, Progress
from vitral.data.options import OWN_DATA, DataOptions
from vitral.data.splits import with_validation
from vitral.data.targets import require_one_class
from vitral.device import Machine, choose
from vitral.errors import UsageError, VitralError, WriteError, none_readable, unreadable
from vitral.evaluation import fewshot, neighbors
from vitral.evaluation.enough import FOR_RATES
from vitral.evaluation.fewshot import FewShot
from vitral.evaluation.intervals import count_groups
from vitral.evaluation.metrics import GROUPED, Evaluation, measure
from vitral.folders import cache_folder
from vitral.inference.features import head_features
from vitral.inference.options import AUTO, InferenceOptions
from vitral.inference.outputs.output import require_classes
from vitral.inference.predictor import Predictor
from vitral.model import Network
from vitral.training.run_folder import RunFolder
from vitral.weights.files import read_tensors, write_tensors
from vitral.weights.native import hash_state
from vitral.wording import in_groups
from vitral.workflows.planning.memory import eval_batch_size

FORMAT = 2
"""Version of the cache files; a new one invalidates all existing files."""

_NOT_IN_FEATURES = ("classes", "head_bias_init", "dropout", "drop_path", "attention_dropout", "patch_dropout")
"""Fields of a network's configuration that do not affect the features."""


def features_of(
    model: nn.Module,
    images: Split,
    preprocessing: Preprocessing,
    machine: Machine,
    *,
    cache: FeatureCache | None = None,
    batches: Batches | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """Compute the input of the head for each image, (n, D) fp32 on the CPU, in the split's order, in evaluation mode.

    The input is the pooled vector, after the `pre_logits` layer if there is one (big_vision's name); of a network with
    a distillation token it is that of the class token. `batches` are the same images in evaluation mode, if already
    decoded; `progress` then counts computed images, else decoded ones. Features in `cache` are neither computed nor are
    their images read. Raises `DataError` with the names of unreadable images.
    """
    key = feature_key(model, images, preprocessing, machine) if cache else ""
    if cache and (kept := cache.read(key, len(images))) is not None:
        if progress:
            progress(len(images))
        return kept
    decoded = batches is not None
    if batches is None:
        size = eval_batch_size(cast(Network, model).config, machine.device)
        batches = Batches(images, preprocessing, batch_size=size, device=machine.device, progress=progress)
    if bad := batches.unreadable:
        raise unreadable(f"{error.name} ({error.why})" for _, error in bad)
    parts = []
    for batch in batches.epoch():
        parts.append(head_features(model, batch.images, preprocessing, machine))
        if progress and decoded:
            progress(len(batch.indices))
    values = torch.cat(parts)
    if cache:
        cache.write(key, values)
    return values


def feature_key(model: nn.Module, images: Split, preprocessing: Preprocessing, machine: Machine) -> str:
    """Return a hash of everything that determines the features; equal keys mean equal features.

    It covers the network's configuration and weights except the head's, preprocessing, device type, precision,
    vitral's version, and the names, labels and `content` of the images.
    """
    state = hashlib.sha256()
    config = {k: v for k, v in model.config.to_json().items() if k not in _NOT_IN_FEATURES}  # type: ignore[operator, union-attr]
    versions = [FORMAT, DECODING, __version__]
    settings = [*versions, config, preprocessing.to_json(), machine.device.type, machine.precision]
    state.update(json.dumps(settings, sort_keys=True).encode())
    heads = {value.data_ptr() for part in ("head", "head_dist") for value in _parameters(model, part)}
    hash_state(state, {k: v for k, v in model.state_dict().items() if v.data_ptr() not in heads})
    state.update(np.ascontiguousarray(images.labels).data)
    state.update(content(images))
    return state.hexdigest()[:40]


def _parameters(model: nn.Module, part: str) -> list[nn.Parameter]:
    """The parameters of a head; none if the network does not have it."""
    module = getattr(model, part, None)
    return [] if module is None else list(module.parameters())


def content(images: Split) -> bytes:
    """Return a hash of the images.

    If every image is a file on disk, it covers names, sizes and modification times: a rewritten file is detected unless
    both size and time are the same. Reading all bytes would take as long as the network. Otherwise (archives, IDX
    files, arrays) it covers names and all bytes.
    """
    hashed = hashlib.sha256()
    files = True
    for name, relative in zip(images.names, relative_names(images.names), strict=True):
        state = _state(name) if files else None
        files = state is not None
        hashed.update(f"{relative} {state}\0".encode(errors="surrogateescape"))
    if files:
        return hashed.digest()
    for index in range(len(images)):
        try:
            raw = images.raw(index)
        except VitralError:
            raw = b""  # decoding reports unreadable images
        shape = raw.shape if isinstance(raw, np.ndarray) else len(raw)
        hashed.update(f"{shape} ".encode())
        hashed.update(raw.tobytes() if isinstance(raw, np.ndarray) else raw)
    return hashed.digest()


def _state(name: str) -> tuple[int, ...] | None:
    """Return the identity of a file; None if there is no such file."""
    try:
        status = os.stat(name)
    except (OSError, ValueError):
        return None
    return file_numbers(status) if stat.S_ISREG(status.st_mode) else None


class FeatureCache:
    """Features on disk, one file per network and split. The files can be deleted at any time."""

    def __init__(self, folder: str | Path | None = None):
        """`folder`: by default `vitral/features` in the user's cache."""
        self.folder = Path(folder) if folder else cache_folder("features")
        self.hits = 0
        """Number of times that features were read from the cache."""
        self.failure: str | None = None
        """The reason why features could not be stored, or stored ones not be used; the result is correct anyway."""

    def path(self, key: str) -> Path:
        """Return the path of the features with this key."""
        return self.folder / f"{key}.safetensors"

    def read(self, key: str, count: int) -> Tensor | None:
        """Return the features (count, D); None if they are missing, damaged or of another key."""
        try:
            tensors, header = read_tensors(self.path(key))
            values = tensors["features"]
        except (VitralError, KeyError, OSError):
            if self.path(key).exists():
                self.failure = f"{self.path(key)} was damaged, so features are computed again"
            return None
        whole = values.dtype == torch.float32 and values.ndim == 2 and len(values) == count
        if not whole or header.get("key") != key:
            return None
        self.hits += 1
        return values

    def write(self, key: str, values: Tensor) -> None:
        """Store the features; if that fails, `failure` is the reason."""
        try:
            write_tensors(self.path(key), {"features": values}, {"key": key})
        except WriteError as error:
            self.failure = f"features cannot be cached in {self.folder}: {error.why}"


@dataclass(frozen=True, eq=False)
class FeatureEvaluation:
    """Accuracy of simple classifiers on frozen features."""

    source: str
    split: str
    """The evaluated split: "test", "val", or "cut from train"."""
    images: int
    groups: int
    """Groups of images that belong together; as many as images if each is on its own."""
    support: int
    """Number of training images."""
    classes: tuple[str, ...]
    width: int
    """Number of features per image."""
    few_shot: tuple[FewShot, ...]
    knn: Evaluation | None
    neighbors: int
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        plain: dict[str, object] = {
            "data": self.source,
            "split": self.split,
            "images": self.images,
            "groups": self.groups,
            "train_images": self.support,
            "classes": len(self.classes),
            "features": self.width,
            "notes": list(self.notes),
        }
        if self.few_shot:
            plain["few_shot"] = [entry.to_json() for entry in self.few_shot]
        if self.knn:
            plain["knn"] = {"neighbors": self.neighbors, **self.knn.to_json()}
        return plain

    def print_table(self, console: Console) -> None:
        """Print one line per classifier."""
        rows = table()
        for column in ("classifier", "accuracy", "spread", "note"):
            rows.add_column(column, justify="right" if column in ("accuracy", "spread") else "left")
        only = in_groups(self.images, self.groups)
        few = [f"unreliable with only {only}"] if self.groups < FOR_RATES else []
        for entry in self.few_shot:
            short = [f"{entry.short} of {len(self.classes)} classes have fewer images"] if entry.short else []
            note = "; ".join(short + few)
            seeds = len(entry.accuracies)
            spread = "" if entry.std is None else f"± {entry.std:.2%} ({seeds} seeds)"
            rows.add_row(f"{entry.shots}-shot least squares", f"{entry.mean:.2%}", spread, note)
        if self.knn:
            low, high = self.knn.accuracy_interval
            interval = f"{low:.1%} to {high:.1%}"
            note = GROUPED if self.knn.widened else ""
            rows.add_row(f"{self.neighbors} nearest neighbors", f"{self.knn.accuracy:.2%}", interval, note)
        console.print(rows)


def evaluate_features(
    model: str | Path | Predictor,
    data: DataOptions = OWN_DATA,
    options: InferenceOptions = AUTO,
    *,
    few_shot: Sequence[int] = (),
    knn: int | None = None,
    cache: str | Path | FeatureCache | None = None,
    progress: Progress | None = None,
) -> FeatureEvaluation:
    """Measure the accuracy of few-shot least squares and of k nearest neighbors on `data`, by default the run's own.

    The classifiers use the features of the training images. Accuracy is measured on the split of `data`; by default on
    test, else on val, else on a tenth of train that is held out (the same share of each class, seed 0). Features are
    stored in `cache`, by default in the user's cache. Raises `UsageError` without `few_shot` and `knn`, and for an
    engine or views, which change only predictions; and the errors of reading data and weights.
    """
    # imported here, because that module imports the recipes, one of which imports this module
    from vitral.workflows.evaluate import data_for, left_out_bad

    if (options.engine, options.tta) != (AUTO.engine, AUTO.tta):
        why = "--few-shot and --knn use the features of the network"
        raise UsageError("--engine and --tta change predictions of the head", why=why)
    if not few_shot and knn is None:
        raise UsageError("nothing to measure", hint="--few-shot 1,5,10,25 or --knn 20")
    feature_cache = cache if isinstance(cache, FeatureCache) else FeatureCache(cache)
    if isinstance(model, Predictor):
        predictor, machine = model, model.machine
    else:
        predictor = dataclasses.replace(options, precision="fp32").load(model)
        machine = choose(options.device, options.precision, dim=predictor.network.config.dim)
    typed = "--few-shot" if few_shot else "--knn"
    require_classes(predictor.output, f"evaluate {typed}", f"vitral evaluate {predictor.source}")
    dataset, own = data_for(model, data)
    dataset = leveled(dataset, predictor.preprocessing.levels)
    require_one_class(dataset.targets, dataset.source, "an evaluation of features")
    dataset.targets.check(dataset.classes, dataset.source)
    dataset, measured, cut_notes = _two_sides(dataset, data.split)
    changed = own.check_split(measured) if own and not cut_notes else ""
    skip = data.skip or (own is not None and left_out_bad(predictor))
    train, support, _ = readable_features(predictor, machine, dataset["train"], feature_cache, skip, progress)
    test, images, _ = readable_features(predictor, machine, dataset[measured], feature_cache, skip, progress)
    train_labels, test_labels = np.asarray(support.labels), np.asarray(images.labels)
    groups = with_copies(images).groups
    trained = own is not None and RunFolder(predictor.source).read_plan().run.recipe != "linear-probe"
    seen = "the run trained these features on all of these training images; those of new images need more labels"
    notes = [*cut_notes, *filter(None, (seen * trained, changed, feature_cache.failure, left_out(dataset.left_out)))]
    shots: list[FewShot] = []
    if few_shot:
        shots = fewshot.few_shot(train, train_labels, test, test_labels, len(dataset.classes), few_shot)
    neighbors_result = None
    if knn is not None:
        on = machine.device if machine.device.type == "cuda" else torch.device("cpu")
        probabilities = neighbors.knn(train.to(on), train_labels, test.to(on), knn, classes=len(dataset.classes))
        neighbors_result = measure(probabilities.cpu().numpy(), test_labels, dataset.classes, groups)
    return FeatureEvaluation(
        dataset.source,
        "cut from train" if cut_notes else measured,
        len(test),
        count_groups(groups, len(test)),
        len(train),
        dataset.classes,
        train.shape[1],
        tuple(shots),
        neighbors_result,
        min(knn or 0, len(train)),
        tuple(notes),
    )


def _two_sides(dataset: DataSet, split: str | None) -> tuple[DataSet, str, list[str]]:
    """Return the data with train and a split to evaluate on, the name of the latter, and notes on it."""
    _ = dataset["train"]
    if split == "train":
        why = "the classifiers already use these images"
        raise UsageError("cannot evaluate few-shot and neighbors on train", why=why, hint="--split test")
    if split:
        _ = dataset[split]
        return dataset, split, []
    if other := next((name for name in ("test", "val") if name in dataset.splits), None):
        return dataset, other, []
    dataset = with_validation(dataclasses.replace(dataset, splits={"train": with_copies(dataset["train"])}))
    cut = len(dataset["val"])
    return (
        dataset,
        "val",
        [f"{cut:,} images were cut from train for evaluation, with about the same proportion of each class"],
    )


def readable_features(
    predictor: Predictor,
    machine: Machine,
    images: Split,
    cache: FeatureCache | None,
    skip: bool,
    progress: Progress | None,
) -> tuple[Tensor, Split, np.ndarray]:
    """Return the features of a split's readable images, these images, and their numbers in the split.

    To skip bad images, all are decoded even if features are cached.
    """
    batches, kept = None, np.arange(len(images))
    if skip:
        on = predictor.machine.device
        count = eval_batch_size(predictor.network.config, on)
        batches = Batches(images, predictor.preprocessing, batch_size=count, device=on, progress=progress)
        if bad := [index for index, _ in batches.unreadable]:
            if len(bad) == len(images):
                raise none_readable(f"{error.name} ({error.why})" for _, error in batches.unreadable)
            kept = np.setdiff1d(kept, bad)
            images, batches = images.select(kept), None
    preprocessing = predictor.preprocessing
    values = features_of(
        predictor.network, images, preprocessing, machine, cache=cache, batches=batches, progress=progress
    )
    return values, images, kept
