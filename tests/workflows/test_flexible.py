"""FlexiViT: training draws a patch size a batch, and using the weights at one of them computes the same network."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from images import noise
from running import check_resumed, printed, train
from vitral.errors import UsageError
from vitral.model import ViT, ViTConfig
from vitral.training.objectives.flexible import SCHEME, FlexibleViT
from vitral.weights.transform.adapt import adapt

SHAPE: dict[str, Any] = {
    "image_size": 16,
    "patch_size": 4,
    "classes": 3,
    "dim": 16,
    "depth": 2,
    "heads": 2,
    "mlp_dim": 16,
}
CHANGES: dict[str, dict[str, Any]] = {
    "paper": {},
    "mean": {"pool": "mean", "registers": 1},
    "sincos": {"position": "sincos", "cls_token": False, "pool": "mean"},
    "rotary": {"position": "rotary"},
}


def flexible(name: str) -> tuple[ViT, FlexibleViT]:
    config = ViTConfig(**SHAPE, **CHANGES[name])
    torch.manual_seed(0)
    model = ViT(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model, FlexibleViT(config, (2, 4, 8, 16))


@pytest.mark.parametrize("name", CHANGES)
def test_logits_are_those_of_weights_loaded_at_that_patch_size(name):
    model, network = flexible(name)
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for size in network.sizes:
        state, config, _, _ = adapt(
            model.state_dict(), model.config, {"patch_size": size}, scheme=SCHEME, new_head=False
        )
        loaded = ViT(config).double().eval()  # type: ignore[arg-type]
        loaded.load_state_dict(state)
        torch.testing.assert_close(network.logits(model, images, size), loaded(images), rtol=0, atol=1e-12)
    assert torch.equal(network.logits(model, images, 4), model(images))


def test_gradients_reach_the_kernel_and_the_positions_through_both_resizes():
    model, network = flexible("paper")
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for size in (2, 8):
        network.logits(model, images, size).square().sum().backward()
        for name in ("patch_embed.proj.weight", "pos_embed"):
            parameter = model.get_parameter(name)
            assert parameter.grad is not None
            step = torch.randn(parameter.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
            slope = (parameter.grad * step).sum()
            values = []
            with torch.no_grad():
                for sign in (1, -2):
                    parameter += sign * 1e-5 * step
                    values.append(network.logits(model, images, size).square().sum())
                parameter += 1e-5 * step
            torch.testing.assert_close((values[0] - values[1]) / 2e-5, slope, rtol=1e-6, atol=0)
        model.zero_grad()


@pytest.mark.parametrize("patch", [8, 32])
def test_another_patch_size_equals_timm(patch):
    """The pseudo-inverse and the positions of timm's own checkpoint filter, which FlexiViT's weights go through."""
    vit = pytest.importorskip("timm.models.vision_transformer")
    shape = {"img_size": 32, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
    torch.manual_seed(0)
    source, target = vit.VisionTransformer(patch_size=16, **shape), vit.VisionTransformer(patch_size=patch, **shape)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.normal_(std=0.3)
    state = vit.checkpoint_filter_fn(source.state_dict(), target, interpolation="bicubic", antialias=True)
    target.load_state_dict(state)
    images = torch.randn(2, 3, 32, 32)
    with pytest.warns(UserWarning, match="not trained for this patch size"):
        ours = vitral.load(source, patch_size=patch, precision="fp32").model
    with torch.no_grad():
        torch.testing.assert_close(ours(images), target.eval()(images), atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def shades(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shades")
    for number in range(24):
        folder = root / ("dark", "bright")[number % 2]
        folder.mkdir(exist_ok=True)
        pixels = noise(number, (16, 16)) // 2 + 127 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    return root


FLEXIBLE: dict[str, Any] = {"image_size": 16, "patch_sizes": (8, 4, 2), "lr": 2e-2}


@pytest.fixture(scope="module")
def flexible_run(shades: Path, tmp_path_factory: pytest.TempPathFactory) -> vitral.TrainedRun:
    return train(shades, tmp_path_factory.mktemp("runs") / "flexible", **FLEXIBLE)


def test_a_run_is_used_at_each_of_its_patch_sizes(flexible_run, shades, tmp_path, capsys):
    run = str(flexible_run.folder)
    for size in (2, 4, 8):
        out, err = printed(capsys, "evaluate", run, "--patch-size", str(size), "--format", "json")
        assert json.loads(out)["accuracy"] == 1.0
        assert "not trained for" not in err
        predictor = vitral.load(run, patch_size=size)
        assert predictor.model.config.patch == (size, size)
        table = tmp_path / f"{size}.csv"
        printed(capsys, "predict", run, str(shades), "--patch-size", str(size), "--out", str(table))
        assert len(table.read_text().splitlines()) == 25
    _, err = printed(capsys, "predict", run, str(shades / "dark" / "0.png"), "--patch-size", "16")
    assert "not trained for this patch size" in err


def test_stopped_and_resumed_is_bit_identical(shades, tmp_path, monkeypatch):
    options = {**FLEXIBLE, "dropout": 0.1, "ema": 0.9, "mixup": 0.2}
    check_resumed(shades, tmp_path, monkeypatch, **options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"patch_sizes": (8, 5)}, "cannot be divided into patches of 5 pixels"),
        ({"model": "C+mu/4"}, r"C\+mu/4"),
        ({"compile": True}, "--compile"),
        ({"checkpointing": True}, "--checkpointing"),
        ({"pack": True}, "--pack does not support --patch-sizes"),
    ],
)
def test_refused_options(shades, tmp_path, options, named):
    base = {"model": "mu/4", "image_size": 16, "patch_sizes": (8, 4), "epochs": 1}
    with pytest.raises(UsageError, match=named):
        vitral.train(str(shades), out=str(tmp_path / "run"), quiet=True, **{**base, **options})


def test_memory_is_planned_for_the_smallest_patches(shades, tmp_path, monkeypatch):
    from vitral.workflows.planning import memory
    from vitral.workflows.planning.plan import plan_run

    seen: list[Any] = []
    real = memory.training_bytes
    monkeypatch.setattr(
        memory, "training_bytes", lambda run, config, machine: seen.append(config) or real(run, config, machine)
    )
    job = plan_run(
        {"data": str(shades), "model": "mu/8", "image_size": 16, "patch_sizes": (8, 4), "out": str(tmp_path)}
    )
    assert seen[0].patch == (4, 4)
    assert job.config.patch == (8, 8)
    assert dataclasses.replace(job.config, patch_size=4).grid == (4, 4)
