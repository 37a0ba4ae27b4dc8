"""Batches, places and decoding by themselves, without a network."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from vitral.inference.inputs import Item
from vitral.serving.batching import Batcher, Ticket, settle
from vitral.serving.decoding import Decoder
from vitral.serving.limits import Limits, Places
from vitral.serving.metrics import Metrics
from vitral.serving.problems import Problem


def image(value: int) -> torch.Tensor:
    return torch.full((1, 2, 2), value, dtype=torch.uint8)


class Network:
    """Answers with the first pixel of each image; `gate` lets it compute, `batches` are what it was given."""

    def __init__(self):
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, images: torch.Tensor) -> list[int]:
        values = images[:, 0, 0, 0].tolist()
        self.batches.append(values)
        self.gate.wait(10)
        if 13 in values:
            raise ValueError("13")
        return values


@pytest.fixture
def network():
    return Network()


class Batches:
    """A batcher in an event loop: a call gives it images, as requests do, and returns their answers."""

    def __init__(self, network: Network, size: int, wait: float):
        self.thread = ThreadPoolExecutor(1)
        self.accepted = 0
        self.inner = Batcher(network, self.thread, size=size, wait=wait, accepted=lambda: self.accepted)

    async def __call__(self, images: list[torch.Tensor]) -> list[int]:
        loop = asyncio.get_running_loop()
        tickets = [Ticket(Item("", b""), loop.create_future(), image=one) for one in images]
        self.accepted += len(tickets)
        for one in tickets:
            self.inner.put(one)
        try:
            return await asyncio.gather(*(one.answer for one in tickets))
        finally:
            self.accepted -= len(tickets)


def run(network: Network, test, size: int = 4, wait: float = 0.05):
    """Run `test(batcher)` in an event loop."""

    async def inside():
        batcher = Batches(network, size, wait)
        with batcher.thread:
            try:
                return await asyncio.wait_for(test(batcher), 20)
            finally:
                network.gate.set()
                batcher.inner.stop()

    return asyncio.run(inside())


def test_images_that_come_together_share_a_batch(network):
    async def test(batcher):
        batcher.accepted = 1  # one that is still being decoded
        return await asyncio.gather(batcher([image(1), image(2)]), batcher([image(3)]))

    assert run(network, test) == [[1, 2], [3]]
    assert network.batches == [[1, 2, 3]]


def test_an_image_does_not_wait_where_no_other_is_on_its_way(network):
    async def test(batcher):
        return await batcher([image(1)])

    assert run(network, test, wait=1000) == [1]


def test_a_full_batch_does_not_wait_and_none_is_larger(network):
    async def test(batcher):
        batcher.accepted = 100
        assert await batcher([image(n) for n in range(8)]) == list(range(8))

    run(network, test, wait=1000)
    assert network.batches == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_images_are_decoded_and_computed_while_the_event_loop_is_busy(network):
    """Under a flood a turn of the loop takes long: only answers wait for it."""

    async def test(batcher):
        batcher.accepted = 100
        asked = asyncio.create_task(batcher([image(1), image(2)]))
        await asyncio.sleep(0)
        end = time.monotonic() + 10
        while not network.batches and time.monotonic() < end:
            time.sleep(0.001)  # blocks the loop
        assert network.batches == [[1, 2]]
        return await asked

    assert run(network, test) == [1, 2]


def test_the_next_batch_fills_while_one_is_computed(network):
    async def test(batcher):
        network.gate.clear()
        first = asyncio.create_task(batcher([image(1)]))
        while not network.batches:
            await asyncio.sleep(0.001)
        rest = [asyncio.create_task(batcher([image(n)])) for n in (2, 3, 4)]
        await asyncio.sleep(0.01)
        network.gate.set()
        await asyncio.gather(first, *rest)

    run(network, test, wait=0)
    assert network.batches == [[1], [2, 3, 4]]


def test_what_is_canceled_is_not_computed(network):
    async def test(batcher):
        network.gate.clear()
        first = asyncio.create_task(batcher([image(1)]))
        while not network.batches:
            await asyncio.sleep(0.001)
        left, stays = asyncio.create_task(batcher([image(2), image(3)])), asyncio.create_task(batcher([image(4)]))
        await asyncio.sleep(0.01)
        left.cancel()
        await asyncio.wait({left})
        network.gate.set()
        assert await first == [1]
        assert await stays == [4]

    run(network, test, wait=0)
    assert network.batches == [[1], [4]]


def test_images_that_wait_at_the_end_are_canceled(network):
    async def test(batcher):
        network.gate.clear()
        first = asyncio.create_task(batcher([image(1)]))
        while not network.batches:
            await asyncio.sleep(0.001)
        waiting = asyncio.create_task(batcher([image(2)]))
        await asyncio.sleep(0.01)
        batcher.inner.stop()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        network.gate.set()
        assert await first == [1]

    run(network, test, wait=0)
    assert network.batches == [[1]]


def test_an_error_belongs_to_its_batch(network):
    async def test(batcher):
        with pytest.raises(ValueError, match="13"):
            await batcher([image(13)])
        assert await batcher([image(5)]) == [5]

    run(network, test)


def test_places():
    places = Places(3, lambda: Problem("queue-full", "full"))
    with places.taken(2):
        with pytest.raises(Problem, match="full"), places.taken(2):
            pass
        with places.taken(1):
            assert places.used == 3
    assert places.used == 0


def answered(ticket: Ticket) -> None:
    """Settle a ticket with its image, as a batch would."""
    settle([ticket], [ticket.image])


def test_decoding_has_a_time_and_its_thread_comes_back(drawings):
    uploads = [Item("ship.png", drawings["ship.png"])]
    let_go = threading.Event()

    def slow(data: bytes, name: str) -> torch.Tensor:
        let_go.wait(10)
        return image(1)

    async def test():
        decoder = Decoder(1, Limits(decode_seconds=0.1), Metrics())
        with pytest.raises(Problem, match="decoding takes more than") as refused:
            await decoder(slow, uploads, answered)
        assert refused.value.more["errors"] == [
            {"index": 0, "image": "ship.png", "why": "decoding takes more than 0.1 seconds"}
        ]
        next_one = asyncio.create_task(decoder(slow, uploads, answered))
        await asyncio.sleep(0.3)
        assert not next_one.done(), "it waits for the thread, which is no time of its own"
        let_go.set()
        assert len(await asyncio.wait_for(next_one, 5)) == 1
        decoder.close()

    asyncio.run(test())


def test_what_is_canceled_is_not_decoded(drawings):
    uploads = [Item("ship.png", drawings["ship.png"])]
    let_go, decoded = threading.Event(), []

    def slow(data: bytes, name: str) -> torch.Tensor:
        decoded.append(name)
        let_go.wait(10)
        return image(1)

    async def test():
        decoder = Decoder(1, Limits(), Metrics())
        first = asyncio.create_task(decoder(slow, uploads, answered))
        while not decoded:
            await asyncio.sleep(0.001)
        left = asyncio.create_task(decoder(slow, uploads, answered))
        await asyncio.sleep(0.01)
        left.cancel()
        await asyncio.wait({left})
        let_go.set()
        assert len(await first) == 1
        assert len(await decoder(slow, uploads, answered)) == 1
        decoder.close()

    asyncio.run(test())
    assert decoded == ["ship.png"] * 2
