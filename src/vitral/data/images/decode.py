"""Image decoding: training, evaluation, prediction and explanation read every image through `read_image`.

Images are untrusted input, so the header is checked before any pixel is decoded: the format must be on a short list
(identified by the first bytes, never by the file's name), and bytes and pixels have limits. The result is always
upright, uint8, (height, width, channels).

torchvision, if loaded (`lazy_torchvision`), decodes plain 8-bit JPEGs to the same pixels as Pillow, a quarter faster.
Pillow decodes every other image.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import cast

import numpy as np
import torch
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
    features,
)

from vitral.data.images.color import Profile, conversion_of, profile_of
from vitral.data.images.file_kinds import kind_of, media_brand
from vitral.data.images.jpeg_header import MAX_PLAIN, PlainJpeg
from vitral.data.images.lazy_torchvision import loaded
from vitral.data.images.levels import LEVELS, to_uint8
from vitral.data.images.pixels import (
    WHITE,
    compose_alpha,
    finish_pixels,
    from_pillow,
    orientation_of,
    stated_maximum,
    turn_upright,
)
from vitral.errors import ImageError, UsageError

DECODING = 1
"""Version of the pixels that files are decoded to: part of the keys of everything that is kept of them."""

MAX_BYTES = 256 << 20
"""Largest image file, in bytes."""

MAX_PIXELS = 1 << 27
"""Largest image, in pixels: 134 megapixels, 384 MiB as RGB."""

MAX_MEMORY = 1 << 30
"""Peak memory of reading one image, in bytes: file, decoder and result together. A JPEG above it is decoded at 1/2,
1/4 or 1/8 of its size; any other image is refused."""

_SPARE = 64 << 20  # for conversions of a strip and the decoders' own tables


# Bytes that a decoder holds for each pixel in addition to Pillow's image, measured as the peak of a process (Pillow
# 13). WebP composes in two canvases, a decoded one and a copy; Pillow's Python reader of PPM keeps a list of numbers.
_DECODING = {"webp": 16, "ppm": 60, "ppm_plain": 60}
EXTENSIONS = frozenset(
    {
        ".jpg",
        ".jpeg",
        ".jpe",
        ".jfif",
        ".png",
        ".webp",
        ".bmp",
        ".gif",
        ".tif",
        ".tiff",
        ".avif",
        ".heic",
        ".heif",
        ".ppm",
        ".pgm",
        ".pbm",
        ".pnm",
    }
)
"""Extensions of images in a folder or archive, in lower case."""
READ = "JPEG, PNG, WebP, AVIF, BMP, GIF, TIFF and PPM"
"""Formats that are read; HEIC with an extra, too."""


_MODES = {"L": 1, "RGB": 3}  # torchvision's ImageReadMode


def _jpeg_operator() -> Callable[[torch.Tensor, int], torch.Tensor] | None:
    """torchvision's JPEG decoder, or None if torchvision is not loaded: Pillow then decodes to the same pixels."""
    return _operator() if loaded() else None


@cache
def _operator() -> Callable[[torch.Tensor, int], torch.Tensor] | None:
    """torchvision's JPEG operator, or None if torchvision was built without it.

    The function that wraps it warns of its removal at every call (torchvision 0.29).
    """
    try:
        return cast(Callable[[torch.Tensor, int], torch.Tensor], torch.ops.image.decode_jpeg.default)
    except (AttributeError, RuntimeError):
        return None


# First bytes and reader of each format. Pillow's own `open` would try some forty formats, and has another size limit.
_FORMATS: tuple[tuple[tuple[bytes, ...], Callable[[io.BytesIO], Image.Image]], ...] = (
    ((b"\xff\xd8\xff",), lambda file: cast(Image.Image, JpegImagePlugin.jpeg_factory(file))),
    ((b"\x89PNG\r\n\x1a\n",), PngImagePlugin.PngImageFile),
    ((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), TiffImagePlugin.TiffImageFile),
    ((b"GIF87a", b"GIF89a"), GifImagePlugin.GifImageFile),
    ((b"BM",), BmpImagePlugin.BmpImageFile),
    ((b"P1", b"P2", b"P3", b"P4", b"P5", b"P6"), PpmImagePlugin.PpmImageFile),
)


def _avif_reader() -> Callable[[io.BytesIO], Image.Image] | None:
    return AvifImagePlugin.AvifImageFile if features.check("avif") else None


@cache
def _heic_reader() -> Callable[[io.BytesIO], Image.Image] | None:
    """The reader of the extra, decoders only; None if it is not installed."""
    try:
        from pi_heif import HeifImageFile
    except ImportError:
        return None
    return cast(Callable[[io.BytesIO], Image.Image], HeifImageFile)


_MEDIA: dict[str, Callable[[], Callable[[io.BytesIO], Image.Image] | None]] = {
    "AVIF": _avif_reader,
    "HEIC": _heic_reader,
}


_HEIC_EXTRA = "pip install 'vitral[heic]'"


def missing_reader(names: Iterable[str]) -> str:
    """Return a hint if HEIC is not read here and a file has its extension, else ""."""
    if _MEDIA["HEIC"]() is None and any(name.lower().endswith((".heic", ".heif")) for name in names):
        return f"HEIC needs {_HEIC_EXTRA}"
    return ""


def _unreadable(data: bytes, name: str) -> ImageError:
    """The error for a file of a format that is not read: its kind, and the way out."""
    if brand := media_brand(data) if media_brand(data) in _MEDIA else "":
        extra = _HEIC_EXTRA if brand == "HEIC" else "a Pillow with AVIF"
        return ImageError(name, f"a {brand} image, which needs {extra}; or convert it to JPEG")
    kind, hint = kind_of(data)
    if kind:
        return ImageError(name, f"it is {kind}: {hint}")
    return ImageError(name, f"not a {READ.replace(' and ', ' or ')} image")


@dataclass(frozen=True)
class Probe:
    """Header fields of an image; nothing is decoded."""

    height: int
    """Pixels, as stored: before EXIF orientation."""
    width: int
    mode: str
    """Pillow's pixel mode: "L", "RGB", "P", "CMYK", "I;16" …"""
    channels: int
    """Channels that `read_image` returns by default: 1 or 3."""
    format: str
    """JPEG, PNG, WEBP, AVIF, HEIF, BMP, GIF, TIFF or PPM."""
    profile: Profile | None = None
    """The color profile; None without one."""
    several: bool = False
    """True for an animation and for a file of several pages, of which the first one is read."""


def probe(data: bytes, *, name: str = "image") -> Probe:
    """Read size, mode and format of an encoded image from its header; `ImageError` for an unsupported one."""
    return describe(_open(data, name))


def describe(image: Image.Image) -> Probe:
    """`Probe` of an open Pillow image."""
    gray = image.mode in ("1", "L", "LA", "La", "I", "F") or image.mode.startswith("I;16")
    kind = {"MPO": "JPEG"}.get(image.format or "", image.format or "")
    channels = 1 if gray else 3
    return Probe(image.height, image.width, image.mode, channels, kind, profile_of(image), _has_several(image))


def _has_several(image: Image.Image) -> bool:
    if image.format in ("JPEG", "MPO"):  # of a phone: maps of depth or of light beside the one image
        return False
    try:
        return bool(getattr(image, "is_animated", False))
    except Exception:  # as in read_image: a damaged second frame does not matter
        return False


def deep_values(raw: bytes | np.ndarray) -> np.ndarray | None:
    """Integers of a gray image with more than 8 bits, or floats, as stored; None for any other, and for a PGM that
    states another white than 65535. `ImageError` if unreadable.
    """
    if isinstance(raw, np.ndarray):
        return raw if raw.dtype == np.uint16 or raw.dtype.kind == "f" else None
    image = _open(raw, "image")
    if not image.mode.startswith(("I", "F")) or stated_maximum(image) not in (None, LEVELS[1]):
        return None
    try:
        return np.asarray(image)
    except Exception as error:  # as in read_image
        raise ImageError("image", _reason(error)) from error


def read_image(
    image: bytes | bytearray | memoryview | str | os.PathLike[str] | Image.Image | np.ndarray,
    *,
    name: str | None = None,
    channels: int | None = None,
    background: tuple[int, int, int] = WHITE,
    at_least: tuple[int, int] | None = None,
    levels: tuple[int, int] | None = None,
) -> np.ndarray:
    """Read any image as uint8 (H, W, C), upright, in newly allocated memory.

    `image` is an encoded file (bytes or path), a Pillow image, or an array (H, W) or (H, W, C) with C in 1 to 4,
    where 2 and 4 end in alpha. `channels` is 1 or 3; None keeps gray images gray and converts all others to RGB.
    Transparent pixels show `background`. Colors with a profile are converted to sRGB (`color`). 16 bits are scaled to
    8. Floats are 0..1 or 0..255, an array of other integers is 0..255, a file of 32-bit integers is 0..65535; other
    values are an error (`levels`). With `levels`, floats and integers of 16 and 32 bits in gray images are black at the
    first and white at the second. Of an animation the first frame is read. With `at_least` = (height, width), a JPEG
    may be decoded at 1/2, 1/4 or 1/8 of its size as long as it stays that large. A JPEG that would take more than
    `MAX_MEMORY` is always decoded smaller.

    Raises `ImageError` with `name` (by default the path) if the image cannot be read or exceeds a limit, `UsageError`
    for another number of channels.
    """
    if channels not in (None, 1, 3):
        why = "images are read with 1 or 3"
        raise UsageError(f"a network of {channels} channels", where=name, why=why, hint="examples/satellite.py")
    if isinstance(image, str | os.PathLike):
        name = name or os.fspath(image)
        image = _read_file(image, name)
    name = name or "image"
    try:
        if isinstance(image, np.ndarray):
            return _from_array(image, channels, background, levels)
        if isinstance(image, Image.Image):
            _check_pixels(image, name)
            _check_memory(image, name, 0)
            return from_pillow(image, channels, background, levels)
        return _decode(bytes(image), name, channels, background, at_least, levels)
    except ImageError:
        raise
    except Exception as error:  # decoders raise any type of exception on malformed input
        raise ImageError(name, _reason(error)) from error


def _read_file(path: str | os.PathLike[str], name: str) -> bytes:
    try:
        if os.path.isdir(path):
            os.scandir(path).close()  # permission errors come first: they are more specific than "not a file"
        if os.path.exists(path) and not os.path.isfile(path):
            raise ImageError(name, "not a file")
        check_link(path)
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except ImageError:
        raise
    except (OSError, ValueError) as error:  # of a zero byte in the path
        raise ImageError(name, getattr(error, "strerror", None) or str(error)) from error
    return data


def check_link(path: str | os.PathLike[str]) -> None:
    """Raise FileNotFoundError, with the path that it leads to, for a link to nothing."""
    if os.path.islink(path):
        try:
            os.stat(path)
        except FileNotFoundError as error:
            raise FileNotFoundError(error.errno, f"a broken link to {os.readlink(path)}") from None


# Exceptions of Python in a decoder, which speak of its buffers, not of the file; Pillow passes on their words.
_OF_PYTHON = (
    struct.error,
    zlib.error,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    EOFError,
    UnicodeError,
)
_DAMAGED = ("truncated", "broken png file", "invalid literal for int")


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "not enough memory"
    text = str(error).strip() or type(error).__name__
    of_python = any(isinstance(one, _OF_PYTHON) and str(one) == str(error) for one in (error, error.__cause__))
    return "truncated or damaged" if of_python or any(words in text.lower() for words in _DAMAGED) else text


def _open(data: bytes, name: str) -> Image.Image:
    """Open a file as a lazy Pillow image, checked against formats and limits."""
    if not data:
        raise ImageError(name, "empty file")
    if len(data) > MAX_BYTES:
        raise ImageError(name, f"more than {MAX_BYTES:,} bytes")
    is_webp = data[:4] == b"RIFF" and data[8:12] == b"WEBP"
    reader = WebPImagePlugin.WebPImageFile if is_webp else next((r for m, r in _FORMATS if data.startswith(m)), None)
    reader = reader or _MEDIA.get(media_brand(data), lambda: None)()
    if reader is None:
        raise _unreadable(data, name)
    try:
        image = reader(io.BytesIO(data))
        _check_pixels(image, name)
        if image.format not in ("JPEG", "MPO"):  # JPEGs can be decoded smaller
            _check_memory(image, name, len(data))
        _check_bands(image, name)
    except ImageError:
        raise
    except Exception as error:  # as in read_image: malformed input, any exception
        if "samples per pixel" in str(error):  # a TIFF with more than Pillow knows of
            raise ImageError(name, _BANDS, hint=_BANDS_HINT) from error
        raise ImageError(name, f"damaged header: {_reason(error)}") from error
    return image


_BANDS, _BANDS_HINT = "it has more channels than color and alpha", "examples/satellite.py trains on any number"


def _check_bands(image: Image.Image, name: str) -> None:
    """Raise `ImageError` for a TIFF with further channels, such as infrared, which Pillow would leave out."""
    samples = image.tag_v2.get(277, 1) if isinstance(image, TiffImagePlugin.TiffImageFile) else 1
    if samples > len(image.getbands()):
        raise ImageError(name, _BANDS, hint=_BANDS_HINT)


def _check_memory(image: Image.Image, name: str, size: int) -> None:
    """Raise `ImageError` for an image that would take more than `MAX_MEMORY`; `size` is that of its file."""
    needed = _memory(image) + size
    if needed > MAX_MEMORY:
        why = f"{image.width} × {image.height} pixels ({image.mode}) would take {needed >> 20:,} MiB of memory"
        raise ImageError(name, f"{why}; the limit is {MAX_MEMORY >> 20:,} MiB", hint="make it smaller")


def _memory(image: Image.Image, scale: int = 1) -> int:
    """Peak bytes of decoding an image at 1/scale of its size and converting it, without its file."""
    pixels = image.width * image.height
    stored = {"1": 1, "L": 1, "P": 1}.get(image.mode, 2 if image.mode.startswith("I;16") else 4)
    result = describe(image).channels
    decoding = _decoding(image)
    if image.format in ("JPEG", "MPO"):
        return math.ceil(pixels * (stored / scale**2 + max(decoding, 3 / scale**2))) + _SPARE
    return math.ceil(pixels * (stored + max(decoding, 3 if result == 3 else 1))) + _SPARE


def _decoding(image: Image.Image) -> float:
    """Bytes per pixel that the decoder holds in addition to the image."""
    if image.format in ("JPEG", "MPO"):
        # 16-bit coefficients if a component comes in more than one scan, which any file may do.
        layers = [(across, down) for _, across, down, _ in cast(JpegImagePlugin.JpegImageFile, image).layer]
        most = max(across for across, _ in layers) * max(down for _, down in layers)
        return 2 * sum(across * down for across, down in layers) / most
    if image.format in ("WEBP", "AVIF", "HEIF"):
        return _DECODING["webp"]
    tiles = getattr(image, "tile", None) or []
    if image.format == "TIFF" and any(tile[0] != "raw" for tile in tiles):
        return _decoding_tiff(cast(TiffImagePlugin.TiffImageFile, image))
    return max((_DECODING.get(tile[0], 0) for tile in tiles), default=0)


def _decoding_tiff(image: TiffImagePlugin.TiffImageFile) -> float:
    """Bytes per pixel for a compressed TIFF.

    libtiff unpacks a strip or a tile at a time, which may be the whole image, and some of them to RGBA.
    """
    tags = image.tag_v2
    bits, samples = tags.get(258, (1,)), tags.get(277, 1)
    tall, wide = tags.get(278, image.height), image.width
    if 322 in tags:
        tall, wide = tags.get(323, image.height), tags[322]
    share = tall * wide / (image.height * image.width)
    return float((max(bits) * max(samples, len(bits)) / 8 + 4) * (share if 322 in tags else min(share, 1)))


def _check_pixels(image: Image.Image, name: str) -> None:
    if image.width * image.height > MAX_PIXELS:
        raise ImageError(name, f"{image.width} × {image.height} pixels; the limit is {MAX_PIXELS:,} in all")
    if not image.width or not image.height:
        raise ImageError(name, "an image without pixels")


def _decode(
    data: bytes,
    name: str,
    channels: int | None,
    background: tuple[int, int, int],
    at_least: tuple[int, int] | None,
    levels: tuple[int, int] | None,
) -> np.ndarray:
    plain_jpeg = PlainJpeg.of(data, at_least) if len(data) <= MAX_BYTES else None
    if plain_jpeg and (pixels := _decode_jpeg(data, plain_jpeg.mode)) is not None:
        return finish_pixels(pixels, channels)
    image = _open(data, name)
    if image.format in ("JPEG", "MPO") and image.mode in ("L", "RGB"):
        full_size = image.size
        turn = orientation_of(image)
        if at_least:
            image.draft(None, at_least if turn >= 5 else at_least[::-1])  # Pillow wants (width, height), as stored
        plain = image.size == full_size and image.width * image.height <= MAX_PLAIN and not conversion_of(image)
        if plain and (pixels := _decode_jpeg(data, image.mode)) is not None:
            return finish_pixels(turn_upright(pixels, turn), channels)
    if image.format in ("JPEG", "MPO"):
        _make_smaller(image, name, len(data))
    return from_pillow(image, channels, background, levels)


def _make_smaller(image: Image.Image, name: str, size: int) -> None:
    """Set a JPEG to be decoded at the largest scale that fits `MAX_MEMORY`."""
    drafted = getattr(image, "decoderconfig", None) or (1,)
    if _memory(image) + size <= MAX_MEMORY or drafted[0] > 1:
        return
    for scale in (2, 4, 8):
        if _memory(image, scale) + size <= MAX_MEMORY:
            image.draft(None, (image.width // scale, image.height // scale))
            return
    _check_memory(image, name, size)


def _decode_jpeg(data: bytes, mode: str) -> np.ndarray | None:
    """Decode with torchvision to (H, W, C); None if it fails: Pillow then tries, and reports the error."""
    operator = _jpeg_operator()
    if operator is None:
        return None
    try:
        pixels = operator(torch.frombuffer(bytearray(data), dtype=torch.uint8), _MODES[mode])
    except RuntimeError:
        return None
    return pixels.permute(1, 2, 0).numpy()


def _from_array(
    array: np.ndarray, channels: int | None, background: tuple[int, int, int], levels: tuple[int, int] | None
) -> np.ndarray:
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[2] not in (1, 2, 3, 4) or not array.size:
        raise ValueError(f"an array {array.shape} is not an image; expected (H, W), or (H, W, C) with C from 1 to 4")
    if array.shape[0] * array.shape[1] > MAX_PIXELS:
        raise ValueError(f"{array.shape[1]} × {array.shape[0]} pixels; the limit is {MAX_PIXELS:,} in all")
    pixels = to_uint8(array, levels)
    if pixels.shape[2] in (2, 4):
        image = Image.fromarray(np.ascontiguousarray(pixels), "LA" if pixels.shape[2] == 2 else "RGBA")
        pixels = np.array(compose_alpha(image, background))
    return finish_pixels(pixels if pixels is not array and pixels.base is None else pixels.copy(), channels)
