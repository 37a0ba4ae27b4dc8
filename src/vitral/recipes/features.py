"""What a frozen network knows of pictures: its features, computed once and kept, and what simple rules make of them.

The data's classes need not be the network's: nothing of its head is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from vitral import __version__
from vitral.console import table
from vitral.data import DataSet, Split
from vitral.data.check import WITHOUT
from vitral.data.dataset import check_classes, some
from vitral.data.loader import Batches, Progress
from vitral.data.splits import with_validation
from vitral.data.transforms import Preprocessing
from vitral.device import Machine, choose
from vitral.errors import DataError, TrainingError, UsageError, VitralError
from vitral.evaluation import fewshot, neighbours
from vitral.evaluation.fewshot import FewShot
from vitral.evaluation.metrics import ENOUGH_PICTURES, Evaluation, measure
from vitral.folders import cache_folder
from vitral.model import Network, ViT
from vitral.predict import Predictor, load
from vitral.recipes.room import at_once
from vitral.weights.files import read_tensors, write_tensors

FORMAT = 2
"""Of the files; another number makes all that are there be computed anew."""

_NOT_READ = ("classes", "head_bias_init", "dropout", "drop_path", "attention_dropout", "patch_dropout")
"""Parts of a network's configuration that change nothing in what its head reads."""


def features_of(
    model: nn.Module,
    pictures: Split,
    preprocessing: Preprocessing,
    machine: Machine,
    *,
    cache: FeatureCache | None = None,
    batches: Batches | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """What the head reads of each picture, (n, D) fp32 on the CPU, in the split's order, in evaluation mode.

    That is the pooled vector, after `pre_logits` where there is such a layer (big_vision's name for it); of a network
    with a distillation token it is the class token's. `batches` are the same pictures in evaluation mode where they are
    decoded already; `progress` is told of pictures that are decoded, or else computed. What lies in `cache` is not
    computed, nor are its pictures read. `DataError` names pictures that cannot be read.
    """
    key = feature_key(model, pictures, preprocessing, machine) if cache else ""
    if cache and (kept := cache.read(key, len(pictures))) is not None:
        if progress:
            progress(len(pictures))
        return kept
    decoded = batches is not None
    if batches is None:
        together = at_once(cast(Network, model).config, machine.device)
        batches = Batches(pictures, preprocessing, batch_size=together, device=machine.device, progress=progress)
    if bad := batches.unreadable:
        told = some(f"{error.name} ({error.why})" for _, error in bad)
        count = f"{len(bad):,} unreadable picture{'s' * (len(bad) > 1)}"
        raise DataError(count, why=told, hint=WITHOUT)
    parts = []
    for batch in batches.epoch():
        parts.append(read_by_head(model, batch.images, preprocessing, machine))
        if progress and decoded:
            progress(len(batch.indices))
    values = torch.cat(parts)
    if cache:
        cache.write(key, values)
    return values


@torch.inference_mode()
def read_by_head(model: nn.Module, images: Tensor, preprocessing: Preprocessing, machine: Machine) -> Tensor:
    """Features (B, D) fp32 on the CPU of uint8 pixels (B, C, H, W). The module's mode is left as it was."""
    training = model.training
    model.eval()
    try:
        with machine.autocast(), _reading(model) as seen:
            pixels = preprocessing.standardise(images).to(next(model.parameters()).dtype)
            if isinstance(model, ViT) and model.config.dist_token and not model.config.classes:
                return model.pool(model.encode(pixels, read=model.config.read))[:, 0].float().cpu()
            out = model(pixels)
            return (seen[0] if seen else out).float().cpu()
    finally:
        model.train(training)


@contextmanager
def _reading(model: nn.Module) -> Iterator[list[Tensor]]:
    """What comes to the head while this is open; nothing where there is no head, and the output is what is wanted."""
    seen: list[Tensor] = []
    head = getattr(model, "head", None)
    handle = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])) if head is not None else None
    try:
        yield seen
    finally:
        if handle:
            handle.remove()


def feature_key(model: nn.Module, pictures: Split, preprocessing: Preprocessing, machine: Machine) -> str:
    """A hash of all that features follow from; equal keys mean equal features.

    In it: the network's configuration and weights without the head's, preprocessing, kind of device, precision,
    vitral's version, and of the pictures names, labels and `content`.
    """
    known = hashlib.sha256()
    config = {k: v for k, v in model.config.to_json().items() if k not in _NOT_READ}  # type: ignore[operator, union-attr]
    facts = [FORMAT, __version__, config, preprocessing.to_json(), machine.device.type, machine.precision]
    known.update(json.dumps(facts, sort_keys=True).encode())
    for name, weight in sorted(model.state_dict().items()):
        if name.startswith(("head.", "head_dist.")):
            continue
        known.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        known.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    known.update(np.ascontiguousarray(pictures.labels).data)
    known.update(content(pictures))
    return known.hexdigest()[:40]


def content(pictures: Split) -> bytes:
    """A hash of the pictures. Where every one is a file on disk: names, sizes and times of the last change, so a file
    that is written again is noticed, unless its time is set back and its size is the same. Else (archives, IDX files,
    arrays): names and all bytes, so any change is noticed. Reading all bytes of files would take as long as a network.
    """
    found = hashlib.sha256()
    files = True
    for name in pictures.names:
        state = _state(name) if files else None
        files = state is not None
        found.update(f"{name} {state}\0".encode(errors="surrogateescape"))
    if files:
        return found.digest()
    for index in range(len(pictures)):
        try:
            raw = pictures.raw(index)
        except VitralError:
            raw = b""  # what cannot be read is said where it is decoded
        shape = raw.shape if isinstance(raw, np.ndarray) else len(raw)
        found.update(f"{shape} ".encode())
        found.update(raw.tobytes() if isinstance(raw, np.ndarray) else raw)
    return found.digest()


def _state(name: str) -> tuple[int, int] | None:
    """Size and time of the last change of a file, None where there is no such file."""
    try:
        found = os.stat(name)
    except (OSError, ValueError):
        return None
    return (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


class FeatureCache:
    """Features on disk, one file for each network and split. Nothing in it is needed: it can be deleted at any time."""

    def __init__(self, folder: str | Path | None = None):
        """`folder`: by default `vitral/features` in the user's cache."""
        self.folder = Path(folder) if folder else cache_folder("features")
        self.found = 0
        """How often features were taken from here."""
        self.failure: str | None = None
        """Why features could not be kept; they are used all the same."""

    def path(self, key: str) -> Path:
        """Where the features of this key lie."""
        return self.folder / f"{key}.safetensors"

    def read(self, key: str, count: int) -> Tensor | None:
        """The features (count, D), or None where they are not there, damaged or not of this key."""
        try:
            tensors, header = read_tensors(self.path(key))
            values = tensors["features"]
        except (VitralError, KeyError, OSError):
            return None
        whole = values.dtype == torch.float32 and values.ndim == 2 and len(values) == count
        if not whole or header != {"key": key, "digest": _digest(values)}:
            return None
        self.found += 1
        return values

    def write(self, key: str, values: Tensor) -> None:
        """Keep the features; where the disk refuses, `failure` says why."""
        try:
            write_tensors(self.path(key), {"features": values}, {"key": key, "digest": _digest(values)})
        except TrainingError as error:
            self.failure = f"features cannot be kept in {self.folder}: {error.why}"


def _digest(values: Tensor) -> str:
    """Of the bytes: safetensors itself does not notice one that has changed."""
    return hashlib.sha256(values.contiguous().numpy().data).hexdigest()


@dataclass(frozen=True, eq=False)
class FeatureEvaluation:
    """How far frozen features tell the data's classes apart."""

    source: str
    split: str
    """What was measured on: "test", "val", or "cut from train"."""
    images: int
    support: int
    """Training pictures."""
    classes: tuple[str, ...]
    width: int
    """Features of a picture."""
    few_shot: tuple[FewShot, ...]
    knn: Evaluation | None
    neighbours: int
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        plain: dict[str, Any] = {
            "data": self.source, "split": self.split, "images": self.images, "train_images": self.support,
            "classes": len(self.classes), "features": self.width, "notes": list(self.notes),
        }  # fmt: skip
        if self.few_shot:
            plain["few_shot"] = [entry.to_json() for entry in self.few_shot]
        if self.knn:
            plain["knn"] = {"neighbours": self.neighbours, **self.knn.to_json()}
        return plain

    def print_table(self, console: Console) -> None:
        """A line for each rule."""
        rows = table()
        for column in ("rule", "accuracy", "spread", "note"):
            rows.add_column(column, justify="right" if column in ("accuracy", "spread") else "left")
        few = [f"{self.images} pictures are too few to tell"] if self.images < ENOUGH_PICTURES else []
        for entry in self.few_shot:
            short = [f"{entry.short} of {len(self.classes)} classes have fewer pictures"] if entry.short else []
            note = "; ".join(short + few)
            seeds = len(entry.accuracies)
            spread = "" if entry.std is None else f"± {entry.std:.2%} ({seeds} seeds)"
            rows.add_row(f"{entry.shots}-shot least squares", f"{entry.mean:.2%}", spread, note)
        if self.knn:
            low, high = self.knn.accuracy_interval
            shown = f"{low:.1%} to {high:.1%}"
            rows.add_row(f"{self.neighbours} nearest neighbours", f"{self.knn.accuracy:.2%}", shown, "")
        console.print(rows)


def evaluate_features(
    model: str | Path | Predictor,
    data: str | Path | None = None,
    *,
    few_shot: Sequence[int] = (),
    knn: int | None = None,
    split: str | None = None,
    data_root: str | Path = "data",
    bad_images: str = "error",
    cache: str | Path | FeatureCache | None = None,
    device: str = "auto",
    precision: str = "auto",
    progress: Progress | None = None,
) -> FeatureEvaluation:
    """Closed-form few-shot accuracy and that of k nearest neighbours, on `data` (by default that of the run itself).

    Features of the training pictures are the memory; the accuracy is that on test, else on val, else on a tenth of
    train that is cut off (the same share of each class, seed 0), or on `split`. Features are kept in `cache`, by
    default the user's. `UsageError` where nothing is asked for, and the errors of reading data and weights.
    """
    # they plan runs, plans know recipes, and one of them needs features
    from vitral.recipes.evaluation import data_for, left_out_bad, skips

    skip = skips(bad_images)
    if not few_shot and knn is None:
        raise UsageError("nothing to measure", hint="--few-shot 1,5,10,25 or --knn 20")
    kept = cache if isinstance(cache, FeatureCache) else FeatureCache(cache)
    if isinstance(model, Predictor):
        predictor, machine = model, model.machine
    else:
        predictor = load(model, device=device, precision="fp32")
        machine = choose(device, precision, dim=predictor.model.config.dim)
    dataset, own = data_for(model, data, data_root)
    check_classes(dataset)
    dataset, measured, said = _two_sides(dataset, split)
    changed = own.measured_on(measured) if own and not said else ""
    skip = skip or (own is not None and left_out_bad(predictor))
    memory, known = _side(predictor, machine, dataset["train"], kept, skip, progress)
    asked, truth = _side(predictor, machine, dataset[measured], kept, skip, progress)
    notes = [*said, *filter(None, (changed, kept.failure))]
    shots: list[FewShot] = []
    if few_shot:
        shots = fewshot.few_shot(memory, known, asked, truth, len(dataset.classes), few_shot)
    found = None
    if knn is not None:
        on = machine.device if machine.device.type == "cuda" else torch.device("cpu")
        probabilities = neighbours.knn(memory.to(on), known, asked.to(on), knn, classes=len(dataset.classes))
        found = measure(probabilities.cpu().numpy(), truth, dataset.classes)
    return FeatureEvaluation(
        dataset.source, "cut from train" if said else measured, len(asked), len(memory), dataset.classes,
        memory.shape[1], tuple(shots), found, min(knn or 0, len(memory)), tuple(notes),
    )  # fmt: skip


def _two_sides(dataset: DataSet, split: str | None) -> tuple[DataSet, str, list[str]]:
    """The data with a train split and another, the name of the other, and what is to be said of it."""
    _ = dataset["train"]
    if split == "train":
        why = "their features are the memory, and would be found again"
        raise UsageError("few-shot and neighbours cannot be measured on train", why=why, hint="--split test")
    if split:
        _ = dataset[split]
        return dataset, split, []
    if other := next((name for name in ("test", "val") if name in dataset.splits), None):
        return dataset, other, []
    dataset = with_validation(dataset)
    cut = len(dataset["val"])
    return dataset, "val", [f"{cut:,} pictures were cut from train to measure on, about the same share of each class"]


def _side(
    predictor: Predictor,
    machine: Machine,
    pictures: Split,
    cache: FeatureCache,
    skip: bool,
    progress: Progress | None,
) -> tuple[Tensor, np.ndarray]:
    """Features and labels of a split. To leave bad pictures out, all are decoded even where features are kept."""
    batches = None
    if skip:
        on = predictor.machine.device
        count = at_once(predictor.model.config, on)
        batches = Batches(pictures, predictor.preprocessing, batch_size=count, device=on, progress=progress)
        if bad := [index for index, _ in batches.unreadable]:
            if len(bad) == len(pictures):
                raise DataError("no readable picture", why=str(batches.unreadable[0][1]))
            pictures, batches = pictures.select(np.setdiff1d(np.arange(len(pictures)), bad)), None
    preprocessing = predictor.preprocessing
    values = features_of(
        predictor.model, pictures, preprocessing, machine, cache=cache, batches=batches, progress=progress
    )
    return values, np.asarray(pictures.labels)
