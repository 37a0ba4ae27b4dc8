"""Conversion of Pillow's modes to uint8 grayscale or RGB: palettes, 16 bits, transparency, orientation."""

from __future__ import annotations

from typing import cast

import numpy as np
from PIL import Image

from vitral.data.images.color import Convert, conversion_of
from vitral.data.images.levels import (
    BYTES,
    FRACTIONS,
    LEVELS,
    Levels,
    Limits,
    file_levels,
    float_levels,
    integer_levels,
    scaled,
)

_STRIP = 1 << 20  # pixels that are converted at a time
WHITE = (255, 255, 255)
ORIENTATION = 0x0112  # EXIF tag 274

# EXIF 2.32, 4.6.4 A: the transpose that turns an image with this orientation upright.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def orientation_of(image: Image.Image) -> int:
    """EXIF orientation; 1 (upright) if it is missing or damaged."""
    if image.format == "JPEG" and "exif" not in image.info:
        return 1  # most images: nothing to parse
    try:
        value = image.getexif().get(ORIENTATION, 1)
    except Exception:  # EXIF is another file format inside the image; damage there must not lose the image
        return 1
    return value if value in UPRIGHT else 1


def turn_upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Turn pixels (H, W, C) upright, as Pillow's transpose by `UPRIGHT` does."""
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def from_pillow(
    image: Image.Image, channels: int | None, background: tuple[int, int, int], levels: Levels | None = None
) -> np.ndarray:
    """Convert to uint8 (H, W, C), upright.

    Raises `ValueError` for 16 bits in color with stated levels: Pillow keeps the upper 8 bits alone.
    """
    maximum = stated_maximum(image)
    if levels == FRACTIONS and image.mode != "F":
        levels = None  # those of floats
    if levels is not None:
        if _is_deep_color(image, maximum):
            raise ValueError("16 bits in color are read as 8: --levels is for gray images")
        # Pillow scales values below a maximum of their own to 16 bits.
        levels = (levels[0] * LEVELS[1] // maximum, levels[1] * LEVELS[1] // maximum) if maximum else levels
    image.load()
    turn, rows = orientation_of(image), max(1, _STRIP // image.width)
    measured = levels is not None and image.mode.startswith("I")  # and no color
    convert = None if measured else conversion_of(image)
    levels = _levels_of(image, levels, rows)
    if rows >= image.height:
        small = _to_gray_or_rgb(image, background, levels, convert)
        return finish_pixels(np.array(small.transpose(UPRIGHT[turn]) if turn > 1 else small), channels)
    return _by_strips(image, channels, background, levels, convert, turn, rows)


def stated_maximum(image: Image.Image) -> int | None:
    """White of a PPM that is not loaded yet, if that has more than 8 bits."""
    found = [tile[3][1] for tile in getattr(image, "tile", None) or () if str(tile[0]).startswith("ppm")]
    return found[0] if found and found[0] > 255 else None


def _is_deep_color(image: Image.Image, maximum: int | None) -> bool:
    deep = maximum or any(";16" in str(tile[3]) for tile in getattr(image, "tile", None) or ())
    return bool(deep) and not image.mode.startswith("I")


def _by_strips(
    image: Image.Image,
    channels: int | None,
    background: tuple[int, int, int],
    levels: Levels,
    convert: Convert | None,
    turn: int,
    rows: int,
) -> np.ndarray:
    """Convert a large image, `rows` at a time: only the image and the result are in memory as a whole."""
    width, height = image.size
    upright = stored = np.empty(0, np.uint8)
    for top, end in _strips(height, rows):
        strip = _to_gray_or_rgb(image.crop((0, top, width, end)), background, levels, convert)
        pixels = finish_pixels(np.asarray(strip), channels)
        if top == 0:
            sides = (width, height) if turn >= 5 else (height, width)
            upright = np.empty((*sides, pixels.shape[2]), np.uint8)
            stored = _as_stored(upright, turn)
        stored[top:end] = pixels
    return upright


def _strips(height: int, rows: int) -> list[tuple[int, int]]:
    """First row and row after the last one of each part of an image."""
    return [(top, min(top + rows, height)) for top in range(0, height, rows)]


def _levels_of(image: Image.Image, known: Levels | None, rows: int) -> Levels:
    """Levels of a loaded image of 16 bits and more; those of 16 bits, unused, for another one."""
    deep = image.mode in ("I", "F") or (known == BYTES and image.mode.startswith("I;16"))
    if not deep:
        return integer_levels(Limits(0, 0), known)
    parts = (image.crop((0, top, image.width, end)) for top, end in _strips(image.height, rows))
    limits = Limits.of(np.asarray(part) for part in parts)
    if image.mode == "F":
        return float_levels(limits, known)
    if image.mode == "I":  # Pillow scales a PPM to 16 bits by the maximum stated in the file
        return file_levels(limits, known, states_white=image.format == "PPM")
    return integer_levels(limits, known)


def _as_stored(upright: np.ndarray, orientation: int) -> np.ndarray:
    """View of an upright image (H, W, C) in the file's orientation: the inverse of `turn_upright`."""
    if orientation in (2, 3, 6, 7):
        upright = upright[:, ::-1]
    if orientation in (3, 4, 7, 8):
        upright = upright[::-1]
    return upright.swapaxes(0, 1) if orientation >= 5 else upright


def _to_gray_or_rgb(
    image: Image.Image, background: tuple[int, int, int], levels: Levels, convert: Convert | None
) -> Image.Image:
    """Convert any mode to "L" or "RGB", with the colors of sRGB; more than 8 bits by their levels."""
    mode = image.mode
    if mode in ("LA", "La", "PA", "RGBA", "RGBa") or ("transparency" in image.info and mode in ("1", "L", "P", "RGB")):
        return compose_alpha(image, background, convert)
    if mode in ("I", "F") or mode.startswith("I;16"):
        image = Image.fromarray(scaled(np.asarray(image), levels))
    elif mode == "1":
        image = image.convert("L")
    elif mode in ("P", "YCbCr", "HSV", "RGBX") or (mode == "CMYK" and convert is None):
        image = image.convert("RGB")
    elif mode not in ("L", "RGB", "CMYK"):
        raise ValueError(f"pixel mode '{mode}' is not supported")
    return convert(image) if convert else image


def compose_alpha(image: Image.Image, background: tuple[int, int, int], convert: Convert | None = None) -> Image.Image:
    """Composite an image, converted to sRGB, on a solid background; gray stays gray."""
    gray = image.mode in ("1", "L", "LA", "La")
    if image.mode in ("La", "RGBa", "PA"):
        image = image.convert({"La": "LA", "RGBa": "RGBA", "PA": "RGBA"}[image.mode])
    colors = image.convert("LA" if gray else "RGBA")
    color = Image.new("RGB", (1, 1), background).convert("L").getpixel((0, 0)) if gray else background
    base = Image.new("L" if gray else "RGB", image.size, cast(tuple[int, int, int], color))
    solid = colors.convert(base.mode)
    base.paste(convert(solid) if convert else solid, mask=colors.getchannel("A"))
    return base


def finish_pixels(pixels: np.ndarray, channels: int | None) -> np.ndarray:
    """Convert (H, W) or (H, W, C) to (H, W, channels)."""
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if channels == 3 and pixels.shape[2] == 1:
        return np.repeat(pixels, 3, axis=2)
    if channels == 1 and pixels.shape[2] == 3:
        return np.array(Image.fromarray(pixels).convert("L"))[..., None]
    return np.ascontiguousarray(pixels)
