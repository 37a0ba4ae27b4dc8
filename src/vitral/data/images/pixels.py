"""Conversion of pixels to uint8 grayscale or RGB: modes, 16 bits, transparency, orientation."""

from __future__ import annotations

from typing import cast

import numpy as np
from PIL import Image

from vitral.errors import UsageError

_STRIP = 1 << 20  # pixels that are converted at a time
WHITE = (255, 255, 255)
ORIENTATION = 0x0112  # EXIF tag 274
Levels = tuple[int, int]
"""Values that are black and white."""
LEVELS = (0, 65535)
"""Those of 16 bits, unless others are stated."""
FRACTIONS, BYTES = (0, 1), (0, 255)
"""Those of floats: one of the two for a set, unless others are stated."""
UNSURE = "which are not surely 0 to 1 or 0 to 255"


def check_levels(levels: object) -> None:
    """Raise `UsageError` unless these are levels, or None."""
    whole = isinstance(levels, tuple) and len(levels) == 2 and all(type(n) is int and abs(n) < 2**31 for n in levels)
    if levels is not None and not (whole and levels[0] < levels[1]):  # type: ignore[index]  # a tuple
        raise UsageError(f"levels {levels} are not two whole numbers, black below white")


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
    if rows >= image.height:
        small = _to_gray_or_rgb(image, background, levels)
        return finish_pixels(np.array(small.transpose(UPRIGHT[turn]) if turn > 1 else small), channels)
    return _by_strips(image, channels, background, levels, turn, rows)


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
    levels: Levels | None,
    turn: int,
    rows: int,
) -> np.ndarray:
    """Convert a large image, `rows` at a time: only the image and the result are in memory as a whole."""
    width, height = image.size
    strips = [(top, min(top + rows, height)) for top in range(0, height, rows)]
    if image.mode in ("I", "F") and levels is None:
        limits = [_limits(np.asarray(image.crop((0, top, width, end)))) for top, end in strips]
        levels = _levels_of_file(image, min(low for low, _ in limits), max(high for _, high in limits))
    upright = stored = np.empty(0, np.uint8)
    for top, end in strips:
        strip = _to_gray_or_rgb(image.crop((0, top, width, end)), background, levels)
        pixels = finish_pixels(np.asarray(strip), channels)
        if top == 0:
            sides = (width, height) if turn >= 5 else (height, width)
            upright = np.empty((*sides, pixels.shape[2]), np.uint8)
            stored = _as_stored(upright, turn)
        stored[top:end] = pixels
    return upright


def _as_stored(upright: np.ndarray, orientation: int) -> np.ndarray:
    """View of an upright image (H, W, C) in the file's orientation: the inverse of `turn_upright`."""
    if orientation in (2, 3, 6, 7):
        upright = upright[:, ::-1]
    if orientation in (3, 4, 7, 8):
        upright = upright[::-1]
    return upright.swapaxes(0, 1) if orientation >= 5 else upright


def _to_gray_or_rgb(image: Image.Image, background: tuple[int, int, int], levels: Levels | None) -> Image.Image:
    """Convert any mode to "L" or "RGB". The levels of 32-bit values are by default derived from this image."""
    mode = image.mode
    if mode in ("LA", "La", "PA", "RGBA", "RGBa") or ("transparency" in image.info and mode in ("1", "L", "P", "RGB")):
        return compose_alpha(image, background)
    if mode in ("L", "RGB"):
        return image
    if mode == "1":
        return image.convert("L")
    if mode.startswith("I;16"):
        return Image.fromarray(scaled(np.asarray(image), levels or LEVELS))
    if mode in ("I", "F"):
        values = np.asarray(image)
        return Image.fromarray(scaled(values, levels or _levels_of_file(image, *_limits(values))))
    if mode in ("P", "CMYK", "YCbCr", "HSV", "RGBX"):
        return image.convert("RGB")
    raise ValueError(f"pixel mode '{mode}' is not supported")


def compose_alpha(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """Composite an image on a solid background; gray stays gray."""
    gray = image.mode in ("1", "L", "LA", "La")
    if image.mode in ("La", "RGBa", "PA"):
        image = image.convert({"La": "LA", "RGBa": "RGBA", "PA": "RGBA"}[image.mode])
    colors = image.convert("LA" if gray else "RGBA")
    color = Image.new("RGB", (1, 1), background).convert("L").getpixel((0, 0)) if gray else background
    base = Image.new("L" if gray else "RGB", image.size, cast(tuple[int, int, int], color))
    base.paste(colors.convert(base.mode), mask=colors.getchannel("A"))
    return base


def to_uint8(values: np.ndarray, levels: Levels | None = None) -> np.ndarray:
    """An array as uint8: bool, 8 and 16 bits by their type, other integers as 0..255, floats as `float_levels` has it.
    With `levels`, floats and integers of 16 bits and more are black at the first and white at the second.

    `ValueError` for values outside these ranges. A scale taken from each image's own limits would differ between
    images of one set.
    """
    if values.dtype == np.uint8:
        return values
    if values.dtype == np.bool_:
        return values.astype(np.uint8) * 255
    kind, width = values.dtype.kind, values.dtype.itemsize
    if kind not in "iuf":
        raise ValueError(f"values of type {values.dtype} are not an image")
    if kind == "f":
        return scaled(values, levels or float_levels(*_limits(values)))
    levels = None if levels == FRACTIONS else levels  # those of floats
    if width > 1 and (levels is not None or (kind, width) == ("u", 2)):
        return scaled(values, levels or LEVELS)
    low, high = _limits(values)
    if low < 0 or high > 255:
        raise ValueError(
            f"integers from {low:g} to {high:g}: 8 bits have 0 to 255; for 16 bits pass an array of uint16"
        )
    return values.astype(np.uint8)


def scaled_integers(values: np.ndarray, levels: Levels) -> np.ndarray:
    """Integers from black to white as 0..255, the nearest; what is outside is black or white."""
    black, white = levels
    fits = values.dtype.itemsize <= 2 and abs(black) + abs(white) < 2**23  # products of 255 in 32 bits: half the memory
    steps = values.astype(np.int32 if fits else np.int64).clip(black, white) - black
    return ((steps * 255 + (white - black) // 2) // (white - black)).astype(np.uint8)


def scaled(values: np.ndarray, levels: Levels) -> np.ndarray:
    """Floats, or integers of more than 8 bits, from black to white as 0..255; what is outside is black or white.

    `ValueError` for values that do not belong to these levels: far outside those of floats, or floats of 0..1 where
    other levels count steps.
    """
    is_float = values.dtype.kind == "f"
    if levels in (FRACTIONS, BYTES) or is_float:
        low, high = _limits(values)
        if levels in (FRACTIONS, BYTES) and not _fits(low, high, levels):
            raise ValueError(f"values from {low:g} to {high:g} in a set of {levels[0]} to {levels[1]}; add --levels")
        counted = levels[1] - levels[0] > 32  # else fractions may be meant
        if levels != BYTES and counted and low < high and _fits(low, high, FRACTIONS):
            why = f"floats from {low:g} to {high:g} where {levels[0]:,} is black and {levels[1]:,} white"
            raise ValueError(f"{why}: keep the values as they were stored")
    return _scaled_floats(values, levels) if is_float else scaled_integers(values, levels)


def _scaled_floats(values: np.ndarray, levels: Levels) -> np.ndarray:
    black, white = levels
    return np.rint((_finite(values) - black) * 255 / (white - black)).clip(0, 255).astype(np.uint8)


def float_levels(low: float, high: float) -> Levels:
    """Levels of floats with these limits; `ValueError` if they fit neither 0..1 nor 0..255, or it is not sure which."""
    if _fits(low, high, FRACTIONS):
        return FRACTIONS
    if high >= 2 and _fits(low, high, BYTES):
        return BYTES
    raise ValueError(f"floats from {low:g} to {high:g}, {UNSURE}: add --levels, or scale them first")


def _fits(low: float, high: float, levels: Levels) -> bool:
    """True with a margin, since resampling overshoots."""
    return (low >= -0.5 and high <= 1.5) if levels == FRACTIONS else (low >= -45 and high <= 300)


def _levels_of_file(image: Image.Image, low: float, high: float) -> Levels:
    """Levels of a file's 32-bit values with these limits; `ValueError` if they are ambiguous."""
    if image.mode == "F":
        return float_levels(low, high)
    # Pillow scales a PPM to 16 bits by the maximum stated in the file.
    if image.format != "PPM" and (low < 0 or high > 65535 or 0 < high <= 255):
        raise ValueError(
            f"32-bit integers from {low:g} to {high:g} state no range: add --levels, or save as 8 or 16 bits"
        )
    return LEVELS


def _finite(values: np.ndarray) -> np.ndarray:
    return np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)


def _limits(values: np.ndarray) -> tuple[float, float]:
    finite = _finite(values)
    return float(finite.min()), float(finite.max())


def finish_pixels(pixels: np.ndarray, channels: int | None) -> np.ndarray:
    """Convert (H, W) or (H, W, C) to (H, W, channels)."""
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if channels == 3 and pixels.shape[2] == 1:
        return np.repeat(pixels, 3, axis=2)
    if channels == 1 and pixels.shape[2] == 3:
        return np.array(Image.fromarray(pixels).convert("L"))[..., None]
    return np.ascontiguousarray(pixels)
