"""Parameter counts of every name in the tables. A name without a line here fails the suite."""

from __future__ import annotations

import pytest
import torch

from vitral.model import SIZES, WRITE_UPS, create, summarize

# With a class token and 1000 classes at 224 pixels unless said otherwise.
PUBLISHED = {  # torchvision's `num_params` and the paper's Table 1
    "Ti/16": 5_717_416,
    "S/16": 22_050_664,
    "S/32": 22_878_952,
    "B/16": 86_567_656,
    "B/16@384": 86_859_496,
    "B/32": 88_224_232,
    "B/8": 86_576_872,
    "L/16": 304_326_632,
    "L/16@384": 304_715_752,
    "L/32": 306_535_400,
    "H/14": 632_045_800,
}
OURS = {
    "mu/16": 76_712,
    "Pico/16": 426_920,
    "Nano/16": 1_442_664,
    "M/16": 38_837_736,
    "b/16": 22_050_664,
    "So400m/14": 413_597_656,
    "g/14": 1_012_611_432,
    "g-opt/14": 1_136_101_864,
    "G/14": 1_844_440_680,
    "G-opt/14": 1_664_842_216,
    "e/14": 3_807_214_312,
}
MILLIONS = {"g/14": 1_012.6, "G/14": 1_844.4, "e/14": 3_807.2, "So400m/14": 413.6, "H/14": 632, "L/16": 304.3}
WRITTEN = {  # total, and what is left without the bare parameters, as the write-ups' tools count
    "einops-b16": (86_567_656, 86_415_592),
    "mnist-7562": (7_850, 7_562),
    "tensordot-b16": (86_567_656, 86_415_592),
    "places365-postnorm": (86_079_341, 85_927_277),
    "timm-small-128": (422_538, 397_194),
}


def test_every_name_has_a_line():
    assert {name.partition("/")[0] for name in PUBLISHED | OURS} == set(SIZES)
    assert set(WRITTEN) == set(WRITE_UPS)


@pytest.mark.parametrize(("name", "count"), (PUBLISHED | OURS).items())
def test_size(name, count):
    size, _, pixels = name.partition("@")
    with torch.device("meta"):
        model = create(size, image_size=int(pixels or 224))
    assert sum(p.numel() for p in model.parameters()) == count
    assert closed_form(size, int(pixels or 224)) == count


def closed_form(name: str, pixels: int) -> int:
    """The count by hand, from the table of sizes alone."""
    size, _, patch = name.partition("/")
    D, depth, M, _ = SIZES[size]
    patches = (pixels // int(patch)) ** 2
    attention, mlp, norms = 4 * (D * D + D), D * M + M + M * D + D, 2 * 2 * D
    return (
        (3 * int(patch) ** 2 * D + D)
        + D
        + (patches + 1) * D
        + depth * (attention + mlp + norms)
        + 2 * D
        + 1000 * D
        + 1000
    )


@pytest.mark.parametrize(("name", "millions"), MILLIONS.items())
def test_size_in_millions(name, millions):
    assert (PUBLISHED | OURS)[name] / 1e6 == pytest.approx(millions, abs=0.06)


@pytest.mark.parametrize(("name", "total", "counted"), [(name, *counts) for name, counts in WRITTEN.items()])
def test_write_up(name, total, counted):
    summary = summarize(name)
    assert (summary.parameters, summary.counted) == (total, counted)
