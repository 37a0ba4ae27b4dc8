"""Several processes on one socket: shared metrics, replacement, reload, drain."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import numpy as np
import pytest

import vitral
from serving.serverprocess import ServerProcess, eventually, running, serving
from vitral.cli.main import main
from vitral.cli.output import say
from vitral.serving import accepting, workers
from vitral.serving.accepting import Acceptor, Shares
from vitral.serving.logs import configure
from vitral.serving.server import bind
from vitral.serving.workers import Seat, supervise

PNG = {"Content-Type": "image/png"}
WORKERS = 2


@pytest.fixture
def run(write_run, tmp_path):
    return write_run(tmp_path / "sky", seed=1)


def pids(server: ServerProcess) -> list[int]:
    """The processes that answer, in the order in which they began to."""
    found = [re.search(r"a worker answers .*pid=(\d+)", line) for line in list(server.lines)]
    return [int(one[1]) for one in found if one]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Client(threading.Thread):
    """Asks again and again over one connection, and opens another one when it breaks."""

    def __init__(self, server: ServerProcess, image: bytes):
        super().__init__(daemon=True)
        self.url, self.image = f"{server.url}/v1/predict?top=2", image
        self.answered, self.broken = 0, 0
        self.refused: list[str] = []
        self.done = threading.Event()

    def run(self) -> None:
        with httpx.Client(timeout=60, trust_env=False) as client:
            while not self.done.is_set():
                try:
                    found = client.post(self.url, content=self.image, headers=PNG)
                    self.answered += 1
                    if found.status_code != 200:
                        self.refused.append(found.text)
                except httpx.HTTPError:
                    self.broken += 1


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced_and_the_others_go_on(run, drawings):
    image = drawings["ship.png"]
    with serving(str(run), "--workers", str(WORKERS), "--precision", "fp32") as server:
        first = pids(server)
        assert len(set(first)) == WORKERS
        clients = [Client(server, image) for _ in range(6)]
        for one in clients:
            one.start()
        assert eventually(lambda: all(one.answered > 3 for one in clients))

        os.kill(first[0], signal.SIGKILL)
        assert eventually(lambda: len(pids(server)) == WORKERS + 1, 30)
        counts = [one.answered for one in clients]
        assert eventually(lambda: all(one.answered > before + 3 for one, before in zip(clients, counts, strict=True)))
        for one in clients:
            one.done.set()
            one.join()
        assert all(one.broken <= 1 for one in clients), "each had one request there at most"
        assert not any(one.refused for one in clients)
        assert server.logged(f"pid={first[0]} why="), "it ended"
        assert server.logged("signal 9")

        answered = sum(one.answered for one in clients)
        total = server.metric('vitral_requests_total{method="POST",route="/v1/predict",status="200"}')
        broken = sum(one.broken for one in clients)
        assert answered <= total <= answered + broken, "of both, and of the one that was killed"
        assert server.metric('vitral_queue_images{model="sky"}') == 0
        probabilities = server.client.post("/v1/predict?top=2", content=image, headers=PNG).json()["predictions"][0]
        expected = vitral.load(run, precision="fp32")(image)
        found = [one["probability"] for one in probabilities["top"]]
        assert np.allclose(found, [each for _, each in expected.top(2)], atol=1e-6)


def sockets(pid: int) -> int:
    count = 0
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since
            count += os.readlink(one).startswith("socket:")
    return count


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts sockets in /proc")
def test_connections_are_shared_out_and_none_waits_for_a_worker_that_is_stopped(run, drawings):
    """Linux would give all of them to the same worker."""
    with serving(str(run), "--workers", str(WORKERS), "--precision", "fp32") as server, ExitStack() as stack:
        before = [sockets(pid) for pid in pids(server)]
        host, port = server.url.removeprefix("http://").split(":")
        for _ in range(4 * WORKERS):
            stack.enter_context(socket.create_connection((host, int(port))))
        accepted = lambda: [sockets(pid) - count for pid, count in zip(pids(server), before, strict=True)]  # noqa: E731
        assert eventually(lambda: accepted() == [4] * WORKERS), accepted()

        stopped = pids(server)[0]
        os.kill(stopped, signal.SIGSTOP)
        stack.callback(os.kill, stopped, signal.SIGCONT)
        for _ in range(6):
            with httpx.Client(timeout=60, trust_env=False) as client:
                found = client.post(f"{server.url}/v1/predict", content=drawings["ship.png"], headers=PNG)
                assert found.status_code == 200


def test_shares():
    shares = Shares(3)
    shares.count(0, 5)
    assert not shares.is_ahead(0), "the others do not answer yet"
    shares.count(1, 0)
    assert shares.is_ahead(0)
    assert not shares.is_ahead(1)
    shares.count(1, 5)
    assert not shares.is_ahead(0), "as many are no more"
    shares.count(1, 7)
    assert shares.is_ahead(1)
    shares.remove(0)
    assert not shares.is_ahead(1), "nobody is left to have fewer"


def test_a_system_without_descriptors_does_not_end_the_acceptor(monkeypatch):
    monkeypatch.setattr(accepting, "_EXHAUSTED", 0.01)

    class Exhausted(socket.socket):
        left = 2

        def accept(self):
            if self.left:
                self.left -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    class Greeting(asyncio.Protocol):
        def connection_made(self, transport):
            transport.write(b"hello")
            transport.close()

    async def test():
        with Exhausted() as bound:
            bound.bind(("127.0.0.1", 0))
            bound.listen()
            acceptor = Acceptor(bound, Greeting, lambda: False)
            reader, writer = await asyncio.open_connection(*bound.getsockname())
            assert await asyncio.wait_for(reader.read(), 10) == b"hello"
            writer.close()
            acceptor.close()

    asyncio.run(test())


@pytest.mark.slow
def test_signals_reach_every_worker_and_the_end_loses_nothing(run, write_run, drawings):
    with serving(str(run), "--workers", str(WORKERS), "--precision", "fp32") as server:
        write_run(run, seed=2)
        server.signal(signal.SIGHUP)
        loaded = 'vitral_reloads_total{model="sky",result="loaded"}'
        assert eventually(lambda: server.metric(loaded) >= WORKERS)

        clients = [Client(server, drawings["ship.png"]) for _ in range(4)]
        for one in clients:
            one.start()
        assert eventually(lambda: all(one.answered > 3 for one in clients))
        server.signal(signal.SIGTERM)
        assert eventually(lambda: server.logged("draining"), 5)
        for one in clients:
            one.done.set()  # a request sent after the listener closed has not been accepted
        assert server.wait() == 0
        for one in clients:
            one.join()
        assert not any(one.refused for one in clients)
        assert not any(alive(pid) for pid in pids(server))
        assert "Traceback" not in server.log


@pytest.mark.slow
def test_workers_end_with_their_supervisor(run):
    with serving(str(run), "--workers", str(WORKERS)) as server:
        server.kill()
        assert eventually(lambda: not any(alive(pid) for pid in pids(server)), 15)


def test_the_reason_that_nothing_can_be_served(capsys):
    assert main(["serve", "no-such-run", "--workers", "2", "--port", "0"]) == 2
    assert "no-such-run" in capsys.readouterr().err
    assert main(["serve", os.fsdecode(b"night=no-\xff"), "--workers", "2", "--port", "0"]) == 2
    assert r"no-\xff" in capsys.readouterr().err
    assert main(["serve", "demo", "--workers", "0"]) == 2


def supervised(work, silent: float = 30.0) -> int:
    configure("text")
    workers.SILENT = silent
    with bind("127.0.0.1", 0) as bound:
        bound.listen()
        return supervise(bound, WORKERS, work, grace=2, started=lambda: say("Serving  http://127.0.0.1:1"))


def beating(seat: Seat) -> int:
    seat.ready()
    while True:
        time.sleep(0.05)
        seat.beat()


@pytest.mark.slow
def test_a_worker_that_ends_again_and_again_is_started_ever_more_seldom(tmp_path):
    def work(seat: Seat) -> int:
        if seat.part.index == 0:
            (tmp_path / f"{time.monotonic():.3f}").touch()
            seat.ready()
            time.sleep(0.3)  # until all have answered
            return 7
        return beating(seat)

    with running(lambda: supervised(work)) as server:
        assert eventually(lambda: len(list(tmp_path.iterdir())) >= 4)
        times = sorted(float(one.name) for one in tmp_path.iterdir())
        assert times[1] - times[0] < times[3] - times[2]
        assert server.logged("exit code 7")
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.slow
def test_a_worker_that_hangs_is_replaced():
    def work(seat: Seat) -> int:
        if seat.part.index == 1:
            seat.ready()
            time.sleep(60)
        return beating(seat)

    with running(lambda: supervised(work, silent=1.0)) as server:
        assert server.logged("a worker is stuck worker=1")
        assert eventually(lambda: len(pids(server)) > WORKERS)
        assert "stuck worker=0" not in server.log
        server.signal(signal.SIGINT)
        assert server.wait() == 130
