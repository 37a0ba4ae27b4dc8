"""Every optimizer: each parameter in one group, decay on matrices only, a state restored by name."""

from __future__ import annotations

import pytest
import torch

from vitral.errors import UsageError
from vitral.model import ViT, ViTConfig
from vitral.training.optimizer_set import OptimizerSet, freeze, parameter_groups
from vitral.training.optimizers import OPTIMIZERS
from vitral.training.optimizers.muon import Muon
from vitral.training.options import Run

CONFIG = ViTConfig(
    image_size=8,
    patch_size=4,
    classes=3,
    dim=8,
    depth=3,
    heads=2,
    mlp_dim=12,
    registers=1,
    layer_scale=0.1,
    qk_norm=True,
    pre_logits=True,
)
MAPPED = ViTConfig(
    image_size=8, patch_size=4, classes=3, dim=8, depth=2, heads=2, mlp_dim=12, pool="map", cls_token=False
)


def network(config: ViTConfig = CONFIG) -> ViT:
    torch.manual_seed(0)
    model = ViT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def step(model: ViT, optimizer: OptimizerSet, seed: int, lr: float = 0.01) -> None:
    generator = torch.Generator().manual_seed(seed)
    model(torch.randn(4, 3, 8, 8, generator=generator)).square().sum().backward()
    optimizer.set_lr(lr)
    optimizer.step()


@pytest.mark.parametrize("config", [CONFIG, MAPPED])
@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_every_parameter_is_in_one_group_and_only_matrices_decay(config, layer_decay):
    model = network(config)
    groups = parameter_groups(model, Run(weight_decay=0.3, layer_decay=layer_decay))
    named = [name for group in groups for name in group["names"]]
    assert sorted(named) == sorted(name for name, _ in model.named_parameters())
    assert [id(p) for g in groups for p in g["params"]] == [id(model.get_parameter(name)) for name in named]
    decay = {name: group["weight_decay"] for group in groups for name in group["names"]}
    for name, value in decay.items():
        assert value == (0.3 if name.endswith("weight") and "norm" not in name else 0.0), name


def test_layers_learn_slower_towards_the_patches():
    groups = parameter_groups(network(), Run(layer_decay=0.5))
    factor = {name: group["factor"] for group in groups for name in group["names"]}
    wanted = {
        "head.weight": 1,
        "norm.weight": 1,
        "pre_logits.weight": 1,
        "blocks.2.mlp.fc1.weight": 0.5,
        "blocks.1.norm1.bias": 0.25,
        "blocks.0.attn.qkv.weight": 0.125,
        "pos_embed": 0.0625,
        "cls_token": 0.0625,
        "reg_token": 0.0625,
        "patch_embed.proj.weight": 0.0625,
    }
    found = {name: next(factor[n] for n in factor if n.startswith(name)) for name in wanted}
    assert found == wanted


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_factor_reaches_the_step(name):
    run = Run(optimizer=name, layer_decay=0.5, weight_decay=0.0)
    optimizer = OptimizerSet(network(), run)
    optimizer.set_lr(0.2)
    rates = {n: g["lr"] for o in optimizer.optimizers for g in o.param_groups for n in g["names"]}
    assert rates["head.weight"] == pytest.approx(0.2)
    assert rates["blocks.2.attn.qkv.weight"] == pytest.approx(0.1)
    assert rates["patch_embed.proj.weight"] == pytest.approx(0.0125)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_moves_every_parameter_and_clears_gradients(name):
    model = network()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = OptimizerSet(model, Run(optimizer=name, weight_decay=0.1))
    step(model, optimizer, seed=1)
    # a bias that is the same for every key cancels in the softmax
    assert [n for n, p in model.named_parameters() if torch.equal(before[n], p) and "k_norm.bias" not in n] == []
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restored_state_reproduces_the_same_bits(name):
    run = Run(optimizer=name, weight_decay=0.1, layer_decay=0.9)
    model = network()
    optimizer = OptimizerSet(model, run)
    for seed in range(3):
        step(model, optimizer, seed)
    saved = {k: v.clone() for k, v in optimizer.state().items()}
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    assert any(key.startswith("blocks.0.attn.qkv.weight:") for key in saved)

    other = network()
    other.load_state_dict(weights)
    again = OptimizerSet(other, run)
    again.load_state(saved)
    without_state = network()
    without_state.load_state_dict(weights)
    new_optimizer = OptimizerSet(without_state, run)
    for seed in range(3, 6):
        for one, its in ((model, optimizer), (other, again), (without_state, new_optimizer)):
            step(one, its, seed)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), without_state.parameters(), strict=True))
    assert again.state().keys() == optimizer.state().keys()


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [
        (["patch_embed"], {"patch_embed.proj.weight", "patch_embed.proj.bias"}),
        (["pos_embed", "head.bias"], {"pos_embed", "head.bias"}),
        (["blocks.[01].norm1.*"], {f"blocks.{i}.norm1.{kind}" for i in (0, 1) for kind in ("weight", "bias")}),
    ],
)
def test_frozen_parameters_stay_as_they_are(patterns, frozen):
    model = network()
    freeze(model, patterns)
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == frozen
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = OptimizerSet(model, Run(weight_decay=0.1))
    step(model, optimizer, seed=1)
    same = {n for n, p in model.named_parameters() if torch.equal(before[n], p)}
    assert same - {f"blocks.{i}.attn.k_norm.bias" for i in range(3)} == frozen
    assert not any(key.startswith(tuple(f"{n}:" for n in frozen)) for key in optimizer.state())


def test_freezing_a_block_does_not_freeze_one_that_begins_alike():
    model = ViT(ViTConfig(image_size=8, patch_size=8, classes=2, dim=4, depth=11, heads=1, mlp_dim=4))
    freeze(model, ["blocks.1"])
    assert {n.split(".")[1] for n, p in model.named_parameters() if not p.requires_grad} == {"1"}


def test_refusals():
    with pytest.raises(UsageError, match="--freeze block matches no parameter") as caught:
        freeze(network(), ["head", "block"])
    assert "blocks.0, blocks.1" in str(caught.value)
    with pytest.raises(UsageError, match="leaves nothing to train"):
        freeze(network(), ["*"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_use_fused_kernels(name):
    """Except for Muon's matrices; devices without fused kernels use torch's default ones."""
    optimizers = OptimizerSet(network(), Run(optimizer=name)).optimizers
    fused = [group["fused"] for one in optimizers if not isinstance(one, Muon) for group in one.param_groups]
    assert fused
    assert all(fused)
    elsewhere = OptimizerSet(network().to("meta"), Run(optimizer=name)).optimizers
    assert not any(group.get("fused") for one in elsewhere for group in one.param_groups)
