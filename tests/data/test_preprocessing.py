"""Preprocessing and augmentation of pixels."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from images import noise
from vitral.data.images.augmentation import Augmentation, random_affine, random_erase, random_shift
from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import UsageError


def rings(height: int, width: int) -> np.ndarray:
    """An image whose pixels encode their position: red is the row, green the column, in shares of 250."""
    rows = np.linspace(0, 250, height).round()[:, None].repeat(width, 1)
    columns = np.linspace(0, 250, width).round()[None].repeat(height, 0)
    return np.stack([rows, columns, np.full((height, width), 99)], -1).astype(np.uint8)


def edges(image: Tensor) -> tuple[int, int, int, int]:
    """Red at the top and bottom row, green at the left and right column, along the middle lines."""
    _, height, width = image.shape
    red, green = image[0, :, width // 2], image[1, height // 2]
    return int(red[0]), int(red[-1]), int(green[0]), int(green[-1])


@pytest.mark.parametrize("size", [(40, 80), (80, 40), (33, 47)])
@pytest.mark.parametrize("target", [(16, 16), (16, 24), (24, 12)])
def test_geometry_of_oblong_images(size, target):
    image = rings(*size)
    means = {"mean": (0.2, 0.4, 0.6), "std": (1.0, 1.0, 1.0)}
    stretched = Preprocessing(target, resize="stretch", **means).geometry(image)
    assert (stretched.shape, stretched.dtype) == ((3, *target), torch.uint8)
    top, bottom, left, right = edges(stretched)
    assert max(top, left) < 25
    assert min(bottom, right) > 225

    cropped = Preprocessing(target, resize="crop", crop_fraction=0.5, **means).geometry(image)
    assert cropped.shape == (3, *target)
    scale = 2 * max(target[0] / size[0], target[1] / size[1])
    for (first, last), side, want in zip((edges(cropped)[:2], edges(cropped)[2:]), size, target, strict=True):
        kept = want / (side * scale)  # the share of this side that stays, around the middle
        assert (last - first) / 250 == pytest.approx(kept, abs=0.08)
        assert (first + last) / 2 == pytest.approx(125, abs=10)

    boxed = Preprocessing(target, resize="letterbox", **means).geometry(image)
    assert boxed.shape == (3, *target)
    scale = min(target[0] / size[0], target[1] / size[1])
    inner = boxed[2] != round(0.6 * 255)  # the third color is 99 within, the mean around
    rows, columns = int(inner.any(1).sum()), int(inner.any(0).sum())
    assert (rows, columns) == (round(size[0] * scale), round(size[1] * scale))
    assert torch.equal(boxed[0][~inner].unique(), torch.tensor([51], dtype=torch.uint8)) or inner.all()


@pytest.mark.parametrize("capability", ["as it is", "DEFAULT"])
@pytest.mark.parametrize(("interpolation", "antialias"), [("bilinear", True), ("bilinear", False), ("bicubic", True)])
@pytest.mark.parametrize("channels", [1, 3])
def test_results_equal_torchvisions(interpolation, antialias, channels, capability, monkeypatch):
    """To the bit, up- and downsampled, whole and cropped, on CPUs with uint8 kernels and on others."""
    if capability == "DEFAULT":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        monkeypatch.setattr("platform.machine", lambda: "x86_64")
    kind = v2.InterpolationMode(interpolation)
    means = {"mean": (0.2,) * channels, "std": (1.0,) * channels, "channels": channels}
    for seed, size in enumerate([(40, 80), (80, 40), (33, 47), (9, 70), (24, 24)]):
        pixels = noise(seed, size, channels).reshape(*size, channels)
        image = torch.from_numpy(pixels).permute(2, 0, 1)
        for target in ((24, 24), (17, 30)):
            how = Preprocessing(target, interpolation=interpolation, antialias=antialias, **means)
            for part in (image, image[:, 3:, 5:40]):
                wanted = v2.functional.resize(part, list(target), kind, antialias=antialias)
                assert torch.equal(how.resized(part, target), wanted)
            published = dataclasses.replace(how, resize="crop", resize_size=(28, 28))
            short = v2.functional.resize(image, [28], kind, antialias=antialias)
            assert torch.equal(published.geometry(pixels), v2.functional.center_crop(short, list(target)))
            whole = dataclasses.replace(how, resize="letterbox", resize_size=(12, 12))
            inside = v2.functional.resize(image, list(whole._before_center(*size)), kind, antialias=antialias)
            lack = [want - have for want, have in zip(target, inside.shape[1:], strict=True)]
            around = [lack[1] // 2, lack[0] // 2, (lack[1] + 1) // 2, (lack[0] + 1) // 2]
            assert torch.equal(whole.geometry(pixels), v2.functional.pad(inside, around, fill=[51] * channels))


def test_an_image_of_the_right_size_is_unchanged():
    image = noise(0, (8, 12))
    for resize in ("stretch", "crop", "letterbox"):
        out = Preprocessing((8, 12), resize=resize).geometry(image)
        assert np.array_equal(out.permute(1, 2, 0).numpy(), image)


def test_interpolation_and_antialias_are_the_models_own():
    image = noise(0, (40, 60))
    kinds = [(i, a) for i in ("bilinear", "bicubic") for a in (True, False)]
    outs = [Preprocessing((16, 16), interpolation=i, antialias=a).geometry(image) for i, a in kinds]
    assert not any(torch.equal(a, b) for i, a in enumerate(outs) for b in outs[:i])


def test_standardize_is_the_formula():
    mean, std = (0.1, 0.5, 0.7), (0.2, 0.5, 1.5)
    images = torch.from_numpy(np.stack([noise(s, (4, 6)) for s in range(3)])).permute(0, 3, 1, 2)
    out = Preprocessing((4, 6), mean=mean, std=std).standardize(images)
    wanted = (images.numpy().astype(np.float64) / 255 - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    assert out.dtype == torch.float32
    assert np.allclose(out.numpy(), wanted, atol=1e-6)


def test_preprocessing_json_round_trip():
    one = Preprocessing((8, 12), 1, "crop", 0.9, "bicubic", False, (0.3,), (0.2,))
    assert Preprocessing.from_json(json.loads(json.dumps(one.to_json()))) == one
    with pytest.raises(UsageError, match="crop_fraction"):
        Preprocessing.from_json({**one.to_json(), "crop_fractoin": 1})


def test_older_files_are_read_and_written_the_same():
    """Defaults of later fields are not written: files stay the same, byte for byte."""
    old = {
        "image_size": [8, 12],
        "channels": 3,
        "resize": "crop",
        "crop_fraction": 0.875,
        "interpolation": "bilinear",
        "antialias": True,
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
    }
    read = Preprocessing.from_json(old)
    assert read == Preprocessing((8, 12), resize="crop")
    assert json.dumps(read.to_json()) == json.dumps(old)
    new = Preprocessing((8, 12), resize="crop", resize_size=(9, 9), center="floor")
    assert Preprocessing.from_json(json.loads(json.dumps(new.to_json()))) == new


@pytest.mark.parametrize("size", [(40, 80), (80, 40), (33, 47), (16, 24)])
def test_resize_size_is_exact(size):
    """`resize_size` = (20, 20), of which 16 × 16 are kept: the rows and columns show the share of each side."""
    for resize, (tall, wide) in {
        "stretch": (20, 20),
        "crop": (max(20, 20 * size[0] // size[1]), max(20, 20 * size[1] // size[0])),
    }.items():
        out = Preprocessing((16, 16), resize=resize, resize_size=(20, 20)).geometry(rings(*size))
        assert out.shape == (3, 16, 16)
        top, bottom, left, right = edges(out)
        assert (bottom - top) / 250 == pytest.approx(15 / tall, abs=0.06)
        assert (right - left) / 250 == pytest.approx(15 / wide, abs=0.06)


def test_rounding_of_the_center():
    """Of 19 columns 16 are kept: 1.5 are cropped at the left, rounded half to even to 2, or down to 1."""
    image = rings(19, 19)
    for center, first in (("round", 2), ("floor", 1)):
        out = Preprocessing((16, 16), resize_size=(19, 19), center=center).geometry(image)
        assert np.array_equal(out.permute(1, 2, 0).numpy(), image[first : first + 16, first : first + 16])


def test_short_sides_are_padded_with_black_or_the_mean():
    image = np.full((10, 20, 3), 200, np.uint8)
    means = {"mean": (0.2, 0.4, 0.6), "std": (1.0, 1.0, 1.0)}
    black = Preprocessing((24, 24), resize="crop", resize_size=(10, 10), **means).geometry(image)
    boxed = Preprocessing((24, 24), resize="letterbox", resize_size=(20, 20), **means).geometry(image)
    assert black[:, 0, 0].tolist() == [0, 0, 0]
    assert boxed[:, 0, 0].tolist() == [51, 102, 153]
    assert (black[0] == 200).sum() == (boxed[0] == 200).sum() == 200


def test_a_recipe_at_another_size():
    assert Preprocessing((16, 16)).at((24, 24)) == Preprocessing((24, 24))
    timm = Preprocessing((224, 224), resize="crop", crop_fraction=0.9, resize_size=(248, 248))
    assert timm.at((384, 384)).resize_size == (426, 426)  # 384 / 0.9, not 384 × 248 / 224
    other = Preprocessing((224, 224), resize="crop", resize_size=(242, 242))
    assert other.at((448, 448)).resize_size == (484, 484)


@pytest.mark.parametrize("interpolation", ["nearest", "lanczos", "box", "hamming"])
@pytest.mark.parametrize("channels", [1, 3])
def test_other_interpolations_are_pillows(interpolation, channels):
    noisy = noise(0, (40, 60), channels)
    pixels = noisy if channels == 3 else noisy.reshape(40, 60, 1)
    out = Preprocessing(
        (16, 24), channels, interpolation=interpolation, mean=(0.5,) * channels, std=(0.5,) * channels
    ).geometry(pixels)
    image = Image.fromarray(pixels if channels == 3 else pixels[..., 0])
    wanted = np.array(image.resize((24, 16), getattr(Image.Resampling, interpolation.upper())))
    assert np.array_equal(out.permute(1, 2, 0).numpy(), wanted.reshape(16, 24, channels))


@pytest.mark.parametrize(
    "wrong",
    [
        {"resize_size": (0, 8)},
        {"resize_size": (8.0, 8)},
        {"resize_size": 8},
        {"resize_size": (10**6, 8)},
        {"center": "ceil"},
        {"interpolation": "box", "antialias": False},
        {"mean": (0.5, 0.5, float("nan"))},
        {"resize": "squash"},
        {"interpolation": "cubic"},
        {"mean": (0.5,)},
        {"std": (1, 1, 0)},
        {"crop_fraction": 0},
        {"crop_fraction": 1.1},
    ],
)
def test_preprocessing_refuses(wrong):
    with pytest.raises(UsageError):
        Preprocessing((8, 8), **wrong)


def test_random_shift_is_drawn_per_image():
    torch.manual_seed(0)
    images = torch.from_numpy(np.stack([noise(s, (10, 12)) for s in range(40)])).permute(0, 3, 1, 2)
    moved = random_shift(images, 2)
    assert moved.shape == images.shape
    assert moved.dtype == torch.uint8
    found = set()
    for before, after in zip(images, moved, strict=True):
        padded = torch.from_numpy(np.pad(before.numpy(), [(0, 0), (2, 2), (2, 2)], mode="reflect"))
        places = [(y, x) for y in range(5) for x in range(5) if torch.equal(padded[:, y : y + 10, x : x + 12], after)]
        assert len(places) == 1
        found.add(places[0])
    assert len(found) > 10
    assert {0, 4} <= {y for y, _ in found}
    assert {0, 4} <= {x for _, x in found}


def test_a_strip_is_shifted_as_far_as_it_goes():
    images = torch.arange(2 * 40, dtype=torch.uint8).reshape(1, 1, 2, 40).expand(60, -1, -1, -1)
    moved = random_shift(images, 5)
    assert moved.shape == images.shape
    assert len({tuple(one.flatten().tolist()) for one in moved}) > 11


def test_random_erase_fills_rectangles_of_the_right_area():
    torch.manual_seed(0)
    images = torch.zeros(600, 3, 32, 48)
    erased = random_erase(images, 0.5) != 0
    hit = erased.flatten(1).any(1)
    assert float(hit.float().mean()) == pytest.approx(0.5, abs=0.06)
    shares = []
    for mask in erased[hit]:
        assert torch.equal(mask[0], mask[1])
        rows, columns = mask[0].any(1).nonzero(), mask[0].any(0).nonzero()
        height, width = int(rows.max() - rows.min()) + 1, int(columns.max() - columns.min()) + 1
        assert height * width == int(mask[0].sum())  # a whole rectangle
        shares.append(height * width / (32 * 48))
    assert 0.01 < min(shares) < 0.05
    assert 0.25 < max(shares) < 0.36
    assert not (random_erase(images, 0.0) != 0).any()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("augment", ["affine", "randaugment", "trivialaugment"])
def test_augmentation_changes_images(channels, augment):
    torch.manual_seed(0)
    images = torch.from_numpy(np.stack([noise(s, (16, 16)) for s in range(40)])).permute(0, 3, 1, 2)[:, :channels]
    out = Augmentation(augment=augment).pixels(images)
    assert (out.shape, out.dtype) == (images.shape, torch.uint8)
    changed = (out != images).flatten(1).any(1)
    assert changed.sum() > 10


def test_flip_mirrors_about_half():
    torch.manual_seed(0)
    images = torch.from_numpy(np.stack([noise(s, (4, 6)) for s in range(200)])).permute(0, 3, 1, 2)
    out = Augmentation(flip=True).pixels(images)
    mirrored = [torch.equal(a, b.flip(-1)) for a, b in zip(out, images, strict=True)]
    same = [torch.equal(a, b) for a, b in zip(out, images, strict=True)]
    assert sum(mirrored) + sum(same) == 200
    assert 70 < sum(mirrored) < 130


def test_no_augmentation_changes_nothing():
    images = torch.from_numpy(np.stack([noise(s) for s in range(3)])).permute(0, 3, 1, 2)
    assert torch.equal(Augmentation().pixels(images), images)
    floats, labels = images.float(), torch.tensor([0, 1, 2])
    same, kept = Augmentation().standardized(floats, labels, 3)
    assert torch.equal(same, floats)
    assert torch.equal(kept, labels)


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_mixed_labels_are_shares_of_pixels(kind):
    torch.manual_seed(0)
    images = torch.arange(4.0)[:, None, None, None].expand(4, 1, 8, 8).clone()  # image k is all k
    labels = torch.arange(4)
    mixed = 0
    for _ in range(10):
        out, shares = Augmentation(**{kind: 1.0}).standardized(images, labels, 6)
        assert shares.shape == (4, 6)
        assert torch.allclose(shares.sum(1), torch.ones(4))
        value = (shares[:, :4] * torch.arange(4.0)).sum(1)
        assert torch.allclose(out.mean((1, 2, 3)), value, atol=1e-4)
        mixed += int((shares.max(1).values < 1).any())
    assert mixed > 5


def test_one_image_alone_is_not_mixed():
    _, labels = Augmentation(mixup=1.0).standardized(torch.zeros(1, 1, 4, 4), torch.tensor([2]), 3)
    assert labels.tolist() == [2]


def test_random_resized_crop_keeps_at_least_its_area():
    torch.manual_seed(0)
    augmentation, preprocessing = Augmentation(crop="random-resized", crop_area=0.5), Preprocessing((16, 24))
    image, areas = rings(60, 60), []
    for _ in range(50):
        out = augmentation.geometry(image, preprocessing)
        assert out.shape == (3, 16, 24)
        top, bottom, left, right = edges(out)
        areas.append((bottom - top) / 250 * (right - left) / 250)
    assert 0.35 < min(areas) < 0.6
    assert max(areas) > 0.75


def test_affine_turns_and_scales_within_its_bounds():
    torch.manual_seed(0)
    H, W = 40, 60  # a turned image of unequal sides stays undistorted
    images = torch.zeros(200, 1, H, W, dtype=torch.uint8)
    images[..., 18:22, 10:50] = 200  # a bar of 40 × 4 across the middle
    y, x = torch.meshgrid(torch.arange(H) - (H - 1) / 2, torch.arange(W) - (W - 1) / 2, indexing="ij")

    def angles_and_lengths(images):
        weight = images[:, 0].float()
        total = weight.sum((1, 2))
        xx, yy, xy = ((weight * part).sum((1, 2)) / total for part in (x * x, y * y, x * y))
        return torch.rad2deg(0.5 * torch.atan2(2 * xy, xx - yy)), (12 * xx).sqrt()

    turned, length = angles_and_lengths(random_affine(images, 10.0, 0.0))
    assert turned.abs().max() < 10.5
    assert turned.min() < -8
    assert turned.max() > 8
    assert (length / length.mean() - 1).abs().max() < 0.03, "nothing is stretched"
    still, length = angles_and_lengths(random_affine(images, 0.0, 0.1))
    assert still.abs().max() < 0.5
    assert 35 < length.min() < 38
    assert 42 < length.max() < 45
    assert random_affine(images, 0.0, 0.0).equal(images)
