"""Hybrids: timm's logits, the borders of SAME padding, and effects of a stem on the rest of the library.

That their logits equal the formulas is in test_network_contract.py, over the variants with a stem.
"""

from __future__ import annotations

import dataclasses
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import vitral
from running import mostly_slow
from vitral.cli.main import main
from vitral.errors import UsageError
from vitral.model import HYBRIDS, ViT, ViTConfig, config, create, summarize
from vitral.model.resnet import pad_same, stem_stride, stem_width
from vitral.model.variants import STEMS
from vitral.training.optimizer_set import freeze, parameter_groups
from vitral.training.options import Run
from vitral.weights import native

SHAPE = ViTConfig(
    image_size=64, patch_size=8, classes=5, dim=24, depth=2, heads=2, mlp_dim=40, stem=(1, 1), stem_numerics="timm"
)


def random_network(shape: ViTConfig) -> ViT:
    torch.manual_seed(0)
    model = ViT(shape).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.normal_(1.0 if name.endswith("weight") else 0.0, 0.3)
    return model


def random_images(*size: int) -> torch.Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))


def timms(ours: ViT) -> torch.nn.Module:
    """timm's network with the same weights."""
    hybrid = pytest.importorskip("timm.models.vision_transformer_hybrid")
    layers = pytest.importorskip("timm.layers")
    from timm.models.vision_transformer import VisionTransformer

    c = ours.config
    kernel = tuple(side // stem_stride(c.stem) for side in c.patch)
    theirs = VisionTransformer(
        img_size=c.image,
        patch_size=kernel,
        embed_dim=c.dim,
        depth=c.depth,
        num_heads=c.heads,
        mlp_ratio=c.mlp_dim / c.dim,
        num_classes=c.classes,
        embed_layer=partial(layers.HybridEmbed, backbone=hybrid._resnetv2(c.stem)),
    )
    state = ours.state_dict()
    if not c.stem:  # the root alone has no name of its own there
        state = {name.replace("backbone.stem.", "backbone."): value for name, value in state.items()}
    theirs.load_state_dict(state)
    return theirs.eval()


@pytest.mark.parametrize("size", [(64, 64), (96, 32)])
@pytest.mark.parametrize(
    "changes",
    [{}, {"stem": ()}, {"stem": (), "patch_size": 32}, {"stem": (2, 1, 1), "patch_size": 32}],
    ids=["two-stages", "root", "root-with-patches", "three-stages-with-patches"],
)
def test_logits_equal_timms(size, changes):
    ours = random_network(dataclasses.replace(SHAPE, image_size=size, **changes))
    with torch.no_grad():
        wanted, found = timms(ours)(random_images(*size)), ours(random_images(*size))
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_a_whole_stem_equals_timms():
    """R50 of R50+B/16 with its 16 bottlenecks, before a small transformer."""
    shape = config("R50+B/16", image_size=(96, 64), dim=24, depth=1, heads=2, mlp_dim=40, stem_numerics="timm")
    ours = random_network(shape)
    with torch.no_grad():
        wanted, found = timms(ours)(random_images(96, 64)), ours(random_images(96, 64))
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_the_authors_use_other_epsilons():
    """They matter for kernels as small as trained ones: each source of weights needs its own."""
    logits = []
    for numerics in ("authors", "timm"):
        model = random_network(dataclasses.replace(SHAPE, stem_numerics=numerics)).double()
        with torch.no_grad():
            logits.append(model(random_images(64, 64).double()))
    assert (logits[0] - logits[1]).abs().max() > 1e-6 * logits[0].abs().max()


@pytest.mark.parametrize(
    ("side", "kernel", "stride", "before", "after"),
    [(224, 7, 2, 2, 3), (112, 3, 2, 0, 1), (7, 3, 2, 1, 1), (56, 3, 1, 1, 1), (56, 1, 2, 0, 0), (5, 7, 2, 3, 3)],
)
def test_same_padding_is_that_of_xla(side, kernel, stride, before, after):
    x = torch.ones(1, 1, side, side + 2)
    padded = pad_same(x, kernel, stride, value=7.0)
    for axis in (2, 3):
        line = padded.select(5 - axis, before).flatten()
        ones = (line == 1).nonzero().flatten()
        assert (ones[0].item(), len(line) - 1 - ones[-1].item()) == (before, after)
        assert (len(line) - kernel) // stride + 1 == -(-x.shape[axis] // stride)


def test_a_new_bottleneck_is_its_shortcut():
    model = create("R26+S/32", depth=1)
    for name, parameter in model.patch_embed.backbone.named_parameters():
        if name.endswith("norm3.weight"):
            assert not parameter.any()
        elif "conv" in name:
            assert parameter.std().item() == pytest.approx(parameter[0].numel() ** -0.5, rel=0.05)
    block = model.patch_embed.backbone.stages[0].blocks[1]
    x = random_images(8, 8).abs().repeat(1, 86, 1, 1)[:, :256]
    assert torch.equal(block(x), x)


@pytest.mark.parametrize("name", mostly_slow(HYBRIDS, 3))
def test_every_name_has_its_grid(name):
    summary = summarize(name, batch=2)
    rows = {row.name: row for row in summary.layers}
    shape = config(name)
    side = {"R50+B/16": 14}.get(name, 7)
    assert shape.grid == (side, side)
    assert rows["patch_embed"].output_shape == (2, side * side, shape.dim)
    features = 224 // stem_stride(shape.stem)
    assert rows["patch_embed.backbone"].output_shape == (2, stem_width(shape.stem), features, features)
    assert rows["head"].output_shape == (2, 1000)


@pytest.mark.parametrize("name", mostly_slow(HYBRIDS, 9))
def test_every_name_learns_in_a_step(name):
    """The stages of each name, with one bottleneck each, before a narrow transformer."""
    torch.manual_seed(0)
    stem = tuple(1 for _ in config(name).stem)
    model = create(name, image_size=64, classes=3, stem=stem, dim=24, depth=1, heads=2, mlp_dim=24)
    images, labels = random_images(64, 64), torch.tensor([0, 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(model(images), labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[2] < losses[0]


def test_any_size_goes_with_any_stem():
    shape = config("R50+Ti/32", image_size=64)
    assert (shape.stem, shape.patch, shape.dim) == ((3, 4, 6, 3), (32, 32), 192)
    assert config("R50+L/16").grid == (14, 14)


def test_computed_positions_take_any_size():
    model = random_network(dataclasses.replace(SHAPE, position="sincos"))
    with torch.no_grad():
        assert model(random_images(40, 72)).isfinite().all()


def test_layers_learn_slower_towards_the_stem():
    groups = parameter_groups(ViT(SHAPE), Run(layer_decay=0.5))
    factor = {name: group["factor"] for group in groups for name in group["names"]}
    hidden = {name for group in groups if group["hidden"] for name in group["names"]}
    front = {name: value for name, value in factor.items() if name.startswith("patch_embed")}
    assert set(front.values()) == {0.125}
    assert factor["blocks.0.attn.qkv.weight"] == 0.25
    assert factor["head.weight"] == 1
    assert all(name.startswith("blocks.") for name in hidden), "Muon takes matrices, not convolutions"


def test_the_stem_can_be_frozen():
    model = ViT(SHAPE)
    freeze(model, ["patch_embed.backbone"])
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if name.startswith("patch_embed.backbone.")}


@pytest.mark.slow
def test_the_commands_take_it(make_images, tmp_path, capsys):
    photos = str(make_images({"train/cat": 6, "train/dog": 6, "val/cat": 2, "val/dog": 2}))
    options = ["--epochs", "1", "--batch-size", "4", "--device", "cpu", "--layer-decay", "0.9", "--depth", "1"]
    out = str(tmp_path / "run")
    assert main(["train", photos, "--model", "R+mu/16", "--out", out, *options]) == 0
    told = capsys.readouterr().err
    assert "32×32" in told, "the image size fits the tokens"
    assert native.read(tmp_path / "run" / "model.safetensors").config.stem == ()
    for command in (["evaluate", out], ["predict", out, photos], ["summary", out]):
        assert main(command) == 0, capsys.readouterr().err
    assert "backbone" in capsys.readouterr().out


@pytest.mark.slow
def test_a_staged_one_trains_too(make_images, tmp_path, monkeypatch):
    monkeypatch.setitem(STEMS["R26"], 32, ((1, 1, 1, 1), 32))
    photos = str(make_images({"cat": 8, "dog": 8}))
    options = {"epochs": 1, "batch_size": 4, "device": "cpu", "depth": 1, "freeze": ("patch_embed.backbone",)}
    run = vitral.train(photos, model="R26+mu/32", out=tmp_path / "run", quiet=True, **options)
    assert run.predictor.model.config.stem == (1, 1, 1, 1)


REFUSED = {
    "patch": (lambda: dataclasses.replace(SHAPE, patch_size=4), "4×4 does not fit the stem.*stride of 8", "of 8"),
    "oblong": (lambda: dataclasses.replace(SHAPE, patch_size=(8, 12), image_size=(64, 96)), "8×12 does not", "of 16"),
    "image": (lambda: config("R26+S/32", image_size=100), "100×100 is not divisible", "--image-size 96"),
    "empty stage": (lambda: dataclasses.replace(SHAPE, stem=(1, 0)), "at least one layer", ""),
    "kind": (lambda: ViTConfig.from_json({"stem": "R50"}), "stem cannot be 'R50'", ""),
    "kind of a stage": (lambda: ViTConfig.from_json({"stem": [3, "4"]}), "stem cannot be", ""),
    "numerics": (lambda: dataclasses.replace(SHAPE, stem_numerics="jax"), "unknown stem numerics 'jax'", "authors"),
    "stride": (lambda: config("R26+S/16"), re.escape("unknown model 'R26+S/16'"), "R26+S/32"),
    "stem": (lambda: config("R27+S/32"), re.escape("unknown model 'R27+S/32'"), "R26+S/32"),
    "size": (lambda: config("R26+X/32"), re.escape("unknown model 'R26+X/32'"), "R26+S/32"),
}


@pytest.mark.parametrize(("request_", "message", "hint"), REFUSED.values(), ids=REFUSED)
def test_refusal(request_, message, hint):
    with pytest.raises(UsageError) as caught:
        request_()
    text = str(caught.value)
    assert re.search(message, text, re.DOTALL), text
    assert hint in text
    assert len(text.splitlines()) <= 5
