"""The training step: loss, backward, optimizer; eager, or as a captured CUDA graph that a GPU replays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vitral.data.loader import Batch
from vitral.device import Machine
from vitral.distributed.strategies import Strategy
from vitral.distributed.tensors import whole
from vitral.epoch_metrics import GRADIENT_NORM
from vitral.errors import TrainingError
from vitral.kernels.cuda_graphs import Capture, CapturedGraph, Inputs, SideStream, signature_of
from vitral.training.objectives.objective import Objective, TwoPartObjective
from vitral.training.optimizer_set import OptimizerSet
from vitral.training.optimizers import rule_of
from vitral.training.options import Run

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


class Monitor(Protocol):
    """Checks the loss and the gradient norm of each batch."""

    def loss(self, value: Tensor) -> None: ...
    def gradient(self, norm: Tensor) -> None: ...


class NoMonitor:
    """Monitor that checks nothing: for benchmarks and trial steps."""

    def loss(self, value: Tensor) -> None: ...
    def gradient(self, norm: Tensor) -> None: ...


class Step:
    """An eager training step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerSet,
        objective: Objective,
        machine: Machine,
        run: Run,
        *,
        strategy: Strategy | None = None,
    ):
        self.strategy = strategy or Strategy(model)
        self.model, self.optimizer, self.objective = self.strategy.module, optimizer, objective
        self.machine, self.clip = machine, run.clip

    def __call__(self, batch: Batch, monitor: Monitor, *, parts: int = 1, lr: float | None = None) -> LossAndMetrics:
        """Compute loss and metrics, and run backward. With `lr` the optimizer steps; without it gradients accumulate
        for the step's remaining micro-batches, `parts` in total. Metrics of a whole step come with its last one.
        """
        with self.strategy.micro_batch(last=lr is not None):
            with self.machine.autocast():
                loss, metrics = self.objective(self.model, batch)
            monitor.loss(loss)
            self.strategy.scaled(loss, parts).backward()
        if lr is not None:
            norm = whole(self._clipped_norm())
            if self.clip:
                monitor.gradient(norm)
            metrics = {**metrics, GRADIENT_NORM.key: norm}
            self.optimizer.set_lr(lr)
            self.optimizer.step()
        return loss.detach(), metrics

    def _clipped_norm(self) -> Tensor:
        """Clip the gradient, and return the norm () that it had before."""
        parameters = self.optimizer.parameters
        if self.clip:
            return nn.utils.clip_grad_norm_(parameters, self.clip)
        return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


WARM_UP = 3
"""Eager steps of each batch shape before one is captured."""


def can_capture(run: Run, device: torch.device) -> tuple[bool, str]:
    """Decide whether the steps of a run can be captured; return the decision and the reason."""
    if device.type != "cuda":
        return False, "CUDA graphs need an NVIDIA GPU"
    if run.accumulate > 1:
        return False, "steps with gradient accumulation are not captured"
    if not rule_of(run.optimizer).capturable:
        return False, f"not tested with {run.optimizer.rpartition(':')[2]}"
    return True, "the whole step is replayed as one CUDA graph"


class CapturedStep(Step):
    """A step captured as a CUDA graph, except for augmentation.

    After `WARM_UP` eager steps of a batch shape the next one is captured, and replayed from then on. Learning rates are
    fp32 tensors on the device. Without memory for a graph, steps stay eager, and `tell` gets a message;
    `TrainingError` for a step that cannot be captured.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerSet,
        objective: TwoPartObjective,
        machine: Machine,
        run: Run,
        *,
        tell: Callable[[str], None] = lambda line: None,
        record: Capture | None = None,
    ):
        super().__init__(model, optimizer, objective, machine, run)
        self.two_part, self.tell = objective, tell
        self._side_stream = SideStream(machine.device)
        self._capture = record or self._side_stream.record
        self._steps: Counter[object] = Counter()
        self._graphs: dict[object, CapturedGraph | None] = {}
        optimizer.keep_rates_on_device()

    def __call__(self, batch: Batch, monitor: Monitor, *, parts: int = 1, lr: float | None = None) -> LossAndMetrics:
        if parts > 1 or lr is None:
            raise ValueError("steps with gradient accumulation are not captured")
        with self.machine.autocast():  # for a teacher
            inputs = self.two_part.prepare(batch)
        self.optimizer.set_lr(lr)
        loss, metrics = self._compute(inputs)
        monitor.loss(loss)  # synchronizes with the previous step: only now, so that the device has work queued
        if self.clip:
            monitor.gradient(metrics[GRADIENT_NORM.key])
        return loss, metrics

    def _compute(self, inputs: Inputs) -> LossAndMetrics:
        """Replay the graph for these shapes and dtypes, capture it, or run an eager step on the side stream."""
        key = signature_of(inputs)
        self._steps[key] += 1
        if self._steps[key] > WARM_UP and key not in self._graphs:
            self._graphs[key] = self._captured(inputs)
        if graph := self._graphs.get(key):
            loss, metrics = graph(inputs)  # the next replay overwrites these tensors
            return loss.clone(), {name: value.clone() for name, value in metrics.items()}
        with self._side_stream.active():
            return self._full_step(*inputs)

    def _captured(self, inputs: Inputs) -> CapturedGraph | None:
        try:
            return CapturedGraph.of(self._full_step, inputs, self._capture)
        except torch.OutOfMemoryError:
            self.optimizer.drop_gradients()
            self.tell("not enough memory to capture the step as a CUDA graph: steps run kernel by kernel")
            return None
        except RuntimeError as error:  # torch's allocator and random number state may be inconsistent now
            why = " ".join(str(error).split())[:200]
            raise TrainingError("the step cannot be captured as a CUDA graph", why=why, hint="--no-graphs") from error

    def _full_step(self, *inputs: Any) -> LossAndMetrics:
        """Forward, backward and optimizer step, without synchronizing with the device."""
        with self.machine.autocast():
            loss, metrics = self.two_part.loss(self.model, *inputs)
        loss.backward()
        norm = self._clipped_norm()
        self.optimizer.step()
        return loss.detach(), {**metrics, GRADIENT_NORM.key: norm}


def step_of(
    model: nn.Module,
    optimizer: OptimizerSet,
    objective: TwoPartObjective,
    machine: Machine,
    run: Run,
    tell: Callable[[str], None] = lambda line: None,
    strategy: Strategy | None = None,
) -> Step:
    """The step of a run: captured with `Run.graphs` on a CUDA device, else eager."""
    if run.graphs and machine.device.type == "cuda":
        return CapturedStep(model, optimizer, objective, machine, run, tell=tell)
    return Step(model, optimizer, objective, machine, run, strategy=strategy)
