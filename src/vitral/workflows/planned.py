"""The parts of a plan as objects, for a training loop of one's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitral.console import Described, stderr
from vitral.data import DataSet
from vitral.data.dataset import Loader
from vitral.data.loop import loader_of
from vitral.data.tables_in_memory import Examples, as_path
from vitral.data.targets import targets_of
from vitral.device import global_generators, plain_modes, seed_everything
from vitral.errors import UsageError
from vitral.inference.predictor import Predictor
from vitral.kinds import checked
from vitral.model import Network
from vitral.training.optimizer_set import OptimizerSet
from vitral.training.options import Run, checked_options
from vitral.training.plan import Choice
from vitral.training.schedule import learning_rate
from vitral.training.signatures import OPTIONS, with_listing
from vitral.wording import flag
from vitral.workflows.learning_rates import RangeTest, find_lr_of
from vitral.workflows.planning.job import Job
from vitral.workflows.planning.plan import plan_run
from vitral.workflows.running.build import initial_model, objective_of
from vitral.workflows.tasks import task_of


class Schedule:
    """The learning rate of a plan, step by step: linear warm-up, then the decay of `Run.schedule`."""

    def __init__(self, run: Run, optimizer: OptimizerSet, steps: int):
        """`steps`: optimizer steps of an epoch. The rate of the first step is set at once."""
        self.run, self.optimizer, self.steps, self.number = run, optimizer, steps, 0
        optimizer.set_lr(self.lr)

    @property
    def lr(self) -> float:
        """The learning rate of the next step, before each group's factor."""
        return learning_rate(self.run, self.number, self.steps)

    def step(self) -> None:
        """Set the learning rate of the next step; call it after `optimizer.step()`."""
        self.number += 1
        self.optimizer.set_lr(self.lr)


@dataclass(frozen=True, eq=False, repr=False)
class Planned(Described):
    """A plan that was not carried out: its options with their reasons, its data in splits, and its parts.

    Example:
        planned = vitral.plan("photos/")
        print(planned.run.lr, [choice.reason for choice in planned.choices])
    """

    job: Job

    @property
    def run(self) -> Run:
        """Every option."""
        return self.job.run

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The choices of the plan with their reasons."""
        return self.job.plan.choices

    @property
    def data(self) -> DataSet:
        """The images in the splits of the run: train, and val and test if there are any."""
        return self.job.dataset

    def model(self) -> Network:
        """Return a new network on the plan's device, with the initial weights and frozen parameters of the plan."""
        with global_generators():
            seed_everything(self.run.seed)
            model = initial_model(self.job)
        model.checkpointing = self.run.checkpointing
        return model

    def optimizer(self, model: nn.Module) -> OptimizerSet:
        """Return the optimizer of the trainable parameters, with the plan's groups: `step` also frees the gradients."""
        return OptimizerSet(model, self.run)

    def schedule(self, optimizer: OptimizerSet) -> Schedule:
        """Return the schedule of the learning rate, which is stepped after each step of the optimizer."""
        images = len(self.data["train"])
        batches = max(1, images // min(self.run.batch_size, images))
        return Schedule(self.run, optimizer, math.ceil(batches / self.run.accumulate))

    def loader(self, split: str = "train") -> Loader:
        """Return batches of (images, labels) on the plan's device: of training images shuffled and augmented."""
        training = split == "train"
        return loader_of(
            self.data,
            split,
            preprocessing=self.run.preprocessing,
            batch_size=self.run.batch_size,
            shuffle=training,
            augmentation=self.run.augmentation if training else None,
            device=self.job.machine.device,
            seed=self.run.seed,
            workers=self.run.workers,
        )

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the task () with the plan's options, such as label smoothing and class weights.

        Raises `UsageError` for a plan whose loss needs more than logits and labels, such as a teacher.
        """
        loss: Tensor = self._objective.loss(lambda images: logits, None, labels, None)[0]
        return loss

    @cached_property
    def _objective(self) -> Any:
        run = self.run
        needs = {
            "teacher": run.teacher,
            "pack": run.pack,
            "patch_sizes": run.patch_sizes,
            "task": targets_of(run.task).sequence,
        }
        if found := [name for name, value in needs.items() if value]:
            why = f"with {flag(found[0])} it needs the images, too"
            raise UsageError("the loss of this plan is not a function of logits and labels", why=why)
        return objective_of(self.job)

    def find_lr(self) -> RangeTest:
        """Train a copy of the network for 100 steps at growing learning rates; try the rate that the result suggests.

        Raises `UsageError` for a recipe that does not train in steps.
        """
        return find_lr_of(self.job, stderr(quiet=True))

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context for forward passes in the plan's precision."""
        return self.job.machine.autocast()

    def predictor(self, model: Network) -> Predictor:
        """Return the network with the plan's preprocessing and classes, for `vitral.evaluate` and `vitral.explain`."""
        output = task_of(self.run.task).output(self.data)
        return Predictor(
            model, self.run.preprocessing, self.data.classes, machine=self.job.machine, engine="plain", output=output
        )

    def described(self) -> Mapping[str, str]:
        """Return the facts that `repr` and notebooks show, as a dict from name to text."""
        run = self.run
        return {"model": run.model, "data": run.data, "recipe": run.recipe, "epochs": f"{run.epochs} epochs"}

    def _repr_html_(self) -> str:
        return self.job.plan._repr_html_()


@with_listing
@partial(checked, but=("data",), options=OPTIONS)
def plan(data: str | Path | DataSet | Examples, **options: object) -> Planned:
    """Plan a run as `vitral.train` does, train nothing, and return its parts for a loop of your own.

    Nothing is written.

    Args:
        data: As for `vitral.train`.
        options: Those of `vitral.train`, which are listed below.

    Returns:
        The plan with its reasons, and its network, optimizer, schedule, loss and batches as objects.

    Raises:
        UsageError: An option has a wrong name or value, or does not fit the others.
        DataError: The images cannot be read, or the labels are not clear.

    Example:
        planned = vitral.plan("photos/", epochs=5)
        model, train = planned.model(), planned.loader("train")
        optimizer = planned.optimizer(model)
        schedule = planned.schedule(optimizer)
    """
    given = checked_options({name: value for name, value in options.items() if value is not None})
    with plain_modes(), global_generators():
        return Planned(plan_run({**given, "data": as_path(data)}))
