"""What a report shows of the inside of a network: within its budget, of the right classes, and never an error."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import vitral
from pictures import noise
from vitral.data import Split
from vitral.data.transforms import Preprocessing
from vitral.device import choose
from vitral.errors import UsageError
from vitral.evaluation.report import Mistake, ReportContent, render
from vitral.model import BiTConfig, ViTConfig, network
from vitral.predict import Predictor
from vitral.recipes import looking
from vitral.recipes.looking import MISTAKES, look_inside

CLASSES = ("ant", "bee", "cat")
SPLIT = Split(tuple(map(str, range(40))), np.zeros(40, np.int64), lambda i: noise(i, (8, 12)))
WRONG = [Mistake(noise(i, (8, 12)), f"{i}.png", "ant", "cat", 0.9) for i in range(MISTAKES + 3)]


def predictor(bit: bool = False) -> Predictor:
    torch.manual_seed(0)
    config = (
        BiTConfig(image_size=32, layers=(1, 1), classes=3)
        if bit
        else ViTConfig(image_size=(8, 12), patch_size=4, classes=3, dim=16, depth=2, heads=2, mlp_dim=16)
    )
    model = network(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    size = (32, 32) if bit else (8, 12)
    return Predictor(model, Preprocessing(size, 3), CLASSES, machine=choose("cpu", "fp32"), source="tiny")


def test_the_answer_and_the_truth_of_the_surest_mistakes(monkeypatch):
    monkeypatch.setattr("vitral.explanation.explain.DEFAULT", "input-gradient")
    found = look_inside(predictor(), WRONG, SPLIT, flops=1000)
    assert len(found.looked_at) == MISTAKES
    first = found.looked_at[0]
    assert [label for label, *_ in first.maps] == ["cat", "ant"]
    assert first.picture.shape == first.maps[0][2].shape == (107, 160, 3)
    assert "Red speaks for the class" in found.looked_note
    assert [one.title.split()[0] for one in found.inside] == ["Patch", "Similarity", "Attention"]
    assert "32 of these pictures" in found.inside_note
    page = render(ReportContent("t", **vars(found)), "runs/t")
    for part in (
        "What it looked at",
        "Inside the network",
        "vitral explain runs/t IMAGE",
        "map of what speaks for cat",
    ):
        assert part in page


def test_a_routing_method_has_one_map_whatever_the_class(monkeypatch):
    monkeypatch.setattr("vitral.explanation.explain.DEFAULT", "rollout")
    found = look_inside(predictor(), WRONG[:1], SPLIT, flops=1000)
    assert [label for label, *_ in found.looked_at[0].maps] == ["cat"]
    assert "not why this class" in found.looked_note


@pytest.mark.parametrize(("flops", "explained", "told"), [(3e10, 4, "most confident"), (1e12, 0, "too large")])
def test_a_large_network_is_shown_less(flops, explained, told):
    found = look_inside(predictor(), WRONG, SPLIT, int(flops))
    assert len(found.looked_at) == explained
    assert told in found.looked_note
    assert len(found.inside) == (3 if explained else 2)  # filters and positions cost nothing


def test_nothing_for_no_mistakes_or_no_attention_and_no_error(monkeypatch):
    assert look_inside(predictor(), [], SPLIT, 1000).looked_note == ""
    assert look_inside(predictor(bit=True), WRONG, SPLIT, 1000).inside == ()

    def broken(*_: object, **__: object) -> None:
        raise UsageError("this does not go")

    monkeypatch.setattr(looking, "explain", broken)
    monkeypatch.setattr(looking, "attention_distance", broken)
    found = look_inside(predictor(), WRONG, SPLIT, 1000)
    assert found.looked_note == found.inside_note == "Could not be drawn: this does not go."
    assert "this does not go" in render(ReportContent("t", **vars(found)), "runs/t")


def test_weights_stay_and_no_random_number_is_drawn():
    one = predictor()
    before = {name: value.clone() for name, value in one.model.state_dict().items()}
    state = torch.get_rng_state()
    first, second = (look_inside(one, WRONG[:2], SPLIT, 1000) for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in one.model.state_dict().items())
    assert [plot.svg for plot in first.inside] == [plot.svg for plot in second.inside]
    assert all((a.maps[0][2] == b.maps[0][2]).all() for a, b in zip(first.looked_at, second.looked_at, strict=True))


def test_a_run_has_it_in_its_report(trained: vitral.TrainedRun):
    page = (trained.folder / "report.html").read_text("utf-8")
    assert "Inside the network" in page
    assert ("What it looked at" in page) == (trained.result["test_accuracy"] < 1)
