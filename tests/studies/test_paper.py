"""`vitral reproduce`: claims of the paper as studies, with a verdict that the differences bear out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from images import MakeImages
from running import TINY, as_json, printed
from vitral.errors import UsageError
from vitral.evaluation import report
from vitral.studies.conclusions import conclusions
from vitral.studies.paper import names, paper_study
from vitral.studies.results import Outcome, Results
from vitral.studies.study import Study

SCALES = ("laptop", "full")


def supposed(study: Study, accuracy: Any) -> Results:
    """Results with made-up accuracies and little noise."""
    rng, outcomes = np.random.default_rng(2), list[Outcome]()
    for cell in study.cells:
        value = accuracy(cell.factors) + rng.normal(0, 0.002)
        cost = float(cell.factors.get("epochs", 1))
        outcomes.append(
            Outcome(
                cell,
                "done",
                split="test",
                images=1000,
                train_images=100,
                accuracy=value,
                loss=1.0,
                ece=0.1,
                macro_f1=value,
                epochs=1,
                best_epoch=1,
                parameters=7,
                flops=cost,
                seconds=cost,
                held_out="same",
            )
        )
    return Results(study, tuple(outcomes))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", names())
def test_what_a_claim_expects_is_what_its_study_compares(name, scale):
    study = paper_study(name, scale)
    found = supposed(study, lambda factors: 0.5).differences
    pairs = {(one.where, frozenset((one.first, one.second))) for one in found}
    assert study.claim.endswith("of the paper)")
    assert study.expects
    for one in study.expects:
        where = "" if one.where is None else study.design.in_words(one.where)
        assert any(pair == {one.first, one.second} and where in (at, "") for at, pair in pairs), one
    assert Study.from_json(study.to_json()) == study


def test_verdicts_follow_the_differences():
    study = paper_study("positions", data="x")
    levels = {"none": 0.60, "learned": 0.64, "sincos": 0.64, "rotary": 0.64}
    assert conclusions(supposed(study, lambda f: levels[f["position"]]))[0] == "The claim is borne out here."
    assert conclusions(supposed(study, lambda f: 0.6))[0] == "The claim is neither borne out nor contradicted here."
    turned = conclusions(supposed(study, lambda f: 0.6 + 0.1 * (f["position"] == "none")))
    assert turned[0] == "The claim is contradicted here."
    assert "Contrary to it, position none is more accurate than position learned." in turned
    other = {**levels, "rotary": 0.70}
    assert conclusions(supposed(study, lambda f: other[f["position"]]))[0] == "The claim is contradicted here."
    one = paper_study("positions", data="x", seeds=1)
    assert conclusions(supposed(one, lambda f: levels[f["position"]]))[0].startswith("The claim is neither")


def test_no_difference_is_no_proof():
    study = paper_study("pooling", data="x")
    message = conclusions(supposed(study, lambda f: 0.6))[0]
    assert message.startswith("The claim is not contradicted here.")
    assert "does not prove" in message


def test_a_crossing_is_tested_at_its_ends():
    study = paper_study("data", data="x", fractions=[0.1, 0.5, 1.0])
    vit = lambda f: f["model"] != "BiT-R50x1"  # noqa: E731
    crossing = supposed(study, lambda f: 0.6 + (0.1 if vit(f) == (f["fraction"] == 1) else 0.0))
    assert conclusions(crossing)[0] == "The claim is borne out here."
    behind = supposed(study, lambda f: 0.6 - 0.1 * vit(f))
    assert conclusions(behind)[0] == "The claim is contradicted here."


def test_unknown_names_are_refused():
    with pytest.raises(UsageError, match="unknown study of the paper 'positoins'"):
        paper_study("positoins")
    with pytest.raises(UsageError, match="unknown scale"):
        paper_study("positions", "huge")  # type: ignore[arg-type]


def test_the_command_lists_and_runs(make_images: MakeImages, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(report, "write_report", lambda path, content: None)
    out, _ = printed(capsys, "reproduce")
    assert all(name in out for name in names())
    photos = make_images({"a": 12, "b": 12})
    small = {**TINY, "epochs": 1, "train_share": 1.0, "val_fraction": 0.2}
    words = [f"{name}={'off' if value is False else value}" for name, value in small.items()]
    typed = ["reproduce", "positions", "--data", str(photos), "--seeds", "1", "--out", str(tmp_path / "s")]
    found = as_json(capsys, *typed, "--set", *words)
    assert [run["factors"]["position"] for run in found["runs"]] == ["none", "learned", "sincos", "rotary"]
    assert found["finished"]
    page = (tmp_path / "s/study.html").read_text("utf-8")
    assert "Position embeddings help" in page
    assert "neither borne out nor contradicted" in page
