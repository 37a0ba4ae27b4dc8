"""One way in for every picture: training, evaluation, prediction, explanation and serving read through `read_image`.

Pictures come from anywhere, so the header is judged before a pixel is decoded: the format must be on a short list
(told by the first bytes, never by the file's name), and bytes and pixels have limits. What comes out is always upright,
uint8, (height, width, channels).

Where torchvision is loaded, which is for many pictures (`vitral.data.kernels`), it decodes plain 8-bit JPEGs: to the
same pixels as Pillow, about a quarter faster. Every other picture is decoded by Pillow.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import cast

import numpy as np
import torch
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from vitral.data.kernels import loaded
from vitral.errors import ImageError

MAX_BYTES = 256 << 20
"""Largest file that is read as a picture."""
MAX_PIXELS = 1 << 27
"""Largest picture that is decoded: 134 megapixels, 384 MiB as RGB."""

EXTENSIONS = frozenset(
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm")
)
"""What makes a file in a folder or archive count as a picture, in lower case."""

WHITE = (255, 255, 255)
ORIENTATION = 0x0112  # EXIF tag 274
# EXIF 2.32, 4.6.4 A: what turns a picture stored with this orientation upright.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# JPEG markers (ITU T.81, table B.1).
_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive
_SCAN, _APP1 = 0xDA, 0xE1
_HARMLESS = frozenset((0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)))  # tables, restart interval, comment, application

_MODES = {"L": 1, "RGB": 3}  # torchvision's ImageReadMode


def _jpeg_operator() -> Callable[[torch.Tensor, int], torch.Tensor] | None:
    """torchvision's JPEG decoder, or None: Pillow then decodes everything, to the same pixels."""
    return _operator() if loaded() else None


@cache
def _operator() -> Callable[[torch.Tensor, int], torch.Tensor] | None:
    """The operator itself, because torchvision 0.29 announces, at every call of the function around it, that it will
    go; None where it was built without.
    """
    try:
        return cast(Callable[[torch.Tensor, int], torch.Tensor], torch.ops.image.decode_jpeg.default)
    except (AttributeError, RuntimeError):
        return None


# The first bytes and who reads them. Pillow's own `open` would try some forty formats, and has a limit of its own.
_FORMATS: tuple[tuple[tuple[bytes, ...], Callable[[io.BytesIO], Image.Image]], ...] = (
    ((b"\xff\xd8\xff",), lambda file: cast(Image.Image, JpegImagePlugin.jpeg_factory(file))),
    ((b"\x89PNG\r\n\x1a\n",), PngImagePlugin.PngImageFile),
    ((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), TiffImagePlugin.TiffImageFile),
    ((b"GIF87a", b"GIF89a"), GifImagePlugin.GifImageFile),
    ((b"BM",), BmpImagePlugin.BmpImageFile),
    ((b"P1", b"P2", b"P3", b"P4", b"P5", b"P6"), PpmImagePlugin.PpmImageFile),
)


@dataclass(frozen=True)
class Probe:
    """What the header of a picture says; nothing is decoded."""

    height: int
    """Pixels, as stored: before EXIF orientation."""
    width: int
    mode: str
    """Pillow's name for the kind of pixel: "L", "RGB", "P", "CMYK", "I;16" …"""
    channels: int
    """What `read_image` gives when not told otherwise: 1 or 3."""
    format: str
    """JPEG, PNG, WEBP, BMP, GIF, TIFF or PPM."""


def probe(data: bytes, *, name: str = "picture") -> Probe:
    """Size, kind and format of an encoded picture, from its header; `ImageError` where it is none that we read."""
    return describe(_open(data, name))


def describe(picture: Image.Image) -> Probe:
    """`Probe` of a picture that is open already."""
    grey = picture.mode in ("1", "L", "LA", "La", "I", "F") or picture.mode.startswith("I;16")
    kind = {"MPO": "JPEG"}.get(picture.format or "", picture.format or "")
    return Probe(picture.height, picture.width, picture.mode, 1 if grey else 3, kind)


def read_image(
    picture: bytes | bytearray | memoryview | str | os.PathLike[str] | Image.Image | np.ndarray,
    *,
    name: str | None = None,
    channels: int | None = None,
    background: tuple[int, int, int] = WHITE,
    at_least: tuple[int, int] | None = None,
) -> np.ndarray:
    """Any picture as uint8 (H, W, C), upright, in memory of its own.

    `picture` is an encoded file (bytes or path), a Pillow image, or an array (H, W) or (H, W, C) with C in 1 to 4,
    where 2 and 4 end in alpha. `channels` is 1 or 3; None keeps grey grey and makes everything else RGB. What is
    transparent shows `background`. 16 bits are scaled to 8; floats and 32-bit integers are taken as 0..1, 0..255 or
    0..65535, whichever is the first that holds them all, else stretched from their least to their greatest value. Of an
    animation the first frame is read. `at_least` = (height, width) lets a JPEG be decoded at 1/2, 1/4 or 1/8 of its
    size as long as it stays that large.

    Raises `ImageError` with `name` (by default the path) where the picture cannot be read or is over a limit.
    """
    if channels not in (None, 1, 3):
        raise ValueError(f"channels must be 1, 3 or None, not {channels}")
    if isinstance(picture, str | os.PathLike):
        name = name or os.fspath(picture)
        picture = _read_file(picture, name)
    name = name or "picture"
    try:
        if isinstance(picture, np.ndarray):
            return _from_array(picture, channels, background)
        if isinstance(picture, Image.Image):
            _check_pixels(picture, name)
            return _from_pillow(picture, channels, background)
        return _decode(bytes(picture), name, channels, background, at_least)
    except ImageError:
        raise
    except Exception as error:  # a decoder meets any bytes at all, and raises whatever its parser stumbled over
        raise ImageError(name, _reason(error)) from error


def _read_file(path: str | os.PathLike[str], name: str) -> bytes:
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise ImageError(name, "not a file")
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ImageError(name, error.strerror or str(error)) from error
    return data


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "not enough memory"
    text = str(error).strip() or type(error).__name__
    return "truncated or damaged" if "truncated" in text.lower() else text


# ---------------------------------------------------------------- encoded files


def _open(data: bytes, name: str) -> Image.Image:
    """The header as a lazy Pillow image, checked against format list and limits."""
    if not data:
        raise ImageError(name, "empty file")
    if len(data) > MAX_BYTES:
        raise ImageError(name, f"more than {MAX_BYTES:,} bytes")
    is_webp = data[:4] == b"RIFF" and data[8:12] == b"WEBP"
    reader = WebPImagePlugin.WebPImageFile if is_webp else next((r for m, r in _FORMATS if data.startswith(m)), None)
    if reader is None:
        raise ImageError(name, "not a JPEG, PNG, WebP, BMP, GIF, TIFF or PPM picture")
    try:
        image = reader(io.BytesIO(data))
    except Exception as error:  # as in read_image: hostile bytes, any exception
        raise ImageError(name, f"damaged header: {_reason(error)}") from error
    _check_pixels(image, name)
    return image


def _check_pixels(image: Image.Image, name: str) -> None:
    if image.width * image.height > MAX_PIXELS:
        raise ImageError(name, f"{image.width} × {image.height} pixels; the limit is {MAX_PIXELS:,} in all")
    if not image.width or not image.height:
        raise ImageError(name, "a picture without pixels")


def _decode(
    data: bytes,
    name: str,
    channels: int | None,
    background: tuple[int, int, int],
    at_least: tuple[int, int] | None,
) -> np.ndarray:
    if (pixels := _decode_plain_jpeg(data, at_least)) is not None:
        return _finish(pixels, channels)
    image = _open(data, name)
    if image.format in ("JPEG", "MPO") and image.mode in ("L", "RGB"):
        full_size = image.size
        turn = _orientation(image)
        if at_least:
            image.draft(None, at_least if turn >= 5 else at_least[::-1])  # Pillow wants (width, height), as stored
        if image.size == full_size and (pixels := _decode_jpeg(data, image.mode)) is not None:
            return _finish(_turn(pixels, turn), channels)
    return _from_pillow(image, channels, background)


def _decode_plain_jpeg(data: bytes, at_least: tuple[int, int] | None = None) -> np.ndarray | None:
    """(H, W, C) of a JPEG that has nothing special about it, EXIF included; None where Pillow must look, which can
    decode at half the size.

    Walks the segments up to the scan (ITU T.81, B.1.1): Pillow's header parser would cost a tenth of the decoding.
    """
    mode, at = "", 2
    if not data.startswith(b"\xff\xd8\xff") or len(data) > MAX_BYTES:
        return None
    while at + 10 <= len(data) and data[at] == 0xFF and data[at + 1] != _SCAN:
        kind = data[at + 1]
        if kind in _FRAMES:
            bits, height, width, components = struct.unpack_from(">BHHB", data, at + 4)
            mode = {1: "L", 3: "RGB"}.get(components, "")
            if bits != 8 or not 0 < height * width <= MAX_PIXELS:
                return None
            if at_least and height >= 2 * at_least[0] and width >= 2 * at_least[1]:
                return None
        elif kind not in _HARMLESS or (kind == _APP1 and data[at + 4 : at + 8] == b"Exif"):
            return None
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return _decode_jpeg(data, mode) if mode else None


def _decode_jpeg(data: bytes, mode: str) -> np.ndarray | None:
    """(H, W, C), or None where torchvision cannot; Pillow then tries, and says what is wrong."""
    operator = _jpeg_operator()
    if operator is None:
        return None
    try:
        pixels = operator(torch.frombuffer(bytearray(data), dtype=torch.uint8), _MODES[mode])
    except RuntimeError:
        return None
    return pixels.permute(1, 2, 0).numpy()


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 (upright) where there is none or the EXIF is broken."""
    if image.format == "JPEG" and "exif" not in image.info:
        return 1  # most pictures: nothing to parse
    try:
        value = image.getexif().get(ORIENTATION, 1)
    except Exception:  # EXIF is a foreign file format inside the picture; broken EXIF must not cost the picture
        return 1
    return value if value in UPRIGHT else 1


def _turn(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """The same as Pillow's transpose by `UPRIGHT`, on (H, W, C)."""
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


# ---------------------------------------------------------------- pixels


def _from_pillow(image: Image.Image, channels: int | None, background: tuple[int, int, int]) -> np.ndarray:
    source = image
    image.load()
    image = _to_grey_or_rgb(image, background)
    if (turn := _orientation(source)) > 1:
        image = image.transpose(UPRIGHT[turn])
    return _finish(np.array(image), channels)


def _to_grey_or_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """Mode "L" or "RGB", whatever the mode was."""
    mode = image.mode
    if mode in ("LA", "La", "PA", "RGBA", "RGBa") or ("transparency" in image.info and mode in ("1", "L", "P", "RGB")):
        return _compose(image, background)
    if mode in ("L", "RGB"):
        return image
    if mode == "1":
        return image.convert("L")
    if mode in ("I", "F") or mode.startswith("I;16"):
        return Image.fromarray(_to_uint8(np.asarray(image)))
    if mode in ("P", "CMYK", "YCbCr", "HSV", "RGBX"):
        return image.convert("RGB")
    raise ValueError(f"pixels of kind '{mode}' are not supported")


def _compose(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """The picture laid on a plain background; grey stays grey."""
    grey = image.mode in ("1", "L", "LA", "La")
    if image.mode in ("La", "RGBa", "PA"):
        image = image.convert({"La": "LA", "RGBa": "RGBA", "PA": "RGBA"}[image.mode])
    colours = image.convert("LA" if grey else "RGBA")
    colour = Image.new("RGB", (1, 1), background).convert("L").getpixel((0, 0)) if grey else background
    base = Image.new("L" if grey else "RGB", image.size, cast(tuple[int, int, int], colour))
    base.paste(colours.convert(base.mode), mask=colours.getchannel("A"))
    return base


def _from_array(array: np.ndarray, channels: int | None, background: tuple[int, int, int]) -> np.ndarray:
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[2] not in (1, 2, 3, 4) or not array.size:
        raise ValueError(f"an array {array.shape} is not a picture; wanted (H, W), or (H, W, C) with C from 1 to 4")
    if array.shape[0] * array.shape[1] > MAX_PIXELS:
        raise ValueError(f"{array.shape[1]} × {array.shape[0]} pixels; the limit is {MAX_PIXELS:,} in all")
    pixels = _to_uint8(array)
    if pixels.shape[2] in (2, 4):
        image = Image.fromarray(np.ascontiguousarray(pixels), "LA" if pixels.shape[2] == 2 else "RGBA")
        pixels = np.array(_compose(image, background))
    return _finish(pixels if pixels is not array and pixels.base is None else pixels.copy(), channels)


def _to_uint8(values: np.ndarray) -> np.ndarray:
    """Values of any real type scaled to 0..255, as told in `read_image`."""
    if values.dtype == np.uint8:
        return values
    if values.dtype == np.bool_:
        return values.astype(np.uint8) * 255
    if values.dtype.kind == "u" and values.dtype.itemsize == 2:
        return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)
    if values.dtype.kind not in "iuf":
        raise ValueError(f"values of type {values.dtype} are not a picture")
    is_float = values.dtype.kind == "f"
    wide = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    low, scale = _range(float(wide.min()), float(wide.max()), is_float)
    return np.rint((wide - low) * scale).clip(0, 255).astype(np.uint8)


def _range(low: float, high: float, is_float: bool) -> tuple[float, float]:
    """What to subtract and to multiply by."""
    if low >= 0 and high <= 65535:
        return 0.0, 255.0 if is_float and high <= 1 else 1.0 if high <= 255 else 1 / 257
    return low, 255.0 / (high - low) if high > low else 0.0


def _finish(pixels: np.ndarray, channels: int | None) -> np.ndarray:
    """(H, W) or (H, W, C) -> (H, W, channels)."""
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if channels == 3 and pixels.shape[2] == 1:
        return np.repeat(pixels, 3, axis=2)
    if channels == 1 and pixels.shape[2] == 3:
        return np.array(Image.fromarray(pixels).convert("L"))[..., None]
    return np.ascontiguousarray(pixels)
