"""Compute features and insight in the background, while a person labels.

Features are computed a part of the images at a time and cached, so a second start reads them. After each action the
insight is computed anew from the labels of that moment. A person never waits for either.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from vitral.data import Split
from vitral.data.checks.groups import joined, near_sets
from vitral.data.files import FolderFetch
from vitral.data.label_table import is_set_aside
from vitral.errors import DataError, VitralError
from vitral.inference.options import AUTO
from vitral.inference.predictor import Predictor
from vitral.labeling.insight import Insight, Labels, hold_out, insight
from vitral.labeling.session import Session
from vitral.labeling.state import State
from vitral.weights.read.references import BACKBONE
from vitral.workflows.tables.features import FeatureCache, readable_features

PART = 64
"""Images whose features are computed and cached at a time."""
_PAUSE = 2.0  # seconds between two insights while features are computed
_PATIENCE = 5.0


@dataclass(frozen=True)
class Progress:
    """Images whose features are computed, and the time left."""

    done: int
    total: int
    seconds_left: float | None = None
    """None until it can be estimated."""
    problem: str = ""
    """The reason why there will be no features."""

    def to_json(self) -> dict[str, object]:
        """Return plain data."""
        return vars(self)


class Assistant:
    """Features and insight of a session. Use it as a context manager, which starts and ends its thread."""

    def __init__(self, session: Session, weights: str = BACKBONE):
        self.session, self.weights = session, weights
        count = len(session.state.images)
        self.progress = Progress(0, count)
        self.features: np.ndarray | None = None
        """(n, D) with NaN for images that have none yet, or cannot be read; None before the first."""
        self.groups = np.arange(count)
        """(n,) equal for near-duplicates."""
        self.found: tuple[Insight, tuple[str, ...]] = (Insight.nothing(count), ())
        """The insight and the classes that it numbers, set together: another thread reads both of one moment."""
        self.number = 0
        """Grows with each new insight and each part of the features."""
        self.on_change: Callable[[], None] = lambda: None
        """Called after `number` has grown, from the thread of the assistant."""
        self._ending, self._asked = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="label-assistant", daemon=True)

    def __enter__(self) -> Assistant:
        self._thread.start()
        return self

    def __exit__(self, *failed: object) -> None:
        self._ending.set()
        self._asked.set()
        self._thread.join(_PATIENCE)  # a search for near-duplicates cannot be stopped halfway

    @property
    def insight(self) -> Insight:
        """Suggestions, doubts and accuracy from the labels of a moment."""
        return self.found[0]

    def ask(self) -> None:
        """Compute the insight anew soon: labels have changed."""
        self._asked.set()

    def to_json(self) -> dict[str, object]:
        """Return the insight for the page."""
        return {
            "number": self.number,
            "progress": self.progress.to_json(),
            "groups": self.groups.tolist(),
            "held": sorted(self.session.state.held_out),
            **self.insight.to_json(len(self.session.state.classes)),
        }

    def _run(self) -> None:
        try:
            for is_due in self._steps():
                if self._ending.is_set():
                    return
                if is_due:
                    self._asked.clear()
                    self._look()
                self._publish()
        except Exception as error:  # a person goes on labeling without suggestions, and learns why there are none
            why = str(error).split("\n", 1)[0]
            self.progress = replace(self.progress, problem=why)
            self._publish()
            if not isinstance(error, VitralError):
                raise

    def _steps(self) -> Iterator[bool]:
        """Compute features part after part, then wait for each change of the labels; True where insight is due."""
        images = self._images()
        self.groups = _near(images)
        yield from self._compute(images)
        while True:
            self._asked.wait()
            yield True

    def load(self) -> Predictor:
        """Load the network whose features compare the images. Raises the errors of `vitral.load`."""
        return replace(AUTO, precision="fp32").load(self.weights)

    def _images(self) -> Split:
        session = self.session
        names = [session.path(i) for i in range(len(session.state.images))]
        return Split(names, np.zeros(len(names), np.int64), FolderFetch(os.sep, names))

    def _compute(self, images: Split) -> Iterator[bool]:
        predictor = self.load()
        cache, begun, due = FeatureCache(), time.perf_counter(), 0.0
        for start in range(0, len(images), PART):
            numbers = np.arange(start, min(start + PART, len(images)))
            part = images.select(numbers)
            found = features_of_part(predictor, part, cache)
            if self.features is None and found is not None:
                self.features = np.full((len(images), found.shape[1]), np.nan)
            if self.features is not None and found is not None:
                self.features[numbers] = found
            done, now = int(numbers[-1]) + 1, time.perf_counter()
            self.progress = Progress(done, len(images), (now - begun) / done * (len(images) - done))
            is_due = now >= due or done == len(images)
            yield is_due
            due = time.perf_counter() + _PAUSE if is_due else due

    def _look(self) -> None:
        """Compute the insight, and tell the pages."""
        if self.features is not None:
            self._draw()
            state = self.session.state
            self.found = insight(self.features, self.groups, labels_of(state)), state.classes

    def _draw(self) -> None:
        """Hold images out before the first suggestion."""
        given = labels_of(self.session.state)
        if self.session.state.held_out or len(np.unique(given.labels[given.labels >= 0])) < 2:
            return
        drawn = hold_out(self.groups, given.open)
        if len(drawn) and not self._ending.is_set():
            self.session.hold_out(drawn.tolist())

    def _publish(self) -> None:
        self.number += 1
        self.on_change()


def labels_of(state: State) -> Labels:
    """Return the labels of a state as arrays."""
    place = {name: i for i, name in enumerate(state.classes)}
    aside = [is_set_aside(mark.label, mark.checked) for mark in state.marks]
    held = np.zeros(len(state.marks), bool)
    held[list(state.held_out)] = True
    return Labels(
        np.array([-1 if out else place[mark.label] for mark, out in zip(state.marks, aside, strict=True)], np.int64),
        np.array([mark.checked == "yes" for mark in state.marks], bool),
        np.array([not mark.label and mark.checked == "no" for mark in state.marks], bool),
        held,
        len(state.classes),
    )


def features_of_part(predictor: Predictor, part: Split, cache: FeatureCache) -> np.ndarray | None:
    """Return the features (n, D) of images, with NaN for those that cannot be read; None if none can."""
    values: Tensor | None = None
    kept = np.arange(len(part))
    for skip in (False, True):  # with `skip`, all are decoded even if their features are cached
        with contextlib.suppress(DataError):
            values, _, kept = readable_features(predictor, predictor.machine, part, cache, skip, None)
            break
    if values is None:
        return None
    found = np.full((len(part), values.shape[1]), np.nan)
    found[kept] = values.numpy()
    return found


def _near(images: Split) -> np.ndarray:
    groups = joined(images, near_sets(images)).groups
    return np.arange(len(images)) if groups is None else groups
