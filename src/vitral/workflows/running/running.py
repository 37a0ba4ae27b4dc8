"""A job in execution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from rich.console import Console

from vitral.data.checks.fingerprint import digest
from vitral.data.images.canvas import from_canvases
from vitral.data.loader import Batches
from vitral.device import seeded
from vitral.distributed.ranks import ALONE, Ranks
from vitral.distributed.strategies import Strategy
from vitral.training.callbacks import Callback
from vitral.training.loop import State
from vitral.training.run_folder import RunFolder
from vitral.workflows.planning.job import Job


@dataclass(frozen=True)
class Running:
    """A job in execution."""

    job: Job
    folder: RunFolder
    console: Console
    command: str
    batches: Mapping[str, Batches]
    state: State
    callback: Callback
    strategy: Strategy
    ranks: Ranks = ALONE

    @cached_property
    def trained_on(self) -> str:
        """Digest of the names and labels of the readable training images."""
        return digest(self.job.dataset["train"], self.job.dataset.classes)

    def samples(self, count: int) -> list[tuple[np.ndarray, str]]:
        """Augment the first `count` training images of the first epoch: uint8 (H, W, C) with their labels.

        Mixup, CutMix and random erasing are left out: they act on standardized images, whose labels they mix.
        """
        batches, dataset = self.batches["train"], self.job.dataset
        if batches.augmentation is None:
            return []
        batch = next(iter(batches.epoch(0)))
        some = batch.images[:count]
        parts = [image[None] for image in from_canvases(some)] if batches.preprocessing.native else [some]
        with seeded(batches.seed), torch.no_grad():
            pixels = [image for part in parts for image in batches.augmentation.pixels(part)]
        images = [image.permute(1, 2, 0).cpu().numpy() for image in pixels]
        texts = [dataset.targets.describe(label, dataset.classes) for label in batch.labels[:count].cpu().numpy()]
        return list(zip(images, texts, strict=True))
