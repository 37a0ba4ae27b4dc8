"""Several processes under an established manager: gunicorn, with Uvicorn's worker class."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import vitral
from freeports import free_port

pytest.importorskip("gunicorn", reason="needs gunicorn and uvicorn-worker")

PNG = {"Content-Type": "image/png"}


@pytest.fixture
def managed(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client, Path]]:
    """gunicorn with two workers that serve the demo: the process, a client, and the log."""
    port = free_port()
    made = "vitral.serving:app('demo', precision='fp32', device='cpu')"
    words = [
        "-k",
        "uvicorn_worker.UvicornWorker",
        "-w",
        "2",
        "-b",
        f"127.0.0.1:{port}",
        "--graceful-timeout",
        "5",
        made,
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(vitral.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    log = tmp_path / "log"
    with (
        log.open("wb") as file,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client,
    ):
        process = subprocess.Popen([sys.executable, "-m", "gunicorn", *words], stderr=file, env=environment)
        try:
            until(lambda: len(started(log)) == 2)
            yield process, client, log
        finally:
            process.kill()
            process.wait()


def started(log: Path) -> list[int]:
    """Processes of workers that have answered so far, in order."""
    return [int(found) for found in re.findall(r"\[(\d+)\] \[INFO\] Application startup complete", log.read_text())]


def until(true: object, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end, "not in time"
        time.sleep(0.1)


def test_workers_answer_are_replaced_reloaded_and_drained(managed, drawings):
    process, client, log = managed
    wanted = vitral.load("demo", precision="fp32", device="cpu")(drawings["ship.png"])

    def answers(times: int = 8) -> None:
        for _ in range(times):
            with httpx.Client(base_url=client.base_url, timeout=60, trust_env=False) as another:  # one connection each
                found = another.post("/v1/predict", content=drawings["ship.png"], headers=PNG).json()
            (one,) = found["predictions"]
            assert one["label"] == wanted.label
            assert one["confidence"] == pytest.approx(wanted.confidence, abs=1e-5)

    answers()
    killed = started(log)[0]
    os.kill(killed, signal.SIGKILL)
    until(lambda: len(started(log)) == 3)
    answers()
    process.send_signal(signal.SIGHUP)
    until(lambda: len(started(log)) == 5)
    answers()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
