"""Answers for images that are not of the data: by the suggestions, and by a trained run."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient

import vitral
from images import noise
from running import TINY
from serving.serverprocess import eventually
from vitral.inference.outputs.classes import Classes
from vitral.inference.predictor import Predictor
from vitral.labeling.application import build
from vitral.labeling.assistant import Assistant
from vitral.labeling.insight import tempered
from vitral.labeling.service import Labeling
from vitral.labeling.session import Session
from vitral.labeling.state import Action
from vitral.labeling.teach import Teacher
from vitral.labeling.trial import LIMITS

COUNT = 30
HEADERS = {"Authorization": "Bearer a-token-of-24-characters"}
PNG = {"Content-Type": "image/png"}


def draw(number: int) -> Image.Image:
    """An image that is rather red or rather blue, by turns."""
    pixels = noise(number, (64, 64)).astype(float) * 0.5
    pixels[..., 0 if number % 2 else 2] += 120
    return Image.fromarray(pixels.astype(np.uint8))


def encoded(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trial") / "photos"
    folder.mkdir()
    for number in range(COUNT):
        draw(number).save(folder / f"{number:02}.png")
    return folder


@contextmanager
def opening(photos: Path, folder: Path) -> Iterator[tuple[Session, Assistant, Teacher]]:
    with (
        Session([str(photos)], folder / "labels.csv", ["blue", "red"]) as session,
        Assistant(session) as assistant,
        Teacher(session, folder / "runs") as teacher,
    ):
        yield session, assistant, teacher


@contextmanager
def asking(opened: tuple[Session, Assistant, Teacher]) -> Iterator[TestClient]:
    session, assistant, teacher = opened
    application = build(Labeling(session, "a-token-of-24-characters", assistant, teacher))
    with TestClient(application, base_url="http://127.0.0.1:8001", headers=HEADERS) as client:
        yield client


@pytest.fixture(scope="module")
def opened(photos: Path) -> Iterator[tuple[Session, Assistant, Teacher]]:
    """A session with 20 labels and suggestions."""
    with opening(photos, photos) as opened:
        session, assistant, _ = opened
        for name, odd in (("red", 1), ("blue", 0)):
            session.act(Action("label", tuple(n for n in range(20) if n % 2 == odd), name))
        assistant.ask()
        assert eventually(lambda: assistant.progress.done == COUNT and assistant.insight.fitted is not None)
        yield opened


@pytest.fixture
def client(opened: tuple[Session, Assistant, Teacher]) -> Iterator[TestClient]:
    with asking(opened) as client:
        yield client


def test_no_answer_before_there_are_suggestions(photos: Path, tmp_path: Path):
    with opening(photos, tmp_path) as opened, asking(opened) as client:
        assert eventually(lambda: opened[1].progress.done == COUNT)
        refused = client.post("/v1/answer", content=encoded(draw(1)), headers=PNG)
        assert refused.status_code == 400
        assert "label three images" in refused.json()["try"]


def test_the_suggestions_answer_with_their_neighbors_and_a_map(
    client: TestClient, opened: tuple[Session, Assistant, Teacher]
):
    assistant = opened[1]
    for number in (101, 102):
        found = client.post("/v1/answer", content=encoded(draw(number)), headers=PNG).json()
        assert found["label"] == ("blue", "red")[number % 2]
        assert sum(one["probability"] for one in found["top"]) == pytest.approx(1)
        assert len(found["neighbors"]) == 6
        assert {n % 2 for n in found["neighbors"]} == {number % 2}
        assert max(found["neighbors"]) < 20, "only labeled images"
        explanation = found["explanation"]
        assert explanation["label"] == found["label"]
        for name in ("image", "overlay"):
            with Image.open(io.BytesIO(base64.b64decode(explanation[name].partition(",")[2]))) as image:
                assert image.size == (448, 448)
    waiting = next(n for n in range(20, COUNT) if assistant.insight.suggested[n] >= 0)
    own = client.post("/v1/answer", content=encoded(draw(waiting)), headers=PNG).json()
    assert own["confidence"] == pytest.approx(assistant.insight.probability[waiting], abs=1e-3), "as on the grid"


def test_the_head_of_the_map_is_the_classifier_of_the_suggestions(opened: tuple[Session, Assistant, Teacher]):
    """Its logits give the geometric mean of both classifiers, on the features of the network itself."""
    from vitral.workflows.running.linear_probe import write_head

    _, assistant, _ = opened
    predictor, fitted = assistant.load(), assistant.insight.fitted
    assert fitted is not None
    pixels = torch.stack([predictor.prepare(encoded(draw(n))) for n in range(200, 208)])
    expected = fitted(predictor.features(pixels).numpy().astype(np.float64))
    network = predictor.model
    network.reset_classifier(2)
    write_head(network, *map(torch.from_numpy, fitted.head()))
    twin = Predictor(
        network,
        predictor.preprocessing,
        ("blue", "red"),
        machine=predictor.machine,
        engine="plain",
        output=Classes(("blue", "red")),
    )
    assert np.allclose(twin.rows(pixels), tempered(expected, 1.0), atol=1e-3)


def test_a_trained_run_answers_if_it_is_chosen(client: TestClient, opened: tuple[Session, Assistant, Teacher]):
    assert client.post("/v1/answer?by=run", content=encoded(draw(1)), headers=PNG).status_code == 400
    assert client.post("/v1/answer?by=/etc/passwd", content=encoded(draw(1)), headers=PNG).status_code == 400
    session, _, teacher = opened
    session.flush()
    run = vitral.train(str(session.table), out=str(teacher.folder / "run"), quiet=True, **{**TINY, "epochs": 1})
    teacher.run = run.folder
    found = client.post("/v1/answer?by=run", content=encoded(draw(103)), headers=PNG).json()
    assert teacher.finished is not None
    expected = vitral.load(teacher.finished)(encoded(draw(103)))
    assert (found["label"], found["confidence"]) == (expected.label, pytest.approx(expected.confidence))
    assert found["explanation"]["label"] == found["label"]
    assert len(found["neighbors"]) == 6


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"no image", "image/png", 422),
        (encoded(Image.new("1", (20_000, 10_000))), "image/png", 422),
        (b"", "image/png", 400),
        (b"GIF89a", "text/plain", 415),
        (bytes(LIMITS.body + 1), "application/octet-stream", 413),
    ],
)
def test_bodies_that_are_refused(client: TestClient, body: bytes, kind: str, status: int):
    answer = client.post("/v1/answer", content=body, headers={"Content-Type": kind})
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"


def test_who_is_refused(client: TestClient):
    image = encoded(draw(1))
    assert client.post("/v1/answer", content=image, headers={**PNG, "Authorization": ""}).status_code == 401
    assert client.post("/v1/answer", content=image, headers={**PNG, "Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert client.get("/v1/answer").status_code == 405
    assert "camera=(self)" in client.get("/").headers["permissions-policy"]
    assert "camera=()" in client.get("/v1/training").headers["permissions-policy"]
