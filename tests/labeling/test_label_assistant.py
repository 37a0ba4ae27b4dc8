"""The assistant: features in the background, insight after each action, and images that it holds out."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from images import noise
from serving.serverprocess import eventually
from vitral.labeling.application import build
from vitral.labeling.assistant import Assistant
from vitral.labeling.service import Labeling
from vitral.labeling.session import Session
from vitral.labeling.state import Action

COUNT = 80


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Images that are rather red or rather blue, by turns; 7 cannot be read, and 9 is a copy of 8."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(COUNT):
        pixels = noise(number, (64, 64)).astype(float) * 0.5
        pixels[..., 0 if number % 2 else 2] += 120
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:02}.png")
    (folder / "07.png").write_bytes(b"no image")
    (folder / "09.png").write_bytes((folder / "08.png").read_bytes())
    return folder


@pytest.fixture
def opened(photos: Path) -> Iterator[Callable[[], tuple[Session, Assistant]]]:
    closing = []

    def opened() -> tuple[Session, Assistant]:
        session = Session([str(photos)], photos / "labels.csv", ["blue", "red"])
        assistant = Assistant(session).__enter__()
        closing.append((session, assistant))
        return session, assistant

    yield opened
    for session, assistant in closing:
        assistant.__exit__()
        session.close()


def is_done(assistant: Assistant) -> bool:
    return assistant.progress.done == COUNT and assistant.features is not None


def label(session: Session, assistant: Assistant, numbers: range) -> None:
    """Label as a person does: odd numbers are red."""
    for name, odd in (("red", 1), ("blue", 0)):
        images = tuple(n for n in numbers if n % 2 == odd and n != 7)
        session.act(Action("label", images, name))
    assistant.ask()


def test_features_come_then_suggestions_that_are_right(opened):
    session, assistant = opened()
    assert eventually(lambda: is_done(assistant))
    assert assistant.progress.problem == ""
    assert np.isnan(assistant.features[7]).all(), "it cannot be read"
    assert not np.isnan(np.delete(assistant.features, 7, 0)).any()
    assert assistant.groups[8] == assistant.groups[9] != assistant.groups[10]
    label(session, assistant, range(8))
    assert eventually(lambda: (assistant.insight.suggested >= 0).sum() > 40)
    held = session.state.held_out
    assert len(held) == pytest.approx(0.2 * (COUNT - 7), abs=3)
    open_ = [n for n in range(10, COUNT) if n not in held]
    assert (assistant.insight.suggested[open_] == np.array(open_) % 2).mean() > 0.9
    assert (assistant.insight.suggested[sorted(held)] == -1).all(), "a person who sees the answer agrees with it"


def test_held_out_images_stay_so_after_a_restart_and_test_a_run(opened, photos: Path):
    session, assistant = opened()
    label(session, assistant, range(8))
    assert eventually(lambda: session.state.held_out)
    held = session.state.held_out
    assistant.__exit__()
    session.close()
    again, _ = opened()
    assert again.state.held_out == held
    assert again.state.past is not None, "and what a person did can still be undone"
    first = min(held)
    again.act(Action("label", (first,), "red"))
    again.close()
    with open(photos / "labels.csv", newline="", encoding="utf-8") as file:
        splits = {row["file"]: row["split"] for row in csv.DictReader(file)}
    assert splits[f"{first:02}.png"] == "test"
    assert splits["00.png"] == "train"


def test_the_page_hears_of_insight_and_accepts_suggestions(opened):
    session, assistant = opened()
    headers = {"Authorization": "Bearer a-token-of-24-characters"}
    application = build(Labeling(session, "a-token-of-24-characters", assistant))
    with TestClient(application, base_url="http://127.0.0.1:8001", headers=headers) as client:
        label(session, assistant, range(8))
        assert eventually(lambda: is_done(assistant) and (assistant.insight.suggested >= 0).sum() > 40)
        news = client.get("/v1/changes?since=2&insight=0").json()["insight"]
        assert news["progress"]["done"] == COUNT
        assert eventually(lambda: "insight" not in client.get(f"/v1/changes?since=0&insight={assistant.number}").json())
        images = [n for n in range(8, COUNT) if news["suggested"][n] >= 0]
        labels = [("blue", "red")[news["suggested"][n]] for n in images]
        action = {"do": "accept", "images": images, "labels": labels, "version": 2}
        answer = client.post("/v1/actions", json=action).json()
        assert answer["numbers"] == images
        assert set(answer["checked"]) == {2}, "accepted, which is less than chosen"
        assert answer["undo"] == f"accept {len(images)} images"
        assert client.post("/v1/actions", json={**action, "labels": labels[1:]}).status_code == 400
        assert client.post("/v1/actions", json={**action, "labels": ["iris"] * len(images)}).status_code == 400
        assert client.get("/v1/images/4/similar").json()["order"][0] == 4
        near = client.get("/v1/images/4/neighbors").json()
        assert all(n % 2 == 0 for n in near["own"])
        assert 4 not in near["own"]
        assert client.get("/v1/images/999/similar").status_code == 404


def test_weights_that_cannot_be_read_leave_labeling_as_it_is(photos: Path):
    with (
        Session([str(photos)], photos / "labels.csv", ["red"]) as session,
        Assistant(session, "no-such-weights") as assistant,
    ):
        assert eventually(lambda: bool(assistant.progress.problem))
        assert assistant.to_json()["progress"]["problem"]
        session.act(Action("label", (0,), "red"))
        assert session.labeled == 1
