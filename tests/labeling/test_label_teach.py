"""Training from the page: a process of its own, followed through its files."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from images import MakeImages
from serving.serverprocess import eventually
from vitral.errors import UsageError
from vitral.labeling.application import Labeling, build
from vitral.labeling.session import Session
from vitral.labeling.state import Action
from vitral.labeling.teach import Teacher, read_epochs

SLOW = "import time\nprint('started', flush=True)\ntime.sleep(60)"


@pytest.fixture
def session(make_images: MakeImages) -> Iterator[Session]:
    photos = make_images({"rose": 12, "tulip": 12}, size=(32, 32))
    with Session([str(photos)], photos / "labels.csv") as session:
        session.act(Action("confirm", tuple(range(24))))
        yield session


def test_a_run_trains_on_the_labels_and_measures(session: Session, tmp_path: Path):
    with Teacher(session, tmp_path / "runs") as teacher:
        assert teacher.to_json() == {"state": "none"}
        teacher.start(0.2)
        assert teacher.to_json()["state"] == "running"
        with pytest.raises(UsageError, match="not done"):
            teacher.start(1)
        assert eventually(lambda: teacher.to_json()["state"] == "done", 120), teacher.to_json()
        told = teacher.to_json()
        assert told["epochs"][0]["epoch"] == 1
        assert 0 <= told["accuracy"] <= 1
        assert told["split"] in ("val", "test")
        config = json.loads((Path(told["run"]) / "config.json").read_text())
        assert config["run"]["data"].endswith("labels.csv")


def test_a_run_that_fails_says_why(session: Session, tmp_path: Path):
    for number in range(12):
        session.act(Action("exclude", (number,)))
    with Teacher(session, tmp_path / "runs") as teacher:
        teacher.start(0.2)
        assert eventually(lambda: teacher.to_json()["state"] == "failed", 120)
        assert "class" in teacher.to_json()["why"], "one class is too few"


def test_a_run_is_stopped_by_the_signal_of_ctrl_c(session: Session, tmp_path: Path):
    with Teacher(session, tmp_path / "runs", [sys.executable, "-c", SLOW]) as teacher:
        teacher.start(5)
        time.sleep(1)
        teacher.stop()
        assert eventually(lambda: teacher.to_json()["state"] == "stopped", 60)
        assert "--resume" in teacher.to_json()["next"]


@pytest.mark.parametrize("minutes", [0, -1, float("nan"), 1e9])
def test_minutes_that_are_refused(session: Session, tmp_path: Path, minutes: float):
    with Teacher(session, tmp_path) as teacher, pytest.raises(UsageError):
        teacher.start(minutes)


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    assert read_epochs(file) == []
    file.write_text('{"epoch": 1, "train_loss": 2.0, "val_accuracy": 0.5, "lr": 0.1}\n{"epoch": 2, "tra')
    assert read_epochs(file) == [{"epoch": 1, "train_loss": 2.0, "val_accuracy": 0.5}]


def test_the_requests(session: Session, tmp_path: Path):
    headers = {"Authorization": "Bearer a-token-of-24-characters"}
    with Teacher(session, tmp_path / "runs", [sys.executable, "-c", SLOW]) as teacher:
        application = build(Labeling(session, "a-token-of-24-characters", None, teacher))
        with TestClient(application, base_url="http://127.0.0.1:8001", headers=headers) as client:
            assert client.get("/v1/training").json() == {"state": "none"}
            assert client.post("/v1/training", json={"minutes": "5"}).status_code == 400
            assert client.post("/v1/training", json={"minutes": 5}).json()["state"] == "running"
            assert client.delete("/v1/training").json()["state"] in ("stopping", "stopped")
            assert client.delete("/v1/training", headers={"Authorization": ""}).status_code == 401
