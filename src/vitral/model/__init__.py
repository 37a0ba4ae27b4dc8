"""The network: reading order vit.py, position.py, variants.py, summary.py."""

from vitral.model.summary import Layer, Summary, summarize
from vitral.model.variants import SIZES, WRITE_UPS, config, create
from vitral.model.vit import ViT, ViTConfig

__all__ = ["SIZES", "WRITE_UPS", "Layer", "Summary", "ViT", "ViTConfig", "config", "create", "summarize"]
