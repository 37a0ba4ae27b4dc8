"""torch.compile for a run: the decision, the compiled objective, and the time spent compiling."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitral.data.loader import Batch
from vitral.device import Machine, Precision
from vitral.errors import TrainingError
from vitral.inference.engines.compiled import keep_code, reporting_compiler_errors, unavailable_reason
from vitral.model import ModelConfig, summarize
from vitral.training.objectives.objective import TwoPartObjective

COMPILE_SECONDS = 60.0
"""Approximate delay of the first step by compiling: S/16 took 69 s on one core without a cache, 16 to 40 s on 16 cores
(docs/log/training-speed.md).
"""
NARROW = 512
"""Width up to which a network counts as narrow."""
SAVED_PER_FLOP: dict[Precision, tuple[float, float]] = {"bf16": (1.9e-15, 5e-16), "fp32": (4e-15, 1.4e-15)}
"""Seconds that compiling saves per FLOP of a run on a GPU, for narrow and for wide networks. On an H200 in bf16 it is
1.9e-15 for S/16, 7e-16 for B/16 and 4e-16 for L/16, all with CUDA graphs (benchmarks/RESULTS.md). The fp32 values
assume twice the memory traffic and are not measured. A slower GPU saves more than estimated.
"""

RECOMPILE_LIMIT = 64
"""Limit on recompilations of one function, for several networks in a process. torch's default is eight;
beyond it torch warns and runs uncompiled.
"""


def seconds_saved(operations: float, precision: Precision, dim: int) -> float:
    """Estimate the seconds that compiling saves in a run on a GPU.

    `operations`: FLOPs of all steps together; `dim`: the network's width.
    """
    return SAVED_PER_FLOP[precision][dim > NARROW] * operations


def should_compile(machine: Machine, config: ModelConfig, images: int) -> tuple[bool, str]:
    """Decide whether to compile for a run of `images`, all epochs together; return the decision and the reason."""
    if machine.device.type != "cuda":
        return False, "vitral chooses torch.compile only on NVIDIA GPUs; --compile turns it on"
    if missing := unavailable_reason(machine.device):
        return False, missing
    operations = 3 * summarize(config).flops * images  # backward is twice forward
    saved = seconds_saved(operations, machine.precision, getattr(config, "dim", 0))
    why = f"it saves an estimated {saved:,.0f} s of the run, and takes about {COMPILE_SECONDS:.0f} s"
    return saved > COMPILE_SECONDS, why


class CompiledObjective:
    """Objective whose network, loss, metrics and backward pass are compiled as one graph.

    The module itself stays uncompiled for validation, which has other batch sizes. Augmentation is not compiled, since
    it would draw other random numbers; nor is the optimizer, for which torch has fused kernels.

    Uses torch's default mode: `max-autotune` chooses kernels by their time, so a resumed run would not reproduce the
    same bits; CUDA graphs capture the whole step (`vitral.training.step`), not the network alone. `dynamic=False`:
    batches have one size. `TrainingError` if the compiler fails.
    """

    def __init__(self, objective: TwoPartObjective, model: nn.Module):
        keep_code()
        self.prepare = objective.prepare

        def loss(images: Tensor, labels: Tensor, teacher_logits: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
            return objective.loss(model, images, labels, teacher_logits)

        self._compiled_loss = torch.compile(loss, dynamic=False)

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return self.loss(model, *self.prepare(batch))

    def loss(
        self, _: nn.Module, images: Tensor, labels: Tensor, teacher_logits: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of the compiled network for the result of `prepare`."""
        with reporting_compiler_errors(TrainingError, "--no-compile"):
            return self._compiled_loss(images, labels, teacher_logits)


class Stopwatch:
    """Accumulated seconds of torch's compiler; read with `seconds()`."""

    def __init__(self) -> None:
        self._seconds, self._began = 0.0, 0.0

    def seconds(self) -> float:
        return self._seconds

    def start(self, _: object = None) -> None:
        self._began = time.perf_counter()

    def stop(self, _: object = None) -> None:
        self._seconds += time.perf_counter() - self._began


@contextmanager
def compiler_timed() -> Iterator[Stopwatch]:
    """Yield a stopwatch that runs whenever torch compiles; set torch's recompile limit to `RECOMPILE_LIMIT`."""
    import torch._dynamo
    from torch._dynamo.callback import callback_handler  # imported here: torch's compiler takes seconds to import

    watch = Stopwatch()
    callback_handler.register_start_callback(watch.start)
    callback_handler.register_end_callback(watch.stop)
    try:
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            yield watch
    finally:
        callback_handler.remove_start_callback(watch.start)
        callback_handler.remove_end_callback(watch.stop)
