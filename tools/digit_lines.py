"""Make images of lines of handwritten digits: python tools/digit_lines.py OUT --data data/mnist

A line has 2 to 8 digits in a row, at slightly random distances and heights, on an image of 32 × 224 pixels. The digits
of a split are of that split alone: lines for testing are made of the data's test digits, lines for validation of a
tenth of its training digits, which no other line has. OUT gets the images and labels.csv with file,text,split; the same
options make the same bytes. Without --data it takes the `digits` that are in the package, which are small.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np
from PIL import Image

from vitral.data import DataSet, Split, load
from vitral.data.splits import with_validation

HEIGHT, WIDTH, CELL = 32, 224, 28  # pixels
SHORTEST, LONGEST = 2, 8  # digits
CLOSEST, JITTER = 22, 2  # least distance of two digits' left edges; largest shift up or down


def digits_of(split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Every digit as uint8 (n, CELL, CELL), white on black, and its label."""
    cells = np.zeros((len(split), CELL, CELL), np.uint8)
    for number, cell in enumerate(cells):
        pixels = split.image(number, 1)[..., 0]
        cell[:] = np.asarray(Image.fromarray(pixels).resize((CELL, CELL), Image.Resampling.BILINEAR))
    return cells, split.labels


def line(cells: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """An image uint8 (HEIGHT, WIDTH) of digits (n, CELL, CELL) from left to right; the brighter wins."""
    image = np.zeros((HEIGHT, WIDTH), np.uint8)
    steps = rng.integers(CLOSEST, CELL, size=len(cells), endpoint=True)
    lefts = np.minimum(np.cumsum(steps) - steps + rng.integers(0, 4), WIDTH - CELL)
    for cell, left in zip(cells, lefts, strict=True):
        top = (HEIGHT - CELL) // 2 + rng.integers(-JITTER, JITTER, endpoint=True)
        place = image[top : top + CELL, left : left + CELL]
        np.maximum(place, cell, out=place)
    return image


def write_split(out: Path, name: str, split: Split, count: int, seed: int) -> list[tuple[str, str, str]]:
    """Write `count` lines of the digits of a split; return the rows of the table."""
    rng = np.random.default_rng([seed, len(name)])
    cells, labels = digits_of(split)
    (out / name).mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        chosen = rng.integers(len(cells), size=rng.integers(SHORTEST, LONGEST, endpoint=True))
        path = f"{name}/{number:05}.png"
        Image.fromarray(line(cells[chosen], rng)).save(out / path)
        rows.append((path, "".join(str(labels[i]) for i in chosen), name))
    return rows


def splits_of(dataset: DataSet) -> dict[str, Split]:
    """Digits for training, validation and testing; without a test split, a fifth of train is cut off for it."""
    if "test" not in dataset.splits:
        cut = with_validation(dataset, 0.2, seed=1)
        dataset = DataSet(dataset.name, dataset.classes, {"train": cut["train"], "test": cut["val"]}, dataset.source)
    return dict(with_validation(dataset, 0.1, seed=0).splits)


def main() -> None:
    """Write the images and labels.csv."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder to write; it must not exist")
    parser.add_argument("--data", default="digits", help="digits as class folders or IDX files")
    parser.add_argument("--lines", type=int, default=20_000, help="lines for training")
    parser.add_argument("--held-out", type=int, default=1_000, help="lines for validation, and as many for testing")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice and the places of digits")
    given = parser.parse_args()
    if given.out.exists():
        parser.error(f"{given.out} exists already")
    counts = {"train": given.lines, "val": given.held_out, "test": given.held_out}
    splits = splits_of(load(given.data))
    rows = [
        row for name, count in counts.items() for row in write_split(given.out, name, splits[name], count, given.seed)
    ]
    with open(given.out / "labels.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("file", "text", "split"), *rows])
    print(f"{given.out}: " + ", ".join(f"{count:,} lines for {name}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
