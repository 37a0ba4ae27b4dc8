"""`vitral demo --serve`: the model in the package in a browser, by one command."""

from __future__ import annotations

import shutil
import signal

import pytest

import vitral
from serving.serverprocess import running
from vitral.cli.main import main
from vitral.weights.read.references import DEMO


@pytest.mark.slow
def test_the_model_in_the_package_is_served(drawings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    shutil.copy(DEMO, tmp_path / "demo/model.safetensors")  # a user's own weights of that name, which are not meant
    with running(lambda: main(["demo", "--serve", "--port", "0"])) as server:
        assert "<title>vitral</title>" in server.client.get("/").text
        assert [one["name"] for one in server.client.get("/v1/models").json()["models"]] == ["demo"]
        ship = drawings["ship.png"]
        answer = server.client.post("/v1/predict", content=ship, headers={"Content-Type": "image/png"}).json()
        assert answer["predictions"][0]["label"] == vitral.load(DEMO)(ship).label
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo"]
