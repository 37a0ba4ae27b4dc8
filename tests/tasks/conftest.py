"""Tables of tiny images with several labels or numbers, and one run of each, shared by the tests of tasks."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from running import train

COLORS = {"red": (220, 20, 20), "green": (20, 220, 20), "blue": (20, 20, 220)}


@pytest.fixture(scope="session")
def tables(tmp_path_factory) -> Path:
    """A folder with labels.csv, bits.csv and numbers.csv; a corner of its color is a label, a bar's width a number."""
    folder, rng, rows = tmp_path_factory.mktemp("tables"), np.random.default_rng(0), []
    (folder / "p").mkdir()
    for number in range(60):
        pixels = rng.integers(0, 60, (8, 8, 3)).astype(np.uint8)
        labels = [name for name, share in zip(COLORS, (0.5, 0.4, 0.2), strict=True) if rng.random() < share]
        for place, name in enumerate(COLORS):
            if name in labels:
                pixels[place * 2 : place * 2 + 2, :3] = COLORS[name]
        width = int(rng.integers(1, 8))
        pixels[6:, :width] = 200
        Image.fromarray(pixels).save(folder / f"p/{number}.png")
        rows.append((f"p/{number}.png", labels, width, "test" if number % 5 == 0 else "train"))
    write(folder / "labels.csv", ["file", "labels", "split"], [(f, "|".join(own), s) for f, own, _, s in rows])
    bits = [(f, *(int(name in own) for name in COLORS), s) for f, own, _, s in rows]
    write(folder / "bits.csv", ["file", *COLORS, "split"], bits)
    write(
        folder / "numbers.csv",
        ["file", "id", "width", "area", "split"],
        [(f, k, w + 0.5, 1000 * w, s) for k, (f, _, w, s) in enumerate(rows)],
    )
    return folder


def write(path: Path, header: list[str], rows: list[tuple[object, ...]]) -> Path:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


@pytest.fixture(scope="session")
def labels_run(tables) -> Path:
    return train(tables / "labels.csv", tables / "runs/labels", epochs=12, dim=16, mlp_dim=32, lr=1e-2).folder


@pytest.fixture(scope="session")
def numbers_run(tables) -> Path:
    return train(tables / "numbers.csv", tables / "runs/numbers", epochs=12, dim=16, mlp_dim=32, lr=1e-2).folder
