from __future__ import annotations

import io
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitral.data import intake, kernels
from vitral.data.intake import probe, read_image
from vitral.errors import ImageError

H, W = 24, 40


def gradient(height: int = H, width: int = W) -> np.ndarray:
    """A smooth RGB picture without symmetry: JPEG keeps it, and every turn shows."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([255 * x / width, 255 * y / height, 40 + 100 * x / width], -1).astype(np.uint8)


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


@pytest.fixture(autouse=True, params=["pillow", "torchvision"])
def _decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every picture by both decoders of JPEGs, whatever was loaded before."""
    kernels.torchvision()
    monkeypatch.setattr(intake, "loaded", lambda: request.param == "torchvision")


def jpeg(**options: object) -> bytes:
    return encoded(Image.fromarray(gradient()), "JPEG", quality=95, **options)


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[intake.ORIENTATION] = orientation
    return tags.tobytes()


def png_header(width: int, height: int, bits: int = 8, colour: int = 2) -> bytes:
    """A PNG that claims a size and holds almost nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
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
def test_exif_orientation_turns_the_picture_upright(format: str, orientation: int) -> None:
    # A camera stores the upright picture turned; these are the inverse turns of EXIF's eight cases.
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


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")  # Pillow says so, and goes on
@pytest.mark.parametrize(
    "broken", [b"Exif\0\0garbage", b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0"]
)
def test_broken_exif_does_not_cost_the_picture(broken: bytes) -> None:
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


def test_sixteen_bit_grey_with_a_netpbm_maximum() -> None:
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
        ([0.0, 51.0, 255.0], [0, 51, 255]),
        ([0.0, 257.0, 65535.0], [0, 1, 255]),
        ([-1.0, 0.0, 1.0], [0, 128, 255]),
        ([0.0, float("nan"), 1.0], [0, 0, 255]),
        ([-3.0, -3.0, -3.0], [0, 0, 0]),
    ],
)
def test_floats_take_the_first_range_that_holds_them(values: list[float], wanted: list[int]) -> None:
    array = np.array([values], np.float32)
    assert read_image(array).ravel().tolist() == wanted
    assert read_image(encoded(Image.fromarray(array), "TIFF")).ravel().tolist() == wanted


def test_32_bit_integers_are_scaled() -> None:
    array = np.array([[0, 257, 65535]], np.int32)
    assert read_image(encoded(Image.fromarray(array), "TIFF")).ravel().tolist() == [0, 1, 255]


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_alpha_shows_the_background(mode: str, format: str) -> None:
    image = Image.new(mode, (3, 1), 0)
    image.putalpha(Image.fromarray(np.array([[0, 128, 255]], np.uint8)))
    assert read_image(encoded(image, format), channels=1).ravel().tolist() == [255, 127, 0]
    assert read_image(encoded(image, format), channels=3, background=(255, 0, 0))[0, 0].tolist() == (
        [255, 0, 0] if mode == "RGBA" else [76, 76, 76]  # grey stays grey: the red's luminance
    )
    assert read_image(np.array(image), channels=1).ravel().tolist() == [255, 127, 0]


def test_palette_with_a_transparent_colour() -> None:
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "L").convert("P")
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    for transparency in (1, b"\xff\x00\xff"):
        pixels = read_image(encoded(image, "PNG", transparency=transparency))
        assert pixels[0].tolist() == [[255, 0, 0], [255, 255, 255], [0, 0, 255]]
    assert read_image(encoded(image, "PNG"))[0].tolist() == [[255, 0, 0], [0, 255, 0], [0, 0, 255]]


@pytest.mark.parametrize(("mode", "key"), [("RGB", (0, 0, 0)), ("L", 0)])
def test_a_transparent_key_colour_shows_the_background(mode: str, key: object) -> None:
    data = encoded(Image.new(mode, (2, 2), 0), "PNG", transparency=key)
    assert (read_image(data, channels=3) == 255).all()


@pytest.mark.parametrize("format", ["JPEG", "TIFF"])
def test_cmyk_comes_out_in_its_colours(format: str) -> None:
    data = encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), format)  # magenta and yellow ink: red
    assert close(read_image(data), np.tile(np.array([255, 0, 0], np.uint8), (16, 16, 1)))
    assert probe(data).mode == "CMYK"


def test_an_animation_gives_its_first_frame() -> None:
    frames = [Image.new("P", (6, 4), colour) for colour in (0, 1)]
    for frame in frames:
        frame.putpalette([10, 20, 30, 200, 210, 220])
    for format, options in (("GIF", {}), ("PNG", {}), ("WEBP", {"lossless": True})):
        images = frames if format == "GIF" else [frame.convert("RGB") for frame in frames]
        data = encoded(images[0], format, save_all=True, append_images=images[1:], **options)
        assert (read_image(data) == [10, 20, 30]).all(), format


def test_a_jpeg_of_several_pictures_gives_the_first() -> None:
    data = encoded(Image.fromarray(gradient()), "MPO", save_all=True, append_images=[Image.new("RGB", (W, H))])
    assert close(read_image(data), gradient())
    assert probe(data).format == "JPEG"


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F"])
def test_every_mode_has_the_channels_asked_for(mode: str, channels: int) -> None:
    grey = Image.fromarray(gradient()[..., 0])
    image = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257) if mode == "I;16" else grey.convert(mode)
    pixels = read_image(encoded(image, "TIFF"), channels=channels)
    assert pixels.shape == (H, W, channels)
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    if mode != "1":
        assert close(pixels[..., :1], np.asarray(grey)[..., None], 3)
    assert np.array_equal(read_image(image, channels=channels), pixels)


def test_arrays_and_pillow_images_are_read_like_files(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(gradient()).save(path)
    ways = (path, str(path), path.read_bytes(), bytearray(path.read_bytes()), Image.open(path), gradient())
    for picture in ways:
        assert np.array_equal(read_image(picture), gradient())  # type: ignore[arg-type]


def test_the_result_is_never_the_callers_array() -> None:
    array = gradient()
    read_image(array)[:] = 0
    assert np.array_equal(array, gradient())


@pytest.mark.parametrize("shape", [(3,), (2, 2, 5), (0, 4), (2, 2, 3, 1)])
def test_arrays_that_are_no_pictures_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ImageError, match="not a picture"):
        read_image(np.zeros(shape, np.uint8))


# ---------------------------------------------------------------- the two JPEG decoders


@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"subsampling": 0}, {"subsampling": 1}, {"comment": b"x"}]
)
@pytest.mark.parametrize("grey", [False, True])
def test_both_jpeg_decoders_agree(options: dict[str, object], grey: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "loaded", lambda: True)
    image = Image.fromarray(gradient(67, 93))
    data = encoded(image.convert("L") if grey else image, "JPEG", quality=80, **options)
    assert intake._decode_plain_jpeg(data) is not None
    by_pillow = np.asarray(Image.open(io.BytesIO(data)))
    pixels = read_image(data)
    assert np.abs(pixels.astype(int) - by_pillow.reshape(pixels.shape)).max() <= 2


def test_pillow_alone_gives_the_same_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = [jpeg(), jpeg(exif=exif(6)), encoded(Image.fromarray(gradient()[..., 0]), "JPEG")]
    monkeypatch.setattr(intake, "loaded", lambda: True)
    fast = [read_image(data) for data in pictures]
    monkeypatch.setattr(intake, "_jpeg_operator", lambda: None)
    for data, pixels in zip(pictures, fast, strict=True):
        assert np.abs(read_image(data).astype(int) - pixels).max() <= 2


def test_damaged_jpegs_are_the_same_to_both_decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same pixels, or refused by both: what is left out of a set must not depend on how many pictures it has."""
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
    assert intake._decode_plain_jpeg(jpeg(exif=exif(6))) is None
    assert intake._decode_plain_jpeg(encoded(Image.new("CMYK", (8, 8)), "JPEG")) is None


def test_both_decoders_agree_on_real_photographs(shared_data: Path) -> None:
    from vitral.data import load

    split = load(shared_data / "hymenoptera.tar").splits["val"]
    for i in range(0, len(split), 15):
        raw = split.raw(i)
        assert isinstance(raw, bytes)
        by_pillow = np.asarray(Image.open(io.BytesIO(raw)))
        assert np.abs(split.image(i).astype(int) - by_pillow).max() <= 2


@pytest.mark.parametrize("orientation", [1, 6])
def test_scaled_decoding_keeps_at_least_the_size_asked_for(orientation: int) -> None:
    stored = gradient(256, 400)
    data = encoded(Image.fromarray(stored), "JPEG", exif=exif(orientation))
    full = read_image(data)
    small = read_image(data, at_least=(60, 60))
    assert full.shape[0] > small.shape[0] >= 60
    assert small.shape[0] * 4 == full.shape[0]
    assert small.shape[1] * 4 == full.shape[1]
    assert close(small, full[2::4, 2::4])
    assert np.array_equal(read_image(data, at_least=full.shape[:2]), full)


# ---------------------------------------------------------------- what is refused


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


def test_files_that_cannot_be_opened_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jpg", tmp_path):
        with pytest.raises(ImageError) as caught:
            read_image(path)
        assert caught.value.name == str(path)


def test_damaged_bytes_end_in_a_picture_or_an_image_error() -> None:
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
    for picture in (jpeg(), encoded(Image.fromarray(gradient()), "PNG"), gradient(), jpeg(exif=exif(8))):
        torch.from_numpy(read_image(picture))
