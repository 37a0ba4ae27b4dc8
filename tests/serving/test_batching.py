"""Batches, places and decoding by themselves, without a network."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from vitral.inference.inputs import Item
from vitral.serving.batching import Batcher
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


def run(network: Network, test, size: int = 4, wait: float = 0.05):
    """Run `test(batcher)` in an event loop."""

    async def inside():
        with ThreadPoolExecutor(1) as thread:
            batcher = Batcher(network, thread, size=size, wait=wait)
            batcher.start()
            try:
                return await asyncio.wait_for(test(batcher), 20)
            finally:
                network.gate.set()
                await batcher.stop()

    return asyncio.run(inside())


def test_images_that_come_together_share_a_batch(network):
    async def test(batcher):
        return await asyncio.gather(batcher([image(1), image(2)]), batcher([image(3)]))

    assert run(network, test) == [[1, 2], [3]]
    assert network.batches == [[1, 2, 3]]


def test_a_full_batch_does_not_wait_and_none_is_larger(network):
    async def test(batcher):
        began = time.monotonic()
        assert await batcher([image(n) for n in range(8)]) == list(range(8))
        assert time.monotonic() - began < 5

    run(network, test, wait=1000)
    assert network.batches == [[0, 1, 2, 3], [4, 5, 6, 7]]


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
        assert len(batcher._waiting) == 1, "nothing of it is kept"
        network.gate.set()
        assert await first == [1]
        assert await stays == [4]

    run(network, test, wait=0)
    assert network.batches == [[1], [4]]


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


def test_decoding_has_a_time_and_its_thread_comes_back(drawings):
    uploads = [Item("ship.png", drawings["ship.png"])]
    let_go = threading.Event()

    def slow(data: bytes, name: str) -> torch.Tensor:
        let_go.wait(10)
        return image(1)

    async def test():
        decoder = Decoder(1, Limits(decode_seconds=0.1), Metrics())
        with pytest.raises(Problem, match="decoding takes more than") as refused:
            await decoder(slow, uploads)
        assert refused.value.more["errors"] == [
            {"index": 0, "image": "ship.png", "why": "decoding takes more than 0.1 seconds"}
        ]
        assert decoder._free.locked(), "the thread still decodes"
        let_go.set()
        assert len(await asyncio.wait_for(decoder(slow, uploads), 5)) == 1
        decoder.close()

    asyncio.run(test())
