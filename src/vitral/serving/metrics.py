"""Metrics for Prometheus. Every application has its own registry; labels have few values, never a client's text.

Workers write theirs to files, which each of them adds up: all report the same, of all of them together.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, values
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Part:
    """The part of a worker: one of several processes, with the folder of their metrics."""

    index: int
    count: int
    folder: Path


def forget_gauges(folder: Path, index: int) -> None:
    """Drop the gauges of a worker that has ended; its counts stay, and its successor goes on counting."""
    mark_process_dead(index, str(folder))


class Metrics:
    """The metrics of one application, or of a worker among others."""

    def __init__(self, part: Part | None = None) -> None:
        self.part = part
        if part is not None:
            _share(part)
        self.registry = known = CollectorRegistry()
        task = ("model", "task")

        def seconds(name: str, about: str, labels: Sequence[str] = ()) -> Histogram:
            return Histogram(name, about, labels, buckets=_SECONDS, registry=known)

        def count(name: str, about: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(name, about, labels, registry=known)

        def gauge(name: str, about: str, mode: Any, labels: Sequence[str] = ()) -> Gauge:
            return Gauge(name, about, labels, registry=known, multiprocess_mode=mode)

        self.requests = count("vitral_requests", "Requests answered.", ("route", "method", "status"))
        self.seconds = seconds("vitral_request_seconds", "Time to answer.", ("route",))
        self.in_flight = gauge("vitral_requests_in_flight", "Requests being answered.", "livesum")
        self.problems = count("vitral_problems", "Requests refused, by problem.", ("problem",))
        self.abandoned = count("vitral_requests_abandoned", "Requests whose client left.")
        self.images = count("vitral_images", "Images computed.", task)
        self.batches = Histogram("vitral_batch_images", "Images of a batch.", task, buckets=_SIZES, registry=known)
        self.compute = seconds("vitral_batch_seconds", "Time to compute a batch.", task)
        self.waited = seconds("vitral_queue_seconds", "Time that an image waits for its batch.", task)
        self.queue = gauge("vitral_queue_images", "Images accepted and not yet answered.", "livesum", ("model",))
        self.decode = seconds("vitral_decode_seconds", "Time to decode an image.")
        self.reloads = count("vitral_reloads", "Models reloaded or refused.", ("model", "result"))
        labels = ("model", "version", "engine", "precision")
        self.model = gauge("vitral_model_info", "Models that answer.", "livemax", labels)
        self.draining = gauge("vitral_draining", "1 while the server ends its last requests.", "livemax")

    def forget_model(self, labels: Sequence[str]) -> None:
        """Drop a model that answers no more; of workers, set it to 0."""
        if self.part is None:
            self.model.remove(*labels)
        else:
            self.model.labels(*labels).set(0)

    def text(self) -> bytes:
        """All of them, in Prometheus's text format."""
        if self.part is None:
            return generate_latest(self.registry)
        together = CollectorRegistry()
        MultiProcessCollector(together, str(self.part.folder))
        for _ in range(_ATTEMPTS):
            try:
                return generate_latest(together)
            except (struct.error, FileNotFoundError):  # another worker is about to write or to remove the file
                continue
        return generate_latest(self.registry)


_ATTEMPTS = 5


def _share(part: Part) -> None:
    """Let metrics made from now on be written to the folder, under the index of the worker.

    prometheus_client would decide by the environment when it is imported, and name files by process: a worker that is
    replaced again and again would leave many.
    """
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(part.folder)
    values.ValueClass = values.MultiProcessValue(lambda: part.index)
