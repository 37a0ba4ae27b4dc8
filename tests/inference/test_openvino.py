"""OpenVINO matches the network. All tests are skipped if it is not installed."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import VARIANTS, moderate, random_images

import vitral
from images import noise
from running import mostly_slow
from vitral.cli.main import main
from vitral.device import choose
from vitral.errors import MissingExtraError, UsageError
from vitral.inference.engines import openvino
from vitral.inference.engines.int8 import fake_quantized, has_fused_blocks, observe
from vitral.inference.engines.openvino import compiled
from vitral.inference.predictor import Predictor
from vitral.model import BiT, BiTConfig
from vitral.workflows.quantize import quantize

SOME = (
    "paper",
    "oblong",
    "gray",
    "post-norm",
    "gelu-tanh",
    "swiglu",
    "mean",
    "mean-pooled-norm",
    "map-with-prefix",
    "distilled-with-registers",
    "cls-mean",
    "sincos",
    "qk-norm-rotary",
    "layer-scale",
    "scale-by-width",
    "no-bias",
    "pre-logits",
    "tanh",
    "headless",
    "hybrid",
)
"""Of all variants those that differ in what is computed: a second each."""

FP32, BF16 = choose("cpu", "fp32"), choose("cpu", "bf16")


def _for_integers(predictor: Predictor) -> str:
    """Engine for int8 on this CPU: vitral's kernels if they support the network."""
    return "int8" if has_fused_blocks(predictor.model) else "openvino"


def test_without_it_the_error_says_what_to_install(trained, monkeypatch):
    for name in ("openvino", "openvino_telemetry"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match="OpenVINO is not installed") as caught:
        vitral.load(trained.folder, engine="openvino")
    assert "vitral[openvino]" in str(caught.value)


class TestInstalled:
    @pytest.fixture(autouse=True)
    def _installed(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        if importlib.util.find_spec("openvino") is None:
            pytest.skip("OpenVINO is not installed")
        if why := openvino.limitation():
            pytest.skip(why)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    @pytest.fixture
    def _integers(self) -> None:
        if why := openvino.unavailable_reason():
            pytest.skip(why)

    def test_changed_norms_are_compiled_anew(self):
        predictor = vitral.load("demo", engine="openvino")
        pixels = [noise(1, (32, 32), 3)]
        before = predictor.probabilities(pixels)
        predictor.model.patch_embed.backbone.layers[0].norm.running_mean.add_(5)
        assert np.abs(predictor.probabilities(pixels) - before).max() > 1e-3

    @pytest.mark.parametrize("name", mostly_slow(SOME, 3))
    def test_full_precision_is_the_network(self, name):
        config = VARIANTS[name]
        model, images = moderate(config).float(), random_images(config, count=5).float()
        engine = compiled(model, FP32)
        with torch.inference_mode():
            wanted = model(images)
            for part in (images, images[:1], images[2:]):  # any number of images, one after the other
                found = engine(part)
                torch.testing.assert_close(found, model(part), rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["paper", "post-norm", "mean", "map", "rotary", "layer-scale", "hybrid"])
    def test_half_precision_is_as_accurate_as_the_network(self, name):
        config = VARIANTS[name]
        exact, images = moderate(config).float(), random_images(config).bfloat16()
        half = copy.deepcopy(exact).bfloat16()
        exact.load_state_dict({k: v.float() for k, v in half.state_dict().items()})
        with torch.inference_mode():
            wanted, plain, found = exact(images.float()), half(images).float(), compiled(half, BF16)(images)
        size = wanted.abs().max()
        assert (found - wanted).abs().max() <= 2 * (plain - wanted).abs().max() + 0.02 * size

    @pytest.mark.usefixtures("_integers")
    @pytest.mark.parametrize(
        "name", mostly_slow(["paper", "post-norm", "swiglu", "layer-scale-post-norm", "distilled", "mean"], 3)
    )
    def test_integers_are_those_of_the_ranges(self, name):
        config = VARIANTS[name]
        model, images = moderate(config).float(), random_images(config).float()
        ranges = observe(model, [images])
        engine = compiled(model, FP32, ranges)
        with torch.inference_mode():
            wanted = fake_quantized(model, ranges, openvino._trial()[0])(images)
            found, exact = engine(images), model(images)
        assert (found - wanted).abs().max() < 0.5 * (wanted - exact).abs().max() + 1e-4 * exact.abs().max()
        kinds = [node.get_rt_info() for node in engine._request.get_compiled_model().get_runtime_model().get_ops()]
        dense = [kind["runtimePrecision"].value for kind in kinds if kind["layerType"].value == "FullyConnected"]
        assert sum(kind in ("u8", "i8") for kind in dense) == 4 * config.depth, dense

    def test_wrong_int8_results_are_refused(self, monkeypatch):
        """The self-test detects it; here OpenVINO gets another layer."""
        model = moderate(VARIANTS["paper"]).float()
        ranges = observe(model, [random_images(VARIANTS["paper"]).float()])
        traced = openvino._traced
        monkeypatch.setattr(openvino, "_traced", lambda module, x: traced(torch.nn.Linear(64, 32), x))
        openvino._trial.cache_clear()
        try:
            with torch.autocast("cpu", torch.bfloat16), pytest.raises(UsageError, match="results are wrong"):
                compiled(model, FP32, ranges)
        finally:
            openvino._trial.cache_clear()

    def test_a_resnet(self):
        model = BiT(BiTConfig(image_size=32, classes=5, layers=(1, 1))).eval()
        torch.nn.init.normal_(model.head.weight)
        images = torch.randn(3, 3, 32, 32)
        with torch.inference_mode():
            torch.testing.assert_close(compiled(model, FP32)(images), model(images), rtol=1e-3, atol=1e-3)
        with pytest.raises(UsageError, match="only a ViT computes in int8"):
            compiled(model, FP32, {})

    def test_the_cache_is_keyed_by_the_weights(self, tmp_path):
        model, images = moderate(VARIANTS["paper"]).float(), random_images(VARIANTS["paper"]).float()
        folder = tmp_path / "cache/vitral/openvino"
        first = openvino.compiled(model, FP32)
        (kept,) = folder.iterdir()
        again = openvino.compiled(model, FP32)
        assert "compiled and kept in" in first.note
        assert "read from" in again.note
        assert torch.equal(first(images), again(images))
        in_halves = "bf16" in openvino.compiled(model, BF16).note  # else the CPU has no such instructions
        with torch.no_grad():
            model.head.weight.mul_(2)
        other = openvino.compiled(model, FP32)
        assert "compiled" in other.note
        assert not torch.equal(first(images), other(images))
        assert len(list(folder.iterdir())) == (3 if in_halves else 2)
        kept.write_bytes(b"damaged")
        with torch.no_grad():
            model.head.weight.div_(2)
        assert torch.equal(openvino.compiled(model, FP32)(images), first(images))

    @pytest.mark.slow
    def test_the_cache_is_bounded_and_optional(self, tmp_path, monkeypatch):
        monkeypatch.setattr(openvino, "_CACHE_SIZE", 2)
        model = moderate(VARIANTS["paper"]).float()
        for _ in range(4):
            openvino.compiled(model, FP32)
            with torch.no_grad():
                model.head.bias.add_(1)
        assert len(list((tmp_path / "cache/vitral/openvino").iterdir())) == 2
        (tmp_path / "file").write_text("no folder")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        engine = openvino.compiled(model, FP32)
        assert "cannot write" in engine.note
        assert engine(random_images(VARIANTS["paper"]).float()).isfinite().all()

    def test_signals_arrive_after_networks_are_deleted(self):
        """With one core each, the second would restore the signal stack of the first, which no longer exists."""
        engines = [openvino.compiled(moderate(VARIANTS["paper"]).float(), machine) for machine in (FP32, BF16)]
        while engines:
            del engines[0]
        seen: list[int] = []
        before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.signal(signal.SIGTERM, before)
        assert seen == [signal.SIGTERM]

    def test_a_predictor_by_it(self, trained, tmp_path):
        files = [tmp_path / f"{number}.png" for number in range(5)]
        for number, file in enumerate(files):
            Image.fromarray(noise(number, (8, 10), 1)).save(file)
        plain = vitral.load(trained.folder, device="cpu", precision="fp32")
        fast = vitral.load(trained.folder, engine="openvino", precision="fp32")
        assert fast.engine == "openvino"
        assert "OpenVINO" in fast.note
        wanted = plain.probabilities(files)
        assert np.abs(fast.probabilities(files) - wanted).max() < 1e-4
        streamed = [one.probabilities for one in fast.stream(files, batch_size=2)]
        assert np.abs(np.stack(streamed) - wanted).max() < 1e-4
        with torch.no_grad():
            fast.model.head.weight.mul_(-3)
            plain.model.head.weight.mul_(-3)
        assert np.abs(fast.probabilities(files) - plain.probabilities(files)).max() < 1e-4

    def test_refusals(self):
        model = moderate(VARIANTS["paper"]).float()
        preprocessing = vitral.Preprocessing(model.config.image)
        elsewhere = dataclasses.replace(FP32, device=torch.device("meta"))
        with pytest.raises(UsageError, match="on a CPU here"):
            Predictor(model, preprocessing, list("abcde"), machine=elsewhere, engine="openvino")

    def test_the_commands(self, trained, tmp_path, capsys):
        run = shutil.copytree(trained.folder, tmp_path / "run")
        image = next(Path(trained.folder).parents[1].rglob("test/*/*.png"))
        assert main(["predict", str(run), str(image), "--engine", "openvino"]) == 0
        told = capsys.readouterr()
        assert told.err.startswith("Engine   OpenVINO ")
        assert told.err.count("\n") == 1
        assert main(["evaluate", str(run), "--engine", "openvino"]) == 0
        assert "Engine   OpenVINO " in capsys.readouterr().err

    @pytest.mark.usefixtures("_integers")
    def test_int8_by_the_commands(self, trained, tmp_path, capsys):
        run = shutil.copytree(trained.folder, tmp_path / "run")
        image = next(Path(trained.folder).parents[1].rglob("test/*/*.png"))
        quantize(run, images=8, judged=8)
        assert main(["predict", str(run), str(image), "--engine", "openvino", "--precision", "int8"]) == 0
        assert ", int8, " in capsys.readouterr().err
        engines = {name: vitral.load(run, precision="int8", engine=name).engine for name in ("auto", "packed")}
        expected = _for_integers(vitral.load(run))
        assert engines == {"auto": expected, "packed": "int8"}, "for integers it is chosen by itself"
