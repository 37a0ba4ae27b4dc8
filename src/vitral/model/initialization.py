"""Initialize a ViT as the authors' code does (vit_jax `models_vit.py`, Flax defaults)."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn

from vitral.model.config import ViTConfig
from vitral.model.position import mixed_frequencies_
from vitral.model.resnet import lecun_normal_

Initialize = Callable[[Tensor], object]

TOKENS: dict[str, Initialize] = {
    "zeros": nn.init.zeros_,
    "normal": nn.init.normal_,
    "normal-0.02": partial(nn.init.normal_, std=0.02),
    "uniform": nn.init.uniform_,
}


@torch.no_grad()
def init_vit_(network: nn.Module, config: ViTConfig) -> None:
    """Initialize every parameter by the first pattern that its name matches; a name without a match is a bug."""
    table: list[tuple[str, Initialize]] = [
        ("cls_token", TOKENS[config.cls_init]),
        ("dist_token", TOKENS["normal-0.02"]),
        ("pos_embed", TOKENS[config.pos_init]),
        ("reg_token", TOKENS["normal-0.02"]),
        ("attn_pool.latent", nn.init.xavier_uniform_),
        ("rope_freqs", mixed_frequencies_),
        ("patch_embed.proj.weight", lecun_normal_),
        ("patch_embed.backbone.*conv*.weight", lecun_normal_),
        ("patch_embed.backbone.*.norm3.weight", nn.init.zeros_),  # a new bottleneck is the identity
        ("pre_logits.weight", lecun_normal_),
        ("head*.weight", nn.init.zeros_),
        ("head*.bias", partial(nn.init.constant_, val=config.head_bias_init)),
        ("*.ls[12].gamma", partial(nn.init.constant_, val=config.layer_scale or 1.0)),
        ("*norm*.weight", nn.init.ones_),
        ("*.qkv.weight", xavier_uniform_each_),
        ("*.kv.weight", xavier_uniform_each_),
        ("*.mlp.fc[12].bias", partial(nn.init.normal_, std=1e-6)),
        ("*.weight", nn.init.xavier_uniform_),
        ("*.bias", nn.init.zeros_),
    ]
    for name, parameter in network.named_parameters():
        next(initialize for pattern, initialize in table if fnmatchcase(name, pattern))(parameter)


@torch.no_grad()
def init_decoder_(network: nn.Module) -> None:
    """Initialize a decoder, or a part of one, as `init_vit_` does: vectors and the head small, dense layers by fan."""
    table: list[tuple[str, Initialize]] = [
        ("*_embed", TOKENS["normal-0.02"]),
        ("*token_embed.weight", TOKENS["normal-0.02"]),
        ("*head.weight", TOKENS["normal-0.02"]),
        ("*norm*.weight", nn.init.ones_),
        ("*.qkv.weight", xavier_uniform_each_),
        ("*.kv.weight", _xavier_uniform_halves_),
        ("*weight", nn.init.xavier_uniform_),
        ("*bias", nn.init.zeros_),
    ]
    for name, parameter in network.named_parameters():
        next(initialize for pattern, initialize in table if fnmatchcase(name, pattern))(parameter)


def _xavier_uniform_halves_(p: Tensor) -> None:
    """Draw k and v (D, M) as separate matrices."""
    for part in p.chunk(2):
        nn.init.xavier_uniform_(part)


def xavier_uniform_each_(p: Tensor) -> None:
    """Draw q, k and v as separate (D, D) matrices, as the authors do: the bound follows from the fan of each."""
    for part in p.split(p.shape[1]):
        nn.init.xavier_uniform_(part)
