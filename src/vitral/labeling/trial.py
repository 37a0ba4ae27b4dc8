"""Answers for an image that is not of the data: probabilities, the nearest labeled images, and the map of evidence.

The suggestions answer, or a trained run. For a map of the suggestions, their classifier becomes the head of the network
whose features it reads.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from vitral.errors import UsageError
from vitral.explanation.methods.select import default_method
from vitral.inference.inputs import Item
from vitral.inference.loading import load
from vitral.inference.outputs.classes import Classes
from vitral.inference.predictor import Predictor
from vitral.labeling.assistant import Assistant, labels_of
from vitral.labeling.insight import nearest_to, tempered
from vitral.model import ViT
from vitral.serving.application import explanation_of
from vitral.serving.batching import Ticket, settle
from vitral.serving.decoding import Decoder
from vitral.serving.limits import Limits
from vitral.serving.metrics import Metrics
from vitral.serving.models import heatmap
from vitral.workflows.running.linear_probe import write_head

T = TypeVar("T")

LIMITS = Limits(images=1, timeout=120.0)
"""Bounds of a request. The first answer loads weights."""
_TOP = 5  # classes of an answer


class Trial:
    """Answers one image after the other, decoded within the limits of `vitral serve`."""

    def __init__(self, assistant: Assistant, metrics: Metrics):
        self.assistant = assistant
        self._decoder = Decoder(1, LIMITS, metrics, name="label-trial-decode")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="label-trial")
        self._backbone: Predictor | None = None
        self._run: tuple[Path, Predictor] | None = None

    def close(self) -> None:
        """Answer no more."""
        self._decoder.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def answer(self, upload: Item, run: Path | None = None) -> dict[str, object]:
        """Return the prediction of an image, numbers of labeled images like it, and its map, as plain data.

        The suggestions predict, or a run. Raises `UsageError` before there are suggestions, `Problem` for an image that
        cannot be read, and the errors of `vitral.load`.
        """
        backbone, predictor = await self._compute(self._load, run)
        (ticket,) = await self._decoder(predictor.prepare, [upload], _decoded)
        assert ticket.image is not None
        return await self._compute(self._answer, backbone, predictor, upload, ticket.image)

    async def _compute(self, work: Callable[..., T], *given: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *given)

    def _load(self, run: Path | None) -> tuple[Predictor, Predictor]:
        """Return the network that compares images, and the one that predicts, which may be the same."""
        if self._backbone is None:
            self._backbone = self.assistant.load()
        if run is None:
            return self._backbone, self._backbone
        if self._run is None or self._run[0] != run:
            self._run = run, load(run)
        return self._backbone, self._run[1]

    def _answer(self, backbone: Predictor, predictor: Predictor, upload: Item, image: Tensor) -> dict[str, object]:
        of_backbone = image if predictor is backbone else backbone.prepare(upload.image, upload.name)
        features = backbone.features(of_backbone[None]).numpy().astype(np.float64)
        if predictor is backbone:
            predictor, row = self._suggesting(backbone, features)
        else:
            row = predictor.rows(image[None])[0]
        return {
            **predictor.output.prediction(upload.name, row).to_json(_TOP),
            "neighbors": self._neighbors(features[0]),
            "explanation": _explained(predictor, image, int(row[: len(predictor.classes)].argmax())),
        }

    def _suggesting(self, backbone: Predictor, features: np.ndarray) -> tuple[Predictor, np.ndarray]:
        """Return a predictor with the classifier of the suggestions as its head, and their probabilities (K,)."""
        found, classes = self.assistant.found
        if found.fitted is None or len(found.fitted.regression[1]) != len(classes):
            raise UsageError("there are no suggestions yet", hint="label three images of two classes")
        network = backbone.network
        if isinstance(network, ViT):
            network = copy.deepcopy(network)
            network.reset_classifier(len(classes))
            weight, bias = found.fitted.head()
            write_head(network, torch.from_numpy(weight), torch.from_numpy(bias))
        output = Classes(classes)
        recipe, machine = backbone.preprocessing, backbone.machine
        predictor = Predictor(network, recipe, classes, machine=machine, engine="plain", output=output)
        return predictor, tempered(found.fitted(features), found.temperature)[0]

    def _neighbors(self, features: np.ndarray) -> list[int]:
        """Return the numbers of the labeled images that are most similar."""
        known = self.assistant.features
        if known is None:
            return []
        labeled = labels_of(self.assistant.session.state).labels >= 0
        return [int(number) for number in nearest_to(known, features, labeled)]


def _decoded(ticket: Ticket) -> None:
    settle([ticket], [None])


def _explained(predictor: Predictor, image: Tensor, target: int) -> dict[str, object] | None:
    """Return the map of the predicted class with the image as the network saw it; None for other networks."""
    if not isinstance(predictor.network, ViT) or predictor.preprocessing.native:
        return None
    method = default_method(predictor.network)
    return explanation_of(heatmap(predictor, image, method, target), overlay=True)
