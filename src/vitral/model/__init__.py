"""The network: reading order vit.py, position.py, conv_stem.py, resnet.py, kinds.py, variants.py, summary.py."""

from vitral.model.kinds import ModelConfig, Network, network
from vitral.model.resnet import BiT, BiTConfig
from vitral.model.summary import Layer, Summary, summarize
from vitral.model.variants import BITS, CONV_STEMMED, HYBRIDS, SIZES, WRITE_UPS, config, create
from vitral.model.vit import ViT, ViTConfig

__all__ = [
    "BITS",
    "CONV_STEMMED",
    "HYBRIDS",
    "SIZES",
    "WRITE_UPS",
    "BiT",
    "BiTConfig",
    "Layer",
    "ModelConfig",
    "Network",
    "Summary",
    "ViT",
    "ViTConfig",
    "config",
    "create",
    "network",
    "summarize",
]
