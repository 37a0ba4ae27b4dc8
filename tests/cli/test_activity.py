"""A command says within a second what it is doing: on a terminal all do, in a log those that take long."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from images import MakeImages
from vitral import activity
from vitral.cli.output import say
from vitral.console import stderr

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(*words: str, where: Path) -> tuple[list[tuple[float, str]], int]:
    """Run a command on a terminal; return its lines, each with the seconds after which it came, and the exit code."""
    started, (process, terminal) = time.monotonic(), pty.fork()
    if process == 0:
        os.chdir(where)
        os.execv(sys.executable, [sys.executable, "-m", "vitral", *words])
    lines = list[tuple[float, str]]()
    while True:
        try:
            found = os.read(terminal, 1 << 16)
        except OSError:
            break
        text = CONTROL.sub("", found.decode(errors="replace")).replace("\r", "\n")
        lines += [(time.monotonic() - started, line.strip()) for line in text.split("\n") if line.strip()]
    return lines, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.mark.slow
def test_a_plan_says_what_it_does_before_its_first_line(make_images: MakeImages, tmp_path: Path) -> None:
    photos = make_images({"cat": 12, "dog": 12})
    lines, code = on_terminal("train", str(photos), "--plan-only", "--init", "none", where=tmp_path)
    assert code == 0
    texts = [text for _, text in lines]
    first = next(n for n, text in enumerate(texts) if text == "Plan")
    assert any("vitral train: starting" in text for text in texts[:first])
    assert any("timing trial steps" in text for text in texts[:first])
    assert not any("timing" in text for text in texts[first:]), "the line is gone when something is printed"


@pytest.mark.slow
def test_a_log_has_a_line_for_each_thing_that_takes_long(make_images: MakeImages, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "vitral", "train", str(make_images({"cat": 12, "dog": 12})), "--plan-only"]
    done = subprocess.run([*words, "--init", "none"], cwd=tmp_path, capture_output=True, text=True, check=True)
    first, *rest = (line.strip() for line in done.stderr.split("\n"))
    assert first == "vitral train: starting"
    assert "Plan" in rest
    assert not CONTROL.search(done.stderr)


@pytest.mark.slow
def test_commands_that_answer_at_once_add_nothing_to_a_log(make_images: MakeImages, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "vitral", "predict", "demo", str(make_images({"cat": 3, "dog": 3}))]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "starting" not in done.stdout + done.stderr


def test_a_library_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    activity.tell("thinking")
    time.sleep(0.6)
    activity.end()
    stderr().print("done")
    assert capsys.readouterr().err == "done\n"


def test_sentences_are_broken_between_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "note: The weights were selected on these images; expect a slightly lower accuracy on new images."
    path = f"Report   {'a' * 90}/report.html"
    shown = dict[bool, str]()
    for terminal in (True, False):
        file = io.StringIO()
        file.isatty = lambda terminal=terminal: terminal  # type: ignore[method-assign]
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", file)
            patch.setenv("COLUMNS", "80")
            say(text)
            say(path)
        shown[terminal] = file.getvalue()
    assert shown[False] == f"{text}\n{path}\n"
    first, second, whole, _ = shown[True].split("\n")
    assert len(first) <= 80
    assert f"{first} {second.strip()}" == text
    assert whole == path
