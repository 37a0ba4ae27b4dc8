"""`vitral train --nproc` and torchrun: one plan, one output, one error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.elastic.multiprocessing.errors as elastic
from together import on_ranks, wait_for

from running import TINY, as_words, sampled
from vitral.cli import ranks
from vitral.cli.main import main
from vitral.cli.train import train_options
from vitral.distributed import launch
from vitral.errors import RankError, UsageError


@pytest.fixture
def photos(make_images) -> Path:
    return make_images({"a": 10, "b": 10})


def words_of(photos: Path, out: Path, **options: object) -> list[str]:
    return ["train", str(photos), *as_words({**TINY, "val_fraction": 0.2, "out": out, **options})]


@pytest.mark.slow
@pytest.mark.parametrize("how", sampled(["torchrun", "nproc"], 2))
def test_a_launcher_runs_one_command(how, photos, tmp_path):
    out = tmp_path / "run"
    words = words_of(photos, out, format="json")
    start = {
        "nproc": ["-m", "vitral", *words, "--nproc", "2"],
        "torchrun": [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--local-addr",
            "localhost",
            "-m",
            "vitral",
            *words,
        ],
    }
    done = subprocess.run([sys.executable, *start[how]], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)  # of one rank
    assert result["epochs"] == TINY["epochs"]
    assert result == json.loads((out / "result.json").read_text())
    assert done.stderr.count("Plan") == 1
    assert done.stderr.count("epoch 3/3") == 1
    assert "each process computes 2 of a batch's 4 images" in " ".join(done.stderr.split())
    assert "--nproc" not in result["command"]  # the run does not depend on it


@pytest.mark.slow
def test_a_stopped_launcher_prints_one_command_that_goes_on(photos, tmp_path):
    """torch's own line about the signal is left out; the command starts as many ranks."""
    out, words = tmp_path / "run", words_of(photos, tmp_path / "run", epochs=100_000)
    command = [sys.executable, "-m", "vitral", *words, "--nproc", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        wait_for(out / "metrics.jsonl", 120)
        running.terminate()
        printed = running.communicate(timeout=120)[1]
    assert running.returncode == 0
    assert printed.rstrip().endswith(f"Stopped and saved. To resume:\n  vitral train --out {out} --resume --nproc 2")
    assert "signal" not in printed


def test_ranks_print_a_traceback_as_asked(photos, monkeypatch):
    asked: list[list[str]] = []
    monkeypatch.setattr(ranks, "launch", lambda words, *_: asked.append(words) or 0)
    assert main(["train", str(photos), "--nproc", "2", "--debug"]) == 0
    assert main(["train", str(photos), "--nproc", "2"]) == 0
    assert [words[-1] for words in asked] == ["--debug", str(photos)]


def test_the_command_of_a_rank_is_that_of_the_launcher():
    given = {"data": "my photos", "image_size": (8, 12), "flip": False, "log": ("csv",), "resume": True, "lr": None}
    words = ranks.words_of("train", train_options(), {**given, "format": "text"})
    expected = "train|my photos|--image-size|8|12|--no-flip|--log|csv|--resume|--format|text"
    assert words == expected.split("|")


@pytest.mark.parametrize("environment", [{}, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}])
def test_a_rank_ends_without_the_teardown_of_the_interpreter(environment):
    """Gloo's threads may abort a process in it. Functions registered for the exit run in any case."""
    program = """
import atexit, sys
from vitral.cli.main import run
class Kept:
    def __del__(self):
        print("torn down")
kept = Kept()
atexit.register(print, "exit functions")
sys.argv = ["vitral", "--version"]
run()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, env={**os.environ, **environment}
    )
    assert (done.returncode, done.stderr) == (0, "")
    version, *rest = done.stdout.splitlines()
    assert version.startswith("vitral ")
    assert rest == (["exit functions"] if environment else ["exit functions", "torn down"])


@pytest.mark.parametrize("count", [0, -1, 5000])
def test_impossible_numbers_of_ranks(count):
    with pytest.raises(UsageError, match=f"--nproc must be from 1 to 1024, not {count}"):
        launch.launch(["train"], count)


def test_a_killed_rank_is_named(monkeypatch):
    """A rank that is killed reports nothing itself."""
    failure = elastic.ProcessFailure(local_rank=1, pid=7, exitcode=-9, error_file="")
    monkeypatch.setattr(
        "torch.distributed.launcher.api.launch_agent",
        lambda *_, **__: (_ for _ in ()).throw(elastic.ChildFailedError("vitral", {1: failure})),
    )
    with pytest.raises(RankError, match="rank 1 ended\n  why: it was ended by SIGKILL"):
        launch.launch(["train"], 2)


REFUSED = {
    "an unknown option": (["--nonsense"], "unknown option '--nonsense'"),
    "data that are missing": (["/no/such/folder"], "no such"),
    "fewer images than ranks": (["--batch-size", "1"], "a rank would have no image"),
    "a recipe without steps": (["--recipe", "linear-probe", "--init", "demo"], "nothing for several ranks to share"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_error_is_printed_once(name, photos, tmp_path, capfd):
    words, message = REFUSED[name]
    data = [] if name == "data that are missing" else [str(photos)]
    command = ["train", *data, *words, "--device", "cpu", "--out", str(tmp_path / "run")]
    assert on_ranks(2, lambda: main(command)) == [2, 2]
    printed = capfd.readouterr().err
    assert printed.count("error: ") == 1, printed
    assert message in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "run").exists()


def test_an_error_of_another_rank_is_printed_with_its_number(photos, tmp_path, capfd, monkeypatch):
    """Rank 1 reads other images, as from a disk that was not copied whole."""
    from vitral.workflows.running import running

    monkeypatch.setattr(running, "digest", lambda *_: os.environ["RANK"])
    assert on_ranks(2, lambda: main(words_of(photos, tmp_path / "run"))) == [2, 2]
    printed = capfd.readouterr().err
    assert printed.count("error: ") == 1, printed
    assert "error: rank 1 on " in printed
    assert "other training images than rank 0" in printed
