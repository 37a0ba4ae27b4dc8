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
"""Seconds by which compiling delays the first step, about: S/16 took 69 s on one core without a cache, 16 to 40 s on 16
cores (docs/log.md).
"""
NARROW = 512
"""Width up to which a network counts as narrow."""
SAVED: dict[Precision, tuple[float, float]] = {"bf16": (1.9e-15, 5e-16), "fp32": (4e-15, 1.4e-15)}
"""Seconds that compiling saves for each operation of a run on a GPU, of narrow networks and of wide ones. On an H200 in
bf16 it was 1.9e-15 for S/16, 7e-16 for B/16 and 4e-16 for L/16, all of recorded steps (benchmarks/RESULTS.md); fp32 is
taken to move twice the bytes, and was not measured. A slower GPU has more to gain than is reckoned here.
"""


AT_MOST = 64
"""Networks of a process, and sizes of growing pictures, that are compiled. By itself torch compiles eight and then,
with no more than a warning, none.
"""


def seconds_saved(operations: float, precision: Precision, dim: int) -> float:
    """What compiling saves of a run's time on a GPU. `operations`: FLOPs of the run, all steps together; `dim`: the
    network's width.
    """
    return SAVED[precision][dim > NARROW] * operations


def whether(machine: Machine, config: ModelConfig, pictures: int) -> tuple[bool, str]:
    """Whether to compile for a run that reads so many `pictures`, all epochs together, and why."""
    if machine.device.type != "cuda":
        name = {"cpu": "a CPU", "mps": "an Apple GPU"}[machine.device.type]
        return False, f"on {name} it has not been seen to pay; --compile does it all the same"
    if missing := lacking(machine.device):
        return False, missing
    operations = 3 * summarize(config).flops * pictures  # backward is twice forward
    saved = seconds_saved(operations, machine.precision, getattr(config, "dim", 0))
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
