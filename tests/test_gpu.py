"""GPU code paths against the plain ones. Skipped without a GPU."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import vitral
from images import MakeImages
from vitral.data import Split
from vitral.data.gpu_decoding import GpuDecoder
from vitral.data.images.augmentation import Augmentation
from vitral.data.images.lazy_torchvision import torchvision
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batch, Batches
from vitral.device import choose, seed_everything
from vitral.inference.predictor import Predictor
from vitral.kernels import fused, reference_ops
from vitral.model import network
from vitral.model.variants import config
from vitral.training.compiling import CompiledObjective
from vitral.training.loop import Averaged
from vitral.training.objectives.classification import Classification
from vitral.training.optimizer_set import OptimizerSet
from vitral.training.options import Run
from vitral.training.step import CapturedStep, NoMonitor, Step

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),  # of torch, about what it chooses and what is a prototype
]
SHAPE: dict[str, Any] = {
    "image_size": 32,
    "classes": 5,
    "dim": 64,
    "depth": 3,
    "heads": 2,
    "mlp_dim": 128,
    "qkv_bias": False,
}
EVERYTHING = Augmentation(crop="shift", flip=True, augment="trivialaugment", erase=0.5, mixup=0.2, cutmix=1.0)


def a_batch(number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    images = torch.randint(0, 256, (16, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return Batch(images.cuda(), torch.randint(5, (16,), generator=generator).cuda(), np.arange(16))


def a_network(name: str = "mu/4", **more: Any) -> nn.Module:
    seed_everything(0)
    model = network(config(name, **{**SHAPE, **more})).cuda().train()
    with torch.no_grad():
        model.head.weight.normal_(std=0.1)
    return model


def learned(make: Any, run: Run, name: str, precision: str, compile: bool = False) -> tuple[nn.Module, list[float]]:
    model = a_network(name, drop_path=0.0 if compile else 0.2)  # what is compiled draws other numbers
    objective: Any = Classification(Preprocessing((32, 32)), EVERYTHING, 5)
    if compile:
        objective = CompiledObjective(objective, model)
    step = make(model, OptimizerSet(model, run), objective, choose("cuda", precision), run)
    averaged, losses = Averaged(model, 0.9), []
    for number in range(8):
        seed_everything(1, number)
        loss, _ = step(a_batch(number), NoMonitor(), lr=0.003)
        averaged.update_parameters(model)
        losses.append(loss)
    return averaged.module, [float(loss) for loss in losses]


@pytest.mark.parametrize("name", ["mu/4", "C+mu/4"])
@pytest.mark.parametrize("optimizer", ["adamw", "adam", "muon"])
def test_recorded_steps_are_the_plain_ones(optimizer, name):
    run = Run(optimizer=optimizer, clip=1.0)
    plain, losses = learned(Step, run, name, "fp32")
    recorded, again = learned(CapturedStep, run, name, "fp32")
    np.testing.assert_allclose(again, losses, rtol=2e-3)
    for ours, theirs in zip(recorded.parameters(), plain.parameters(), strict=True):
        assert (ours - theirs).norm() <= 0.02 * theirs.norm() + 1e-3


def test_compiled_and_recorded_steps_learn_alike():
    run = Run(optimizer="muon", clip=1.0)
    _, losses = learned(Step, run, "C+mu/4", "bf16", compile=True)
    _, again = learned(CapturedStep, run, "C+mu/4", "bf16", compile=True)
    np.testing.assert_allclose(again, losses, rtol=0.05)


@pytest.fixture
def waiting_is_an_error() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("make", [Step, CapturedStep])
@pytest.mark.parametrize("augment", ["none", "affine", "trivialaugment", "randaugment"])
def test_steps_do_not_wait(make, augment, waiting_is_an_error):
    run = Run(optimizer="muon", clip=1.0, label_smoothing=0.1)
    model = a_network("C+mu/4", drop_path=0.1)
    augmentation = Augmentation(crop="shift", flip=True, augment=augment, erase=0.5, mixup=0.2, cutmix=1.0)
    step = make(
        model,
        OptimizerSet(model, run),
        Classification(Preprocessing((32, 32)), augmentation, 5),
        choose("cuda", "bf16"),
        run,
    )
    batches = [a_batch(number) for number in range(8)]
    for number, batch in enumerate(batches):
        if number == 5:  # by then it is recorded, which waits
            torch.cuda.set_sync_debug_mode("error")
        seed_everything(1, number)
        step(batch, NoMonitor(), lr=0.001)


@torch.no_grad()
def test_patches_by_a_product_are_those_of_the_convolution():
    model, images = a_network("mu/4").eval(), torch.randn(4, 3, 32, 32, device="cuda")
    found = model.patch_embed(images)
    reference_ops(model)
    torch.testing.assert_close(found, model.patch_embed(images), rtol=1e-2, atol=2e-3)  # cuDNN's may be in TF32


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("tanh", [False, True])
def test_gelu_and_its_backward_are_torchs(tanh):
    x, gradient = (torch.randn(1000, 200, device="cuda", dtype=torch.bfloat16) * 2 for _ in range(2))
    there = x.double().requires_grad_()
    wanted = torch.nn.functional.gelu(there, approximate="tanh" if tanh else "none")
    (through,) = torch.autograd.grad(wanted, there, gradient.double())
    found, total = fused.gelu_backward(gradient, x, tanh)
    assert relative(fused.gelu(x, tanh), wanted.detach()) < 2e-3
    assert relative(found, through) < 2e-3
    assert relative(total, through.sum(0)) < 1e-4  # summed before it is rounded


@pytest.mark.parametrize("tokens", [64, 65, 128, 197, 256])
def test_attention_with_its_gradients_side_by_side_is_torchs(tokens):
    if torch.cuda.get_device_capability() != fused.HOPPER:
        pytest.skip("for Hopper")
    qkv = torch.randn(8, tokens, 3, 3, 64, device="cuda", dtype=torch.bfloat16)
    gradient = torch.randn(8, tokens, 192, device="cuda", dtype=torch.bfloat16)
    there, ours = qkv.double().requires_grad_(), qkv.requires_grad_()
    q, k, v = there.permute(2, 0, 3, 1, 4).unbind()
    wanted = ((q @ k.mT * 0.125).softmax(-1) @ v).transpose(1, 2).flatten(2)
    found = fused.qkv_attention(ours, 0.125)
    assert relative(found, wanted) < 5e-3
    each = [torch.autograd.grad(*pair)[0] for pair in ((found, ours, gradient), (wanted, there, gradient.double()))]
    assert relative(*each) < 5e-3
    again = torch.autograd.grad(fused.qkv_attention(ours, 0.125), ours, gradient)[0]
    assert torch.equal(again, each[0])  # nothing is added in another order


@pytest.mark.parametrize("compiled", [False, True])
def test_a_fused_network_learns_what_the_plain_one_does(compiled, monkeypatch):
    images = torch.randn(8, 3, 144, 144, device="cuda")
    asked, found = set(), {}
    for name in ("linear_gelu", "qkv_attention"):
        own = getattr(fused, name)
        monkeypatch.setattr(fused, name, lambda *given, name=name, own=own: asked.add(name) or own(*given))
    for plain in (False, True):
        seed_everything(0)
        model = network(config("mu/12", image_size=144, dim=128, heads=2, depth=3, mlp_dim=512, pool="mean")).cuda()
        nn.init.normal_(model.head.weight, std=0.1)
        if plain:
            reference_ops(model)
        forward = torch.compile(model, backend="aot_eager") if compiled else model
        with torch.autocast("cuda", torch.bfloat16):
            forward(images).square().mean().backward()
        found[plain] = torch.cat([each.grad.flatten() for each in model.parameters()])
    hopper = torch.cuda.get_device_capability() == fused.HOPPER
    assert asked == ({"linear_gelu", "qkv_attention"} if hopper else {"linear_gelu"})
    assert relative(found[False], found[True]) < 0.03


@torch.no_grad()
def test_tokens_in_bf16_are_near_those_in_fp32():
    model, images = a_network("mu/4", dim=128, depth=6).eval(), torch.randn(8, 3, 32, 32, device="cuda")
    exact = model.double()(images.double())
    model.float()
    apart = {}
    for wide in (True, False):
        model.fp32_residual = wide
        with torch.autocast("cuda", dtype=torch.bfloat16):
            apart[wide] = float((model(images) - exact).norm() / exact.norm())
    assert apart[False] < 0.02
    assert apart[False] < 3 * apart[True]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_graphed_predictions_are_the_plain_ones(precision):
    model = a_network("mu/4").eval()
    parts = Preprocessing((32, 32)), [str(i) for i in range(5)]
    machine = choose("cuda", precision)
    plain, graphed = (Predictor(model, *parts, machine=machine, engine=engine) for engine in ("plain", "auto"))
    assert graphed.engine == "graphed"
    for number in range(6):
        for count in (1, 4):
            images = a_batch(number).images[:count].cpu()
            assert torch.equal(graphed.logits(images), plain.logits(images))


def test_a_run_on_a_gpu(make_images: MakeImages, tmp_path):
    """Train by the command line."""
    photos = make_images({"train/dark": 24, "train/light": 24, "val/dark": 8, "val/light": 8}, size=(32, 32))
    run = vitral.train(photos, out=tmp_path / "run", epochs=3, batch_size=8, quiet=True)
    assert run.result["device"] == torch.cuda.get_device_name()
    assert run.predictor(next(photos.rglob("*.png"))).label in ("dark", "light")
    heat = vitral.explain(run.predictor, str(next(photos.rglob("*.png"))))
    assert len(heat) >= 1


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
def test_jpegs_decoded_by_the_gpu_are_those_of_the_cpu(subsampling, progressive):
    """Of smooth photographs, since nvJPEG repeats colors where the CPU's decoders interpolate them."""

    def photograph(number: int) -> bytes:
        small = np.random.default_rng(number).integers(0, 256, (4, 5, 3), np.uint8)
        file = io.BytesIO()
        image = Image.fromarray(small).resize((260 + number, 190), Image.Resampling.BICUBIC)  # not made smaller
        image.save(file, "JPEG", quality=95, subsampling=subsampling, progressive=progressive)
        return file.getvalue()

    files = [photograph(number) for number in range(80)]
    files[7], files[9] = files[7][: len(files[7]) // 2], photograph(9)[:2] + photograph(8)[2:]
    split = Split([f"{i}.jpg" for i in range(80)], np.arange(80) % 3, files.__getitem__)
    given: dict[str, Any] = {"batch_size": 32, "seed": 3, "augmentation": Augmentation(crop="random-resized")}
    torchvision()

    def images(device: str, residency: Any, workers: int) -> torch.Tensor:
        found = Batches(
            split.select(np.flatnonzero(np.arange(80) != 7)),
            Preprocessing((96, 96)),
            device=torch.device(device),
            residency=residency,
            workers=workers,
            **given,
        )
        assert found.residency.startswith("JPEGs decoded on the GPU") == (device == "cuda"), found.residency
        parts = [batch.images.cpu() for batch in found.epoch(1)]
        found.close()
        return torch.cat(parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GpuDecoder, "rate", lambda self, images: 1e9)  # whichever is faster
        on_gpu = images("cuda", "stream", 2)
    difference = (on_gpu.int() - images("cpu", "memory", 0).int()).abs().float()
    print("levels that differ, in the mean", float(difference.mean()), "at most", int(difference.max()))
    assert difference.mean() < 2
    assert difference.quantile(0.999) < 24
