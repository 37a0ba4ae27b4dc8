"""Reading order: vit, config, position, conv_stem, resnet, initialization, packing, decoder, foreign, registry,
variants, summary.
"""

from vitral.model.config import ViTConfig
from vitral.model.decoder import Decoder, EncoderDecoder
from vitral.model.decoder_config import DecoderConfig, EncoderDecoderConfig
from vitral.model.foreign import Foreign, ForeignConfig
from vitral.model.registry import ModelConfig, Network, network, with_image_size
from vitral.model.resnet import BiT, BiTConfig
from vitral.model.summary import Layer, Summary, summarize
from vitral.model.variants import BITS, CONV_STEMMED, HYBRIDS, SIZES, WITH_PRESET, WRITE_UPS, config, create
from vitral.model.vit import ViT

__all__ = [
    "BITS",
    "CONV_STEMMED",
    "HYBRIDS",
    "SIZES",
    "WITH_PRESET",
    "WRITE_UPS",
    "BiT",
    "BiTConfig",
    "Decoder",
    "DecoderConfig",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "Foreign",
    "ForeignConfig",
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
    "with_image_size",
]
