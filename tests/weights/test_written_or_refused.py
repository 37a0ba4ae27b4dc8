"""Networks of random options: another library's program computes the same, or vitral refuses with a reason."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import jax_reference as ref
import numpy as np
import pytest
import torch
import torchvision
import transformers
from jax_reference import Spelling
from parity import randomized
from safetensors.torch import load_file, save_file
from test_configurations import against
from torch import Tensor, nn

from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import UsageError, WeightsError
from vitral.model import ViT, ViTConfig
from vitral.weights import native
from vitral.weights.convert import write
from vitral.weights.load import read
from vitral.weights.native import Weights


def images_of(size: tuple[int, int], channels: int = 3) -> Tensor:
    return torch.randn(2, channels, *size, generator=torch.Generator().manual_seed(1))


# ---------------------------------------------------------------- torchvision

TORCHVISION: dict[str, dict[str, Any]] = {
    "usual": {},
    "one-head": {"num_heads": 1},
    "heads": {"num_heads": 12},
    "odd-mlp": {"mlp_dim": 50},
    "gated-by-chance": {"mlp_dim": 96},
    "odd-size": {"image_size": 56},
    "one-patch": {"image_size": 8},
    "deep": {"num_layers": 3},
    "dropout": {"dropout": 0.3, "attention_dropout": 0.3},
    "one-class": {"num_classes": 1},
    "pre-logits": {"representation_size": 48},
}


def torchvisions(**changes: Any) -> nn.Module:
    usual = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 48, "mlp_dim": 80}
    return randomized(torchvision.models.VisionTransformer(**{**usual, "num_classes": 5, **changes}))


@pytest.mark.parametrize("name", TORCHVISION)
def test_arguments_of_torchvisions_constructor_are_followed(name: str, tmp_path: Path):
    changes = TORCHVISION[name]
    model = torchvisions(**changes)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    images = images_of((changes.get("image_size", 32),) * 2)
    with torch.no_grad():
        theirs = model(images)
    heads = changes.get("num_heads", 4)
    assert against(tmp_path / "model.safetensors", images, theirs, heads=heads) == "equal"
    assert against(tmp_path / "model.safetensors", images, None).startswith(
        "refused: cannot determine the number of heads"
    )


def test_what_torchvision_builds_beyond_the_paper_is_refused_or_reported(tmp_path: Path):
    stem = [torchvision.models.vision_transformer.ConvStemConfig(8, 3, 8)]
    for name, changes in {"narrow": {"representation_size": 24}, "stem": {"conv_stem_configs": stem}}.items():
        save_file(torchvisions(**changes).state_dict(), tmp_path / f"{name}.safetensors")
        assert against(tmp_path / f"{name}.safetensors", images_of((32, 32)), None, heads=4).startswith("refused")
    other = torchvisions(norm_layer=partial(nn.LayerNorm, eps=1e-3))
    save_file(other.state_dict(), tmp_path / "epsilon.safetensors")
    assumed = read(tmp_path / "epsilon.safetensors", heads=4).account.assumed
    assert assumed
    assert assumed.fields["norm_eps"] == 1e-6  # no tensor tells


# ---------------------------------------------------------------- the authors' files


@pytest.mark.parametrize("seed", range(40))
def test_a_random_file_of_the_authors_is_equal_or_refused(seed: int, tmp_path: Path):
    rng = random.Random(seed)
    stacked, cls, linen = rng.random() < 0.3, rng.random() < 0.5, rng.random() < 0.7
    map_head = not cls and rng.random() < 0.5
    tables = ("Transformer/posembed_input/pos_embedding", "Transformer/pos_embedding", "pos_embedding")
    spelling = Spelling(
        prefix=rng.choice(("", "params/", "opt/target/")),
        linen=linen or stacked or map_head,
        stacked=stacked,
        table=rng.choice(tables),
        cls_position=True,
        map_head="MAPHead_0/",
    )
    if spelling.table == "pos_embedding" and cls and rng.random() < 0.5:
        spelling = Spelling(spelling.prefix, spelling.linen, stacked, "pos_embedding", cls_position=False)
    stages = rng.choice((None, None, (), (1,), (1, 2)))
    patch = rng.choice(((8, 8), (4, 8), (2, 6))) if stages is None else (2, 2)
    grid = rng.choice(((4, 4), (3, 3), (1, 1), (2, 2)))
    arrays = ref.random_vit(
        spelling,
        dim=rng.choice((24, 36)),
        heads=rng.choice((1, 2, 6)),
        depth=rng.choice((1, 2)),
        cls=cls,
        hidden=rng.choice((24, 50)),
        patch=patch,
        grid=grid,
        classes=rng.choice((0, 3)),
        map_head=map_head,
        channels=rng.choice((1, 3)),
        pre_logits=rng.random() < 0.3,
        stages=stages,
        seed=seed,
    )
    np.savez(tmp_path / "vit.npz", **arrays)
    stride = 1 if stages is None else 4 * 2 ** max(len(stages) - 1, 0)
    kernel = arrays[f"{spelling.prefix}embedding/kernel"]
    channels = arrays[f"{spelling.prefix}conv_root/kernel"].shape[2] if stages is not None else kernel.shape[2]
    images = images_of((patch[0] * grid[0] * stride, patch[1] * grid[1] * stride), channels)
    theirs = torch.from_numpy(ref.vit(arrays, images.permute(0, 2, 3, 1).numpy(), spelling))
    assert against(tmp_path / "vit.npz", images, theirs).startswith(("equal", "refused"))
    if stages is None:
        assert against(tmp_path / "vit.npz", images, theirs) == "equal"


@pytest.mark.parametrize("first", [True, False])
def test_a_pooling_head_of_other_heads_is_equal(first: bool, tmp_path: Path):
    """Whichever of the two attentions comes first in the file."""
    spelling = Spelling(linen=True, table="pos_embedding")
    arrays = ref.random_vit(spelling, cls=False, map_head=True, heads=4)
    two = ref.random_vit(spelling, cls=False, map_head=True, heads=2)
    pooled = {name: array for name, array in two.items() if name.startswith("MAPHead_0/")}
    rest = {name: array for name, array in arrays.items() if not name.startswith("MAPHead_0/")}
    mixed = {**pooled, **rest} if first else {**rest, **pooled}
    np.savez(tmp_path / "vit.npz", **mixed)
    images = images_of((32, 32))
    theirs = torch.from_numpy(ref.vit(mixed, images.permute(0, 2, 3, 1).numpy(), spelling))
    assert against(tmp_path / "vit.npz", images, theirs) == "equal"


# ---------------------------------------------------------------- written

OPTIONS: dict[str, tuple[Any, ...]] = {
    "image_size": (32, 16, (16, 32), 40),
    "patch_size": (8, (8, 4), 4),
    "channels": (1,),
    "classes": (0, 1),
    "dim": (24,),
    "heads": (2, 3),
    "mlp_dim": (50, 64),
    "patch_bias": (False,),
    "position": ("sincos", "none", "rotary"),
    "cls_token": (False,),
    "cls_position": (False,),
    "dist_token": (True,),
    "registers": (1, 3),
    "register_position": (True,),
    "pool_heads": (2,),
    "pool": ("mean", "mean-all", "map", "cls-mean"),
    "norm": ("post", "res-post"),
    "norm_eps": (1e-5, 1e-3),
    "norm_pre": (True,),
    "attn_norm": (True,),
    "mlp_norm": (True,),
    "final_norm": ("pooled", "none"),
    "qkv_bias": (False,),
    "proj_bias": (False,),
    "mlp_bias": (False,),
    "qk_norm": (True,),
    "attention_scale": ("model",),
    "layer_scale": (0.1,),
    "activation": ("gelu-tanh", "swiglu", "quick-gelu", "relu", "silu"),
    "pre_logits": (True,),
    "logits_tanh": (True,),
}


def random_weights(rng: random.Random, **usual: Any) -> Weights | None:
    """A network with a few unusual options; None where they do not go together."""
    names = rng.sample(sorted(OPTIONS), rng.randint(0, 4))
    shape = {"image_size": 32, "patch_size": 8, "classes": 5, "dim": 48, "depth": 2, "heads": 4, "mlp_dim": 96}
    try:
        config = ViTConfig(**{**shape, **usual, **{name: rng.choice(OPTIONS[name]) for name in names}})
    except UsageError:
        return None
    half = (0.5,) * config.channels
    prepared = Preprocessing(config.image, config.channels, interpolation="bilinear", mean=half, std=half)
    names = [f"class {number}" for number in range(config.classes)]
    return Weights(config, randomized(ViT(config)).state_dict(), prepared, tuple(names), {})


def by_transformers(weights: Weights, folder: Path, images: Tensor) -> Tensor:
    config = json.loads((folder / "config.json").read_text())
    name, own = config["architectures"][0], config["model_type"] == "vitral"
    made = transformers.AutoModelForImageClassification if own else getattr(transformers, name)
    model = made.from_pretrained(folder, trust_remote_code=own).eval()
    found = model(images if images.shape[1] == 3 else images.expand(-1, 3, -1, -1))
    if "logits" in found:
        return found.logits
    first = config["model_type"] in ("vit", "deit") and not weights.config.pre_logits
    return found.last_hidden_state[:, 0] if first else found.pooler_output


def by_torchvision(weights: Weights, folder: Path, images: Tensor) -> Tensor:
    config = weights.config
    model = torchvision.models.VisionTransformer(
        config.image[0],
        config.patch[0],
        config.depth,
        config.heads,
        config.dim,
        config.mlp_dim,
        num_classes=config.classes or 1,
        representation_size=config.dim if config.pre_logits else None,
    )
    if not config.classes:
        del model.heads.head
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()(images)


def by_formulas(weights: Weights, folder: Path, images: Tensor) -> Tensor:
    return torch.from_numpy(ref.vit(np.load(folder / "model.npz"), images.permute(0, 2, 3, 1).numpy()))


PROGRAMS = {"hf": by_transformers, "torchvision": by_torchvision, "jax": by_formulas}


@pytest.mark.slow
@pytest.mark.parametrize("to", PROGRAMS)
def test_what_is_written_is_computed_alike_or_refused(to: str, tmp_path: Path):
    rng, equal, usual = random.Random(to), 0, {"activation": "gelu-tanh"} if to == "jax" else {}
    for number in range(120):
        weights = random_weights(rng, **usual)
        if weights is None:
            continue
        folder = tmp_path / str(number)
        try:
            write(weights, folder, to)
        except WeightsError:
            assert not folder.exists()
            continue
        images = images_of(weights.config.image, weights.config.channels)
        with torch.no_grad():
            ours, theirs = native.build(weights)(images), PROGRAMS[to](weights, folder, images)
        assert ours.shape == theirs.shape, weights.config
        assert float((ours - theirs).abs().max() / theirs.abs().max()) <= 2e-5, weights.config
        equal += 1
    assert equal >= 20


def test_attention_pooling_is_not_written_for_the_authors_code(tmp_path: Path):
    """vit_jax has no such head; what it does not know it does not load."""
    rng = random.Random(0)
    weights = None
    while weights is None or weights.config.pool != "map":
        weights = random_weights(rng, activation="gelu-tanh", pool="map", cls_token=False)
    with pytest.raises(WeightsError, match="pool is map"):
        write(weights, tmp_path / "out", "jax")


def test_positions_that_big_vision_would_cut_are_refused(tmp_path: Path):
    weights = random_weights(_Usual(), activation="gelu-tanh", cls_token=False, pool="mean", image_size=(8, 40))
    assert weights is not None
    with pytest.raises(WeightsError, match="the first of 5 positions"):
        write(weights, tmp_path / "out", "jax")


class _Usual(random.Random):
    """Choose no options."""

    def randint(self, a: int, b: int) -> int:
        return 0
