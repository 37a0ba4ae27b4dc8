"""Encoded JPEG photographs in memory to uint8 pixels of 224×224, stretched with antialiasing: torchvision's decoder and
`v2.functional.resize`, vitral's decoding and `Preprocessing.geometry` (which also checks limits and turns images
upright), and Pillow alone. A pass is every image of the set once; passes alternate. "Threads" spreads the images over
one thread per core, as the loader does; otherwise one thread decodes all.
"""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torchvision.io  # noqa: F401  loads the decoder
from PIL import Image
from torchvision.transforms.v2 import functional as tv

from benchmarks.results import Options, Table
from vitral.bench.harness import alternate, ratio
from vitral.data.decode import read_image
from vitral.data.preprocessing import Preprocessing
from vitral.system import cores

SIZE = (224, 224)
SETS = ("imagenet-samples.tar", "hymenoptera.tar")
_MODE_RGB = 3  # torchvision's ImageReadMode.RGB
_preprocessing = Preprocessing(SIZE)


def by_torchvision(data: bytes) -> object:
    """Decode as a torchvision user would, by the operator behind `decode_jpeg`, which itself warns at every call."""
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return tv.resize(torch.ops.image.decode_jpeg.default(encoded, _MODE_RGB), list(SIZE), antialias=True)


def by_vitral(data: bytes) -> object:
    """Decode as training, evaluation and prediction do."""
    return _preprocessing.geometry(read_image(data, channels=3))


def by_pillow(data: bytes) -> object:
    """Decode as torchvision's `ImageFolder` with a resize does."""
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB").resize(SIZE[::-1], Image.Resampling.BILINEAR))


WAYS: dict[str, Callable[[bytes], object]] = {"torchvision": by_torchvision, "vitral": by_vitral, "Pillow": by_pillow}


def run(options: Options) -> list[Table]:
    """Make a row for each set, decoder and number of threads."""
    rows = []
    for name, images in _sets(options):
        for threads in dict.fromkeys((1, cores())):
            with _threads_of_torch(1), ThreadPoolExecutor(threads) as pool:
                passes = {way: _pass(decode, images, pool if threads > 1 else None) for way, decode in WAYS.items()}
                found = alternate(passes, rounds=1 if options.quick else 7)
            rows += [
                {
                    "set": name, "images": len(images), "threads": threads, "way": way, "n": sample.n,
                    "median": len(images) / sample.median, "least": len(images) / max(sample.seconds),
                    "greatest": len(images) / min(sample.seconds), "ratio": ratio(found["torchvision"], sample),
                }
                for way, sample in found.items()
            ]  # fmt: skip
    columns = {
        "set": "images", "images": "|d", "threads": "threads|d", "way": "by", "n": "n|d",
        "median": "images/s|.0f", "least": "least|.0f", "greatest": "greatest|.0f",
        "ratio": "rate : torchvision's|.2f",
    }  # fmt: skip
    return [Table("Images a second, decoded and resized to 224×224", columns, rows)] if rows else []


def _pass(
    decode: Callable[[bytes], object], images: list[bytes], pool: ThreadPoolExecutor | None
) -> Callable[[], None]:
    def every_image() -> None:
        for _ in map(decode, images) if pool is None else pool.map(decode, images):
            pass

    return every_image


def _sets(options: Options) -> Iterator[tuple[str, list[bytes]]]:
    if options.quick:
        yield "noise", [_noise(seed) for seed in range(3)]
        return
    for name in SETS:
        if path := options.data(name):
            yield name, photographs(path)


def photographs(path: Path) -> list[bytes]:
    """Read the encoded files of an archive: gray and color JPEGs, which all three decoders can read."""
    with tarfile.open(path) as archive:
        found = [archive.extractfile(member) for member in archive if member.isfile()]
        files = [file.read() for file in found if file]
    return [data for data in files if data.startswith(b"\xff\xd8\xff") and _is_rgb(data)]


def _is_rgb(data: bytes) -> bool:
    with contextlib.suppress(OSError):
        return Image.open(io.BytesIO(data)).mode in ("RGB", "L")
    return False


def _noise(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


@contextlib.contextmanager
def _threads_of_torch(count: int) -> Iterator[None]:
    """Limit torch's threads within an operation, so that only the pool's threads count."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
