"""Operations on batches equal torchvision's on each image."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from images import noise
from vitral.data.images import augmentation_ops as operations
from vitral.data.images.augmentation_ops import (
    BINS,
    MATRICES,
    OPERATIONS,
    RANDOM,
    TRIVIAL,
    move,
    rand_augment,
    trivial_augment,
)
from vitral.device import seed_everything


def random_images(count: int, channels: int = 3, size: tuple[int, int] = (23, 31)) -> Tensor:
    """Smooth images: with noise at every pixel, rounding ties of a rotation would change many pixels."""
    rough = torch.stack([torch.from_numpy(noise(i, (5, 6))).permute(2, 0, 1) for i in range(count)])
    smooth = torch.nn.functional.interpolate(rough[:, :channels].float(), size, mode="bilinear")
    return smooth.round().to(torch.uint8)


def _affine(image: Tensor, **how: object) -> Tensor:
    plain = {"angle": 0.0, "translate": [0, 0], "scale": 1.0, "shear": [0.0, 0.0], **how}
    return tv.affine(image, **plain)


def _degrees(strength: float) -> float:
    return math.degrees(math.atan(strength))


THEIRS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "shear-x": lambda image, m: _affine(image, shear=[_degrees(m), 0.0], center=[0, 0]),
    "shear-y": lambda image, m: _affine(image, shear=[0.0, _degrees(m)], center=[0, 0]),
    "translate-x": lambda image, m: _affine(image, translate=[int(m), 0]),
    "translate-y": lambda image, m: _affine(image, translate=[0, int(m)]),
    "rotate": lambda image, m: tv.rotate(image, angle=m),
    "brightness": lambda image, m: tv.adjust_brightness(image, 1 + m),
    "color": lambda image, m: tv.adjust_saturation(image, 1 + m),
    "contrast": lambda image, m: tv.adjust_contrast(image, 1 + m),
    "sharpness": lambda image, m: tv.adjust_sharpness(image, 1 + m),
    "posterize": lambda image, m: tv.posterize(image, bits=8 - round(abs(m))),
    "solarize": lambda image, m: tv.solarize(image, threshold=255 * (1 - abs(m))),
    "identity": lambda image, m: image,
    "autocontrast": lambda image, m: tv.autocontrast(image),
    "equalize": lambda image, m: tv.equalize(image),
}
NAMES = {"Color": "color", "AutoContrast": "autocontrast"}
"""torchvision's names of operations that differ by more than case."""


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", TRIVIAL)
def test_each_operation_equals_torchvisions(name, channels):
    """Up to one pixel in two hundred, whose sampling position is a tie, and one level by rounding."""
    images = torch.cat([random_images(60, channels), torch.full((1, channels, 23, 31), 7, dtype=torch.uint8)])
    shares = torch.linspace(-1, 1, 61)
    strength = shares * TRIVIAL[name].strength
    if name in MATRICES:
        found = move(images, MATRICES[name](strength, 23, 31))
    else:
        found = OPERATIONS[name](images, strength)
    assert (found.dtype, found.shape) == (images.dtype, images.shape)
    wanted = torch.stack([THEIRS[name](image, float(m)) for image, m in zip(images, strength, strict=True)])
    apart = (found.int() - wanted.int()).abs()
    assert (apart > 1).float().mean() < 0.005
    assert (apart > 0).float().mean() < 0.02
    if name != "identity" and not (name == "color" and channels == 1):
        assert (found != images).any(), "it did something"


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (2, 9), (300, 200)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_images_of_any_size(name, size):
    images = random_images(4, size=size)
    strength = torch.tensor([-1.0, -0.3, 0.3, 1.0]) * TRIVIAL[name].strength
    wanted = torch.stack([THEIRS[name](image, float(m)) for image, m in zip(images, strength, strict=True)])
    assert (OPERATIONS[name](images, strength).int() - wanted.int()).abs().max() <= 1


@pytest.mark.parametrize(("ours", "theirs"), [(TRIVIAL, v2.TrivialAugmentWide), (RANDOM, v2.RandAugment)])
def test_strengths_are_torchvisions(ours, theirs):
    height, width = 20, 30
    for name, (magnitudes, signed) in theirs._AUGMENTATION_SPACE.items():
        name = NAMES.get(name, name.replace("X", "-x").replace("Y", "-y").lower())
        limit = ours[name]
        side = height if name == "translate-y" else width
        wanted = magnitudes(BINS, height, width)
        if wanted is None:
            assert limit.strength == 0
            continue
        strengths = torch.linspace(0, 1, BINS) * limit.strength * (side if limit.of_width else 1)
        if name == "posterize":
            strengths = 8 - strengths.round()
        elif name == "solarize":
            strengths = 1 - strengths
        torch.testing.assert_close(strengths.float(), wanted.float())
        assert signed == (name not in ("posterize", "solarize"))
    assert len(ours) == len(theirs._AUGMENTATION_SPACE)


@pytest.fixture
def image_counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Number of images that each operation processed."""
    counts: dict[str, int] = dict.fromkeys(TRIVIAL, 0)

    def counted(name, original, first):
        def operation(*args):
            counts[name] += len(args[first])
            return original(*args)

        return operation

    monkeypatch.setattr(operations, "OPERATIONS", {name: counted(name, op, 0) for name, op in OPERATIONS.items()})
    monkeypatch.setattr(operations, "MATRICES", {name: counted(name, op, 0) for name, op in MATRICES.items()})
    return counts


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 3, 14, 40])
def test_operations_are_equally_frequent(image_counts, batch):
    seed_everything(1)
    calls = 1400 // batch
    for _ in range(calls):
        trivial_augment(random_images(1).expand(batch, -1, -1, -1))
    assert sum(image_counts.values()) == calls * batch
    assert max(abs(count - calls * batch / 14) for count in image_counts.values()) <= 4 * math.sqrt(calls * batch / 14)


def test_images_keep_their_order():
    """Each result is at its image's position; at strength 0 most operations change nothing."""
    images = torch.arange(60, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 8, 8).contiguous() * 4
    seed_everything(0)
    found = rand_augment(images, 1, 0)
    same = (found == images).flatten(1).all(1)  # unchanged by all but solarize, equalize and autocontrast
    assert same.float().mean() > 0.75


def test_strength_and_operation_are_drawn_per_image():
    images = random_images(1).expand(200, -1, -1, -1)
    seed_everything(0)
    found = trivial_augment(images)
    assert len({tuple(image.flatten().tolist()) for image in found}) > 100
    seed_everything(0)
    assert torch.equal(found, trivial_augment(images)), "the same seed, the same images"
    stronger = rand_augment(images, 2, 30).float() - images.float()
    weaker = rand_augment(images, 2, 3).float() - images.float()
    assert stronger.abs().mean() > 2 * weaker.abs().mean()
    assert not torch.equal(rand_augment(images, 2, 9), rand_augment(images, 2, 9))


@pytest.mark.parametrize("name", TRIVIAL)
def test_pieces_equal_the_whole(name, monkeypatch):
    """To the bit: results depend neither on other images of a batch nor on the size of a piece."""
    images, strength = random_images(11), torch.linspace(-1, 1, 11) * TRIVIAL[name].strength
    function, numbers = OPERATIONS.get(name, move), strength
    if name in MATRICES:
        numbers = MATRICES[name](strength, 23, 31)
    whole = function(images, numbers)
    for piece in (1, 3 * images[0].numel()):
        monkeypatch.setattr(operations, "_PIECE", piece)
        assert torch.equal(operations.in_pieces(function, images, numbers), whole)
    assert operations.in_pieces(function, images[:0], numbers[:0]).shape == (0, 3, 23, 31)
