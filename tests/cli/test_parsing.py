"""Test the conversion of words to values by the types of the options, and its errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest

from vitral.cli.main import COMMANDS, _options, main
from vitral.cli.options import Help, options_of
from vitral.cli.parsing import parse
from vitral.errors import UsageError


def example(
    data: Annotated[str, Help("a folder", "DATA")],
    images: Annotated[tuple[str, ...], Help("files", "[IMAGE …]")] = (),
    *,
    top: Annotated[int, Help("classes")] = 3,
    lr: Annotated[float | None, Help("rate")] = None,
    size: Annotated[int | tuple[int, int] | None, Help("pixels")] = None,
    mean: Annotated[float | tuple[float, ...], Help("mean")] = 0.5,
    pair: Annotated[tuple[int, int] | None, Help("two numbers")] = None,
    depths: Annotated[tuple[int, ...], Help("numbers")] = (),
    names: Annotated[tuple[str, ...], Help("names")] = (),
    kinds: Annotated[tuple[Literal["a", "b"], ...], Help("kinds")] = (),
    order: Annotated[Literal["up", "down"] | None, Help("order")] = None,
    batch_size: Annotated[int, Help("batch size")] = 1,
    flip: Annotated[bool, Help("mirror")] = False,
    compile: Annotated[bool | None, Help("compile")] = None,
    from_: Annotated[str | None, Help("source")] = None,
) -> int:
    """Do nothing."""
    return 0


def parsed(words: str, *, with_images: bool = True) -> dict[str, Any]:
    options = [option for option in options_of(example) if with_images or option.name != "images"]
    return parse("example", options, [word.replace("''", "") for word in words.split()])


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("d", {}),
        ("d x y", {"images": ("x", "y")}),
        ("d x --top 2 y", {"images": ("x", "y"), "top": 2}),
        ("--top 2 d", {"top": 2}),
        ("d --top=2", {"top": 2}),
        ("d --top 1 --top 2", {"top": 2}),
        ("d --top -1 --lr -1e-3", {"top": -1, "lr": -0.001}),
        ("d --batch_size 8", {"batch_size": 8}),
        ("d --batch_size=8", {"batch_size": 8}),
        ("d --size 8", {"size": 8}),
        ("d --size 8 12", {"size": (8, 12)}),
        ("--size 8 12 d", {"size": (8, 12)}),
        ("--size 8 d", {"size": 8}),
        ("d --size=8 12", {"size": (8, 12)}),
        ("d --mean 0.1", {"mean": 0.1}),
        ("d --mean 0.1 0.2 0.3", {"mean": (0.1, 0.2, 0.3)}),
        ("--mean 0.1 0.2 d", {"mean": (0.1, 0.2)}),
        ("--pair 2 10 d", {"pair": (2, 10)}),
        ("d --names", {"names": ()}),
        ("d --names x y --top 2", {"names": ("x", "y"), "top": 2}),
        ("d --names=x y", {"names": ("x", "y")}),
        ("--depths 1 2 d", {"depths": (1, 2)}),
        ("d --depths", {"depths": ()}),
        ("d --kinds b a", {"kinds": ("b", "a")}),
        ("d --order down", {"order": "down"}),
        ("d --order=up", {"order": "up"}),
        ("--flip d", {"flip": True}),
        ("d --no-flip --no_compile", {"flip": False, "compile": False}),
        ("d --flip --no-flip", {"flip": False}),
        ("d --from -", {"from_": "-"}),
        ("d --from=", {"from_": ""}),
        ("d --from ''", {"from_": ""}),
        ("d --from=--flip", {"from_": "--flip"}),
        ("d -- --top -x", {"images": ("--top", "-x")}),
    ],
)
def test_words_become_values(words, values):
    assert parsed(words) == {"data": "d", **values}


@pytest.mark.parametrize(
    ("words", "what", "why"),
    [
        ("", "vitral example needs DATA", "DATA: a folder"),
        ("d --top", "--top needs a value", None),
        ("d --top --flip", "--top needs a value", None),
        ("d --top -x", "--top needs a value", None),
        ("d --top=", "--top takes an integer, not ''", None),
        ("d --top 1.5", "--top takes an integer, not '1.5'", None),
        ("d --lr two", "--lr takes a number, not 'two'", None),
        ("d --size x", "--size takes an integer, not 'x'", None),
        ("d --size 8 x", "--size takes an integer, not 'x'", None),
        ("d --depths x", "--depths takes an integer, not 'x'", None),
        ("d --depths 1 1.5", "--depths takes an integer, not '1.5'", None),
        ("d --flip true", "unexpected argument: true", "--flip and --no-flip take no value"),
        ("d --top 3 x", "unexpected argument: x", None),
        ("d --mean", "--mean needs a value", None),
        ("d --pair 2", "--pair needs 2 values", None),
        ("d --pair 2 x", "--pair takes an integer, not 'x'", None),
        ("d --order dwn", "unknown value of --order: 'dwn'", "nearest: down; known: down, up"),
        ("d --kinds a c", "unknown value of --kinds: 'c'", "known: a, b"),
        ("d --flip=true", "--flip and --no-flip take no value", None),
        ("d --no-flip=true", "--flip and --no-flip take no value", None),
        ("d --no-top 3", "unknown option '--no-top'", "nearest: --no-flip, --no-compile"),
        ("d --from_ x", "unknown option '--from_'", "nearest: --from"),
        ("d --batch 3", "unknown option '--batch'", "nearest: --batch-size"),
        ("d --tpo 3", "unknown option '--tpo'", "nearest: --top"),
        ("d --to", "unknown option '--to'", "nearest: --top"),
        ("--data d", "DATA is positional: leave out --data", None),
    ],
)
def test_errors_name_the_option(words, what, why):
    with pytest.raises(UsageError) as found:
        parsed(words, with_images=False)
    assert (found.value.what, found.value.why) == (what, why)
    assert found.value.hint == ("vitral example DATA" if "--data" in words else "vitral example --help")


def test_values_come_in_the_order_of_the_options():
    assert list(parsed("--flip --top 2 d x")) == ["data", "images", "top", "flip"]


@pytest.mark.parametrize("words", ["-x", "d -x 3", "d -x.png"])
def test_one_dash_is_an_option_too(words):
    with pytest.raises(UsageError, match="unknown option '-x"):
        parsed(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "digits", "--minutes", "two"], "--minutes takes a number, not 'two'"),
        (["train", "digits", "--epochs", "1.5"], "--epochs takes an integer, not '1.5'"),
        (["predict", "demo", "x.jpg", "--top", "x"], "--top takes an integer, not 'x'"),
        (["evaluate", "demo", "--data", "x"], "DATA is positional: leave out --data\n  try: vitral evaluate RUN DATA"),
        (["evaluate", "--model", "demo"], "RUN is positional: leave out --model\n  try: vitral evaluate RUN"),
        (["train", "--data", "digits"], "DATA is positional: leave out --data"),
        (["summary", "--model=S/16"], "MODEL is positional: leave out --model"),
        (
            ["train", "digits", "--augment", "affines"],
            "unknown value of --augment: 'affines'\n"
            "  why: nearest: affine; known: affine, none, randaugment, trivialaugment",
        ),
        (["train", "digits", "--lerning-rate", "1"], "unknown option '--lerning-rate'\n  why: nearest: --lr"),
        (["train", "digits", "--img_size=32"], "unknown option '--img_size'\n  why: nearest: --image-size"),
        (["train", "digits", "--no-graph"], "unknown option '--no-graph'\n  why: nearest: --no-graphs"),
        (["--verson"], "unknown option '--verson'\n  why: nearest: --version; known: --help, --version"),
        (["train", "digits", "--image-size", "0"], "--image-size must be from 1 to 16,384, not 0"),
        (["train", "digits", "mnist"], "unexpected argument: mnist"),
        (["train", "digits", "mnist", "cifar10"], "unexpected arguments: mnist, cifar10"),
        (
            ["train", "digits", "--compile", "false"],
            "unexpected argument: false\n  why: --compile and --no-compile take no value",
        ),
        (["evaluate", "demo", "--report"], "--report needs a value"),
        (
            ["data", "chek"],
            "unknown command 'data chek'\n  why: nearest: data check, data cache; "
            "known: data cache, data check, data shard",
        ),
        (["data"], "unknown command 'data'\n  why: known: data cache, data check, data shard"),
        (
            ["evaluate"],
            "vitral evaluate needs RUN\n  why: RUN: run folder or weights file\n  try: vitral evaluate runs/photos",
        ),
        (
            ["convert"],
            "vitral convert needs SOURCE and TARGET\n"
            "  why: SOURCE: run, weights file, folder, timm:NAME or hf:ORG/NAME; "
            "TARGET: file or folder to write; it must not exist",
        ),
    ],
)
def test_errors_of_commands(words, message, capsys):
    assert main(words) == 2
    assert f"error: {message}\n" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_names_all_that_it_needs(name, capsys):
    needed = [option for option in _options(COMMANDS[name]) if option.required]
    if needed:
        assert main(name.split()) == 2
        expected = f"error: vitral {name} needs {' and '.join(option.title for option in needed)}\n"
        assert capsys.readouterr().err.startswith(expected)
    assert main([*name.split(), "--help"]) == 0
    usage = capsys.readouterr().out.partition("[OPTIONS]")[0].split()
    assert {option.title for option in needed} <= set(usage)
