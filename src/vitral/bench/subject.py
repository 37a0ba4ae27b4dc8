"""The network that all build: a name, or weights that ours are read from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from vitral.data.transforms import Preprocessing
from vitral.errors import UsageError
from vitral.model import ModelConfig, Network, config, network, summarize
from vitral.weights.load import read
from vitral.weights.references import is_weights


@dataclass(frozen=True)
class Subject:
    """A network at one image size, and how ours is made."""

    name: str
    config: ModelConfig
    preprocessing: Preprocessing
    classes: tuple[str, ...]
    build: Callable[[], Network]
    """Ours, anew at each call: training changes it."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of a picture."""
        return self.preprocessing.image_size

    @property
    def flops(self) -> int:
        """Operations of one picture, forward; a multiply-add is two."""
        return summarize(self.config).flops


def subject(model: str, image_size: int | None = None) -> Subject:
    """What a name (S/16), a run folder, a weights file or a hub's reference stands for, at `image_size` where given.

    Raises `UsageError` for an unknown name, with the nearest ones, and for a network without a head; `WeightsError` and
    `RunError` as reading does.
    """
    changes: dict[str, Any] = {} if image_size is None else {"image_size": image_size}
    if is_weights(model):
        weights = read(model, **changes).weights
        build = partial(_from_weights, model, changes)
        found = Subject(model, weights.config, weights.preprocessing, tuple(weights.classes), build)
    else:
        found = of_config(model, config(model, **changes))
    if not found.config.classes:
        raise UsageError(f"{model} has no head", why="what is measured ends in probabilities", hint="other weights")
    return found


def of_config(name: str, shape: ModelConfig) -> Subject:
    """A network of this configuration with random weights, on pictures scaled to -1..1."""
    half = (0.5,) * shape.channels
    preprocessing = Preprocessing(shape.image, shape.channels, mean=half, std=half)
    return Subject(name, shape, preprocessing, tuple(map(str, range(shape.classes))), partial(network, shape))


def _from_weights(model: str, changes: dict[str, Any]) -> Network:
    return read(model, **changes).build()
