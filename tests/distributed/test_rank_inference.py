"""`vitral evaluate` and `vitral predict --out` over ranks: the figures and the bytes of one process."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from together import codes, on_ranks, start

import vitral
from running import mostly_slow
from vitral.cli.main import main
from vitral.distributed.ranks import Group
from vitral.workflows import evaluate as evaluating
from vitral.workflows.predict import PredictionFile


@pytest.fixture
def run(trained: vitral.TrainedRun) -> Path:
    return trained.folder


@pytest.fixture
def photos(make_images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """23 images in batches of 2, two of them unreadable."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vitral.workflows.planning.memory.EVAL_BATCH", 2)
    folder = make_images({"day": 11, "night": 12})
    (folder / "day/3.png").write_bytes(b"no image")
    (folder / "night/7.png").write_bytes(b"")
    return folder


EVALUATED = {
    "skip": ["--bad-images", "skip"],
    "views": ["--bad-images", "skip", "--tta", "mirror"],
}


@pytest.mark.parametrize(("name", "count"), mostly_slow([(n, c) for n in EVALUATED for c in (3, 2)], every=6))
def test_figures_are_those_of_one_process(name, count, run, photos, capfd):
    words = ["evaluate", str(run), str(photos), "--device", "cpu", "--format", "json", *EVALUATED[name]]
    assert main(words) == 0
    alone = capfd.readouterr()
    assert on_ranks(count, lambda: main(words)) == [0] * count
    together = capfd.readouterr()
    assert together == alone, "to the last digit, printed once"
    assert json.loads(together.out)["images"] == 21


def test_each_image_is_computed_once_and_all_ranks_return_the_evaluation(run, photos, tmp_path, monkeypatch):
    """More ranks than batches, too: one rank has none."""
    compute = evaluating._logits

    def noted(predictors: Any, batches: Any, ranks: Any) -> Any:
        (tmp_path / f"names-{ranks.number}").write_text("\n".join(batches.split.names))
        return compute(predictors, batches, ranks)

    monkeypatch.setattr(evaluating, "_logits", noted)
    monkeypatch.setattr("vitral.workflows.planning.memory.EVAL_BATCH", 11)
    expected = vitral.evaluate(run, photos, bad_images="skip", device="cpu")

    def work() -> int:
        found = [vitral.evaluate(run, photos, bad_images="skip", device="cpu") for _ in range(2)]  # joins twice
        return int(any(one.to_json() != expected.to_json() for one in found))

    assert on_ranks(3, work) == [0] * 3
    names = [Path(f"names-{rank}").read_text().split() for rank in range(3)]
    assert [len(part) for part in names] == [11, 10, 0]
    assert len({*names[0], *names[1]}) == 21


def test_an_evaluation_with_an_error_prints_it_once(run, photos, capfd):
    assert on_ranks(2, lambda: main(["evaluate", str(run), str(photos), "--device", "cpu"])) == [2, 2]
    printed = capfd.readouterr().err
    assert printed.count("error: ") == 1, printed
    assert "2 unreadable images" in printed
    assert "day/3.png" in printed
    assert "night/7.png" in printed


def predict(run: Path, *more: str) -> list[str]:
    return ["predict", str(run), "photos", "--device", "cpu", "--batch-size", "2", *more]


@pytest.mark.parametrize(("suffix", "count"), mostly_slow([("csv", 3), ("jsonl", 2), ("parquet", 2)], every=3))
def test_a_merged_table_has_the_bytes_of_one_process(suffix, count, run, photos, capfd):
    assert main(predict(run, "--all", "--out", f"one.{suffix}")) == 1
    alone = capfd.readouterr()
    assert on_ranks(count, lambda: main(predict(run, "--all", "--out", f"many.{suffix}"))) == [1, *[0] * (count - 1)]
    together = capfd.readouterr()
    assert together.err.replace("many", "one") == alone.err
    assert Path(f"many.{suffix}").read_bytes() == Path(f"one.{suffix}").read_bytes()
    assert not list(Path().glob("*.partial*"))


@pytest.mark.slow
def test_a_killed_rank_is_named_and_no_written_row_is_lost(run, photos, monkeypatch, capfd):
    assert main(predict(run, "--out", "one.csv")) == 1
    before = Group.reached

    def reached(self: Group, position: str) -> None:
        before(self, position)
        if position == "image 15" and self.number == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(Group, "reached", reached)
        processes = start(2, lambda: main(predict(run, "--out", "many.csv")))
        capfd.readouterr()
        assert codes(processes) == [2, -signal.SIGKILL]
    printed = capfd.readouterr().err
    assert printed.count("error: ") == 1, printed
    assert "error: lost rank 1 on " in printed
    assert "--resume keeps the rows that are written" in printed
    kept = Path("many.csv.partial").read_text()
    assert kept.count("\n") == 1 + 12, "all rows before the round that was cut"
    assert Path("one.csv").read_text().startswith(kept)
    # with another number of ranks
    assert on_ranks(3, lambda: main(predict(run, "--out", "many.csv", "--resume"))) == [1, 0, 0]
    assert re.search(r"23 rows, 12 of them from before", capfd.readouterr().err)
    assert Path("many.csv").read_bytes() == Path("one.csv").read_bytes()


REFUSED = {
    "no table": (["predict", "RUN", "photos"], "several ranks write one table"),
    "no such images": (["predict", "RUN", "nothing", "--out", "t.csv"], "no such image or folder"),
    "a folder": (["predict", "RUN", "photos", "--out", "folder.csv"], "a table is written to a file"),
    "features": (["evaluate", "RUN", "photos", "--knn", "3"], "nothing for several ranks to share"),
    "no such weights": (["evaluate", "nothing", "photos"], "no such"),
}


@pytest.mark.parametrize("name", mostly_slow(sorted(REFUSED), every=5))
def test_refusals_are_printed_once(name, run, photos, capfd):
    Path("folder.csv").mkdir()
    words, message = REFUSED[name]
    command = [str(run) if word == "RUN" else word for word in words]
    assert on_ranks(2, lambda: main([*command, "--device", "cpu"])) == [2, 2]
    printed = capfd.readouterr().err
    assert printed.count("error: ") == 1, printed
    assert message in printed


@pytest.mark.slow
def test_ranks_with_other_images_are_refused(run, photos, monkeypatch, capfd):
    names = PredictionFile._names

    def other(self: PredictionFile) -> Any:
        return iter(["x"]) if os.environ.get("RANK") == "1" else names(self)

    monkeypatch.setattr(PredictionFile, "_names", other)
    assert on_ranks(2, lambda: main(predict(run, "--out", "t.csv"))) == [2, 2]
    printed = capfd.readouterr().err
    assert printed.count("error: ") == 1, printed
    assert "error: rank 1 on " in printed
    assert "it has other names" in printed
    assert not Path("t.csv.partial").exists()


@pytest.mark.slow
def test_the_launcher_starts_the_ranks(run, photos, capfd):
    assert main(predict(run, "--out", "one.csv")) == 1
    alone = capfd.readouterr().err
    assert main([*predict(run, "--out", "many.csv"), "--nproc", "2"]) == 1
    together = capfd.readouterr().err.replace("many", "one")
    assert together.removeprefix("vitral predict: starting\n") == alone  # which a process of its own says in a log
    assert Path("many.csv").read_bytes() == Path("one.csv").read_bytes()
