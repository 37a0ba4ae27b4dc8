"""`vitral explain`: files, JSON and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import vitral
from images import noise
from vitral.cli.explain import explain
from vitral.cli.main import main
from vitral.cli.options import options_of
from vitral.device import Machine
from vitral.explanation.methods import BUILT_IN, METHODS
from vitral.export import exporting
from vitral.model import BiT, BiTConfig
from vitral.weights import native
from vitral.workflows import inspection


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("shots/more").mkdir(parents=True)
    for number, name in enumerate(("a.png", "b.png", "more/a.png")):
        Image.fromarray(noise(number, (8, 12))).save(Path("shots") / name)


@pytest.fixture
def weights(trained: vitral.TrainedRun) -> str:
    return str(trained.folder / "model.safetensors")


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert main(["explain", *words]) == code
    told = capsys.readouterr()
    assert "Traceback" not in told.out + told.err
    return told.out, told.err


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    out, err = printed(capsys, *words, code=2)
    assert out == ""
    assert len(err.strip().splitlines()) <= 5
    return err


def test_help_lists_all_methods():
    (about,) = (option.help for option in options_of(explain) if option.name == "method")
    assert set(BUILT_IN) <= set(about.partition("(")[0].replace(",", " ").split())


@pytest.mark.slow
def test_other_options_have_another_file(weights, capsys):
    for more in ((), ("--target", "day"), ("--target", "day", "1"), ("--layer", "0")):
        printed(capsys, weights, "shots/a.png", "--method", "attention", *more)
    names = ("a-attention.png", "a-attention-day.png", "a-attention-day-1.png", "a-attention-layer0.png")
    assert {file.name for file in Path("explained").iterdir()} == set(names)


def test_the_run_of_another_user_is_explained_here(trained, capsys, monkeypatch):
    """A run that cannot be written: heat maps, page and export are in the working folder."""
    monkeypatch.setattr("vitral.folders.os.access", lambda path, mode: not Path(path).is_relative_to(trained.folder))
    out, _ = printed(capsys, str(trained.folder), "shots/a.png", "--method", "attention")
    assert "explained/a-attention.png" in out
    assert Path("explained/a-attention.png").is_file()
    name = str(trained.folder).strip("/").replace("/", "-")
    assert inspection.folder_for(str(trained.folder)) == Path("inspect") / name
    assert exporting.folder_for(str(trained.folder), "onnx") == Path("export") / name / "onnx"
    monkeypatch.undo()
    assert inspection.folder_for(str(trained.folder)) == trained.folder / "inspect"


def test_an_image_without_other_options(capsys, weights):
    out, _ = printed(capsys, weights, "shots/a.png")
    name, answer, method, *_, file = out.strip().split("\t")
    assert (name, method) == ("shots/a.png", "rollout" if "rollout" in file else method)
    assert answer.split()[0] in ("day", "night")
    assert answer.endswith("%")
    assert file == f"explained/a-{method}.png"
    with Image.open(file) as image:
        assert image.width > 500


def test_a_run_keeps_its_explanations(capsys, trained, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for file in trained.folder.iterdir():
        if file.is_file():
            (run / file.name).write_bytes(file.read_bytes())
    printed(capsys, str(run), "shots/a.png")
    assert [file.suffix for file in (run / "explained").iterdir()] == [".png"]


def test_a_folder_gives_a_file_each_and_a_contact_sheet(capsys, weights):
    out, err = printed(capsys, weights, "shots", "--method", "attention", "--out", "maps")
    names = ("a-2-attention.png", "a-attention.png", "b-attention.png", "contact-sheet-attention.png")
    assert sorted(path.name for path in Path("maps").iterdir()) == list(names)
    assert len(out.splitlines()) == 3
    assert "Sheet    maps/contact-sheet-attention.png" in err
    assert "where information was routed" in err


def test_another_precision_than_that_of_predict_is_named(capsys, weights, monkeypatch):
    """Behind the maps: a line before them would end the bar that says how long they take."""
    for usual in ("bf16", "fp32"):
        machine = Machine(torch.device("cpu"), usual, "test")
        monkeypatch.setattr("vitral.device.choose", lambda device, dim=None, machine=machine: machine)
        _, err = printed(capsys, weights, "shots/a.png")
        note = "note: computed in fp32; vitral predict takes bf16"
        assert err.strip().splitlines()[-1].startswith(note) if usual == "bf16" else "computed in" not in err


def test_json(capsys, weights):
    words = ("shots/a.png", "--target", "day", "1", "--method", "input-gradient", "--format", "json", "--out", "x.svg")
    out, _ = printed(capsys, weights, *words)
    first, second, difference = json.loads(out)["explanations"]
    assert [first["label"], second["label"]] == ["day", "night"]
    assert first["probability"] + second["probability"] == pytest.approx(1, abs=1e-4)
    assert difference["against"] == "night"
    assert [len(first["values"]), len(first["values"][0])] == [2, 3]
    assert {one["file"] for one in (first, second, difference)} == {"x.svg"}
    assert Path("x.svg").read_text("utf-8").startswith("<?xml")


@pytest.mark.slow
def test_all_methods_side_by_side(capsys, weights):
    out, _ = printed(capsys, weights, "shots/a.png", "--compare", "--layer", "-1")
    best, *others = [line.split("\t")[2] for line in out.splitlines()]
    assert best == "fullgrad+ (recommended)"
    assert others == [name for name in METHODS if name != "fullgrad+"]
    assert Path("explained/a-compared-layer-1.png").is_file()


@pytest.mark.slow
def test_checks_are_reported(capsys, weights):
    out, _ = printed(capsys, weights, "shots/a.png", "--check", "--format", "json")
    checks = json.loads(out)["explanations"][0]["checks"]
    assert isinstance(checks["believable"], bool)
    assert len(checks["deletion_curve"]) == len(checks["insertion_curve"]) > 2
    out, _ = printed(capsys, weights, "shots/a.png", "--check")
    assert f"SRG {checks['srg']:.2f} (random {checks['random_srg']:.2f})" in out
    assert ("no better than a random map" in out) != checks["believable"]


def test_a_bad_image_is_named_and_the_others_continue(capsys, weights):
    Path("shots/bad.png").write_bytes(b"nothing")
    out, err = printed(capsys, weights, "shots", code=1)
    assert len(out.splitlines()) == 3
    assert "where: shots/bad.png" in err
    assert "1 of 4 could not be read" in err
    out, _ = printed(capsys, weights, "shots", "--format", "json", code=1)
    found: Any = json.loads(out)
    assert [one["image"] for one in found["errors"]] == ["shots/bad.png"]
    assert len({one["file"] for one in found["explanations"]}) == 3


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("shots/a.png", "--target", "nigt"), "nearest: night"),
        (("shots/a.png", "--method", "rolout"), "nearest: rollout"),
        (("shots/a.png", "--method", "attention", "--layer", "2"), "--layer 0 … 1"),
        (("shots/a.png", "--method", "rollout", "--layer", "1"), "--method attention"),
        (("shots/a.png", "--method", "rollout", "--compare"), "one of the two"),
        (("empty",), "no images to explain"),
        ((), "vitral explain RUN"),
        (("nowhere.png",), "no such image"),
        (("shots/a.png", "--out", "a.html"), ".png, .svg or .json"),
        (("shots", "--out", "a.png"), "--out a"),
        (("shots", "--benchmark", "digits"), "--benchmark"),
    ],
)
def test_refusals(capsys, weights, words, told):
    Path("empty").mkdir()
    assert told in refused(capsys, weights, *words)
    assert not Path("explained").exists()


def test_a_network_without_attention(capsys):
    torch.manual_seed(0)
    config = BiTConfig(image_size=32, layers=(1, 1), classes=2)
    preprocessing = vitral.Preprocessing((32, 32), 3)
    native.save(
        Path("bit.safetensors"), native.Weights(config, BiT(config).state_dict(), preprocessing, ("x", "y"), {})
    )
    assert "occlusion" in refused(capsys, "bit.safetensors", "shots/a.png", "--method", "rollout")
    out, _ = printed(capsys, "bit.safetensors", "shots/a.png")
    assert METHODS[out.split("\t")[2]].any_network


def test_benchmark(capsys, weights, trained):
    sky = str(Path(json.loads((trained.folder / "config.json").read_text("utf-8"))["run"]["data"]))
    words = ("--benchmark", sky, "--images", "3", "--method", "attention")
    out, _ = printed(capsys, weights, *words, "--format", "json")
    found = json.loads(out)
    assert found["images"] == 3
    assert "attention" in [row["method"] for row in found["rows"]]
    out, _ = printed(capsys, weights, *words)
    assert "SRG" in out


def test_a_benchmark_with_masks_reports_relevance_inside(capsys, weights):
    for number, kind in enumerate(("day", "night")):
        Path("labeled", kind).mkdir(parents=True)
        Image.fromarray(noise(number, (8, 12))).save(f"labeled/{kind}/{number}.png")
    Path("masks").mkdir()
    half = Image.new("L", (12, 8))
    half.paste(255, (0, 0, 6, 8))
    for number in range(2):
        half.save(f"masks/{number}.png")
    words = (weights, "--benchmark", "labeled", "--method", "rollout", "--format", "json")
    plain, _ = printed(capsys, *words)
    out, _ = printed(capsys, *words, "--masks", "masks")
    assert json.loads(plain)["masks"] == 0
    found = json.loads(out)
    assert found["masks"] == found["right"]
    if found["right"]:
        assert found["area"]["mean"] == pytest.approx(0.5)
    assert "--masks requires --benchmark" in refused(capsys, weights, "shots/a.png", "--masks", "masks")
    assert "no such folder of masks or table of boxes" in refused(capsys, *words, "--masks", "nowhere")
