"""A model that answers requests: a predictor with its batches and its thread. A self-test runs before it answers."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import hashlib
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitral.errors import UsageError, WeightsError, unknown
from vitral.explanation.explain import explain
from vitral.explanation.heatmap import Heatmap
from vitral.explanation.methods import METHODS, TEXT_METHODS, method_named
from vitral.explanation.methods.method import Method, grid_of
from vitral.explanation.methods.select import check_method, default_method
from vitral.explanation.texts import DEFAULT_FOR_TEXT, TextExplanation, explain_prepared
from vitral.inference.features import head_features
from vitral.inference.inputs import Item
from vitral.inference.loading import load
from vitral.inference.outputs.classes import Classes
from vitral.inference.own_sizes import refuse_own_sizes
from vitral.inference.predictor import Predictor
from vitral.serving.batching import Batcher, Ticket, Timing
from vitral.serving.decoding import Decoder
from vitral.serving.limits import Limits, Places
from vitral.serving.metrics import Metrics
from vitral.serving.problems import Problem
from vitral.weights.native import digest
from vitral.weights.read.references import name_of

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

Reference = str | Path | Predictor
"""A reference that `vitral.load` takes, or a predictor that is loaded already."""


def named(references: Iterable[Reference]) -> dict[str, Reference]:
    """Names for models: what is typed as NAME=RUN, otherwise the last part of the reference.

    Raises `UsageError` for a name that is used twice, or that is none.
    """
    found: dict[str, Reference] = {}
    for one in references:
        name, reference = _name_of(one)
        if not _NAME.fullmatch(name):
            why = "a name is made of letters, digits, '.', '_' and '-'"
            raise UsageError(f"'{name}' cannot be the name of a model", why=why, hint="vitral serve NAME=RUN")
        if name in found:
            why = f"{found[name]} and {reference}"
            raise UsageError(f"two models are called '{name}'", why=why, hint="vitral serve A=RUN B=RUN")
        found[name] = reference
    if not found:
        raise UsageError("no model to serve", hint="vitral serve RUN …")
    return found


def _name_of(reference: Reference) -> tuple[str, Reference]:
    if isinstance(reference, Predictor):
        return name_of(reference.source) or "model", reference
    name, equals, rest = str(reference).partition("=")
    if equals and _NAME.fullmatch(name) and not Path(reference).exists():
        return name, rest
    return name_of(str(reference)), reference


def load_checked(reference: Reference, options: Mapping[str, Any], right: float | None = None) -> Predictor:
    """Load a model and test it. With `right`, images are "not sure" so that this share of the other answers is correct.

    Raises the errors of `vitral.load`, `WeightsError` if the model fails its self-test, and `UsageError` if it cannot
    promise `right`.
    """
    if isinstance(reference, Predictor):
        predictor = reference
    else:
        predictor = load(reference, **options)
        for tensor in (*predictor.network.parameters(), *predictor.network.buffers()):
            tensor.data = tensor.data.clone()  # it may be a view of a file, which somebody may write to
    if not predictor.classes:
        raise WeightsError(
            "this network has no classes to predict", where=reference, hint="vitral train DATA --init WEIGHTS"
        )
    refuse_own_sizes(predictor.preprocessing, "serve", predictor.source)
    predictor = predictor if right is None else _sure(predictor, right)
    self_test(predictor)
    return predictor


def _sure(predictor: Predictor, right: float) -> Predictor:
    """Return a copy that answers "not sure", so that a share `right` of the other answers is correct."""
    output = predictor.output
    if not isinstance(output, Classes):
        why = f"{predictor.source or 'a model'} predicts {output.noun}"
        raise UsageError("--right is for networks of one class per image", why=why, hint="leave it out")
    predictor = copy.copy(predictor)
    predictor.output = output.sure(right)
    return predictor


def self_test(predictor: Predictor) -> None:
    """Compute two images twice, which warms the engine. The logits or texts must be finite and equal both times."""
    height, width = predictor.preprocessing.image_size
    shape = (2, predictor.preprocessing.channels, height, width)
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))
    first, second = (predictor.logits(images).cpu() for _ in range(2))
    if not predictor.output.sequence and first.shape != (2, len(predictor.classes)):
        why = f"{len(predictor.classes)} classes and logits {tuple(first.shape)}"
    elif not bool(first.isfinite().all()):
        why = "it computes values that are not finite"
    elif not torch.allclose(first, second, rtol=1e-3, atol=1e-3):
        why = "it gives different answers for the same images"
    else:
        return
    raise WeightsError("the model does not pass its self-test", where=predictor.source or None, why=why)


class Model:
    """One version of a model that answers with a row of values for each image, and explains with heat maps.

    All its computing runs on one thread: batches and explanations share the network.
    """

    explained_by: Mapping[str, Method] = METHODS
    """Name → method of explanation, of those for this kind of model."""

    def __init__(self, name: str, predictor: Predictor, limits: Limits, metrics: Metrics):
        self.name, self.predictor, self.limits, self.metrics = name, predictor, limits, metrics
        self.version = _version(predictor)
        self.loaded_at = time.time()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"vitral-{name}")
        self.places = Places(limits.queue, self._queue_full, metrics.queue.labels(name).inc)
        self._seconds = 0.05  # an image takes about as long, for Retry-After
        self._batchers = {
            task: Batcher(
                compute,
                self._thread,
                size=limits.batch_size,
                wait=limits.batch_wait,
                accepted=lambda: self.places.used,
                record=self._recorder(task),
            )
            for task, compute in (("predict", self._predict), ("embed", self._embed))
        }
        self.labels = (name, self.version, predictor.engine, predictor.machine.precision)

    def start(self) -> None:
        """Begin to answer."""
        self.metrics.model.labels(*self.labels).set(1)

    async def stop(self, *, when_idle: bool = False) -> None:
        """End; `when_idle` waits until every accepted image is answered."""
        while when_idle and self.places.used:
            await asyncio.sleep(0.05)
        for batcher in self._batchers.values():
            batcher.stop()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def predict(self, decode: Decoder, uploads: Sequence[Item]) -> list[Ticket]:
        """Tickets whose answers are values (K,), such as probabilities."""
        return await decode(self.predictor.prepare, uploads, self._batchers["predict"].put)

    async def embed(self, decode: Decoder, uploads: Sequence[Item]) -> list[Ticket]:
        """Tickets whose answers are features (D,), as the head reads them."""
        return await decode(self.predictor.prepare, uploads, self._batchers["embed"].put)

    async def explain(
        self, predicted: Sequence[Ticket], method: str, target: int | None
    ) -> list[Heatmap | TextExplanation]:
        """Heat maps of predicted images, for one class or for the predicted one, or of their texts.

        One image at a time: predictions go in between, and a canceled request ends after its image.
        """
        loop = asyncio.get_running_loop()
        return [await loop.run_in_executor(self._thread, self._explain, one, method, target) for one in predicted]

    def _predict(self, images: Tensor) -> list[np.ndarray]:
        return list(self.predictor.rows(images))

    def _embed(self, images: Tensor) -> list[np.ndarray]:
        predictor = self.predictor
        on_device = images.to(predictor.machine.device)
        return list(head_features(predictor.network, on_device, predictor.preprocessing, predictor.machine).numpy())

    def _explain(self, predicted: Ticket, method: str, target: int | None) -> Heatmap | TextExplanation:
        assert predicted.image is not None
        return heatmap(self.predictor, predicted.image, method, target)

    @cached_property
    def methods(self) -> list[dict[str, object]]:
        """Methods of explanation that fit this network and the limit of passes, the default first."""
        fitting = [
            {
                "name": name,
                "title": one.title,
                "passes": passes,
                "routing": one.routing,
                "signed": one.signed,
                "note": one.note,
            }
            for name, one in self.explained_by.items()
            if (passes := one.passes(self._patches)) <= self.limits.passes and self._fits(name)
        ]
        return sorted(fitting, key=lambda one: one["name"] != self.default_method)

    def check_explanation(self, method: str, target: str | None) -> tuple[str, int | None]:
        """The name of the method and the number of the class; `Problem` for a method that does not fit or costs too
        much, for an unknown class, and for any class of a text. `default` is the best method for this network.
        """
        name = self.default_method if method == "default" else method
        if not self._fits(name):
            known = [str(one["name"]) for one in self.methods]
            raise Problem("no-explanation", f"'{name[:40]}' is not a method for this network", methods=known)
        passes = method_named(name).passes(self._patches)
        if passes > self.limits.passes:
            detail = f"'{name}' costs {passes} passes an image; this server allows {self.limits.passes}"
            raise Problem("no-explanation", detail, limit=self.limits.passes)
        return name, self.checked_target(target)

    def checked_target(self, target: str | None) -> int | None:
        """The number of the class to explain, None for the predicted one; `Problem` where that is not possible."""
        classes = self.predictor.classes
        if target in classes:
            return classes.index(target)
        if target is not None:
            nearest = unknown("class", target[:80], classes).why
            raise Problem("no-explanation", f"'{target[:80]}' is not a class of this model; {nearest}")
        try:
            self.predictor.output.predicted(torch.zeros(1, len(classes)))
        except UsageError as error:
            raise Problem("no-explanation", f"{error.what}; name one as target: {error.why}") from error
        return None

    def to_json(self) -> dict[str, object]:
        """The facts that clients need, as plain data."""
        predictor = self.predictor
        return {
            "name": self.name,
            "version": self.version,
            "loaded_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.loaded_at)),
            "task": predictor.output.task,
            "noun": predictor.output.noun,
            "target": self.needed_target,
            "sure": self._sure,
            "classes": list(predictor.classes),
            "image_size": list(predictor.preprocessing.image_size),
            "channels": predictor.preprocessing.channels,
            "preprocessing": predictor.preprocessing.to_json(),
            "features": predictor.network.config.features,
            "parameters": sum(one.numel() for one in predictor.network.parameters()),
            "engine": predictor.engine,
            "precision": predictor.machine.precision,
            "device": predictor.machine.device.type,
            "methods": self.methods,
        }

    @property
    def needed_target(self) -> str:
        """The name to explain where none is predicted, as of several numbers; else ""."""
        names = self.predictor.classes
        try:
            self.predictor.output.predicted(torch.zeros(1, len(names)))
        except UsageError:
            return names[0]
        return ""

    @property
    def _sure(self) -> str:
        """The threshold of `--right` and what it promises, in words; "" if every image is answered."""
        output = self.predictor.output
        return output.cut.describe(output.validation) if isinstance(output, Classes) and output.cut else ""

    def check_embedding(self) -> None:
        """Raise `Problem` for a network without features."""

    @property
    def default_method(self) -> str:
        """The best method of explanation for this network."""
        return default_method(self.predictor.network)

    @cached_property
    def _patches(self) -> int:
        height, width = self.predictor.preprocessing.image_size
        network = getattr(self.predictor.network, "encoder", self.predictor.network)
        rows, columns = grid_of(network, torch.empty(1, 1, height, width, device="meta"))
        return rows * columns

    def _fits(self, method: str) -> bool:
        if method not in self.explained_by:
            return False
        try:
            check_method(METHODS[method], self.predictor.network)
        except UsageError:
            return False
        return True

    def _queue_full(self) -> Problem:
        wait = max(1, min(60, round(self.places.used * self._seconds)))
        detail = f"{self.places.used} images wait for '{self.name}'; {self.places.capacity} have a place"
        return Problem("queue-full", detail, headers={"Retry-After": str(wait)})

    def _recorder(self, task: str) -> Callable[[Timing], None]:
        metrics, labels = self.metrics, (self.name, task)

        def record(timing: Timing) -> None:
            self._seconds = 0.9 * self._seconds + 0.1 * timing.seconds / timing.images
            metrics.images.labels(*labels).inc(timing.images)
            metrics.batches.labels(*labels).observe(timing.images)
            metrics.compute.labels(*labels).observe(timing.seconds)
            for seconds in timing.waited:
                metrics.waited.labels(*labels).observe(seconds)

        return record


class TextModel(Model):
    """A model that reads lines of text: its rows are sequences, and every character is explained."""

    explained_by = TEXT_METHODS

    @property
    def default_method(self) -> str:
        """The best method of explanation for texts."""
        return DEFAULT_FOR_TEXT

    @property
    def needed_target(self) -> str:
        """Texts have no target."""
        return ""

    def checked_target(self, target: str | None) -> None:
        """Raise `Problem` for any target."""
        if target is not None:
            raise Problem("no-explanation", f"'{self.name}' reads text: every character is explained, no target")

    def check_embedding(self) -> None:
        """Raise `Problem`: there is no one vector of an image."""
        raise Problem("no-embedding", f"'{self.name}' reads text: its decoder attends to all tokens of the image")

    def _explain(self, predicted: Ticket, method: str, target: int | None) -> TextExplanation:
        assert predicted.image is not None
        row = torch.from_numpy(predicted.answer.result())
        return explain_prepared(self.predictor, predicted.image[None], [""], method_named(method), row[None])[0]

    def _fits(self, method: str) -> bool:
        return method in self.explained_by


def heatmap(predictor: Predictor, image: Tensor, method: str, target: int | None) -> Heatmap:
    """Return the map of a prepared image, (C, H, W) uint8, for one class or for the predicted one."""
    standardized = predictor.preprocessing.standardize(image[None].to(predictor.machine.device))
    found = explain(predictor.network, standardized, target, method=method)[0]
    label, pixels = predictor.classes[found.target], image.permute(1, 2, 0).numpy()
    return dataclasses.replace(found, label=label, image=pixels)


def model_of(name: str, predictor: Predictor, limits: Limits, metrics: Metrics) -> Model:
    """Return the model of a predictor: of images with a row of values each, or of texts."""
    kind = TextModel if predictor.output.sequence else Model
    return kind(name, predictor, limits, metrics)


def _version(predictor: Predictor) -> str:
    """A short digest of weights, classes, preprocessing, output and `--right`, the same on every machine."""
    output = [predictor.output.to_json()] if predictor.output.to_json() else []
    if isinstance(predictor.output, Classes) and predictor.output.cut:
        output.append({"sure from": predictor.output.cut.probability})
    known = repr((predictor.classes, predictor.preprocessing, digest(predictor.network.state_dict()), *output))
    return hashlib.sha256(known.encode()).hexdigest()[:12]
