"""Test failures of the disk, the user, the reader of a pipe and vitral itself: a message and an exit code."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vitral
from running import TINY, as_words, in_child, printed
from vitral.cli.main import COMMANDS, main
from vitral.weights import files

WORDS = as_words({**TINY, "epochs": 1})


def test_disk_full_while_saving(capsys, monkeypatch, photos):
    def full(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "save_file", full)
    _, err = printed(capsys, "train", photos, *WORDS, "--quiet", code=2)
    assert len(err.splitlines()) <= 5
    for part in ("No space left on device", "runs/photos/model.safetensors", "try: "):
        assert part in err
    assert not list(Path("runs").rglob("*.tmp"))
    assert not Path("runs/photos/model.safetensors").exists()


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left"), FileNotFoundError(errno.ENOENT, "No usable temporary directory")],
    ids=["write", "temporary file"],
)
def test_disk_full_in_a_library(capsys, monkeypatch, error):
    def fail() -> int:
        raise error

    monkeypatch.setitem(COMMANDS, "models", fail)
    _, err = printed(capsys, "models", code=2)
    assert "error: cannot write" in err
    assert "TMPDIR" in err


def test_debug_shows_the_traceback(photos):
    with pytest.raises(vitral.VitralError):
        main(["train", "no/such", "--debug"])


def test_bugs_are_reported_as_such(capsys, monkeypatch):
    def broken() -> int:
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setitem(COMMANDS, "models", broken)
    _, err = printed(capsys, "models", code=2)
    assert err.startswith("error: ZeroDivisionError: division by zero\n")
    assert "--debug" in err


def test_ctrl_c_before_anything_is_saved(capsys, monkeypatch, photos):
    from vitral.workflows.running import execute

    def stopped(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(execute, "_readable_batches", stopped)
    _, err = printed(capsys, "train", photos, *WORDS, code=130)
    assert "Stopped" in err
    assert not Path("runs").exists()


def test_ctrl_c_while_the_report_is_written(capsys, monkeypatch, photos):
    """Training is finished; the command to resume writes the rest."""
    from vitral.workflows.running import execute

    written = execute._report
    monkeypatch.setattr(execute, "_report", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    _, err = printed(capsys, "train", photos, *WORDS, code=130)
    assert err.strip().splitlines()[-1].strip() == "vitral train --out runs/photos --resume"
    monkeypatch.setattr(execute, "_report", written)
    printed(capsys, "train", "--out", "runs/photos", "--resume")
    assert Path("runs/photos/result.json").is_file()


@pytest.mark.real
def test_a_closed_pipe(tmp_path, capfd):
    """`vitral models | head -1`."""

    read, write_end = os.pipe()
    os.close(read)

    def work() -> int:
        os.dup2(write_end, 1)
        import sys

        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        code = main(["models", "--format", "json"])
        sys.stdout.flush()
        return code

    assert in_child(work) in (0, -signal.SIGPIPE)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "vitral models >&-",
        "vitral models 2>&-",
        "vitral models >&- 2>&-",
        "PYTHONIOENCODING=cp1252 vitral train --help",
    ],
)
def test_streams_that_are_closed_or_know_few_characters(line):
    line = line.replace("vitral", f"{shlex.quote(sys.executable)} -m vitral")
    done = subprocess.run(["sh", "-c", line], capture_output=True, timeout=120)
    assert done.returncode == 0
    assert b"bug in vitral" not in done.stdout + done.stderr
    assert bool(done.stdout) == (">&-" not in line.replace("2>&-", ""))
