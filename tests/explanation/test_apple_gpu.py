"""Apple GPUs have no float64. A CPU plays one: float64 of what the network computes is an error until `cpu()`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import vitral
from images import noise
from vitral import device
from vitral.explanation import faithfulness
from vitral.explanation.inspect import cka
from vitral.explanation.methods import METHODS, fullgrad


class AppleGpu(TorchDispatchMode):
    """Follows the tensors that are computed from parameters, and refuses float64 among them."""

    def __init__(self) -> None:
        super().__init__()
        self.there: dict[int, weakref.ref[Tensor]] = {}

    def has(self, x: object) -> bool:
        known = self.there.get(id(x))
        return isinstance(x, nn.Parameter) or (known is not None and known() is x)

    def leave(self, x: Tensor) -> Tensor:
        copy = x.clone()
        self.there.pop(id(copy), None)
        return copy

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if any(self.has(one) for one in tree_leaves((args, kwargs))):
            for made in (one for one in tree_leaves(result) if isinstance(one, Tensor)):
                if made.dtype == torch.float64:
                    raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
                self.there[id(made)] = weakref.ref(made)
        return result


@pytest.fixture
def apple(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gpu = AppleGpu()
    monkeypatch.setattr(Tensor, "cpu", lambda x, *given: gpu.leave(x))
    for module in (device, cka):  # the branch for mps, which a CPU cannot take
        monkeypatch.setattr(module, "to_float64", lambda x: x.cpu().double())
    with gpu:
        yield


@pytest.fixture
def image() -> np.ndarray:
    return noise(0, (48, 64))


@pytest.mark.parametrize("method", [None, *METHODS])
def test_every_method_explains(apple, image, method):
    predictor = vitral.load("demo", device="cpu", precision="fp32")
    entry = METHODS[method or fullgrad.FULLGRAD.name]
    if entry.any_network and entry.passes(196) > 100:
        pytest.skip("the same operations, hundreds of times")
    (heatmap,) = vitral.explain(predictor, image, method=method)
    assert np.isfinite(heatmap.values).all()


def test_a_network_is_inspected(apple, image):
    found = vitral.inspect("demo", data=torch.rand(8, 3, 32, 32), device="cpu", images=8)
    assert found.to_json()


def test_faithfulness_is_measured(apple):
    maps = torch.rand(2, 4, 4)
    assert faithfulness.rank_correlation(maps, maps).tolist() == [1.0, 1.0]


def test_types_of_devices():
    assert device.widest(torch.device("mps")) == torch.float32
    assert device.widest(torch.device("cuda")) == device.widest(torch.device("cpu")) == torch.float64
    x, y = torch.rand(2, 3, 5), torch.rand(2, 3, 5)
    assert torch.equal(device.dot_float64(x, y), (x.double() * y.double()).sum(-1))
