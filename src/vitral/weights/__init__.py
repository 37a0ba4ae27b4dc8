"""Weights on disk: `files` writes and reads tensors safely, `native` is vitral's own format."""
