"""Generators with threads may be closed anywhere by the garbage collector."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from images import MakeImages
from vitral.data import load
from vitral.data.checks.validate import _scan_chunks
from vitral.data.loader import _one_ahead
from vitral.inference.stream import stream


def predictions(photos: Path) -> Iterator[Any]:
    paths = sorted(photos.rglob("*.png"))
    return stream(paths, lambda *_: torch.zeros(1), lambda batch: batch.numpy(), 2)


def scans(photos: Path) -> Iterator[Any]:
    return _scan_chunks(load(str(photos))["train"])


def batches(photos: Path) -> Iterator[Any]:
    return _one_ahead(lambda index: torch.zeros(len(index)), [np.arange(2)] * 9)


@pytest.mark.parametrize("make", [predictions, scans, batches])
def test_an_abandoned_generator_does_not_wait_for_its_threads(make_images: MakeImages, make: Callable[..., Any]):
    """Closed within threading's own bookkeeping, where to join a thread would wait for a lock that is held there."""
    held = getattr(threading, "_shutdown_locks_lock", None)
    if held is None:
        pytest.skip("this Python has no such lock")
    generator = make(make_images({"a": 9, "b": 9}))
    next(generator)
    closed = threading.Event()

    def close() -> None:
        with held:
            generator.close()
        closed.set()

    threading.Thread(target=close, daemon=True).start()
    assert closed.wait(20)
