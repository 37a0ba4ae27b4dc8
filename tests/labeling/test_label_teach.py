"""Training from the page: a process of its own, followed through its files."""

from __future__ import annotations

import csv
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from images import MakeImages
from npmpackages import real
from serving.serverprocess import eventually
from vitral.cli.main import main
from vitral.errors import UsageError
from vitral.export import web
from vitral.folders import cache_folder
from vitral.labeling.application import build
from vitral.labeling.service import Labeling
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
        assert teacher.to_json()["state"] == "none"
        assert teacher.to_json()["finished"] == ""
        teacher.start(0.2)
        assert teacher.to_json()["state"] == "running"
        with pytest.raises(UsageError, match="not done"):
            teacher.start(1)
        assert eventually(lambda: teacher.to_json()["state"] == "done", 120), teacher.to_json()
        found = teacher.to_json()
        assert found["epochs"][0]["epoch"] == 1
        assert 0 <= found["accuracy"] <= 1
        assert found["split"] in ("val", "test")
        assert found["finished"] == found["run"]
        config = json.loads((Path(found["run"]) / "config.json").read_text())
        assert config["run"]["data"].endswith("labels.csv")


def test_the_plan_is_that_of_the_command(session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with Teacher(session, tmp_path / "runs") as teacher:
        teacher.plan(0.5)
        assert teacher.to_json()["state"] == "planning"
        assert eventually(lambda: teacher.to_json()["state"] == "planned", 120), teacher.to_json()
        found = teacher.to_json()
        assert found["minutes"] == 0.5
        assert not (tmp_path / "runs").exists(), "nothing is trained"
        words = ["train", str(session.table), "--minutes", "0.5", "--plan-only", "--format", "json"]
        assert main([*words, "--out", str(tmp_path / "runs" / f"{session.folder.name}-1")]) == 0
        printed = json.loads(capsys.readouterr().out)["choices"]
        assert [one["name"] for one in found["plan"]][:2] == ["model", "init"]
        assert sorted(map(words_of, found["plan"])) == sorted(map(words_of, printed))
        teacher.plan(1)
        teacher.stop()
        assert teacher.to_json()["state"] == "none"


def words_of(choice: dict[str, str]) -> list[str]:
    """Name, value and reason without numbers, which a clock decides."""
    return [re.sub(r"[\d.,]+", "#", choice[name]) for name in ("name", "value", "reason")]


@pytest.mark.parametrize("begin", [Teacher.plan, Teacher.start])
def test_a_plan_or_run_that_fails_gives_the_reason(
    session: Session, tmp_path: Path, begin: Callable[[Teacher, float], None]
):
    for number in range(12):
        session.act(Action("exclude", (number,)))
    with Teacher(session, tmp_path / "runs") as teacher:
        begin(teacher, 0.2)
        assert eventually(lambda: teacher.to_json()["state"] == "failed", 120)
        assert "class" in teacher.to_json()["why"], "one class is too few"


@pytest.mark.slow
def test_what_is_taken_home_of_a_run(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A table for the images without a label, ONNX, and a page: as the commands make them."""
    kernels = cache_folder("kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9/")
    cache_folder("kernels").parent.mkdir(parents=True)
    cache_folder("kernels").symlink_to(kernels)
    with Teacher(session, tmp_path / "runs") as teacher:
        with pytest.raises(UsageError, match="no run"):
            teacher.make("table")
        teacher.start(0.2)
        assert eventually(lambda: teacher.to_json()["state"] == "done", 120), teacher.to_json()
        run = Path(teacher.to_json()["finished"])
        with pytest.raises(UsageError, match="every image has a label"):
            teacher.make("table")
        with pytest.raises(UsageError, match="cannot be made"):
            teacher.make("../table")
        session.act(Action("clear", (0, 15)))
        session.act(Action("exclude", (1,)))
        session.act(Action("unsure", (2,)))
        table = made(teacher, "table")
        assert table["state"] == "done", table
        with open(table["path"], newline="") as file:
            assert [row["path"] for row in csv.DictReader(file)] == [session.path(i) for i in (0, 2, 15)]
        rest = str(run / "rest.txt")
        assert main(["predict", str(run), rest, "--out", str(tmp_path / "own.csv")]) == 0
        assert Path(table["path"]).read_bytes() == (tmp_path / "own.csv").read_bytes()
        assert made(teacher, "web")["state"] == "failed"
        assert "cannot be fetched" in teacher.to_json()["home"]["web"]["why"]
        assert made(teacher, "teach")["state"] == "failed"
        cached = cache_folder("npm") / web.PACKAGE.file
        cached.parent.mkdir(parents=True, exist_ok=True)
        cached.symlink_to(real(web.PACKAGE))
        page = made(teacher, "web")
        assert page["state"] == "done", page
        assert (Path(page["path"]) / "index.html").is_file()
        onnx = made(teacher, "onnx")
        assert onnx["state"] == "done", onnx
        assert list(Path(onnx["path"]).glob("*.onnx"))
        for _ in range(2):
            teaching = made(teacher, "teach")
            assert teaching["state"] == "done", teaching
            described = json.loads((Path(teaching["path"]) / "model.json").read_text())
            assert described["classes"] == list(session.state.classes)
        teacher.start(5)
        assert teacher.to_json()["finished"] == str(run), "until the next one is done"
    with Teacher(session, tmp_path / "runs") as later:
        assert later.to_json()["finished"] == str(run), "a later session offers it, too"


def made(teacher: Teacher, kind: str) -> dict[str, str]:
    """Make something, and wait until it is done."""
    teacher.make(kind)
    assert teacher.to_json()["home"][kind] == {"state": "running"}
    assert eventually(lambda: teacher.to_json()["home"][kind]["state"] != "running", 200)
    found: dict[str, str] = teacher.to_json()["home"][kind]
    return found


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
            assert client.get("/v1/training").json()["state"] == "none"
            assert client.post("/v1/plan", json={"minutes": True}).status_code == 400
            assert client.post("/v1/plan", json={"minutes": 5}).json()["state"] == "planning"
            assert client.post("/v1/home", json={"kind": "table"}).json()["title"] == "no run is done yet"
            assert client.post("/v1/home", json={"kind": 3}).status_code == 400
            assert client.post("/v1/training", json={"minutes": "5"}).status_code == 400
            assert client.post("/v1/training", json={"minutes": 5}).json()["state"] == "running"
            assert client.delete("/v1/training").json()["state"] in ("stopping", "stopped")
            assert client.delete("/v1/training", headers={"Authorization": ""}).status_code == 401
