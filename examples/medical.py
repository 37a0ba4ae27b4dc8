"""Gray images of 16 bits, as of a CT scanner: three windows of the values become the three channels of a color image.

    python examples/medical.py scans runs/scans

`scans/` has a folder of 16-bit PNG or TIFF files for each class. vitral computes in 8 bits, and would scale 65,536
values to 256, where a scan may use 4,096: it refuses such images. A window keeps the values that matter, as on a
radiologist's screen: each channel has 256 steps within its own range, and is clipped outside.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import vitral
from vitral.data import Split

WINDOWS = ((400, 1500), (40, 400), (600, 2800))
"""Center and width in Hounsfield units of the windows for lung, soft tissue and bone …"""
OFFSET = 1024
"""… and what the files add to them, so that air is positive."""


def windowed(values: np.ndarray) -> np.ndarray:
    """Map values (H, W) uint16 to (H, W, 3) uint8, a channel for each window."""
    units = values.astype(np.float32) - OFFSET
    shares = [(units - center) / width + 0.5 for center, width in WINDOWS]
    return np.rint(np.stack(shares, axis=2).clip(0, 1) * 255).astype(np.uint8)


def read(path: str | Path) -> np.ndarray:
    """Read the values of a 16-bit file, as they are; `ValueError` for another one."""
    values = np.asarray(Image.open(path))
    if values.dtype != np.uint16 or values.ndim != 2:
        raise ValueError(f"{path}: {values.dtype} {values.shape}, not 16 bits of gray")
    return values


class Windowed:
    """The scans of a split as pairs of pixels in three windows and a class number."""

    def __init__(self, split: Split, classes: tuple[str, ...]):
        self.paths, self.labels, self.classes = split.names, split.labels, classes

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return windowed(read(self.paths[index])), int(self.labels[index])


def main(scans: str, out: str, **options: Any) -> vitral.TrainedRun:
    """Train on a folder of scans; `options` are those of `vitral.train`."""
    data = vitral.load_data(scans)
    splits = {name: Windowed(split, data.classes) for name, split in data.splits.items()}
    run = vitral.train(splits, out=out, **options)
    scan = data["train"].names[0]
    print(scan, run.predictor(windowed(read(scan))).top(3))
    return run


if __name__ == "__main__":
    main(*sys.argv[1:])
