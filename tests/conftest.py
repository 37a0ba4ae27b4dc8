"""What the tests of several parts share: real data where they lie, and small folders of pictures."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from PIL import Image

import vitral
from pictures import MakePictures, noise
from running import TINY

# Networks this small lose many times more to waiting for a second thread than it does for them.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="vitral-tests-")  # features that are kept
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of a job in the background of a script; Ctrl-C is tested
    signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> vitral.TrainedRun:
    """A finished run on grey pictures of 8 × 10: light ones are "day", dark ones "night". Not to be changed."""
    root = tmp_path_factory.mktemp("trained")
    for label, level in (("day", 215), ("night", 40)):
        for split, count in (("train", 12), ("val", 4), ("test", 6)):
            folder = root / "sky" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = level + noise(number + count, (8, 10), 1) // 8
                Image.fromarray(pixels).save(folder / f"{number}.png")
    options = {**TINY, "epochs": 6, "image_size": (8, 12), "lr": 1e-2, "warmup": 0.5}
    return vitral.train(str(root / "sky"), out=str(root / "runs/sky"), quiet=True, **options)
