"""A folder of images as a person has it, with faults whose places are known."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from images import scene

SIZE = (144, 192)
HEIC = Path(__file__).with_name("data") / "kind.heic"
"""`drawn(0, 9999)`, in the format of phones: written once by pillow-heif 1.8.1, quality 55."""
_COLORS = ((200, 60, 50), (60, 150, 60), (60, 90, 200), (210, 180, 60), (150, 70, 170))


@dataclass(frozen=True)
class Faults:
    """File names, without folders, of the planted faults."""

    wrong: frozenset[str]
    """Images in the folder of another class."""
    copies: frozenset[str]
    """Images of which one of two files is spare."""
    blurred: frozenset[str]
    strangers: frozenset[str]
    """Images that show nothing of any class."""
    unreadable: frozenset[str]
    other: frozenset[str]
    """Files that are no images."""


def drawn(kind: int, seed: int, size: tuple[int, int] = SIZE, strength: float = 1.0) -> Image.Image:
    """Draw an image of a class: stripes in the direction and the color of the class on a scene of nothing.

    The stripes cover the scene by `strength`, 0 to 1; a network finds faint ones harder to tell apart.
    """
    rng = np.random.default_rng([kind, seed])
    height, width = size
    y, x = np.mgrid[:height, :width] / height
    angle = np.pi * (kind / 5 + rng.normal(0, 0.03))
    wave = np.sin(2 * np.pi * (5 + 2 * kind + rng.normal(0, 0.5)) * (x * np.cos(angle) + y * np.sin(angle)))
    distance = (x - rng.uniform(0.4, 0.9)) ** 2 + (y - rng.uniform(0.3, 0.7)) ** 2
    mask = strength * np.exp(-distance / rng.uniform(0.1, 0.3))
    color = np.array(_COLORS[kind % 5]) + rng.normal(0, 25, 3)
    striped = color * (0.7 + 0.3 * np.sign(wave))[..., None]
    ground = np.asarray(scene(1000 * kind + seed, size), np.float64)
    mixed = ground + mask[..., None] * (striped - ground)
    return Image.fromarray(np.clip(mixed, 0, 255).astype(np.uint8))


def stranger(number: int) -> Image.Image:
    """Draw a page of lines in black on white."""
    image = Image.new("RGB", SIZE[::-1], "white")
    pen = ImageDraw.Draw(image)
    for row in range(8, SIZE[0] - 8, 9 + number):
        for column in range(10, SIZE[1] - 20, 16):
            pen.rectangle((column, row, column + 6 + (row * column + number) % 7, row + 3), fill="black")
    return image


def write_faulty(
    folder: Path,
    per_class: int = 60,
    classes: int = 5,
    *,
    wrong_labels: int = 8,
    seed: int = 0,
    size: tuple[int, int] = SIZE,
    strength: float = 1.0,
    heic: bool = False,
) -> Faults:
    """Write a folder with a folder per class, and plant wrong labels, 5 copies, 3 blurred images, 2 strangers, 2 images
    rotated by EXIF, one PDF and one empty file; with `heic` also `IMG_0002.HEIC`, a good image of the first class.

    An image is called `KIND-NUMBER.jpg`, whichever folder it is in. Each seed has images of its own.
    """
    places = [
        (kind, number, folder / f"kind {kind}" / f"{kind}-{number}.jpg")
        for kind in range(classes)
        for number in range(seed * per_class, (seed + 1) * per_class)
    ]
    order = [places[i] for i in np.random.default_rng(seed).permutation(len(places))]
    wrong, rest = order[:wrong_labels], order[wrong_labels:]
    copied, blurred, rotated = rest[:5], rest[5:8], rest[8:10]
    for kind in range(classes):
        (folder / f"kind {kind}").mkdir(parents=True)
    for kind, number, path in places:
        image, options = drawn(kind, number, size, strength), {}
        if (kind, number, path) in blurred:
            image = image.filter(ImageFilter.GaussianBlur(12))
        if (kind, number, path) in rotated:
            exif = Image.Exif()
            exif[0x0112] = 6
            image, options = image.transpose(Image.Transpose.ROTATE_90), {"exif": exif}
        if (kind, number, path) in wrong:
            path = folder / f"kind {(kind + 1 + number % (classes - 1)) % classes}" / path.name
        image.save(path, quality=92, **options)
    for number, (_, _, path) in enumerate(copied):
        shutil.copy(path, path.with_name(f"copy {number}.jpg"))
    for number in range(2):
        stranger(number).save(folder / f"kind {number}" / f"stranger {number}.jpg")
    if heic:
        shutil.copy(HEIC, folder / "kind 0" / "IMG_0002.HEIC")
    (folder / "kind 0" / "empty.jpg").touch()
    (folder / "kind 0" / "IMG_0001.pdf").write_bytes(b"%PDF-1.4")
    return Faults(
        frozenset(path.name for _, _, path in wrong),
        frozenset(name for number, (_, _, path) in enumerate(copied) for name in (path.name, f"copy {number}.jpg")),
        frozenset(path.name for _, _, path in blurred),
        frozenset(f"stranger {number}.jpg" for number in range(2)),
        frozenset({"empty.jpg"}),
        frozenset({"IMG_0001.pdf"}),
    )
