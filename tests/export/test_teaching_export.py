"""`vitral label --export`: the files of the page, its features, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import vitral
from images import noise
from npmpackages import pretend_runtime
from running import printed
from vitral import web
from vitral.cli.main import main
from vitral.errors import ExportError, RunError, UsageError
from vitral.export import teach
from vitral.export.exporting import files_in
from vitral.export.teach import export_teaching
from vitral.export.web import RUNTIME
from vitral.weights.project import built_in_weights, hash_of

FILES = {
    "export.json",
    "index.html",
    "model.json",
    "model.onnx",
    *web.TEACH,
    "runtime/LICENSE.txt",
    *(f"runtime/{name.replace('.mjs', '.js')}" for name in RUNTIME),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_runtime(monkeypatch, tmp_path_factory.mktemp("cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def test_the_command_writes_the_page(capsys):
    out, err = printed(capsys, "label", "--export", "site", "--classes", "rose", "tulip")
    assert set(files_in(Path("site"))) == FILES
    assert "python -m http.server --directory site" in out + err
    described = json.loads(Path("site/model.json").read_text())
    assert described["classes"] == ["rose", "tulip"]
    assert described["name"] == "backbone"
    assert described["weights"] == hash_of(built_in_weights("backbone"))
    assert described["width"] == len(described["check"]) == 128


def test_the_graph_computes_the_features_of_the_model():
    assert export_teaching("site") < 1e-4
    session = onnxruntime.InferenceSession("site/model.onnx", providers=["CPUExecutionProvider"])
    predictor = vitral.load("backbone", device="cpu", precision="fp32")
    images = [noise(seed, (90, 130)) for seed in range(3)]
    wanted = predictor.embed(images)
    pixels = torch.stack([predictor.prepare(one) for one in images])
    found = session.run(["features"], {"images": predictor.preprocessing.standardize(pixels).numpy()})[0]
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())


def test_features_that_differ_are_not_written(monkeypatch):
    class Twice(nn.Module):
        def __init__(self, network: nn.Module):
            super().__init__()
            self.network = network

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return 2 * self.network(images)

    whole = teach.exportable
    monkeypatch.setattr(teach, "exportable", lambda network: Twice(whole(network)))
    with pytest.raises(ExportError, match="the page does not compute what the model does"):
        export_teaching("site")
    assert not Path("site").exists()


def test_a_folder_with_files_is_left_alone():
    Path("site").mkdir()
    Path("site/thesis.txt").write_text("years of work")
    with pytest.raises(RunError, match="exists already"):
        export_teaching("site")
    assert files_in(Path("site")) == ["thesis.txt"]


def test_an_earlier_page_is_replaced_and_verified(capsys):
    assert main(["label", "--export", "site", "--classes", "rose"]) == 0
    assert main(["verify", "site"]) == 0
    assert main(["label", "--export", "site"]) == 2
    assert "try: --overwrite, or another --export" in capsys.readouterr().err
    assert main(["label", "--export", "site", "--overwrite"]) == 0
    assert json.loads(Path("site/model.json").read_text())["classes"] == []
    Path("site/page.css").write_text("body { display: none }")
    assert main(["verify", "site"]) == 1
    assert "export it again: vitral label --export site --overwrite" in "".join(capsys.readouterr())
    Path("site/thesis.txt").write_text("years of work")
    assert main(["label", "--export", "site", "--overwrite"]) == 2
    assert Path("site/thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("record", ["[]", "{}", '{"files": [], "written by": []}'])
def test_a_damaged_record_of_a_page_is_found(record, capsys):
    Path("site").mkdir()
    Path("site/export.json").write_text(record)
    assert main(["verify", "site"]) == 1
    assert "export it again with --overwrite" in "".join(capsys.readouterr())


def test_only_built_in_models_are_taught_on_a_page(trained, tmp_path):
    for model in (str(trained.folder), "timm:vit_tiny_patch16_224", "nothing"):
        with pytest.raises(UsageError, match="needs a built-in model"):
            export_teaching("site", model)
    Path("backbone").mkdir()
    (tmp_path / "backbone/model.safetensors").write_bytes(b"something else")
    with pytest.raises(UsageError, match="needs a built-in model"):
        export_teaching("site", "backbone")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["photos"], "--export does not use your images"),
        (["--out", "labels.csv"], "--export does not use --out"),
        (["--no-labels"], "--export does not use --no-labels"),
        (["--port", "8001"], "--export does not use --port"),
        (["--classes", "nan"], "cannot be the name of a class"),
        (["--runtime", "nothing.tgz"], "no such file"),
        (["--overwrite", "photos"], "--export does not use your images"),
    ],
)
def test_options_without_effect_are_refused(words, reason, capsys):
    assert main(["label", "--export", "site", *words]) == 2
    assert reason in capsys.readouterr().err
    assert not Path("site").exists()


def test_a_runtime_without_a_page_is_refused(capsys):
    assert main(["label", "photos", "--runtime", "some.tgz"]) == 2
    assert "--runtime is for --export" in capsys.readouterr().err
