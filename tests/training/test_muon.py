"""Muon by matrices of one shape at a time is torch's Muon."""

from __future__ import annotations

import pytest
import torch

from vitral.training.muon import Muon, newton_schulz

SMALL = ((16, 48), (48, 16), (16, 16), (16, 48), (48, 16), (24, 8), (1, 8))
REAL = ((1152, 384), (384, 384), (1152, 384), (1536, 384), (384, 1536), (256, 2304), (64, 288))
OPTIONS = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}


def matrices(shapes: tuple[tuple[int, int], ...]) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


@pytest.mark.parametrize(("shapes", "steps"), [(SMALL, 5), (REAL, 2)])
@pytest.mark.parametrize(("kind", "within"), [(torch.bfloat16, 0.005), (torch.float32, 0.03)])
def test_it_is_torchs_but_for_rounding(
    shapes: tuple[tuple[int, int], ...], steps: int, kind: torch.dtype, within: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own computes directions in bf16 everywhere."""
    monkeypatch.setattr("vitral.training.muon.has_bf16", lambda device: kind == torch.bfloat16)
    ours, theirs = matrices(shapes), matrices(shapes)
    optimizers = Muon(ours, **OPTIONS), torch.optim.Muon(theirs, **OPTIONS, adjust_lr_fn="match_rms_adamw")
    for step in range(steps):
        for number, both in enumerate(zip(ours, theirs, strict=True)):
            gradient = torch.randn(shapes[number], generator=torch.Generator().manual_seed(100 * step + number))
            for matrix in both:
                # one never learns, one sometimes
                matrix.grad = None if number == 2 or (number == 3 and step % 2) else gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    start = matrices(shapes)
    for number, (one, other, before) in enumerate(zip(ours, theirs, start, strict=True)):
        assert torch.linalg.norm(one - other) <= within * torch.linalg.norm(other - before)
        assert torch.equal(one, before) == (number == 2)
    states = [[state["momentum_buffer"] for state in optimizer.state.values()] for optimizer in optimizers]
    assert len(states[0]) == len(shapes) - 1
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (16, 16)])
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    given = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    u, _, v = torch.linalg.svd(given, full_matrices=False)
    found = newton_schulz(given, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert found.shape == given.shape
    seen = torch.linalg.svdvals(found)
    assert (seen > 0.5).all()
    assert (seen < 1.3).all()
    same = u.mT @ found @ v.mT  # the singular vectors stay: nothing beside the diagonal
    assert (same - torch.diag_embed(same.diagonal(dim1=1, dim2=2))).abs().max() < 1e-3


@pytest.mark.parametrize(("flags", "kind"), [({"avx2"}, torch.float32), ({"avx512_bf16"}, torch.bfloat16)])
def test_directions_are_computed_in_what_the_processor_has(flags, kind, monkeypatch) -> None:
    monkeypatch.setattr("vitral.device._cpu_flags", lambda: frozenset(flags))
    seen = []
    monkeypatch.setattr("vitral.training.muon.newton_schulz", lambda x, *rest: seen.append(x.dtype) or x)
    moving = torch.nn.Parameter(torch.ones(4, 4))
    moving.grad = torch.ones(4, 4)
    Muon([moving], **OPTIONS).step()
    assert seen == [kind]


def test_nothing_to_learn_from_is_no_mistake() -> None:
    still = torch.nn.Parameter(torch.ones(4, 4))
    Muon([still], **OPTIONS).step()
    assert torch.equal(still, torch.ones(4, 4))
    assert not newton_schulz(torch.zeros(1, 4, 4), (3.4445, -4.7750, 2.0315), 5, 1e-7).any()
