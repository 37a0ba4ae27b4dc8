"""Compiling the network of a run: whether it pays within the run, how it is done, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vitral.compiler import failures_told, keep_code, lacking
from vitral.data.loader import Batch
from vitral.device import Machine, Precision
from vitral.errors import TrainingError
from vitral.model import ModelConfig, summarize
from vitral.training.objective import Halves

FIRST_CALL = 60.0
"""Seconds by which compiling delays the first step, about: S/16 took 69 s on one core without a cache (docs/log.md)."""
GAIN = 0.2
"""Share of a step's time that compiling saves on a GPU: an assumption, meant to be low; nothing was measured here."""
RATES: dict[Precision, float] = {"bf16": 200e12, "fp32": 20e12}
"""FLOP/s that a GPU is taken to reach in a step. A slower one has more to gain than is reckoned here."""


AT_MOST = 64
"""Networks of a process, and sizes of growing pictures, that are compiled. By itself torch compiles eight and then,
with no more than a warning, none.
"""


def seconds_saved(operations: float, precision: Precision) -> float:
    """What compiling saves of a run's time on a GPU. `operations`: FLOPs of the run, all steps together."""
    return GAIN * operations / RATES[precision]


def whether(machine: Machine, config: ModelConfig, pictures: int) -> tuple[bool, str]:
    """Whether to compile for a run that reads so many `pictures`, all epochs together, and why.

    FLOPs leave out what a small network spends on starting kernels, so that it is rather left uncompiled.
    """
    if machine.device.type != "cuda":
        name = {"cpu": "a CPU", "mps": "an Apple GPU"}[machine.device.type]
        return False, f"on {name} it has not been seen to pay; --compile does it all the same"
    if missing := lacking(machine.device):
        return False, missing
    saved = seconds_saved(3 * summarize(config).flops * pictures, machine.precision)  # backward is twice forward
    told = f"it would save some {saved:,.0f} s of the run, and takes some {FIRST_CALL:.0f} s"
    return saved > FIRST_CALL, told


class CompiledObjective:
    """An objective with all that follows the pictures compiled as one: this network, the loss, the metrics, and the way
    back through them. The module itself is not touched: validation, which has other batches, calls it as it is. Outside
    stay augmentation, whose numbers would be drawn otherwise, and the optimizer, which torch has fused.

    torch's default mode: `max-autotune` chooses kernels by their time, so that a run that goes on would not end with
    the same bits; CUDA graphs are recorded of the whole step (`vitral.training.step`), not of the network alone.
    `dynamic=False`: batches have one size; where pictures grow, each size is compiled. `TrainingError` where the
    compiler fails.
    """

    def __init__(self, objective: Halves, model: nn.Module):
        keep_code()
        self.shown = objective.shown

        def judged(images: Tensor, labels: Tensor, answers: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
            return objective.judged(model, images, labels, answers)

        self._judged: Any = torch.compile(judged, dynamic=False)

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return self.judged(model, *self.shown(batch))

    def judged(
        self, _: nn.Module, images: Tensor, labels: Tensor, answers: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of what `shown` gave, of the network that was compiled."""
        with failures_told(TrainingError, "--no-compile"):
            return self._judged(images, labels, answers)


class Stopwatch:
    """Seconds that torch's compiler has worked; `seconds()` reads it."""

    def __init__(self) -> None:
        self._seconds, self._began = 0.0, 0.0

    def seconds(self) -> float:
        return self._seconds

    def start(self, _: Any = None) -> None:
        self._began = time.perf_counter()

    def stop(self, _: Any = None) -> None:
        self._seconds += time.perf_counter() - self._began


@contextmanager
def compiler_timed() -> Iterator[Stopwatch]:
    """A stopwatch that runs whenever torch compiles something, at the first step or later; of one function it does so
    up to `AT_MOST` times.
    """
    import torch._dynamo
    from torch._dynamo.callback import callback_handler  # here: torch's compiler takes seconds to import

    watch = Stopwatch()
    callback_handler.register_start_callback(watch.start)
    callback_handler.register_end_callback(watch.stop)
    try:
        with torch._dynamo.config.patch(recompile_limit=AT_MOST):
            yield watch
    finally:
        callback_handler.remove_start_callback(watch.start)
        callback_handler.remove_end_callback(watch.stop)
