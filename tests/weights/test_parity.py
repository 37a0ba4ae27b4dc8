"""Same weights in, same logits out, for every format and variant that is registered."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from parity import Case

from vitral.weights import native
from vitral.weights.formats import FORMATS
from vitral.weights.load import read

CASES: dict[str, Callable[[], Case]] = {
    name: make
    for module in sorted(Path(__file__).parent.glob("cases_*.py"))
    for name, make in importlib.import_module(module.stem).CASES.items()
}


def test_every_format_has_a_case():
    assert {name.partition("/")[0] for name in CASES} == set(FORMATS)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_source(name: str, tmp_path: Path, record_property: Callable[[str, object], None]):
    case = CASES[name]()
    source = case.write(tmp_path)
    worst = 0.0
    for size in case.sizes:
        changes = {} if size == case.sizes[0] else {"image_size": size}
        loaded = read(source, **case.options, **changes)
        assert loaded.format == name.partition("/")[0]
        assert loaded.weights.config.image == size
        images = torch.randn(2, case.channels, *size, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            ours, theirs = native.build(loaded.weights)(images), case.logits(images)
        assert ours.isfinite().all()
        worst = max(worst, float((ours - theirs).abs().max() / theirs.abs().max()))
        assert worst <= 1e-5, f"{name} at {size}: {worst:.1e}"
    record_property("worst", worst)
    told = {line.source: line for line in loaded.account.lines}
    assert len(told) == len(loaded.account.lines)
    assert {line.ours for line in told.values() if line.ours} | set(loaded.account.fresh) == set(loaded.weights.state)
    print(f"{name}: {len(told)} tensors, max difference {worst:.1e} of max |logit|")
