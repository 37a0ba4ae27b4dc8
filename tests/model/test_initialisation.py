"""Initialization as in the authors' code (vit_jax `models_vit.py`), tested by statistics."""

from __future__ import annotations

import math

import pytest
import torch

from vitral.model import ViT, ViTConfig, create
from vitral.model.resnet import lecun_normal_


@pytest.fixture(scope="module")
def small() -> ViT:
    torch.manual_seed(0)
    return create("S/16", depth=1, registers=4, layer_scale=1e-4, pre_logits=True, qk_norm=True, head_bias_init=-6.9)


def spread(parameter: torch.Tensor) -> float:
    return parameter.std().item()


def test_patches_are_lecun_normal(small):
    weight = small.patch_embed.proj.weight
    assert spread(weight) == pytest.approx(math.sqrt(1 / 768), rel=0.01)
    assert weight.abs().max() <= 2 * math.sqrt(1 / 768) / 0.8796, "the normal is cut at two deviations"
    assert not small.patch_embed.proj.bias.any()


def test_lecun_keeps_the_variance_of_unit_inputs():
    torch.manual_seed(0)
    weight = lecun_normal_(torch.empty(512, 400))
    assert (torch.randn(300, 400) @ weight.T).var().item() == pytest.approx(1, rel=0.03)


def test_q_k_and_v_each_have_the_bound_of_a_square_matrix(small):
    bound = math.sqrt(6 / (384 + 384))
    for part in small.blocks[0].attn.qkv.weight.split(384):
        assert 0.999 * bound < part.abs().max() <= bound
        assert spread(part) == pytest.approx(bound / math.sqrt(3), rel=0.01)


def test_other_dense_layers_are_xavier_uniform(small):
    block = small.blocks[0]
    for weight in (block.attn.proj.weight, block.mlp.fc1.weight, block.mlp.fc2.weight):
        bound = math.sqrt(6 / sum(weight.shape))
        assert 0.999 * bound < weight.abs().max() <= bound


def test_biases(small):
    block = small.blocks[0]
    assert not block.attn.qkv.bias.any()
    assert not block.attn.proj.bias.any()
    for dense in (block.mlp.fc1, block.mlp.fc2):
        assert spread(dense.bias) == pytest.approx(1e-6, rel=0.15)


def test_head_is_zero_but_for_its_bias(small):
    assert not small.head.weight.any()
    assert torch.equal(small.head.bias, torch.full((1000,), -6.9))
    assert spread(small.pre_logits.weight) == pytest.approx(math.sqrt(1 / 384), rel=0.01)


def test_tokens_and_positions(small):
    assert not small.cls_token.any()
    assert spread(small.pos_embed) == pytest.approx(0.02, rel=0.02)
    assert spread(small.reg_token) == pytest.approx(0.02, rel=0.1)


def test_norms_and_layer_scale(small):
    block = small.blocks[0]
    for norm in (small.norm, block.norm1, block.norm2, block.attn.q_norm, block.attn.k_norm):
        assert (norm.weight == 1).all()
        assert not norm.bias.any()
        assert norm.eps == 1e-6
    assert (block.ls1.gamma == 1e-4).all()
    assert (block.ls2.gamma == 1e-4).all()


def test_attention_pool_follows_the_table():
    torch.manual_seed(0)
    pool = ViT(ViTConfig(dim=64, depth=1, heads=2, mlp_dim=128, pool="map")).attn_pool
    bound = math.sqrt(6 / 128)
    for weight in (pool.q.weight, *pool.kv.weight.split(64), pool.proj.weight):
        assert 0.99 * bound < weight.abs().max() <= bound
    assert pool.latent.any()
    assert (pool.norm.weight == 1).all()
    assert spread(pool.mlp.fc1.bias) == pytest.approx(1e-6, rel=0.3)


@pytest.mark.parametrize(
    ("name", "cls", "positions"),
    [
        ("einops-b16", (0, 1), (0, 1)),
        ("mnist-7562", (0, 1), (0, 1)),
        ("places365-postnorm", (0, 1), (0, 1)),
        ("tensordot-b16", (0, 0), (0.5, math.sqrt(1 / 12))),
        ("timm-small-128", (0, 0), (0, 0)),
    ],
)
def test_tokens_of_the_write_ups(name, cls, positions):
    torch.manual_seed(0)
    model = create(name, depth=1, mlp_dim=64)
    for parameter, (mean, std) in ((model.cls_token, cls), (model.pos_embed, positions)):
        error = 5 * std / math.sqrt(parameter.numel())
        assert parameter.mean().item() == pytest.approx(mean, abs=error)
        assert spread(parameter) == pytest.approx(std, abs=error)


def test_a_new_network_is_undecided():
    """A zero head gives equal logits, so training starts at a loss of log(classes)."""
    model = create("mu/16", classes=10, image_size=32)
    assert not model(torch.randn(2, 3, 32, 32)).any()
