"""Clocks that jump, other time zones and languages, and a disk that fills during the report."""

from __future__ import annotations

import itertools
import json
import locale
import resource
import shutil
import time
from pathlib import Path

import pytest
from PIL import Image

from images import noise
from running import in_child, printed, same_bits, train, weights_of
from vitral.cli.main import main

pytestmark = pytest.mark.report

HOUR = 3600.0


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its report."""
    root = tmp_path_factory.mktemp("surroundings")
    for number in range(24):
        folder = root / "photos" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(number, (8, 8))).save(folder / f"{number}.png")
    return train(root / "photos", root / "run", epochs=2).folder


@pytest.fixture
def unreported(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run as it is before its report, which `--resume` writes."""
    (tmp_path / "photos").symlink_to(finished.parent / "photos")
    copy = Path(shutil.copytree(finished, tmp_path / "run"))
    (copy / "report.html").unlink()
    return copy


def test_clocks_that_jump_change_nothing(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop that wakes, a virtual machine that is moved, a clock that is set by the network."""
    jumps, clock = itertools.cycle((-24 * HOUR, 0.0, 5 * HOUR, -HOUR)), time.time
    monkeypatch.setattr(time, "time", lambda: clock() + next(jumps))
    run = train(finished.parent / "photos", tmp_path / "run", epochs=2)
    assert same_bits(weights_of(run.folder), weights_of(finished))
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= line["seconds"] < HOUR for line in lines)
    assert 0 <= run.result["seconds"] < HOUR


@pytest.mark.parametrize("zone", ["Pacific/Apia", "America/St_Johns", "UTC0"])
def test_a_report_is_the_same_in_every_time_zone_and_language(
    unreported: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, zone: str
) -> None:
    resume = ("train", "--out", str(unreported), "--resume")
    printed(capsys, *resume)
    here = (unreported / "report.html").read_bytes()
    (unreported / "report.html").unlink()
    spoken = {**locale.localeconv(), "decimal_point": ",", "thousands_sep": "."}
    with monkeypatch.context() as patch:
        patch.setenv("TZ", zone)
        patch.setenv("LC_ALL", "tr_TR.UTF-8")
        patch.setattr(locale, "localeconv", lambda: spoken)
        time.tzset()
        printed(capsys, *resume)
    time.tzset()
    assert (unreported / "report.html").read_bytes() == here


@pytest.mark.real
def test_a_disk_that_fills_during_the_report_leaves_a_whole_run(
    unreported: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    resume = ["train", "--out", str(unreported), "--resume"]
    before = {path: path.read_bytes() for path in unreported.rglob("*") if path.is_file()}

    def full() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        return main(resume)

    assert in_child(full) == 0
    said = capfd.readouterr().err
    assert "the report could not be written" in said
    assert "--resume" in said
    assert "Traceback" not in said
    assert not (unreported / "report.html").exists()
    kept = {path: data for path, data in before.items() if path.suffix in (".safetensors", ".jsonl")}
    assert all(path.read_bytes() == data for path, data in kept.items())
    assert json.loads((unreported / "result.json").read_text())["epochs"] == 2
    assert main(resume) == 0
    assert (unreported / "report.html").stat().st_size > 20_000
    assert main(["verify", str(unreported)]) == 0
