"""A training step never synchronizes with a GPU. Tensors on `meta`, which compute nothing, simulate the GPU; operations
that would make the CPU wait are counted.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchvision.transforms.v2 import functional as tv

import vitral
from images import noise
from vitral.data import Split
from vitral.data.images.augmentation import Augmentation
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batch, Batches, Residency
from vitral.device import Machine, choose, seed_everything
from vitral.distributed.ranks import ALONE, Stopping
from vitral.errors import TrainingError
from vitral.model import network
from vitral.model.variants import config
from vitral.training import loop
from vitral.training.callbacks import Callback
from vitral.training.distillation import Teacher
from vitral.training.loop import Averaged, State
from vitral.training.objectives.classification import Classification
from vitral.training.optimizer_set import OptimizerSet
from vitral.training.optimizers import adam, sgd
from vitral.training.options import Run
from vitral.training.step import Step
from vitral.weights.native import Weights

GPU = torch.device("meta")
PREPROCESSING = Preprocessing((8, 8))
aten = torch.ops.aten

READS = {
    aten._local_scalar_dense.default,
    aten.is_nonzero.default,
    aten.item.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten.histc.default,
    aten.unique_dim.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
}
"""Operations that read a value or a size from the device."""
BY_INDEX = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
"""Operations that do so if indexed by a mask."""


class Waits(TorchDispatchMode):
    """Counts operations that would make the CPU wait for the GPU, with the calling line of vitral."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_gpu = any(tensor.device == GPU for tensor in tensors)
        if func is aten._to_copy.default:
            return self._copied(func, args, kwargs)
        if func is aten.copy_.default and args[0].device != args[1].device and not (args[2:3] or [False])[0]:
            self.note(func)
        if on_gpu and (func in READS or (func in BY_INDEX and _masked(args[1]))):
            self.note(func)
            return 0.0 if func is aten._local_scalar_dense.default else func(*args, **kwargs)
        return func(*args, **kwargs)

    def _copied(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        here, there = args[0].device, kwargs.get("device") or args[0].device
        if here != torch.device(there) and not kwargs.get("non_blocking"):
            self.note(func)
        if here == GPU and torch.device(there) != GPU:  # meta has no values
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        return func(*args, **kwargs)

    def note(self, func: Any) -> None:
        ours = [f for f in traceback.extract_stack() if str(Path(vitral.__file__).parent) in f.filename]
        self.found.append(f"{func} in {Path(ours[-1].filename).name}: {ours[-1].line}" if ours else str(func))


def _masked(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


class Constants(TorchFunctionMode):
    """Counts `torch.tensor` of Python numbers on a device: a copy from pageable memory, which `meta` does not make."""

    def __init__(self, waits: Waits):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "cpu") == GPU:
            self.waits.note(func)
        if func is Tensor.new_tensor and args[0].device == GPU:
            self.waits.note(func)
        return func(*args, **kwargs)


@contextmanager
def waits() -> Iterator[Waits]:
    with Waits() as found, Constants(found):
        yield found


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_recorded_event", lambda device: _Event())
    for module in (adam, sgd):
        monkeypatch.setattr(module, "fused", lambda groups: True)
    fused = importlib.import_module("torch.optim.optimizer")
    monkeypatch.setattr(fused, "_get_fused_kernels_supported_devices", lambda: ["meta", "cpu"])


class _Event:
    """Simulated CUDA event: synchronized a step later, when it has completed."""

    def synchronize(self) -> None:
        pass


EVERYTHING: dict[str, Any] = {
    "crop": "shift",
    "flip": True,
    "erase": 0.5,
    "mixup": 0.2,
    "cutmix": 1.0,
    "label_smoothing": 0.1,
    "clip": 1.0,
    "ema": 0.99,
    "accumulate": 2,
    "batch_size": 4,
    "epochs": 2,
}
"""Options that enable all parts of a step except TrivialAugment's operations, which are tested alone."""


SIZES: dict[str, Any] = {"image_size": 8, "classes": 3, "dim": 8, "depth": 1, "heads": 2, "mlp_dim": 8}


def epoch_of(run: Run, residency: Residency, name: str = "mu/4", **more: Any) -> list[str]:
    """Operations that wait in an epoch on a simulated GPU; `more` is for the objective."""
    model = network(config(name, **SIZES, drop_path=0.1)).to(GPU)
    state = State(model, OptimizerSet(model, run), Averaged(model, run.ema or 0.0))
    images = Split([f"p{i}.png" for i in range(24)], np.arange(24) % 3, lambda i: noise(i, (8, 8)))
    batches = Batches(
        images,
        PREPROCESSING,
        batch_size=run.batch_size,
        device=GPU,
        augmentation=run.augmentation,
        residency=residency,
        workers=0,
    )
    objective = Classification(PREPROCESSING, run.augmentation, 3, run.label_smoothing, **more)
    machine = Machine(GPU, "fp32", "simulated")
    with waits() as found:
        step = Step(model, state.optimizer, objective, machine, run)
        loop._epoch(state, run, batches, step, Callback(), Stopping(threading.Event()), ALONE)
    assert state.step == 3
    return found.found


@pytest.mark.parametrize(
    ("residency", "optimizer"), [("memory", "adamw"), ("memory", "muon"), ("stream", "adamw"), ("cache", "adamw")]
)
def test_steps_do_not_wait(residency, optimizer):
    found = epoch_of(Run(**EVERYTHING, optimizer=optimizer), residency)
    assert len(found) == 1, "of the epoch's order, copied at its start"
    assert "loader.py: positions" in found[0]


def test_a_stem_and_a_teacher_do_not_wait():
    taught = network(config("mu/4", **SIZES))
    own = Preprocessing((8, 8), mean=(0.4,) * 3, std=(0.2,) * 3)
    weights = Weights(taught.config, taught.state_dict(), own, ("a", "b", "c"), {})
    teacher = Teacher.of(weights, PREPROCESSING, ("c", "a", "b"), GPU, weight=0.5, temperature=2.0)
    run = Run(**EVERYTHING, optimizer="muon")
    found = epoch_of(run, "memory", "C+mu/4", teacher=teacher)
    assert len(found) == 1, "of the epoch's order, copied at its start"


@pytest.mark.parametrize("augment", ["affine", "trivialaugment", "randaugment"])
def test_operations_do_not_wait(augment):
    images = torch.zeros(32, 3, 8, 8, dtype=torch.uint8, device=GPU)
    seed_everything(0)
    with waits() as found:
        Augmentation(augment=augment).pixels(images)
    assert found.found == []


WAITING: dict[str, Callable[[Tensor], Any]] = {
    "a number": lambda x: x.sum().item(),
    "a float": lambda x: float(x.sum()),
    "a list": lambda x: x.sum().tolist(),
    "a condition": lambda x: bool(x.isfinite().all()),
    "positions": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "what a mask chooses": lambda x: x.__setitem__(x > 0, x[:1]),
    "equality": lambda x: torch.equal(x, x),
    "to the CPU": lambda x: x.cpu(),
    "from the CPU": lambda x: torch.from_numpy(np.zeros(2)).to(x.device),
    "into place": lambda x: x.copy_(torch.zeros(2)),
    "numbers": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "numbers like it": lambda x: x.new_tensor([1.0, 2.0]),
    "rotation": lambda x: tv.rotate(x.expand(1, 3, 8, 2), 30.0),
}


@pytest.mark.parametrize("what", WAITING)
def test_waiting_operations_are_counted(what):
    x = torch.empty(2, device=GPU)
    with waits() as found, contextlib.suppress(NotImplementedError, RuntimeError):  # meta has no values
        WAITING[what](x)
    assert len(found.found) >= 1


def test_asynchronous_operations_are_not_counted():
    x = torch.empty(2, device=GPU)
    with waits() as found:
        x.to("cpu", non_blocking=True)
        torch.zeros(2).to(GPU, non_blocking=True)
        torch.rand(2).sum().item()
        torch.where(x > 0, x, 0.0)[torch.zeros(2, dtype=torch.long, device=GPU)] * 3
    assert found.found == []


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_nonfinite_values_are_reported_a_batch_later(monkeypatch, what):
    """As on a GPU: the step is taken and nothing is saved; the error names the images of that step."""
    monkeypatch.setattr(loop, "_SYNCHRONOUS", ())
    run = Run(batch_size=4, epochs=1, optimizer="sgd", lr=0.0, clip=1.0)
    model = network(config("mu/4", image_size=8, classes=3, dim=8, depth=1, heads=2, mlp_dim=8))
    images = Split([f"p{i}.png" for i in range(12)], np.arange(12) % 3, lambda i: noise(i, (8, 8)))
    batches = Batches(images, PREPROCESSING, batch_size=4, device=torch.device("cpu"), augmentation=Augmentation())
    plain, seen = Classification(PREPROCESSING, Augmentation(), 3), []

    def objective(model, batch):
        seen.append(batch.indices)
        loss, metrics = plain(model, batch)
        broken = loss * float("nan") if what == "loss" else loss + (0 * model.head.bias).sum().sqrt()
        return (broken if len(seen) == 2 else loss), metrics

    state = State(model, OptimizerSet(model, run))
    machine = choose("cpu", "fp32")
    step = Step(model, state.optimizer, objective, machine, run)
    named = f"p{batches.order(0)[4]}.png"
    with pytest.raises(TrainingError, match=f"the {what} is nan in epoch 1; stopped a batch later") as caught:
        loop._epoch(state, run, batches, step, Callback(), Stopping(threading.Event()), ALONE)
    assert (state.step, len(seen)) == (2, 3)
    assert named in str(caught.value)


def test_no_matrix_product_of_a_bf16_step_is_left_in_fp32(monkeypatch):
    """So TF32 has nothing to accelerate, and stays off."""
    monkeypatch.setattr("vitral.training.optimizers.muon.has_bf16", lambda device: True)  # as on a GPU
    run = Run(batch_size=4, optimizer="muon", clip=1.0)
    model = network(config("mu/4", image_size=8, classes=3, dim=16, depth=2, heads=2, mlp_dim=16))
    optimizer = OptimizerSet(model, run)
    batch = Batch(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4, dtype=torch.long), np.arange(4))
    with Products() as found:
        with choose("cpu", "bf16").autocast():
            loss, _ = Classification(PREPROCESSING, Augmentation(), 3)(model, batch)
        loss.backward()
        optimizer.step()
    assert len(found.dtypes) > 20
    assert set(found.dtypes) == {torch.bfloat16}


class Products(TorchDispatchMode):
    """dtypes of all matrix products and convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution):
            self.dtypes.append(args[-1].dtype if func.overloadpacket is aten.mm else args[1].dtype)
        return func(*args, **(kwargs or {}))
