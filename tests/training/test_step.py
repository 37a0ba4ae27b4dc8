"""A recorded step is the plain one. Here what is recorded is a program that runs again on a processor: everything but
the GPU's own part, which tests/test_gpu.py has.
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

from vitral.data.loader import Batch
from vitral.data.transforms import Augmentation, Preprocessing
from vitral.device import Machine, choose, seed_everything
from vitral.errors import TrainingError
from vitral.graphs import Recording
from vitral.model import network
from vitral.model.variants import config
from vitral.training.objective import Classification
from vitral.training.optimizers import OptimizerSet
from vitral.training.run import Run
from vitral.training.step import CAPTURABLE, WARM_UP, RecordedStep, Step, recordable, step_of

MACHINE = choose("cpu", "fp32")
AUGMENTATION = Augmentation(crop="shift", flip=True, erase=0.5)


class Numbers:
    """A watch that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float]] = []

    def loss(self, value: Tensor) -> None:
        self.told.append(("loss", float(value.detach())))

    def gradient(self, norm: Tensor) -> None:
        self.told.append(("gradient", float(norm)))


class Recorder:
    """Records as a GPU would: nothing is computed now, the same tensors are written at each repetition."""

    def __init__(self, fails: Exception | None = None, clips: bool = True):
        self.recorded, self.repeated, self.fails, self.clips = 0, 0, fails, clips

    def __call__(self, program: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        if self.fails:
            raise self.fails
        self.recorded += 1
        kept: dict[str, Any] = {}

        def again() -> None:
            self.repeated += 1
            (loss, metrics), norm = program()
            (own_loss, own_metrics), own_norm = kept["results"]
            own_loss.copy_(loss)
            for name, value in metrics.items():
                own_metrics[name].copy_(value)
            if norm is not None:
                own_norm.copy_(norm)

        empty = torch.zeros(())
        norm = empty.clone() if self.clips else None
        kept["results"] = (empty.clone(), {"train_accuracy": empty.clone()}), norm
        return again, kept["results"]


def a_batch(number: int, size: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(number)
    images = torch.randint(0, 256, (6, 3, size, size), generator=generator, dtype=torch.uint8)
    return Batch(images, torch.randint(3, (6,), generator=generator), np.arange(6))


def a_network() -> nn.Module:
    seed_everything(0)  # without biases of keys, whose gradients are nothing but rounding, which Adam makes large
    model = network(
        config("mu/4", image_size=8, classes=3, dim=8, depth=2, heads=2, mlp_dim=8, drop_path=0.1, qkv_bias=False)
    )
    with torch.no_grad():
        model.head.weight.normal_(std=0.1)  # a head of zeros gives the rest no gradient at first
    model.any_size = True
    return model.train()


def learned(run: Run, make: Callable[..., Step], sizes: tuple[int, ...] = (8,) * 6) -> tuple[nn.Module, list[Any]]:
    """A network after a step for each of these sizes of pictures, and what was told."""
    model, told = a_network(), Numbers()
    objective = Classification(Preprocessing((8, 8)), AUGMENTATION, 3)
    step = make(model, OptimizerSet(model, run), objective, MACHINE, run)
    found: list[Any] = []
    for number, size in enumerate(sizes):
        seed_everything(1, number)
        loss, metrics = step(a_batch(number, size), told, lr=0.01 / (number + 1))
        found.append((loss, metrics["train_accuracy"]))
    return model, [told.told, [(float(loss), float(right)) for loss, right in found]]


def close(a: nn.Module, b: nn.Module, within: float = 1e-6) -> bool:
    return all(torch.allclose(x, y, atol=within) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("optimizer", CAPTURABLE)
def test_recorded_steps_are_the_plain_ones(optimizer, clip):
    """But for learning rates in fp32. Each step's own pictures, random numbers, rate and results are its own."""
    run, record = Run(optimizer=optimizer, clip=clip, weight_decay=0.1), Recorder(clips=bool(clip))
    plain, told = learned(run, Step)
    recorded, told_again = learned(run, lambda *parts: RecordedStep(*parts, record=record))
    assert close(plain, recorded, within=1e-3 if optimizer == "muon" else 1e-6)  # it computes in bf16
    assert [name for name, _ in told[0]] == [name for name, _ in told_again[0]]
    for one, other in zip(told, told_again, strict=True):
        np.testing.assert_allclose([e[-1] for e in one], [e[-1] for e in other], rtol=2e-3, atol=1e-6)
    assert (record.recorded, record.repeated) == (1, 6 - WARM_UP)


def test_each_size_is_recorded():
    run, record = Run(optimizer="adamw"), Recorder()
    sizes = (4, 4, 4, 4, 8, 8, 8, 8, 4, 8)
    plain, _ = learned(run, Step, sizes)
    recorded, _ = learned(run, lambda *parts: RecordedStep(*parts, record=record), sizes)
    assert close(plain, recorded)
    assert (record.recorded, record.repeated) == (2, 4)


def test_without_memory_for_a_recording_steps_are_done_as_before():
    run, told = Run(optimizer="adamw"), []
    plain, _ = learned(run, Step)
    record = Recorder(fails=torch.OutOfMemoryError("no room"))
    recorded, _ = learned(run, lambda *parts: RecordedStep(*parts, record=record, tell=told.append))
    assert close(plain, recorded)
    assert len(told) == 1, "once"
    assert "no memory" in told[0]


def test_what_cannot_be_recorded_is_an_error_that_says_what_to_type():
    record = Recorder(fails=RuntimeError("CUDA error: operation not permitted when stream is capturing"))
    with pytest.raises(TrainingError, match="cannot be recorded") as caught:
        learned(Run(optimizer="adamw"), lambda *parts: RecordedStep(*parts, record=record))
    assert "operation not permitted" in str(caught.value)
    assert "--no-graphs" in str(caught.value)


def test_a_step_is_asked_for_before_the_one_before_is_waited_for():
    """Else a GPU would have nothing to do meanwhile. Pictures are shown under autocast, for a teacher."""
    model, run, order = a_network(), Run(optimizer="adamw"), []

    class Asked(Numbers):
        def loss(self, value: Tensor) -> None:
            order.append("waited")

    class Shown(Classification):
        def shown(self, batch: Batch) -> Any:
            order.append("autocast" if torch.is_autocast_enabled("cpu") else "fp32")
            return super().shown(batch)

        def judged(self, *parts: Any) -> Any:
            order.append("computed")
            return super().judged(*parts)

    objective = Shown(Preprocessing((8, 8)), Augmentation(), 3)
    step = RecordedStep(model, OptimizerSet(model, run), objective, choose("cpu", "bf16"), run)
    step(a_batch(0), Asked(), lr=0.01)
    assert order == ["autocast", "computed", "waited"]


def test_which_steps_can_be_recorded():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert recordable(Run(optimizer="muon"), gpu)[0]
    for run, device in ((Run(), cpu), (Run(optimizer="sgd"), gpu), (Run(accumulate=2), gpu)):
        on, why = recordable(run, device)
        assert not on
        assert why


def test_a_run_says_which_step_it_takes(monkeypatch):
    monkeypatch.setattr("vitral.training.step.Aside", lambda device: SimpleNamespace(record=Recorder()))
    model, run = a_network(), Run(optimizer="adamw")
    parts = model, OptimizerSet(model, run), Classification(Preprocessing((8, 8)), Augmentation(), 3)
    gpu, recorded = Machine(torch.device("cuda"), "bf16", "stands for one"), dataclasses.replace(run, graphs=True)
    assert type(step_of(*parts, gpu, run)) is Step
    assert type(step_of(*parts, MACHINE, recorded)) is Step, "begun on a GPU, and goes on without one"
    assert type(step_of(*parts, gpu, recorded)) is RecordedStep


def test_steps_of_several_batches_are_refused():
    model, run = a_network(), Run(optimizer="adamw")
    objective = Classification(Preprocessing((8, 8)), Augmentation(), 3)
    step = RecordedStep(model, OptimizerSet(model, run), objective, MACHINE, run)
    with pytest.raises(ValueError, match="several batches"):
        step(a_batch(0), Numbers(), parts=2, lr=0.1)


def test_a_recording_has_its_own_inputs():
    seen: list[Tensor] = []

    def program(x: Tensor, y: Tensor | None) -> Tensor:
        seen.append(x)
        return x * 2

    def record(work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        result = work()
        return lambda: result.copy_(work()), result

    first = torch.ones(3)
    recording = Recording.of(program, [first, None], record)
    assert recording([torch.full((3,), 5.0), None]).tolist() == [10.0, 10.0, 10.0]
    assert first.tolist() == [1.0, 1.0, 1.0]
    assert all(x is seen[0] for x in seen), "the same place in memory each time"
