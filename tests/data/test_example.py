"""The image that a page offers to try is small, upright and without metadata."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitral.data.images.example import example
from vitral.errors import ImageError


def test_a_photograph_becomes_a_small_png_without_its_place(tmp_path: Path) -> None:
    pixels = np.zeros((1500, 2000, 3), np.uint8)
    pixels[:, 1000:] = 200
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    exif.get_ifd(0x8825)[1] = "N"  # the place
    Image.fromarray(pixels).save(tmp_path / "a.jpg", exif=exif)
    with Image.open(io.BytesIO(example(tmp_path / "a.jpg"))) as image:
        assert (image.format, image.size) == ("PNG", (768, 1024))
        assert not image.getexif()
        assert image.getpixel((384, 10)) == (0, 0, 0)
        assert min(image.getpixel((384, 1000))) > 190


def test_a_small_image_keeps_its_pixels(tmp_path: Path) -> None:
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    with Image.open(io.BytesIO(example(tmp_path / "a.png"))) as image:
        assert np.array_equal(np.asarray(image), pixels)
    (tmp_path / "b.png").write_bytes(b"none")
    with pytest.raises(ImageError):
        example(tmp_path / "b.png")
