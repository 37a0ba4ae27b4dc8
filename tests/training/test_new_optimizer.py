"""An optimizer is one `UpdateRule`: signs, added as one entry, reaches plan, memory, training and resuming."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from images import MakeImages
from running import TINY, train
from vitral.errors import UsageError
from vitral.training.optimizer_set import OptimizerSet
from vitral.training.optimizers import OPTIMIZERS
from vitral.training.optimizers.rule import DecayRule, Groups, OptimizerOptions, UpdateRule
from vitral.training.options import Run
from vitral.training.step import can_capture
from vitral.wording import either
from vitral.workflows.planning.memory import needs, training_bytes
from vitral.workflows.planning.plan import plan_run


class Signs(torch.optim.Optimizer):
    """As Lion (arXiv 2302.06675): the sign of a momentum, so that every value moves by the same amount."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * momentum.lerp(parameter.grad, 0.1).sign())
                momentum.lerp_(parameter.grad, 0.01)


def signs(groups: Groups, run: OptimizerOptions) -> list[torch.optim.Optimizer]:
    return [Signs(groups, {"lr": run.peak_lr})]


SIGNS = UpdateRule(
    "Signs",
    signs,
    relative_rate=0.25,
    decay=DecayRule(lambda rates: rates.decay * rates.recipe_lr / rates.lr, "has a lower rate"),
    moments=1,
)


@pytest.fixture(autouse=True)
def _with_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "signs", SIGNS)


def test_a_plan_scales_rate_and_decay_to_it_and_says_why():
    shared: dict[str, Any] = {"data": "digits", "recipe": "finetune", "init": "none", "model": "mu/4", "device": "cpu"}
    own = plan_run({**shared, "optimizer": "adamw"})
    job = plan_run({**shared, "optimizer": "signs"})
    assert job.run.lr == pytest.approx(own.run.lr / 4)
    assert job.run.weight_decay == pytest.approx(own.run.weight_decay * 4)
    reasons = {choice.name: choice.reason for choice in job.plan.choices}
    assert reasons["lr"] == f"{own.run.lr:g} is for adamw, scaled to signs"
    assert reasons["weight decay"] == f"{own.run.weight_decay:g} is for adamw; signs has a lower rate"


def test_memory_and_graphs_know_it():
    job = plan_run({"data": "digits", "model": "mu/4", "device": "cpu"})
    held = {
        name: training_bytes(Run(optimizer=name, ema=0.9), job.config, job.machine)[0] for name in ("adamw", "signs")
    }
    assert held["adamw"] - held["signs"] == needs(job.config).weights
    assert can_capture(Run(optimizer="signs"), torch.device("cuda")) == (False, "not tested with signs")


def test_it_trains_and_its_state_comes_back(tmp_path: Path, make_images: MakeImages):
    done = train(make_images({"cat": 8, "dog": 8}), tmp_path / "run", **{**TINY, "optimizer": "signs"})
    assert json.loads((done.folder / "config.json").read_text("utf-8"))["run"]["optimizer"] == "signs"
    model = torch.nn.Linear(3, 2)
    steps = OptimizerSet(model, Run(optimizer="signs"))
    model(torch.ones(1, 3)).sum().backward()
    steps.set_lr(0.1)
    before = model.weight.detach().clone()
    steps.step()
    assert (before * (1 - 0.1 * 0.05) - model.weight).flatten().tolist() == pytest.approx([0.1] * 6)
    again = OptimizerSet(torch.nn.Linear(3, 2), Run(optimizer="signs"))
    again.load_state(steps.state())
    assert {name: value.tolist() for name, value in again.state().items()} == {
        name: value.tolist() for name, value in steps.state().items()
    }


def test_help_and_errors_list_it():
    assert either(OPTIMIZERS) == "adamw, adam, sgd, muon or signs"
    with pytest.raises(UsageError, match="nearest: signs"):
        Run(optimizer="sign")


def test_the_documentation_has_the_rates_of_all_optimizers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(OPTIMIZERS, "signs")
    text = " ".join((Path(__file__).parents[2] / "docs/recipes.md").read_text("utf-8").split())
    section = text.partition("## Another optimizer")[2].partition(" ## ")[0]
    found = dict(re.findall(r"(\w+)(?: gets)? ([\d.]+) times", section))
    rates = {rule.title: f"{rule.relative_rate:g}" for rule in OPTIMIZERS.values()}
    assert found.items() <= rates.items()
    assert {title for title, rate in rates.items() if rate != "1"} <= found.keys()
