"""The table "What the fitted numbers hold for" of docs/reliability.md: each cell is a test."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from vitral.cli.main import main
from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import UsageError, VitralError, WeightsError
from vitral.export import export_model
from vitral.inference.engines import int8, openvino
from vitral.inference.engines.int8_ranges import Calibration, ranges_file, write_ranges
from vitral.inference.options import InferenceOptions
from vitral.inference.outputs.classes import Classes
from vitral.inference.sure import cuts_from_json
from vitral.inference.tta import views_of
from vitral.inference.unknown import Detector
from vitral.model import ViT, ViTConfig
from vitral.testing.formats import randomized
from vitral.weights import native
from vitral.weights.convert import convert
from vitral.weights.fitted import CHANGES, NUMBERS
from vitral.weights.load import read
from vitral.workflows.evaluate import evaluate_images
from vitral.workflows.quantize import quantize
from vitral.workflows.unknown import evaluate_unknown

TABLE = Path(__file__).parents[2] / "docs/reliability.md"
NAMES = ("ant", "bee", "cat")
TEMPERATURE, SCORES = 2.5, [round(i / 20, 2) for i in range(1, 20)]
CUTS = [[0.2, 19, 12, 0.6, 0.41, 0.81], [0.8, 9, 9, 0.9, 0.7, 1.0]]
ROWS = {
    "temperature": "temperature",
    "prediction sets (`--coverage`)": "scores",
    "thresholds of `--right`": "cuts",
    "threshold of unknown images": "unknown",
    "thresholds of labels": "thresholds",
    "mean and standard deviation of numbers": "mean",
    "ranges of int8": "ranges",
}
OUTPUTS: dict[str, dict[str, Any]] = {
    "class": {
        "task": "class",
        "temperature": TEMPERATURE,
        "scores": SCORES,
        "unknown": {"score": "confidence", "threshold": 0.5},
        "cuts": CUTS,
    },
    "labels": {"task": "labels", "thresholds": [0.2, 0.5, 0.9]},
    "numbers": {"task": "numbers", "mean": [1.0, 2.0, 3.0], "deviation": [2.0, 1.0, 0.5]},
}
TASKS = {"thresholds": "labels", "mean": "numbers"}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "`--tta`": [{"tta": "mirror"}, {"tta": "both"}],
    "other size": [{"patch_size": 4}, {"image_size": 24}, {"channels": 1}],
    "other classes": [{"classes": 5, "new_head": True}],
    "other levels": [{"levels": (0, 65535)}],
    "changed weights": [{"edited": True}],
    "`bf16`, `fp32`, engines": [{"precision": "fp32"}, {"precision": "bf16"}, {"engine": "packed"}],
    "`int8`": [{"precision": "int8"}],
}
"""Column → options of `loaded`."""

quantizes = pytest.mark.skipif(bool(int8.unavailable_reason()), reason=int8.unavailable_reason())


@pytest.fixture(autouse=True)
def _without_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino, "installed", lambda: False)


def cells() -> list[Any]:
    """Number, change and promise of each cell of the table."""
    text = TABLE.read_text("utf-8").split("## What the fitted numbers hold for")[1]
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    found = [(ROWS[row[0]], change, promise) for row in rows for change, promise in zip(head[1:], row[1:], strict=True)]
    return [
        pytest.param(*cell, id=f"{cell[0]} {cell[1]}", marks=quantizes if {"`int8`", "ranges"} & {*cell} else ())
        for cell in found
    ]


def saved(folder: Path, task: str, *, ranges: bool = False) -> Path:
    """Weights of a tiny network with the fitted numbers of a task, for gray images of 16 bits."""
    config = ViTConfig(image_size=16, patch_size=8, channels=3, classes=3, dim=32, depth=2, heads=2, mlp_dim=64)
    prepared = Preprocessing((16, 16), 3, levels=(0, 4095))
    model = randomized(ViT(config)).eval()
    file = folder / f"{task}.safetensors"
    native.save(file, native.Weights(config, model.state_dict(), prepared, NAMES, {}, OUTPUTS[task]))
    if ranges:
        images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        write_ranges(ranges_file(file), model, Calibration(int8.observe(model, [images])), measured_on="noise")
    return file


def loaded(file: Path, options: dict[str, Any], edited: bool = False) -> tuple[vitral.Predictor, list[str]]:
    """A predictor, and the Python warnings of loading it, by options of `vitral.load`; its weights may be `edited`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        predictor = vitral.load(file, device="cpu", **options)
        if edited:
            with torch.no_grad():
                predictor.model.head.weight.mul_(1.5)
            predictor(noise(0))
    return predictor, [str(one.message) for one in caught]


def in_use(predictor: vitral.Predictor, number: str) -> bool:
    """True if the predictor uses the number; `UsageError` if it says why not."""
    output: Any = predictor.output
    if number == "scores":
        return bool(output.covering(0.5).threshold == SCORES[9])
    if number == "cuts":
        return bool(output.sure(0.7).cut.probability == 0.8)
    if number == "ranges":
        return predictor.engine == "int8"
    wanted = OUTPUTS[TASKS.get(number, "class")][number]
    known = output.to_json().get(number)
    return bool(known == wanted)


def loads(number: str, options: dict[str, Any], promise: str, folder: Path) -> None:
    quantized = number == "ranges" or ("int8" in options.values() and number not in TASKS)
    file = saved(folder, TASKS.get(number, "class"), ranges=quantized)
    edited = options.get("edited", False)
    options = {name: value for name, value in options.items() if name != "edited"}
    if number == "ranges":
        options = {**options, "precision": "int8"}
    if promise == "error":
        with pytest.raises(VitralError) as caught:
            in_use(loaded(file, options, edited)[0], number)
        assert caught.value.hint
        return
    predictor, warned = loaded(file, options, edited)
    assert in_use(predictor, number) == (promise == "holds")
    assert predictor.account is not None
    said = [note for note in warned if "left out" in note and NUMBERS[number] in note]
    assert len(said) == (promise == "left out")
    noted = [*predictor.account.notes, *predictor.left_out]
    assert all(note.removeprefix(f"{predictor.source}: ") in noted for note in said)


def converts(number: str, promise: str, folder: Path) -> None:
    file = saved(folder, TASKS.get(number, "class"), ranges=number == "ranges")
    if promise == "error":
        with pytest.raises(WeightsError, match="cannot be written"):
            convert(file, folder / "there", "hf")
        return
    notes = convert(file, folder / "there", "hf").notes
    back, _ = loaded(folder / "there", {})
    assert isinstance(back.output, Classes)
    if number == "temperature":
        image = noise(0)
        assert np.allclose(back.probabilities(image), loaded(file, {})[0].probabilities(image), atol=1e-2)
        assert any("divided by the temperature" in note for note in notes)
    elif number == "scores":
        assert any("--to native keeps them" in note for note in notes)
        with pytest.raises(UsageError, match="needs weights with"):
            back.output.covering(0.5)
    elif number == "cuts":
        assert any("the thresholds of --right stay behind: --to native keeps them" in note for note in notes)
        with pytest.raises(UsageError, match="no thresholds for --right"):
            back.output.sure(0.5)
    elif number == "unknown":
        assert any("the threshold of unknown images" in note for note in notes)
        assert back.output.unknown is None
    else:
        with pytest.raises(WeightsError, match="not quantized yet"):
            loaded(folder / "there", {"precision": "int8"})


def exports(number: str, promise: str, folder: Path) -> None:
    file = saved(folder, TASKS.get(number, "class"), ranges=number == "ranges")
    if number == "ranges":
        with pytest.raises(UsageError, match="int8 needs images"):
            export_model(file, "onnx", precision="int8", out=folder / "onnx")
        return
    exported = export_model(file, "torch", out=folder / "torch")
    described = json.loads((exported.folder / "preprocessing.json").read_text())["output"]
    if number == "temperature":
        assert described["probabilities"] == f"softmax over classes of the logits / {TEMPERATURE}"
    elif number == "unknown":
        assert promise == "holds"
        assert described["unknown"]["above"] == OUTPUTS["class"]["unknown"]["threshold"]
    elif promise == "holds":
        assert described[number] == OUTPUTS[TASKS[number]][number]
    else:
        assert number not in described


@pytest.mark.parametrize(("number", "change", "promise"), cells())
def test_a_number_does_what_the_table_says(number: str, change: str, promise: str, tmp_path: Path) -> None:
    if promise == "–":
        return
    if change == "`convert`, `push`":
        converts(number, promise, tmp_path)
    elif change == "`export`":
        exports(number, promise, tmp_path)
    elif promise == "fitted anew":
        pytest.skip("test_quantize_fits_anew_what_it_changes")
    else:
        for count, options in enumerate(OPTIONS[change]):
            (tmp_path / str(count)).mkdir()
            loads(number, options, promise, tmp_path / str(count))


def test_the_table_has_every_number_and_change() -> None:
    assert {cell.values[0] for cell in cells()} == set(NUMBERS)
    assert len(OPTIONS) == len(CHANGES) + 1  # rounding is no change


def noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)


@pytest.mark.parametrize("tta", ["mirror", "shifts", "both"])
@pytest.mark.parametrize("engine", ["plain", "auto"])
def test_the_temperature_divides_the_logits_of_each_view(tta: Any, engine: str, tmp_path: Path) -> None:
    images = [noise(seed) for seed in range(4)]
    predictor, _ = loaded(saved(tmp_path, "class"), {"tta": tta, "engine": engine, "precision": "fp32"})
    pixels = predictor.preprocessing.standardize(torch.stack([predictor.prepare(image) for image in images]))
    with torch.no_grad():
        views = [(predictor.model(view) / TEMPERATURE).softmax(1) for view in views_of(pixels, tta)]
    assert np.allclose(predictor.probabilities(images), torch.stack(views).mean(0), atol=1e-5)
    predictor.output = dataclasses.replace(predictor.output, temperature=1.0)  # also where it changes later
    with torch.no_grad():
        views = [predictor.model(view).softmax(1) for view in views_of(pixels, tta)]
    assert np.allclose(predictor.probabilities(images), torch.stack(views).mean(0), atol=1e-5)


def test_the_same_size_changes_nothing(tmp_path: Path) -> None:
    file = saved(tmp_path, "class")
    predictor, warned = loaded(file, {"image_size": 16, "patch_size": 8, "channels": 3, "levels": (0, 4095)})
    assert predictor.output.to_json() == OUTPUTS["class"]
    assert not [note for note in warned if "left out" in note]


def test_converted_to_another_size_the_file_has_no_numbers_of_the_old_one(tmp_path: Path) -> None:
    for options, where in (({"image_size": 24}, "at another size"), ({"levels": (0, 9)}, "at other levels")):
        target = tmp_path / f"{where}.safetensors"
        account = convert(saved(tmp_path, "class"), target, "native", **options)
        assert any(NUMBERS["unknown"] in note and where in note for note in account.notes)
        predictor, _ = loaded(target, {})
        assert predictor.output.to_json() == {"task": "class", "unfitted": "size" if "size" in where else "levels"}
        with pytest.raises(UsageError, match=f"do not hold {where}"):
            predictor.output.covering(0.9)
        with pytest.raises(UsageError, match=f"thresholds of --right do not hold {where}"):
            predictor.output.sure(0.9)


def test_averaging_views_in_python_leaves_the_network_as_it_was(tmp_path: Path) -> None:
    predictor, _ = loaded(saved(tmp_path, "class"), {"tta": "mirror"})
    assert predictor.plainly().output.to_json() == OUTPUTS["class"]
    plain, _ = loaded(saved(tmp_path, "class"), {})
    own = vitral.Predictor(plain.model, plain.preprocessing, plain.classes, output=plain.output, tta="mirror")
    assert own.output.unknown is None
    assert any(NUMBERS["unknown"] in note for note in own.left_out)
    with pytest.raises(UsageError, match="do not hold averaged over views"):
        vitral.Predictor(
            plain.model, plain.preprocessing, plain.classes, output=plain.output.covering(0.5), tta="mirror"
        )
    with pytest.raises(UsageError, match="thresholds of --right do not hold averaged over views"):
        vitral.Predictor(plain.model, plain.preprocessing, plain.classes, output=plain.output.sure(0.5), tta="mirror")
    with pytest.raises(UsageError, match="an export is of the network itself"):
        export_model(loaded(saved(tmp_path, "class"), {"tta": "mirror", "precision": "fp32"})[0], "torch")


@pytest.fixture
def run(trained: vitral.TrainedRun, tmp_path: Path) -> Path:
    """A copy of a run on light and dark images, with all numbers of one class per image."""
    folder = Path(shutil.copytree(trained.folder, tmp_path / "run"))
    weights = native.read(folder / "model.safetensors")
    cuts = cuts_from_json({"cuts": CUTS})
    output = Classes(weights.classes, TEMPERATURE, tuple(SCORES), unknown=Detector("confidence", -1.0), cuts=cuts)
    native.save(folder / "model.safetensors", dataclasses.replace(weights, output=output.to_json()))
    return folder


@quantizes
def test_quantize_fits_anew_what_it_changes(run: Path) -> None:
    quantize(run, images=8, judged=20)
    predictor, warned = loaded(run, {"precision": "int8"})
    output: Any = predictor.output
    assert output.integers
    assert output.temperature == 1.0  # of few validation images
    assert output.scores != tuple(SCORES)
    count = len(output.scores)
    assert output.covering(0.5).threshold == output.scores[int(np.ceil((count + 1) / 2)) - 1]
    assert output.cuts[0].images == count
    assert output.unknown is None
    assert [NUMBERS["unknown"] in note for note in warned if "left out" in note] == [True]
    averaged, _ = loaded(run, {"precision": "int8", "tta": "mirror"})
    with pytest.raises(UsageError, match="do not hold averaged over views"):
        averaged.output.covering(0.5)
    floats, _ = loaded(run, {})
    assert floats.output.temperature == TEMPERATURE
    assert floats.output.scores == tuple(SCORES)


COMMANDS: dict[str, tuple[list[str], int, str]] = {
    "views": (["predict", "RUN", "IMAGE", "--tta", "mirror"], 0, NUMBERS["unknown"]),
    "sets of views": (["predict", "RUN", "IMAGE", "--tta", "both", "--coverage", "0.5"], 2, "do not hold averaged"),
    "size": (["predict", "RUN", "IMAGE", "--patch-size", "2"], 0, NUMBERS["temperature"]),
    "sets of a size": (["predict", "RUN", "IMAGE", "--patch-size", "2", "--coverage", "0.5"], 2, "at another size"),
    "sure of views": (["predict", "RUN", "IMAGE", "--tta", "both", "--right", "0.5"], 2, "do not hold averaged"),
    "evaluated": (["evaluate", "RUN", "--patch-size", "2"], 0, NUMBERS["temperature"]),
    "a new threshold of views": (["evaluate", "RUN", "--unknown", "IMAGE", "--tta", "mirror"], 2, "averaged over"),
    "a new threshold of a size": (["evaluate", "RUN", "--unknown", "IMAGE", "--patch-size", "2"], 2, "another size"),
    "table": (["predict", "RUN", "IMAGE", "--tta", "mirror", "--out", "OUT"], 0, NUMBERS["unknown"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_say_what_does_not_hold(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = tmp_path / "image.png"
    Image.fromarray(noise(0)[:8, :8]).save(image)
    words, code, said = COMMANDS[name]
    typed = {"RUN": str(run), "IMAGE": str(image), "OUT": str(tmp_path / "out.csv")}
    before = (run / "model.safetensors").read_bytes()
    assert main([typed.get(word, word) for word in words]) == code
    out, err = capsys.readouterr()
    assert said in err
    assert "unknown" not in out
    assert not code or not out
    assert not code or len(re.findall(r"^  \w+: ", err, re.MULTILINE)) <= 4
    if name == "table":
        assert "unknown" not in (tmp_path / "out.csv").read_text()
    assert (run / "model.safetensors").read_bytes() == before


def test_a_threshold_is_measured_on_the_network_as_it_was_trained(run: Path, tmp_path: Path) -> None:
    from vitral.data.options import OWN_DATA

    Image.fromarray(noise(0)).save(tmp_path / "strange.png")
    with pytest.warns(UserWarning, match=NUMBERS["unknown"]):
        evaluated = evaluate_images(run, OWN_DATA, InferenceOptions(tta="mirror"))
    with pytest.raises(UsageError, match="measures no threshold averaged over views"):
        evaluate_unknown(evaluated, tmp_path / "strange.png")
    assert evaluated.evaluation.raw_ece is None  # a mean of probabilities has no logits without the temperature


def test_a_head_of_other_classes_has_no_numbers(tmp_path: Path) -> None:
    from vitral.weights.naming import with_classes

    kept = with_classes(read(saved(tmp_path, "class")), ("cat", "dog"))
    assert kept is not None
    assert kept.weights.output == {"task": "class", "unfitted": "head"}
    assert any(NUMBERS["scores"] in note for note in kept.account.notes)
