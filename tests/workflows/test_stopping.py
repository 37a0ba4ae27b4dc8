"""Test signals that stop a run at any time: it saves, prints how to resume, and exits with 130."""

from __future__ import annotations

import contextlib
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from running import TINY, as_words, in_child, same_bits, sampled, train, weights_of
from vitral.cli.main import main
from vitral.workflows import train as entry
from vitral.workflows.running import execute

NAMES = ("SIGTERM", "SIGHUP", "SIGUSR1")


@pytest.fixture
def photos(make_images) -> Path:
    return make_images({"a": 10, "b": 10})


def words_of(photos: Path, out: Path) -> list[str]:
    return ["train", str(photos), *as_words({**TINY, "val_fraction": 0.2, "out": out})]


def raising(number: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the signal when `vitral.workflows.train` calls this function."""
    home = entry if name == "plan_run" else execute
    original = getattr(home, name)

    def stopped(*args: object, **options: object) -> object:
        signal.raise_signal(number)
        return original(*args, **options)

    monkeypatch.setattr(home, name, stopped)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", ["plan_run", "_set_up", "write_config", "_finish"])
def test_a_signal_before_the_first_and_after_the_last_epoch(name, place, photos, tmp_path, monkeypatch, capfd):
    out = tmp_path / "cut"

    def run() -> int:
        raising(getattr(signal, name), place, monkeypatch)
        return main(words_of(photos, out))

    assert in_child(run) == 130
    reported = capfd.readouterr().err
    assert "Traceback" not in reported
    assert ("Stopped and saved" if place == "_finish" else "Stopped before anything was saved") in reported
    command = shlex.split(reported.strip().splitlines()[-1])
    assert main([*command[1:], "--quiet"]) == 0
    whole = train(photos, tmp_path / "whole")
    assert same_bits(weights_of(whole.folder), weights_of(out))


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(NAMES, 3))
def test_a_real_process_saves_its_epoch(name, photos, tmp_path):
    out = tmp_path / "cut"
    words = ["train", str(photos), *as_words({**TINY, "val_fraction": 0.2, "epochs": 200, "out": out})]
    process = subprocess.Popen([sys.executable, "-m", "vitral", *words], stderr=subprocess.PIPE, text=True)
    _wait_for(out / "metrics.jsonl")
    process.send_signal(getattr(signal, name))
    reported = process.communicate(timeout=120)[1]
    assert process.returncode == 130, reported
    assert "Stopped and saved" in reported
    assert (out / "checkpoints" / "last.safetensors").is_file()


@pytest.mark.real
@pytest.mark.slow
def test_a_closed_terminal_loses_nothing(photos, tmp_path):
    """The terminal closes, so that nothing can be printed."""
    out = tmp_path / "cut"
    words = ["train", str(photos), *as_words({**TINY, "val_fraction": 0.2, "epochs": 200, "out": out})]
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-m", "vitral", *words])
    os.set_blocking(terminal, False)
    _wait_for(out / "metrics.jsonl", terminal)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    assert (out / "checkpoints" / "last.safetensors").is_file()
    assert not (out / "result.json").exists()
    epochs = (out / "metrics.jsonl").read_text().count("\n")
    assert 0 < epochs < 200


@pytest.mark.real
def test_a_hang_up_that_is_ignored_stays_ignored(photos, tmp_path):
    """Programs under nohup ignore it too."""

    def run() -> int:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with pytest.MonkeyPatch.context() as patch:
            raising(signal.SIGHUP, "_set_up", patch)
            return main([*words_of(photos, tmp_path / "run"), "--quiet"])

    assert in_child(run) == 0
    assert (tmp_path / "run" / "result.json").is_file()


def _wait_for(path: Path, terminal: int | None = None) -> None:
    deadline = time.monotonic() + 120
    while not path.is_file():
        assert time.monotonic() < deadline
        if terminal is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(terminal, 65536)  # what nobody reads would stop the writer
        time.sleep(0.02)
