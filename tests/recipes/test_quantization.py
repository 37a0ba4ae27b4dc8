"""`vitral quantize`: ranges beside the weights, and an honest word on whether they pay."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import vitral
from running import train
from vitral import openvino
from vitral.cli import main
from vitral.errors import DataError, UsageError, WeightsError
from vitral.model import quantized
from vitral.recipes.evaluation import evaluate
from vitral.recipes.quantization import Quantized, quantize

computed = pytest.mark.skipif(bool(quantized.lacking()), reason=quantized.lacking())


@pytest.fixture(autouse=True)
def _without_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers by torch; by OpenVINO: tests/test_openvino.py."""
    monkeypatch.setattr(openvino, "installed", lambda: False)


@pytest.fixture
def run(trained: vitral.TrainedRun, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained.folder, tmp_path / "run"))


@computed
def test_a_run_is_measured_and_then_loads_as_integers(run):
    with pytest.raises(WeightsError, match="not quantized yet") as error:
        vitral.load(run, precision="int8")
    assert f"vitral quantize {run}" in str(error.value)
    with pytest.raises(WeightsError, match=r"vitral quantize .*model.safetensors DATA"):
        vitral.load(run / "model.safetensors", precision="int8")
    with pytest.raises(UsageError, match=r"vitral quantize .*model.safetensors DATA"):
        quantize(run / "model.safetensors", pictures=8, judged=20)
    found = quantize(run, pictures=8, judged=20)
    assert found.file == run / "model.int8.json"
    assert found.agree >= 0.9
    data = json.loads(found.file.read_text())
    assert len(data["ranges"]) == 4 * len(vitral.load(run).model.blocks)
    predictor = vitral.load(run, precision="int8")
    assert predictor.engine == "int8"
    pictures = [np.random.default_rng(i).integers(0, 256, (8, 8, 3), dtype=np.uint8) for i in range(5)]
    assert np.abs(predictor.probabilities(pictures) - vitral.load(run).probabilities(pictures)).max() < 0.1
    plain, integers = (evaluate(run, precision=precision) for precision in ("fp32", "int8"))
    assert abs(plain.accuracy - integers.accuracy) <= 0.1
    assert vitral.load(run / "model.safetensors", precision="int8").engine == "int8"
    with pytest.raises(UsageError, match="the module itself does not compute in int8"):
        vitral.load(run, precision="int8", engine="plain")


@computed
def test_integers_are_not_judged_on_what_the_run_learned_from(make_pictures, tmp_path):
    photos = make_pictures({"train/cat": 8, "train/dog": 8, "test/cat": 3, "test/dog": 3})
    trained = train(photos, tmp_path / "run")
    (photos / "test/cat/0.png").unlink()
    found = quantize(trained.folder, pictures=4)
    assert found.changed.endswith("began with: 1 test picture of 'cat' fewer.")
    assert found.to_json()["changed"] == found.changed
    shutil.rmtree(photos / "test")
    (photos / "train/cat/0.png").unlink()
    with pytest.raises(DataError, match="the run may have learned from the val pictures"):
        quantize(trained.folder, pictures=4)


@computed
def test_ranges_of_other_weights_are_refused(run):
    file = quantize(run, pictures=4, judged=4).file
    other = vitral.load(run, precision="fp32")
    with torch.no_grad():
        other.model.blocks[0].attn.qkv.weight.add_(1)
    from vitral.weights.ranges import read_ranges

    with pytest.raises(WeightsError, match="other weights"):
        read_ranges(file, other.model, run)
    file.write_text("{}")
    with pytest.raises(WeightsError, match="damaged ranges"):
        vitral.load(run, precision="int8")


def test_what_pays_is_faster_and_no_worse():
    def result(accuracy: float, speed: float) -> Quantized:
        return Quantized(Path("x"), 1, 1, "1 test picture", "bf16", 0.9, accuracy, 1.0, speed)

    assert result(0.8971, 1.06).pays
    assert not result(0.8969, 2.0).pays
    assert not result(0.95, 1.04).pays


@computed
@pytest.mark.parametrize("slower", [False, True])
def test_integers_that_did_not_pay_say_so_whenever_they_are_asked_for(run, capsys, monkeypatch, slower):
    seconds = [[2.0, 2.0], [4.0 if slower else 1.0] * 2]
    answers = [vitral.load(run).logits(torch.zeros(12, 1, 8, 12, dtype=torch.uint8)).argmax(1).numpy()] * 2
    monkeypatch.setattr("vitral.recipes.quantization._in_turn", lambda predictors, batches: (answers, seconds))
    quantize(run, pictures=4)
    assert main(["evaluate", str(run), "--precision", "int8"]) == 0
    told = capsys.readouterr().err
    assert ("integers did not pay: 0.50 times as fast as" in told) == slower
    assert ("did not pay" in vitral.load(run, precision="int8").note) == slower


@computed
def test_bad_pictures_are_left_out_where_the_run_did_so(run, make_pictures):
    """Of pictures that are named it must be asked for; what cannot be read is not counted."""
    data = make_pictures({f"{split}/{label}": 4 for split in ("train", "test") for label in ("day", "night")})
    whole = 8
    for split in ("train", "test"):
        (data / split / "day/0.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"day/0\.png"):
        quantize(run, data)
    assert not (run / "model.int8.json").exists()
    found = quantize(run, data, bad_images="skip")
    assert (found.pictures, found.judged) == (whole - 1, whole - 1)
    with pytest.raises(UsageError, match="unknown choice for bad pictures"):
        quantize(run, data, bad_images="ignore")
    config = json.loads((run / "config.json").read_text())
    config["run"] |= {"data": str(data), "bad_images": "skip"}
    (run / "config.json").write_text(json.dumps(config))
    assert quantize(run).judged == whole - 1


@computed
def test_the_command(run, capsys):
    assert main(["quantize", str(run), "--pictures", "4", "--judged", "6"]) == 0
    told = capsys.readouterr()
    assert "int8" in told.out
    assert "answered alike" in told.out
    assert "model.int8.json" in told.err
    assert main(["quantize", str(run), "--pictures", "4", "--judged", "6", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["pictures"], data["judged_on"]) == (4, "6 test pictures") or "val" in data["judged_on"]
    assert main(["predict", str(run), "nowhere.png", "--precision", "int8"]) == 2
    assert main(["quantize", str(run), "--pictures", "0"]) == 2


def test_a_machine_that_cannot(run, monkeypatch, capsys):
    monkeypatch.setattr("vitral.predict.refusal", lambda network: "no such instructions")
    with pytest.raises(UsageError, match=r"int8 cannot be computed here\n(?s:.*)why: no such instructions"):
        quantize(run)
    assert not (run / "model.int8.json").exists()
    assert main(["quantize", str(run)]) == 2
    assert "why: no such instructions" in capsys.readouterr().err
    assert main(["evaluate", str(run), "--precision", "int8"]) == 2
    assert "why: no such instructions" in capsys.readouterr().err, "not that it should be quantized first"
