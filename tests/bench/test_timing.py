"""Alternating rounds, medians and memory, independent of the machine's speed."""

from __future__ import annotations

import pytest
import torch

from vitral.bench import memory
from vitral.bench.harness import Sample, alternate, matrix_product, ratio, repeated


@pytest.mark.parametrize(("names", "turns"), [("ab", ["ba", "ab", "ba", "ab"]), ("abc", ["cab", "abc", "bca", "cab"])])
def test_alternating_gives_every_program_its_rounds_and_no_first_place(names: str, turns: list[str]) -> None:
    calls: list[str] = []
    done: list[int] = []
    programs = {name: lambda name=name: calls.append(name) for name in names}
    found = alternate(programs, rounds=3, warm_up=1, progress=done.append)
    assert "".join(calls) == "".join(turns)
    assert {name: sample.n for name, sample in found.items()} == dict.fromkeys(names, 3)
    assert done == [1] * len(calls)


def test_a_ratio_is_one_of_medians() -> None:
    assert ratio(Sample((1.0, 4.0, 100.0)), Sample((2.0, 2.0, 0.1))) == 2.0


def test_columns_are_median_least_and_greatest() -> None:
    assert Sample((0.3, 0.1, 0.2)).columns(10) == {"n": 3, "median": 2.0, "least": 1.0, "greatest": 3.0}


def test_a_program_is_repeated() -> None:
    calls: list[int] = []
    repeated(lambda: calls.append(1), 5)()
    assert len(calls) == 5


def test_the_matrix_product_has_the_operations_that_are_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.inference_mode(False):
        product = matrix_product(16, torch.bfloat16, "cpu")()
    assert isinstance(product, torch.Tensor)
    assert (product.shape, product.dtype) == ((16, 16), torch.bfloat16)
    assert counter.get_total_flops() == 2 * 16**3


def test_memory_is_what_a_call_needs_on_top() -> None:
    kept = torch.ones(1 << 24)  # 64 MiB that were there before
    found = memory.growth(lambda: torch.ones(1 << 25).sum(), "cpu")
    if found is None:
        pytest.skip("this system does not tell")
    assert 0.9 * 2**27 < found < 1.5 * 2**27
    assert len(kept) == 1 << 24


def test_memory_that_was_freed_before_is_seen_again() -> None:
    """Without a release of the allocator's reserve a second call would seem to need nothing."""
    blocks = lambda: [torch.ones(1 << 14) for _ in range(1 << 10)]  # noqa: E731 - 64 MiB in pieces that are not mapped
    blocks()
    found = memory.growth(blocks, "cpu")
    if found is None:
        pytest.skip("this system does not tell")
    assert found > 0.8 * 2**26


def test_memory_of_a_system_that_does_not_tell_is_none(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_PROCESS", tmp_path / "none")
    calls: list[int] = []
    assert memory.growth(lambda: calls.append(1), "cpu") is None
    assert calls == [1], "it is run all the same"
