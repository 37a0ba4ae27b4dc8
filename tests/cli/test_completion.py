"""Drive the completion scripts in real shells."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from running import printed
from vitral.cli.main import COMMANDS

BASH = """
source "$1"; shift
COMP_WORDS=(vitral "$@"); COMP_CWORD=$#
_vitral
printf '%s\\n' "${COMPREPLY[@]}"
"""

FISH = """
source $argv[1]
complete -C "vitral $argv[2..]" | string split --fields 1 \\t
"""

ZSH = """
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "autoload -U compinit; compinit -u -D; source $1; stty -echo; print READ''Y"
zpty -r shell line '*READY*'
zpty -w -n shell "vitral $2"$'\\t'
sleep 1
zpty -w -n shell $'\\C-a'"print -r -- '"$'\\C-e'"'"$'\\n'
sleep 1
while zpty -r -t shell line; do print -r -- "$line"; done
"""


def a_shell(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}")
    return found


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """run(shell, program, *words) -> the lines that the shell prints; the script of completion is argument 1."""

    def of(shell: str, program: str, *words: str) -> list[str]:
        (tmp_path / "completion").write_text(printed(capsys, "completion", shell)[0])
        (tmp_path / "program").write_text(program)
        flags = ["--noprofile", "--norc"] if shell == "bash" else ["-f"] if shell == "zsh" else ["--no-config"]
        command = [a_shell(shell), *flags, str(tmp_path / "program"), str(tmp_path / "completion"), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
        assert done.returncode in (0, 1, 2), done.stderr
        return done.stdout.splitlines()

    return of


CASES = {
    ("tra",): {"train"},
    ("data", ""): {"check", "cache", "shard"},
    ("data", "cache", "--cl"): {"--clear"},
    ("predict", "--form"): {"--format"},
    ("predict", "runs/photos", "--format", ""): {"text", "json"},
    ("train", "photos", "--no-fli"): {"--no-flip"},
    ("completion", ""): {"bash", "zsh", "fish"},
}


@pytest.mark.parametrize("words", CASES, ids=" ".join)
@pytest.mark.parametrize(("shell", "program"), [("bash", BASH), ("fish", FISH)], ids=["bash", "fish"])
def test_words_are_completed(run, shell, program, words):
    typed = (" ".join(words),) if shell == "fish" else words
    assert set(filter(None, run(shell, program, *typed))) == CASES[words]


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_all_commands_are_offered(run, shell):
    found = run(shell, BASH if shell == "bash" else FISH, "")
    assert {name.split()[0] for name in COMMANDS} == set(found) - {"--help", "--version"}


@pytest.mark.slow
def test_zsh_completes_at_the_press_of_tab(run):
    assert "vitral data check" in " ".join(run("zsh", ZSH, "data chec")).replace("\x1b[1m", "")


def test_files_are_left_to_the_shell(run, tmp_path):
    (tmp_path / "photos").mkdir()
    assert run("bash", BASH, "train", "pho") in ([], [""])
    assert "photos/" in run("fish", FISH, "train pho")
