"""Compute the batches of a table of predictions on the workers of a Ray cluster; this process writes it.

A batch is a task, which Ray starts again elsewhere if its worker ends. Rows are written in order, and a batch is
computed as by one process, with as many threads: the bytes of the table are the same.
"""

from __future__ import annotations

import os
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from vitral.errors import MissingExtraError, RunError, VitralError
from vitral.workflows.predict import PredictionFile
from vitral.workflows.row_file import Lines

RETRIES = 3
"""Times that a batch is computed again after its worker ended."""
AHEAD = 4
"""Batches for each worker that are computed before the first of them is written."""


class _Work(NamedTuple):
    """All that a worker needs to compute batches of a table."""

    name: str
    make: Callable[[], PredictionFile]
    origin: dict[str, Any]
    folder: str
    threads: int


def on_ray(make: Callable[[], PredictionFile], table: PredictionFile) -> Callable[[int], Iterator[Lines]]:
    """Return the function that yields the rows of `table` after so many kept ones, for `PredictionFile.write`.

    `make` makes the same table on a worker; Ray has to be able to pickle it. Raises `MissingExtraError` without Ray.
    """
    if find_spec("ray") is None:
        raise MissingExtraError("--engine ray needs Ray", why="ray", hint="pip install 'vitral[ray]'")
    work = _Work(uuid.uuid4().hex, make, table.origin(), os.getcwd(), torch.get_num_threads())
    return lambda kept: _batches(work, table, kept)


def _batches(work: _Work, table: PredictionFile, kept: int) -> Iterator[Lines]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ours = not ray.is_initialized()
    if ours:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        gpus = 1 if table.predictor.machine.device.type == "cuda" else 0
        task: Any = ray.remote(_lines).options(num_cpus=work.threads, num_gpus=gpus, max_retries=RETRIES)
        shared = ray.put(work)
        workers = max(1, int(ray.cluster_resources().get("CPU", 1)) // work.threads)
        waiting: deque[Any] = deque()
        for first in range(kept, table.images, table.batch_size):
            waiting.append(task.remote(shared, first))
            if len(waiting) > AHEAD * workers:
                yield _got(ray, waiting.popleft())
        while waiting:
            yield _got(ray, waiting.popleft())
    finally:
        if ours:
            ray.shutdown()


def _got(ray: Any, reference: Any) -> Lines:
    try:
        lines: Lines = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, VitralError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        why = " ".join(str(error).split())[:200]
        hint = "--resume keeps the rows that are written"
        raise RunError(f"a batch was lost {RETRIES + 1} times on Ray's workers", why=why, hint=hint) from None
    return lines


_tables: dict[str, PredictionFile] = {}


def _lines(work: _Work, first: int) -> Lines:
    """Compute the batch that begins with image `first`, on a worker."""
    if work.name not in _tables:
        os.chdir(work.folder)
        torch.set_num_threads(work.threads)
        table = work.make()
        table.check_origin(table.origin(), work.origin)
        _tables.clear()
        _tables[work.name] = table
    return _tables[work.name].batch(first)
