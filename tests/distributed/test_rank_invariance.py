"""A run does not depend on its number of ranks: losses up to rounding, counts of validation exactly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import assert_same, history
from together import on_ranks

from running import mostly_slow, train
from vitral import create
from vitral.distributed.ranks import current, joined
from vitral.distributed.strategies import STRATEGIES, Offloaded, Strategy, strategy_of
from vitral.distributed.tensors import is_sharded, like, whole
from vitral.training.loop import Averaged
from vitral.training.optimizer_set import OptimizerSet
from vitral.training.optimizers import OPTIMIZERS
from vitral.training.options import Run
from vitral.workflows.planning import ranks as plan_ranks
from vitral.workflows.planning import throughput

PLAIN: dict[str, Any] = {}
MIXED = {
    "mixup": 0.4,
    "cutmix": 1.0,
    "erase": 0.5,
    "crop": "shift",
    "shift": 0.25,
    "flip": True,
    "label_smoothing": 0.1,
}
CASES: dict[str, dict[str, Any]] = {
    "accumulation, uneven rows, a last step of one micro-batch": {"batch_size": 5, "accumulate": 2},
    "mixup": {**MIXED, "batch_size": 7},
    "plain": PLAIN,
    "batch norms over all ranks, averaged weights": {"model": "C+mu/4", "ema": 0.9, "crop": "shift"},
    "dropout of every kind": {"model": "mu/2", "dropout": 0.2, "drop_path": 0.3, "patch_dropout": 0.25},
    "class weights, whose sums differ between ranks": {"class_weights": "balanced", "label_smoothing": 0.1},
    "balanced draws, affine": {"sampling": "balanced", "augment": "affine"},
    "an operation for each image": {"augment": "trivialaugment", "batch_size": 9},
    "two operations for each image": {"augment": "randaugment", "batch_size": 9, "flip": True},
    "streamed crops": {"crop": "random-resized", "residency": "stream", "workers": 1},
    "muon, no clipping": {
        "optimizer": "muon",
        "position": "sincos",
        "clip": 0.0,
        "layer_scale": 0.1,
    },
    "sgd": {"optimizer": "sgd", "lr": 0.05},
    "recomputed blocks": {"checkpointing": True, "dropout": 0.1},
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """25 and 12 images: 30 for training, 7 for validation."""
    from PIL import Image

    from images import noise

    root = tmp_path_factory.mktemp("ranks") / "photos"
    for name, count, level in (("day", 25, 160), ("night", 12, 20)):
        (root / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(level + noise(number + level, (8, 10)) // 3).save(root / name / f"{number}.png")
    return root


SHARDED = (
    "accumulation, uneven rows, a last step of one micro-batch",
    "mixup",
    "sgd",
    "recomputed blocks",
    "batch norms over all ranks, averaged weights",
    "dropout of every kind",
    "muon, no clipping",
)
"""Cases for parameters that are shared out, too."""


@pytest.mark.parametrize("name", mostly_slow(CASES, every=20))
def test_losses_do_not_depend_on_the_number_of_ranks(name, photos, tmp_path, monkeypatch):
    compared(CASES[name], (2, 3) if name in list(CASES)[:3] else (3,), photos, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", mostly_slow(SHARDED, every=20))
def test_losses_do_not_depend_on_the_strategy(name, photos, tmp_path, monkeypatch):
    counts = {"mixup": (1, 2), SHARDED[0]: (1, 2, 3)}.get(name, (2,))
    compared(CASES[name], counts, photos, tmp_path, monkeypatch, strategy="fsdp")


def test_one_rank_has_nothing_to_exchange():
    """It trains as one process does, without the time that a strategy takes; offloading is no exchange."""

    def work() -> int:
        with joined("cpu") as ranks:
            network = create("mu/4", dim=8, depth=2, heads=2, mlp_dim=8, image_size=8, classes=2)
            kinds = {name: type(strategy_of(network, ranks, name)) for name in ("auto", "ddp", "fsdp", "hsdp")}
            offloaded = strategy_of(network, ranks, "offload")
            return 0 if set(kinds.values()) == {Strategy} and type(offloaded) is Offloaded else 1

    assert on_ranks(1, work) == [0]


def test_averaged_weights_are_in_parts_after_validation():
    """A network without backward kept its outermost parameters whole, unless its epoch was the best and was saved."""

    def work() -> int:
        with joined("cpu") as ranks:
            model = create("mu/4", dim=8, depth=2, heads=2, mlp_dim=8, image_size=8, classes=2)
            averaged = Averaged(model, 0.9)
            STRATEGIES["fsdp"](model, ranks).shard(averaged.module)
            for _ in range(2):
                with torch.no_grad():
                    averaged.module(torch.zeros(1, 3, 8, 8))
                averaged.update_parameters(model)
            return 0 if all(map(is_sharded, averaged.module.parameters())) else 1

    assert on_ranks(2, work) == [0, 0]


def test_every_optimizer_of_parts_is_that_of_whole_matrices(monkeypatch):
    """Also of kernels, and of rows that three ranks cannot share out equally."""
    monkeypatch.setattr("vitral.training.optimizers.muon.has_bf16", lambda device: False)  # exact enough to be compared

    def made() -> torch.nn.Module:
        torch.manual_seed(0)
        return create("C+mu/4", dim=8, depth=2, heads=2, mlp_dim=10, image_size=8, classes=2)

    def stepped(model: torch.nn.Module, name: str) -> dict[str, torch.Tensor]:
        optimizer = OptimizerSet(model, Run(optimizer=name, lr=0.1))
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            for parameter in model.parameters():
                parameter.grad = like(torch.randn(parameter.shape, generator=generator), parameter)
            optimizer.step()
        return {name: whole(parameter) for name, parameter in model.named_parameters()}

    def work() -> int:
        with joined("cpu") as ranks:
            for optimizer in OPTIMIZERS:
                wanted, model = stepped(made(), optimizer), made()
                STRATEGIES["fsdp"](model, ranks)
                found = stepped(model, optimizer)
                assert any(parameter.ndim == 4 for parameter in found.values())
                for name, one in wanted.items():
                    assert torch.allclose(found[name], one, atol=1e-5), (optimizer, name)
        return 0

    assert on_ranks(3, work) == [0, 0, 0]


FOUR = {"ddp": {}, "hsdp": {"LOCAL_WORLD_SIZE": "2"}, "offload": {}}
"""Strategies of four ranks, and their environment: for hsdp of two machines, which make a mesh of 2 × 2."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        ("ddp", "mixup"),
        ("hsdp", "mixup"),
        ("hsdp", SHARDED[0]),
        ("offload", SHARDED[0]),
        ("hsdp", "muon, no clipping"),
        ("offload", "muon, no clipping"),
    ],
)
def test_losses_of_four_ranks(strategy, name, photos, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_ranks, "_refusal", lambda *_: "")  # offloading needs no GPU to be right
    compared(CASES[name], (4,), photos, tmp_path, monkeypatch, FOUR[strategy], strategy=strategy)


def compared(
    options: dict[str, Any],
    counts: tuple[int, ...],
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: Mapping[str, str] | None = None,
    **more: str,
) -> None:
    """Compare one process with these numbers of ranks."""
    options = {"val_fraction": 0.2, **options}
    monkeypatch.setattr("vitral.workflows.planning.memory.EVAL_BATCH", 2)  # four batches of validation
    monkeypatch.setattr("vitral.workflows.running.execute._report", lambda *_: None)  # drawing is slow
    whole = history(train(photos, tmp_path / "one", **options).folder)
    for count in counts:
        out = tmp_path / f"{count}"

        def work(out=out) -> int:
            train(photos, out, **options, **more)
            return 0

        assert on_ranks(count, work, environment) == [0] * count
        assert_same(whole, history(out))


def test_ranks_plan_the_epochs_again_as_the_first_one_does(photos, tmp_path, monkeypatch):
    """Each rank measures other times; with a number of its own it would wait forever for the others."""
    monkeypatch.setattr(throughput, "seconds_per_image", lambda job, at_most=None: (0.01, 0.002))

    def again(run: Any, lines: Any, most: int, seconds: float) -> int | None:
        return 2 + current().number if lines[-1]["epoch"] == 1 else None

    monkeypatch.setattr(throughput, "plan_again", again)

    def work() -> int:
        train(photos, tmp_path / "run", epochs=None, minutes=0.02)
        return 0

    assert on_ranks(2, work) == [0, 0]
    assert [line.get("epochs") for line in history(tmp_path / "run")] == [2, None]
