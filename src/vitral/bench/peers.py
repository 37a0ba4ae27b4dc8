"""Peers: how each of the other libraries builds the network, and with which settings.

All of them build the plain ViT of the paper; none is imported before it is measured.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.data.loader import Batch
from vitral.errors import UsageError, unknown
from vitral.model import ModelConfig, ViTConfig

SETTINGS = {
    "inference": "inference: standardized images to logits; bf16 by casting and by autocast, of which the faster "
    "counts (compiled: cast)",
    "training": "training: standardized images, autocast, fused AdamW",
    "jpeg": "jpeg: torchvision's decoder and v2 transforms on uint8 tensors, DataLoader with persistent workers, "
    "as many as vitral's",
}
"""Settings shared by all peers."""


@dataclass(frozen=True)
class Peer:
    """Another library's ViT."""

    package: str  # what is imported
    install: str  # what pip calls it
    build: Callable[[ViTConfig], nn.Module]  # images (B, C, H, W), standardized, to logits (B, K)
    settings: str
    square: bool = False  # takes square, three-channel images only
    channels_last: bool = False  # its training script offers that layout

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


def network(peer: Peer, config: ViTConfig, device: str) -> nn.Module:
    """Build the network in its authors' recommended memory format for this type of device, still on the CPU."""
    model = peer.build(config)
    return model.to(memory_format=torch.channels_last) if peer.channels_last and device == "cuda" else model


def _sizes(config: ViTConfig) -> dict[str, object]:
    """Arguments of vit-pytorch's networks."""
    return {
        "image_size": config.image,
        "patch_size": config.patch,
        "channels": config.channels,
        "num_classes": config.classes,
        "dim": config.dim,
        "depth": config.depth,
        "heads": config.heads,
        "dim_head": config.dim // config.heads,
        "mlp_dim": config.mlp_dim,
    }


def _timm(config: ViTConfig) -> nn.Module:
    return _module("timm.models.vision_transformer").VisionTransformer(
        img_size=config.image,
        patch_size=config.patch,
        in_chans=config.channels,
        num_classes=config.classes,
        embed_dim=config.dim,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.mlp_dim / config.dim,
    )


class _Logits(nn.Module):
    """Wrapper for transformers' networks, which return an object."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(pixel_values=images).logits


def _transformers(config: ViTConfig) -> nn.Module:
    package = _module("transformers")
    their = package.ViTConfig(
        hidden_size=config.dim,
        num_hidden_layers=config.depth,
        num_attention_heads=config.heads,
        intermediate_size=config.mlp_dim,
        image_size=config.image,
        patch_size=config.patch,
        num_channels=config.channels,
        num_labels=config.classes,
        attn_implementation="sdpa",
    )
    return _Logits(package.ViTForImageClassification(their))


def _torchvision(config: ViTConfig) -> nn.Module:
    return _module("torchvision").models.VisionTransformer(
        image_size=config.image[0],
        patch_size=config.patch[0],
        num_layers=config.depth,
        num_heads=config.heads,
        hidden_dim=config.dim,
        mlp_dim=config.mlp_dim,
        num_classes=config.classes,
    )


def _module(name: str) -> Any:
    return importlib.import_module(name)


PEERS: dict[str, Peer] = {
    "timm": Peer(
        "timm",
        "timm",
        _timm,
        "VisionTransformer, fused attention as it is by default; on a GPU --channels-last",
        channels_last=True,
    ),
    "transformers": Peer("transformers", "transformers", _transformers, "ViTForImageClassification, attention 'sdpa'"),
    "torchvision": Peer(
        "torchvision",
        "torchvision",
        _torchvision,
        "VisionTransformer; nn.MultiheadAttention with its fast path where torch takes it",
        square=True,
    ),
    "vit-pytorch": Peer(
        "vit_pytorch",
        "vit-pytorch",
        lambda config: _module("vit_pytorch").ViT(**_sizes(config)),
        "ViT; attention written out, no bias on queries, keys and values",
    ),
    "vit-pytorch-flash": Peer(
        "vit_pytorch",
        "vit-pytorch",
        lambda config: _module("vit_pytorch.simple_flash_attn_vit").SimpleViT(**_sizes(config), use_flash=True),
        "SimpleViT with use_flash; no such bias and no class token: slightly less work than the others",
    ),
}
"""Name → peer."""

_SAME_COST = ("norm_eps", "cls_init", "pos_init", "head_bias_init", "qkv_bias", "activation")
"""Fields that change no shape and hardly any time."""


def chosen(names: Iterable[str], config: ModelConfig) -> tuple[dict[str, Peer], list[str]]:
    """Select the named peers ("all", "none", or names) that can be measured, with notes on those that cannot.

    Raises `UsageError` for an unknown name.
    """
    requested = tuple(names)
    if bad := [name for name in requested if name not in (*PEERS, "all", "none")]:
        raise unknown("peer", bad[0], [*PEERS, "all", "none"])
    if len(requested) > 1 and {"all", "none"} & set(requested):
        raise UsageError("--peers all and none exclude other names", hint="--peers timm torchvision")
    wanted = {name: peer for name, peer in PEERS.items() if requested == ("all",) or name in requested}
    found = {name: peer for name, peer in wanted.items() if peer.is_installed}
    notes = []
    if missing := dict.fromkeys(peer.install for peer in wanted.values() if not peer.is_installed):
        notes.append(f"not installed, left out: {', '.join(missing)} (pip install {' '.join(missing)})")
    if found and not is_plain(config):
        notes.append(f"left out: {', '.join(found)}, which build the plain ViT only")
        found = {}
    if found and not _is_square(config):
        if odd := [name for name, peer in found.items() if peer.square]:
            notes.append(f"left out: {', '.join(odd)}, which support square images of three channels only")
        found = {name: peer for name, peer in found.items() if not peer.square}
    return found, notes


def _is_square(config: ModelConfig) -> bool:
    sides = (*config.image, *config.patch) if isinstance(config, ViTConfig) else config.image
    return config.channels == 3 and config.image[0] == config.image[1] and sides[-2] == sides[-1]


def is_plain(config: ModelConfig) -> bool:
    """True for the paper's plain ViT of any size, which all peers can build."""
    if not isinstance(config, ViTConfig):
        return False
    sizes = ("image_size", "patch_size", "channels", "classes", "dim", "depth", "heads", "mlp_dim")
    kept = {name: getattr(config, name) for name in (*sizes, *_SAME_COST)}
    return config == ViTConfig(**kept) and config.activation != "swiglu"


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Make a fused AdamW, as torch recommends."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, precision: str, batch: Batch) -> None:
    """Run a peer's training step on a batch of standardized floats."""
    with autocast(batch.images.device.type, precision):
        logits = model(batch.images)
    F.cross_entropy(logits.float(), batch.labels).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@torch.inference_mode()
def logits(model: nn.Module, images: Tensor, precision: str) -> Tensor:
    """Run a peer's inference: standardized images (B, C, H, W) to logits (B, K)."""
    with autocast(images.device.type, precision):
        return model(images).cpu()  # as by vitral: results arrive on the CPU


def autocast(device: str, precision: str) -> contextlib.AbstractContextManager[object]:
    """Return torch's autocast context for `precision`."""
    return torch.autocast(device, dtype=torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
