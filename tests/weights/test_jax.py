"""The authors' npz files: held to timm's own reader, written in the paper's names, there and back without a change."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax_reference as ref
import numpy as np
import pytest
import timm
import torch
from cases_jax import BIG_VISION, CASES, SCANNED, TOWER
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_hybrid import HybridEmbed, _resnetv2

from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import WeightsError
from vitral.model import ViT, ViTConfig, network
from vitral.model import config as config_of
from vitral.weights import native
from vitral.weights.convert import write
from vitral.weights.formats import FORMATS, detect
from vitral.weights.load import read
from vitral.weights.native import Weights
from vitral.weights.preprocessing_configs import DEFAULTS

SHAPE: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "classes": 7,
    "dim": 32,
    "depth": 3,
    "heads": 4,
    "mlp_dim": 48,
    "activation": "gelu-tanh",
}


def file_of(arrays: ref.Arrays, folder: Path) -> Path:
    np.savez(folder / "vit.npz", **arrays)
    return folder / "vit.npz"


def logits(weights: Weights, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return native.build(weights)(images)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= 1e-5 * theirs.abs().max())


def weights_of(**changes: Any) -> Weights:
    torch.manual_seed(0)
    config = ViTConfig(**{**SHAPE, **changes})
    model = ViT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    names = tuple(map(str, range(config.classes)))
    half = (0.5,) * config.channels
    preprocessing = Preprocessing(config.image, config.channels, mean=half, std=half)
    return Weights(config, model.state_dict(), preprocessing, names, {})


TIMM: dict[str, tuple[ref.Spelling, dict[str, Any], dict[str, Any]]] = {
    "paper": (ref.PAPER, {}, {}),
    "big-vision": (BIG_VISION, {}, {"no_embed_class": True}),
    "scanned": (SCANNED, {}, {"no_embed_class": True}),
    "gap": (BIG_VISION, {"cls": False}, {"class_token": False, "global_pool": "avg", "fc_norm": False}),
    "map": (TOWER, {"cls": False, "map_head": True}, {"class_token": False, "global_pool": "map"}),
}


@pytest.mark.parametrize("name", TIMM)
def test_timms_own_reader_gives_the_same_logits(name: str, tmp_path: Path):
    spelling, parts, args = TIMM[name]
    path = file_of(ref.random_vit(spelling, **parts), tmp_path)
    model = VisionTransformer(
        32, 8, num_classes=7, embed_dim=32, depth=3, num_heads=4, mlp_ratio=1.5, act_layer="gelu_tanh", **args
    ).eval()
    model.load_pretrained(str(path))
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert close(logits(read(path).weights, images), model(images))


@pytest.mark.parametrize(("stages", "patch"), [((1, 2), 2), ((), 8)])
def test_timms_own_reader_gives_the_same_hybrid_but_for_its_small_numbers(
    stages: tuple[int, ...], patch: int, tmp_path: Path
):
    path = file_of(ref.random_vit(stages=stages, patch=(patch, patch), grid=(2, 2), depth=1), tmp_path)
    weights = read(path).weights
    side = weights.config.image[0]
    assert weights.config.stem == stages
    assert side == 2 * patch * 4 * 2 ** max(len(stages) - 1, 0)
    backbone = _resnetv2(stages)
    model = VisionTransformer(
        side,
        patch,
        num_classes=7,
        embed_dim=32,
        depth=1,
        num_heads=4,
        mlp_ratio=1.5,
        act_layer="gelu_tanh",
        embed_layer=lambda **given: HybridEmbed(backbone, **given),
    ).eval()
    model.load_pretrained(str(path))
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))
    small = dataclasses.replace(weights, config=dataclasses.replace(weights.config, stem_numerics="timm"))
    with torch.no_grad():
        assert close(logits(small, images), model(images))


WRITTEN = ("paper", "pre-logits", "no-head", "gray", "oblong-patches", "gap", "hybrid", "hybrid-root")


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_is_written_as_it_was(name: str, tmp_path: Path):
    path = CASES[f"jax/{name}"]().write(tmp_path)
    native_file = tmp_path / "model.safetensors"
    write(read(path).weights, native_file, "native")
    (again,) = write(read(native_file).weights, tmp_path / "again.npz", "jax")
    before, after = np.load(path), np.load(again)
    assert set(before) == set(after)
    for key in before:
        assert before[key].dtype == after[key].dtype, key
        assert np.array_equal(before[key], after[key]), key


OTHERS = ("linen", "before-2022", "big-vision", "big-vision-gap", "scanned", "sincos", "hybrid-old-norms")


@pytest.mark.parametrize("name", OTHERS)
def test_other_spellings_become_the_papers(name: str, tmp_path: Path):
    """vit_jax's formulas give the same result for the written file as for the original."""
    case = CASES[f"jax/{name}"]()
    (again,) = write(read(case.write(tmp_path)).weights, tmp_path / "again.npz", "jax")
    arrays = dict(np.load(again))
    assert "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel" in arrays
    size = case.sizes[0]
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    ours = ref.vit(arrays, images.permute(0, 2, 3, 1).numpy())
    assert np.abs(ours - case.logits(images).numpy()).max() < 1e-6 * np.abs(ours).max()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cls_token": False, "pool": "mean"},
        {"pre_logits": True},
        {"image_size": (24, 40)},
        {"stem": (1,), "patch_size": 8},
        {"stem": (), "patch_size": (8, 16)},
    ],
)
def test_a_network_of_ours_comes_back_bit_for_bit(changes: dict[str, Any], tmp_path: Path):
    weights = weights_of(**changes)
    (path,) = write(weights, tmp_path / "vit.npz", "jax")
    back = read(path, image_size=weights.config.image).weights
    assert back.config == weights.config
    assert set(back.state) == set(weights.state)
    assert all(torch.equal(back.state[name], tensor) for name, tensor in weights.state.items())
    images = torch.randn(2, 3, *weights.config.image, generator=torch.Generator().manual_seed(1))
    theirs = ref.vit(np.load(path), images.permute(0, 2, 3, 1).numpy())
    assert close(logits(weights, images), torch.from_numpy(theirs))


def test_tokens_without_a_position_get_one_of_zeros(tmp_path: Path):
    for number, changes in enumerate(({"position": "none"}, {"cls_position": False}, {"position": "sincos"})):
        weights = weights_of(**changes)
        (path,) = write(weights, tmp_path / f"{number}.npz", "jax")
        images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        theirs = ref.vit(np.load(path), images.permute(0, 2, 3, 1).numpy())
        assert close(logits(weights, images), torch.from_numpy(theirs))


def test_bfloat16_arrays_are_read_and_written_as_float32(tmp_path: Path):
    arrays = ref.random_vit()
    half = {name: torch.from_numpy(array).bfloat16() for name, array in arrays.items()}
    np.savez(tmp_path / "bf16.npz", **{k: v.view(torch.int16).numpy().view("V2") for k, v in half.items()})
    weights = read(tmp_path / "bf16.npz").weights
    assert weights.state["head.weight"].dtype == torch.bfloat16
    (path,) = write(weights, tmp_path / "again.npz", "jax")
    again = np.load(path)
    assert all(np.array_equal(again[name], half[name].float().numpy()) for name in arrays)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"activation": "gelu"}, "GELU is exact"),
        ({"pool": "mean"}, "pooling is mean beside a class token"),
        ({"registers": 1}, "registers is 1"),
        ({"norm_eps": 1e-5}, "norm eps is 1e-05"),
        ({"qkv_bias": False}, "qkv bias is False"),
        ({"stem": (1,), "patch_size": 8, "stem_numerics": "timm"}, "numerics (epsilon, padding) of timm"),
    ],
)
def test_networks_unsupported_by_the_authors_code_are_refused(changes: dict[str, Any], why: str, tmp_path: Path):
    with pytest.raises(WeightsError, match="cannot be written for jax") as caught:
        write(weights_of(**changes), tmp_path / "vit.npz", "jax")
    assert why in str(caught.value)
    assert not (tmp_path / "vit.npz").exists()


def test_omissions_have_a_reason(tmp_path: Path):
    account = read(CASES["jax/map"]().write(tmp_path)).account
    left = {line.source: line.note for line in account.lines if line.fate == "left out"}
    assert set(left) == {"params/t", "params/b", "params/txt/Embed_0/embedding"}
    assert all("text tower" in why for why in left.values())


def test_missing_positions_are_reported(tmp_path: Path):
    notes = read(CASES["jax/sincos"]().write(tmp_path)).account.notes
    assert any("sine-cosine" in note for note in notes)


def test_images_are_prepared_as_the_authors_do_and_positions_resized_so(tmp_path: Path):
    weights = read(CASES["jax/paper"]().write(tmp_path)).weights
    assert weights.preprocessing == DEFAULTS["jax"]((32, 32))
    assert FORMATS["jax"].scheme == "bilinear-corners"


def test_a_prefix_that_would_make_two_of_one_is_refused(tmp_path: Path):
    arrays = ref.random_vit(BIG_VISION)
    path = file_of(arrays | {"head/bias": arrays["params/head/bias"]}, tmp_path)
    with pytest.raises(WeightsError, match="unknown format of weights") as caught:
        read(path)
    assert "params/head/bias" in str(caught.value)


@pytest.mark.parametrize("stem", [(), pytest.param((2, 2, 2, 2), marks=pytest.mark.slow)])
def test_timm_opens_our_hybrids_and_they_come_back_bit_for_bit(stem: tuple[int, ...], tmp_path: Path):
    weights = weights_of(stem=stem, patch_size=32, image_size=(64, 96), stem_numerics="timm", depth=1)
    write(weights, tmp_path / "out", "timm")
    model = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    images = torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert close(logits(weights, images), model(images))
    back = read(tmp_path / "out").weights
    assert back.config == weights.config
    assert all(torch.equal(back.state[name], tensor) for name, tensor in weights.state.items())
    authors = dataclasses.replace(weights, config=dataclasses.replace(weights.config, stem_numerics="authors"))
    with pytest.raises(WeightsError, match=r"numerics \(epsilon, padding\) of the authors"):
        write(authors, tmp_path / "other", "timm")


DAMAGE: dict[str, tuple[ref.Spelling, dict[str, Any], str, Any]] = {
    "no axes": (ref.PAPER, {}, "head/kernel", lambda a: a.ravel()[0]),
    "one axis": (BIG_VISION, {}, "params/pos_embedding", lambda a: a.ravel()[:3]),
    "narrow": (TOWER, {"cls": False, "map_head": True}, "params/img/embedding/kernel", lambda a: a[..., :-1]),
    "flat": (SCANNED, {}, "params/Transformer/encoderblock/MlpBlock_0/Dense_0/kernel", np.ravel),
    "heads": (ref.PAPER, {}, "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel", np.ravel),
    "empty": (ref.PAPER, {}, "Transformer/posembed_input/pos_embedding", lambda a: a[:, :1]),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_arrays_of_wrong_shapes_are_refused(name: str, tmp_path: Path):
    spelling, parts, key, damage = DAMAGE[name]
    arrays = ref.random_vit(spelling, **parts)
    with pytest.raises(WeightsError):
        read(file_of(arrays | {key: np.array(damage(arrays[key]))}, tmp_path))


def test_a_stage_too_far_is_refused(tmp_path: Path):
    arrays = ref.random_vit(stages=(1,), patch=(2, 2), grid=(2, 2), depth=1)
    arrays["block999/unit1/gn1/scale"] = arrays["block1/unit1/gn1/scale"]
    with pytest.raises(WeightsError) as caught:
        read(file_of(arrays, tmp_path))
    assert "stages.998" in str(caught.value)
    assert len(str(caught.value)) < 400


SIZES = {"Ti/16": 5_717_416, "S/32": 22_878_952, "B/16": 86_567_656, "L/16": 304_326_632}
HYBRIDS = {"R+Ti/16": 32, "R26+S/32": 32, "R50+B/16": 16, "R50+L/32": 32}


@pytest.mark.parametrize("name", [*SIZES, *HYBRIDS])
def test_full_sizes_are_told_from_shapes_alone(name: str):
    """The names and shapes of a published file, without its numbers: detected, and of this configuration."""
    from vitral.weights.formats.jax import JAX, facts
    from vitral.weights.read.source import Source
    from vitral.weights.transform.infer import infer

    config = dataclasses.replace(config_of(name), activation="gelu-tanh")
    with torch.device("meta"):
        ours = network(config).state_dict()
    theirs: dict[str, torch.Tensor] = {}
    for parameter, tensor in ours.items():
        match = JAX.keymap.writing(parameter)
        assert match is not None
        theirs |= dict(zip(match.tensors, match.form.write(tensor, config.heads), strict=True))
    state = {m.parameter: m.form.read([theirs[one] for one in m.tensors]) for m in JAX.keymap.reading(theirs)}
    source = Source("file", theirs, {}, None, None, ())
    assert detect(source).name == "jax"
    assert infer(facts(source), state, "file") == config
    count = sum(tensor.numel() for tensor in theirs.values())
    assert count == sum(tensor.numel() for tensor in ours.values()) == SIZES.get(name, count)
    assert config.patch[0] == HYBRIDS.get(name, config.patch[0])
