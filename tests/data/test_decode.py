from __future__ import annotations

import io
import re
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitral.data.images import decode as intake
from vitral.data.images import lazy_torchvision as kernels
from vitral.data.images.decode import probe, read_image
from vitral.data.images.pixels import ORIENTATION
from vitral.errors import ImageError

H, W = 24, 40


def gradient(height: int = H, width: int = W) -> np.ndarray:
    """A smooth RGB image without symmetry: JPEG preserves it, and every rotation changes it."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([255 * x / width, 255 * y / height, 40 + 100 * x / width], -1).astype(np.uint8)


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


@pytest.fixture(autouse=True, params=["pillow", "torchvision"])
def _decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run tests with both JPEG decoders, whether torchvision is loaded or not."""
    kernels.torchvision()
    monkeypatch.setattr(intake, "loaded", lambda: request.param == "torchvision")


def jpeg(**options: object) -> bytes:
    return encoded(Image.fromarray(gradient()), "JPEG", quality=95, **options)


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[ORIENTATION] = orientation
    return tags.tobytes()


def png_header(width: int, height: int, bits: int = 8, color: int = 2) -> bytes:
    """A PNG with a header of this size and almost no data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def close(a: np.ndarray, b: np.ndarray, most: float = 6) -> bool:
    return a.shape == b.shape and float(np.abs(a.astype(int) - b).mean()) < most


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "PPM", "WEBP"])
def test_lossless_formats_come_back_exactly(format: str) -> None:
    data = encoded(Image.fromarray(gradient()), format, **({"lossless": True} if format == "WEBP" else {}))
    assert np.array_equal(read_image(data), gradient())
    assert probe(data).format == format


@pytest.mark.parametrize("format", ["PNG", "JPEG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_turns_the_image_upright(format: str, orientation: int) -> None:
    # A camera stores a rotated image; these are the inverse transforms of EXIF's eight cases.
    stored = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.swapaxes(0, 1),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
        8: lambda a: np.rot90(a, -1),
    }[orientation](gradient())
    data = encoded(Image.fromarray(np.ascontiguousarray(stored)), format, exif=exif(orientation), quality=95)
    assert close(read_image(data), gradient())


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")  # a warning of Pillow, not an error
@pytest.mark.parametrize(
    "broken", [b"Exif\0\0garbage", b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0"]
)
def test_broken_exif_does_not_lose_the_image(broken: bytes) -> None:
    assert close(read_image(jpeg(exif=broken)), gradient())


@pytest.mark.parametrize("orientation", [0, 9, 255, 65535])
def test_meaningless_orientation_is_ignored(orientation: int) -> None:
    assert close(read_image(jpeg(exif=exif(orientation))), gradient())


def test_sixteen_bits_are_scaled_and_not_clipped() -> None:
    values = np.array([[0, 257, 32768, 65535]], np.uint16)
    data = encoded(Image.fromarray(values), "PNG")
    assert probe(data).channels == 1
    assert read_image(data).ravel().tolist() == [0, 1, 128, 255]
    assert read_image(values).ravel().tolist() == [0, 1, 128, 255]


def test_sixteen_bit_gray_with_a_netpbm_maximum() -> None:
    data = b"P5 2 1 65535\n" + struct.pack(">HH", 0, 65535)
    assert read_image(data).ravel().tolist() == [0, 255]
    assert read_image(b"P5 3 1 15\n\x00\x05\x0f").ravel().tolist() == [0, 85, 255]


def test_one_bit_is_black_and_white() -> None:
    bits = np.array([[True, False, True]])
    assert read_image(encoded(Image.fromarray(bits), "PNG")).ravel().tolist() == [255, 0, 255]
    assert read_image(bits).ravel().tolist() == [255, 0, 255]


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.0, 0.5, 1.0009], [0, 128, 255]),  # rounding
        ([0.0, 51.0, 255.0], [0, 51, 255]),
        ([-9.0, 51.0, 260.0], [0, 51, 255]),  # resampling overshoots
        ([0.0, 5.0, 32.0], [0, 5, 32]),
        ([0.0, float("nan"), 1.0], [0, 0, 255]),
    ],
)
def test_floats_are_0_to_1_or_0_to_255(values: list[float], wanted: list[int]) -> None:
    array = np.array([values], np.float32)
    assert read_image(array).ravel().tolist() == wanted
    assert read_image(encoded(Image.fromarray(array), "TIFF")).ravel().tolist() == wanted


@pytest.mark.parametrize(
    "values",
    [
        [-1.0, 0.0, 1.0],
        [0.0, 1.7],
        [0.0, 65535.0],
        [-3.0, -3.0],
        [-100.0, 255.0],
        [-0.2, 0.5, 1.0],
        [-2.1, 2.64],
        [0.0, 4.0],
        [-0.3, 9.5],
        [-0.01, 100.0],
        [0.0, 31.9],
    ],
)
def test_floats_of_another_range_are_refused(values: list[float]) -> None:
    array = np.array([values], np.float32)
    for image in (array, encoded(Image.fromarray(array), "TIFF")):
        with pytest.raises(ImageError, match="not surely 0 to 1 or 0 to 255"):
            read_image(image)


@pytest.mark.parametrize("kind", ["array", "TIFF"])
def test_floats_without_a_finite_value_are_refused(kind: str) -> None:
    array = np.full((2, 2), np.nan, np.float32)
    with pytest.raises(ImageError, match="without a finite value"):
        read_image(array if kind == "array" else encoded(Image.fromarray(array), "TIFF"))


@pytest.mark.parametrize("levels", [None, (0, 1), (0, 255), (0, 4095), (0, 65535)])
@pytest.mark.parametrize("kind", ["array", "PIL", "TIFF"])
def test_standardized_pixels_are_refused_whatever_levels_are_known(kind: str, levels: tuple[int, int] | None) -> None:
    share = (gradient()[..., 0] / 255) ** 3
    for values in ((share - 0.485) / 0.229, (share - share.mean()) / share.std()):
        image = Image.fromarray(values.astype(np.float32))
        given = {"array": values, "PIL": image, "TIFF": encoded(image, "TIFF")}[kind]
        with pytest.raises(ImageError, match=r"(floats|values) from"):
            read_image(given, levels=levels)


def test_a_large_image_of_floats_has_one_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.vstack([np.full((40, 50), 0.5), np.full((40, 50), 3000.5)]).astype(np.float32)
    monkeypatch.setattr("vitral.data.images.pixels._STRIP", 1000)
    found = read_image(encoded(Image.fromarray(values), "TIFF"), levels=(0, 4095))
    assert sorted(set(found.ravel().tolist())) == [0, 187], "its dark half alone could be fractions"


def test_integers_have_the_range_that_their_container_states() -> None:
    array = np.array([[0, 257, 65535]], np.int32)
    assert read_image(encoded(Image.fromarray(array), "TIFF")).ravel().tolist() == [0, 1, 255]
    assert read_image(np.array([[0, 7, 255]], np.int64)).ravel().tolist() == [0, 7, 255]
    with pytest.raises(ImageError, match="uint16"):
        read_image(array)
    for values in ([0, 200], [-1, 300], [0, 70_000]):  # 8 bits, or a dark image of 16
        with pytest.raises(ImageError, match="save as 8 or 16 bits"):
            read_image(encoded(Image.fromarray(np.array([values], np.int32)), "TIFF"))


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_alpha_shows_the_background(mode: str, format: str) -> None:
    image = Image.new(mode, (3, 1), 0)
    image.putalpha(Image.fromarray(np.array([[0, 128, 255]], np.uint8)))
    assert read_image(encoded(image, format), channels=1).ravel().tolist() == [255, 127, 0]
    assert read_image(encoded(image, format), channels=3, background=(255, 0, 0))[0, 0].tolist() == (
        [255, 0, 0] if mode == "RGBA" else [76, 76, 76]  # gray stays gray: the red's luminance
    )
    assert read_image(np.array(image), channels=1).ravel().tolist() == [255, 127, 0]


def test_palette_with_a_transparent_color() -> None:
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "L").convert("P")
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    for transparency in (1, b"\xff\x00\xff"):
        pixels = read_image(encoded(image, "PNG", transparency=transparency))
        assert pixels[0].tolist() == [[255, 0, 0], [255, 255, 255], [0, 0, 255]]
    assert read_image(encoded(image, "PNG"))[0].tolist() == [[255, 0, 0], [0, 255, 0], [0, 0, 255]]


@pytest.mark.parametrize(("mode", "key"), [("RGB", (0, 0, 0)), ("L", 0)])
def test_a_transparent_key_color_shows_the_background(mode: str, key: object) -> None:
    data = encoded(Image.new(mode, (2, 2), 0), "PNG", transparency=key)
    assert (read_image(data, channels=3) == 255).all()


@pytest.mark.parametrize("format", ["JPEG", "TIFF"])
def test_cmyk_comes_out_in_its_colors(format: str) -> None:
    data = encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), format)  # magenta and yellow ink: red
    assert close(read_image(data), np.tile(np.array([255, 0, 0], np.uint8), (16, 16, 1)))
    assert probe(data).mode == "CMYK"


def test_an_animation_gives_its_first_frame() -> None:
    frames = [Image.new("P", (6, 4), color) for color in (0, 1)]
    for frame in frames:
        frame.putpalette([10, 20, 30, 200, 210, 220])
    for format, options in (("GIF", {}), ("PNG", {}), ("WEBP", {"lossless": True})):
        images = frames if format == "GIF" else [frame.convert("RGB") for frame in frames]
        data = encoded(images[0], format, save_all=True, append_images=images[1:], **options)
        assert (read_image(data) == [10, 20, 30]).all(), format


def test_a_jpeg_of_several_images_gives_the_first() -> None:
    data = encoded(Image.fromarray(gradient()), "MPO", save_all=True, append_images=[Image.new("RGB", (W, H))])
    assert close(read_image(data), gradient())
    assert probe(data).format == "JPEG"


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F"])
def test_every_mode_has_the_requested_channels(mode: str, channels: int) -> None:
    gray = Image.fromarray(gradient()[..., 0])
    wide = {"I;16": np.uint16, "I": np.int32}.get(mode)
    image = gray.convert(mode) if wide is None else Image.fromarray(np.asarray(gray).astype(wide) * wide(257))
    pixels = read_image(encoded(image, "TIFF"), channels=channels)
    assert pixels.shape == (H, W, channels)
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    if mode != "1":
        assert close(pixels[..., :1], np.asarray(gray)[..., None], 3)
    assert np.array_equal(read_image(image, channels=channels), pixels)


def test_arrays_and_pillow_images_are_read_like_files(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(gradient()).save(path)
    ways = (path, str(path), path.read_bytes(), bytearray(path.read_bytes()), Image.open(path), gradient())
    for image in ways:
        assert np.array_equal(read_image(image), gradient())  # type: ignore[arg-type]


def test_the_result_is_never_the_callers_array() -> None:
    array = gradient()
    read_image(array)[:] = 0
    assert np.array_equal(array, gradient())


@pytest.mark.parametrize("shape", [(3,), (2, 2, 5), (0, 4), (2, 2, 3, 1)])
def test_arrays_that_are_no_images_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ImageError, match="not an image"):
        read_image(np.zeros(shape, np.uint8))


# ---------------------------------------------------------------- the two JPEG decoders


@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"subsampling": 0}, {"subsampling": 1}, {"comment": b"x"}]
)
@pytest.mark.parametrize("gray", [False, True])
def test_both_jpeg_decoders_agree(options: dict[str, object], gray: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "loaded", lambda: True)
    image = Image.fromarray(gradient(67, 93))
    data = encoded(image.convert("L") if gray else image, "JPEG", quality=80, **options)
    assert intake.PlainJpeg.of(data) is not None
    by_pillow = np.asarray(Image.open(io.BytesIO(data)))
    pixels = read_image(data)
    assert np.abs(pixels.astype(int) - by_pillow.reshape(pixels.shape)).max() <= 2


def test_pillow_alone_gives_the_same_images(monkeypatch: pytest.MonkeyPatch) -> None:
    images = [jpeg(), jpeg(exif=exif(6)), encoded(Image.fromarray(gradient()[..., 0]), "JPEG")]
    monkeypatch.setattr(intake, "loaded", lambda: True)
    fast = [read_image(data) for data in images]
    monkeypatch.setattr(intake, "_jpeg_operator", lambda: None)
    for data, pixels in zip(images, fast, strict=True):
        assert np.abs(read_image(data).astype(int) - pixels).max() <= 2


def test_damaged_jpegs_are_the_same_to_both_decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same pixels, or refused by both: images left out must not depend on the size of the data set."""
    generator, outcomes = np.random.default_rng(0), []
    for number in range(120):
        data = bytearray(jpeg(progressive=number % 3 == 0))
        for _ in range(generator.integers(1, 8)):
            data[generator.integers(3, len(data))] = generator.integers(256)
        found: list[np.ndarray | None] = []
        for fast in (False, True):
            monkeypatch.setattr(intake, "loaded", lambda fast=fast: fast)
            try:
                found.append(read_image(bytes(data)))
            except ImageError:
                found.append(None)
        outcomes.append(found[0] is None)
        assert (found[0] is None) == (found[1] is None)
        assert found[0] is None or np.abs(found[0].astype(int) - found[1]).max() <= 2
    assert {True, False} == set(outcomes)


def test_a_jpeg_with_exif_or_four_inks_is_not_plain() -> None:
    assert intake.PlainJpeg.of(jpeg(exif=exif(6))) is None
    assert intake.PlainJpeg.of(encoded(Image.new("CMYK", (8, 8)), "JPEG")) is None


def test_both_decoders_agree_on_real_photographs(shared_data: Path) -> None:
    from vitral.data import load

    split = load(shared_data / "hymenoptera.tar").splits["val"]
    for i in range(0, len(split), 15):
        raw = split.raw(i)
        assert isinstance(raw, bytes)
        by_pillow = np.asarray(Image.open(io.BytesIO(raw)))
        assert np.abs(split.image(i).astype(int) - by_pillow).max() <= 2


@pytest.mark.parametrize("orientation", [1, 6])
def test_scaled_decoding_keeps_at_least_the_requested_size(orientation: int) -> None:
    stored = gradient(256, 400)
    data = encoded(Image.fromarray(stored), "JPEG", exif=exif(orientation))
    full = read_image(data)
    small = read_image(data, at_least=(60, 60))
    assert full.shape[0] > small.shape[0] >= 60
    assert small.shape[0] * 4 == full.shape[0]
    assert small.shape[1] * 4 == full.shape[1]
    assert close(small, full[2::4, 2::4])
    assert np.array_equal(read_image(data, at_least=full.shape[:2]), full)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"exif": exif(6)}])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_truncated_jpegs_are_refused_by_name(options: dict[str, object], share: float) -> None:
    noisy = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 90, 3), dtype=np.uint8))
    data = encoded(noisy, "JPEG", **options)
    with pytest.raises(ImageError, match="photos/half") as caught:
        read_image(data[: int(len(data) * share)], name="photos/half.jpg")
    assert caught.value.name == "photos/half.jpg"
    assert len(str(caught.value).splitlines()) <= 5


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "WEBP", "GIF", "PPM"])
def test_truncated_files_of_every_format_are_refused(format: str) -> None:
    noisy = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 60, 3), dtype=np.uint8))
    data = encoded(noisy, format)
    for share in (0.1, 0.5, 0.8):
        with pytest.raises(ImageError):
            read_image(data[: int(len(data) * share)])


def test_a_pixel_bomb_is_refused_from_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    for data in (png_header(30000, 30000), png_header(100_000, 100_000, 1, 0), png_header(2**31 - 1, 2**31 - 1)):
        with pytest.raises(ImageError, match="the limit is 134,217,728"):
            read_image(data)
        with pytest.raises(ImageError, match="the limit is"):
            probe(data)


def test_a_jpeg_bomb_is_refused_from_its_header() -> None:
    data = bytearray(jpeg())
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", 65500, 65500)
    with pytest.raises(ImageError, match="65500 × 65500"):
        read_image(bytes(data))


def test_too_many_bytes_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(intake, "MAX_BYTES", 100)
    path = tmp_path / "big.jpg"
    path.write_bytes(jpeg())
    with pytest.raises(ImageError, match="more than 100 bytes"):
        read_image(path)


def test_avif_is_read_upright() -> None:
    image = Image.fromarray(gradient())
    assert np.abs(read_image(encoded(image, "AVIF", quality=95)).astype(int) - gradient()).max() < 16
    turned = read_image(encoded(image, "AVIF", quality=95, exif=exif(6)))
    assert np.abs(turned.astype(int) - np.rot90(gradient(), -1)).max() < 16


@pytest.mark.parametrize("name", ["arithmetic.jpg", "arithmetic-progressive.jpg"])
def test_jpeg_with_arithmetic_coding_has_the_pixels_of_any_other(name: str) -> None:
    """Written by `cjpeg -arithmetic -quality 95` of libjpeg-turbo 2.1.5, with and without `-progressive`."""
    y, x = np.mgrid[:24, :32]
    drawn = np.stack([8 * x, 10 * y, np.full_like(x, 120)], -1).astype(np.uint8)
    data = Path(__file__).with_name(name).read_bytes()
    assert data.find(b"\xff\xc9" if name == "arithmetic.jpg" else b"\xff\xca") > 0
    usual = encoded(Image.fromarray(drawn), "JPEG", quality=95, subsampling="4:2:0")
    np.testing.assert_array_equal(read_image(data), read_image(usual))
    assert (probe(data).height, probe(data).width) == (24, 32)


HEIC = Path(__file__).with_name("turned.heic")
"""16 × 24 as a phone stores it: to be turned by a quarter. Upper 4 rows white, then left half red and right half blue.
Written by pillow-heif 1.8.1, quality 90.
"""


def test_heic_is_read_upright() -> None:
    white, red, blue = (240, 240, 240), (200, 40, 40), (40, 60, 200)
    expected = np.empty((16, 24, 3), int)
    expected[:, :12], expected[:, 12:], expected[:4] = red, blue, white
    image = read_image(HEIC)
    assert image.shape == (24, 16, 3)
    assert np.abs(image - np.rot90(expected, -1)).max() < 24, "levels, at edges of 4:2:0"
    assert (probe(HEIC.read_bytes()).height, probe(HEIC.read_bytes()).width) == (24, 16)


def test_heic_without_its_reader_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(intake._MEDIA, "HEIC", lambda: None)
    with pytest.raises(ImageError, match=r"a HEIC image, which needs pip install 'vitral\[heic\]'"):
        read_image(HEIC)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b"8BPS\0\x01" + bytes(40),  # PSD
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"\0\0\0\x1cftypavif" + bytes(40),
        b"RIFF\0\0\0\0WAVEfmt ",
        b"\x00\x00\x01\x00\x01\x00",  # ICO
    ],
)
def test_formats_that_are_not_on_the_list_are_refused(data: bytes) -> None:
    with pytest.raises(ImageError):
        read_image(data)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"Not found\n", "a text file"),
        ("Grün 緑\n".encode() * 999, "a text file"),  # a sample of it ends within a character
        (b"MZ is no program here", "a text file"),
        (b"#!/bin/sh\nexit 1\n", "a script"),
        (b"\x7fELF\x02\x01\x01" + bytes(40), r"a program \(ELF\)"),
        (b"MZ\x90\0\x03" + bytes(40), r"a program \(Windows\)"),
        (b"\n<!DOCTYPE html><html></html>", "a web page"),
        (b"\0\0\0\x14ftypqt  " + bytes(40), r"a video \(MP4\)"),
        (b"\0\0\0\x08wide\0\0\0\0mdat", r"a video \(QuickTime\)"),
        (b"OggS\0\2" + bytes(40), r"a video or a sound \(Ogg\)"),
    ],
)
def test_other_files_are_named_with_their_kind_and_a_way_out(data: bytes, kind: str) -> None:
    with pytest.raises(ImageError, match=rf"why: it is {kind}: \w+"):
        read_image(data)


def test_bytes_of_no_kind_are_no_text() -> None:
    for data in (b"ab\0cd", b"ab\x1bcd", b"\xff\xfeab"):
        with pytest.raises(ImageError, match="not a JPEG"):
            read_image(data)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"])
def test_no_damage_is_reported_in_the_words_of_python(format: str) -> None:
    generator = np.random.default_rng(0)
    data = encoded(Image.fromarray(generator.integers(0, 256, (12, 12, 3), dtype=np.uint8)), format)
    damaged = [data[:end] for end in range(1, min(len(data), 120))]
    for _ in range(60):
        ruined = bytearray(data)
        for at in generator.integers(2, min(len(data), 99), 4):
            ruined[at] = generator.integers(256)
        damaged.append(bytes(ruined))
    words = []
    for one in damaged:
        try:
            read_image(one)
        except ImageError as error:
            words.append(str(error))
    pattern = r"unpack|literal|index out|PNG file|why: (damaged header: )?'?\d+'?$"
    assert words
    assert not [one for one in words if re.search(pattern, one)]


def test_a_png_of_a_few_bytes_is_truncated() -> None:
    for end in range(8, 40):
        with pytest.raises(ImageError, match=r"why: damaged header: truncated or damaged$"):
            read_image(png_header(4, 4)[:end])


def test_files_that_cannot_be_opened_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jpg", tmp_path):
        with pytest.raises(ImageError) as caught:
            read_image(path)
        assert caught.value.name == str(path)


def test_damaged_bytes_give_an_image_or_an_image_error() -> None:
    rng = np.random.default_rng(0)
    image = Image.fromarray(gradient())
    originals = [encoded(image, format) for format in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")]
    originals += [jpeg(exif=exif(6)), jpeg(progressive=True), encoded(image.convert("CMYK"), "JPEG")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of odd metadata
        for data in originals:
            for _ in range(40):
                damaged = bytearray(data)
                for at in rng.integers(0, len(data), 6):
                    damaged[at] = rng.integers(256)
                try:
                    pixels = read_image(bytes(damaged))
                except ImageError:
                    continue
                assert pixels.dtype == np.uint8
                assert pixels.ndim == 3


def test_results_feed_torch_without_a_warning() -> None:
    for image in (jpeg(), encoded(Image.fromarray(gradient()), "PNG"), gradient(), jpeg(exif=exif(8))):
        torch.from_numpy(read_image(image))


def tiff(values: np.ndarray, photometric: int, extra: tuple[int, ...] = ()) -> bytes:
    """An uncompressed TIFF of values (H, W, C), which Pillow cannot write for any C."""
    height, width, channels = values.shape
    data, bits = values.tobytes(), (8 * values.dtype.itemsize,) * channels
    entries = [
        (256, 4, (width,)),
        (257, 4, (height,)),
        (258, 3, bits),
        (259, 3, (1,)),
        (262, 3, (photometric,)),
        (273, 4, (0,)),
        (277, 3, (channels,)),
        (278, 4, (height,)),
        (279, 4, (len(data),)),
        (338, 3, extra),
    ]
    entries = [one for one in entries if one[2]]
    after, blobs, head = 14 + 12 * len(entries), b"", b""
    sizes = [len(numbers) * (2 if kind == 3 else 4) for _, kind, numbers in entries]
    start = after + sum(size for size in sizes if size > 4)
    for (tag, kind, numbers), size in zip(entries, sizes, strict=True):
        packed = struct.pack(f"<{len(numbers)}{'H' if kind == 3 else 'I'}", *((start,) if tag == 273 else numbers))
        head += struct.pack("<HHI", tag, kind, len(numbers))
        head += packed.ljust(4, b"\0") if size <= 4 else struct.pack("<I", after + len(blobs))
        blobs += packed if size > 4 else b""
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + head + b"\0" * 4 + blobs + data


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize(
    ("channels", "photometric", "extra"),
    [(4, 2, (0,)), (5, 2, (0, 0)), (5, 2, (2, 0)), (6, 2, (0,) * 3), (8, 2, (0,) * 5), (8, 1, (0,) * 7)],
)
def test_channels_beyond_color_and_alpha_are_refused_by_name(
    channels: int, photometric: int, extra: tuple[int, ...], dtype: type
) -> None:
    """Pillow would leave them out: infrared, height, a mask."""
    data = tiff(np.zeros((5, 7, channels), dtype), photometric, extra)
    with pytest.raises(ImageError, match=r"more channels than color and alpha|pixel mode") as caught:
        read_image(data, name="field.tif")
    assert "field.tif" in str(caught.value)


def test_tiffs_of_color_and_alpha_are_read() -> None:
    color = np.random.default_rng(0).integers(0, 256, (5, 7, 4)).astype(np.uint8)
    color[..., 3] = 255
    for extra in ((2,), ()):
        assert np.array_equal(read_image(tiff(color, 2, extra)), color[..., :3])
    assert np.array_equal(read_image(tiff(color[..., :3], 2)), color[..., :3])
    assert np.array_equal(read_image(tiff(color[..., :1], 1)), color[..., :1])
