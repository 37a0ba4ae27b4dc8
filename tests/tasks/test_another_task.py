"""A task is an object: one file and one line add another, and no code compares its name."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitral
from running import printed, train
from serving.serverprocess import serving
from tasks.conftest import write
from vitral.data.targets import TARGETS
from vitral.inference.outputs import OUTPUTS
from vitral.workflows.tasks import TASKS

SOURCE = Path(vitral.__file__).parent
HOMES = ("data/targets/", "inference/outputs/", "workflows/tasks/")
"""Folders with a file for each task, which may name it."""


def test_no_code_compares_the_name_of_a_task():
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if name.startswith(HOMES):
            continue
        compared = [
            n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Compare | ast.MatchValue)
        ]
        found += [f"{name}:{node.lineno} {ast.unparse(node)}" for node in compared if compares_a_task(node)]
    assert not found


def compares_a_task(node: ast.Compare | ast.MatchValue) -> bool:
    constants = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant)}
    names = (
        {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
        | {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        | constants
    )
    return bool({"class", "labels", "numbers", "text"} & constants) and any("task" in str(one) for one in names)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("run.task == 'text'", True),
        ("task in ('class', None)", True),
        ("kind == 'text'", False),
        ("saved.get('task', 'class') != 'class'", True),
        ("task == 'other'", False),
    ],
)
def test_such_a_comparison_is_found(code, found):
    (node,) = [one for one in ast.walk(ast.parse(code)) if isinstance(one, ast.Compare)]
    assert compares_a_task(node) is found


def test_every_task_is_one_object_in_all_tables():
    assert tuple(TASKS) == tuple(TARGETS) == tuple(OUTPUTS)
    for name, task in TASKS.items():
        assert (task.targets.task, task.output_type.task) == (name, name)
        assert (task.targets, task.output_type) == (TARGETS[name], OUTPUTS[name])


@pytest.fixture
def ordinal(tmp_path, monkeypatch):
    """The line of a package that adds the task."""
    about = tmp_path / "site" / "vitral_ordinal-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vitral-ordinal\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[vitral.tasks]\nordinal = tasks.ordinal:TASK\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    for table in (TASKS, TARGETS, OUTPUTS):
        table.__dict__.pop("_added", None)
    yield
    for table in (TASKS, TARGETS, OUTPUTS):
        table.__dict__.pop("_added", None)


@pytest.fixture
def grades(tmp_path) -> Path:
    """Images whose gray is their grade, 1 to 4."""
    rng, rows = np.random.default_rng(0), []
    for number in range(48):
        grade = 1 + number % 4
        pixels = np.clip(rng.normal(40 + 45 * grade, 8, (8, 8, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        rows.append((f"{number}.png", grade, "test" if number % 6 == 0 else "train"))
    return write(tmp_path / "grades.csv", ["file", "label", "split"], rows)


@pytest.mark.report
@pytest.mark.usefixtures("ordinal")
def test_another_task_is_trained_reported_predicted_and_evaluated(grades, tmp_path, capsys, monkeypatch):
    run = train(grades, tmp_path / "run", task="ordinal", epochs=20, lr=1e-2, dim=16)
    history = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert history[-1]["val_grade_error"] < 0.5 < history[0]["val_grade_error"] + 0.5
    assert json.loads((run.folder / "result.json").read_text())["test_accuracy"] > 0.5
    assert "mean error of grades" in (run.folder / "report.html").read_text()
    monkeypatch.chdir(grades.parent)
    out, _ = printed(capsys, "predict", str(run.folder), "7.png")
    assert out.startswith("7.png\t4")
    out, _ = printed(capsys, "evaluate", str(run.folder))
    assert "accuracy" in out
    printed(capsys, "predict", str(run.folder), "7.png", "8.png", "--out", "found.csv")
    assert (tmp_path / "found.csv").read_text().startswith("path,class,probability")
    with pytest.raises(vitral.errors.UsageError, match="unknown task 'ordinl'") as caught:
        vitral.train(str(grades), task="ordinl", out=str(tmp_path / "no"))
    assert "ordinal" in str(caught.value)


@pytest.mark.real
@pytest.mark.usefixtures("ordinal")
def test_another_task_is_explained_exported_and_served(grades, tmp_path, capsys):
    run = train(grades, tmp_path / "run", task="ordinal", epochs=2)
    (heat,) = vitral.explain(run.predictor, str(tmp_path / "7.png"))
    assert heat.label in "1234"
    printed(capsys, "export", str(run.folder), "--to", "torch", "--out", str(tmp_path / "export"))
    assert json.loads((tmp_path / "export" / "export.json").read_text())["proof"]
    with serving(str(run.folder)) as server:
        (model,) = server.client.get("/v1/models").json()["models"]
        assert (model["task"], model["noun"], model["classes"]) == ("ordinal", "grades", list("1234"))
        found = server.client.post("/v1/predict", files={"image": (tmp_path / "7.png").read_bytes()}).json()
        assert found["predictions"][0]["top"][0]["class"] in "1234"
