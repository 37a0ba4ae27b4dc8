"""The contracts of vitral on every entry of this package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from vitral_letters import letters, lines
from vitral_letters.center import CENTER
from vitral_letters.networks import build
from vitral_letters.prefixed import LETTERS

from vitral.model import ForeignConfig, ViT, ViTConfig
from vitral.testing import Case, FormatContract, MethodContract, SourceContract, TrackerContract
from vitral.testing.formats import randomized
from vitral.training.callbacks import Epoch
from vitral.weights.files import write_plain


class TestLetters(SourceContract):
    source = letters
    data = "letters:cab"
    refused = ("letters:", "letters:a")


class TestCenter(MethodContract):
    method = CENTER
    ignores_network = True


class TestLines(TrackerContract):
    tracker = lines.Tracker
    name = "lines"

    def check_written(self, folder: Path, history: Sequence[Epoch]) -> None:
        assert len((folder / "lines.txt").read_text("utf-8").splitlines()) == len(history)


class TestPrefixed(FormatContract):
    format = LETTERS

    def case(self) -> Case:
        network = randomized(
            ViT(ViTConfig(image_size=12, patch_size=4, classes=5, dim=16, depth=2, heads=2, mlp_dim=32))
        )

        def write(folder: Path) -> Path:
            state = {f"letters.{name}": tensor for name, tensor in network.state_dict().items()}
            write_plain(folder / "weights.safetensors", state)
            return folder / "weights.safetensors"

        return Case(write, network, sizes=((12, 12),))


def test_networks_have_an_output_for_each_class() -> None:
    config = ForeignConfig(source="letters:mlp", image_size=16, channels=1, classes=3)
    assert build("mlp", config)(torch.zeros(2, 1, 16, 16)).shape == (2, 3)
