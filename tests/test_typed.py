"""Options of public functions are known to `help`, to editors and to type checkers, and stated at one place."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tools.write_stub import STUB, stub

import vitral
from vitral.errors import UsageError
from vitral.recipes.pretrain import UNSUPPORTED
from vitral.training.options import LABEL_OPTIONS

ROOT = Path(__file__).parents[1]

USER = """
from pathlib import Path

from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import SGD

import vitral
from vitral.training.callbacks import Callback


def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets) ** 2


vitral.train("photos/", model="Ti/16", epochs=30, lr=1e-3, image_size=(64, 64), out=Path("runs/x"), freeze=["a"])
vitral.train("photos/", optimizer="adamw", flip=True, init=Path("runs/y"), levels=(0, 4095), lr=None)
vitral.pretrain("photos/", "mae", mask=0.75, epochs=3)
vitral.create("S/16", classes=10, image_size=32, depth=3, pool="mean")
predictor = vitral.load("runs/x", image_size=224, engine="plain", classes=["a", "b"])
vitral.convert("runs/x", "x.bin", "timm", new_head=True)
print(predictor("cat.jpg"), vitral.evaluate("runs/x").accuracy)
vitral.explain(predictor, "cat.jpg", method="rise", masks=10)
run = vitral.train("p", loss=focal, metrics={"top2": focal}, optimizer=SGD, callbacks=[Callback()])
losses = [epoch.get("train_loss", 0.0) for epoch in run.history]
print(losses, vitral.evaluate(run).predictions[0]["true"], vitral.compare([run, "runs/x"]).conclusion())
print(vitral.runs()["x"].history[1:], vitral.runs().table()[0]["run"], run.config["run"], run.best)
plan = vitral.plan("p", model="Ti/16", epochs=1)
for images, labels in plan.loader("train"):
    print(plan.loss(plan.model()(images), labels).item())
vitral.train("p", optimzer="adam")  # wrong
vitral.train("p", epoch=3)  # wrong
vitral.train("p", lr="high")  # wrong
vitral.train("p", optimizer="adm")  # wrong
vitral.train("p", schedule="cosin")  # wrong
vitral.train("p", flip="yes")  # wrong
vitral.train("p", epochs=1.5)  # wrong
vitral.train("p", image_size="64")  # wrong
vitral.train("p", loss=3)  # wrong
vitral.train("p", 30)  # wrong
vitral.pretrain("p", recipe="mae")  # wrong
vitral.pretrain("p", maks=0.5)  # wrong
vitral.pretrain("p", mixup=0.5)  # wrong
vitral.create("S/16", depht=3)  # wrong
vitral.create("S/16", pool="men")  # wrong
vitral.create("S/16", classes="ten")  # wrong
vitral.load("runs/x", engine="fast")  # wrong
vitral.load("runs/x", image_sise=3)  # wrong
vitral.convert("runs/x", "y", "timm", scema="x")  # wrong
vitral.evaluate("runs/x", splt="val")  # wrong
vitral.Run(epcohs=1)  # wrong
vitral.trian("p")  # wrong
"""
"""A script with right lines and wrong ones."""
WRONG = {number for number, line in enumerate(USER.splitlines(), 1) if line.endswith("# wrong")}


def test_the_stub_is_what_its_tool_writes():
    assert STUB.read_text("utf-8") == stub(), "python -m tools.write_stub"


def test_signatures_have_every_option():
    fields = {field.name for field in dataclasses.fields(vitral.Run)}
    assert fields <= inspect.signature(vitral.train).parameters.keys()
    refused = {*LABEL_OPTIONS, *UNSUPPORTED}
    assert fields - inspect.signature(vitral.pretrain).parameters.keys() == {"recipe", *refused} & fields
    assert vitral.ViTConfig.__dataclass_fields__.keys() < inspect.signature(vitral.create).parameters.keys()
    for name in vitral.__all__:
        value = getattr(vitral, name)
        if inspect.isfunction(value):
            kinds = {one.kind for one in inspect.signature(value).parameters.values()}
            assert inspect.Parameter.VAR_KEYWORD not in kinds, name


def test_the_docstring_lists_every_option_with_its_type():
    text = vitral.train.__doc__
    for field in dataclasses.fields(vitral.Run):
        assert field.name == "data" or f"\n- `{field.name}` (" in text, field.name
    assert '- `schedule` (Literal["cosine", "linear", "constant"]): decay of the learning rate' in text
    assert text.index("\nTraining:\n") < text.index("- `lr` (float)") < text.index("\nExecution:\n")
    assert "--lr" not in text
    assert "- `minutes` (float): time limit of training and validation" in text  # a command counts all other time, too


def test_the_docstring_of_pretrain_lists_only_what_it_reads():
    text = vitral.pretrain.__doc__
    assert "\n- `mask` (" in text
    assert not [name for name in (*LABEL_OPTIONS, *UNSUPPORTED) if f"\n- `{name}` (" in text]
    assert "\nTask:\n" not in text
    assert "`transform`: augment" in text
    assert "`sampler`" not in text


def test_pretraining_says_why_it_refuses_an_option():
    with pytest.raises(UsageError, match=r"does not support (--)?mixup"):
        vitral.pretrain("p", mixup=0.5)
    with pytest.raises(UsageError, match=r"task.* is for labels, which pretraining does not read"):
        vitral.pretrain("p", task="labels")


def test_only_public_names_are_listed():
    assert set(dir(vitral)) == {*vitral.__all__, "__version__"}


@pytest.mark.parametrize(
    ("code", "option"),
    [
        ('vitral.train("p", ep', "epochs"),
        ('vitral.pretrain("p", mas', "mask"),
        ('vitral.create("S/16", dep', "depth"),
        ('vitral.load("runs/x", new', "new_head"),
        ("vitral.Run(ep", "epochs"),
    ],
)
def test_an_editor_completes_options(code, option):
    jedi = pytest.importorskip("jedi")
    project = jedi.Project(ROOT, added_sys_path=[str(ROOT / "src")], load_unsafe_extensions=False)
    own = jedi.InterpreterEnvironment()  # otherwise a process of its own would stay
    found = jedi.Script(f"import vitral\n{code}", project=project, environment=own).complete()
    assert f"{option}=" in [one.name for one in found]


@pytest.mark.parametrize("function", ["train", "pretrain", "plan", "create", "load", "evaluate", "explain", "convert"])
def test_an_editor_completes_every_option(function):
    jedi = pytest.importorskip("jedi")
    project = jedi.Project(ROOT, added_sys_path=[str(ROOT / "src")], load_unsafe_extensions=False)
    own = jedi.InterpreterEnvironment()
    options = inspect.signature(getattr(vitral, function)).parameters
    found = jedi.Script(f'import vitral\nvitral.{function}("x", ', project=project, environment=own).complete()
    wanted = {f"{name}=" for name, one in options.items() if one.kind is one.KEYWORD_ONLY}
    assert wanted
    assert wanted - {one.name for one in found} == set()


@pytest.mark.slow
def test_mypy_finds_each_mistake(tmp_path):
    script = tmp_path / "user.py"
    script.write_text(USER)
    words = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", script]
    printed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200).stdout
    assert {int(line) for line in re.findall(r"user\.py:(\d+): error", printed)} == WRONG, printed


@pytest.mark.slow
def test_pyright_finds_each_mistake(tmp_path):
    """The mode is strict, so that nothing that the right lines use has an unknown type."""
    pytest.importorskip("basedpyright")
    script = tmp_path / "user.py"
    script.write_text(f"# pyright: strict\n{USER.removeprefix(chr(10))}")
    words = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, script]
    printed = subprocess.run(words, cwd=ROOT / "src", capture_output=True, text=True, timeout=200).stdout
    found = [one for one in json.loads(printed)["generalDiagnostics"] if one["severity"] == "error"]
    assert {one["range"]["start"]["line"] + 1 for one in found} == WRONG, printed
