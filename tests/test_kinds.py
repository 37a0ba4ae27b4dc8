"""Arguments of public functions are checked by type: text such as "False", from JSON or the environment, is no bool."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import numpy as np
import pytest

import vitral
from vitral.errors import UsageError
from vitral.kinds import checked, kinds_of, matches
from vitral.training.callbacks import Callback
from vitral.workflows.replay import replay

FUNCTIONS = {name: one for name in vitral.__all__ if inspect.isfunction(one := getattr(vitral, name))}
SWITCHES = [
    (function, name)
    for function in (*FUNCTIONS.values(), replay)
    for name, kind in kinds_of(function).items()
    if kind is bool
]


def with_required(function: Any) -> dict[str, Any]:
    """A text for each argument without a default: nothing is read before the check."""
    named = inspect.signature(function).parameters.values()
    return {one.name: "nowhere" for one in named if one.default is one.empty and one.kind is not one.VAR_KEYWORD}


@pytest.mark.parametrize(("function", "switch"), SWITCHES, ids=lambda one: getattr(one, "__qualname__", one))
def test_text_is_no_switch(function, switch):
    with pytest.raises(UsageError, match=r"cannot be '(nowhere|False)', a str"):
        function(**{**with_required(function), switch: "False"})


def test_the_switches_are_found():
    assert {name for _, name in SWITCHES} >= {"resume", "overwrite", "quiet", "accept", "check", "download", "exact"}


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in ("train", "pretrain")])
def test_a_misspelled_argument_is_answered_with_the_nearest(name):
    function = FUNCTIONS[name]
    if name == "explain":
        pytest.skip("it takes further options, which it checks itself")
    known = next(iter(inspect.signature(function).parameters))
    with pytest.raises(UsageError, match=f"(?s)unknown (argument|option) '{known}s'.*nearest: .*{known}"):
        function(**{f"{known}s": 1})


@pytest.mark.parametrize(
    ("config", "wrong", "nearest"),
    [(vitral.Run, "epcohs", "epochs"), (vitral.ViTConfig, "dpeth", "depth"), (vitral.Preprocessing, "maen", "mean")],
)
def test_a_misspelled_field_is_answered_with_the_nearest(config, wrong, nearest):
    with pytest.raises(UsageError, match=f"(?s)unknown option '{wrong}'.*nearest: .*{nearest}"):
        config(**{wrong: 1})
    assert nearest in inspect.signature(config).parameters


@pytest.mark.parametrize("callbacks", [print, [print], Callback, [Callback], Callback(), "csv"], ids=range(6))
def test_what_is_no_list_of_callbacks(callbacks):
    with pytest.raises(UsageError, match=r"(?s)callback.*on_epoch_end.*callbacks=\[Mine\(\)\]"):
        vitral.train("digits", callbacks=callbacks)


@pytest.mark.parametrize(
    "train",
    [vitral.train, vitral.pretrain, partial(vitral.train, resume=True), partial(vitral.train, recipe="small")],
    ids=["train", "pretrain", "resume", "recipe"],
)
def test_python_does_not_choose_the_data(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r'(?s)needs data.*\("photos/"\), or .*\("digits"\)'):
        train()


def test_kinds_of_values():
    assert matches(3, float)
    assert not matches(True, int)
    assert not matches(3.0, int)
    assert not matches("ab", list[str])
    assert matches([1, 2], kinds_of(vitral.inspect)["layers"])
    assert not matches(["1"], kinds_of(vitral.inspect)["layers"])
    assert not matches("12", kinds_of(vitral.inspect)["layers"])
    for targets in (None, 1, "cat", ["cat", 2], range(3), np.arange(3)):
        assert matches(targets, kinds_of(vitral.explain)["target"])


def test_a_checked_function_is_called_as_before():
    @checked
    def scaled(value: float, *more: float, by: int = 2) -> tuple[float, ...]:
        return tuple(by * one for one in (value, *more))

    assert scaled(1, 2.5, by=3) == (3, 7.5)
    assert list(inspect.signature(scaled).parameters) == ["value", "more", "by"]
    assert scaled(1, by=np.int64(3)) == (3,)
    with pytest.raises(TypeError, match="missing 1 required"):
        scaled()
    with pytest.raises(UsageError, match="by cannot be '3', a str"):
        scaled(1, by="3")
