"""Engines other than the default: availability, shared network, reference row."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from vitral.bench import engines, measure
from vitral.bench.engines import ENGINES, chosen
from vitral.bench.measure import Case
from vitral.bench.models import of_config
from vitral.bench.report import VITRAL
from vitral.device import choose
from vitral.errors import MissingExtraError, UsageError
from vitral.inference.engines import int8, openvino
from vitral.model import BiTConfig, Network, ViTConfig

SUBJECT = of_config("tiny", ViTConfig(image_size=32, patch_size=16, dim=16, depth=2, heads=2, mlp_dim=32, classes=5))
RESNET = of_config("resnet", BiTConfig(image_size=32, classes=5, layers=(1, 1)))

INSTALLED = importlib.util.find_spec("openvino") is not None
INTEGERS = not int8.unavailable_reason()
LACKING = [
    name
    for name, there in [
        ("int8", INTEGERS),
        ("openvino", INSTALLED and not openvino.limitation()),
        ("openvino-int8", INSTALLED and not openvino.unavailable_reason()),
    ]
    if not there
]
HERE = tuple(name for name in ENGINES if name not in LACKING)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the machine's matrix-product rate and the repetitions, which these tests do not need."""
    monkeypatch.setattr(measure, "SMALL_MATRIX", 16)
    monkeypatch.setattr(measure, "_MAX_REPEATS", 1)


@pytest.fixture
def _without_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("openvino", "openvino_telemetry"):
        monkeypatch.setitem(sys.modules, name, None)


def case(*names: str, **changes) -> Case:
    return dataclasses.replace(Case(SUBJECT, "inference", 2, "cpu", ("fp32",), {}, engines=names), **changes)


# ---------------------------------------------------------------- which


def test_engines_by_name() -> None:
    assert chosen(["auto"], SUBJECT, "cpu") == ((), []), "it is measured in any case"
    assert chosen(["plain", "auto"], SUBJECT, "cpu") == (("plain",), [])
    found, notes = chosen(["all"], SUBJECT, "cpu")
    assert found == HERE
    assert len(notes) == len(ENGINES) - len(HERE)
    assert chosen(reversed(HERE), SUBJECT, "cpu") == (HERE, []), "the order is that of the table"


def test_names_that_are_none_are_refused() -> None:
    with pytest.raises(UsageError, match=r"unknown engine 'int9'\n.*nearest: int8"):
        chosen(["int9"], SUBJECT, "cpu")
    with pytest.raises(UsageError, match="--engines all excludes other names"):
        chosen(["all", "plain"], SUBJECT, "cpu")


@pytest.mark.usefixtures("_without_openvino")
def test_without_openvino_all_leaves_it_out_and_its_name_says_what_to_install() -> None:
    found, notes = chosen(["all"], SUBJECT, "cpu")
    assert found == tuple(name for name in HERE if ENGINES[name].name != "openvino")
    assert "left out: engine openvino: OpenVINO is not installed (pip install 'vitral[openvino]')" in notes
    with pytest.raises(MissingExtraError, match=r"OpenVINO is not installed(.|\n)*vitral\[openvino\]"):
        chosen(["plain", "openvino"], SUBJECT, "cpu")


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "plain"])
def test_on_a_gpu_there_is_the_network_alone(name: str) -> None:
    with pytest.raises(UsageError, match=rf"^{name} runs on a CPU, not on cuda\n.*try: --device cpu"):
        chosen([name], SUBJECT, "cuda")
    assert chosen(["all"], SUBJECT, "cuda")[0] == ("plain",)


def test_a_resnet_has_no_integers() -> None:
    for name in ("int8", "openvino-int8"):
        with pytest.raises(UsageError, match=r"int8 is available for a ViT only\n.*resnet\n.*--engines all"):
            chosen([name], RESNET, "cpu")
    found, notes = chosen(["all"], RESNET, "cpu")
    assert found == tuple(name for name in HERE if not ENGINES[name].integers)
    assert "left out: engine int8: int8 is available for a ViT only" in notes


def test_a_torch_without_the_operators_has_no_integers_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "unavailable_reason", lambda: "no such instructions")
    with pytest.raises(UsageError, match=r"no such instructions\n.*engine int8\n.*--engines all"):
        chosen(["int8"], SUBJECT, "cpu")
    found, notes = chosen(["all"], SUBJECT, "cpu")
    assert "int8" not in found
    assert "left out: engine int8: no such instructions" in notes


# ---------------------------------------------------------------- rows


@pytest.mark.slow
def test_each_engine_is_a_row_of_each_precision_and_integers_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "choose", lambda device, precision="bf16", dim=None: choose(device, precision, dim))
    rows, notes = measure.measure(case(*HERE, precisions=("fp32", "bf16")), rounds=2)
    assert notes == []
    expected = [
        (f"{VITRAL} ({name})", "int8" if ENGINES[name].integers else precision)
        for precision in ("fp32", "bf16")
        for name in HERE
        if precision == "bf16" or not ENGINES[name].integers
    ]
    assert [(row.who, row.precision) for row in rows if row.who != VITRAL] == expected
    ours = {row.precision: row for row in rows if row.who == VITRAL}
    for row in rows:
        beside = ours["bf16" if row.precision == "int8" else row.precision]
        assert row.reference == beside.sample.median
        assert row.matrix_rate == (None if row.precision == "int8" else beside.matrix_rate)
        assert (row.first is None) == (row.who == VITRAL), "what an engine prepares is reported"
        assert row.memory is None or "openvino" not in row.who, "it keeps its workspace"


@pytest.mark.slow
@pytest.mark.skipif(not INTEGERS, reason=int8.unavailable_reason())
def test_integers_stand_beside_the_first_precision_where_the_usual_one_is_not_measured() -> None:
    usual = choose("cpu", dim=16).precision
    other = "fp32" if usual == "bf16" else "bf16"
    rows, _ = measure.measure(case("int8", precisions=(other,)), rounds=1)
    assert [(row.who, row.precision) for row in rows] == [(VITRAL, other), (f"{VITRAL} (int8)", "int8")]
    assert rows[1].reference == rows[0].sample.median
    assert case(precisions=(other, usual)).usual == usual


def test_all_engines_compute_from_one_network_what_it_says() -> None:
    built: list[Network] = []

    def build() -> Network:
        built.append(SUBJECT.build())
        return built[-1]

    found = case(*HERE, subject=dataclasses.replace(SUBJECT, build=build))
    answers = {contender.who: contender.program() for contender in measure.inference(found)}
    assert len(built) == 1
    assert len(answers) == 1 + len(HERE)
    for who, answer in answers.items():
        np.testing.assert_allclose(answer, answers[VITRAL], atol=0.02, err_msg=who)


def test_an_engine_is_made_once_and_by_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    make = engines.predictor_by
    monkeypatch.setattr(measure, "predictor_by", lambda engine, *more: made.append(engine.name) or make(engine, *more))
    _, contender = measure.inference(case("plain"))
    assert made == []
    contender.program()
    contender.program()
    assert made == ["plain"]


@pytest.mark.slow
@pytest.mark.skipif("openvino" not in HERE, reason=openvino.limitation() or "OpenVINO is not installed")
def test_what_openvino_keeps_for_others_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows, _ = measure.measure(case("openvino"), rounds=1)
    assert [row.who for row in rows] == [VITRAL, f"{VITRAL} (openvino)"]
    assert list(tmp_path.rglob("*.blob")) == []
    assert os.environ["XDG_CACHE_HOME"] == str(tmp_path)


def test_training_has_no_engines() -> None:
    rows, _ = measure.measure(case("plain", what="training"), rounds=1)
    assert [row.who for row in rows] == [VITRAL]
