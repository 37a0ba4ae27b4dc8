"""Test the network figures of a report: within budget, for the right classes, and never an error."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import vitral
from images import noise
from vitral.data import Split
from vitral.data.images.preprocessing import Preprocessing
from vitral.device import choose
from vitral.errors import UsageError
from vitral.evaluation.report import Mistake, ReportContent, render
from vitral.inference.predictor import Predictor
from vitral.model import BiTConfig, ViTConfig, network
from vitral.workflows.running import figures as looking
from vitral.workflows.running.figures import MISTAKES, draw_figures

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


def test_prediction_and_truth_of_the_most_confident_errors(monkeypatch):
    monkeypatch.setattr("vitral.explanation.methods.select.DEFAULT", "input-gradient")
    found = draw_figures(predictor(), WRONG, SPLIT, flops=1000)
    assert len(found.explained) == MISTAKES
    first = found.explained[0]
    assert [label for label, *_ in first.maps] == ["cat", "ant"]
    assert first.image.shape == first.maps[0][2].shape == (107, 160, 3)
    assert "Red supports the class" in found.explained_note
    assert [one.title.split()[0] for one in found.inside] == ["Patch", "Similarity", "Attention"]
    assert "32 of the images" in found.inside_note
    page = render(ReportContent("t", **vars(found)), "runs/t")
    for part in (
        "Heat maps of errors",
        "Inside the network",
        "vitral explain runs/t IMAGE",
        "heat map of the evidence for cat",
    ):
        assert part in page


def test_a_routing_method_has_one_map_whatever_the_class(monkeypatch):
    monkeypatch.setattr("vitral.explanation.methods.select.DEFAULT", "rollout")
    found = draw_figures(predictor(), WRONG[:1], SPLIT, flops=1000)
    assert [label for label, *_ in found.explained[0].maps] == ["cat"]
    assert "not why the class" in found.explained_note


@pytest.mark.parametrize(("flops", "explained", "reported"), [(3e10, 4, "most confident"), (1e12, 0, "no heat maps")])
def test_a_large_network_gets_fewer_figures(flops, explained, reported):
    found = draw_figures(predictor(), WRONG, SPLIT, int(flops))
    assert len(found.explained) == explained
    assert reported in found.explained_note
    assert len(found.inside) == (3 if explained else 2)  # filters and positions cost nothing


def test_no_figures_without_errors_or_attention(monkeypatch):
    assert draw_figures(predictor(), [], SPLIT, 1000).explained_note == ""
    assert draw_figures(predictor(bit=True), WRONG, SPLIT, 1000).inside == ()

    def broken(*_: object, **__: object) -> None:
        raise UsageError("this does not go")

    monkeypatch.setattr(looking, "explain", broken)
    monkeypatch.setattr(looking, "attention_distance", broken)
    found = draw_figures(predictor(), WRONG, SPLIT, 1000)
    assert found.explained_note == found.inside_note == "Could not be drawn: this does not go."
    assert "this does not go" in render(ReportContent("t", **vars(found)), "runs/t")


def test_weights_and_random_state_are_not_modified():
    one = predictor()
    before = {name: value.clone() for name, value in one.model.state_dict().items()}
    state = torch.get_rng_state()
    first, second = (draw_figures(one, WRONG[:2], SPLIT, 1000) for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in one.model.state_dict().items())
    assert [plot.svg for plot in first.inside] == [plot.svg for plot in second.inside]
    assert all((a.maps[0][2] == b.maps[0][2]).all() for a, b in zip(first.explained, second.explained, strict=True))


def test_a_run_has_it_in_its_report(trained: vitral.TrainedRun):
    page = (trained.folder / "report.html").read_text("utf-8")
    assert "Inside the network" in page
    assert ("Heat maps of errors" in page) == (trained.result["test_accuracy"] < 1)
