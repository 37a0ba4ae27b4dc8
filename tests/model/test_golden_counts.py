"""Parameter counts of every named model. A name without a line here fails the suite."""

from __future__ import annotations

import itertools

import pytest
import torch

from running import mostly_slow
from vitral.model import (
    BITS,
    CONV_STEMMED,
    HYBRIDS,
    SIZES,
    WITH_PRESET,
    WRITE_UPS,
    BiTConfig,
    ViTConfig,
    config,
    create,
    summarize,
)

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
    "Femto/16": 226_984,
    "Micro/16": 649_576,
    "Mini/16": 7_854_952,
    "M/16": 38_837_736,
    "b/16": 22_050_664,
    "So400m/14": 413_597_656,
    "g/14": 1_012_611_432,
    "g-opt/14": 1_136_101_864,
    "G/14": 1_844_440_680,
    "G-opt/14": 1_664_842_216,
    "e/14": 3_807_214_312,
}
PRESET = {"Ti+/16": 5_680_360, "S+/16": 21_976_552, "B+/16": 86_419_432}
STEMMED = {  # timm's vit_tiny_r_s16_p8_224, vit_small_r26_s32_224, … with 1000 classes
    "R+Ti/16": 6_337_704,
    "R26+S/32": 36_431_912,
    "R26+B/32": 101_383_976,
    "R50+B/16": 98_659_112,
    "R50+L/32": 328_994_856,
}
STEMS = {
    "C+Femto/4": 721_144,
    "C+Micro/8": 3_225_096,
    "C+Mini/4": 13_117_864,
    "C+S/16": 24_396_616,
}  # ours, of the kind of ViT_C (arXiv 2106.14881)
CONVOLUTIONS = {  # timm's resnetv2_50x1_bit, …; it has no 200x3
    "BiT-R50x1": 25_549_352,
    "BiT-R50x3": 217_319_080,
    "BiT-R101x1": 44_541_480,
    "BiT-R101x3": 387_934_888,
    "BiT-R152x2": 236_335_208,
    "BiT-R152x4": 936_533_224,
    "BiT-R200x3": 568_633_000,
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
    assert set(PRESET) == set(WITH_PRESET)
    assert set(STEMS) == set(CONV_STEMMED)
    assert set(STEMMED) == set(HYBRIDS)
    assert set(CONVOLUTIONS) == set(BITS)


@pytest.mark.parametrize(("name", "count"), (PUBLISHED | OURS).items())
def test_size(name, count):
    size, _, pixels = name.partition("@")
    with torch.device("meta"):
        model = create(size, image_size=int(pixels or 224))
    assert sum(p.numel() for p in model.parameters()) == count
    assert closed_form(size, int(pixels or 224)) == count


@pytest.mark.parametrize("name", PRESET)
def test_registers_instead_of_positions(name):
    """As many as without the preset, less 14 × 14 + 1 learned positions, and 4 registers."""
    D, plain = SIZES[name.partition("+")[0]].dim, PUBLISHED[name.replace("+", "")]
    with torch.device("meta"):
        assert sum(p.numel() for p in create(name).parameters()) == PRESET[name] == plain - 197 * D + 4 * D


def closed_form(name: str, pixels: int) -> int:
    """Closed-form count from the table of sizes."""
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


@pytest.mark.parametrize(("name", "count"), mostly_slow((STEMMED | CONVOLUTIONS).items(), 4))
def test_convolutional_network(name, count):
    assert summarize(name).parameters == count
    shape = config(name)
    assert count == (closed_form_of_bit(shape) if isinstance(shape, BiTConfig) else closed_form_of_hybrid(name, shape))


def closed_form_of_hybrid(name: str, shape: ViTConfig) -> int:
    """A ViT with the same number of tokens, other patches, and the ResNet before them."""
    size = name.partition("+")[2].partition("/")[0]
    kernel, width = (8, 64) if not shape.stem else (1, 256 * 2 ** (len(shape.stem) - 1))
    pixels = 3 * shape.patch[0] ** 2
    plain = closed_form(f"{size}/{shape.patch[0]}", 224) + (kernel**2 * width - pixels) * shape.dim
    return plain + 7 * 7 * 3 * 64 + 2 * 64 + bottlenecks(shape.stem or (), 64, lambda width, mid: 2 * (2 * mid + width))


@pytest.mark.parametrize(("name", "count"), STEMS.items())
def test_convolutional_stem(name, count):
    assert summarize(name).parameters == count
    shape = config(name)
    patch, dim = shape.patch[0], shape.dim
    size = name.partition("+")[2].partition("/")[0]
    widths = {
        "Femto": (3, 16, 32, 32, 128, 128, 128),
        "Micro": (3, 32, 64, 64, 256, 256, 256, 256, 256),
        "S": (3, 96, 192, 192, 384, 384),
        "Mini": (3, 64, 256, 256, 384, 384, 384),
    }[size]
    stem = sum(9 * before * width + 2 * width for before, width in itertools.pairwise(widths))
    assert count == closed_form(f"{size}/{patch}", 224) + (widths[-1] - 3 * patch**2) * dim + stem


def closed_form_of_bit(shape: BiTConfig) -> int:
    root = 64 * shape.width
    body = bottlenecks(shape.layers, root, lambda width, mid: 2 * 2 * mid, before=True)
    return 7 * 7 * 3 * root + body + 2 * shape.dim + 1000 * shape.dim + 1000


def bottlenecks(layers, root, norms, before=False) -> int:
    """Kernels, projections and norms: before the layers each norm is as wide as what comes in, after them as what goes
    out, and then the projection has one too.
    """
    total, width = 0, root
    for stage, count in enumerate(layers):
        mid = root * 2**stage
        for unit in range(count):
            total += width * mid + 9 * mid * mid + 4 * mid * mid + norms(4 * mid, mid) + (2 * width if before else 0)
            if unit == 0:
                total += 4 * mid * width + (0 if before else 2 * 4 * mid)
            width = 4 * mid
    return total
