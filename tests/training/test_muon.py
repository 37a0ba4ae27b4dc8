"""Muon, batched by matrix shape, equals torch's Muon."""

from __future__ import annotations

import pytest
import torch

from vitral.training.optimizers.muon import Muon, newton_schulz

SMALL = ((16, 48), (48, 16), (16, 16), (16, 48), (48, 16), (24, 8), (1, 8))
REAL = ((1152, 384), (384, 384), (1152, 384), (1536, 384), (384, 1536), (256, 2304), (64, 288))
OPTIONS = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}


def matrices(shapes: tuple[tuple[int, int], ...]) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


@pytest.mark.parametrize(("shapes", "steps"), [(SMALL, 5), pytest.param(REAL, 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "within"), [(torch.bfloat16, 0.005), (torch.float32, 0.03)])
def test_it_equals_torchs_up_to_rounding(
    shapes: tuple[tuple[int, int], ...], steps: int, kind: torch.dtype, within: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch computes directions in bf16 on every device."""
    monkeypatch.setattr("vitral.training.optimizers.muon.has_bf16", lambda device: kind == torch.bfloat16)
    ours, theirs = matrices(shapes), matrices(shapes)
    optimizers = Muon(ours, **OPTIONS), torch.optim.Muon(theirs, **OPTIONS, adjust_lr_fn="match_rms_adamw")
    for step in range(steps):
        for number, both in enumerate(zip(ours, theirs, strict=True)):
            gradient = torch.randn(shapes[number], generator=torch.Generator().manual_seed(100 * step + number))
            for matrix in both:
                # one matrix never has a gradient, one has it sometimes
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
    same = u.mT @ found @ v.mT  # diagonal, if the singular vectors are kept
    assert (same - torch.diag_embed(same.diagonal(dim1=1, dim2=2))).abs().max() < 1e-3


@pytest.mark.parametrize(("flags", "kind"), [({"avx2"}, torch.float32), ({"avx512_bf16"}, torch.bfloat16)])
def test_the_dtype_of_directions_depends_on_the_cpu(flags, kind, monkeypatch) -> None:
    monkeypatch.setattr("vitral.device.cpu_flags", lambda: frozenset(flags))
    seen = []
    monkeypatch.setattr("vitral.training.optimizers.muon.newton_schulz", lambda x, *rest: seen.append(x.dtype) or x)
    moving = torch.nn.Parameter(torch.ones(4, 4))
    moving.grad = torch.ones(4, 4)
    Muon([moving], **OPTIONS).step()
    assert seen == [kind]


def test_missing_and_zero_gradients_are_valid() -> None:
    still = torch.nn.Parameter(torch.ones(4, 4))
    Muon([still], **OPTIONS).step()
    assert torch.equal(still, torch.ones(4, 4))
    assert not newton_schulz(torch.zeros(1, 4, 4), (3.4445, -4.7750, 2.0315), 5, 1e-7).any()
