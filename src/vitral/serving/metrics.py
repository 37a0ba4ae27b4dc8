"""Metrics for Prometheus. Every application has its own registry; labels have few values, never a client's text."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The metrics of one application."""

    def __init__(self) -> None:
        self.registry = known = CollectorRegistry()
        task = ("model", "task")

        def seconds(name: str, about: str, labels: Sequence[str] = ()) -> Histogram:
            return Histogram(name, about, labels, buckets=_SECONDS, registry=known)

        def count(name: str, about: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(name, about, labels, registry=known)

        def gauge(name: str, about: str, labels: Sequence[str] = ()) -> Gauge:
            return Gauge(name, about, labels, registry=known)

        self.requests = count("vitral_requests", "Requests answered.", ("route", "method", "status"))
        self.seconds = seconds("vitral_request_seconds", "Time to answer.", ("route",))
        self.in_flight = gauge("vitral_requests_in_flight", "Requests being answered.")
        self.problems = count("vitral_problems", "Requests refused, by problem.", ("problem",))
        self.abandoned = count("vitral_requests_abandoned", "Requests whose client left.")
        self.images = count("vitral_images", "Images computed.", task)
        self.batches = Histogram("vitral_batch_images", "Images of a batch.", task, buckets=_SIZES, registry=known)
        self.compute = seconds("vitral_batch_seconds", "Time to compute a batch.", task)
        self.waited = seconds("vitral_queue_seconds", "Time that an image waits for its batch.", task)
        self.queue = gauge("vitral_queue_images", "Images accepted and not yet answered.", ("model",))
        self.decode = seconds("vitral_decode_seconds", "Time to decode an image.")
        self.reloads = count("vitral_reloads", "Models reloaded or refused.", ("model", "result"))
        labels = ("model", "version", "engine", "precision")
        self.model = gauge("vitral_model_info", "Models that answer.", labels)
        self.draining = gauge("vitral_draining", "1 while the server ends its last requests.")

    def text(self) -> bytes:
        """All of them, in Prometheus's text format."""
        return generate_latest(self.registry)
