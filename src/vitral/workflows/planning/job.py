"""A job: a plan with its data, network configuration, machine and weights."""

from __future__ import annotations

from dataclasses import dataclass

from vitral.data import DataSet
from vitral.device import Machine
from vitral.model import ModelConfig
from vitral.training.options import Run
from vitral.training.plan import Plan
from vitral.weights.loaded import Loaded


@dataclass(frozen=True)
class Job:
    """A run that is ready to execute."""

    plan: Plan
    dataset: DataSet
    config: ModelConfig
    machine: Machine
    init: Loaded | None = None
    """The initial weights, adapted to the data; None for random weights."""
    teacher: Loaded | None = None
    """The teacher network, if any; a reopened run loads it only when it resumes."""
    unreadable: tuple[str, ...] = ()
    """Names of the unreadable images that the quick check before planning found."""

    @property
    def run(self) -> Run:
        return self.plan.run
