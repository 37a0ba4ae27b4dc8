"""Maps do not depend on the modes of torch that the caller is in, nor on wrappers and precision of the network."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import vitral
from running import TINY
from vitral.errors import UsageError
from vitral.explanation.methods import METHODS

FEW: dict[str, dict[str, Any]] = {
    "rise": {"masks": 8},
    "smoothgrad": {"samples": 2},
    "integrated-gradients": {"steps": 2},
}


@contextlib.contextmanager
def doubles() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES: dict[str, Any] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference": torch.inference_mode,
    "no-grad": torch.no_grad,
    "doubles": doubles,
}
WRAPPERS: dict[str, Any] = {
    "compiled": lambda network: torch.compile(network, backend="eager"),
    "parallel": nn.DataParallel,
    "double": lambda network: copy.deepcopy(network).double(),
}


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"image_size": 16, "channels": 3, "classes": 3, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 32}
    found = vitral.create("mu/4", **sizes).eval()
    for parameter in found.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return found


def images() -> torch.Tensor:
    return (
        torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float32) * 1
    )  # made in the current mode


def maps(network: nn.Module, method: str) -> np.ndarray:
    return np.stack([one.values for one in vitral.explain(network, images(), 0, method=method, **FEW.get(method, {}))])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", METHODS)
def test_modes_of_the_caller_change_nothing(method, mode, network):
    wanted = maps(network, method)
    with MODES[mode]():
        assert np.array_equal(maps(network, method), wanted)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("method", METHODS)
def test_a_wrapped_and_a_double_network_have_the_same_maps(method, wrapper, network):
    wanted = maps(network, method)
    found = maps(WRAPPERS[wrapper](network), method)
    assert np.allclose(found, wanted, rtol=1e-3, atol=1e-5 * np.abs(wanted).max())


def test_images_with_nan_are_refused(network):
    given = images()
    given[1, 0, 3, 3] = torch.nan
    with pytest.raises(UsageError, match="NaN or infinite"):
        vitral.explain(network, given)


def test_a_predictor_loaded_under_inference_mode_has_gradients(network):
    with torch.inference_mode():
        predictor = vitral.load(network)
    (found,) = vitral.explain(predictor, np.zeros((16, 16, 3), np.uint8), 0, method="input-gradient")
    assert np.isfinite(found.values).all()


@pytest.mark.parametrize("mode", MODES)
def test_training_has_the_same_bits_in_every_mode(mode, make_images, tmp_path):
    photos = make_images({"a": 6, "b": 6})
    options = {**TINY, "epochs": 1, "val_fraction": 0.3, "quiet": True}
    wanted = vitral.train(str(photos), out=str(tmp_path / "plain"), **options)
    with MODES[mode]():
        found = vitral.train(str(photos), out=str(tmp_path / "there"), **options)
    one, other = (vitral.load(run.folder).model.state_dict() for run in (wanted, found))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.is_grad_enabled()
