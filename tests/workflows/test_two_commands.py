"""Two commands at the same moment on one run: both do their work, or one says that the other is at it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vitral
from running import TINY, as_words, printed

pytestmark = [pytest.mark.real, pytest.mark.slow]

PAIRS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "reports": (("evaluate", "RUN", "--report", "RUN/again.html"), ("evaluate", "RUN", "--report", "RUN/again.html")),
    "thresholds": (("evaluate", "RUN", "--unknown", "OTHER"), ("evaluate", "RUN", "--unknown", "OTHER")),
    "a threshold and answers": (
        ("evaluate", "RUN", "--unknown", "OTHER"),
        ("predict", "RUN", "OTHER", "--out", "t.csv"),
    ),
    "maps": (("explain", "RUN", "OTHER/0.png"), ("explain", "RUN", "OTHER/0.png")),
    "exports": (("export", "RUN", "--to", "torch"), ("export", "RUN", "--to", "torch")),
    "ranges": (("quantize", "RUN", "--images", "8"), ("quantize", "RUN", "--images", "8")),
    "one table": (("predict", "RUN", "OTHER", "--out", "t.csv"), ("predict", "RUN", "OTHER", "--out", "t.csv")),
    "checks": (("data", "check", "OTHER", "--write", "f.csv"), ("data", "check", "OTHER", "--write", "f.csv")),
}
SAID = ("another", "exists", "already")
"""Words of an error that names the other command or what it left."""


@pytest.mark.parametrize("name", PAIRS)
def test_neither_is_damaged(
    name: str, trained: vitral.TrainedRun, tmp_path: Path, make_images, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(trained.folder, tmp_path / "run"))
    make_images({".": 40}, name="other")
    before = json.loads((run / "result.json").read_text())
    words = [[word.replace("RUN", "run").replace("OTHER", "other") for word in one] for one in PAIRS[name]]
    ended = together(words, tmp_path)
    for code, err in ended:
        assert "Traceback" not in err, err
        assert "bug in vitral" not in err, err
        assert code == 0 or (code == 2 and any(word in err for word in SAID)), err
    assert 0 in [code for code, _ in ended]
    assert json.loads((run / "result.json").read_text()) == before
    assert not list(run.rglob("*.tmp"))
    printed(capsys, "verify", str(run))
    assert vitral.load(run)(str(tmp_path / "other/0.png")).label in ("day", "night", "unknown")
    if name in ("one table", "a threshold"):
        assert (tmp_path / "t.csv").read_text().count("\n") == 41


def test_two_trainings_of_one_run(tmp_path: Path, make_images) -> None:
    photos = make_images({"a": 20, "b": 20})
    words = ["train", str(photos), *as_words({**TINY, "epochs": 40, "out": "run"})]
    ended = together([words, words], tmp_path)
    assert sorted(code for code, _ in ended) == [0, 2]
    (refused,) = [err for code, err in ended if code == 2]
    assert any(word in refused for word in SAID)
    assert json.loads((tmp_path / "run/result.json").read_text())["epochs"] == 40


def together(commands: list[list[str]], place: Path) -> list[tuple[int, str]]:
    """Run the commands at the same time; return the exit code and the standard error of each."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "vitral", *words],
            cwd=place,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for words in commands
    ]
    return [(one.returncode, err) for one in started for err in [one.communicate(timeout=200)[1]]]
