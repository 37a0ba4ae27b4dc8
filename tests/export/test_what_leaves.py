"""The table "What leaves with the network" of docs/export.md: each part of an answer through each target, from files.

A reader here is a program of the target's own: ONNX Runtime, torch.export, OpenVINO, a browser, timm, transformers and
HTTP. Beside files of an export it reads `preprocessing.json` and nothing of vitral.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import timm
import torch
import transformers
from PIL import Image
from starlette.testclient import TestClient
from torchvision.transforms.v2 import functional as transforms

import vitral
from browser import Visit, chromium
from npmpackages import real
from vitral.data.images.preprocessing import Preprocessing
from vitral.demo import IMAGES
from vitral.device import choose
from vitral.errors import UsageError, WeightsError
from vitral.export import export_model
from vitral.export.web import PACKAGE
from vitral.inference.unknown import Detector, fit_statistics
from vitral.model import ViT, ViTConfig
from vitral.serving import app
from vitral.testing.formats import randomized
from vitral.weights import native
from vitral.weights.convert import convert
from vitral.workflows.push import prepare

pytestmark = pytest.mark.slow

NAMES = ("b", "10", "a", "9")
"""An order that no rule of sorting gives."""
PNG = {"Content-Type": "image/png"}
EXACT, RESIZED = 2e-4, 0.02
"""Differences of probabilities; the second where another library resizes, to pixels that differ by a level."""
LABELS = ["a", "10"]
UNKNOWN = {"score": "confidence", "threshold": -0.99}


@dataclass(frozen=True)
class Kind:
    """A network, parts of whose answer are not those that a program would assume."""

    preprocessing: Preprocessing
    output: dict[str, Any]
    assumed: dict[str, Any]
    """Defaults of a program that ignores the exported preprocessing."""
    head: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the configuration that make another head."""

    def weights(self) -> native.Weights:
        own = self.preprocessing
        config = ViTConfig(
            image_size=own.image_size,
            patch_size=8,
            channels=own.channels,
            classes=len(NAMES),
            dim=48,
            depth=2,
            heads=3,
            mlp_dim=96,
            **self.head,
        )
        state = {name: 2 * tensor for name, tensor in randomized(ViT(config)).state_dict().items()}
        return native.Weights(config, state, own, NAMES, {}, self.output)


KINDS = {
    "temperature": Kind(
        Preprocessing((32, 32), 3, mean=(0.3, 0.5, 0.7), std=(0.2, 0.3, 0.4)),
        {"task": "class", "temperature": 2.5, "unknown": UNKNOWN},
        {"mean": (0.5,) * 3, "std": (0.5,) * 3},
    ),
    "bounded": Kind(
        Preprocessing((32, 32), 3), {"task": "class", "temperature": 0.4}, {}, {"logits_tanh": True, "logit_scale": 3.0}
    ),
    "MLP": Kind(Preprocessing((32, 32), 3), {"task": "class", "temperature": 0.4}, {}, {"pre_logits": True}),
    "distilled": Kind(Preprocessing((32, 32), 3), {"task": "class", "temperature": 0.4}, {}, {"dist_token": True}),
    "crop": Kind(Preprocessing((32, 32), 3, "crop", 0.5, "bicubic", resize_size=(64, 64)), {}, {"resize": "stretch"}),
    "gray": Kind(Preprocessing((32, 32), 1, mean=(0.2,), std=(0.4,)), {}, {"mean": (0.5,), "std": (0.5,)}),
    "levels": Kind(Preprocessing((32, 32), 1, mean=(0.5,), std=(0.5,), levels=(0, 4095)), {}, {"levels": None}),
    "labels": Kind(Preprocessing((32, 32), 3), {"task": "labels", "thresholds": [0.9, 0.5, 0.9, 0.999]}, {}),
    "numbers": Kind(
        Preprocessing((32, 32), 3),
        {"task": "numbers", "mean": [1.0, -7.0, 0.0, 3.0], "deviation": [2.0, 0.5, 9.0, 1.0]},
        {},
    ),
}
GRAPHS, READY, OTHERS, OWN = (
    ("onnx", "torch", "openvino"),
    ("onnx+", "torch+", "web"),
    ("timm", "hf", "push"),
    ("native", "serve"),
)
TARGETS = (*GRAPHS, *READY, *OTHERS, *OWN)


def refused(kind: str, target: str) -> bool:
    """Cells of the table that say "refused"."""
    other = kind in ("labels", "numbers")
    lacking = kind in ("bounded", "MLP") and target == "timm"
    return lacking or (target in READY and (other or kind == "levels")) or (target in OTHERS and other)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of each kind, the same answering as if its parts were dropped, and an image of it."""
    folder = tmp_path_factory.mktemp("kinds")
    with Image.open(IMAGES / "ship.png") as drawing:
        color = drawing.convert("RGB").resize((120, 90))
    for name, kind in KINDS.items():
        native.save(folder / f"{name}.safetensors", kind.weights())
        if name == "levels":
            deep = np.asarray(color.convert("L"), np.uint16) * 12
            Image.fromarray(deep).save(folder / "levels.png")
        elif kind.preprocessing.channels == 1:
            color.convert("L").save(folder / f"{name}.png")
        else:
            color.save(folder / f"{name}.png")
    return folder


def of_run(weights: Path, image: Path) -> dict[str, float]:
    """The answer of vitral: name → probability, or number."""
    answer = vitral.load(weights, device="cpu", precision="fp32", engine="plain")(image)
    values = answer.values if hasattr(answer, "values") else answer.probabilities
    return dict(zip(NAMES, map(float, values), strict=True))


def meant(logits: np.ndarray, output: dict[str, Any]) -> np.ndarray:
    """Logits (K,) as `preprocessing.json` says that they are read."""
    if "numbers" in output:
        assert output["numbers"] == "logit * deviation + mean"
        return logits * np.array(output["deviation"]) + np.array(output["mean"])
    if output["probabilities"] == "sigmoid of each":
        assert output["thresholds"] == KINDS["labels"].output["thresholds"]
        return 1 / (1 + np.exp(-logits))
    start, _, divisor = output["probabilities"].partition(" of the logits / ")
    assert start == "softmax over classes"
    return softmax(logits / float(divisor or 1))


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def prepared(image: Path, described: dict[str, Any]) -> np.ndarray:
    """An image file as input of a graph (1, C, H, W), as `preprocessing.json` says, by Pillow and torchvision."""
    rule = described["preprocessing"]
    height, width = rule["image_size"]
    with Image.open(image) as opened:
        if rule.get("levels"):
            black, white = rule["levels"]
            values = (np.asarray(opened, np.float64) - black) / (white - black)
            opened = Image.fromarray(np.rint(255 * values.clip(0, 1)).astype(np.uint8))
        opened = opened.convert("L" if rule["channels"] == 1 else "RGB")
        pixels = torch.from_numpy(np.array(opened)).reshape(opened.height, opened.width, -1).permute(2, 0, 1)
    size = [height, width] if rule["resize"] == "stretch" else [min(rule["resize_size"])]
    pixels = transforms.resize(pixels, size, transforms.InterpolationMode(rule["interpolation"]), antialias=True)
    pixels = transforms.center_crop(pixels, [height, width]).float() / 255
    return transforms.normalize(pixels, rule["mean"], rule["std"])[None].numpy()


def decoded(image: Path) -> np.ndarray:
    """An image file as (H, W, C) bytes."""
    with Image.open(image) as opened:
        return np.atleast_3d(np.asarray(opened))


def through_graph(run: Callable[[np.ndarray], np.ndarray], folder: Path, image: Path) -> dict[str, float]:
    described = json.loads((folder / "preprocessing.json").read_text("utf-8"))
    values = meant(run(prepared(image, described))[0], described["output"])
    return dict(zip(described["classes"], map(float, values), strict=True))


def through_onnx(folder: Path, image: Path) -> dict[str, float]:
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    (given,), (wanted,) = session.get_inputs(), session.get_outputs()
    if given.name == "images":
        return through_graph(lambda x: session.run([wanted.name], {given.name: x})[0], folder, image)
    (values,) = session.run([wanted.name], {given.name: decoded(image)})
    classes = json.loads(session.get_modelmeta().custom_metadata_map["vitral.classes"])
    return dict(zip(classes, map(float, values), strict=True))


def through_torch(folder: Path, image: Path) -> dict[str, float]:
    extra = {"vitral.classes": ""}
    module = torch.export.load(folder / "model.pt2", extra_files=extra).module()
    if (folder / "preprocessing.json").exists():
        return through_graph(lambda x: module(torch.from_numpy(x)).detach().numpy(), folder, image)
    values = module(torch.from_numpy(decoded(image).copy()))
    return dict(zip(json.loads(extra["vitral.classes"]), map(float, values), strict=True))


def through_openvino(folder: Path, image: Path) -> dict[str, float]:
    from vitral.inference.engines.openvino import package, shared_core

    package()
    compiled = shared_core().compile_model(
        shared_core().read_model(str(folder / "model.xml")), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    return through_graph(lambda x: compiled([x])[0], folder, image)


def through_timm(folder: Path, image: Path) -> dict[str, float]:
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    config = timm.data.resolve_model_data_config(model)
    transform = timm.data.create_transform(**config, is_training=False)
    with Image.open(image) as opened, torch.inference_mode():
        values = model(transform(opened)[None])[0]
    names = json.loads((folder / "config.json").read_text("utf-8"))["label_names"]
    return dict(zip(names, softmax(values.double().numpy()).tolist(), strict=True))


def through_transformers(folder: Path, image: Path) -> dict[str, float]:
    model = transformers.AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True)
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    classify = transformers.pipeline("image-classification", model=model, image_processor=processor, device="cpu")
    with Image.open(image) as opened:
        return {one["label"]: one["score"] for one in classify(opened, top_k=len(NAMES))}


def through_http(weights: Path, image: Path) -> dict[str, float]:
    with TestClient(app(weights, precision="fp32", device="cpu"), base_url="http://localhost") as client:
        (found,) = client.post("/v1/predict?top=4", content=image.read_bytes(), headers=PNG).json()["predictions"]
    return values_of(found)


def values_of(found: dict[str, Any]) -> dict[str, float]:
    """The values of an answer as plain data, of any task."""
    if "numbers" in found:
        return dict(found["numbers"])
    return {one.get("class", one.get("label")): one["probability"] for one in found["top"]}


def leave(target: str, weights: Path, folder: Path, run: Path) -> list[str]:
    """Write weights for a target. Return what it says about the loss of parts."""
    if target == "serve":
        return []
    if target == "push":
        shutil.copytree(run, folder.with_name("run"))
        shutil.copy(weights, folder.with_name("run") / "model.safetensors")
        prepare(folder.with_name("run"), "somebody/kind", folder, license="mit")
        return (folder / "README.md").read_text("utf-8").splitlines()
    if target in ("native", "timm", "hf"):
        return convert(weights, folder, target).notes
    runtime = real(PACKAGE) if target == "web" else None
    name, ready = target.removesuffix("+"), target.endswith("+")
    return export_model(weights, name, with_preprocessing=ready, out=folder, runtime=runtime).warnings


READERS: dict[str, Callable[[Path, Path], dict[str, float]]] = {
    "onnx": through_onnx,
    "onnx+": through_onnx,
    "torch": through_torch,
    "torch+": through_torch,
    "openvino": through_openvino,
    "timm": through_timm,
    "hf": through_transformers,
    "push": through_transformers,
    "native": lambda folder, image: of_run(folder / "model.safetensors", image),
}


@pytest.mark.parametrize("target", [each for each in TARGETS if each != "web"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_is_carried_in_or_refused(kind, target, files, trained, tmp_path):
    weights, image, out = files / f"{kind}.safetensors", files / f"{kind}.png", tmp_path / "out"
    if refused(kind, target):
        with pytest.raises((UsageError, WeightsError)) as caught:
            leave(target, weights, out, trained.folder)
        assert caught.value.why
        assert not out.exists()
        return
    said, wanted = " ".join(leave(target, weights, out, trained.folder)), of_run(weights, image)
    if kind == "temperature":
        assert ("threshold of unknown images" in said) == (target in OTHERS)
    if kind == "temperature" and target.removesuffix("+") in GRAPHS:
        record = json.loads((out / "export.json").read_text("utf-8"))
        assert record["unknown"] == {"score": "1 - the largest probability", "above": UNKNOWN["threshold"]}
    if target in OTHERS:
        assert ("levels of 16 bits" in said) == (kind == "levels")
    if target in ("hf", "push") or (target == "timm" and kind != "levels"):
        assert_close(of_run(out, image), wanted, EXACT)
    if target in OTHERS and kind == "levels":
        return
    found = through_http(weights, image) if target == "serve" else READERS[target](out, image)
    assert_close(found, wanted, RESIZED if target in OTHERS else EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_answers_or_is_refused(kind, files, trained, tmp_path):
    weights, image, out = files / f"{kind}.safetensors", files / f"{kind}.png", tmp_path / "out"
    if refused(kind, "web"):
        with pytest.raises(UsageError) as caught:
            leave("web", weights, out, trained.folder)
        assert caught.value.why
        return
    from test_site import ASK, hosted

    said = " ".join(leave("web", weights, out, trained.folder))
    assert "threshold of unknown images" not in said
    with chromium() as browser, hosted(out) as address:
        visit = Visit(browser, address)
        visit.page.wait_for_function(f"() => document.getElementById('title').textContent === '{kind}'")
        content = base64.b64encode(image.read_bytes()).decode()
        found = visit.page.evaluate(ASK, [image.name, content, {"top": "4"}])
        visit.check()
    assert_close(values_of(found), of_run(weights, image), 1e-3)
    assert (found["label"] == "unknown") == found["unknown"] == (kind == "temperature")


@pytest.mark.parametrize(
    ("score", "ready", "carried"),
    [
        ("confidence", False, True),
        ("confidence", True, True),
        ("energy", False, True),
        ("energy", True, False),
        ("distance", False, False),
    ],
)
def test_a_threshold_of_unknown_images_leaves_or_a_warning_says_so(score, ready, carried, tmp_path):
    kind = KINDS["temperature"]
    statistics = fit_statistics(np.random.default_rng(0).normal(size=(20, 48)), np.arange(20) % len(NAMES))
    exact = choose("cpu", "fp32", dim=48)
    predictor = vitral.Predictor(native.build(kind.weights()), kind.preprocessing, NAMES, machine=exact)
    detector = Detector(score, 0.25, statistics if score == "distance" else {})
    predictor.output = dataclasses.replace(predictor.output, unknown=detector)
    exported = export_model(predictor, "torch", with_preprocessing=ready, out=tmp_path / "out")
    assert exported.record.get("unknown", {}).get("above") == (0.25 if carried else None)
    assert any("without the threshold of unknown images" in one for one in exported.warnings) == (not carried)


@pytest.mark.parametrize("kind", ["temperature", "bounded", "MLP", "distilled", "crop", "gray", "levels"])
def test_without_its_part_the_answer_is_another(kind, files):
    """Else the tests above would pass for a target that drops it."""
    dropped = dataclasses.replace(KINDS[kind].preprocessing, **KINDS[kind].assumed)
    native.save(
        files / "dropped.safetensors", dataclasses.replace(KINDS[kind].weights(), preprocessing=dropped, output={})
    )
    found, wanted = (of_run(files / f"{name}.safetensors", files / f"{kind}.png") for name in ("dropped", kind))
    assert max(abs(found[name] - wanted[name]) for name in NAMES) > 2 * RESIZED


def test_what_the_task_and_the_threshold_decide_is_served_and_kept(files, tmp_path):
    for kind in ("labels", "temperature"):
        weights, image = files / f"{kind}.safetensors", files / f"{kind}.png"
        convert(weights, tmp_path / f"{kind}.safetensors", "native")
        kept = vitral.load(tmp_path / f"{kind}.safetensors", device="cpu", precision="fp32")(image)
        with TestClient(app(weights, precision="fp32", device="cpu"), base_url="http://localhost") as client:
            (served,) = client.post("/v1/predict", content=image.read_bytes(), headers=PNG).json()["predictions"]
        if kind == "labels":
            assert [one["label"] for one in served["labels"]] == list(kept.labels) == LABELS
        else:
            assert served["unknown"] is kept.unknown is True


def assert_close(found: dict[str, float], wanted: dict[str, float], tolerance: float) -> None:
    """Every name has the same value."""
    assert found.keys() == wanted.keys()
    assert {name: found[name] - wanted[name] for name in NAMES if abs(found[name] - wanted[name]) > tolerance} == {}
