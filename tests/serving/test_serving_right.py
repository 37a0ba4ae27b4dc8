"""`vitral serve --right`: the server answers "not sure" where `vitral predict --right` does."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from starlette.testclient import TestClient

import vitral
from vitral.errors import UsageError
from vitral.inference.outputs.classes import Classes
from vitral.inference.sure import Cut
from vitral.serving import app
from vitral.weights import native

PNG = {"Content-Type": "image/png"}


@pytest.fixture
def run(write_run, tmp_path, drawings):
    """A run whose thresholds lie between its probabilities of the drawings, and the median of these."""
    folder = write_run(tmp_path / "sky", seed=1)
    sure = sorted(one.confidence for one in vitral.load(folder, precision="fp32")(list(drawings.values())))
    middle = (sure[4] + sure[5]) / 2
    weights = native.read(folder / "model.safetensors")
    cuts = (Cut(0.0, 40, 30, 0.73, 0.6, 0.86), Cut(middle, 20, 20, 0.95, 0.84, 1.0))
    output = Classes(weights.classes, scores=tuple(i / 40 for i in range(40)), cuts=cuts)
    native.save(folder / "model.safetensors", dataclasses.replace(weights, output=output.to_json()))
    return folder, middle


def test_doubtful_images_are_not_sure_as_in_python(run, drawings):
    folder, middle = run
    predictor = vitral.load(folder, precision="fp32")
    predictor.output = predictor.output.sure(0.9)
    wanted = [one.answer for one in predictor(list(drawings.values()))]
    assert wanted.count("not sure") == 5
    with TestClient(app(folder, right=0.9, precision="fp32")) as client:
        files = [("image", one) for one in drawings.items()]
        found = client.post("/v1/predict", files=files).json()["predictions"]
        (model,) = client.get("/v1/models").json()["models"]
    assert [one["answer"] for one in found] == wanted
    assert all(one["answer"] in ("not sure", one["label"]) for one in found)
    assert model["sure"].startswith(f"sure from a probability of {middle:.1%}: 20 of 40 validation images")


def test_without_the_option_every_image_gets_its_class(run, drawings):
    with TestClient(app(run[0], precision="fp32")) as client:
        found = client.post("/v1/predict", content=drawings["ship.png"], headers=PNG).json()["predictions"]
        (model,) = client.get("/v1/models").json()["models"]
    assert "answer" not in found[0]
    assert model["sure"] == ""


def test_another_threshold_is_another_version_and_a_predictor_stays_as_it_was(run):
    predictor = vitral.load(run[0], precision="fp32")
    versions = []
    for right in (None, 0.5, 0.9):
        with TestClient(app(predictor, right=right)) as client:
            versions.append(client.get("/v1/models").json()["models"][0]["version"])
    assert len(set(versions)) == 3
    assert predictor.output.cut is None


@pytest.mark.parametrize(("right", "why"), [(0.99, "no answer is sure enough"), (1.5, "between 0 and 1")])
def test_a_share_that_cannot_be_promised_stops_the_start(run, right, why):
    with pytest.raises(UsageError, match=why):
        app(run[0], right=right)


def test_weights_without_thresholds_and_other_tasks_stop_the_start(write_run, tmp_path):
    folder = write_run(tmp_path / "none", seed=2)
    with pytest.raises(UsageError, match="no thresholds for --right"):
        app(folder, right=0.9)
    weights = native.read(folder / "model.safetensors")
    labels = dataclasses.replace(weights, output={"task": "labels", "thresholds": [0.5, 0.5]})
    native.save(folder / "model.safetensors", labels)
    with pytest.raises(UsageError, match="one class per image") as caught:
        app(folder, right=0.9)
    assert "predicts labels" in str(caught.value.why)


def test_a_newer_version_without_thresholds_is_not_loaded(run, write_run, drawings):
    folder, _ = run
    with TestClient(app(folder, right=0.9, precision="fp32")) as client:
        service = client.app.state.service
        write_run(folder, seed=3)
        client.portal.call(service.reload, "sky")
        (model,) = client.get("/v1/models").json()["models"]
        answered = client.post("/v1/predict", content=drawings["ship.png"], headers=PNG).json()["predictions"][0]
    assert "newer_refused_at" in model
    assert "answer" in answered
    assert np.isfinite(answered["confidence"])
