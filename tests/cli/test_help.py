"""Test the help of every command, and the overview."""

from __future__ import annotations

import dataclasses
import re

import pytest

import vitral
from running import printed
from vitral.cli.help import _description
from vitral.cli.main import COMMANDS, _options
from vitral.training.options import PRETRAINING_OPTIONS, Run


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_the_overview_names_every_command(capsys, words):
    out, err = printed(capsys, *words)
    assert all(re.search(rf"^  {name} +\S", out, re.MULTILINE) for name in COMMANDS)
    assert err == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command(capsys, name):
    out, err = printed(capsys, *name.split(), "--help")
    assert err == ""
    assert out.startswith(f"usage: vitral {name} ")
    assert "None" not in out
    if name == "train":
        for field in dataclasses.fields(Run):
            shown = f"--{field.name.replace('_', '-')}" in out
            assert shown or field.name in ("data", *PRETRAINING_OPTIONS)


def test_help_explains_the_terms_that_it_uses(capsys):
    out, _ = printed(capsys, "train", "--help")
    words = out.split("\nwords:\n")[1]
    assert "one of several training processes" in words  # rank
    assert "LibraGrad" not in words
    assert "words:" not in printed(capsys, "completion", "--help")[0]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_states_a_default_once(name):
    assert not [one.name for one in _options(COMMANDS[name]) if _description(one).count("(default:") > 1]


def test_help_with_other_words_is_the_full_help(capsys):
    pages = [
        printed(capsys, "evaluate", *words)[0]
        for words in (["--help"], ["runs/photos", "--help"], ["runs/photos", "--tta", "both", "-h"])
    ]
    assert pages[0] == pages[1] == pages[2]
    assert "RUN" in pages[0]


@pytest.mark.parametrize("columns", [30, 60, 100, 300])
def test_help_fits_the_terminal(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    out, _ = printed(capsys, "train", "--help")
    explained = [line for line in out.splitlines() if line.startswith(" " * 24)]
    assert explained
    assert max(map(len, explained)) <= max(min(columns, 100), 24 + 20)
    assert not any(line.endswith(" ") for line in out.splitlines())


def test_help_shows_the_syntax_of_values(capsys):
    out, _ = printed(capsys, "train", "--help")
    for shown in (
        "[DATA]", "--epochs INT ", "--lr FLOAT ", "--out STR ", "--image-size INT [INT]\n", "--mean FLOAT [FLOAT …]\n",
        "--randaugment INT INT\n", "--freeze [STR …] ", "--crop {none,shift,random-resized}\n", "--flip, --no-flip ",
        "--resume  ", "(default: digits)",
    ):  # fmt: skip
        assert shown in out


def test_version(capsys):
    assert printed(capsys, "--version")[0] == f"vitral {vitral.__version__}\n"
