"""Small networks with random weights, one for every choice of a configuration."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from vitral.model import WRITE_UPS, ViT, ViTConfig
from vitral.model.position import Rope

SHAPE: dict[str, Any] = {
    "image_size": 12,
    "patch_size": 4,
    "classes": 5,
    "dim": 16,
    "depth": 2,
    "heads": 2,
    "mlp_dim": 24,
}

VARIANTS: dict[str, ViTConfig] = {
    name: ViTConfig(**SHAPE | changes)
    for name, changes in {
        "paper": {},
        "oblong": {"image_size": (8, 12), "patch_size": (4, 2)},
        "gray": {"channels": 1},
        "post-norm": {"norm": "post"},
        "gelu": {"activation": "gelu"},
        "gelu-tanh": {"activation": "gelu-tanh"},
        "swiglu": {"activation": "swiglu"},
        "mean": {"pool": "mean"},
        "mean-no-cls": {"pool": "mean", "cls_token": False},
        "mean-pooled-norm": {"pool": "mean", "final_norm": "pooled", "registers": 2},
        "mean-all": {"pool": "mean-all", "final_norm": "pooled"},
        "no-final-norm": {"final_norm": "none"},
        "map": {"pool": "map", "cls_token": False, "position": "sincos"},
        "map-of-patches": {"pool": "map", "registers": 1, "pool_prefix": False},
        "map-with-prefix": {"pool": "map", "registers": 1},
        "registers": {"registers": 3},
        "distilled": {"dist_token": True},
        "distilled-with-registers": {"dist_token": True, "registers": 2},
        "distilled-without-position": {"dist_token": True, "cls_position": False},
        "cls-mean": {"pool": "cls-mean", "registers": 1},
        "cls-without-position": {"cls_position": False},
        "none": {"position": "none"},
        "sincos": {"position": "sincos"},
        "rotary": {"position": "rotary", "registers": 2},
        "axial": {"rope": Rope(), "registers": 1},
        "axial-of-another-grid": {
            "rope": Rope(base=100.0, offset=1.0, reference=(4, 2), columns_first=True, adjacent=False),
            "image_size": (8, 12),
            "patch_size": (4, 2),
            "position": "none",
        },
        "mixed": {"rope": Rope("mixed", columns_first=True)},
        "mixed-alone": {"rope": Rope("mixed"), "position": "none", "cls_token": False, "pool": "mean"},
        "res-post": {"norm": "res-post"},
        "clip": {"norm_pre": True, "patch_bias": False, "activation": "quick-gelu"},
        "inner-norms": {"attn_norm": True, "mlp_norm": True},
        "inner-norms-swiglu": {"attn_norm": True, "mlp_norm": True, "activation": "swiglu"},
        "inner-norm-map": {"mlp_norm": True, "pool": "map", "pool_heads": 4},
        "relu": {"activation": "relu", "mlp_bias": False},
        "silu": {"activation": "silu"},
        "registers-with-position": {"registers": 2, "register_position": True},
        "registers-with-position-alone": {
            "registers": 2,
            "register_position": True,
            "cls_token": False,
            "pool": "mean",
            "final_norm": "pooled",
        },
        "qk-norm": {"qk_norm": True},
        "qk-norm-rotary": {"qk_norm": True, "position": "rotary"},
        "layer-scale": {"layer_scale": 0.1},
        "layer-scale-post-norm": {"layer_scale": 0.1, "norm": "post"},
        "scale-by-width": {"attention_scale": "model"},
        "no-bias": {"qkv_bias": False, "proj_bias": False},
        "pre-logits": {"pre_logits": True},
        "tanh": {"logits_tanh": True, "logit_scale": 3.0},
        "headless": {"classes": 0},
        "cls-normal": {"cls_init": "normal"},
        "pos-zeros": {"pos_init": "zeros"},
        "pos-normal": {"pos_init": "normal"},
        "pos-uniform": {"pos_init": "uniform"},
        "root": {"stem": ()},
        "root-with-patches": {"stem": (), "patch_size": (8, 4), "image_size": (16, 12), "channels": 1},
        "hybrid": {"stem": (1, 1), "patch_size": 8, "image_size": (8, 24)},
        "hybrid-of-two-layers": {"stem": (2,), "stem_numerics": "timm"},
        "conv-stem": {"conv_stem": ((6, 1), (6, 1), (8, 2), (10, 2))},
        "conv-stem-of-maxima": {"conv_stem": ((4, 2), (6, 2), (6, 1)), "conv_pool": True},
        "conv-stem-with-patches": {"conv_stem": ((6, 2),), "image_size": (8, 12), "channels": 1},
        "regularized": {"dropout": 0.1, "attention_dropout": 0.1, "drop_path": 0.2, "patch_dropout": 0.3},
    }.items()
} | {name: dataclasses.replace(config, **SHAPE) for name, config in WRITE_UPS.items()}


KERNELS = {name: config for name, config in VARIANTS.items() if config.kernel_blocks}
"""Those whose blocks the packed and integer engines compute; the others keep the module itself."""


def network(config: ViTConfig, seed: int = 0) -> ViT:
    """A network in fp64 and evaluation mode with random parameters, since the zero head of a new one hides errors."""
    torch.manual_seed(seed)
    model = ViT(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.uniform_(0.5, 1.5)
    return model


def moderate(config: ViTConfig, seed: int = 0) -> ViT:
    """The same with scores and logits of moderate size: at 50, their rounding errors would be large."""
    model = network(config, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model


def random_images(config: ViTConfig, count: int = 2, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, config.channels, *config.image, generator=generator, dtype=torch.float64)
