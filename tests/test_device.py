"""Device, precision and seeds."""

from __future__ import annotations

import pytest
import torch

from vitral import device
from vitral.device import choose, cores, derive_seed, memory_bytes, seed_everything, seeded
from vitral.errors import UsageError


def test_what_was_asked_for_is_chosen():
    for precision in ("fp32", "bf16"):
        machine = choose("cpu", precision, dim=8)
        assert (machine.device.type, machine.precision, machine.reason) == ("cpu", precision, "you asked")


@pytest.mark.parametrize(
    ("flags", "dim", "precision"),
    [({"avx512_bf16"}, 64, "bf16"), ({"amx_bf16"}, None, "bf16"), ({"avx2"}, 64, "fp32"), ({"avx512_bf16"}, 8, "fp32")],
)
def test_auto_takes_bf16_only_where_it_gains(monkeypatch, flags, dim, precision):
    monkeypatch.setattr(device, "_cpu_flags", lambda: frozenset(flags))
    machine = choose("cpu", "auto", dim=dim)
    assert machine.precision == precision
    assert machine.reason != "you asked"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("cpu", "fp16"), "100 times slower"),
        (("cpu", "double"), "unknown precision 'double'"),
        (("gpu", "auto"), "unknown device 'gpu'"),
        (("cuda:77", "auto"), "no device 'cuda:77' on this machine"),
        (("meta", "auto"), "no device 'meta'"),
    ],
)
def test_refusals_say_what_to_type(arguments, said):
    with pytest.raises(UsageError, match=said) as caught:
        choose(*arguments)
    assert "try: --" in str(caught.value)


def test_autocast_is_bf16_only_where_chosen():
    x = torch.ones(2, 2)
    with choose("cpu", "bf16").autocast():
        assert (x @ x).dtype == torch.bfloat16
    with choose("cpu", "fp32").autocast():
        assert (x @ x).dtype == torch.float32


def test_seeds_are_a_function_of_every_part():
    parts = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 1), (-1,), (2**32 - 2,)]
    seeds = [derive_seed(*p) for p in parts]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(3, 4) == derive_seed(3, 4)


def test_seeded_leaves_the_outer_generator_alone():
    seed_everything(5)
    expected = torch.rand(2)
    seed_everything(5)
    first = torch.rand(1)
    with seeded(1, 2, 3):
        inner = torch.rand(3)
    assert torch.equal(torch.cat([first, torch.rand(1)]), expected)
    with seeded(1, 2, 3):
        assert torch.equal(torch.rand(3), inner)


def test_the_machine_is_described():
    assert "1 thread" in choose("cpu").name
    assert cores() >= 1
    assert memory_bytes() > 1 << 28
