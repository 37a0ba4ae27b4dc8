"""Preprocessing in a graph gives the same bytes as `Preprocessing.geometry`."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tarfile

import numpy as np
import onnxruntime
import pytest
import torch

import vitral
from images import noise
from vitral.data.images.preprocessing import INTERPOLATIONS, Preprocessing, _has_fast_uint8_resize
from vitral.errors import UsageError
from vitral.export import export_model
from vitral.export.graph import FILTERS, WithPreprocessing
from vitral.inference.outputs.classes import Classes

SIZES = ((24, 40), (1, 1), (5, 3), (33, 31), (60, 45), (101, 37), (37, 200), (500, 333))
"""Heights and widths of images; the first is the network's."""

exact = pytest.mark.skipif(not _has_fast_uint8_resize(), reason="torch resizes in floats on this CPU")


def rules(interpolation: str) -> list[Preprocessing]:
    """Return every combination of resizing, cropping and padding."""
    found = []
    for resize, before, center in itertools.product(
        ("stretch", "crop", "letterbox"), (None, (37, 37), (20, 20), (30, 50)), ("round", "floor")
    ):
        mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
        found.append(
            Preprocessing((24, 40), 3, resize, 0.8, interpolation, True, mean, std, resize_size=before, center=center)  # type: ignore[arg-type]
        )
    return found


@exact
@pytest.mark.parametrize("interpolation", FILTERS)
def test_every_combination_gives_the_same_bytes(interpolation):
    for own in rules(interpolation):
        graph = WithPreprocessing(torch.nn.Identity(), own)
        for number, size in enumerate(SIZES):
            image = noise(number, size)
            assert torch.equal(graph.geometry(torch.from_numpy(image)).byte(), own.geometry(image)), (own, size)


@exact
def test_one_channel_and_smooth_images():
    own = Preprocessing((9, 7), 1, "crop", mean=(0.3,), std=(0.2,))
    graph = WithPreprocessing(torch.nn.Identity(), own)
    for height in range(1, 40, 3):
        ramp = np.linspace(0, 255, height * 23).reshape(height, 23, 1).astype(np.uint8)
        assert torch.equal(graph.geometry(torch.from_numpy(ramp)).byte(), own.geometry(ramp)), height


def test_standardization_equals_training():
    own = Preprocessing((8, 8), 3, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    seen: list[torch.Tensor] = []

    class Network(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            seen.append(images)
            return images.flatten(1)

    image = noise(0, (8, 8))
    WithPreprocessing(Network(), own)(torch.from_numpy(image))
    torch.testing.assert_close(seen[0], own.standardize(own.geometry(image)[None]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("interpolation", sorted(INTERPOLATIONS.keys() - FILTERS.keys()))
def test_pillow_filters_are_refused(interpolation):
    with pytest.raises(UsageError, match=f"{interpolation} interpolation; bilinear and bicubic"):
        WithPreprocessing(torch.nn.Identity(), Preprocessing((8, 8), interpolation=interpolation))


def test_resizing_without_antialias_is_refused():
    with pytest.raises(UsageError, match="without antialias"):
        WithPreprocessing(torch.nn.Identity(), Preprocessing((8, 8), antialias=False))


@pytest.mark.slow
@exact
def test_onnx_accepts_images_of_any_size(tmp_path):
    predictor = vitral.load("demo", device="cpu", precision="fp32")
    predictor.output = Classes(predictor.classes, temperature=1.5)  # as trained runs have
    found = export_model(predictor, "onnx", with_preprocessing=True, out=tmp_path / "demo")
    assert found.proof.difference <= 1e-4
    assert sorted(path.name for path in found.folder.iterdir()) == ["export.json", "model.onnx"]
    session = onnxruntime.InferenceSession(str(found.folder / "model.onnx"))
    (given,), (output,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.type, given.shape) == ("image", "tensor(uint8)", ["height", "width", 3])
    assert (output.name, output.shape) == ("probabilities", [10])
    for number, size in enumerate(SIZES):
        image = noise(number, size)
        probabilities = session.run(None, {"image": image})[0]
        assert np.abs(probabilities - predictor(image).probabilities).max() < 1e-4, size


ALONE = """
import json, sys
import numpy as np, onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession(sys.argv[1])
classes = json.loads(session.get_modelmeta().custom_metadata_map["vitral.classes"])
found = []
for path in sys.argv[2:]:
    image = np.asarray(ImageOps.exif_transpose(Image.open(path)).convert("RGB"))
    found.append(classes[session.run(None, {"image": image})[0].argmax()])
assert not {"vitral", "torch"} & set(sys.modules)
print(json.dumps(found))
"""


@pytest.mark.slow
@exact
def test_onnx_runtime_alone_gives_the_classes_of_a_hundred_photographs(shared_data, tmp_path):
    with tarfile.open(shared_data / "imagenet-samples.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    photographs = sorted(str(path) for path in tmp_path.rglob("*.JPEG"))
    assert len(photographs) == 100
    export_model("demo", "onnx", with_preprocessing=True, out=tmp_path / "demo")
    words = [sys.executable, "-c", ALONE, str(tmp_path / "demo" / "model.onnx"), *photographs]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path)
    predictor = vitral.load("demo", device="cpu", precision="fp32")
    assert json.loads(done.stdout) == [one.label for one in predictor(photographs)]


@pytest.mark.slow
@exact
def test_torch_accepts_images_of_any_size(tmp_path):
    found = export_model("demo", "torch", with_preprocessing=True, out=tmp_path / "demo")
    program = torch.export.load(found.folder / "model.pt2").module()
    predictor = vitral.load("demo", device="cpu", precision="fp32")
    for number, size in enumerate(SIZES):
        image = noise(number, size)
        with torch.inference_mode():
            probabilities = program(torch.from_numpy(image)).numpy()
        assert np.abs(probabilities - predictor(image).probabilities).max() < 1e-4, size


def test_openvino_is_refused_and_other_targets_named():
    with pytest.raises(UsageError, match=r"(?s)does not support preprocessing in the graph.*--to onnx, --to torch"):
        export_model("demo", "openvino", with_preprocessing=True)
