"""A server that is busy: a full queue, deadlines, clients that leave, and its end."""

from __future__ import annotations

import io
import signal
import socket
import threading
import time

import httpx
import numpy as np
import pytest
from PIL import Image

import vitral
from serving.serverprocess import ServerProcess, eventually, running
from vitral.inference.predictor import Predictor

PNG = {"Content-Type": "image/png"}
SECONDS = 0.4
"""Time that the slow network takes for a batch."""


class Slow(Predictor):
    """A predictor that takes its time, and fails on black images."""

    seconds = SECONDS

    def logits(self, images):
        time.sleep(self.seconds)
        if not images.any():
            raise RuntimeError("secret of the server")
        return super().logits(images)


def serve_slowly(grace: float = 20.0, seconds: float = SECONDS, **limits) -> int:
    """Serve as `vitral serve` does, with a slow network and one image in a batch."""
    from vitral.cli.output import say
    from vitral.serving import protocol
    from vitral.serving.application import build
    from vitral.serving.auth import Access
    from vitral.serving.limits import Limits
    from vitral.serving.logs import configure
    from vitral.serving.server import address, bind, serve_on
    from vitral.serving.service import Service

    loaded = vitral.load("demo", precision="fp32", engine="plain")
    slow = Slow(loaded.model, loaded.preprocessing, loaded.classes, machine=loaded.machine, engine="plain")
    slow.seconds = seconds
    protocol.HEADER_SECONDS, protocol.MOST_CONNECTIONS = 0.5, 40
    configure("text")
    with bind("127.0.0.1", 0) as bound:
        service = Service({"demo": slow}, Access(local=True), Limits(**{"batch_size": 1, "images": 2, **limits}))
        return serve_on(bound, service, build(service), grace=grace, started=lambda: say(f"Serving  {address(bound)}"))


@pytest.fixture(scope="module")
def server():
    with running(lambda: serve_slowly(queue=4, bodies=1 << 20, body=1 << 19)) as process:
        yield process


class Client(threading.Thread):
    """Sends one request and keeps its answer, or the error."""

    def __init__(self, server: ServerProcess, image: bytes, query: str = ""):
        super().__init__(daemon=True)
        self.url, self.image = f"{server.url}/v1/predict{query}", image
        self.answer: httpx.Response | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.answer = httpx.post(self.url, content=self.image, headers=PNG, timeout=60, trust_env=False)
        except httpx.HTTPError as error:
            self.error = error


def send(server: ServerProcess, image: bytes, count: int, query: str = "") -> list[Client]:
    clients = [Client(server, image, query) for _ in range(count)]
    for one in clients:
        one.start()
    return clients


def waiting(server: ServerProcess) -> float:
    return server.metric('vitral_queue_images{model="demo"}')


@pytest.mark.slow
def test_a_full_queue_refuses_and_says_when_to_come_back(server, drawings):
    clients = send(server, drawings["ship.png"], 12)
    for one in clients:
        one.join()
    statuses = sorted(one.answer.status_code for one in clients if one.answer is not None)
    assert len(statuses) == 12
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 4, "more, if some were answered before others arrived"
    for one in clients:
        if one.answer.status_code == 503:
            assert one.answer.json()["type"] == "/docs#queue-full"
            assert int(one.answer.headers["retry-after"]) >= 1
    assert waiting(server) == 0
    assert server.client.post("/v1/predict", content=drawings["ship.png"], headers=PNG).status_code == 200


@pytest.mark.slow
def test_bodies_in_flight_are_bounded(server, drawings):
    """Two bodies of half the bound fit while they are answered; a third is refused before it is read."""
    large = drawings["ship.png"] + bytes((1 << 19) - len(drawings["ship.png"]))
    holding = send(server, large, 2)
    assert eventually(lambda: waiting(server) == 2)
    refused = server.client.post("/v1/predict", content=large, headers=PNG)
    assert refused.status_code == 503
    assert "bytes" in refused.json()["detail"]
    for one in holding:
        one.join()
        assert one.answer.status_code == 200


def test_a_deadline_ends_a_request_and_frees_its_place(server, drawings):
    holding = send(server, drawings["ship.png"], 2)
    assert eventually(lambda: waiting(server) == 2)
    began = time.monotonic()
    late = server.client.post("/v1/predict?timeout=0.1", content=drawings["ship.png"], headers=PNG)
    assert late.status_code == 504
    assert late.json()["type"] == "/docs#deadline"
    assert late.json()["timeout"] == 0.1
    assert time.monotonic() - began < SECONDS * 2
    assert waiting(server) <= 2
    for one in holding:
        one.join()
        assert one.answer.status_code == 200


def test_a_client_that_leaves_frees_its_place(server, drawings):
    before = server.metric("vitral_requests_abandoned_total")
    computed = 'vitral_images_total{model="demo",task="predict"}'
    holding = send(server, drawings["ship.png"], 2)
    assert eventually(lambda: waiting(server) == 2)
    images = server.metric(computed)
    for _ in range(2):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{server.url}/v1/predict",
                content=drawings["ship.png"],
                headers=PNG,
                trust_env=False,
                timeout=httpx.Timeout(10, read=0.05),
            )
    assert eventually(lambda: server.metric("vitral_requests_abandoned_total") == before + 2)
    assert waiting(server) <= 2
    for one in holding:
        one.join()
        assert one.answer.status_code == 200
    assert server.metric(computed) <= images + 3, "images of clients that left wait in no queue"
    assert server.logged(" 499 ")


def test_health_is_answered_while_the_network_computes(server, drawings):
    holding = send(server, drawings["ship.png"], 4)
    assert eventually(lambda: waiting(server) >= 3)
    began = time.monotonic()
    assert server.client.get("/healthz").status_code == 200
    assert time.monotonic() - began < SECONDS
    for one in holding:
        one.join()


def test_a_failure_is_answered_without_its_reason(server, drawings):
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    failed = server.client.post("/v1/predict", content=file.getvalue(), headers=PNG)
    assert failed.status_code == 500
    assert failed.json()["type"] == "/docs#internal"
    assert "secret" not in failed.text
    assert server.logged("secret of the server")
    assert server.logged(failed.json()["request_id"])
    assert server.client.post("/v1/predict", content=drawings["ship.png"], headers=PNG).status_code == 200


def connect(server: ServerProcess) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), 10)


@pytest.mark.slow
def test_headers_that_do_not_end_are_given_up(server):
    for begun in (b"", b"GET /healthz HTTP/1.1\r\nHost:"):
        with connect(server) as connection:
            connection.sendall(begun)
            began = time.monotonic()
            assert connection.recv(100) == b""
            assert time.monotonic() - began < 5


def test_connections_are_bounded(server):
    held = [connect(server) for _ in range(60)]
    try:
        for one in held:
            one.settimeout(0.01)
        assert eventually(lambda: sum(map(closed, held)) >= 20, 0.4)
    finally:
        for one in held:
            one.close()
    assert eventually(lambda: server.client.get("/healthz").status_code == 200)


def closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_end_loses_no_request_that_was_accepted(drawings, number):
    with running(lambda: serve_slowly(grace=20, seconds=0.25, queue=64)) as server:
        expected = vitral.load("demo", precision="fp32")(drawings["ship.png"])
        clients = send(server, drawings["ship.png"], 8)
        assert eventually(lambda: waiting(server) >= 6)
        server.signal(number)
        assert eventually(lambda: server.client.get("/readyz").status_code == 503, 5)
        late = send(server, drawings["ship.png"], 2)  # still accepted: whoever balances load may not know yet
        for one in (*clients, *late):
            one.join()
        for one in clients:
            assert one.error is None
            assert one.answer.status_code == 200
            top = one.answer.json()["predictions"][0]["top"]
            assert np.allclose([each["probability"] for each in top], [p for _, p in expected.top(5)], atol=1e-6)
        for one in late:
            assert isinstance(one.error, httpx.ConnectError) or one.answer.status_code == 200
        assert server.wait() == (0 if number == signal.SIGTERM else 130)
        assert "Traceback" not in server.log
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/healthz", trust_env=False)


@pytest.mark.slow
def test_the_end_comes_within_its_grace(drawings):
    with running(lambda: serve_slowly(grace=1.5, queue=64)) as server:
        send(server, drawings["ship.png"], 30)  # twelve seconds
        assert eventually(lambda: waiting(server) >= 20)
        began = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.wait(10) == 0
        assert time.monotonic() - began < 4
