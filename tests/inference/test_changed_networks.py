"""A network that its user changed is the one that is predicted: engines honor the change or step aside."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import vitral
from vitral.errors import UsageError, WeightsError
from vitral.inference.engines.compiled import unavailable_reason
from vitral.inference.engines.int8 import observe
from vitral.model.vit import MLP, Attention, Block

SIZES: dict[str, Any] = {
    "image_size": 16,
    "channels": 3,
    "classes": 3,
    "dim": 32,
    "depth": 2,
    "heads": 2,
    "mlp_dim": 64,
}
IMAGES = [np.random.default_rng(i).integers(0, 256, (16, 16, 3), dtype=np.uint8) for i in range(3)]


class Uniform(Attention):
    """Attend to all tokens alike."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return -2 * v.mean(2, keepdim=True).expand_as(v)


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def subclass(network: Any) -> None:
    for block in network.blocks:
        block.attn.__class__ = Uniform


def method_of_an_instance(network: Any) -> None:
    for block in network.blocks:
        block.attn.attend = lambda q, k, v, mask: -2 * v.mean(2, keepdim=True).expand_as(v)


def block_method(network: Any) -> None:
    network.blocks[0].mlp_branch = lambda x: x


def hook(network: Any) -> None:
    network.blocks[1].mlp.register_forward_hook(lambda module, given, out: 3 * out)


def parametrization(network: Any) -> None:
    parametrize.register_parametrization(network.blocks[0].mlp.fc1, "weight", Twice())


def replaced_part(network: Any) -> None:
    class Wide(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    network.blocks[0].mlp.__class__ = Wide


def backend(network: Any) -> None:
    def uniform(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, *, scale: float
    ) -> Tensor:
        return -2 * v.mean(2, keepdim=True).expand_as(v)

    for block in network.blocks:
        block.attn.backend = uniform


CHANGES: dict[str, Callable[[Any], None]] = {
    one.__name__: one
    for one in (subclass, method_of_an_instance, block_method, hook, parametrization, replaced_part, backend)
}


def network() -> Any:
    torch.manual_seed(0)
    found = vitral.create("mu/4", **SIZES).eval()
    for parameter in found.parameters():
        nn.init.normal_(parameter, std=0.5)
    return found


def predictor(model: nn.Module, **options: Any) -> vitral.Predictor:
    return vitral.Predictor(model, vitral.Preprocessing((16, 16)), ["a", "b", "c"], **options)


def logits(model: nn.Module) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(model(standardized()).softmax(1))


def standardized() -> Tensor:
    return vitral.Preprocessing((16, 16)).standardize(
        torch.stack([torch.from_numpy(i).permute(2, 0, 1) for i in IMAGES])
    )


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_changed_network_is_predicted(name, precision):
    changed, plain = network(), network()
    CHANGES[name](changed)
    wanted, before = logits(changed), logits(plain)
    assert np.abs(wanted - before).max() > 0.03, "the change shows"
    machine = vitral.device.choose("cpu", precision)
    found = predictor(changed, machine=machine)
    assert np.abs(found.probabilities(IMAGES) - wanted).max() < (1e-5 if precision == "fp32" else 0.025)
    assert found.engine == "plain"
    assert "computed by the network itself" in found.note


@pytest.mark.parametrize("name", CHANGES)
def test_an_engine_that_would_compute_another_network_is_refused(name):
    changed = network()
    CHANGES[name](changed)
    for engine in ("packed", "openvino"):
        with pytest.raises(UsageError, match=f"engine {engine} cannot compute this network"):
            predictor(changed, engine=engine)


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_network_is_not_rebuilt_from_its_weights(name):
    changed = network()
    CHANGES[name](changed)
    with pytest.raises(WeightsError, match="vitral cannot compute this network"):
        vitral.load(changed)


@pytest.mark.parametrize("name", ["subclass", "method_of_an_instance", "backend"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_computes_the_changed_attention(name, dtype):
    """Also where a kernel has q, k and v in one tensor."""
    changed = network().train()
    CHANGES[name](changed)
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    attention = changed.blocks[0].attn
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        found = attention(x)
        value = -2 * attention.qkv(x).view(2, 9, 3, 2, 16)[:, :, 2].mean(1, keepdim=True).expand(2, 9, 2, 16)
        wanted = attention.proj(value.flatten(2))
    torch.testing.assert_close(found, wanted, atol=1e-5 if dtype == torch.float32 else 0.05, rtol=0.02)


def test_a_patched_class_is_honored(monkeypatch):
    monkeypatch.setattr(Attention, "attend", Uniform.attend)
    changed = network()
    assert "'attend' of 'blocks.0.attn' was replaced" in predictor(changed).note
    assert np.abs(predictor(changed).probabilities(IMAGES) - logits(changed)).max() < 0.03


def test_an_unchanged_network_has_its_engine():
    assert predictor(network()).note == predictor(network(), engine="auto").note
    assert "computed by the network itself" not in predictor(network()).note
    assert isinstance(network().blocks[0], Block)


class Kept:
    """A hook that keeps what it sees, as an object."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def keep(self, module: nn.Module, given: Any, output: Tensor) -> None:
        self.seen.append(output.detach().float())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("engine", ["auto", "plain"])
def test_a_hook_that_comes_after_the_first_call_sees_every_further_one(engine, precision):
    found = predictor(network(), engine=engine, machine=vitral.device.choose("cpu", precision))
    before, chosen = found.probabilities(IMAGES), found.engine
    kept = Kept()
    handle = found.model.blocks[0].register_forward_hook(kept.keep)
    assert np.abs(found.probabilities(IMAGES) - before).max() < 0.04
    assert [tuple(one.shape) for one in kept.seen] == [(3, 17, 32)]
    assert found.engine == "plain"
    found.probabilities(IMAGES)
    assert len(kept.seen) == 2
    handle.remove()
    assert np.array_equal(found.probabilities(IMAGES), before)
    assert found.engine == chosen
    assert len(kept.seen) == 2


def test_a_method_that_is_replaced_after_the_first_call_is_computed():
    found = predictor(network())
    found.probabilities(IMAGES)
    method_of_an_instance(found.model)
    assert np.abs(found.probabilities(IMAGES) - logits(found.model)).max() < 0.04
    asked = predictor(network(), engine="packed")
    asked.probabilities(IMAGES)
    method_of_an_instance(asked.model)
    with pytest.raises(UsageError, match="engine packed cannot compute this network"):
        asked.probabilities(IMAGES)


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_network_is_not_quantized(name):
    plain, changed = network(), network()
    ranges = observe(plain, [standardized()])
    CHANGES[name](changed)
    with pytest.raises(UsageError, match="int8 cannot compute this network"):
        predictor(changed, ranges=ranges)


@pytest.mark.slow
@pytest.mark.skipif(bool(unavailable_reason(torch.device("cpu"))), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("name", CHANGES)
def test_the_changed_network_is_compiled(name):
    changed = network()
    CHANGES[name](changed)
    found = predictor(changed, engine="compiled", machine=vitral.device.choose("cpu", "fp32"))
    assert found.engine == "compiled"
    assert np.abs(found.probabilities(IMAGES) - logits(changed)).max() < 1e-5


def test_hooks_of_vitral_itself_leave_the_engine_as_it_is():
    """An explanation in another thread has hooks on the network for the length of a call."""
    found = predictor(network(), engine="packed")
    before = found.probabilities(IMAGES)

    def observer(*_: Any) -> None:
        return None

    observer.__module__ = "vitral.explanation.capture"
    found.model.blocks[0].register_forward_hook(observer)
    assert np.array_equal(found.probabilities(IMAGES), before)
    assert found.engine == "packed"


def methods() -> list[tuple[str, str]]:
    """List each module of a network by name with each method of its class that computes."""
    hidden = {"__init__", "extra_repr", "reset_parameters"}
    return [
        (name, one)
        for name, part in network().named_modules()
        if type(part).__module__.startswith("vitral") and "blocks.1" not in name
        for one, function in vars(type(part)).items()
        if isinstance(function, FunctionType) and one not in hidden
    ]


@pytest.mark.parametrize(("part", "name"), methods())
def test_no_method_of_the_network_is_replaced_unseen(part, name):
    changed = network()
    module = changed.get_submodule(part)
    own = getattr(module, name)
    setattr(module, name, lambda *given, **options: own(*given, **options))
    assert "computed by the network itself" in predictor(changed).note
