"""Test `vitral demo`: the files in the package, the printed description, and the written files.

The network may be replaced by a better one (`python -m tools.pack_demo`), so no test depends on its predictions.
"""

from __future__ import annotations

import json
import shlex
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tools import pack_demo as packing
from tools.draw_demo_images import SCENES, draw
from tools.pack_demo import LARGEST, pack

import vitral
from running import TINY, as_words
from vitral.bench.models import model_under_test
from vitral.cli.main import main
from vitral.demo import IMAGES
from vitral.demo.command import Demo, demo
from vitral.errors import RunError, UsageError, WeightsError
from vitral.model import network
from vitral.weights import native
from vitral.weights.read.references import DEMO, is_included

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = [*(f"{name}.png" for name in SCENES), "explained/ship-fullgrad+.png", "explained/contact-sheet-fullgrad+.png"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("there is no network here")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """The result of one call. Do not modify it."""
    return demo(tmp_path_factory.mktemp("shown") / "vitral-demo")


# ---------------------------------------------------------------- what is in the package


def test_the_file_is_small_and_in_16_bits():
    assert DEMO.stat().st_size <= LARGEST == 2_000_000
    stored = load_file(DEMO)
    assert {one.element_size() for one in stored.values() if one.is_floating_point()} == {2}
    assert {one.dtype for one in vitral.load("demo", precision="fp32").model.parameters()} == {torch.float32}


def test_the_file_contains_its_origin():
    weights = native.read(DEMO)
    reported = weights.trained
    assert weights.classes == tuple(SCENES)
    assert reported["command"].startswith("vitral train cifar10")
    assert "/" not in reported["command"].replace(reported["model"], ""), "a path of somebody's machine"
    assert "states no license" in reported["license"]
    assert reported["parameters"] == sum(one.numel() for one in native.build(weights).parameters())
    assert reported["test"]["images"] == 10_000
    low, high = reported["test"]["accuracy_interval"]
    assert low < reported["test"]["accuracy"] < high


@pytest.mark.slow
def test_the_accuracy_is_that_of_the_file(shared_data):
    """Checked on only 200 test images for speed; the accuracy of another file would differ widely."""
    split = vitral.load_data("cifar10", root=shared_data)["test"]
    chosen = range(0, len(split), len(split) // 200)
    found = vitral.load("demo")([split.image(i, 3) for i in chosen])
    right = np.mean([one.label == tuple(SCENES)[split.labels[i]] for one, i in zip(found, chosen, strict=True)])
    reported = native.read(DEMO).trained["test"]["accuracy"]
    assert abs(right - reported) < 4 * (reported * (1 - reported) / len(chosen)) ** 0.5


def test_the_wheel_contains_all_files(tmp_path):
    pytest.importorskip("hatchling", reason="builds the wheel")
    code = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True, capture_output=True, text=True
    )
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as wheel:
        for file in (ROOT / "src/vitral/demo").rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                assert wheel.read(str(file.relative_to(ROOT / "src"))) == file.read_bytes()


# ---------------------------------------------------------------- the images


@pytest.mark.slow
def test_the_images_are_those_that_the_program_draws():
    for name in SCENES:
        assert np.array_equal(np.asarray(Image.open(IMAGES / f"{name}.png")), draw(name))
    assert sorted(path.stem for path in IMAGES.iterdir()) == sorted(SCENES)


@pytest.mark.slow
def test_drawings_are_deterministic_and_different():
    images = [draw(name) for name in SCENES]
    for name, image in zip(SCENES, images, strict=True):
        assert (image.shape, image.dtype) == ((160, 160, 3), np.uint8)
        assert image.std() > 20, f"{name} is nearly empty"
        assert len(np.unique(image.reshape(-1, 3), axis=0)) > 1000, f"{name} has no shading"
    assert np.array_equal(draw("ship"), images[8])
    assert len({one.tobytes() for one in images}) == len(SCENES)


# ---------------------------------------------------------------- what the command does


@pytest.mark.slow
def test_it_writes_images_and_maps_that_can_be_read(shown):
    files = sorted(str(path.relative_to(shown.folder)) for path in shown.folder.rglob("*") if path.is_file())
    assert files == sorted([*WRITTEN, "demo.json"])
    for file in WRITTEN:
        with Image.open(shown.folder / file) as image:
            assert np.asarray(image.convert("RGB")).std() > 5
    for name in SCENES:
        assert np.array_equal(np.asarray(Image.open(shown.folder / f"{name}.png")), draw(name))


def test_predictions_are_those_of_the_file(shown):
    """Compared with safetensors' own reader, fp32, and the module that the header describes."""
    weights = native.read(DEMO)
    model = network(weights.config).eval()
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(DEMO).items()})
    exact = vitral.load("demo", precision="fp32", engine="plain")
    paths = [str(shown.folder / f"{name}.png") for name in SCENES]
    images = weights.preprocessing.standardize(torch.stack([exact.prepare(path) for path in paths]))
    with torch.no_grad():
        expected = model(images).softmax(1).numpy()
    np.testing.assert_allclose(exact.probabilities(paths), expected, atol=1e-6)
    np.testing.assert_allclose([one.probability for one in shown.heatmaps], expected.max(1), atol=1e-5)
    reported = np.stack([one.probabilities for one in shown.predictions])
    np.testing.assert_array_equal(reported, vitral.load(DEMO).probabilities(paths))
    np.testing.assert_array_equal(reported, vitral.load("demo").probabilities(paths))
    assert shown.right == (reported.argmax(1) == np.arange(10)).sum()


def test_the_description_matches_the_file(shown):
    description, origin = "\n".join(shown.about()), native.read(DEMO).trained
    assert f"Accuracy {origin['test']['accuracy']:.2%} (" in description
    assert "on 10,000 test photographs" in description
    assert f"{origin['parameters']:,} parameters" in description
    assert f"on {origin['training_images']:,} photographs of cifar10" in description
    assert "drawings" in description


@pytest.mark.slow
def test_the_commands_that_it_prints_work_as_typed(capsys, make_images):
    assert main(["demo"]) == 0
    reported = capsys.readouterr()
    assert [line.split("\t")[0] for line in reported.out.splitlines()] == [f"vitral-demo/{name}.png" for name in SCENES]
    assert all(len(line.split("\t")) == 4 for line in reported.out.splitlines())
    answer = next(line for line in reported.out.splitlines() if "ship.png" in line)
    typed = [shlex.split(line)[1:] for line in reported.err.split("Next:\n")[1].splitlines()]
    assert [words[0] for words in typed] == ["predict", "explain", "summary", "train"]
    for words in typed[:-1]:
        assert main(words) == 0
        if words[0] == "predict":
            assert capsys.readouterr().out.strip() == answer
    make_images({"cat": 4, "dog": 4}, name="YOUR_IMAGES")
    quick = {"epochs": 1, "batch_size": 4, "device": "cpu"}
    assert main([*typed[-1], *as_words(quick), "--quiet", "--format", "json"]) == 0
    assert json.loads(Path("runs/YOUR_IMAGES/config.json").read_text())["run"]["init"] == "backbone"


@pytest.mark.slow
def test_json_is_complete(capsys):
    assert main(["demo", "--out", "there", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["image"] for one in found["predictions"]] == [f"there/{name}.png" for name in SCENES]
    assert len(found["explanations"]) == 10
    assert found["model"] == native.read(DEMO).trained
    assert Path(found["page"]).is_file()
    assert Path(found["sheet"]).is_file()


# ---------------------------------------------------------------- where it writes


@pytest.mark.slow
def test_it_overwrites_only_its_own_files(shown, tmp_path):
    folder = Path(shutil.copytree(shown.folder, tmp_path / "again"))
    (folder / "ship.png").write_bytes(b"spoiled")
    (folder / "notes.txt").write_text("mine")
    demo(folder)
    assert np.array_equal(np.asarray(Image.open(folder / "ship.png")), draw("ship"))
    assert (folder / "notes.txt").read_text() == "mine"
    assert {path.name for path in folder.iterdir()} == {
        *(f"{name}.png" for name in SCENES),
        "explained",
        "demo.json",
        "notes.txt",
    }


@pytest.mark.parametrize(
    ("own", "expected", "why"),
    [
        ("ship.png", "this folder is not empty", "it contains ship.png"),
        ("class", "this folder is not empty", "it contains class"),
        ("demo.json", "refusing to overwrite files in this folder", "vitral demo did not write demo.json"),
    ],
)
def test_it_does_not_overwrite_other_files(own, expected, why, capsys):
    Path("photos").mkdir()
    Path("photos", own).write_text("[1]")
    assert main(["demo", "--out", "photos"]) == 2
    reported = capsys.readouterr().err
    assert f"error: {expected}\n  where: photos\n  why: {why}\n" in reported
    assert "try: vitral demo --out ANOTHER_FOLDER" in reported
    assert [path.name for path in Path("photos").iterdir()] == [own]
    assert Path("photos", own).read_text() == "[1]"


@pytest.mark.parametrize("out", ["file", "file/inside"])
def test_a_folder_that_cannot_be_created_is_refused(out, capsys):
    Path("file").write_text("mine")
    assert main(["demo", "--out", out]) == 2
    reported = capsys.readouterr().err
    assert f"error: cannot create this folder\n  where: {out}\n" in reported
    assert "try: vitral demo --out ANOTHER_FOLDER" in reported
    assert Path("file").read_text() == "mine"


def test_a_read_only_folder_is_refused(monkeypatch):
    monkeypatch.setattr("os.access", lambda path, how: False)
    with pytest.raises(UsageError, match="cannot write into this folder"):
        demo(Path("locked"))
    assert not any(Path("locked").iterdir())


# ---------------------------------------------------------------- `demo` wherever weights are named


def test_the_name_works_wherever_weights_do(capsys):
    shape = native.read(DEMO).config
    assert main(["summary", "demo", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == native.read(DEMO).trained["parameters"]
    assert model_under_test("demo").config == shape
    assert not any("random weights" in note for note in vitral.inspect("demo").notes)
    assert main(["convert", "demo", "copy"]) == 0
    assert native.read(Path("copy/model.safetensors")).trained == native.read(DEMO).trained
    assert main(["convert", "demo", "larger", "--image-size", "64"]) == 0
    assert native.read(Path("larger/model.safetensors")).config.image == (64, 64)


def test_int8_ranges_are_not_stored_in_the_package(capsys):
    before = sorted(DEMO.parent.iterdir())
    assert main(["quantize", "demo", "photos"]) == 2
    assert "vitral convert demo COPY" in capsys.readouterr().err
    assert sorted(DEMO.parent.iterdir()) == before


@pytest.mark.slow
def test_weights_of_that_name_in_the_current_folder_come_first(trained):
    assert is_included("demo")
    Path("demo").mkdir()
    Path("demo/slides.txt").write_text("a folder as many have")
    assert is_included("demo")
    assert len(vitral.load("demo").classes) == 10
    shutil.copytree(trained.folder, "demo", dirs_exist_ok=True)
    assert not is_included("demo")
    assert vitral.load("demo").classes == vitral.load(trained.folder).classes == ("day", "night")


def test_a_path_is_a_path(trained):
    for path in ("./demo", Path("demo"), str(Path("demo").absolute())):
        assert not is_included(path)
        with pytest.raises(WeightsError, match="no such run or weights"):
            vitral.load(path)
    shutil.copy(trained.folder / "model.safetensors", "demo")
    for path in ("demo", "./demo", Path("demo")):
        assert vitral.load(path).classes == ("day", "night")


def test_printed_commands_refer_to_the_package_despite_such_weights(shown, trained):
    shutil.copytree(trained.folder, "demo")
    *named, training = shown.next_commands()
    assert len(named) == 3
    assert all(str(DEMO) in command for command in named)
    assert training == "train YOUR_IMAGES/", "photographs start from the network that knows some"


# ---------------------------------------------------------------- making the file


def test_packing_a_run(trained, tmp_path, monkeypatch):
    data = json.loads((trained.folder / "config.json").read_text())["run"]["data"]
    monkeypatch.setitem(packing.LICENSES, data, "ours; states no license")
    target = tmp_path / "small.safetensors"
    packed = pack(trained.folder, target)
    weights, before = native.read(target), native.read(trained.folder / "model.safetensors")
    assert weights.trained == packed.trained
    for name, tensor in before.state.items():
        assert weights.state[name].element_size() == 2
        assert (weights.state[name].float() - tensor).abs().max() <= 2**-10 * tensor.abs().max()
    reported = weights.trained
    evaluation = vitral.evaluate(target, data, split="test", precision="fp32")
    assert reported["test"] == {
        "images": 12,
        "accuracy": evaluation.accuracy,
        "accuracy_interval": list(evaluation.accuracy_interval),
    }
    assert reported["command"] == f"vitral train {data} {shlex.join(as_words(_typed()))}"
    assert reported["seconds"] == trained.result["seconds"]
    assert reported["training_images"] == 24
    assert reported["license"] == "ours; states no license"


def _typed() -> dict[str, object]:
    return {**TINY, "epochs": 6, "image_size": (8, 12), "lr": 1e-2, "warmup": 0.5}


def test_a_refused_run_leaves_the_file_unchanged(trained, tmp_path, monkeypatch):
    target = tmp_path / "small.safetensors"
    target.write_text("before")
    with pytest.raises(UsageError, match=r"license of .* is unknown"):
        pack(trained.folder, target)
    data = json.loads((trained.folder / "config.json").read_text())["run"]["data"]
    monkeypatch.setitem(packing.LICENSES, data, "")
    monkeypatch.setattr(packing, "LARGEST", 100)
    with pytest.raises(UsageError, match="too large for the package"):
        pack(trained.folder, target)
    unfinished = Path(shutil.copytree(trained.folder, tmp_path / "unfinished"))
    (unfinished / "result.json").unlink()
    with pytest.raises(RunError, match="the run is not finished"):
        pack(unfinished, target)
    assert target.read_text() == "before"
    assert {path.name for path in tmp_path.iterdir()} == {"small.safetensors", "unfinished"}


def test_local_paths_are_left_out_of_the_command():
    typed = "vitral train cifar10 --data-root '/a b/data' --epochs 2 --out /tmp/run --no-flip"
    assert packing._command(typed) == "vitral train cifar10 --epochs 2 --no-flip"
