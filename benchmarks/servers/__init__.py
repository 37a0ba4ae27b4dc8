"""Servers of others, measured by `benchmarks.serving`: `python -m benchmarks.servers.NAME WEIGHTS PORT SIZE WAIT`.

Each serves the same weights, decodes by `Predictor.prepare` in as many threads as there are cores, and collects batches
of at most SIZE images for at most WAIT seconds. An image is the body of `POST /predict`; LitServe reads it as JSON.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from vitral.inference.predictor import Predictor


class Words(NamedTuple):
    """The words of the command line."""

    weights: str
    port: int
    size: int
    wait: float


def words() -> Words:
    """Parse the command line."""
    weights, port, size, wait = sys.argv[1:]
    return Words(weights, int(port), int(size), float(wait))


def best(row: np.ndarray, predictor: Predictor, count: int = 5) -> list[dict[str, Any]]:
    order = np.argsort(-row)[:count]
    return [{"class": predictor.classes[index], "probability": float(row[index])} for index in order]
