"""Every ViT-like name of the installed timm, at random values: equal logits, or refused, or named as an alternative.

Wide networks are one block deep and others two; images are four patches wide, so that positions are few.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf
from tools import architectures as tool
from torch import Tensor, nn

from vitral.errors import WeightsError
from vitral.weights.architectures import architectures, named
from vitral.weights.load import read
from vitral.weights.loaded import Loaded

NAMES = sorted(architectures())
EQUAL_FOLDERS = 231
"""Names whose folders load with equal logits; the others are refused."""

TOO_LARGE = [f"vit_{size}_patch16_sapiens2" for size in ("5b", "giant", "huge", "large", "base")]
"""Names that take no depth: gigabytes of tensors, only to be refused."""


LARGE = re.compile("[0-9]b_|giant|gigantic|huge|_large|so400m|so150m")
"""Widths of over 1,000, which take seconds."""

SAMPLED = [
    pytest.param(
        name,
        marks=[pytest.mark.slow] * (k % 40 > 0 or bool(LARGE.search(name))) + [pytest.mark.soak] * (k % 3 > 0),
    )
    for k, name in enumerate(NAMES)
]


@pytest.mark.slow
def test_the_list_is_that_of_the_installed_timm():
    """`python tools/architectures.py` writes it anew."""
    listed = tool.listed()
    assert listed["timm"] == timm.__version__
    for name, entry in listed["architectures"].items():
        found = architectures()[name]
        assert (found.signature, found.fields, found.refused) == (
            entry["signature"],
            entry.get("fields", {}),
            entry.get("refused", ""),
        ), name
    assert list(architectures()) == list(listed["architectures"])


def test_most_folders_load():
    assert sum(not one.refused for one in architectures().values()) == EQUAL_FOLDERS


@pytest.mark.parametrize("name", SAMPLED)
def test_equal_or_refused(name: str, tmp_path: Path):
    if name in TOO_LARGE:
        with pytest.raises(WeightsError, match="cannot compute"):
            named(name, "file")
        return
    model, options = built(name)
    assert not _alike(model.state_dict()), "tensors whose exchange would not show"
    images = torch.randn(2, 3, *_size(model, options), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = None if architectures()[name].refused else model(images)
    tensors = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    save_file(tensors, tmp_path / "bare.safetensors")
    with warnings.catch_warnings(action="ignore"):
        save_for_hf(model, str(tmp_path / "folder"), model_args=options, safe_serialization=True)

    folder = loaded(tmp_path / "folder")
    assert (folder is None) == bool(architectures()[name].refused)
    assert folder is None or equal(folder, images, wanted), "the folder"
    like = loaded(tmp_path / "bare.safetensors", like=f"timm:{name}")
    assert like is None or equal(like, images, wanted), "by name"
    assert (like is None) == (folder is None)
    bare = loaded(tmp_path / "bare.safetensors")
    if bare is not None and (wanted is None or not equal(bare, images, wanted)):
        assert bare.account.assumed is not None
        assert name in bare.account.assumed.alternatives
        assert name in str(bare.account.assumed)
    if bare is not None:
        assert bare.weights.trained["assumed"] == bare.account.to_json()["assumed"]


EXCHANGED = [
    ("vit_tiny_patch16_224", "blocks.0.norm1.weight", "blocks.0.norm2.weight"),
    ("vit_tiny_patch16_224", "blocks.0.mlp.fc1.weight", "blocks.1.mlp.fc1.weight"),
    ("vit_small_patch14_dinov2", "blocks.0.ls1.gamma", "blocks.0.ls2.gamma"),
    ("eva02_base_patch14_224", "blocks.0.mlp.fc1_g.weight", "blocks.0.mlp.fc1_x.weight"),
    ("eva02_base_patch14_224", "blocks.0.attn.q_proj.weight", "blocks.0.attn.k_proj.weight"),
    # one block of a wide network
    pytest.param("vit_giant_patch14_reg4_dinov2", "blocks.0.norm1.bias", "blocks.0.norm2.bias", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "first", "second"), EXCHANGED)
def test_an_exchange_of_two_tensors_would_show(name: str, first: str, second: str, tmp_path: Path):
    model, options = built(name)
    images = torch.randn(2, 3, *_size(model, options), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(images)
    tensors = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    for exchanged in (False, True):
        if exchanged:
            tensors[first], tensors[second] = tensors[second], tensors[first]
        save_file(tensors, tmp_path / "bare.safetensors")
        found = loaded(tmp_path / "bare.safetensors", like=f"timm:{name}")
        assert equal(found, images, wanted) != exchanged


@pytest.mark.parametrize("name", ["naflexvit_base_patch16_gap", "naflexvit_base_patch16_siglip"])
def test_positions_of_any_grid_are_resized_as_timm_does(name: str, tmp_path: Path):
    model, options = built(name)
    with warnings.catch_warnings(action="ignore"):
        save_for_hf(model, str(tmp_path / "folder"), model_args=options, safe_serialization=True)
    save_file(model.state_dict(), tmp_path / "bare.safetensors")
    for size in ((96, 48), (32, 160)):
        images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            wanted = model(images)
        for source, more in ((tmp_path / "folder", {}), (tmp_path / "bare.safetensors", {"like": name}), (model, {})):
            assert equal(read(source, image_size=size, **more), images, wanted)
        other = read(tmp_path / "folder", image_size=size, scheme="bilinear-corners")
        assert not equal(other, images, wanted)


def loaded(path: Path, **options: Any) -> Loaded | None:
    """Read a network; None if it is refused with a reason."""
    try:
        return read(path, **options)
    except WeightsError as error:
        reason = error.why
    assert reason
    return None


def equal(found: Loaded, images: Tensor, wanted: Tensor | None) -> bool:
    assert wanted is not None
    with torch.no_grad():
        logits = found.build()(images)
    return logits.shape == wanted.shape and bool((logits - wanted).abs().max() <= 2e-5 * wanted.abs().max().clamp(1))


def built(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The network at random values, and the arguments that it was built with."""
    patch = int(found[1]) if (found := re.search(r"patch(\d+)", name)) else 16
    side = 4 * (32 if re.search(r"_(r\d*|resnet\d+d|mci)_", name) else patch)
    narrow = [{"depth": 2, "pos_embed_grid_size": [4, 4]}, {"depth": 2, "img_size": side}, {"depth": 2}, {}]
    for options in narrow:
        try:
            with torch.device("meta"):
                model = timm.create_model(name, **options)
        except (TypeError, AssertionError, ValueError, RuntimeError):
            continue
        if options.get("depth") and model.embed_dim > 1100:
            options = {**options, "depth": 1}
        return randomized(timm.create_model(name, **options)), options
    raise AssertionError(name)


def randomized(model: nn.Module) -> nn.Module:
    """No tensor stays at its initial value, and no two are equal. Values repeat, from another place for each tensor:
    drawing every one takes longer than the rest.
    """
    drawn = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    saved, begin = model.state_dict(), 0
    with torch.no_grad():
        for name, tensor in saved.items():
            if not tensor.is_floating_point():
                continue
            count = tensor.numel()
            values = drawn.roll(-begin).repeat(-(-count // len(drawn)))[:count].view_as(tensor)
            begin = (begin + count + 1) % len(drawn)  # 1: one whose count is a multiple of the period moves on too
            if name.endswith(_NEAR):
                tensor.mul_(1 + 0.1 * values.clamp(-3, 3))
                continue
            fan = tensor[0].numel() if tensor.ndim in (2, 4) else 10
            tensor.copy_(values * fan**-0.5 + float("norm" in name and name.endswith("weight")))
    return model.eval()


_NEAR = ("freqs", "running_var", "_min", "_max", "std_scale", "std_bias")
"""Ends of names of tensors that stay near their initial values: frequencies, and what is a variance or a bound."""


def _alike(tensors: dict[str, Tensor]) -> list[tuple[str, str]]:
    """Pairs of names of tensors of equal shape and values."""
    first: dict[tuple[Any, ...], str] = {}
    found = []
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel() > 1:
            known = first.setdefault((tensor.shape, *tensor.flatten()[:16].tolist()), name)
            if known != name and torch.equal(tensors[known], tensor):
                found.append((known, name))
    return found


def _size(model: Any, options: dict[str, Any]) -> tuple[int, int]:
    if "img_size" in options:
        return options["img_size"], options["img_size"]
    if "pos_embed_grid_size" in options:
        rows, columns = model.embeds.patch_size
        return 4 * rows, 4 * columns
    return model.pretrained_cfg["input_size"][1:]
