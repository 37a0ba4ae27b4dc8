"""What the tests of several parts share: real data where they lie, and small folders of pictures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from PIL import Image

from pictures import MakePictures, noise


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the checkout; the test is skipped where there is none."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the real data in {folder} (mnist/, cifar10.tar, hymenoptera.tar)")
    return folder


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
