"""Test `vitral quantize`: ranges next to the weights, and a recommendation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import vitral
from running import train
from vitral.cli.main import main
from vitral.data.options import DataOptions
from vitral.errors import DataError, UsageError, WeightsError, WriteError
from vitral.inference.engines import int8, openvino
from vitral.system import cpu_name
from vitral.training.run_folder import RunFolder
from vitral.workflows.evaluate import evaluate
from vitral.workflows.quantize import Quantized, quantize

computed = pytest.mark.skipif(bool(int8.unavailable_reason()), reason=int8.unavailable_reason())


@pytest.fixture(autouse=True)
def _without_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test int8 with torch; tests/inference/test_openvino.py tests OpenVINO."""
    monkeypatch.setattr(openvino, "installed", lambda: False)


@pytest.fixture
def run(trained: vitral.TrainedRun, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained.folder, tmp_path / "run"))


def test_a_run_that_cannot_be_written_is_refused_before_images_are_read(run, monkeypatch):
    monkeypatch.setattr("vitral.folders.os.access", lambda path, mode: not Path(path).is_relative_to(run))
    monkeypatch.setattr("vitral.workflows.quantize.data_for", lambda *given: pytest.fail("images are read"))
    with pytest.raises(WriteError, match=rf"(?s)cannot write the ranges.*cp -r {run} COPY, then vitral quantize COPY"):
        quantize(run)


@computed
def test_a_quantized_run_loads_as_int8(run):
    with pytest.raises(WeightsError, match="not quantized yet") as error:
        vitral.load(run, precision="int8")
    assert f"vitral quantize {run}" in str(error.value)
    with pytest.raises(WeightsError, match=r"vitral quantize .*model.safetensors DATA"):
        vitral.load(run / "model.safetensors", precision="int8")
    with pytest.raises(UsageError, match=r"vitral quantize .*model.safetensors DATA"):
        quantize(run / "model.safetensors", images=8, judged=20)
    found = quantize(run, images=8, judged=20)
    assert found.file == run / "model.int8.json"
    assert found.agree >= 0.9
    data = json.loads(found.file.read_text())
    assert len(data["ranges"]) == 4 * len(vitral.load(run).model.blocks)
    predictor = vitral.load(run, precision="int8")
    assert predictor.engine == "int8"
    images = [np.random.default_rng(i).integers(0, 256, (8, 8, 3), dtype=np.uint8) for i in range(5)]
    assert np.abs(predictor.probabilities(images) - vitral.load(run).probabilities(images)).max() < 0.1
    plain, integers = (evaluate(run, precision=precision) for precision in ("fp32", "int8"))
    assert abs(plain.accuracy - integers.accuracy) <= 0.1
    assert vitral.load(run / "model.safetensors", precision="int8").engine == "int8"
    with pytest.raises(UsageError, match="engine plain does not compute in int8"):
        vitral.load(run, precision="int8", engine="plain")


@computed
def test_int8_is_not_evaluated_on_training_images(make_images, tmp_path):
    photos = make_images({"train/cat": 8, "train/dog": 8, "test/cat": 3, "test/dog": 3})
    trained = train(photos, tmp_path / "run")
    (photos / "test/cat/0.png").unlink()
    found = quantize(trained.folder, images=4)
    assert found.changed.endswith("since the run began: 1 test image of 'cat' fewer.")
    assert found.to_json()["changed"] == found.changed
    shutil.rmtree(photos / "test")
    (photos / "train/cat/0.png").unlink()
    (trained.folder / "held-out.jsonl").unlink()
    with pytest.raises(DataError, match="the network may have been trained on the current val images"):
        quantize(trained.folder, images=4)


@computed
def test_ranges_of_other_weights_are_refused(run):
    file = quantize(run, images=4, judged=4).file
    other = vitral.load(run, precision="fp32")
    with torch.no_grad():
        other.model.blocks[0].attn.qkv.weight.add_(1)
    from vitral.inference.engines.int8_ranges import read_ranges

    with pytest.raises(WeightsError, match="other weights"):
        read_ranges(file, other.model, run)
    file.write_text("{}")
    with pytest.raises(WeightsError, match="damaged ranges"):
        vitral.load(run, precision="int8")


def test_worthwhile_means_faster_and_no_worse():
    def result(accuracy: float, speed: float) -> Quantized:
        return Quantized(Path("x"), 1, 1, "1 test image", "bf16", 0.9, accuracy, 1.0, speed)

    assert result(0.8971, 1.06).is_worthwhile
    assert not result(0.8969, 2.0).is_worthwhile
    assert not result(0.95, 1.04).is_worthwhile


@computed
@pytest.mark.parametrize("slower", [False, True])
def test_int8_that_is_not_worthwhile_warns_on_loading(run, capsys, monkeypatch, slower):
    seconds = [[2.0, 2.0], [4.0 if slower else 1.0] * 2]
    answers = [vitral.load(run).logits(torch.zeros(12, 1, 8, 12, dtype=torch.uint8)).argmax(1).numpy()] * 2
    monkeypatch.setattr("vitral.workflows.quantize._compare", lambda predictors, batches: (answers, seconds))
    quantize(run, images=4)
    assert main(["evaluate", str(run), "--precision", "int8"]) == 0
    reported = capsys.readouterr().err
    assert (f"int8 was not worthwhile on {cpu_name()}: 0.50 times the speed of" in reported) == slower
    assert ("int8 was not worthwhile" in vitral.load(run, precision="int8").note) == slower


@computed
def test_bad_images_are_left_out_where_the_run_did_so(run, make_images):
    """For other images it must be requested; unreadable images are not counted."""
    data = make_images({f"{split}/{label}": 4 for split in ("train", "test") for label in ("day", "night")})
    whole = 8
    for split in ("train", "test"):
        (data / split / "day/0.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"day/0\.png"):
        quantize(run, DataOptions(data))
    assert not (run / "model.int8.json").exists()
    found = quantize(run, DataOptions(data, bad_images="skip"))
    assert (found.images, found.judged) == (whole - 1, whole - 1)
    with pytest.raises(UsageError, match="unknown choice for bad images"):
        quantize(run, DataOptions(data, bad_images="ignore"))
    with pytest.raises(UsageError, match="leave out the split"):
        quantize(run, DataOptions(data, split="test"))
    config = json.loads((run / "config.json").read_text())
    config["run"] |= {"data": str(data), "bad_images": "skip"}
    RunFolder(run).write(run / "config.json", json.dumps(config))
    assert quantize(run).judged == whole - 1


@computed
def test_the_command(run, capsys):
    assert main(["quantize", str(run), "--images", "4", "--judged", "6"]) == 0
    reported = capsys.readouterr()
    assert "int8" in reported.out
    assert "of the predictions agree" in reported.out
    assert "model.int8.json" in reported.err
    assert main(["quantize", str(run), "--images", "4", "--judged", "6", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["images"], data["judged_on"]) == (4, "6 test images") or "val" in data["judged_on"]
    assert main(["predict", str(run), "nowhere.png", "--precision", "int8"]) == 2
    assert main(["quantize", str(run), "--images", "0"]) == 2


def test_an_unsupported_machine(run, monkeypatch, capsys):
    monkeypatch.setattr("vitral.inference.predictor.unsupported_reason", lambda network: "no such instructions")
    with pytest.raises(UsageError, match=r"int8 cannot be computed here\n(?s:.*)why: no such instructions"):
        quantize(run)
    assert not (run / "model.int8.json").exists()
    assert main(["quantize", str(run)]) == 2
    assert "why: no such instructions" in capsys.readouterr().err
    assert main(["evaluate", str(run), "--precision", "int8"]) == 2
    assert "why: no such instructions" in capsys.readouterr().err, "not that it should be quantized first"
