"""Messages write options in the language of the reader: `--lr 0.1` in a shell, `lr=0.1` in Python."""

from __future__ import annotations

import warnings

import pytest

import vitral
from vitral.cli.main import main
from vitral.errors import UsageError, VitralWarning, warn
from vitral.spoken import in_python, shell

pytestmark = pytest.mark.python

FUNCTIONS = vitral.train, vitral.evaluate, vitral.explain, vitral.convert
"""Imported for their arguments, which messages may name."""


@pytest.mark.parametrize(
    ("typed", "written"),
    [
        ("--lr 0.001", "lr=0.001"),
        ("--lr cannot be high", "lr cannot be high"),
        ("--batch-size 64 --accumulate 2, or fewer ranks", "batch_size=64, accumulate=2, or fewer ranks"),
        ("--image-size 64 48", "image_size=(64, 48)"),
        ("--optimizer sgd", 'optimizer="sgd"'),
        ("--bad-images skip leaves them out", 'bad_images="skip" leaves them out'),
        ("with --bad-images skip: stop", 'with bad_images="skip": stop'),
        ("--init runs/x --out …", 'init="runs/x", out=…'),
        ("--freeze 'blocks.*', which trains the head", 'freeze="blocks.*", which trains the head'),
        ("--no-compile", "compile=False"),
        ("--overwrite, or another --out", "overwrite=True, or another out"),
        ("--resume, --out runs/x-2 or --overwrite", 'resume=True, out="runs/x-2" or overwrite=True'),
        ("leave out --resume to start one", "leave out resume to start one"),
        ("--device auto, cpu, cuda or mps", 'device="auto", cpu, cuda or mps'),
        ("--minutes limits the time instead", "minutes limits the time instead"),
        ("--plan-only", "--plan-only"),
        ("vitral train --out runs/x --resume", "vitral train --out runs/x --resume"),
        ("begin again: vitral train --lr 1; or a lower --lr", "begin again: vitral train --lr 1; or a lower lr"),
    ],
)
def test_an_option_is_written_as_python_does(typed, written):
    assert in_python(typed, hint=True) == written


def test_a_switch_is_a_name_unless_it_is_asked_for():
    assert in_python("--resume and --overwrite are mutually exclusive") == "resume and overwrite are mutually exclusive"


def test_errors_of_python_name_arguments_and_their_choices():
    with pytest.raises(UsageError, match=r"lr cannot be 'high', a str") as error:
        vitral.train("digits", lr="high")
    assert "--" not in str(error.value)
    with pytest.raises(UsageError, match=r"(?s)unknown choice for loss: 'mea'.*known: huber, mse"):
        vitral.train("digits", loss="mea")
    with pytest.raises(UsageError, match=r"(?s)epochs must be from 1 .*try: epochs=100"):
        vitral.Run(epochs=0)


@pytest.mark.parametrize(
    ("call", "nearest"),
    [
        (lambda: vitral.train("digits", epcohs=1), "epochs"),
        (lambda: vitral.train("digits", learning_rate=1e-3), "lr"),
        (lambda: vitral.train("digits", transforms=print), "augment"),
        (lambda: vitral.train("digits", criterion=print), "loss"),
        (lambda: vitral.pretrain("digits", maks=0.5), "mask"),
        (lambda: vitral.Run(epcohs=1), "epochs"),
        (lambda: vitral.Run(batch=1), "batch_size"),
        (lambda: vitral.create("S/16", depht=3), "depth"),
        (lambda: vitral.load("demo", image_sise=3), "image_size"),
        (lambda: vitral.convert("demo", "x", "timm", scema="x"), "scheme"),
        (lambda: vitral.evaluate("demo", splt="val"), "split"),
    ],
)
def test_a_wrong_keyword_is_answered_with_the_nearest(call, nearest):
    with pytest.raises(UsageError, match=rf"nearest: .*\b{nearest}\b"):
        call()


def test_the_shell_reads_flags_and_python_does_not(capsys):
    assert main(["train", "digits", "--lr", "5000"]) == 2
    assert "--lr must be" in capsys.readouterr().err
    error = UsageError("--lr is wrong", hint="--lr 0.1")
    assert str(error) == "lr is wrong\n  try: lr=0.1"
    with shell():
        assert str(error) == "--lr is wrong\n  try: --lr 0.1"


def test_warnings_are_translated_too():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", VitralWarning)
        warn("--levels 0 4095 keeps more")
    assert str(found[0].message) == "levels=(0, 4095) keeps more"
