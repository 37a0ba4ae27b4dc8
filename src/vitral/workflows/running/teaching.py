"""The teacher of `vitral pretrain --method distill`: its features, computed in every step or once and kept.

With `Run.teacher_views` the random crops of an image repeat after so many epochs. Then the features of every crop are
computed before the first step, in batches that depend on the images alone, and kept in the cache of pixels.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vitral.console import counting
from vitral.data.loader import Batches, Progress
from vitral.data.pixel_cache import Builder, Entry, PixelCache, pixels_key, title_of
from vitral.data.prepared import Images
from vitral.device import Machine
from vitral.errors import RunError
from vitral.kernels import reference_ops
from vitral.model.registry import config_to_json
from vitral.pretraining.distill import FeatureTeacher, KeptFeatures, as_rows
from vitral.training.options import Run
from vitral.weights import native
from vitral.weights.loaded import Loaded

if TYPE_CHECKING:
    from vitral.workflows.planning.job import Job
    from vitral.workflows.running.running import Running

FORMAT = 1
"""Version of the kept features; a new one invalidates all existing ones."""
BATCH = 64
"""Images that a teacher computes at a time: the last bits of features depend on it, so it is no option."""
MEASURED = 256
"""Images whose features give the mean and the deviation of each dimension."""
_ROUND = 16
"""Batches of each rank after which the first one writes."""


def feature_teacher(loaded: Loaded, run: Run, machine: Machine) -> FeatureTeacher:
    """Build the teacher of a run, in a precision that suits it."""
    own = machine.with_precision(run.precision, dim=loaded.weights.config.dim)
    teacher = FeatureTeacher.of(loaded.weights, own, loaded.reference)
    if run.plain:
        reference_ops(teacher.network)
    return teacher


def teacher_of_job(job: Job) -> FeatureTeacher:
    """Build the teacher of a job that has one."""
    assert job.teacher is not None
    return feature_teacher(job.teacher, job.run, job.machine)


def measured_features(job: Job, teacher: FeatureTeacher) -> Tensor:
    """Features (n, D) of some training images, evenly spread over the split and not cropped."""
    some, device = job.dataset["train"].spread(MEASURED), job.machine.device
    batches = Batches(some, job.run.preprocessing, batch_size=BATCH, device=device, residency="memory")
    return torch.cat([teacher(batch.images) for batch in batches.epoch()])


def views_of(run: Run) -> int:
    """Number of views for which features are kept."""
    return min(run.teacher_views, run.epochs)


def kept_features(running: Running) -> KeptFeatures | None:
    """Return the features of all views, computed if they are not in the cache; None if every step computes its own.

    Ranks share the work. Raises `RunError` if the cache cannot be written.
    """
    ranks, count = running.ranks, views_of(running.job.run)
    if not count:
        return None
    views = _Views(running, PixelCache(), running.batches["train"])
    known = ranks.share(lambda: [views.find(view) is not None for view in range(count)])
    missing = [view for view in range(count) if not known[view]]
    if missing:
        running.console.print(f"the teacher computes the features of {len(missing)} views of each image", style="dim")
    with counting(running.console, "teacher's features", len(missing) * len(views)) as progress:
        for view in missing:
            views.compute(view, progress)
    found = [views.find(view) for view in range(count)]
    if None in found:
        raise RunError(
            "the teacher's features are not in the cache",
            where=views.cache.folder,
            why="another machine or program keeps it elsewhere, or has cleared it",
            hint=_ONLINE,
        )
    return KeptFeatures([one for one in found if one is not None])


_ONLINE = "a new run with --teacher-views 0 computes them in every step"


@dataclass(frozen=True, eq=False)
class _Views:
    """The views of a run's training images, as rows of the cache."""

    running: Running
    cache: PixelCache
    batches: Batches

    def __len__(self) -> int:
        return len(self.batches.split)

    @cached_property
    def key(self) -> str:
        """Hash of everything that determines the features but the number of the view."""
        job, batches = self.running.job, self.batches
        assert job.teacher is not None
        weights = job.teacher.weights
        settings: dict[str, object] = {
            "format": FORMAT,
            "teacher": native.digest(weights.state),
            "network": config_to_json(weights.config),
            "seed": batches.seed,
            "plain": job.run.plain,
            "precision": self.teacher.machine.precision,
            "sees": weights.preprocessing.to_json(),
            "crops": Images(batches.split, batches.preprocessing, batches.augmentation).settings,
            "area": job.run.crop_area,
        }
        return pixels_key(batches.split, settings)

    @cached_property
    def teacher(self) -> FeatureTeacher:
        return teacher_of_job(self.running.job)

    def key_of(self, view: int) -> str:
        return hashlib.blake2b(f"{self.key} {view}".encode(), digest_size=20).hexdigest()

    def find(self, view: int) -> Entry | None:
        return self.cache.find(self.key_of(view), len(self))

    def compute(self, view: int, progress: Progress) -> None:
        """Compute a view on all ranks, and write it on the first one. Raises `RunError` if it cannot be written."""
        ranks, indices = self.running.ranks, np.arange(len(self))
        chunks = [indices[first : first + BATCH] for first in range(0, len(self), BATCH)]
        own = self._rows(view, chunks[ranks.number :: ranks.count])
        title = f"{title_of(self.batches.split.names)}, seen by {self.running.job.run.teacher}"
        with self.cache.build(self.key_of(view), len(self), title) if ranks.main else nullcontext() as builder:
            for _ in range(-(-len(chunks) // (_ROUND * ranks.count))):
                for rows in ranks.collect_in_turn(list(itertools.islice(own, _ROUND))) or ():
                    if builder is not None:
                        for row in rows:
                            builder.add(row)
                    progress(len(rows))
            ranks.share(lambda: self._finish(builder))

    def _rows(self, view: int, chunks: list[np.ndarray]) -> Iterator[Tensor]:
        for batch in self.batches.in_order(view, chunks):
            yield as_rows(self.teacher(batch.images))

    def _finish(self, builder: Builder | None) -> None:
        if builder is not None and builder.finish() is None:
            what = "the teacher's features cannot be kept"
            raise RunError(what, where=self.cache.folder, why=builder.failure, hint=_ONLINE)
