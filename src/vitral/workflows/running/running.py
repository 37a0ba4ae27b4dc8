"""A job in execution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from rich.console import Console

from vitral.data.checks.fingerprint import digest
from vitral.data.loader import Batches
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
