"""Resizing does what each origin does, to rounding, and what the formulas promise."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models.vision_transformer import interpolate_embeddings

from vitral.errors import UsageError, WeightsError
from vitral.weights.transform.resize import SCHEMES, change_channels, grid_of, resize_patches, resize_positions

GRIDS = [
    ((14, 14), (24, 24)),
    ((7, 7), (3, 3)),
    ((5, 4), (9, 7)),
    ((6, 3), (2, 8)),
    ((4, 6), (6, 4)),
    ((3, 5), (1, 1)),
    ((1, 1), (4, 3)),
    ((1, 7), (5, 1)),
    ((6, 3), (4, 1)),
]
"""Larger, smaller, both at once, the same number of cells, and single rows, columns and cells."""
PATCHES = [((4, 4), (8, 8)), ((16, 16), (17, 20)), ((3, 5), (4, 5)), ((1, 2), (6, 3)), ((8, 8), (12, 30))]
"""None of these shrinks a side."""


def noise(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def table_of(grid: tuple[int, int], prefix: int = 1, dim: int = 6, **of: Any) -> Tensor:
    return noise(sum(grid) + prefix, 1, prefix + grid[0] * grid[1], dim, **of)


def cells(table: Tensor, grid: tuple[int, int], prefix: int = 1) -> Tensor:
    """(rows, columns, D)"""
    return table[0, prefix:].unflatten(0, grid)


# References. Each takes a table with one prefix entry.


def paper(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    grid = cells(table, old).numpy()
    zoomed = scipy.ndimage.zoom(grid, (new[0] / old[0], new[1] / old[1], 1), order=1)
    return torch.cat([table[:, :1], torch.from_numpy(zoomed).flatten(0, 1)[None]], dim=1)


def timm_state_dict(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    layers = pytest.importorskip("timm.layers")
    return layers.resample_abs_pos_embed(table, list(new), list(old), num_prefix_tokens=1)


def hugging_face(table: Tensor, old: tuple[int, int], new: tuple[int, int], family: str = "vit") -> Tensor:
    """Takes square tables only; patches are of one pixel, so that image and grid are of one size."""
    pytest.importorskip("transformers")
    kind, config = transformers_parts(family)
    embeddings = kind(config(image_size=old[0], patch_size=1, hidden_size=table.shape[2], num_attention_heads=1))
    positions = table if family != "deit" else torch.cat([table[:, :1], table], dim=1)
    embeddings.position_embeddings.data = positions
    tokens = torch.zeros(1, positions.shape[1] - old[0] * old[1] + new[0] * new[1], table.shape[2])
    resized = embeddings.interpolate_pos_encoding(tokens, *new).detach()
    return resized if family != "deit" else resized[:, 1:]


def transformers_parts(family: str) -> tuple[Any, Any]:
    """Embeddings class and configuration class, imported from the family's own module."""
    from transformers import DeiTConfig, Dinov2Config, Dinov2WithRegistersConfig, ViTConfig
    from transformers.models import deit, dinov2, dinov2_with_registers, vit

    parts: dict[str, tuple[ModuleType, str, Any]] = {
        "vit": (vit.modeling_vit, "ViTEmbeddings", ViTConfig),
        "deit": (deit.modeling_deit, "DeiTEmbeddings", DeiTConfig),
        "dinov2": (dinov2.modeling_dinov2, "Dinov2Embeddings", Dinov2Config),
        "dinov2 with registers": (
            dinov2_with_registers.modeling_dinov2_with_registers,
            "Dinov2WithRegistersEmbeddings",
            Dinov2WithRegistersConfig,
        ),
    }
    module, name, config = parts[family]
    return getattr(module, name), config


def siglip2(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

    if new[1] == 1 < new[0]:  # torch 2.15 on a CPU mixes up the rows of one column
        turned = torch.cat([table[:, :1], table[:, 1:].unflatten(1, old).transpose(1, 2).flatten(1, 2)], dim=1)
        return siglip2(turned, old[::-1], new[::-1])
    grid, shapes = table[0, 1:].unflatten(0, old), torch.tensor([new])
    resized = Siglip2VisionEmbeddings.resize_positional_embeddings(grid, shapes, math.prod(new))
    return torch.cat([table[:, :1], resized], dim=1)


def torchvision(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    return interpolate_embeddings(new[0], 1, {"encoder.pos_embedding": table})["encoder.pos_embedding"]


def timm_npz(table: Tensor, new: tuple[int, int], folder: Path, kernel: Tensor, patch: tuple[int, int]) -> Any:
    """timm's network of no blocks at another size, after it has read an npz file of the authors' layout."""
    vit = pytest.importorskip("timm.models.vision_transformer")
    dim = table.shape[2]
    np.savez(
        folder / "weights.npz",
        **{
            "embedding/kernel": kernel.permute(2, 3, 1, 0).numpy(),
            "embedding/bias": np.zeros(dim, np.float32),
            "cls": np.zeros((1, 1, dim), np.float32),
            "Transformer/posembed_input/pos_embedding": table.numpy(),
            "Transformer/encoder_norm/scale": np.ones(dim, np.float32),
            "Transformer/encoder_norm/bias": np.zeros(dim, np.float32),
        },
    )
    size = (new[0] * patch[0], new[1] * patch[1])
    model = vit.VisionTransformer(
        img_size=size, patch_size=patch, embed_dim=dim, depth=0, num_heads=1, num_classes=0, in_chans=kernel.shape[1]
    )
    model.load_pretrained(str(folder / "weights.npz"))
    return model


Reference = Callable[[Tensor, tuple[int, int], tuple[int, int]], Tensor]
REFERENCES: dict[str, Reference] = {
    "bilinear-corners": paper,
    "bicubic-antialias": timm_state_dict,
    "bilinear-antialias": siglip2,
    "bicubic": hugging_face,
    "bicubic-corners": torchvision,
}
SQUARES: dict[str, set[str]] = {"bicubic": {"old"}, "bicubic-corners": {"old", "new"}}
"""Scheme → the grids that its reference takes only if they are square."""
CASES = [
    (scheme, old, new)
    for scheme in REFERENCES
    for old, new in [*GRIDS, ((5, 5), (3, 8)), ((5, 5), (2, 2))]
    if all(grid[0] == grid[1] for side, grid in (("old", old), ("new", new)) if side in SQUARES.get(scheme, ()))
]


def test_every_scheme_has_a_reference():
    assert {*REFERENCES, "bilinear"} == set(SCHEMES)  # `bilinear`: the test of timm's npz below
    assert {scheme for scheme, old, new in CASES if old != new} == set(REFERENCES)


@pytest.mark.parametrize(("scheme", "old", "new"), CASES, ids=str)
def test_scheme_equals_its_origin(scheme, old, new):
    # scipy reckons in fp64 whatever it is given; the others reckon in fp32 as we do, by the same kernels of torch.
    exact = scheme == "bilinear-corners"
    table = table_of(old, dtype=torch.float64 if exact else torch.float32)
    resized = resize_positions(table, old, new, prefix=1, scheme=scheme)
    torch.testing.assert_close(resized, REFERENCES[scheme](table, old, new), atol=1e-12 if exact else 1e-6, rtol=0)


def test_the_papers_scheme_in_single_precision():
    table = table_of((14, 14), dim=64)
    resized = resize_positions(table, (14, 14), (24, 24), prefix=1, scheme="bilinear-corners")
    torch.testing.assert_close(resized, paper(table, (14, 14), (24, 24)), atol=5e-6, rtol=0)


@pytest.mark.parametrize(("old", "new"), [((4, 4), (6, 6)), ((5, 5), (3, 3)), ((4, 4), (7, 2))], ids=str)
def test_scheme_equals_timm_reading_npz(old, new, tmp_path):
    table, kernel = table_of(old), noise(1, 6, 3, 4, 4)
    model = timm_npz(table, new, tmp_path, kernel, (6, 5))
    resized = resize_positions(table, old, new, prefix=1, scheme="bilinear")
    torch.testing.assert_close(resized, model.pos_embed.detach(), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        resize_patches(kernel, (6, 5)), model.patch_embed.proj.weight.detach(), atol=5e-6, rtol=0
    )


@pytest.mark.parametrize(
    ("family", "scheme"),
    [("deit", "bicubic"), ("dinov2", "bicubic"), ("dinov2 with registers", "bicubic-antialias")],
)
@pytest.mark.parametrize("new", [(9, 5), (3, 4)], ids=str)
def test_other_families_of_hugging_face(family, scheme, new):
    table = table_of((6, 6))
    resized = resize_positions(table, (6, 6), new, prefix=1, scheme=scheme)
    torch.testing.assert_close(resized, hugging_face(table, (6, 6), new, family), atol=1e-6, rtol=0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes_differ_as_the_page_says(scheme):
    """docs/weights.md: mean absolute difference from the paper's scheme on unit noise, 14×14 to 24×24."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "weights.md").read_text("utf-8")
    told = re.search(rf"^\| `{scheme}` .*\| ([0-9.]+) \|$", page, re.MULTILINE)
    assert told, f"no row for {scheme}"
    table = noise(0, 1, 196, 768)
    ours, theirs = (
        resize_positions(table, (14, 14), (24, 24), prefix=0, scheme=name) for name in (scheme, "bilinear-corners")
    )
    assert float(told[1]) == pytest.approx((ours - theirs).abs().mean().item(), abs=6e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("prefix", [0, 1, 2, 5])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_same_grid_and_prefix_stay_to_the_bit(scheme, prefix, dtype):
    table = table_of((3, 5), prefix, dtype=dtype)
    assert torch.equal(resize_positions(table, (3, 5), (3, 5), prefix=prefix, scheme=scheme), table)
    resized = resize_positions(table, (3, 5), (5, 3), prefix=prefix, scheme=scheme)  # as many cells, another grid
    assert resized.dtype == dtype
    assert torch.equal(resized[:, :prefix], table[:, :prefix])
    assert not torch.equal(resized, table)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_precision(scheme):
    """Half precision is rounded once, at the end; fp64 is not narrowed."""
    table = table_of((6, 6), dtype=torch.float64)
    full = resize_positions(table, (6, 6), (9, 4), prefix=1, scheme=scheme)
    half = table.half()
    rounded = resize_positions(half.float(), (6, 6), (9, 4), prefix=1, scheme=scheme).half()
    assert torch.equal(resize_positions(half, (6, 6), (9, 4), prefix=1, scheme=scheme), rounded)
    single = resize_positions(table.float(), (6, 6), (9, 4), prefix=1, scheme=scheme)
    assert 1e-9 < (full - single).abs().max() < 1e-5


@pytest.mark.parametrize(("old", "new"), GRIDS, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_laws(scheme, old, new):
    def resize(grid: Tensor, new: tuple[int, int] = new) -> Tensor:
        table = resize_positions(grid.reshape(1, -1, 1), tuple(grid.shape), new, prefix=0, scheme=scheme)
        return table.reshape(new)

    grid = noise(3, *old, dtype=torch.float64)
    close = {"atol": 1e-12, "rtol": 0}
    torch.testing.assert_close(resize(torch.full(old, 2.5).double()), torch.full(new, 2.5).double(), **close)
    torch.testing.assert_close(resize(2 * grid + 1), 2 * resize(grid) + 1, **close)
    torch.testing.assert_close(resize(grid.T, new[::-1]).T, resize(grid), **close)
    if scheme != "bilinear-corners" and scheme != "bicubic-corners":
        torch.testing.assert_close(resize(grid.flip(0, 1)), resize(grid).flip(0, 1), **close)
    elif min(*old, *new) > 1:
        corner = (slice(None, None, old[0] - 1), slice(None, None, old[1] - 1))
        kept = (slice(None, None, new[0] - 1), slice(None, None, new[1] - 1))
        torch.testing.assert_close(resize(grid)[kept], grid[corner], **close)


@pytest.mark.parametrize(("old", "new"), [pair for pair in GRIDS if min(pair[1]) > 1 and min(pair[0]) > 1], ids=str)
def test_ramps_stay_straight_in_the_papers_scheme(old, new):
    def ramp(grid: tuple[int, int]) -> Tensor:
        rows, columns = (torch.linspace(0, 1, n, dtype=torch.float64) for n in grid)
        return (3 * rows[:, None] - 2 * columns).reshape(1, -1, 1)

    resized = resize_positions(ramp(old), old, new, prefix=0, scheme="bilinear-corners")
    torch.testing.assert_close(resized, ramp(new), atol=1e-12, rtol=0)


def test_rows_are_not_columns():
    table = torch.arange(3.0).repeat(4, 1).reshape(1, 12, 1)  # grows along the columns of a grid of 4 rows
    resized = cells(resize_positions(table, (4, 3), (2, 5), prefix=0, scheme="bilinear-corners"), (2, 5), 0)
    torch.testing.assert_close(resized[:, :, 0], torch.tensor([0, 0.5, 1, 1.5, 2]).repeat(2, 1))


def test_what_cannot_be_resized():
    table = table_of((3, 5))
    with pytest.raises(UsageError, match=r"unknown resizing scheme 'bicubik'\n.*nearest: .*bicubic"):
        resize_positions(table, (3, 5), (4, 4), prefix=1, scheme="bicubik")
    for bad, old, prefix in [
        (table, (3, 5), 0),
        (table, (4, 4), 1),
        (table[0], (3, 5), 1),
        (table.repeat(2, 1, 1), (3, 5), 1),
    ]:
        with pytest.raises(UsageError, match="does not hold"):
            resize_positions(bad, old, old, prefix=prefix, scheme="bicubic")
    with pytest.raises(UsageError, match="3×5 to 0×5"):
        resize_positions(table, (3, 5), (0, 5), prefix=1, scheme="bicubic")
    with pytest.raises(UsageError, match="unknown resizing scheme"):
        resize_patches(noise(0, 2, 3, 4, 4), (8, 8), scheme="cubic")
    for shape, new in [((2, 3, 4), (8, 8)), ((2, 3, 4, 4), (8, 0))]:
        with pytest.raises(UsageError, match="patch kernel of shape"):
            resize_patches(noise(0, *shape), new)
    with pytest.raises(UsageError, match="to 0 channels"):
        change_channels(noise(0, 2, 3, 4, 4), 0)


def test_trained_parameters_are_taken_and_no_graph_is_kept():
    table, kernel = torch.nn.Parameter(table_of((3, 3))), torch.nn.Parameter(noise(0, 2, 3, 4, 4))
    resized = [
        resize_positions(table, (3, 3), (4, 4), prefix=1, scheme="bicubic"),
        resize_patches(kernel, (6, 6)),
        change_channels(kernel, 1),
    ]
    assert not any(tensor.requires_grad for tensor in resized)


@pytest.mark.parametrize(
    ("length", "prefix", "image", "patch", "grid"),
    [
        (197, 1, None, None, (14, 14)),
        (198, 2, (224, 224), (16, 16), (14, 14)),
        (196, 0, (112, 448), (16, 16), (7, 28)),  # as many as in a square: the image decides
        (197, 1, (384, 384), (16, 16), (14, 14)),  # the image does not fit: a square
        (1370, 1, (518, 518), (14, 14), (37, 37)),
        (16, 1, (30, 53), (10, 10), (3, 5)),  # what is left over at the border is no patch
        (13, 1, (24, 16), (8, 4), (3, 4)),
        (2, 1, None, None, (1, 1)),
    ],
)
def test_grid_of(length, prefix, image, patch, grid):
    assert grid_of(length, prefix, image, patch) == grid


@pytest.mark.parametrize(
    ("length", "prefix", "image"),
    [(197, 0, None), (16, 1, None), (1, 1, None), (0, 1, None), (16, 1, (30, 40)), (1, 1, (4, 4))],
)
def test_grid_that_cannot_be_told(length, prefix, image):
    with pytest.raises(WeightsError, match=rf"a table of {length} positions\n.*{length - prefix} remain: not a square"):
        grid_of(length, prefix, image, (10, 10) if image else None)


# Patch kernels


def embed(images: Tensor, kernel: Tensor) -> Tensor:
    return torch.einsum("bcpq,dcpq->bd", images, kernel)


def resized_image(images: Tensor, new: tuple[int, int], scheme: str) -> Tensor:
    """By torch itself, not by way of `SCHEMES`."""
    mode, _, how = scheme.partition("-")
    return F.interpolate(images, new, mode=mode, align_corners=how == "corners", antialias=how == "antialias")


@pytest.mark.parametrize(("old", "new"), PATCHES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_larger_patches_give_the_same_embedding(scheme, old, new):
    kernel, images = noise(5, 8, 3, *old), noise(6, 10, 3, *old)
    larger = resize_patches(kernel, new, scheme=scheme)
    assert larger.shape == (8, 3, *new)
    expected = embed(images, kernel)
    found = embed(resized_image(images, new, scheme), larger)
    torch.testing.assert_close(found, expected, atol=1e-5 * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize(("old", "new"), [((8, 8), (4, 4)), ((16, 16), (15, 11)), ((4, 9), (7, 5))], ids=str)
def test_smaller_patches_are_nearest_in_least_squares(old, new):
    """Against numpy's solver on the whole matrix B of the image's resizing: min ‖Bᵀk' − k‖."""
    basis = torch.eye(old[0] * old[1], dtype=torch.float64).reshape(-1, 1, *old)
    matrix = resized_image(basis, new, "bilinear").flatten(1).T.numpy()
    kernel = noise(7, 5, 2, *old, dtype=torch.float64)
    solution = np.linalg.lstsq(matrix.T, kernel.flatten(2).flatten(0, 1).T.numpy(), rcond=None)[0]
    expected = torch.from_numpy(solution.T).reshape(5, 2, *new)
    torch.testing.assert_close(resize_patches(kernel, new), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("old", "new"), [((16, 16), (32, 32)), ((16, 16), (8, 8)), ((14, 14), (16, 16)), ((4, 6), (5, 3))], ids=str
)
@pytest.mark.parametrize("scheme", ["bilinear", "bicubic-antialias"])
def test_patches_equal_timm(scheme, old, new):
    layers = pytest.importorskip("timm.layers")
    kernel, (mode, _, how) = noise(8, 5, 3, *old), scheme.partition("-")
    theirs = layers.resample_patch_embed(kernel, list(new), interpolation=mode, antialias=bool(how))
    torch.testing.assert_close(resize_patches(kernel, new, scheme=scheme), theirs, atol=5e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_kernels_of_the_same_size_stay_to_the_bit(dtype):
    kernel = noise(9, 4, 3, 5, 7, dtype=dtype)
    assert torch.equal(resize_patches(kernel, (5, 7)), kernel)
    assert torch.equal(change_channels(kernel, 3), kernel)
    assert resize_patches(kernel, (7, 5)).dtype == change_channels(kernel, 1).dtype == dtype


def test_there_and_back():
    kernel = noise(10, 4, 3, 6, 5, dtype=torch.float64)
    back = resize_patches(resize_patches(kernel, (12, 9)), (6, 5))
    assert (back - kernel).abs().max() > 0.1  # it is no inverse of itself: smaller patches lose what the larger hold


# Channels


@pytest.mark.parametrize("seed", range(3))
def test_gray_images_give_the_same_embedding(seed):
    kernel, gray = (noise(*of, 6, 5, dtype=torch.float64) for of in ((seed, 8, 3), (seed + 10, 4, 1)))
    torch.testing.assert_close(
        embed(gray, change_channels(kernel, 1)), embed(gray.expand(-1, 3, -1, -1), kernel), atol=1e-12, rtol=0
    )


@pytest.mark.parametrize(("have", "want"), [(1, 3), (1, 4), (3, 6), (3, 9), (2, 4)])
def test_repeated_images_give_the_same_embedding(have, want):
    kernel, images = noise(1, 8, have, 6, 5), noise(2, 4, have, 6, 5)
    repeated = images.repeat(1, want // have, 1, 1)
    torch.testing.assert_close(embed(repeated, change_channels(kernel, want)), embed(images, kernel), atol=1e-5, rtol=0)


def test_any_count_is_exact_where_channels_do_not_differ():
    kernel, gray = noise(1, 8, 1, 6, 5).expand(-1, 3, -1, -1), noise(2, 4, 1, 6, 5)
    for channels in (1, 2, 4, 5, 7):
        found = embed(gray.expand(-1, channels, -1, -1), change_channels(kernel, channels))
        torch.testing.assert_close(found, embed(gray.expand(-1, 3, -1, -1), kernel), atol=2e-5, rtol=0)


@pytest.mark.parametrize("channels", range(1, 9))
def test_channels_equal_timm(channels):
    models = pytest.importorskip("timm.models")
    kernel = noise(3, 4, 3, 5, 5)
    theirs = models.adapt_input_conv(channels, kernel.clone())
    torch.testing.assert_close(change_channels(kernel, channels), theirs, atol=1e-6, rtol=0)


def test_standardized_kernels_are_off_by_a_positive_factor():
    """The layer standardizes the sum again, as the docstring warns."""

    def standardized(kernel: Tensor) -> Tensor:
        return (kernel - kernel.mean((1, 2, 3), keepdim=True)) / kernel.std((1, 2, 3), keepdim=True, correction=0)

    kernel = noise(4, 6, 3, 7, 7, dtype=torch.float64)
    ratio = standardized(change_channels(kernel, 1)) / standardized(kernel).sum(1, keepdim=True)
    factors = ratio[:, :, :1, :1]
    torch.testing.assert_close(ratio, factors.expand_as(ratio))
    assert (factors > 0).all()
    assert (factors - 1).abs().min() > 0.01
    assert factors.std() > 0.001
