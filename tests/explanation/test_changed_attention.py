"""Methods that read attention refuse one that its user changed; the others explain the changed network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vitral
from vitral.errors import UsageError
from vitral.explanation.methods import METHODS
from vitral.model.vit import Attention


def uniform(v: Tensor) -> Tensor:
    return v.mean(2, keepdim=True).expand_as(v)


class Uniform(Attention):
    """Attend to all tokens alike."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return uniform(v)


def subclass(attention: Any) -> None:
    attention.__class__ = Uniform


def method(attention: Any) -> None:
    attention.attend = lambda q, k, v, mask: uniform(v)


def backend(attention: Any) -> None:
    def product(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return uniform(v)

    attention.backend = product


CHANGES: tuple[Callable[[Any], None], ...] = (subclass, method, backend)


def network() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"image_size": 16, "channels": 3, "classes": 3, "dim": 32, "depth": 2, "heads": 2}
    found = vitral.create("mu/4", **sizes).eval()
    for parameter in found.parameters():
        nn.init.normal_(parameter, std=0.3)
    return found


IMAGES = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", METHODS)
def test_a_changed_attention_is_explained_as_it_is_or_refused(name: str, change: Callable[[Any], None]) -> None:
    changed = network()
    for block in changed.blocks:
        change(block.attn)
    before = [dict(vars(block.attn)) for block in changed.blocks]
    if METHODS[name].any_network or (change is backend and name == "fullgrad+"):  # which computes by any backend
        (found,) = vitral.explain(changed, IMAGES, 0, method=name)
        with torch.no_grad():
            wanted = changed(IMAGES).softmax(1)[0, 0]
        assert found.probability == pytest.approx(float(wanted), abs=1e-5)
        (plain,) = vitral.explain(network(), IMAGES, 0, method=name)
        assert not np.allclose(found.values, plain.values, atol=1e-4), "a map of the unchanged network"
    else:
        with pytest.raises(UsageError, match=r"so it is not softmax\(q kᵀ\)"):
            vitral.explain(changed, IMAGES, 0, method=name)
    assert [dict(vars(block.attn)) for block in changed.blocks] == before
