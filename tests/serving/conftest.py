"""Images and weights for tests of the server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vitral.data.images.lazy_torchvision import torchvision
from vitral.data.images.preprocessing import Preprocessing
from vitral.demo import IMAGES
from vitral.model import ViT, ViTConfig
from vitral.weights import native

pytest.importorskip("starlette", reason="needs vitral[serve]")
pytest.importorskip("uvicorn", reason="needs vitral[serve]")


@pytest.fixture(scope="session", autouse=True)
def _decoder() -> None:
    """Import torchvision once: every server does, and most are forks of this process."""
    torchvision()


@pytest.fixture(scope="session")
def drawings() -> dict[str, bytes]:
    """File name → a drawing as PNG, one of each class of the demo."""
    return {file.name: file.read_bytes() for file in sorted(IMAGES.glob("*.png"))}


@pytest.fixture(scope="session")
def write_run() -> Callable[..., Path]:
    """write_run(folder, seed) → a run folder with a tiny random network for gray images, written or replaced."""

    def write(folder: Path, seed: int, classes: tuple[str, ...] = ("day", "night")) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "metrics.jsonl").touch()
        config = ViTConfig(
            image_size=8, patch_size=4, channels=1, classes=len(classes), dim=8, depth=2, heads=2, mlp_dim=8
        )
        torch.manual_seed(seed)
        state = {name: torch.randn_like(tensor) * 0.3 for name, tensor in ViT(config).state_dict().items()}
        preprocessing = Preprocessing(image_size=(8, 8), channels=1, mean=(0.5,), std=(0.5,))
        native.save(folder / "model.safetensors", native.Weights(config, state, preprocessing, classes, {}))
        return folder

    return write
