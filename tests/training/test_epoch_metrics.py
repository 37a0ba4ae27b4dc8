"""Each metric of an epoch is declared once, and loop, page and documentation follow; the norm of the gradient."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from test_loop import batches, run_of, state_of, trained
from torch import nn

from vitral.data.loader import Batch
from vitral.epoch_metrics import DECLARED, LOSS, SPEED, in_table, of_pretraining, of_training, pairs
from vitral.evaluation.report import ReportContent, render
from vitral.training.callbacks import Epoch
from vitral.training.loop import State
from vitral.workflows.tasks import TASKS, task_of

DOCS = Path(__file__).parents[2] / "docs"
ACCURACY = [("accuracy", "accuracy", "{:.2%}")]


def test_a_key_is_declared_once():
    for task in TASKS:
        keys = [metric.key for metric in (*DECLARED, *pairs(task_of(task).figures))]
        assert len(set(keys)) == len(keys)


def test_each_declared_metric_is_on_a_page():
    assert {*DECLARED} - {SPEED} <= {*of_training(()), *of_pretraining()}


def test_the_documentation_of_a_run_folder_names_the_metrics_of_a_run():
    golden = Path(__file__).parents[1] / "golden/files/run/metrics.jsonl"
    line = json.loads(golden.read_text("utf-8").splitlines()[0])
    text = (DOCS / "run-folder.md").read_text("utf-8").partition("metrics.jsonl")[2]
    assert [key for key in line if f'"{key}"' not in text and f"`{key}`" not in text] == []


def test_the_documentation_lists_what_is_declared():
    text = (DOCS / "tracking.md").read_text("utf-8").partition("## The metrics of an epoch")[2]
    assert re.findall(r"^\| `(\w+)` \| (.+) \|$", text, re.MULTILINE) == [(one.key, one.meaning) for one in DECLARED]


def test_every_number_of_a_run_is_declared_or_a_field_of_its_record():
    known = {*Epoch.__annotations__, *(metric.key for metric in (*LOSS, *pairs(ACCURACY)))}
    golden = Path(__file__).parents[1] / "golden/files/run/metrics.jsonl"
    for line in golden.read_text("utf-8").splitlines():
        assert json.loads(line).keys() <= known


def test_the_page_has_the_curves_and_columns_of_all_metrics():
    history = [
        {"epoch": n, **{metric.key: 1 / n for metric in of_training([("r2", "R²", "{:.3f}")])}} for n in (1, 2, 3)
    ]
    page = render(ReportContent(title="photos", history=history, measured=(("r2", "R²", "{:.3f}"),)), run="runs/photos")
    titles = re.findall(r"([^<>\"]+) over epochs 1 to 3:", page)
    assert list(dict.fromkeys(titles)) == ["Loss", "R²", "Learning rate", "Gradient norm"]
    headings = re.findall(r'<th scope="col" class="number">([^<]+)</th>', page)
    assert headings == ["epoch", *(metric.title for metric in in_table(of_training([("r2", "R²", "{:.3f}")])))]
    assert headings[1:5] == ["validation R²", "validation loss", "train R²", "train loss"]


def norms_by_hand(state: State, run: Any, groups: list[list[Batch]]) -> list[float]:
    """The norm of each step's gradient, by a loop of its own."""
    from test_loop import PREPROCESSING

    from vitral.data.images.augmentation import Augmentation
    from vitral.training.objectives.classification import Classification

    objective, norms = Classification(PREPROCESSING, Augmentation(), 3), []
    for group in groups:
        (sum(objective(state.model, batch)[0] for batch in group) / len(group)).backward()
        gradients = [p.grad for p in state.model.parameters() if p.grad is not None]
        norms.append(math.sqrt(sum(float(g.double().square().sum()) for g in gradients)))
        if run.clip:
            nn.utils.clip_grad_norm_(state.model.parameters(), run.clip)
        state.optimizer.set_lr(run.lr)
        state.optimizer.step()
    return norms


@pytest.mark.parametrize("clip", [None, 0.01, 100.0])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_norm_is_the_mean_of_all_steps_before_clipping(clip, accumulate):
    """The last step of five batches in steps of two has one."""
    run = run_of(batch_size=8, accumulate=accumulate, optimizer="sgd", momentum=0.0, clip=clip, lr=0.1)
    images = batches(run, count=40)
    found = trained(run, train=images).history[0]
    parts = list(images.epoch(0))
    groups = [parts[n : n + accumulate] for n in range(0, len(parts), accumulate)]
    norms = norms_by_hand(state_of(run), run, groups)
    assert found["gradient_norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-5)
    assert max(norms) > 0.01, "so that the second case clips"


def test_an_infinite_mean_is_left_out():
    """Without clipping nothing stops at a norm whose square is too large for a float; JSON has no infinity."""
    run = run_of(clip=None, optimizer="sgd", lr=0.0)

    def objective(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        return 1e30 * next(model.parameters()).sum() * 0 + 1e30 * model.head.bias.sum(), {}

    state = state_of(run)
    trained(run, state, objective=objective)
    assert "gradient_norm" not in state.history[0]
    assert all(math.isfinite(v) for v in state.history[0].values() if isinstance(v, float))
