"""The model under test: a name, or weights to read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import UsageError
from vitral.model import ModelConfig, Network, config, network, summarize
from vitral.weights.load import read
from vitral.weights.read.references import is_weights


@dataclass(frozen=True)
class ModelUnderTest:
    """A network at one image size, and a function that builds vitral's."""

    name: str
    config: ModelConfig
    preprocessing: Preprocessing
    classes: tuple[str, ...]
    build: Callable[[], Network]
    """Builds a new network at each call: training changes it."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of an image."""
        return self.preprocessing.image_size

    @property
    def flops(self) -> int:
        """Operations of one image, forward; a multiply-add is two."""
        return summarize(self.config).flops


def model_under_test(model: str, image_size: int | None = None) -> ModelUnderTest:
    """Resolve a name (S/16), a run folder, a weights file or a hub reference, at `image_size` if given.

    Raises `UsageError` for an unknown name, with the nearest ones, and for a network without a head; `WeightsError` and
    `RunError` from reading.
    """
    changes: dict[str, Any] = {} if image_size is None else {"image_size": image_size}
    if is_weights(model):
        weights = read(model, **changes).weights
        found = ModelUnderTest(
            model, weights.config, weights.preprocessing, tuple(weights.classes), lambda: read(model, **changes).build()
        )
    else:
        found = of_config(model, config(model, **changes))
    if not found.config.classes:
        raise UsageError(
            f"{model} has no head", why="inference is measured to probabilities", hint="use weights with a head"
        )
    return found


def of_config(name: str, shape: ModelConfig) -> ModelUnderTest:
    """Make a model under test with this configuration and random weights, on images scaled to -1..1."""
    half = (0.5,) * shape.channels
    preprocessing = Preprocessing(shape.image, shape.channels, mean=half, std=half)
    return ModelUnderTest(name, shape, preprocessing, tuple(map(str, range(shape.classes))), partial(network, shape))
