"""Vision Transformers: train, measure, understand and ship them."""

__version__ = "0.1.0"
