"""Images with a color profile are read as a person sees them: in sRGB."""

from __future__ import annotations

import io
import struct
import threading
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

import vitral
from images import MakeImages, noise
from running import printed
from vitral.data import load
from vitral.data.images import color
from vitral.data.images.decode import probe, read_image
from vitral.data.images.jpeg_header import PlainJpeg
from vitral.data.loader import Batches
from vitral.data.pixel_cache import pixels_key

# Columns are the XYZ values of red, green and blue (D50), as Apple's and Adobe's own profiles have them.
DISPLAY_P3 = ((0.51512, 0.24120, -0.00105), (0.29198, 0.69225, 0.04189), (0.15710, 0.06657, 0.78407))
ADOBE_RGB = ((0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457))
SRGB = ((0.43607, 0.22249, 0.01392), (0.38515, 0.71687, 0.09708), (0.14307, 0.06061, 0.71410))
SRGB_CURVE = (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)


def fixed(*values: float) -> bytes:
    return b"".join(struct.pack(">i", round(value * 65536)) for value in values)


def profile(space: bytes, tags: dict[bytes, bytes]) -> bytes:
    """A display profile (ICC.1:2022) of these tags."""
    table, body, at = b"", b"", 128 + 4 + 12 * len(tags)
    for name, data in tags.items():
        data += b"\0" * (-len(data) % 4)
        table += name + struct.pack(">II", at + len(body), len(data))
        body += data
    header = struct.pack(">I4sI4s4s4s", at + len(body), b"lcms", 0x04300000, b"mntr", space, b"XYZ ")
    header += b"\0" * 12 + b"acsp" + b"\0" * 28 + fixed(0.9642, 1, 0.8249)
    return header.ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + body


def text(words: str) -> bytes:
    encoded = words.encode("utf-16-be")
    return b"mluc\0\0\0\0" + struct.pack(">II4sII", 1, 12, b"enUS", len(encoded), 28) + encoded


def of_matrix(name: str, primaries: Any, curve: tuple[float, ...]) -> bytes:
    kind = 3 if len(curve) == 5 else 0
    tone = b"para\0\0\0\0" + struct.pack(">HH", kind, 0) + fixed(*curve)
    colors = {bytes([c]) + b"XYZ": b"XYZ \0\0\0\0" + fixed(*xyz) for c, xyz in zip(b"rgb", primaries, strict=True)}
    tones = dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), tone)
    white = b"XYZ \0\0\0\0" + fixed(0.9642, 1, 0.8249)
    return profile(b"RGB ", {b"desc": text(name), b"cprt": text("none"), b"wtpt": white, **colors, **tones})


def of_grays(name: str, gamma: float) -> bytes:
    tone = b"para\0\0\0\0" + struct.pack(">HH", 0, 0) + fixed(gamma)
    white = b"XYZ \0\0\0\0" + fixed(0.9642, 1, 0.8249)
    return profile(b"GRAY", {b"desc": text(name), b"cprt": text("none"), b"wtpt": white, b"kTRC": tone})


P3 = of_matrix("Display P3", DISPLAY_P3, SRGB_CURVE)
ADOBE = of_matrix("Adobe RGB", ADOBE_RGB, (2.19921875,))
PLAIN = of_matrix("sRGB", SRGB, SRGB_CURVE)
GRAY = of_grays("Linear gray", 1.0)


def rendition(pixels: np.ndarray, primaries: Any, curve: tuple[float, ...]) -> np.ndarray:
    """The same colors as sRGB, by the definition: (H, W, 3) uint8 to float."""
    share = pixels / 255
    if len(curve) == 5:
        gamma, a, b, c, d = curve
        linear = np.where(share >= d, (a * share + b) ** gamma, c * share)
    else:
        linear = share ** curve[0]
    light = (linear @ np.array(primaries) @ np.linalg.inv(np.array(SRGB))).clip(0, 1)
    return 255 * np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)


def scene(size: tuple[int, int] = (48, 64)) -> np.ndarray:
    """Smooth saturated colors, which JPEG keeps."""
    y, x = np.mgrid[: size[0], : size[1]] / np.array(size)[:, None, None]
    return np.stack([40 + 180 * x, 200 - 150 * y, 60 + 120 * (1 - x) * y], -1).round().astype(np.uint8)


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


FORMATS: dict[str, dict[str, Any]] = {
    "JPEG": {"quality": 100, "subsampling": 0},
    "PNG": {},
    "WEBP": {"lossless": True},
    "TIFF": {},
    "AVIF": {"quality": 100, "subsampling": "4:4:4"},
}


@pytest.fixture(params=["pillow", "torchvision"])
def decoder(request, monkeypatch) -> str:
    monkeypatch.setattr("vitral.data.images.decode.loaded", lambda: request.param == "torchvision")
    return str(request.param)


@pytest.mark.parametrize("space", ["Display P3", "Adobe RGB"])
@pytest.mark.parametrize("format", FORMATS)
def test_colors_are_those_of_the_rendition_in_srgb(format, space, decoder):
    known = {"Display P3": (P3, DISPLAY_P3, SRGB_CURVE), "Adobe RGB": (ADOBE, ADOBE_RGB, (2.19921875,))}
    data, primaries, curve = known[space]
    options = FORMATS[format]
    image = Image.fromarray(scene())
    tagged, untagged = encoded(image, format, icc_profile=data, **options), encoded(image, format, **options)
    stored = read_image(untagged)
    wanted = rendition(stored, primaries, curve)
    assert np.abs(wanted - stored).max() > 15, "the colors differ"
    assert np.abs(read_image(tagged).astype(float) - wanted).max() <= 1.6
    assert probe(tagged).profile.name == space
    opened = Image.open(io.BytesIO(tagged))
    assert np.array_equal(read_image(opened), read_image(tagged)), "the same for a PIL image"


@pytest.mark.parametrize("mode", ["RGBA", "P", "P with transparency", "turned", "strips"])
def test_every_way_of_decoding_converts(mode, monkeypatch):
    image = Image.fromarray(scene())
    wanted = rendition(scene(), DISPLAY_P3, SRGB_CURVE)
    options: dict[str, Any] = {"icc_profile": P3}
    if mode == "RGBA":
        image.putalpha(255)
    elif mode.startswith("P"):
        image = image.quantize(256)
        wanted = rendition(np.asarray(image.convert("RGB")), DISPLAY_P3, SRGB_CURVE)
        options |= {"transparency": 255} if "with" in mode else {}
    elif mode == "turned":
        exif = Image.Exif()
        exif[0x0112] = 3
        options["exif"], wanted = exif, wanted[::-1, ::-1]
    else:
        monkeypatch.setattr("vitral.data.images.pixels._STRIP", 640)
    found = read_image(encoded(image, "PNG", **options)).astype(float)
    seen = (found != 255).any(-1)
    assert seen.mean() > 0.9
    assert np.abs(found - wanted)[seen].max() <= 1.6


def test_a_jpeg_decoded_at_half_its_size_is_converted():
    image, options = Image.fromarray(scene((192, 256))), {"quality": 100, "subsampling": 0}
    tagged, stored = (
        read_image(encoded(image, "JPEG", **options, **one), at_least=(48, 64)) for one in ({"icc_profile": P3}, {})
    )
    assert tagged.shape == stored.shape == (48, 64, 3)
    assert np.abs(tagged - rendition(stored, DISPLAY_P3, SRGB_CURVE)).max() <= 1.6


def test_a_color_on_a_white_ground_is_converted_before_it_is_laid_there():
    image = Image.new("RGBA", (8, 8), (255, 0, 0, 128))
    found = read_image(encoded(image, "PNG", icc_profile=P3))[0, 0].astype(int)
    red = rendition(np.array([[[255, 0, 0]]]), DISPLAY_P3, SRGB_CURVE)[0, 0]
    assert np.abs(found - (red * 128 / 255 + 255 * 127 / 255)).max() <= 2


@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF"])
def test_grays_have_the_curve_of_their_profile(format):
    image = Image.fromarray(np.arange(256, dtype=np.uint8).repeat(8)[None].repeat(8, 0))
    stored = read_image(encoded(image, format))
    found = read_image(encoded(image, format, icc_profile=GRAY))
    assert found.shape == stored.shape
    light = stored / 255
    wanted = 255 * np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)
    assert np.abs(found - wanted).max() <= 1.6
    of_colors = read_image(encoded(image, format, icc_profile=P3))
    assert np.abs(of_colors.astype(int) - stored).max() <= 1, "grays of a profile of colors are neutral"


def test_values_with_stated_levels_are_measurements():
    values = np.arange(0, 4096, 64, dtype=np.uint16).reshape(8, 8)
    plain, tagged = (encoded(Image.fromarray(values), "PNG", **one) for one in ({}, {"icc_profile": GRAY}))
    assert np.array_equal(read_image(tagged, levels=(0, 4095)), read_image(plain, levels=(0, 4095)))
    assert read_image(tagged).max() > read_image(plain).max()


def test_cmyk_is_converted_by_its_profile():
    """LittleCMS has no profile of a press: one of CMYK is made as a device link would be, from ink to light."""
    data = ink_profile()
    inks = np.zeros((4, 8, 4), np.uint8)
    inks[:, 4:] = (0, 255, 255, 0)
    image = Image.fromarray(inks, "CMYK")
    for format in ("JPEG", "TIFF"):
        options = {"quality": 100} if format == "JPEG" else {}
        naive = read_image(encoded(image, format, **options))
        found = read_image(encoded(image, format, icc_profile=data, **options))
        assert np.abs(naive[0, 0].astype(int) - 255).max() <= 2
        assert np.abs(found[0, 0].astype(int) - 255).max() <= 3, "paper is white"
        assert np.abs(found[0, -1].astype(int) - naive[0, -1]).max() > 20, "its ink is not pure red"


def ink_profile() -> bytes:
    """A CMYK profile with a table of 2 × 2 × 2 × 2 colors in Lab (lut8Type)."""
    paper, black = (100, 0, 0), (5, 0, 0)
    grid = [
        paper if not any(c) else black if c[3] else (50 + 15 * (3 - sum(c[:3])), 30 * (c[1] - c[0]), 25 * (c[2] - 0.5))
        for c in np.ndindex(2, 2, 2, 2)
    ]
    clut = b"".join(bytes((round(L * 2.55), round(a) + 128, round(b) + 128)) for L, a, b in grid)
    ramp = bytes(range(256))
    table = b"mft1\0\0\0\0" + bytes((4, 3, 2, 0)) + fixed(1, 0, 0, 0, 1, 0, 0, 0, 1) + ramp * 4 + clut + ramp * 3
    white = b"XYZ \0\0\0\0" + fixed(0.9642, 1, 0.8249)
    made = profile(b"CMYK", {b"desc": text("Press"), b"cprt": text("none"), b"wtpt": white, b"A2B0": table})
    return made[:12] + b"prtr" + made[16:20] + b"Lab " + made[24:]


def test_a_profile_of_srgb_costs_nothing(decoder):
    image = Image.fromarray(scene())
    for data in (PLAIN, ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()):
        file = encoded(image, "JPEG", icc_profile=data)
        assert PlainJpeg.of(file) is not None, "the fast path"
        assert np.array_equal(read_image(file), read_image(encoded(image, "JPEG")))
    assert PlainJpeg.of(encoded(image, "JPEG", icc_profile=P3)) is None, "nor does a GPU decode it"


LAB = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
DAMAGED = {
    "noise": noise(0, (8, 8)).tobytes(),
    "cut off": P3[:200],
    "no curves": P3.replace(b"TRC", b"xyz"),
    "zeros": bytes(500),
    "of grays": GRAY,
    "of no screen": LAB,
    "long": P3[:130] + bytes(200_000),
}


@pytest.mark.parametrize("kind", DAMAGED)
@pytest.mark.parametrize("format", FORMATS)
def test_a_damaged_profile_is_ignored(format, kind):
    image, options = Image.fromarray(scene()), FORMATS[format]
    found = read_image(encoded(image, format, icc_profile=DAMAGED[kind], **options))
    assert np.array_equal(found, read_image(encoded(image, format, **options)))


def test_data_check_names_what_is_converted_and_what_is_ignored(make_images: MakeImages, capsys):
    folder = make_images({"a": 3, "b": 3})
    for name, data in (("a/0.png", P3), ("b/0.png", P3), ("b/1.png", DAMAGED["cut off"]), ("b/2.png", PLAIN)):
        Image.open(folder / name).save(folder / name, icc_profile=data)
    found = " ".join(printed(capsys, "data", "check", str(folder))[0].split())
    assert "2 images with a color profile, converted to sRGB: Display P3 (2)" in found
    assert "1 image with a color profile that is damaged or of other colors: it is ignored" in found


def test_training_and_prediction_see_the_same_colors(make_images: MakeImages):
    folder = make_images({"a": 1, "b": 1}, size=(8, 12))
    Image.open(folder / "a/0.png").save(folder / "a/0.png", icc_profile=P3)
    predictor = vitral.load("demo", device="cpu")
    recipe = predictor.preprocessing
    batches = Batches(load(folder)["train"], recipe, batch_size=2, device=predictor.machine.device)
    (batch,) = batches.epoch()
    batches.close()
    assert np.array_equal(batch.images[0], predictor.prepare(folder / "a/0.png"))
    assert np.array_equal(batch.images[0], recipe.geometry(read_image(folder / "a/0.png", channels=recipe.channels)))


def test_kept_pixels_change_with_the_version_of_decoding(make_images: MakeImages, monkeypatch):
    split = load(make_images({"a": 1, "b": 1}))["train"]
    before = pixels_key(split, {})
    monkeypatch.setattr("vitral.data.pixel_cache.DECODING", 0)
    assert pixels_key(split, {}) != before


def test_conversions_are_kept_for_few_profiles_and_shared_by_threads(monkeypatch):
    monkeypatch.setattr(color, "_known", {})
    monkeypatch.setattr(color, "_MOST", 4)
    profiles = [of_matrix(f"P3 {i}", DISPLAY_P3, SRGB_CURVE) for i in range(9)]
    files = [encoded(Image.fromarray(scene()), "PNG", icc_profile=data) for data in profiles]
    wanted = read_image(files[0])
    found: list[bool] = []

    def read() -> None:
        found.extend(np.array_equal(read_image(file), wanted) for file in files)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 36
    assert len(color._known) <= 4
