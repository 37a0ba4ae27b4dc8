"""Operations on batches are torchvision's on each picture."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from pictures import noise
from vitral.data import operations
from vitral.data.operations import BINS, MATRICES, OPERATIONS, RANDOM, TRIVIAL, move, rand_augment, trivial_augment
from vitral.device import seed_everything


def pictures(count: int, channels: int = 3, size: tuple[int, int] = (23, 31)) -> Tensor:
    """Smooth ones: with noise at every pixel, a rotation's ties would show everywhere."""
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
    "colour": lambda image, m: tv.adjust_saturation(image, 1 + m),
    "contrast": lambda image, m: tv.adjust_contrast(image, 1 + m),
    "sharpness": lambda image, m: tv.adjust_sharpness(image, 1 + m),
    "posterize": lambda image, m: tv.posterize(image, bits=8 - round(abs(m))),
    "solarize": lambda image, m: tv.solarize(image, threshold=255 * (1 - abs(m))),
    "identity": lambda image, m: image,
    "autocontrast": lambda image, m: tv.autocontrast(image),
    "equalize": lambda image, m: tv.equalize(image),
}
NAMES = {"Color": "colour", "AutoContrast": "autocontrast"}
"""torchvision's names where ours are no small letters of them."""


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", TRIVIAL)
def test_each_is_torchvisions(name, channels):
    """But for a pixel of two hundred that lies between two, and a level where sums were rounded."""
    images = torch.cat([pictures(60, channels), torch.full((1, channels, 23, 31), 7, dtype=torch.uint8)])
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
    if name != "identity" and not (name == "colour" and channels == 1):
        assert (found != images).any(), "it did something"


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (2, 9), (300, 200)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_pictures_of_any_size(name, size):
    images = pictures(4, size=size)
    strength = torch.tensor([-1.0, -0.3, 0.3, 1.0]) * TRIVIAL[name].strength
    wanted = torch.stack([THEIRS[name](image, float(m)) for image, m in zip(images, strength, strict=True)])
    assert (OPERATIONS[name](images, strength).int() - wanted.int()).abs().max() <= 1


@pytest.mark.parametrize(("ours", "theirs"), [(TRIVIAL, v2.TrivialAugmentWide), (RANDOM, v2.RandAugment)])
def test_strengths_are_torchvisions(ours, theirs):
    height, width = 20, 30
    for name, (magnitudes, signed) in theirs._AUGMENTATION_SPACE.items():
        name = NAMES.get(name, name.replace("X", "-x").replace("Y", "-y").lower())
        most = ours[name]
        side = height if name == "translate-y" else width
        wanted = magnitudes(BINS, height, width)
        if wanted is None:
            assert most.strength == 0
            continue
        strengths = torch.linspace(0, 1, BINS) * most.strength * (side if most.of_width else 1)
        if name == "posterize":
            strengths = 8 - strengths.round()
        elif name == "solarize":
            strengths = 1 - strengths
        torch.testing.assert_close(strengths.float(), wanted.float())
        assert signed == (name not in ("posterize", "solarize"))
    assert len(ours) == len(theirs._AUGMENTATION_SPACE)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many pictures each operation was given."""
    counts: dict[str, int] = dict.fromkeys(TRIVIAL, 0)

    def counted(name, original, first):
        def operation(*args):
            counts[name] += len(args[first])
            return original(*args)

        return operation

    monkeypatch.setattr(operations, "OPERATIONS", {name: counted(name, op, 0) for name, op in OPERATIONS.items()})
    monkeypatch.setattr(operations, "MATRICES", {name: counted(name, op, 0) for name, op in MATRICES.items()})
    return counts


@pytest.mark.parametrize("batch", [1, 3, 14, 40])
def test_each_operation_is_as_frequent_as_the_others(told, batch):
    seed_everything(1)
    calls = 1400 // batch
    for _ in range(calls):
        trivial_augment(pictures(1).expand(batch, -1, -1, -1))
    assert sum(told.values()) == calls * batch
    assert max(abs(count - calls * batch / 14) for count in told.values()) <= 4 * math.sqrt(calls * batch / 14)


def test_pictures_keep_their_places():
    """Each comes back where it was, whatever was done to it; many are as they were in one of fourteen, at least."""
    images = torch.arange(60, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 8, 8).contiguous() * 4
    seed_everything(0)
    found = rand_augment(images, 1, 0)
    same = (found == images).flatten(1).all(1)  # of strength 0, all but solarize and equalize and autocontrast
    assert same.float().mean() > 0.75


def test_strength_and_operation_are_each_pictures_own():
    images = pictures(1).expand(200, -1, -1, -1)
    seed_everything(0)
    found = trivial_augment(images)
    assert len({tuple(picture.flatten().tolist()) for picture in found}) > 100
    seed_everything(0)
    assert torch.equal(found, trivial_augment(images)), "the same seed, the same pictures"
    stronger = rand_augment(images, 2, 30).float() - images.float()
    weaker = rand_augment(images, 2, 3).float() - images.float()
    assert stronger.abs().mean() > 2 * weaker.abs().mean()
    assert not torch.equal(rand_augment(images, 2, 9), rand_augment(images, 2, 9))


@pytest.mark.parametrize("name", TRIVIAL)
def test_pieces_are_the_whole(name, monkeypatch):
    """To the bit: a picture's neighbours in a batch change nothing, nor how many of them are taken at a time."""
    images, strength = pictures(11), torch.linspace(-1, 1, 11) * TRIVIAL[name].strength
    function, numbers = OPERATIONS.get(name, move), strength
    if name in MATRICES:
        numbers = MATRICES[name](strength, 23, 31)
    whole = function(images, numbers)
    for piece in (1, 3 * images[0].numel()):
        monkeypatch.setattr(operations, "_PIECE", piece)
        assert torch.equal(operations.in_pieces(function, images, numbers), whole)
    assert operations.in_pieces(function, images[:0], numbers[:0]).shape == (0, 3, 23, 31)
