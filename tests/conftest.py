"""What the tests of several parts share: real data where they lie, and small folders of pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

MakePictures = Callable[..., Path]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the checkout; the test is skipped where there is none."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the real data in {folder} (mnist/, cifar10.tar, hymenoptera.tar)")
    return folder


def noise(seed: int, size: tuple[int, int] = (8, 10), channels: int = 3) -> np.ndarray:
    """A picture (H, W, channels), or (H, W) for one channel, that differs for every seed."""
    shape = size if channels == 1 else (*size, channels)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture
def make_pictures(tmp_path: Path) -> MakePictures:
    """make_pictures({"train/cat": 3, "train/dog": 2}, size=(H, W), extension=".png") -> the folder that holds them.

    Every picture is different: random pixels, the same for the same folder contents.
    """

    def make(
        counts: Mapping[str, int], name: str = "photos", size: tuple[int, int] = (8, 10), extension: str = ".png"
    ) -> Path:
        root, seed = tmp_path / name, 0
        for folder, count in counts.items():
            (root / folder).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                Image.fromarray(noise(seed, size)).save(root / folder / f"{number}{extension}")
                seed += 1
        return root

    return make
