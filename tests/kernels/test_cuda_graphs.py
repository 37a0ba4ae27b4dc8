"""CUDA graphs of predictions, with a repeated program in place of a GPU's graph (tests/test_gpu.py tests those)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitral.errors import UsageError
from vitral.inference.engines.compiled import Compiled
from vitral.inference.tta import averaged
from vitral.kernels.cuda_graphs import MAX_BATCH, MAX_GRAPHS, Graphed
from vitral.model import create


class Recorder:
    """Captures a call: nothing is computed until replay, which writes to the same memory."""

    def __init__(self, fails: Exception | None = None):
        self.recorded, self.repeated, self.fails = 0, 0, fails

    def __call__(self, program: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        if self.fails:
            raise self.fails
        self.recorded += 1
        place = torch.full_like(program(), torch.nan)

        def again() -> None:
            self.repeated += 1
            place.copy_(program())

        return again, place


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3).requires_grad_(False)


def random_images(count: int) -> Tensor:
    return torch.randn(count, 4)


@torch.inference_mode()
def test_each_batch_size_is_captured_once(network):
    record = Recorder()
    graphed = Graphed(network, record)
    for _ in range(5):
        for count in (1, 3):
            images = random_images(count)
            assert torch.equal(graphed(images), network(images))
    assert (record.recorded, record.repeated) == (2, 6)


@torch.inference_mode()
def test_earlier_results_are_kept(network):
    graphed = Graphed(network, Recorder())
    batches = [random_images(2) for _ in range(6)]
    given = [graphed(images) for images in batches]
    for images, logits in zip(batches, given, strict=True):
        assert torch.equal(logits, network(images))


@torch.inference_mode()
def test_large_batches_and_too_many_sizes_stay_eager(network):
    record = Recorder()
    graphed = Graphed(network, record)
    for count in [MAX_BATCH + 1] * 4 + [count for count in range(1, MAX_GRAPHS + 4) for _ in range(4)]:
        images = random_images(count)
        assert torch.equal(graphed(images), network(images))
    assert record.recorded == MAX_GRAPHS


@torch.inference_mode()
def test_without_memory_for_a_graph_it_stays_eager(network):
    graphed = Graphed(network, Recorder(fails=torch.OutOfMemoryError("no room")))
    for _ in range(5):
        images = random_images(2)
        assert torch.equal(graphed(images), network(images))


@torch.inference_mode()
def test_a_failed_capture_is_an_error_with_a_hint(network):
    graphed = Graphed(network, Recorder(fails=RuntimeError("operation not permitted")))
    for _ in range(2):
        graphed(random_images(1))
    with pytest.raises(UsageError, match="cannot be captured") as caught:
        graphed(random_images(1))
    assert "--engine plain" in str(caught.value)


@torch.inference_mode()
@pytest.mark.parametrize("engine", [Graphed, Compiled])
@pytest.mark.parametrize("tta", ["mirror", "shifts"])
def test_tta_stays_in_evaluation_mode(monkeypatch, engine, tta):
    """In training mode it would apply dropout and update norms."""
    monkeypatch.setattr(torch, "compile", lambda network: network)
    torch.manual_seed(0)
    network = create("C+mu/4", classes=3, image_size=8, dropout=0.5).eval()
    network.head.weight.normal_()
    images = torch.randn(2, 3, 8, 8)
    wanted = averaged(network, tta)(images)
    found = averaged(engine(network, Recorder()) if engine is Graphed else engine(network), tta)
    for _ in range(3):
        torch.testing.assert_close(found(images), wanted)
    assert not network.training


def test_threads_do_not_interfere(network):
    graphed = Graphed(network, Recorder())

    @torch.inference_mode()
    def right(number: int) -> bool:
        images = torch.full((1, 4), float(number))
        return torch.equal(graphed(images), network(images))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(right, range(200)))
