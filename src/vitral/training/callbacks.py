"""The protocol by which trackers, progress bars and a user's own code follow a run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from torch import Tensor, nn

from vitral.data.loader import Batch
from vitral.errors import UsageError, type_of


class Epoch(TypedDict, total=False):
    """One line of metrics.jsonl: what the code reads of it, beside the metrics of the task (`vitral.epoch_metrics`)."""

    epoch: int
    """From 1."""
    step: int
    """Optimizer steps so far."""
    images_seen: int
    train_loss: float
    gradient_norm: float
    val_loss: float
    val_accuracy: float
    val_cer: float
    val_map: float
    lr: float
    images_per_second: float
    waited: float
    """Share of the training time in which steps waited for images."""
    seconds: float
    """Training, compiling and validation."""
    compile_seconds: float
    residency: str
    """Place of the images from now on, if that changed."""
    epochs: int
    """New total number of epochs, if the run was planned again."""
    image_size: tuple[int, int]
    """Of training images that grow."""


Samples = Callable[[int], list[tuple[np.ndarray, str]]]
"""Number of images → augmented training images, uint8 (H, W, C), with their class names."""


@dataclass(frozen=True)
class RunStart:
    """The run that begins or continues."""

    folder: Path
    options: Mapping[str, Any]
    """The fields of `Run`, as in config.json."""
    history: Sequence[Epoch]
    """The epochs that are done: none in a new run."""
    samples: Samples
    model: nn.Module
    """The network in training. Freeze a part by `requires_grad_(False)`, and let it train later."""


class Callback:
    """Follow a run; every method does nothing unless overridden.

    The order is `on_run_start`, then for each epoch `on_epoch_start`, `on_logits` and `on_batch` for each batch,
    `on_epoch_end`, and at the end `on_run_end`. An exception that a method raises ends the run, which continues with
    `--resume`.
    """

    def on_run_start(self, run: RunStart) -> None:
        """Called once the run folder is open, before the first epoch."""

    def on_epoch_start(self, epoch: int, batches: int, done: int) -> None:
        """An epoch, counted from 0, begins, or continues after `done` of its batches."""

    def on_logits(self, batch: Batch, logits: Tensor) -> None:
        """Outputs (B, K) of the network for a batch of training, without gradients, on the device.

        `batch.images` are the network's input: augmented and standardized. `batch.labels` are as before mixup and
        CutMix, and `batch.indices` are numbers in the training split. A run whose callbacks override this method trains
        without torch.compile and CUDA graphs.
        """

    def on_batch(self, loss: Tensor) -> None:
        """A batch is done. The loss () is on the device: reading it waits for the device."""

    def on_epoch_end(self, line: Epoch, best: bool) -> None:
        """An epoch is done and validated; `line` is as in metrics.jsonl, `best` is true if none was better so far.

        It is false in a run that keeps the weights of its last epoch."""

    def on_stop(self) -> None:
        """Ctrl-C: the current step is finished and the state saved, which may take a while."""

    def on_run_end(self, result: Mapping[str, object] | None) -> None:
        """The run has ended; `result` is as in result.json, or None if it was stopped or failed."""


def check_callbacks(callbacks: object) -> None:
    """Raise `UsageError` unless these are a list of objects with the methods of `Callback`."""
    hint = "class Mine(vitral.training.callbacks.Callback): …, then callbacks=[Mine()]"
    why = f"a callback is an object with the methods of Callback: {', '.join(_METHODS)}"
    if not isinstance(callbacks, list | tuple):
        raise UsageError(f"callbacks must be a list of callbacks, not {type_of(callbacks)}", why=why, hint=hint)
    for one in callbacks:
        if isinstance(one, type) or not all(callable(getattr(one, name, None)) for name in _METHODS):
            shown = f"the class {one.__name__}" if isinstance(one, type) else type_of(one)
            raise UsageError(f"callbacks has {shown}, which is not a callback", why=why, hint=hint)


_METHODS = tuple(name for name in vars(Callback) if name.startswith("on_") and name != "on_logits")


def asks_for_logits(callback: object) -> bool:
    """True if a callback, or one of several, overrides `on_logits`."""
    if isinstance(callback, Callbacks):
        return any(map(asks_for_logits, callback.callbacks))
    method = getattr(callback, "on_logits", None)
    return method is not None and getattr(method, "__func__", method) is not Callback.on_logits


class Outputs:
    """The latest input and output of a network in training, for `on_logits`."""

    def __init__(self, model: nn.Module):
        self._hook = model.register_forward_hook(self._keep)
        self._latest: tuple[Tensor, Tensor] | None = None

    def _keep(self, model: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._latest = inputs[0].detach(), output.detach()

    def tell(self, callback: Callback, batch: Batch) -> None:
        """Call `on_logits` with the latest output, which is of this batch."""
        assert self._latest is not None
        images, logits = self._latest
        callback.on_logits(replace(batch, images=images), logits)

    def close(self) -> None:
        """Forget the network."""
        self._hook.remove()


class Callbacks(Callback):
    """Several callbacks as one, called in their order, each with copies: one that edits its line changes no run."""

    def __init__(self, callbacks: Sequence[Callback]):
        self.callbacks = tuple(callbacks)

    def on_run_start(self, run: RunStart) -> None:
        for one in self.callbacks:
            one.on_run_start(replace(run, options=copy.deepcopy(run.options), history=copy.deepcopy(run.history)))

    def on_epoch_start(self, epoch: int, batches: int, done: int) -> None:
        for one in self.callbacks:
            one.on_epoch_start(epoch, batches, done)

    def on_logits(self, batch: Batch, logits: Tensor) -> None:
        for one in self.callbacks:
            if asks_for_logits(one):
                one.on_logits(batch, logits)

    def on_batch(self, loss: Tensor) -> None:
        for one in self.callbacks:
            one.on_batch(loss)

    def on_epoch_end(self, line: Epoch, best: bool) -> None:
        for one in self.callbacks:
            one.on_epoch_end(copy.deepcopy(line), best)

    def on_stop(self) -> None:
        for one in self.callbacks:
            one.on_stop()

    def on_run_end(self, result: Mapping[str, object] | None) -> None:
        for one in self.callbacks:
            one.on_run_end(copy.deepcopy(result))
