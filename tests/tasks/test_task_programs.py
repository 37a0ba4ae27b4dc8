"""Labels and numbers outside of vitral's own commands: a server, and ONNX Runtime with a proof in the task's terms."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import vitral
from running import as_json
from vitral.errors import ExportError
from vitral.export import export_model, onnx

IMAGE = "p/1.png"


@pytest.fixture(autouse=True)
def _here(tables, monkeypatch):
    monkeypatch.chdir(tables)


@pytest.mark.real
def test_a_server_answers_as_python_does(labels_run, numbers_run):
    pytest.importorskip("starlette", reason="needs vitral[serve]")
    pytest.importorskip("uvicorn", reason="needs vitral[serve]")
    from serving.serverprocess import serving

    image, png = Path(IMAGE).read_bytes(), {"Content-Type": "image/png"}
    with serving(str(labels_run), str(numbers_run), "--precision", "fp32") as server:
        listed = {one["name"]: one for one in server.client.get("/v1/models").json()["models"]}
        assert {name: one["task"] for name, one in listed.items()} == {"labels": "labels", "numbers": "numbers"}

        def answer(query: str) -> dict:
            response = server.client.post(f"/v1/predict?{query}", content=image, headers=png)
            assert response.status_code == 200, response.text
            return response.json()["predictions"][0]

        found = answer("model=labels&explain=default&target=red")
        expected = vitral.load(labels_run, precision="fp32", device="cpu")(IMAGE).to_json()
        assert [one["label"] for one in found["labels"]] == [one["label"] for one in expected["labels"]]
        ours, theirs = ([one["probability"] for one in each["top"]] for each in (expected, found))
        assert theirs == pytest.approx(ours, abs=1e-5)
        assert found["explanation"]["label"] == "red"
        found = answer("model=numbers&explain=default&target=area")
        numbers = vitral.load(numbers_run, precision="fp32", device="cpu")(IMAGE).numbers
        assert found["numbers"] == pytest.approx(numbers, rel=1e-4)
        assert found["explanation"]["value"] == pytest.approx(numbers["area"], rel=1e-4)
        refused = server.client.post("/v1/predict?model=numbers&explain=default", content=image, headers=png)
        assert "name one as target" in refused.json()["detail"]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["labels", "numbers"])
def test_an_export_states_what_its_logits_mean(task, labels_run, numbers_run, tmp_path, capsys):
    runtime = pytest.importorskip("onnxruntime", reason="needs vitral[onnx]")
    run = {"labels": labels_run, "numbers": numbers_run}[task]
    as_json(capsys, "export", str(run), "--to", "onnx", "--out", str(tmp_path / "out"))
    proof = json.loads((tmp_path / "out/export.json").read_text())["proof"]
    assert proof["passed"]
    assert (proof["accuracy"] is None) == (task == "numbers")
    about = json.loads((tmp_path / "out/preprocessing.json").read_text())
    session = runtime.InferenceSession(str(tmp_path / "out/model.onnx"))
    predictor = vitral.load(run, device="cpu", precision="fp32", engine="plain")
    image = predictor.preprocessing.standardize(predictor.prepare(IMAGE)[None]).numpy()
    logits = session.run(["logits"], {"images": image})[0][0].astype(np.float64)
    names, meaning = about["classes"], about["output"]
    if task == "labels":
        reached = 1 / (1 + np.exp(-logits)) >= np.array(meaning["thresholds"])
        assert {name for name, has in zip(names, reached, strict=True) if has} == set(predictor(IMAGE).labels)
    else:
        numbers = logits * np.array(meaning["deviation"]) + meaning["mean"]
        assert dict(zip(names, numbers, strict=True)) == pytest.approx(predictor(IMAGE).numbers, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["labels", "numbers"])
def test_an_export_that_differs_is_refused_in_the_terms_of_its_task(
    task, labels_run, numbers_run, tmp_path, monkeypatch
):
    pytest.importorskip("onnxruntime", reason="needs vitral[onnx]")
    exportable = onnx.exportable

    def off(network):
        copied = exportable(network)
        with torch.no_grad():
            copied.head.bias[1] += 0.02
        return copied

    for module in (onnx, vitral.export.target):
        monkeypatch.setattr(module, "exportable", off)
    reason = {"labels": "probabilities differ", "numbers": "standardized numbers differ"}[task]
    with pytest.raises(ExportError, match=reason):
        export_model({"labels": labels_run, "numbers": numbers_run}[task], "onnx", out=tmp_path / "out")
