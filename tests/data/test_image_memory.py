"""Memory of reading one image or one compressed archive, as the peak of a separate process."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

from running import sampled
from vitral.data.archives import InMemoryTar, open_files
from vitral.data.images import decode as intake
from vitral.data.images import jpeg_header, pixels
from vitral.data.images.decode import read_image
from vitral.errors import DataError, ImageError

READ = """
import sys
from vitral.data.images.decode import read_image
from vitral.errors import ImageError
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) >> 10 for line in file if line.startswith("VmHWM"))
before = peak()
try:
    height, width = read_image(sys.argv[1]).shape[:2]
except ImageError as error:
    height = width = 0
    assert "MiB of memory; the limit is" in str(error), error
print(peak() - before, height, width)
"""


def peak(path: Path) -> tuple[int, int, int]:
    """Peak MiB above the start; height and width of the result, 0 if it was refused."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", READ, str(path)], check=True, capture_output=True)
    mib, height, width = map(int, done.stdout.split())
    return mib, height, width


# Mode, format, side, options, and the result's side (0: refused): near the limit and above it.
CASES = {
    "jpeg": ("RGB", "JPEG", 11500, {}, 11500),
    "jpeg, all coefficients": ("RGB", "JPEG", 11500, {"progressive": True, "subsampling": 0}, 5750),
    "jpeg, four inks": ("CMYK", "JPEG", 11500, {}, 0),
    "png": ("RGB", "PNG", 11500, {"compress_level": 1}, 11500),
    "png, alpha": ("RGBA", "PNG", 11500, {"compress_level": 1}, 11500),
    "png, 16 bits": ("I;16", "PNG", 11500, {"compress_level": 1}, 11500),
    "gif": ("P", "GIF", 11500, {"transparency": 0}, 11500),
    "webp": ("RGBA", "WEBP", 7000, {"quality": 1, "method": 0}, 7000),
    "webp, larger": ("RGB", "WEBP", 11500, {"quality": 1, "method": 0}, 0),
    "tiff": ("RGB", "TIFF", 11500, {"compression": "tiff_lzw"}, 11500),
    "tiff, whole numbers": ("I", "TIFF", 11500, {"compression": "tiff_lzw"}, 11500),
    "tiff, floats": ("F", "TIFF", 11500, {"compression": "tiff_lzw"}, 11500),
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
@pytest.mark.parametrize("case", sampled(CASES, 5))
def test_no_image_takes_more_than_its_budget(case: str, tmp_path: Path) -> None:
    mode, format, side, options, wanted = CASES[case]
    Image.new(mode, (side, side), 0).save(tmp_path / "x", format, **options)
    mib, height, width = peak(tmp_path / "x")
    assert (height, width) == (wanted, wanted)
    assert mib <= 1024


def test_a_strip_of_a_tiff_counts_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    image, file = Image.new("RGB", (1000, 1000)), io.BytesIO()
    image.save(file, "TIFF", compression="tiff_lzw")
    in_strips = intake._memory(intake._open(file.getvalue(), "x"))
    monkeypatch.setattr(TiffImagePlugin, "STRIP_SIZE", 1 << 30)
    file = io.BytesIO()
    image.save(file, "TIFF", compression="tiff_lzw")
    assert intake._memory(intake._open(file.getvalue(), "x")) > in_strips + 3_000_000


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "I;16", "F", "I", "CMYK"])
def test_strips_give_the_same_pixels(mode: str, orientation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).integers(0, 256, (37, 23, 3), np.uint8)
    image = Image.fromarray(values)
    if mode == "I;16":
        image = Image.fromarray(values[..., 0].astype(np.uint16) * 200)
    elif mode in ("F", "I"):
        image = Image.fromarray(
            values[..., 0].astype(np.float32) - 20 if mode == "F" else values[..., 0] * np.int32(99)
        )
    else:
        image = image.convert(mode)
    if mode == "RGBA":
        image.putalpha(Image.fromarray(values[..., 1]))
    exif = Image.Exif()
    exif[pixels.ORIENTATION] = orientation
    file = io.BytesIO()
    image.save(file, "TIFF", exif=exif)
    for channels in (None, 1, 3):
        whole = read_image(file.getvalue(), channels=channels)
        with monkeypatch.context() as patch:
            patch.setattr(pixels, "_STRIP", 23 * 5)
            assert np.array_equal(read_image(file.getvalue(), channels=channels), whole)


def test_a_jpeg_over_its_budget_is_decoded_smaller_and_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (intake, jpeg_header):
        monkeypatch.setattr(module, "MAX_PLAIN", 1 << 10)
    monkeypatch.setattr(intake, "MAX_MEMORY", intake._SPARE + 400_000)
    image, sizes = Image.new("RGB", (320, 240)), {}
    for format in ("JPEG", "PNG"):
        file = io.BytesIO()
        image.save(file, format)
        try:
            sizes[format] = read_image(file.getvalue()).shape
        except ImageError as error:
            sizes[format] = str(error)
    assert sizes["JPEG"] == (120, 160, 3)
    assert "320 × 240 pixels (RGB) would take 64 MiB of memory; the limit is 64 MiB" in sizes["PNG"]


def test_a_compressed_archive_is_counted_while_it_streams(tmp_path: Path) -> None:
    """A bomb is refused before it fills the memory, by the size in its header and by the bytes read."""
    bomb = tmp_path / "bomb.tar.gz"
    with tarfile.open(bomb, "w:gz", compresslevel=1) as tar:
        for name in ("a.png", "b.png"):
            member = tarfile.TarInfo(name)
            member.size = 48 << 20
            tar.addfile(member, io.BytesIO(bytes(member.size)))
    with pytest.raises(DataError, match="more than 67,108,864 bytes"):
        open_files(str(bomb))
    with pytest.raises(DataError, match="more than 1,000,000 bytes"):
        InMemoryTar(str(bomb), 1_000_000)


@pytest.mark.slow
def test_warnings_of_pillow_do_not_reach_the_terminal(tmp_path: Path) -> None:
    for number in range(3):
        image = Image.new("RGB", (40, 40), (number, 9, 9))
        image.save(tmp_path / f"{number}.jpg", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    command = [sys.executable, "-m", "vitral.cli.main", "predict", "demo", str(tmp_path)]
    code = "import sys; from vitral.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, *command[3:]], capture_output=True, text=True, check=True)
    assert "Warning" not in done.stderr
    assert done.stdout.count(".jpg") == 3
