"""Whole runs on a GPU beside those of a CPU, networks changed under captured graphs, one rank over NCCL."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitral
from freeports import free_port
from images import MakeImages
from inference.test_changed_networks import CHANGES, IMAGES, Kept, logits, method_of_an_instance, network, predictor
from running import TINY, as_words, recorded
from textlines import OPTIONS as READING
from textlines import write_lines
from vitral.device import choose
from vitral.errors import Interrupted
from vitral.training.callbacks import Callback

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),  # of torch, about its choices and its prototypes
]


@pytest.fixture
def photos(make_images: MakeImages) -> Path:
    return make_images({"train/dark": 20, "train/light": 20, "val/dark": 8, "val/light": 8}, size=(32, 32))


def table(photos: Path, task: str) -> Path:
    path = photos / f"{task}.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["file", "labels" if task == "labels" else "light", "split"])
        for number, image in enumerate(sorted(photos.rglob("*.png"))):
            light = image.parent.name == "light"
            value: Any = 10 * light + number % 3
            if task == "labels":
                value = "|".join([image.parent.name, *["odd"] * (number % 2)])
            rows.writerow([image.relative_to(photos), value, image.relative_to(photos).parts[0]])
    return path


def trained(photos: Path, out: Path, **options: Any) -> vitral.TrainedRun:
    return vitral.train(str(photos), out=str(out), quiet=True, **{**TINY, **options})


def of_labels(photos: Path, out: Path, **options: Any) -> vitral.TrainedRun:
    return trained(table(photos, "labels"), out, task="labels", **options)


def of_numbers(photos: Path, out: Path, **options: Any) -> vitral.TrainedRun:
    return trained(table(photos, "numbers"), out, task="numbers", **options)


def of_text(photos: Path, out: Path, **options: Any) -> vitral.TrainedRun:
    lines = photos.parent / "lines"
    return vitral.train(lines if lines.exists() else write_lines(lines), out=out, quiet=True, **{**READING, **options})


def of_timm(photos: Path, out: Path, **options: Any) -> vitral.TrainedRun:
    kept = ("epochs", "batch_size", "crop", "augment", "flip", "optimizer", "warmup", "ema", "precision")
    given = {name: TINY[name] for name in kept}
    return vitral.train(
        str(photos),
        model="timm:resnet10t",
        image_size=32,
        out=str(out),
        quiet=True,
        **{**given, "batch_size": 20, "lr": 1e-3, **options},
    )


def of_shared_patches(photos: Path, out: Path, **options: Any) -> vitral.TrainedRun:
    return trained(photos, out, patch_sizes=(2, 4), **options)


def of_packed_images(photos: Path, out: Path, **options: Any) -> vitral.TrainedRun:
    return trained(photos, out, pack=True, position="sincos", **options)


def of_pretraining(method: str) -> Callable[..., vitral.TrainedRun]:
    def run(photos: Path, out: Path, **options: Any) -> vitral.TrainedRun:
        given = {name: value for name, value in TINY.items() if name != "ema"} | {"pool": "mean"}
        small = {"decoder_dim": 8, "decoder_depth": 1} if method == "mae" else {}
        return vitral.pretrain(str(photos), method, out=str(out), quiet=True, **{**given, **small, **options})

    return run


RUNS: dict[str, tuple[Callable[..., vitral.TrainedRun], float]] = {
    "one class": (trained, 0.02),
    "labels": (of_labels, 0.02),
    "numbers": (of_numbers, 0.05),
    "text": (of_text, 0.05),
    "another library": (of_timm, 0.1),
    "patch sizes": (of_shared_patches, 0.02),
    "packed": (of_packed_images, 0.02),
    "mae": (of_pretraining("mae"), 0.2),
    "mpp": (of_pretraining("mpp"), 0.2),
}
"""Kinds of runs, and by how much of itself the loss of a GPU may differ: masks are drawn by its own generator."""


@pytest.mark.parametrize("name", RUNS)
def test_a_gpu_learns_what_a_cpu_does(name, photos, tmp_path, monkeypatch):
    monkeypatch.setattr("vitral.pretraining.monitor.LEAST_SPREAD", 0.0)  # random images have nothing to learn
    monkeypatch.setattr("vitral.pretraining.monitor.LEAST_RANK", 0.0)
    run, tolerance = RUNS[name]
    losses = {
        device: [row["train_loss"] for row in recorded(run(photos, tmp_path / device, device=device).folder)]
        for device in ("cpu", "cuda")
    }
    np.testing.assert_allclose(losses["cuda"], losses["cpu"], rtol=tolerance)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_each_kind_in_bf16(name, photos, tmp_path, monkeypatch):
    monkeypatch.setattr("vitral.pretraining.monitor.LEAST_SPREAD", 0.0)
    monkeypatch.setattr("vitral.pretraining.monitor.LEAST_RANK", 0.0)
    run = RUNS[name][0](photos, tmp_path / "run", device="cuda", precision="bf16")
    assert run.result["device"] == torch.cuda.get_device_name()
    losses = [row["train_loss"] for row in recorded(run.folder)]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] * 1.1
    if name not in ("mae", "mpp"):
        image = next((photos.parent / "lines" if name == "text" else photos).rglob("*.png"))
        assert run.predictor(image)


class StopAtBatch(Callback):
    def __init__(self, left: int):
        self.left = left

    def on_batch(self, loss: torch.Tensor) -> None:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGINT)


def test_a_stopped_run_resumes_on_a_gpu(photos, tmp_path):
    options = {"device": "cuda", "drop_path": 0.2, "flip": True, "ema": 0.9}
    whole = trained(photos, tmp_path / "whole", **options)
    with pytest.raises(Interrupted):
        trained(photos, tmp_path / "cut", callbacks=[StopAtBatch(14)], **options)
    again = vitral.train(out=str(tmp_path / "cut"), resume=True, quiet=True)
    wanted, found = ([row["train_loss"] for row in recorded(run.folder)] for run in (whole, again))
    np.testing.assert_allclose(found, wanted, rtol=1e-3)


STRATEGY_OF_ONE = """
import sys
from vitral.cli.main import main
from vitral.distributed.strategies import STRATEGIES
from vitral.workflows.running import execute
execute.strategy_of = lambda model, ranks, name: STRATEGIES[name](model, ranks)
sys.exit(main(sys.argv[1:]))
"""
"""vitral with the strategy that is named also for one rank, which otherwise trains as one process."""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "offload"])
def test_one_rank_over_nccl_learns_alike(strategy, photos, tmp_path):
    alone = trained(photos, tmp_path / "alone", device="cuda", accumulate=2)
    options = {**TINY, "device": "cuda", "accumulate": 2, "strategy": strategy, "out": tmp_path / "rank"}
    words = [sys.executable, "-c", STRATEGY_OF_ONE, "train", str(photos), *as_words(options)]
    port = str(free_port())
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env={**os.environ, **rank})
    assert done.returncode == 0, done.stderr
    wanted, found = ([row["train_loss"] for row in recorded(one)] for one in (alone.folder, tmp_path / "rank"))
    np.testing.assert_allclose(found, wanted, rtol=1e-3)


@pytest.mark.parametrize("engine", ["auto", "compiled"])
@pytest.mark.parametrize("name", CHANGES)
def test_the_changed_network_is_predicted_on_a_gpu(name, engine):
    changed = network()
    CHANGES[name](changed)
    wanted = logits(changed)
    found = predictor(changed, engine=engine, machine=choose("cuda", "fp32"))
    for _ in range(5):  # by then graphs are captured
        assert np.abs(found.probabilities(IMAGES) - wanted).max() < 5e-3


def test_a_change_after_graphs_are_captured_is_honored():
    found = predictor(network(), machine=choose("cuda", "fp32"))
    before = [found.probabilities(IMAGES) for _ in range(5)][-1]
    assert found.engine == "graphed"
    kept = Kept()
    handle = found.model.blocks[0].register_forward_hook(kept.keep)
    assert np.abs(found.probabilities(IMAGES) - before).max() < 1e-4
    assert len(kept.seen) == 1
    handle.remove()
    method_of_an_instance(found.model)
    changed = network()
    method_of_an_instance(changed)
    assert np.abs(found.probabilities(IMAGES) - logits(changed)).max() < 5e-3
