"""Test the help of every command, and the overview."""

from __future__ import annotations

import dataclasses
import re

import pytest

import vitral
from running import printed
from vitral.cli.examples import EXAMPLES
from vitral.cli.help import _description
from vitral.cli.main import COMMANDS, _options
from vitral.cli.terms import terms_of
from vitral.glossary import terms_in
from vitral.training.options import PRETRAINING_OPTIONS, Run


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_the_overview_names_every_command(capsys, words):
    out, err = printed(capsys, *words)
    assert all(re.search(rf"^  {name} +\S", out, re.MULTILINE) for name in COMMANDS)
    assert err == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command(capsys, name):
    out, err = printed(capsys, *name.split(), "--help-all")
    assert err == ""
    assert out.startswith(f"usage: vitral {name} ")
    assert "None" not in out
    if name == "train":
        for field in dataclasses.fields(Run):
            shown = f"--{field.name.replace('_', '-')}" in out
            assert shown or field.name in ("data", *PRETRAINING_OPTIONS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_an_example(capsys, name):
    """`tests/test_docs.py` runs the examples."""
    assert printed(capsys, *name.split(), "--help")[0].splitlines()[-1] == f"  {EXAMPLES[name]}"


def test_help_lists_the_most_used_options_and_how_to_list_all(capsys):
    short, whole = (printed(capsys, "train", flag)[0] for flag in ("--help", "--help-all"))
    (more,) = re.findall(r"^  --help-all +list all options, (\d+) more$", short, re.MULTILINE)
    options = re.compile(r"^  --[a-z-]+", re.MULTILINE)
    assert len(options.findall(whole)) == len(options.findall(short)) + int(more)
    assert 15 <= len(options.findall(short)) <= 30
    headings = ["options:", "data:", "task:", "network:", "preprocessing and augmentation:", "training:", "execution:"]
    shown = [line for line in whole.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert [line for line in shown if line in headings] == headings
    assert not {*headings[1:]} & {*short.splitlines()}
    assert printed(capsys, "predict", "--help")[0] == printed(capsys, "predict", "--help-all")[0]


def test_help_explains_the_terms_that_it_uses(capsys):
    out, _ = printed(capsys, "train", "--help-all")
    words = out.split("\nwords:\n")[1]
    assert "a linear classifier on the features of a frozen network" in words
    assert "LibraGrad" not in words
    assert "words:" not in printed(capsys, "completion", "--help-all")[0]
    assert "words:" not in printed(capsys, "serve", "--help-all")[0], "its token is not a patch"


@pytest.mark.parametrize("name", COMMANDS)
def test_terms_of_a_command_are_in_its_help(capsys, name):
    text = printed(capsys, *name.split(), "--help-all")[0].partition("\nwords:\n")[0]
    assert set(terms_of(name)) <= set(terms_in(text))


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
    out, _ = printed(capsys, "train", "--help-all")
    explained = [line for line in out.splitlines() if line.startswith(" " * 24)]
    assert explained
    assert max(map(len, explained)) <= max(min(columns, 100), 24 + 20)
    assert not any(line.endswith(" ") for line in out.splitlines())


def test_help_shows_the_syntax_of_values(capsys):
    out, _ = printed(capsys, "train", "--help-all")
    for shown in (
        "[DATA]",
        "--epochs N ",
        "--lr RATE ",
        "--out PATH ",
        "--image-size PIXELS [PIXELS]\n",
        "--mean NUMBER [NUMBER …]\n",
        "--randaugment N N ",
        "--freeze [PATTERN …]",
        "--crop {none,shift,random-resized}\n",
        "--flip, --no-flip ",
        "--resume  ",
        "(default: digits)",
    ):
        assert shown in out


@pytest.mark.parametrize("name", COMMANDS)
def test_placeholders_are_words_of_the_reader(capsys, name):
    out, _ = printed(capsys, *name.split(), "--help-all")
    assert not re.search(r"\b(STR|INT|FLOAT)\b", out)


def test_version(capsys):
    assert printed(capsys, "--version")[0] == f"vitral {vitral.__version__}\n"
