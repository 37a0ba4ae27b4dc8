"""Near-duplicates (`vitral data check`): 300 planted copies among 10,000 training images of CIFAR-10 and among those of
hymenoptera, and the time of the search.

A quarter of the copies each is resized (to 50, 70, 150 or 200 %), compressed again at JPEG quality 40, mirrored, and
cropped to 90 % of its sides at a random place. "Found" are pairs of a copy and its original, "other pairs" all others
among the images themselves. CIFAR-10 has near-duplicates of its own: on a sheet, all but three of its other pairs,
ships on a horizon, are the same photograph. The search is timed without decoding, on thumbnails of CIFAR-10's 60,000
images and of 40,000 of them turned by 90°.

Tried: comparing whole images alone, which at 96 % of the crops lets 0.5 % of CIFAR-10's pairs pass; the center crop
with whole images, 0.2 % at 97 %, now the first filter; crops at four or nine places, 0.0002 % at 98 %, now the second.
MNIST's digits resemble each other more than crops do (half of 2,000 images are in some pair), so small images are not
compared.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable

import numpy as np
from PIL import Image

from benchmarks.results import Options, Table
from vitral.data import load
from vitral.data.checks.near import SIDE, near_pairs, thumbnail

PLANTED = 300
SIZES = {"cifar10.tar": 10_000, "hymenoptera.tar": 1000}
TIMED = 100_000


def run(options: Options) -> list[Table]:
    """Plant copies in each set, and time the search."""
    if options.quick:
        noise = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), np.uint8)
        images = [np.asarray(Image.fromarray(one).resize((64, 64), Image.Resampling.BICUBIC)) for one in noise]
        return [_planted({"noise": images}, 8), _timed(np.stack([thumbnail(image) for image in images]), 40)]
    sets = {name: _images(options, name, size) for name, size in SIZES.items()}
    found = {name: images for name, images in sets.items() if images}
    tables = [_planted(found, PLANTED)] if found else []
    if path := options.data("cifar10.tar"):
        splits = load(str(path)).splits.values()
        small = np.stack([thumbnail(split.image(i)) for split in splits for i in range(len(split))])
        tables.append(_timed(small, TIMED))
    return tables


def _images(options: Options, name: str, size: int) -> list[np.ndarray]:
    if (path := options.data(name)) is None:
        return []
    train = load(str(path))["train"]
    chosen = np.random.default_rng(0).permutation(len(train))[:size]
    return [train.image(int(index)) for index in chosen]


def _planted(sets: dict[str, list[np.ndarray]], count: int) -> Table:
    rows = []
    for name, images in sets.items():
        rng = np.random.default_rng(1)
        originals = rng.permutation(len(images))[:count]
        kinds = [list(CHANGES)[i % len(CHANGES)] for i in range(len(originals))]
        copies = [CHANGES[kind](Image.fromarray(images[i]), rng) for kind, i in zip(kinds, originals, strict=True)]
        small = np.stack([thumbnail(image) for image in (*images, *map(np.asarray, copies))])
        pairs = {(pair.first, pair.second) for pair in near_pairs(small)}
        found = np.array([(int(one), len(images) + i) in pairs for i, one in enumerate(originals)])
        others = [pair for pair in pairs if pair[1] < len(images)]
        shares = {kind: float(np.mean(found[[k == kind for k in kinds]])) for kind in CHANGES}
        rows.append(
            {
                "data": name.partition(".")[0],
                "images": len(images),
                "planted": len(found),
                "found": float(found.mean()),
                **shares,
                "others": len(others),
                "other_images": len({i for pair in others for i in pair}),
                "share": len(others) / (len(images) * (len(images) - 1) / 2),
            }
        )
    columns = {
        "data": "data",
        "images": "images|,d",
        "planted": "planted|d",
        "found": "found|.1%",
        **{kind: f"{kind}|.1%" for kind in CHANGES},
        "others": "other pairs|d",
        "other_images": "of images|d",
        "share": "of all pairs|.6%",
    }
    return Table("Planted copies found, and other pairs reported", columns, rows)


def _timed(small: np.ndarray, count: int) -> Table:
    gray = small[:, : SIDE * SIDE].reshape(-1, SIDE, SIDE)
    turned = np.concatenate([np.rot90(gray, axes=(1, 2)).reshape(len(gray), -1), small[:, SIDE * SIDE :]], 1)
    every = np.concatenate([small, turned])[:count]
    start, used = time.perf_counter(), time.process_time()
    pairs = near_pairs(every)
    seconds, used = time.perf_counter() - start, time.process_time() - used
    row = {"images": len(every), "pairs": len(pairs), "seconds": seconds, "cpu": used}
    columns = {"images": "images|,d", "pairs": "pairs found|,d", "seconds": "seconds|.1f", "cpu": "CPU seconds|.1f"}
    return Table("Search without decoding", columns, [row])


def _resized(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    factor = rng.choice([0.5, 0.7, 1.5, 2.0])
    return image.resize((round(image.width * factor), round(image.height * factor)), Image.Resampling.BICUBIC)


def _compressed(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=40)
    return Image.open(file)


def _mirrored(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def _cropped(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    width, height = round(image.width * 0.9), round(image.height * 0.9)
    left, top = rng.integers(0, image.width - width + 1), rng.integers(0, image.height - height + 1)
    return image.crop((left, top, left + width, top + height))


CHANGES: dict[str, Callable[[Image.Image, np.random.Generator], Image.Image]] = {
    "resized": _resized,
    "compressed": _compressed,
    "mirrored": _mirrored,
    "cropped": _cropped,
}
