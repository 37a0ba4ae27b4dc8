"""The training loop, whole and visible.

Where a run stands is a `State`. Everything random follows from (seed, epoch, step), so a state that was saved at any
step goes on to the same bits as one that never stopped. On a GPU to nearly the same: some of its kernels add in the
order in which they happen to be done.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from vitral.data.loader import Batch, Batches
from vitral.device import Machine, seed_everything, synchronise
from vitral.errors import TrainingError
from vitral.training.objective import Objective
from vitral.training.optimizers import OptimizerSet
from vitral.training.run import Run
from vitral.training.schedule import learning_rate
from vitral.training.step import Step
from vitral.weights.files import read_tensors, write_tensors

Epoch = dict[str, Any]
"""One line of metrics.jsonl."""


@dataclass
class State:
    """Where a run stands: saved whole, restored whole."""

    model: nn.Module
    optimizer: OptimizerSet
    averaged: Averaged | None = None
    epoch: int = 0
    batch: int = 0  # batches of this epoch that are done
    step: int = 0  # steps of the optimizer in all
    sums: dict[str, Tensor] = field(default_factory=dict)  # of this epoch's metrics
    seconds: float = 0.0
    compile_seconds: float = 0.0  # that torch's compiler took of them
    history: list[Epoch] = field(default_factory=list)
    best: Epoch | None = None

    @property
    def evaluated(self) -> nn.Module:
        """The network that is validated and kept: the averaged one where there is one."""
        return self.model if self.averaged is None else self.averaged.module

    def save(self, path: Path, identity: Mapping[str, Any]) -> None:
        """Write everything, atomically. `identity` says which run this belongs to."""
        tensors = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        tensors |= {f"optimizer.{k}": v for k, v in self.optimizer.state().items()}
        tensors |= {f"sums.{k}": v for k, v in self.sums.items()}
        if self.averaged is not None:
            tensors |= {f"averaged.{k}": v.clone() for k, v in self.averaged.state_dict().items()}
        write_tensors(path, tensors, {"identity": dict(identity), **{name: getattr(self, name) for name in _STANDS}})

    def load(self, path: Path) -> dict[str, Any]:
        """Go back to what `save` wrote; the identity that it was given."""
        tensors, header = read_tensors(path)
        device = next(self.model.parameters()).device

        def part(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        self.model.load_state_dict(part("model."))
        self.optimizer.load_state(part("optimizer."))
        if self.averaged is not None:
            self.averaged.load_state_dict(part("averaged."))
        self.sums = {k: v.to(device) for k, v in part("sums.").items()}
        for name in _STANDS:
            setattr(self, name, header[name] if name != "compile_seconds" else header.get(name, 0.0))  # it came later
        return dict(header["identity"])


_STANDS = ("epoch", "batch", "step", "seconds", "compile_seconds", "history", "best")
"""Plain numbers and lines of a state."""


class Listener:
    """What `fit` tells as it goes; the methods do nothing unless overridden."""

    def on_epoch_start(self, epoch: int, batches: int, done: int) -> None:
        """An epoch begins, or goes on after `done` batches."""

    def on_batch(self, loss: Tensor) -> None:
        """A batch is done. The loss is on the device: reading it waits for the device."""

    def on_epoch_end(self, line: Epoch, best: bool) -> None:
        """An epoch is done and validated."""

    def on_stop(self) -> None:
        """A person asked to stop: the step at hand is finished and the state saved, which may take a while."""


def fit(
    state: State,
    run: Run,
    machine: Machine,
    train: Batches,
    objective: Objective,
    validate: Callable[[nn.Module], dict[str, float]],
    *,
    save: Callable[[State, bool, bool], None],
    listener: Listener,
    size: Callable[[int], tuple[int, int]] | None = None,
    compiling: Callable[[], float] = lambda: 0.0,
    step: Step | None = None,
) -> None:
    """Train until `run.epochs`, from wherever `state` stands. Where pictures grow, `size` is theirs at a step, for the
    epoch's line. `step` is what is done with a batch, where that is not the plain `Step`.

    `save(state, best, must)` is called after each epoch, and where a person stops the run (`must`), which then raises
    `KeyboardInterrupt`. Raises `TrainingError` for a loss or gradient that is not finite, before it reaches the weights
    (on a GPU one step later, before anything is saved), with the names of the batch's files, and for weights that the
    last steps of an epoch made non-finite. `compiling()` tells the seconds that torch's compiler has worked so far,
    which `images_per_second` leaves out.
    """
    step = step or Step(state.model, state.optimizer, objective, machine, run)
    with stop_requested(listener.on_stop) as stopped:
        while state.epoch < run.epochs and not _no_better(state, run.early_stop):
            before = compiling()
            waited = _epoch(state, run, machine, train, step, listener, stopped)
            state.compile_seconds += compiling() - before
            _check_weights(state)
            if stopped.is_set():
                save(state, False, True)
                raise KeyboardInterrupt
            line = _close_epoch(state, run, train, validate, size, waited)
            best = state.best is line
            save(state, best, False)
            listener.on_epoch_end(line, best)


def _epoch(
    state: State,
    run: Run,
    machine: Machine,
    train: Batches,
    step: Step,
    listener: Listener,
    stopped: threading.Event,
) -> float:
    """Train to the end of the epoch; the seconds in which the step waited for its pictures."""
    state.model.train()
    watch = _FiniteWatch(train, machine.device)
    steps = math.ceil(len(train) / run.accumulate)
    listener.on_epoch_start(state.epoch, len(train), state.batch)
    started, waiting = time.perf_counter(), _Waiting(train.epoch(state.epoch, start=state.batch))
    for batch in waiting:
        seed_everything(run.seed, state.epoch, state.batch)
        watch.now = batch, state.epoch
        parts = _parts(state.batch, len(train), run.accumulate)
        ends = (state.batch + 1) % run.accumulate == 0 or state.batch + 1 == len(train)
        loss, metrics = step(batch, watch, parts=parts, lr=learning_rate(run, state.step, steps) if ends else None)
        _add(state.sums, {"train_loss": loss, **metrics}, len(batch.indices))
        state.batch += 1
        if ends:
            state.step += 1
            if state.averaged is not None:
                state.averaged.update_parameters(state.model)
            if stopped.is_set():
                break
        listener.on_batch(loss)
    watch.close()
    synchronise(machine.device)  # the last step may not be done
    state.seconds += time.perf_counter() - started
    return waiting.seconds


class _Waiting(Iterator[Batch]):
    """Batches, and the seconds that were waited for them."""

    def __init__(self, batches: Iterator[Batch]):
        self.batches, self.seconds = batches, 0.0

    def __next__(self) -> Batch:
        started = time.perf_counter()
        try:
            return next(self.batches)
        finally:
            self.seconds += time.perf_counter() - started


def _parts(batch: int, batches: int, accumulate: int) -> int:
    """Batches in the step that `batch` belongs to; the last step of an epoch may have fewer."""
    first = batch - batch % accumulate
    return min(accumulate, batches - first)


def _add(sums: dict[str, Tensor], metrics: Mapping[str, Tensor], count: int) -> None:
    for name, value in {**metrics, "count": torch.ones((), device=next(iter(metrics.values())).device)}.items():
        precise = value.double() if value.device.type != "mps" else value.float()  # Apple GPUs have no fp64
        sums[name] = sums.get(name, 0) + precise * count


def _close_epoch(
    state: State,
    run: Run,
    train: Batches,
    validate: Callable[[nn.Module], dict[str, float]],
    size: Callable[[int], tuple[int, int]] | None,
    waited: float,
) -> Epoch:
    """Validate, write the epoch's line into the history, and stand at the start of the next epoch."""
    started = time.perf_counter()
    means = {name: float(value / state.sums["count"]) for name, value in state.sums.items() if name != "count"}
    images = int(state.sums["count"])
    compiling = state.compile_seconds - sum(line.get("compile_seconds", 0.0) for line in state.history)
    training_seconds = state.seconds - sum(line["seconds"] for line in state.history) - compiling
    measured = validate(state.evaluated)
    state.seconds += time.perf_counter() - started
    steps = math.ceil(len(train) / run.accumulate)
    line: Epoch = {
        "epoch": state.epoch + 1,
        "step": state.step,
        "images_seen": images + (state.history[-1]["images_seen"] if state.history else 0),
        **means,
        **measured,
        "lr": learning_rate(run, state.step - 1, steps),
        **({"image_size": list(size(state.step - 1))} if size else {}),
        "images_per_second": images / max(training_seconds, 1e-9),
        "waited": min(1.0, waited / max(training_seconds, 1e-9)),
        "seconds": state.seconds - sum(line["seconds"] for line in state.history),
        **({"compile_seconds": compiling} if compiling else {}),
    }
    state.history.append(line)
    if state.best is None or _score(line) >= _score(state.best):
        state.best = line
    state.epoch, state.batch, state.sums = state.epoch + 1, 0, {}
    return line


def _score(line: Epoch) -> tuple[float, float]:
    """Better accuracy first, then lower loss; without validation, the later epoch."""
    return line.get("val_accuracy", 0.0), -line.get("val_loss", 0.0)


def _no_better(state: State, patience: int | None) -> bool:
    return bool(patience and state.best and state.epoch - state.best["epoch"] >= patience)


_AT_ONCE = ("cpu", "mps")
"""Devices whose numbers are read at each step."""


class _FiniteWatch:
    """Stops at the first loss or gradient that is not finite, without making a GPU wait.

    On a CPU the number is there already. On a GPU it is copied as the device goes and read a batch later.
    """

    def __init__(self, train: Batches, device: torch.device):
        self.train, self.device, self.late = train, device, device.type not in _AT_ONCE
        self.pending: list[tuple[str, Tensor, torch.cuda.Event, Batch, int]] = []
        self.now: tuple[Batch, int]
        """The batch, and its epoch, that the numbers are of."""

    def loss(self, value: Tensor) -> None:
        self.close()
        self._look("loss", value, *self.now)

    def gradient(self, norm: Tensor) -> None:
        self._look("gradient", norm, *self.now)

    def close(self) -> None:
        """Judge what is still to be judged."""
        pending, self.pending = self.pending, []
        for what, value, event, batch, epoch in pending:
            event.synchronize()
            self._judge(what, float(value), batch, epoch)

    def _look(self, what: str, value: Tensor, batch: Batch, epoch: int) -> None:
        if self.late:
            copy = value.detach().to("cpu", non_blocking=True)
            self.pending.append((what, copy, _recorded_event(self.device), batch, epoch))
        else:
            self._judge(what, float(value.detach()), batch, epoch)

    def _judge(self, what: str, value: float, batch: Batch, epoch: int) -> None:
        if math.isfinite(value):
            return
        stopped = "a batch later" if self.late else "before the step"
        names: Sequence[str] = [self.train.split.names[int(i)] for i in batch.indices]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise TrainingError(
            f"the {what} is {value} in epoch {epoch + 1}; stopped {stopped}",
            where=", ".join(names[:5]) + more,
            why="a learning rate too high, or damaged pictures or labels in this batch",
            hint="a lower --lr, or --precision fp32; the best weights of earlier epochs are saved",
        )


def _recorded_event(device: torch.device) -> torch.cuda.Event:
    """What is over when this GPU has done all that was asked of it until now."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def _check_weights(state: State) -> None:
    """A step may break the weights and no later loss tell: what is not finite is never saved."""
    with torch.no_grad():
        fine = {name: p.isfinite().all() for name, p in state.model.named_parameters()}
        whole: list[bool] = torch.stack([*fine.values()]).tolist()  # the device is waited for once, not for each
    if bad := [name for name, good in zip(fine, whole, strict=True) if not good]:
        raise TrainingError(
            f"weights are no longer finite in epoch {state.epoch + 1}: {bad[0]} and {len(bad) - 1} more",
            why="a learning rate too high, or gradients that are not clipped",
            hint="a lower --lr, or --clip 1; the best weights of earlier epochs are saved",
        )


@contextmanager
def stop_requested(tell: Callable[[], None] = lambda: None) -> Iterator[threading.Event]:
    """An event that Ctrl-C (or SIGTERM) sets, so that a step is finished before the run stops; twice stops at once.
    `tell` is called the first time.
    """
    event = threading.Event()

    def handler(number: int, frame: object) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()
        tell()

    if threading.current_thread() is not threading.main_thread():  # signals belong to the main thread
        yield event
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class Averaged(AveragedModel):
    """A network whose weights, and what its norms know of batches, are an exponential moving average of another's. Its
    memory grows with the updates t that were made, (1 + t) / (10 + t), up to `decay`.

    AveragedModel's own update copies its counter to the device at every step, for which a GPU is waited.
    """

    def __init__(self, model: nn.Module, decay: float):
        super().__init__(model)
        self.decay = decay

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Take in the weights as they are now."""
        self.n_averaged += 1
        updates = int(self.n_averaged)  # on the CPU
        memory = min(self.decay, (1 + updates) / (10 + updates)) if updates > 1 else 0.0
        torch._foreach_lerp_(_numbers(self.module), _numbers(model), 1 - memory)


def _numbers(model: nn.Module) -> list[Tensor]:
    """What can be averaged: not a norm's count of batches."""
    return [each for each in (*model.parameters(), *model.buffers()) if each.is_floating_point()]
