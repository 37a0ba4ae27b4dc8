"""The training loop, in one file.

The progress of a run is a `State`. All random numbers are a function of (seed, epoch, batch), so a run resumed from a
state saved at any step reproduces the bits of an uninterrupted run. On a GPU it does so approximately: some kernels add
in nondeterministic order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from vitral.data.loader import Batch, Batches
from vitral.device import seed_everything, synchronize, widest
from vitral.distributed.ranks import ALONE, Ranks, Stopping
from vitral.distributed.tensors import all_like, local
from vitral.epoch_metrics import per_step
from vitral.errors import TrainingError
from vitral.kernels import random
from vitral.stopping import stop_requested
from vitral.training.callbacks import Callback, Epoch, Outputs, asks_for_logits
from vitral.training.optimizer_set import OptimizerSet, train_mode
from vitral.training.options import Run
from vitral.training.schedule import as_planned, learning_rate, planned_epochs
from vitral.training.step import Step
from vitral.weights.files import read_tensors, write_tensors


@dataclass
class State:
    """Complete state of a run, for saving and resuming."""

    model: nn.Module
    optimizer: OptimizerSet
    averaged: Averaged | Any = None  # or another that follows each step, with the same methods
    epoch: int = 0
    batch: int = 0  # completed batches of this epoch
    step: int = 0  # optimizer steps in total
    sums: dict[str, Tensor] = field(default_factory=dict)  # of this epoch's metrics
    seconds: float = 0.0
    compile_seconds: float = 0.0  # part of `seconds` spent in torch's compiler
    history: list[Epoch] = field(default_factory=list)
    best: Epoch | None = None

    @property
    def evaluated(self) -> nn.Module:
        """The network to validate and save: the averaged one, if any; of pretraining, the part that is kept."""
        model = self.model if self.averaged is None else self.averaged.module
        return getattr(model, "kept", model)

    def save(self, path: Path, identity: Mapping[str, object], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Write the state atomically. `identity` identifies the run; `tensors` are the whole ones of all ranks."""
        tensors = self.tensors() if tensors is None else tensors
        write_tensors(path, tensors, {"identity": dict(identity), **{name: getattr(self, name) for name in _FIELDS}})

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint by name; of a network that ranks share, parts of them."""
        tensors = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        tensors |= {f"optimizer.{k}": v for k, v in self.optimizer.state().items()}
        tensors |= {f"sums.{k}": v for k, v in self.sums.items()}
        if self.averaged is not None:
            tensors |= {f"averaged.{k}": v.clone() for k, v in self.averaged.state_dict().items()}
        return tensors

    def load(self, path: Path) -> dict[str, Any]:
        """Restore the state that `save` wrote; return its `identity`."""
        return self.restore(*read_tensors(path))

    def restore(self, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> dict[str, Any]:
        """`load` from the tensors and the header of the file."""
        device = next(self.model.parameters()).device

        def part(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        self.model.load_state_dict(all_like(part("model."), self.model.state_dict()))
        self.optimizer.load_state(part("optimizer."))
        if self.averaged is not None:
            self.averaged.load_state_dict(all_like(part("averaged."), self.averaged.state_dict()))
        self.sums = {k: v.to(device) for k, v in part("sums.").items()}
        for name in _FIELDS:
            setattr(self, name, header[name])
        return dict(header["identity"])


_FIELDS = ("epoch", "batch", "step", "seconds", "compile_seconds", "history", "best")
"""Fields of a state that are saved as JSON, in the header of a checkpoint."""


Score = Callable[[Epoch], tuple[float, float]]
"""Line of an epoch → its sort key: the largest is the best epoch, and of equal ones the latest."""


def best_accuracy(line: Epoch) -> tuple[float, float]:
    """Sort key: accuracy, then lower loss; without validation all epochs are equal, and the latest is the best."""
    return line.get("val_accuracy", 0.0), -line.get("val_loss", 0.0)


@dataclass(frozen=True)
class EpochEnd:
    """The work of a run at the end of each epoch."""

    validate: Callable[[nn.Module], Mapping[str, float]] = lambda model: {}
    """The network to save → metrics of the epoch's line."""
    save: Callable[[State, bool, bool], None] = lambda state, best, must: None
    """Called with the state, if the epoch is the best one, and if it must be saved: after a new plan, and at a stop."""
    score: Score = best_accuracy
    """Selects the best epoch, unless the run keeps the last one."""
    plan_again: Callable[[State], int | None] = lambda state: None
    """May return another total number of epochs, which rank 0 decides. It is a field of the epoch's line, and the
    schedules follow it from there on.
    """
    compiling: Callable[[], float] = lambda: 0.0
    """Seconds that torch's compiler has taken so far, which `images_per_second` leaves out."""


def fit(
    state: State,
    run: Run,
    train: Batches,
    step: Step,
    end: EpochEnd,
    *,
    listener: Callback,
    ranks: Ranks = ALONE,
) -> None:
    """Train from `state` until `run.epochs`, by `step` for each batch and `end` for each epoch.

    `ranks` train together: each calls this function with its own part of the batches.

    Raises `KeyboardInterrupt` after saving if the user stops the run. Raises `TrainingError` for a loss or gradient
    that is not finite, before it reaches the weights (on a GPU one step later, before anything is saved), with the
    names of the batch's files, and for weights that the last steps of an epoch made non-finite.
    """
    with stop_requested(listener.on_stop) as requested, _outputs_for(listener, step.model) as outputs:
        stopping = ranks.stopping(requested)
        while state.epoch < planned_epochs(run, state.history):
            if _should_stop_early(state, run.early_stop, end.score):
                break
            before, now = end.compiling(), as_planned(run, state.history)
            waited, stop = _epoch(state, now, train, step, listener, stopping, ranks, outputs)
            state.compile_seconds += end.compiling() - before
            _check_weights(state)
            state.sums = ranks.pool(state.sums)
            if stop or stopping.after_epoch():
                end.save(state, False, True)
                raise KeyboardInterrupt
            line = _close_epoch(state, now, train, end, waited)
            best = state.best is line
            if (epochs := ranks.share(lambda: end.plan_again(state))) is not None:
                line["epochs"] = epochs
            end.save(state, best, epochs is not None)
            listener.on_epoch_end(line, best and run.keep == "best")


@contextmanager
def _outputs_for(listener: Callback, model: nn.Module) -> Iterator[Outputs | None]:
    """Record the outputs of the network, if the listener asks for them."""
    outputs = Outputs(model) if asks_for_logits(listener) else None
    try:
        yield outputs
    finally:
        if outputs is not None:
            outputs.close()


def _epoch(
    state: State,
    run: Run,
    train: Batches,
    step: Step,
    listener: Callback,
    stopping: Stopping,
    ranks: Ranks,
    outputs: Outputs | None = None,
) -> tuple[float, bool]:
    """Train to the end of the epoch, or to the step after which the run shall stop.

    Return the seconds spent waiting for images, and if the run shall stop.
    """
    train_mode(state.model)
    monitor = _FiniteMonitor(train, step.machine.device)
    steps = math.ceil(len(train) / run.accumulate)
    listener.on_epoch_start(state.epoch, len(train), state.batch)
    started, batches = time.perf_counter(), _TimedBatches(train.epoch(state.epoch, start=state.batch))
    stop = False
    for batch in batches:
        seed_everything(run.seed, state.epoch, state.batch)
        monitor.now = batch, state.epoch
        # micro-batches of the step; the last step of an epoch may have fewer
        parts = min(run.accumulate, len(train) - (state.batch - state.batch % run.accumulate))
        ends = (state.batch + 1) % run.accumulate == 0 or state.batch + 1 == len(train)
        lr = learning_rate(run, state.step, steps) if ends else None
        with random.drawing(None if batch.rows is None else batch.rows.own):
            loss, metrics = step(batch, monitor, parts=parts, lr=lr)
        if outputs is not None:
            outputs.tell(listener, batch)
        _add(state.sums, {"train_loss": loss, **metrics}, batch, ranks)
        state.batch += 1
        if ends:
            state.step += 1
            if state.averaged is not None:
                state.averaged.update_parameters(state.model)
            ranks.at(state.epoch, state.step)
            if stop := stopping.after_step():
                break
        listener.on_batch(loss if batch.rows is None else loss / batch.rows.share)
    monitor.close()
    synchronize(step.machine.device)  # the last step may still be running
    state.seconds += time.perf_counter() - started
    return batches.seconds, stop


class _TimedBatches(Iterator[Batch]):
    """Batches, and the seconds spent waiting for them."""

    def __init__(self, batches: Iterator[Batch]):
        self.batches, self.seconds = batches, 0.0

    def __next__(self) -> Batch:
        started = time.perf_counter()
        try:
            return next(self.batches)
        finally:
            self.seconds += time.perf_counter() - started


def _add(sums: dict[str, Tensor], metrics: Mapping[str, Tensor], batch: Batch, ranks: Ranks) -> None:
    """Add metrics, weighted by the batch's images or each step alike, and the number of own images and of steps."""
    step = 1 / ranks.count  # so that all ranks together count a step once, also if their number changes in an epoch
    own = batch.total if batch.rows is None else len(batch.rows.own)
    device = metrics["train_loss"].device
    ones = torch.ones((), device=device)
    weighted = [(name, value, step if per_step(name) else batch.total) for name, value in metrics.items()]
    weighted.append(("count", ones, own))
    if any(map(per_step, metrics)):
        weighted.append((_STEPS, ones, step))
    for name, value, weight in weighted:
        sums[name] = sums.get(name, 0) + value.to(device, widest(device)) * weight


_STEPS = "steps"
"""The number of steps among the sums."""


def _means(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the means of an epoch's metrics. Without clipping, the norm of a finite gradient may be infinite: JSON has
    no such number.
    """
    means = {
        name: float(value / sums[_STEPS if per_step(name) else "count"])
        for name, value in sums.items()
        if name not in ("count", _STEPS)
    }
    return {name: mean for name, mean in means.items() if math.isfinite(mean)}


def _close_epoch(
    state: State,
    run: Run,
    train: Batches,
    end: EpochEnd,
    waited: float,
) -> Epoch:
    """Validate, append the epoch's line to the history, and advance the state to the next epoch."""
    started = time.perf_counter()
    means = _means(state.sums)
    images = int(state.sums["count"])
    compiling = state.compile_seconds - sum(line.get("compile_seconds", 0.0) for line in state.history)
    training_seconds = state.seconds - sum(line["seconds"] for line in state.history) - compiling
    measured = end.validate(state.evaluated)
    state.seconds += time.perf_counter() - started
    steps = math.ceil(len(train) / run.accumulate)
    fields: dict[str, object] = {
        "epoch": state.epoch + 1,
        "step": state.step,
        "images_seen": images + (state.history[-1]["images_seen"] if state.history else 0),
        **means,
        **measured,
        "lr": learning_rate(run, state.step - 1, steps),
        "images_per_second": images / max(training_seconds, 1e-9),
        "waited": min(1.0, waited / max(training_seconds, 1e-9)),
        "seconds": state.seconds - sum(line["seconds"] for line in state.history),
        **({"compile_seconds": compiling} if compiling else {}),
    }
    line = cast("Epoch", fields)
    if train.reconsider(line["images_per_second"], line["waited"]):
        line["residency"] = train.residency
    state.history.append(line)
    if state.best is None or run.keep == "last" or end.score(line) >= end.score(state.best):
        state.best = line
    state.epoch, state.batch, state.sums = state.epoch + 1, 0, {}
    return line


def _should_stop_early(state: State, patience: int | None, score: Score) -> bool:
    """True after `patience` epochs whose first value of `score` is not higher than that of an earlier one.

    The best epoch may be a later one: of equally good ones that with the lower loss.
    """
    if not patience or not any(name.startswith("val_") for line in state.history for name in line):
        return False
    values = [score(line)[0] for line in state.history]
    return state.epoch - state.history[values.index(max(values))]["epoch"] >= patience


_SYNCHRONOUS = ("cpu", "mps")
"""Devices whose values are read in the same step."""


class _FiniteMonitor:
    """Stop at the first loss or gradient that is not finite, without synchronizing a GPU.

    On a CPU the value is available at once. On a GPU it is copied asynchronously and read a batch later.
    """

    def __init__(self, train: Batches, device: torch.device):
        self.train, self.device, self.deferred = train, device, device.type not in _SYNCHRONOUS
        self.pending: list[tuple[str, Tensor, torch.cuda.Event, Batch, int]] = []
        self.now: tuple[Batch, int]
        """The current batch and epoch."""

    def loss(self, value: Tensor) -> None:
        self.close()
        self._submit("loss", value, *self.now)

    def gradient(self, norm: Tensor) -> None:
        self._submit("gradient", norm, *self.now)

    def close(self) -> None:
        """Check all pending values."""
        pending, self.pending = self.pending, []
        for what, value, event, batch, epoch in pending:
            event.synchronize()
            self._check(what, float(value), batch, epoch)

    def _submit(self, what: str, value: Tensor, batch: Batch, epoch: int) -> None:
        if self.deferred:
            copy = value.detach().to("cpu", non_blocking=True)
            self.pending.append((what, copy, _recorded_event(self.device), batch, epoch))
        else:
            self._check(what, float(value.detach()), batch, epoch)

    def _check(self, what: str, value: float, batch: Batch, epoch: int) -> None:
        if math.isfinite(value):
            return
        stopped = "a batch later" if self.deferred else "before the step"
        names: Sequence[str] = [self.train.split.names[int(i)] for i in batch.indices]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        what = f"the {what} is {value} in epoch {epoch + 1}; stopped {stopped}"
        why = "a learning rate too high, or damaged images or labels in this batch"
        hint = "a lower --lr, or --precision fp32" + _kept(epoch)
        raise TrainingError(what, where=", ".join(names[:5]) + more, why=why, hint=hint)


def _recorded_event(device: torch.device) -> torch.cuda.Event:
    """An event that completes when all work queued on this GPU so far is done."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def _check_weights(state: State) -> None:
    """Raise `TrainingError` for weights that are not finite, before they are saved.

    The last step of an epoch can break the weights without a later loss to reveal it.
    """
    with torch.no_grad():
        finite = {name: local(p).isfinite().all() for name, p in state.model.named_parameters()}
        flags: list[bool] = torch.stack([*finite.values()]).tolist()  # one synchronization for all
    if bad := [name for name, good in zip(finite, flags, strict=True) if not good]:
        raise TrainingError(
            f"weights are no longer finite in epoch {state.epoch + 1}: {bad[0]} and {len(bad) - 1} more",
            why="a learning rate too high, or gradients that are not clipped",
            hint="use a lower --lr, or --clip 1" + _kept(state.epoch),
        )


def _kept(epochs: int) -> str:
    return "; the best weights of earlier epochs are saved" if epochs else "; no epoch was completed, so none is saved"


class Averaged(AveragedModel):
    """Exponential moving average of a network's weights and of its norms' running statistics.

    The decay grows with the number of updates t as (1 + t) / (10 + t), up to `decay`. AveragedModel's own update copies
    its counter to the device at every step, which synchronizes with a GPU.
    """

    def __init__(self, model: nn.Module, decay: float):
        super().__init__(model)
        self.decay = decay

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Update the average with the current weights."""
        self.n_averaged += 1
        updates = int(self.n_averaged)  # on the CPU
        decay = min(self.decay, (1 + updates) / (10 + updates)) if updates > 1 else 0.0
        torch._foreach_lerp_(_float_tensors(self.module), _float_tensors(model), 1 - decay)


def _float_tensors(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers to average: all but integer ones, such as a norm's count of batches."""
    return [local(each) for each in (*model.parameters(), *model.buffers()) if each.is_floating_point()]
