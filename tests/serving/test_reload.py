"""A changed run is loaded while the old one answers; a broken one is refused."""

from __future__ import annotations

import shutil
import signal
import threading

import httpx
import numpy as np
import pytest

import vitral
from serving.serverprocess import eventually, serving

PNG = {"Content-Type": "image/png"}
REFUSED = 'vitral_reloads_total{model="sky",result="refused"}'


@pytest.fixture
def run(write_run, tmp_path):
    return write_run(tmp_path / "sky", seed=1)


@pytest.fixture
def server(run):
    with serving(str(run), "--precision", "fp32") as process:
        yield process


def version(server) -> str:
    return server.client.get("/v1/models").json()["models"][0]["version"]


def answer(server, image: bytes) -> list[float]:
    found = server.client.post("/v1/predict?top=2", content=image, headers=PNG)
    assert found.status_code == 200, found.text
    return sorted(one["probability"] for one in found.json()["predictions"][0]["top"])


def expected(run, image: bytes) -> np.ndarray:
    return np.sort(vitral.load(run, precision="fp32")(image).probabilities)


class Traffic(threading.Thread):
    """Asks again and again; `failed` holds what was not answered with 200."""

    def __init__(self, server, image: bytes):
        super().__init__(daemon=True)
        self.server, self.image = server, image
        self.done = threading.Event()
        self.answered = 0
        self.failed: list[object] = []

    def run(self) -> None:
        with httpx.Client(base_url=self.server.url, timeout=60, trust_env=False) as client:
            while not self.done.is_set():
                try:
                    found = client.post("/v1/predict", content=self.image, headers=PNG)
                    self.answered += 1
                    if found.status_code != 200:
                        self.failed.append(found.text)
                except httpx.HTTPError as error:
                    self.failed.append(error)


@pytest.mark.slow
def test_a_changed_run_is_reloaded_and_a_broken_one_refused(server, run, write_run, drawings):
    """By the file, then by SIGHUP, under traffic of which nothing is lost."""
    image, weights = drawings["ship.png"], run / "model.safetensors"
    traffic = Traffic(server, image)
    traffic.start()
    first = version(server)
    assert np.allclose(answer(server, image), expected(run, image), atol=1e-6)

    write_run(run, seed=2)
    assert eventually(lambda: version(server) != first)
    second = version(server)
    assert np.allclose(answer(server, image), expected(run, image), atol=1e-6)
    before = answer(server, image)

    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])  # in its place: a network that is only mapped would be gone, too
    assert eventually(lambda: server.metric(REFUSED) == 1)
    assert version(server) == second
    assert np.allclose(answer(server, image), before, atol=1e-6)
    assert server.client.get("/v1/models").json()["models"][0]["newer_refused_at"]
    assert server.client.get("/readyz").status_code == 200
    assert server.logged("a new version of a model was refused")

    server.signal(signal.SIGHUP)
    assert eventually(lambda: server.metric(REFUSED) == 2)
    write_run(run, seed=3, classes=("dawn", "day", "night"))
    server.signal(signal.SIGHUP)
    assert eventually(lambda: version(server) != second)
    listed = server.client.get("/v1/models").json()["models"][0]
    assert listed["classes"] == ["dawn", "day", "night"]
    assert "newer_refused_at" not in listed
    traffic.done.set()
    traffic.join()
    assert traffic.failed == []
    assert traffic.answered > 3
    assert server.metric('vitral_reloads_total{model="sky",result="loaded"}') >= 2


@pytest.mark.slow
def test_a_run_that_is_gone_is_no_reason_to_stop(server, run, drawings):
    first = version(server)
    shutil.rmtree(run)
    server.signal(signal.SIGHUP)
    assert eventually(lambda: server.metric(REFUSED) == 1)
    assert version(server) == first
    answer(server, drawings["ship.png"])
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
