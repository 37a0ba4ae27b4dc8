"""Many requests of which every tenth is bad, and ends and reloads under load: nothing is lost, nothing grows.

`VITRAL_SOAK=1 pytest tests/serving/test_soak.py` sends 10,000 requests and ends and reloads servers 20 times.
"""

from __future__ import annotations

import base64
import re
import signal
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

import vitral
from running import soak
from serving.serverprocess import ServerProcess, eventually, running, serving
from vitral.demo import IMAGES
from vitral.serving.service import Service

PNG = {"Content-Type": "image/png"}
CLIENTS = 8
MIB = 1 << 20
GROWTH = 50 * MIB
"""Most memory that a server may gain after the first tenth of the requests."""


def serve_the_demo() -> int:
    """Serve as `vitral serve demo` does, with bounds that bad requests meet soon."""
    from vitral.cli.output import say
    from vitral.serving import protocol
    from vitral.serving.application import build
    from vitral.serving.auth import Access
    from vitral.serving.limits import Limits
    from vitral.serving.logs import configure
    from vitral.serving.server import address, bind, serve_on

    protocol.HEADER_SECONDS = 0.3
    configure("json")
    with bind("127.0.0.1", 0) as bound:
        limits = Limits(body=MIB, pixels=1_000_000)
        service = Service({"demo": "demo"}, Access(local=True), limits, {"precision": "fp32", "device": "cpu"})
        start_threads(service)
        return serve_on(bound, service, build(service), grace=20, started=lambda: say(f"Serving  {address(bound)}"))


def start_threads(service: Service) -> None:
    """Let every thread of a service decode an image: a pool starts one when it first needs it, and torch has threads
    of its own for each.
    """
    image = next(IMAGES.glob("*.png")).read_bytes()
    model = service.model(None)

    def work(together: threading.Barrier) -> None:
        together.wait(60)
        model.predictor.prepare(image, "image")

    for pool in (service._pool, service.decode._pool, model._thread):
        together = threading.Barrier(pool._max_workers)
        for one in [pool.submit(work, together) for _ in range(together.parties)]:
            one.result()


class Process:
    """Memory, descriptors and threads of a server."""

    def __init__(self, pid: int):
        status = Path(f"/proc/{pid}/status").read_text()
        self.memory = int(re.search(r"VmRSS:\s+(\d+)", status)[1]) << 10
        self.threads = int(re.search(r"Threads:\s+(\d+)", status)[1])
        self.descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))


def bomb() -> bytes:
    """A PNG of some bytes whose header has 10⁹ pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 40_000, 25_000, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def raw(server: ServerProcess, data: bytes, *, cut: bool = False) -> int | None:
    """The status of what is answered to these bytes; None if the server closes without a word, or is not waited for."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), 30) as connection:
        try:
            connection.sendall(data)
            answer = b"" if cut else connection.recv(1 << 16)
        except ConnectionError:
            return None
    return int(answer[9:12]) if answer else None


HEAD = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"
CUT = HEAD + b"Content-Length: 5000\r\n\r\n"
Bad = Callable[[ServerProcess, bytes], int | None]
BAD: dict[str, tuple[Bad, tuple[int | None, ...]]] = {
    "truncated": (lambda server, image: post(server, image[: len(image) // 2]), (422,)),
    "a bomb": (lambda server, image: post(server, bomb()), (422,)),
    "a wrong type": (lambda server, image: post(server, image, {"Content-Type": "text/plain"}), (415,)),
    "no image": (lambda server, image: post(server, b"GIF89a" + bytes(99)), (422,)),
    "too large": (lambda server, image: post(server, image + bytes(MIB)), (413,)),
    "bad JSON": (lambda server, image: post(server, b'{"image": "%%%"}', {"Content-Type": "application/json"}), (400,)),
    "huge headers": (lambda server, image: raw(server, HEAD + b"X-Fill: " + b"a" * 40_000), (431,)),
    "not HTTP": (lambda server, image: raw(server, b"\x16\x03\x01\x02\x00\x01\r\n\r\n"), (400,)),
    "slow-loris": (lambda server, image: raw(server, HEAD[:30]), (None,)),
    "cut off": (lambda server, image: raw(server, CUT + image[:100], cut=True), (None,)),
}
"""Kind of bad request → sends one and returns the status of its answer; the statuses that are right."""


def post(server: ServerProcess, data: bytes, headers: dict[str, str] = PNG) -> int:
    answer = httpx.post(f"{server.url}/v1/predict", content=data, headers=headers, timeout=60, trust_env=False)
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["detail"], "a reason"
    return answer.status_code


def send(server: ServerProcess, numbers: range, images: list[tuple[bytes, np.ndarray]]) -> list[str]:
    """Send requests with these numbers from several clients, every tenth of them bad; return what is wrong."""
    wrong: list[str] = []
    left = iter(numbers)

    def work() -> None:
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
            for number in left:
                image, expected = images[number % len(images)]
                try:
                    if number % 10 == 0:
                        kind = list(BAD)[number // 10 % len(BAD)]
                        bad, statuses = BAD[kind]
                        if (status := bad(server, image)) not in statuses:
                            wrong.append(f"{kind}: {status}")
                    else:
                        found = one_of_many(client, number, image)
                        if not np.allclose(found, expected, rtol=0, atol=1e-5):
                            wrong.append(f"{number}: {found} instead of {expected}")
                except Exception as error:
                    wrong.append(f"{number}: {error!r}")

    threads = [threading.Thread(target=work) for _ in range(CLIENTS)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return wrong


def one_of_many(client: httpx.Client, number: int, image: bytes) -> np.ndarray:
    """Probabilities in the order of names, asked for in one of three ways."""
    body = (
        {"content": image, "headers": PNG},
        {"files": {"image": image}},
        {"json": {"image": base64.b64encode(image).decode()}},
    )[number % 3]
    answer = client.post("/v1/predict?top=10", **body)
    assert answer.status_code == 200, answer.text
    return in_order((one["class"], one["probability"]) for one in answer.json()["predictions"][0]["top"])


def in_order(pairs: Iterator[tuple[str, float]]) -> np.ndarray:
    return np.array([probability for _, probability in sorted(pairs)])


@pytest.fixture(scope="module")
def images(drawings) -> list[tuple[bytes, np.ndarray]]:
    predictor = vitral.load("demo", precision="fp32", device="cpu")
    found = ((data, predictor(data)) for data in drawings.values())
    return [(data, in_order(zip(one.classes, one.probabilities, strict=True))) for data, one in found]


@pytest.mark.slow
def test_good_requests_are_answered_right_among_bad_ones_and_nothing_grows(images):
    count = soak(10_000, 1000)
    with running(serve_the_demo) as server:
        assert send(server, range(count // 10), images) == []
        assert eventually(lambda: server.metric("vitral_requests_in_flight") == 1)
        before = Process(server.pid)
        assert send(server, range(count // 10, count), images) == []
        assert eventually(lambda: Process(server.pid).descriptors <= before.descriptors)
        after = Process(server.pid)
        assert after.memory - before.memory < GROWTH
        assert after.threads <= before.threads
        assert server.metric('vitral_queue_images{model="demo"}') == 0
        assert server.metric("vitral_requests_in_flight") == 1, "this one"
        assert "Traceback" not in server.log
        assert not re.search(r'status="5\d\d"', server.client.get("/metrics").text)


class Traffic:
    """Clients that ask with a connection for each request, until `stop`."""

    def __init__(self, server: ServerProcess, image: bytes):
        self.server, self.image = server, image
        self.done = threading.Event()
        self.statuses: list[int] = []
        self.broken: list[httpx.HTTPError] = []
        self.threads = [threading.Thread(target=self._work, daemon=True) for _ in range(CLIENTS)]
        for one in self.threads:
            one.start()
        assert eventually(lambda: len(self.statuses) > CLIENTS)

    def _work(self) -> None:
        while not self.done.is_set():
            try:
                url = f"{self.server.url}/v1/predict"
                answer = httpx.post(url, content=self.image, headers=PNG, timeout=60, trust_env=False)
                self.statuses.append(answer.status_code)
            except httpx.HTTPError as error:
                self.broken.append(error)

    def stop(self) -> None:
        self.done.set()
        for one in self.threads:
            one.join()


@pytest.mark.slow
def test_reloads_under_load_lose_nothing(write_run, tmp_path, drawings):
    times = soak(20, 5)
    run = write_run(tmp_path / "sky", seed=0)
    with serving(str(run), "--precision", "fp32") as server:
        traffic = Traffic(server, drawings["ship.png"])
        versions = set()
        for seed in range(1, times + 1):
            loaded = server.metric('vitral_reloads_total{model="sky",result="loaded"}')
            write_run(run, seed=seed)
            server.signal(signal.SIGHUP)
            assert eventually(lambda: server.metric('vitral_reloads_total{model="sky",result="loaded"}') > loaded)  # noqa: B023
            versions.add(server.client.get("/v1/models").json()["models"][0]["version"])
        traffic.stop()
        assert len(versions) == times
        assert set(traffic.statuses) == {200}
        assert not traffic.broken


@pytest.mark.slow
def test_ends_under_load_lose_nothing(write_run, tmp_path, drawings):
    """Every request that the server began was answered with 200, and the answer arrived."""
    run = write_run(tmp_path / "sky", seed=0)
    for _ in range(soak(20, 5)):
        with serving(str(run), "--precision", "fp32", "--grace", "5") as server:
            traffic = Traffic(server, drawings["ship.png"])
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
            traffic.stop()
            answered = [line for line in server.lines if "POST /v1/predict" in line]
            assert all("POST /v1/predict 200" in line for line in answered)
            assert len(answered) == len(traffic.statuses)
            assert set(traffic.statuses) == {200}
