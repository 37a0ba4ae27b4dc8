"""`vitral bench`: output, files and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import vitral
from images import MakeImages
from vitral.bench import command, measure
from vitral.bench.command import BenchOptions
from vitral.bench.report import COLUMNS, VITRAL, Report
from vitral.cli.main import main

TINY = ("mu/16", "--image-size", "32", "--batch", "2", "--rounds", "1", "--precision", "fp32", "--device", "cpu")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "SMALL_MATRIX", 16)


def bench(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    assert main(["bench", *words]) == code
    told = capsys.readouterr()
    assert "Traceback" not in told.err
    return told.out, told.err


@pytest.mark.slow
def test_a_table_goes_to_standard_output(capsys) -> None:
    out, err = bench(capsys, *TINY, "--peers", "torchvision")
    assert re.split(" {2,}", out.splitlines()[1].strip()) == [name for name in COLUMNS if name != "first s"]
    assert [line.split()[:2] for line in out.splitlines() if line.startswith(("inference", "training"))] == [
        ["inference", "vitral"],
        ["inference", "torchvision"],
        ["training", "vitral"],
        ["training", "torchvision"],
    ]
    for part in ("matrix products: fp32", "load average", "torchvision: VisionTransformer", "every peer: inference"):
        assert part in out
    assert err == ""


def test_json_and_the_file_are_the_same_report(capsys) -> None:
    out, err = bench(
        capsys, *TINY, "--peers", "none", "--what", "inference", "--out", "new/figures.json", "--format", "json"
    )
    data = json.loads(out)
    assert data == json.loads(Path("new/figures.json").read_text("utf-8"))
    assert "Figures  new/figures.json" in err
    (row,) = Report.from_json(data).rows
    assert (row.model, row.image_size, row.what, row.who, row.batch) == ("mu/16", (32, 32), "inference", VITRAL, 2)
    assert data["settings"].keys() == {VITRAL}
    assert data["versions"]["torch"]


@pytest.mark.slow
def test_engines_are_rows_of_ours_in_inference_alone(capsys) -> None:
    out, err = bench(capsys, *TINY, "--peers", "none", "--engines", "plain", "--format", "json")
    report = Report.from_json(json.loads(out))
    assert [(row.what, row.who) for row in report.rows] == [
        ("inference", VITRAL),
        ("inference", f"{VITRAL} (plain)"),
        ("training", VITRAL),
    ]
    assert report.settings[f"{VITRAL} (plain)"] == "the network itself"
    assert err == ""


@pytest.mark.slow
def test_several_networks_sizes_and_batches(capsys) -> None:
    words = "mu/16 mu/8 --image-size 16 32 --batch 1 2 --rounds 1 --peers none --what inference --precision fp32"
    out, _ = bench(capsys, *words.split(), "--format", "json", "--device", "cpu")
    found = [(row.model, row.image_size[0], row.batch) for row in Report.from_json(json.loads(out)).rows]
    assert found == [(model, size, batch) for model in ("mu/16", "mu/8") for size in (16, 32) for batch in (1, 2)]


@pytest.mark.slow
def test_a_run_is_measured_without_peers_that_cannot_build_it(capsys, trained: vitral.TrainedRun) -> None:
    out, err = bench(capsys, str(trained.folder), "--batch", "2", "--rounds", "1", "--format", "json")
    report = Report.from_json(json.loads(out))
    assert {row.what for row in report.rows if row.who == VITRAL} == {"inference", "training"}
    assert all(row.image_size == (8, 12) and row.precision == "fp32" for row in report.rows), "as narrow ones are run"
    assert "torchvision" not in {row.who for row in report.rows}
    assert "torchvision" in err


@pytest.mark.slow
def test_training_from_files(capsys, make_images: MakeImages) -> None:
    photos = make_images({"cat": 4, "dog": 4}, extension=".jpg")
    out, _ = bench(capsys, *TINY, "--what", "jpeg", "--data", str(photos), "--peers", "none")
    assert "first s" in out
    assert [line.split("fp32")[0].split(maxsplit=1)[1].strip() for line in out.splitlines() if "fp32  " in line] == [
        "vitral",
        "vitral, kept",
        "vitral, synthetic",
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["S/16x"], "unknown model 'S/16x'"),
        (["Z/16"], "nearest: "),
        (["--peers", "tim"], "nearest: timm"),
        (["--engines", "openvin"], "nearest: openvino"),
        (["--engines", "all", "plain"], "--engines all excludes other names"),
        (["--engines", "plain", "--what", "training"], "try: --what inference"),
        (["BiT-R50x1", "--engines", "int8", "--device", "cpu"], "int8 is available for a ViT only"),
        (["--what", "jpeg"], "try: --data photos/"),
        (["--data", "photos"], "try: --what jpeg"),
        (["--what", "sleeping"], "error"),
        (["--batch", "0"], "--batch must be at least 1, not 0"),
        (["--rounds", "0"], "--rounds must be at least 1, not 0"),
        (["--image-size", "-16"], "--image-size must be at least 1"),
        (["--image-size", "30"], "not divisible by patch size"),
        (["--precision", "fp16"], "unknown precision 'fp16'"),
        (["--device", "tpu"], "unknown device 'tpu'"),
        (["--batch", "1000000000", "--what", "inference"], "not enough memory for S/16, inference, batch 1000000000"),
    ],
)
def test_contradictory_options_are_refused(capsys, words: list[str], told: str) -> None:
    out, err = bench(capsys, *words, code=2)
    assert told in err
    assert out == ""
    assert len(err.strip().splitlines()) <= 5


def test_nothing_is_measured_before_everything_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(vitral.VitralError, match="unknown model"):
        command.bench(BenchOptions(models=("mu/16", "Z/16")))


def test_a_headless_network_is_refused(tmp_path: Path) -> None:
    from vitral.model import ViT, ViTConfig
    from vitral.weights.files import write_plain

    config = ViTConfig(image_size=32, patch_size=16, dim=192, depth=1, heads=3, mlp_dim=768, classes=0)
    write_plain(tmp_path / "features.safetensors", ViT(config).state_dict())
    with pytest.raises(vitral.VitralError, match="has no head"):
        command.bench(BenchOptions(models=("features.safetensors",)))


@pytest.mark.parametrize(
    ("what", "device", "batches"),
    [
        ("inference", "cpu", (1, 32)),
        ("inference", "cuda", (1, 32)),
        ("training", "cpu", (32,)),
        ("training", "cuda", (256,)),
        ("jpeg", "cuda", (256,)),
    ],
)
def test_batches_where_none_are_named(what: str, device: str, batches: tuple[int, ...]) -> None:
    assert command._batches(what, device) == batches
