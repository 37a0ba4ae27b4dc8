"""Predictions that are recorded, where a program that runs again stands for a GPU's recording (tests/test_gpu.py has
that).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitral.compiler import Compiled
from vitral.errors import UsageError
from vitral.graphs import FEW, MOST, Graphed
from vitral.model import create
from vitral.model.views import averaged


class Recorder:
    """Records a network's call: nothing is computed until it is repeated, which writes to the same place."""

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


def pictures(count: int) -> Tensor:
    return torch.randn(count, 4)


@torch.inference_mode()
def test_each_number_of_pictures_is_recorded_once(network):
    record = Recorder()
    graphed = Graphed(network, record)
    for _ in range(5):
        for count in (1, 3):
            images = pictures(count)
            assert torch.equal(graphed(images), network(images))
    assert (record.recorded, record.repeated) == (2, 6)


@torch.inference_mode()
def test_what_was_given_stays(network):
    graphed = Graphed(network, Recorder())
    batches = [pictures(2) for _ in range(6)]
    given = [graphed(images) for images in batches]
    for images, logits in zip(batches, given, strict=True):
        assert torch.equal(logits, network(images))


@torch.inference_mode()
def test_many_pictures_and_many_numbers_are_computed_as_always(network):
    record = Recorder()
    graphed = Graphed(network, record)
    for count in [FEW + 1] * 4 + [count for count in range(1, MOST + 4) for _ in range(4)]:
        images = pictures(count)
        assert torch.equal(graphed(images), network(images))
    assert record.recorded == MOST


@torch.inference_mode()
def test_without_room_for_a_recording_all_is_as_always(network):
    graphed = Graphed(network, Recorder(fails=torch.OutOfMemoryError("no room")))
    for _ in range(5):
        images = pictures(2)
        assert torch.equal(graphed(images), network(images))


@torch.inference_mode()
def test_what_cannot_be_recorded_is_an_error_that_says_what_to_type(network):
    graphed = Graphed(network, Recorder(fails=RuntimeError("operation not permitted")))
    for _ in range(2):
        graphed(pictures(1))
    with pytest.raises(UsageError, match="cannot be recorded") as caught:
        graphed(pictures(1))
    assert "--engine plain" in str(caught.value)


@torch.inference_mode()
@pytest.mark.parametrize("engine", [Graphed, Compiled])
@pytest.mark.parametrize("tta", ["mirror", "shifts"])
def test_views_are_averaged_by_a_network_that_predicts(monkeypatch, engine, tta):
    """In the mode of training it would drop what it is to answer from, and learn of the pictures."""
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


def test_threads_do_not_meet(network):
    graphed = Graphed(network, Recorder())

    @torch.inference_mode()
    def right(number: int) -> bool:
        images = torch.full((1, 4), float(number))
        return torch.equal(graphed(images), network(images))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(right, range(200)))
