"""An HTTP client that loads a server: a number of connections in turn, or arrivals at a rate. One thread, no library:
it shares its cores with the server that it measures.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

MOST_CONNECTIONS = 900
"""Connections of an open loop at a time; an arrival beyond them waits, and its wait counts."""


@dataclass(frozen=True)
class Answer:
    """One answered request. `status` is 0 if the connection broke before the answer was whole."""

    status: int
    due: float
    """Seconds after the beginning, when the request was due."""
    seconds: float
    """Time from then to the whole answer."""


def request(url: str, path: str, body: bytes, kind: str = "image/jpeg") -> bytes:
    """Format a POST of `body` to a server."""
    head = f"POST {path} HTTP/1.1\r\nHost: {_address(url)[2]}\r\nContent-Type: {kind}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def multipart(url: str, path: str, images: Sequence[bytes], field: str = "image") -> bytes:
    """Format a POST of several images as files."""
    parts = [
        f'--part\r\nContent-Disposition: form-data; name="{field}"; filename="{number}.jpg"\r\n'
        "Content-Type: image/jpeg\r\n\r\n".encode()
        + image
        + b"\r\n"
        for number, image in enumerate(images)
    ]
    return request(url, path, b"".join([*parts, b"--part--\r\n"]), "multipart/form-data; boundary=part")


def closed_loop(url: str, requests: Sequence[bytes], connections: int) -> list[Answer]:
    """Send all requests over so many connections, each of which waits for its answer before it sends the next."""

    async def run() -> list[Answer]:
        left, began = iter(requests), time.perf_counter()

        async def one() -> list[Answer]:
            connection = _Connection(url)
            answers = [await connection.ask(data, began, time.perf_counter() - began) for data in left]
            connection.close()
            return answers

        return [each for part in await asyncio.gather(*(one() for _ in range(connections))) for each in part]

    return asyncio.run(run())


def open_loop(url: str, requests: Sequence[bytes], rate: float, seed: int = 0) -> list[Answer]:
    """Send all requests at random times (Poisson), on average `rate` in a second, without waiting for answers."""

    async def run() -> list[Answer]:
        times, free, began = random.Random(seed), list[_Connection](), time.perf_counter()
        places, due = asyncio.Semaphore(MOST_CONNECTIONS), 0.0

        async def one(data: bytes, due: float) -> Answer:
            async with places:
                connection = free.pop() if free else _Connection(url)
                answer = await connection.ask(data, began, due)
                free.append(connection)
                return answer

        tasks = []
        for data in requests:
            due += times.expovariate(rate)
            while (wait := due - (time.perf_counter() - began)) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(data, due)))
            await asyncio.sleep(0)
        answers = await asyncio.gather(*tasks)
        for connection in free:
            connection.close()
        return list(answers)

    return asyncio.run(run())


def _address(url: str) -> tuple[str, int, str]:
    name = url.removeprefix("http://").rstrip("/")
    host, _, port = name.rpartition(":")
    return host, int(port), name


class _Connection(asyncio.Protocol):
    """A connection that is opened again after it was closed."""

    def __init__(self, url: str):
        self._host, self._port, _ = _address(url)
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._expected, self._last = -1, False
        self._answer: asyncio.Future[int] | None = None

    async def ask(self, data: bytes, began: float, due: float) -> Answer:
        """Send a request and wait for its answer."""
        loop = asyncio.get_running_loop()
        self._answer, self._expected = loop.create_future(), -1
        self._received.clear()
        status = 0
        try:
            if self._transport is None or self._transport.is_closing():
                await loop.create_connection(lambda: self, self._host, self._port)
            assert self._transport is not None
            self._transport.write(data)
            status = await self._answer
        except OSError:
            pass
        return Answer(status, due, time.perf_counter() - began - due)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(0)

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        if self._expected < 0:
            end = received.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(received[:end]).lower()
            self._expected = end + 4 + int(head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])
            self._last = b"\r\nconnection: close" in head
        if len(received) >= self._expected and self._answer is not None and not self._answer.done():
            self._answer.set_result(int(received[9:12]))
            if self._last:
                self.close()
