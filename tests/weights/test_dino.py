"""Original releases of DINO: masks, tables of periods, and chunks of blocks in addition to weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases_dino import CASES
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitral.errors import WeightsError
from vitral.weights.load import read


def changed(name: str, folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    path = CASES[name]().write(folder)
    state = {key: tensor.clone() for key, tensor in load_file(path).items()}
    change(state)
    save_file(state, path)
    return path


def test_the_periods_tell_the_heads(tmp_path: Path):
    assert read(CASES["dinov3/masked-bias"]().write(tmp_path)).weights.config.heads == 4


def test_without_periods_the_heads_must_be_stated(tmp_path: Path):
    path = changed("dinov3/masked-bias", tmp_path, lambda state: state.pop("rope_embed.periods"))
    with pytest.raises(WeightsError, match="heads"):
        read(path)
    assert read(path, heads=4).weights.config.heads == 4


def test_other_periods_are_refused(tmp_path: Path):
    path = changed("dinov3/masked-bias", tmp_path, lambda state: state["rope_embed.periods"].mul_(1.1))
    with pytest.raises(WeightsError, match="periods"):
        read(path)


def test_what_lies_under_the_mask_does_not_count(tmp_path: Path):
    """In half of the files it was never filled: NaN must not come through as NaN times zero."""

    def spoil(state: dict[str, Tensor]) -> None:
        for i in range(2):
            state[f"blocks.{i}.attn.qkv.bias"][48:96] = torch.nan

    loaded = read(changed("dinov3/masked-bias", tmp_path, spoil))
    bias = loaded.weights.state["blocks.0.attn.qkv.bias"]
    assert not bias[48:96].any()
    assert bias[:48].all()
    fates = {line.source: line.note for line in loaded.account.lines}
    assert fates["blocks.0.attn.qkv.bias_mask"] == "masked: keys have no bias"
    assert "computed" in fates["rope_embed.periods"]


@pytest.mark.parametrize(
    ("name", "scheme"), [("dinov2/plain", "bicubic,"), ("dinov2-registers/plain", "bicubic-antialias,")]
)
def test_positions_are_resized_as_there(name: str, scheme: str, tmp_path: Path):
    account = read(CASES[name]().write(tmp_path), heads=4, image_size=48).account
    assert any(f"{line.note},".endswith(f", {scheme}") for line in account.lines if line.fate == "resized")


def test_dino_of_2021_has_to_be_named(tmp_path: Path):
    path = CASES["dino/plain"]().write(tmp_path)
    unnamed, named = read(path, heads=4), read(path, heads=4, format="dino")
    assert (unnamed.format, named.format) == ("timm", "dino")
    assert named.weights.preprocessing.mean == (0.485, 0.456, 0.406)


def test_an_unknown_tensor_is_refused_with_the_nearest_format(tmp_path: Path):
    path = changed("dinov2/plain", tmp_path, lambda state: state.update({"odd_one": torch.ones(1)}))
    with pytest.raises(WeightsError, match="nearest is dinov2: foreign: odd_one"):
        read(path)


def test_half_a_gated_mlp_is_refused(tmp_path: Path):
    path = changed("dinov3/gated", tmp_path, lambda state: state.pop("blocks.1.mlp.w2.weight"))
    with pytest.raises(WeightsError, match=r"blocks\.1\.mlp\.w1\.weight"):
        read(path)


def test_a_mask_of_one_number_is_refused(tmp_path: Path):
    path = changed(
        "dinov3/masked-bias", tmp_path, lambda state: state.update({"blocks.0.attn.qkv.bias": torch.tensor(1.0)})
    )
    with pytest.raises(WeightsError, match="mask"):
        read(path)
