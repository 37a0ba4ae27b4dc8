"""Names with control sequences or markup are printed escaped everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from images import noise
from running import as_words
from vitral.cli.main import main
from vitral.console import counting, go_on, stderr
from vitral.wording import printable

EVIL = "\x1b[2Jcat\u202egnp.\x07\r"


def test_escapes():
    assert printable("plain, ünïcode 猫\n\ttext") == "plain, ünïcode 猫\n\ttext"
    assert printable(EVIL) == r"\x1b[2Jcat\u202egnp.\x07\r"
    assert printable(printable(EVIL)) == printable(EVIL)
    assert printable("\udcff") == r"\xff"  # a byte of a file name that is no text


def test_styles_of_the_console_stay(capsys):
    from rich.text import Text

    console = stderr()
    console._force_terminal, console._color_system = True, 1
    console.print(Text("name \x1b[2J", style="bold"))
    told = capsys.readouterr().err
    assert r"\x1b[2J" in told
    assert "\x1b[2J" not in told
    assert "\x1b[1m" in told


def test_forced_color_draws_no_bars(monkeypatch, capsys):
    """As in a notebook, where each frame would be a line."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = stderr()
    assert console.is_terminal
    with counting(console, "reading", 10) as done:
        done(10)
    assert capsys.readouterr().err == ""


def test_a_bar_goes_on_with_other_work(monkeypatch, capsys):
    console = stderr()
    monkeypatch.setattr("vitral.console.draws", lambda console: True)
    with counting(console, "reading", 10) as done:
        done(10)
        go_on(done, "timing")
        (task,) = done.bar.tasks
        assert (task.description, task.completed, task.total) == ("timing", 0, None)
    go_on(None, "nothing to draw")


@pytest.fixture
def evil_photos(tmp_path: Path) -> Path:
    for label in (f"a{EVIL}", "b"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(6):
            Image.fromarray(noise(number, (8, 8))).save(tmp_path / "photos" / label / f"{EVIL}{number}.png")
    (tmp_path / "photos" / "b" / f"broken{EVIL}.png").write_bytes(b"no image")
    return tmp_path / "photos"


def clean(text: str) -> bool:
    return not any(mark in text for mark in ("\x1b", "\u202e", "\x07"))


def test_no_command_prints_them_raw(evil_photos, tmp_path, capsys):
    out = tmp_path / f"run{EVIL}"
    words = as_words({"epochs": 1, "model": "mu/4", "image_size": 8, "device": "cpu", "bad_images": "skip", "out": out})
    commands = [
        ["train", str(evil_photos), "--out", str(out)],  # stops at the broken one
        ["train", str(evil_photos), *words],
        ["predict", str(out), str(evil_photos)],
        ["evaluate", str(out)],
        ["data", "check", str(evil_photos)],
        ["summary", str(out)],
        ["predict", str(out), f"nothing{EVIL}"],
        ["train", EVIL],
    ]
    for command in commands:
        main(command)
        told = capsys.readouterr()
        assert clean(told.out), command
        assert clean(told.err), command
        assert "bug in vitral" not in told.err
    assert main(["predict", str(out), str(evil_photos), "--format", "json"]) == 1
    names = [one["image"] for one in json.loads(capsys.readouterr().out)["predictions"]]
    assert any(EVIL in name for name in names)  # programs get the name itself


def test_names_of_tensors_are_escaped(tmp_path, capsys):
    save_file({f"blocks.0.{EVIL}": torch.zeros(2), "cls\x00": torch.zeros(2)}, tmp_path / "evil.safetensors")
    assert main(["convert", str(tmp_path / "evil.safetensors"), str(tmp_path / "out")]) == 2
    told = capsys.readouterr()
    assert clean(told.err)
    assert "\x00" not in told.err
