"""What is done with a batch: loss, gradient, the optimizer's step; one by one, or as a recording that a GPU repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vitral.data.loader import Batch
from vitral.device import Machine
from vitral.errors import TrainingError
from vitral.graphs import Aside, Inputs, Record, Recording, kinds_of
from vitral.training.objective import Halves, Objective
from vitral.training.optimizers import OptimizerSet
from vitral.training.run import Run

Learned = tuple[Tensor, dict[str, Tensor]]
"""Loss and metrics."""


class Watch(Protocol):
    """Judges the numbers of the batch that it was last told of."""

    def loss(self, value: Tensor) -> None: ...
    def gradient(self, norm: Tensor) -> None: ...


class Unwatched:
    """Judges nothing: for trials, whose numbers mean nothing."""

    def loss(self, value: Tensor) -> None: ...
    def gradient(self, norm: Tensor) -> None: ...


class Step:
    """One batch after the other, each part when its turn comes."""

    def __init__(self, model: nn.Module, optimizer: OptimizerSet, objective: Objective, machine: Machine, run: Run):
        self.model, self.optimizer, self.objective = model, optimizer, objective
        self.machine, self.clip = machine, run.clip

    def __call__(self, batch: Batch, watch: Watch, *, parts: int = 1, lr: float | None = None) -> Learned:
        """The loss and the metrics. With `lr` the optimizer steps, else gradients wait for the batches that belong to
        the same step, `parts` in all.
        """
        with self.machine.autocast():
            loss, metrics = self.objective(self.model, batch)
        watch.loss(loss)
        (loss / parts if parts > 1 else loss).backward()
        if lr is not None:
            if self.clip:
                watch.gradient(nn.utils.clip_grad_norm_(self.optimizer.parameters, self.clip))
            self.optimizer.set_lr(lr)
            self.optimizer.step()
        return loss.detach(), metrics


CAPTURABLE = ("adamw", "adam", "muon")
"""Optimizers whose steps are recorded; SGD's was not tried."""
WARM_UP = 3
"""Steps of each size that are done as always before one is recorded."""


def recordable(run: Run, device: torch.device) -> tuple[bool, str]:
    """Whether the steps of a run can be recorded, and why (not)."""
    if device.type != "cuda":
        return False, "only GPUs of NVIDIA's kind have CUDA graphs"
    if run.accumulate > 1:
        return False, "steps of several batches are done part by part"
    if run.optimizer not in CAPTURABLE:
        return False, f"not tried with {run.optimizer}"
    return True, "a step is asked for at once, not kernel by kernel"


class RecordedStep(Step):
    """The same on a GPU, but for what is shown (augmentation): after some steps of a size the next one is recorded as a
    CUDA graph, and from then on repeated. Its learning rates are fp32 numbers on the device. Where there is no memory
    for it steps go on as before, and `tell` is told; `TrainingError` for a step that cannot be recorded.
    """

    def __init__(
        self, model: nn.Module, optimizer: OptimizerSet, objective: Halves, machine: Machine, run: Run,
        *, tell: Callable[[str], None] = lambda line: None, record: Record | None = None,
    ):  # fmt: skip
        super().__init__(model, optimizer, objective, machine, run)
        self.halves, self.tell = objective, tell
        self._aside = Aside(machine.device)
        self._record = record or self._aside.record
        self._done: Counter[Any] = Counter()
        self._recordings: dict[Any, Recording | None] = {}
        optimizer.keep_rates_on_device()

    def __call__(self, batch: Batch, watch: Watch, *, parts: int = 1, lr: float | None = None) -> Learned:
        if parts > 1 or lr is None:
            raise ValueError("steps of several batches are not recorded")
        with self.machine.autocast():  # for a teacher
            shown = self.halves.shown(batch)
        self.optimizer.set_lr(lr)
        (loss, metrics), norm = self._compute(shown)
        watch.loss(loss)  # it waits for the step before: not earlier, or the device would have nothing to do
        if norm is not None:
            watch.gradient(norm)
        return loss, metrics

    def _compute(self, shown: Inputs) -> tuple[Learned, Tensor | None]:
        kind = kinds_of(shown)
        self._done[kind] += 1
        if self._done[kind] > WARM_UP and kind not in self._recordings:
            self._recordings[kind] = self._recorded(shown)
        if recording := self._recordings.get(kind):
            (loss, metrics), norm = recording(shown)  # of which the next call writes others to the same place
            kept = {name: value.clone() for name, value in metrics.items()}
            return (loss.clone(), kept), None if norm is None else norm.clone()
        with self._aside.there():
            return self._whole(*shown)

    def _recorded(self, shown: Inputs) -> Recording | None:
        try:
            return Recording.of(self._whole, shown, self._record)
        except torch.OutOfMemoryError:
            self.optimizer.drop_gradients()
            self.tell("there is no memory to record the step as a CUDA graph: it is done kernel by kernel")
            return None
        except RuntimeError as error:  # torch's memory and random numbers are not to be trusted any more
            why = " ".join(str(error).split())[:200]
            raise TrainingError("the step cannot be recorded as a CUDA graph", why=why, hint="--no-graphs") from error

    def _whole(self, *shown: Any) -> tuple[Learned, Tensor | None]:
        """From pictures to new weights; nothing in it waits for the device or reads a number of it."""
        with self.machine.autocast():
            loss, metrics = self.halves.judged(self.model, *shown)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.optimizer.parameters, self.clip) if self.clip else None
        self.optimizer.step()
        return (loss.detach(), metrics), norm


def step_of(
    model: nn.Module, optimizer: OptimizerSet, objective: Halves, machine: Machine, run: Run,
    tell: Callable[[str], None] = lambda line: None,
) -> Step:  # fmt: skip
    """What a run does with its batches: recorded where the run says so (`Run.graphs`), unless it goes on elsewhere."""
    if run.graphs and machine.device.type == "cuda":
        return RecordedStep(model, optimizer, objective, machine, run, tell=tell)
    return Step(model, optimizer, objective, machine, run)
