"""A captured step equals the eager one. Capture is simulated on a CPU by a program that runs again; tests/test_gpu.py
covers CUDA graphs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vitral.data.images.augmentation import Augmentation
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batch
from vitral.device import Machine, choose, seed_everything
from vitral.errors import TrainingError
from vitral.kernels.cuda_graphs import CapturedGraph
from vitral.model import network
from vitral.model.variants import config
from vitral.training.objectives.classification import Classification
from vitral.training.optimizer_set import OptimizerSet
from vitral.training.optimizers import OPTIMIZERS
from vitral.training.options import Run
from vitral.training.step import WARM_UP, CapturedStep, Step, can_capture, step_of

MACHINE = choose("cpu", "fp32")
AUGMENTATION = Augmentation(crop="shift", flip=True, erase=0.5)


class Numbers:
    """Monitor that keeps the values it gets."""

    def __init__(self) -> None:
        self.values: list[tuple[str, float]] = []

    def loss(self, value: Tensor) -> None:
        self.values.append(("loss", float(value.detach())))

    def gradient(self, norm: Tensor) -> None:
        self.values.append(("gradient", float(norm)))


class Recorder:
    """Simulated capture: compute nothing at capture, and write the same tensors at each replay."""

    def __init__(self, fails: Exception | None = None):
        self.captured, self.replayed, self.fails = 0, 0, fails

    def __call__(self, program: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        if self.fails:
            raise self.fails
        self.captured += 1
        kept: dict[str, Any] = {}

        def replay() -> None:
            self.replayed += 1
            loss, metrics = program()
            own_loss, own_metrics = kept["results"]
            own_loss.copy_(loss)
            for name, value in metrics.items():
                own_metrics[name].copy_(value)

        empty = torch.zeros(())
        kept["results"] = empty.clone(), {name: empty.clone() for name in ("train_accuracy", "gradient_norm")}
        return replay, kept["results"]


def a_batch(number: int, size: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(number)
    images = torch.randint(0, 256, (6, 3, size, size), generator=generator, dtype=torch.uint8)
    return Batch(images, torch.randint(3, (6,), generator=generator), np.arange(6))


def a_network() -> nn.Module:
    seed_everything(0)  # no biases of keys: their gradients are rounding errors, which Adam amplifies
    model = network(
        config("mu/4", image_size=8, classes=3, dim=8, depth=2, heads=2, mlp_dim=8, drop_path=0.1, qkv_bias=False)
    )
    with torch.no_grad():
        model.head.weight.normal_(std=0.1)  # a head of zeros gives the rest no gradient at first
    model.any_size = True
    return model.train()


def trained(run: Run, make: Callable[..., Step], sizes: tuple[int, ...] = (8,) * 6) -> tuple[nn.Module, list[Any]]:
    """A network after one step per image size; the monitored values, and the results of the steps."""
    model, monitor = a_network(), Numbers()
    objective = Classification(Preprocessing((8, 8)), AUGMENTATION, 3)
    step = make(model, OptimizerSet(model, run), objective, MACHINE, run)
    results: list[Any] = []
    for number, size in enumerate(sizes):
        seed_everything(1, number)
        loss, metrics = step(a_batch(number, size), monitor, lr=0.01 / (number + 1))
        results.append((loss, *(metrics[name] for name in sorted(metrics))))
    return model, [monitor.values, [tuple(map(float, one)) for one in results]]


def close(a: nn.Module, b: nn.Module, within: float = 1e-6) -> bool:
    return all(torch.allclose(x, y, atol=within) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("optimizer", [name for name, rule in OPTIMIZERS.items() if rule.capturable])
def test_captured_steps_equal_eager_ones(optimizer, clip):
    """Except for learning rates in fp32. Each step has its own images, random numbers, rate and results."""
    run, record = Run(optimizer=optimizer, clip=clip, weight_decay=0.1), Recorder()
    eager, values = trained(run, Step)
    captured, captured_values = trained(run, lambda *parts: CapturedStep(*parts, record=record))
    assert close(eager, captured, within=1e-3 if optimizer == "muon" else 1e-6)  # it computes in bf16
    assert [name for name, _ in values[0]] == [name for name, _ in captured_values[0]]
    for one, other in zip(values, captured_values, strict=True):
        np.testing.assert_allclose([e[-1] for e in one], [e[-1] for e in other], rtol=2e-3, atol=1e-6)
    assert (record.captured, record.replayed) == (1, 6 - WARM_UP)


def test_each_size_is_captured():
    run, record = Run(optimizer="adamw"), Recorder()
    sizes = (4, 4, 4, 4, 8, 8, 8, 8, 4, 8)
    eager, _ = trained(run, Step, sizes)
    captured, _ = trained(run, lambda *parts: CapturedStep(*parts, record=record), sizes)
    assert close(eager, captured)
    assert (record.captured, record.replayed) == (2, 4)


def test_steps_stay_eager_without_memory_for_a_graph():
    run, messages = Run(optimizer="adamw"), []
    eager, _ = trained(run, Step)
    record = Recorder(fails=torch.OutOfMemoryError("no room"))
    captured, _ = trained(run, lambda *parts: CapturedStep(*parts, record=record, tell=messages.append))
    assert close(eager, captured)
    assert len(messages) == 1, "once"
    assert "not enough memory" in messages[0]


def test_a_failed_capture_is_an_error_with_a_hint():
    record = Recorder(fails=RuntimeError("CUDA error: operation not permitted when stream is capturing"))
    with pytest.raises(TrainingError, match="cannot be captured") as caught:
        trained(Run(optimizer="adamw"), lambda *parts: CapturedStep(*parts, record=record))
    assert "operation not permitted" in str(caught.value)
    assert "--no-graphs" in str(caught.value)


def test_a_step_is_queued_before_synchronizing_with_the_previous_one():
    """Otherwise a GPU would be idle. Batches are prepared under autocast, for a teacher."""
    model, run, order = a_network(), Run(optimizer="adamw"), []

    class Synchronizing(Numbers):
        def loss(self, value: Tensor) -> None:
            order.append("synchronized")

    class Ordered(Classification):
        def prepare(self, batch: Batch) -> Any:
            order.append("autocast" if torch.is_autocast_enabled("cpu") else "fp32")
            return super().prepare(batch)

        def loss(self, *parts: Any) -> Any:
            order.append("computed")
            return super().loss(*parts)

    objective = Ordered(Preprocessing((8, 8)), Augmentation(), 3)
    step = CapturedStep(model, OptimizerSet(model, run), objective, choose("cpu", "bf16"), run)
    step(a_batch(0), Synchronizing(), lr=0.01)
    assert order == ["autocast", "computed", "synchronized"]


def test_steps_that_can_be_captured():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert can_capture(Run(optimizer="muon"), gpu)[0]
    for run, device in ((Run(), cpu), (Run(optimizer="sgd"), gpu), (Run(accumulate=2), gpu)):
        on, why = can_capture(run, device)
        assert not on
        assert why


def test_a_run_chooses_its_step(monkeypatch):
    monkeypatch.setattr("vitral.training.step.SideStream", lambda device: SimpleNamespace(record=Recorder()))
    model, run = a_network(), Run(optimizer="adamw")
    parts = model, OptimizerSet(model, run), Classification(Preprocessing((8, 8)), Augmentation(), 3)
    gpu, with_graphs = Machine(torch.device("cuda"), "bf16", "simulated"), dataclasses.replace(run, graphs=True)
    assert type(step_of(*parts, gpu, run)) is Step
    assert type(step_of(*parts, MACHINE, with_graphs)) is Step, "started on a GPU, resumed without one"
    assert type(step_of(*parts, gpu, with_graphs)) is CapturedStep


def test_gradient_accumulation_is_refused():
    model, run = a_network(), Run(optimizer="adamw")
    objective = Classification(Preprocessing((8, 8)), Augmentation(), 3)
    step = CapturedStep(model, OptimizerSet(model, run), objective, MACHINE, run)
    with pytest.raises(ValueError, match="gradient accumulation"):
        step(a_batch(0), Numbers(), parts=2, lr=0.1)


def test_a_captured_graph_has_its_own_inputs():
    seen: list[Tensor] = []

    def program(x: Tensor, y: Tensor | None) -> Tensor:
        seen.append(x)
        return x * 2

    def record(work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        result = work()
        return lambda: result.copy_(work()), result

    first = torch.ones(3)
    recording = CapturedGraph.of(program, [first, None], record)
    assert recording([torch.full((3,), 5.0), None]).tolist() == [10.0, 10.0, 10.0]
    assert first.tolist() == [1.0, 1.0, 1.0]
    assert all(x is seen[0] for x in seen), "the same memory each time"
