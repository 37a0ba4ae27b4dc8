"""`--plan-only`, `--report`: every choice with its reason and its alternatives, and nothing trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from running import printed
from vitral.recipes.table import RECIPES
from vitral.training.options import Run
from vitral.workflows.planning.explained import compare_sizes, explain_plan, untouched
from vitral.workflows.planning.job import Job
from vitral.workflows.planning.plan import plan_run


@pytest.fixture
def job(photos) -> Job:
    return plan_run({"data": str(photos), "device": "cpu", "val_fraction": 0.2, "lr": 2e-3, "init": "none"})


def test_every_choice_is_explained_by_options_that_exist(job):
    explained = explain_plan(job)
    assert [one.choice for one in explained] == list(job.plan.choices)
    flags = {f"--{name.replace('_', '-')}" for name in Run.__dataclass_fields__}
    assert all(set(one.options) <= flags for one in explained)
    by_name = {one.choice.name: one for one in explained}
    assert "--lr" in by_name["lr"].options
    assert by_name["lr"].choice.reason == "requested"


def test_alternatives_are_the_values_of_other_recipes_and_of_short_lists(job):
    by_name = {one.choice.name: one for one in explain_plan(job)}
    assert "300 (recipe paper)" in " ".join(by_name["epochs"].alternatives)
    assert "B/16 (recipe paper)" in by_name["model"].alternatives
    assert any("trivialaugment" in one for one in by_name["augmentation"].alternatives) or job.run.augment != "none"
    assert not any("(recipe small" in text for one in by_name.values() for text in one.alternatives), "its own"
    assert set(RECIPES) >= {"small", "finetune", "paper"}


def test_sizes_are_compared_by_their_costs(job):
    sizes = compare_sizes(job)
    assert [one.model for one in sizes if one.chosen] == [job.run.model]
    assert [one.flops for one in sizes] == sorted(one.flops for one in sizes)
    assert all(one.step_memory > 4 * one.parameters for one in sizes)


def test_compared_sizes_keep_the_preset(photos):
    planned = plan_run({"data": str(photos), "device": "cpu", "model": "Pico+/16"})
    names = [one.model for one in compare_sizes(planned)]
    assert "Pico+/16" in names
    assert len(names) > 2
    assert all(name.endswith("+/16") for name in names)


def test_the_other_options_are_listed_once(job):
    flags = [flag for flag, _ in untouched(job)]
    assert len(flags) == len(set(flags))
    assert "--weight-decay" in flags
    assert "--lr" not in flags


def test_the_command_prints_writes_the_page_and_trains_nothing(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["train", str(photos), "--device", "cpu", "--val-fraction", "0.2", "--init", "none", "--plan-only"]
    _, err = printed(capsys, *words, "--report")
    assert "Plan" in err
    assert not Path("runs").exists()
    page = (tmp_path / "plans" / f"{photos.name}.html").read_text("utf-8")
    for text in ("also considered", "300 (recipe paper)", "(chosen)", "vitral train", "--weight-decay"):
        assert text in page
    assert "--plan-only" not in page.split("Train</h2>")[1]
    out, _ = printed(capsys, *words, "--format", "json")
    found = json.loads(out)
    assert found["run"]["data"] == str(photos)
    assert {"name", "value", "reason", "options", "alternatives"} == set(found["choices"][0])
    _, err = printed(capsys, *words[:-1], "--report", code=2)
    assert "--report goes with --plan-only" in err


def test_pretraining_prints_its_plan_alone(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["pretrain", str(photos), "--method", "mpp", "--device", "cpu", "--plan-only"]
    _, err = printed(capsys, *words)
    assert "predict the mean color" in err
    assert err.rstrip().endswith(f"pretrain {photos} --method mpp --device cpu")
    found = json.loads(printed(capsys, *words, "--format", "json")[0])
    assert found["run"]["recipe"] == "mpp"
    assert {one["name"]: one["options"] for one in found["choices"]}["method"] == ["--method"]
    assert list(tmp_path.iterdir()) == [photos]
    words[3] = "small"
    assert "known: dino, distill, mae, mpp" in printed(capsys, *words, code=2)[1]
