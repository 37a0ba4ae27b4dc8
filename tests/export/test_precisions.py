"""fp16 and int8: content, loss, and limits of the proof."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import vitral
from images import noise
from running import as_json, printed, sampled
from vitral.errors import ExportError, UsageError
from vitral.export import export_model
from vitral.export import onnx as onnx_target
from vitral.export.onnx import ONNX, ONNXTarget
from vitral.export.target import Runtime

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def types(file: Path) -> set[int]:
    return {one.data_type for one in onnx.load(file).graph.initializer}


def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ONNX Runtime predict the last class for every image."""
    load = ONNXTarget.load

    def loaded(self: Any, folder: Path) -> Runtime:
        right = load(self, folder)

        def run(images: np.ndarray) -> np.ndarray:
            logits = right.run(images).copy()
            logits[:, -1] += 9
            return logits

        return dataclasses.replace(right, run=run)

    monkeypatch.setattr(ONNXTarget, "load", loaded)


@pytest.mark.slow
def test_fp16_has_half_the_size_and_inputs_in_fp32():
    whole, half = (export_model("demo", "onnx", precision=p, out=p) for p in ("fp32", "fp16"))
    assert half.proof.size < 0.55 * whole.proof.size
    assert half.proof.difference <= half.proof.bar.difference == 0.02
    assert onnx.TensorProto.FLOAT not in types(Path("fp16/model.onnx"))
    graph = onnxruntime.InferenceSession("fp16/model.onnx")
    assert [one.type for one in (*graph.get_inputs(), *graph.get_outputs())] == ["tensor(float)"] * 2


@pytest.mark.slow
def test_fp16_of_openvino_has_half_the_weights():
    whole, half = (export_model("demo", "openvino", precision=p, out=p) for p in ("fp32", "fp16"))
    assert half.proof.difference <= 0.02
    assert Path("fp16/model.bin").stat().st_size < 0.55 * Path("fp32/model.bin").stat().st_size
    assert (whole.record["precision"], half.record["precision"]) == ("fp32", "fp16")


def test_int8_is_calibrated_on_training_images(trained):
    found = export_model(trained.folder, "onnx", precision="int8", out="there")
    model = onnx.load("there/model.onnx")
    assert onnx.TensorProto.INT8 in types(Path("there/model.onnx"))
    operators = [node.op_type for node in model.graph.node]
    assert operators.count("DequantizeLinear") > operators.count("QuantizeLinear") > 0, "in QDQ form"
    weights = [onnx.numpy_helper.to_array(one) for one in model.graph.initializer if one.data_type == 3]
    assert max(int(np.abs(one).max()) for one in weights) <= 64, "7 bits: with 8, sums overflow on CPUs without VNNI"
    assert {"vitral.classes", "vitral.weights"} <= {one.key for one in model.metadata_props}
    assert found.proof.accuracy_export is not None
    assert found.proof.accuracy_export >= found.proof.accuracy - 0.005  # type: ignore[operator]
    assert {path.name for path in Path("there").iterdir()} == {"model.onnx", "preprocessing.json", "export.json"}


def test_ranges_are_measured_on_training_images_only(trained, monkeypatch):
    given: list[int] = []
    quantize = onnx_target._quantize

    def counted(job: Any, *more: Any) -> None:
        given.extend(len(one) for one in job.calibration)
        quantize(job, *more)

    monkeypatch.setattr(onnx_target, "_quantize", counted)
    export_model(trained.folder, "onnx", precision="int8", out="there")
    assert sum(given) == 24, "the train split has 24"


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_precisions_with_preprocessing_in_the_graph(precision, trained):
    found = export_model(trained.folder, "onnx", precision=precision, with_preprocessing=True, out="there")
    image = noise(5, (20, 30), 1)
    session = onnxruntime.InferenceSession("there/model.onnx")
    wanted = vitral.load(trained.folder, device="cpu", precision="fp32")(image).probabilities
    assert np.abs(session.run(None, {"image": image[..., None]})[0] - wanted).max() < 0.1
    assert found.record["with_preprocessing"]


@pytest.mark.slow
def test_int8_that_loses_too_much_is_kept_only_if_accepted(trained, monkeypatch, capsys):
    wrong(monkeypatch)
    words = ("export", str(trained.folder), "--precision", "int8", "--out", "there")
    out, err = printed(capsys, *words, code=1)
    assert "points of accuracy are lost, the limit is 0.5" in err
    assert "--accept" in err
    assert "images/s" in out
    assert not Path("there").exists()
    _, err = printed(capsys, *words, "--accept")
    assert "note: accepted although" in err
    record = json.loads(Path("there/export.json").read_text("utf-8"))
    assert record["accepted"]
    assert not record["proof"]["passed"]


@pytest.mark.slow
def test_fp16_that_differs_too_much_is_not_kept(monkeypatch):
    wrong(monkeypatch)
    with pytest.raises(ExportError, match=r"the limit is 0\.02"):
        export_model("demo", "onnx", precision="fp16", out="there")
    assert not Path("there").exists()


def test_int8_without_images_is_refused():
    with pytest.raises(UsageError, match=r"(?s)int8 needs images.*vitral export demo DATA"):
        export_model("demo", "onnx", precision="int8")


def test_int8_of_a_resnet_is_refused(make_images):
    network = vitral.create("BiT-R50x1", layers=(1,), classes=2, image_size=32)
    predictor = vitral.Predictor(network, vitral.Preprocessing((32, 32)), ["cat", "dog"], engine="plain")
    predictor.machine = dataclasses.replace(predictor.machine, precision="fp32")
    data = make_images({"cat": 3, "dog": 3})
    with pytest.raises(UsageError, match=r"(?s)no int8 form.*--precision fp16"):
        export_model(predictor, "onnx", data, precision="int8", out="there")
    assert not Path("there").exists()


@pytest.mark.parametrize("precision", sampled(["fp32", "int8"], 2))
def test_weights_above_the_limit_are_in_a_second_file(precision, make_images, monkeypatch):
    monkeypatch.setattr(onnx_target, "LARGEST", 0)
    options: Any = {"precision": precision, "out": "there", "data": make_images({"cat": 3, "dog": 3})}
    options |= {"accept": True} if precision == "int8" else {}  # noise
    found = export_model("demo", "onnx", **options)
    assert {"model.onnx", "model.onnx.data"} <= {path.name for path in Path("there").iterdir()}
    assert found.proof.size == sum(path.stat().st_size for path in Path("there").glob("model.onnx*"))
    again = export_model("demo", "onnx", overwrite=True, **options)
    assert again.record["files"] == found.record["files"]


def test_json_of_the_command_has_the_limits(trained, capsys):
    found = as_json(capsys, "export", str(trained.folder), "--precision", "int8", "--out", "there")
    assert found["proof"]["bar"] == {"agreement": 0.0, "lost": 0.005}
    assert ONNX.precisions == ("fp32", "fp16", "int8")
