"""Images of short lines for tests: a bar high or low is a letter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitral.data.images.preprocessing import Preprocessing
from vitral.model import DecoderConfig, EncoderDecoder, EncoderDecoderConfig, ViTConfig
from vitral.weights import native

OPTIONS: dict[str, Any] = {
    "task": "text",
    "model": "Pico/4",
    "dim": 16,
    "depth": 1,
    "heads": 2,
    "mlp_dim": 32,
    "decoder_depth": 1,
    "image_size": (8, 24),
    "batch_size": 8,
    "epochs": 3,
    "ema": 0.9,
    "lr": 5e-3,
    "precision": "fp32",
    "device": "cpu",
}
"""Options of a run that takes a fraction of a second an epoch."""


def draw(text: str) -> Image.Image:
    """The image of a text of at most three letters a and b."""
    pixels = np.zeros((8, 24), np.uint8)
    for place, letter in enumerate(text):
        top = 1 if letter == "a" else 5
        pixels[top : top + 2, 8 * place + 1 : 8 * place + 7] = 255
    return Image.fromarray(pixels)


def write_lines(folder: Path, count: int = 32, *, pairs: bool = False) -> Path:
    """Write `count` lines, every fourth for validation, as a table or, with `pairs`, as NAME.png and NAME.txt."""
    rng, rows = np.random.default_rng(0), ["file,text,split"]
    for number in range(count):
        text = "".join(rng.choice(["a", "b"], size=rng.integers(1, 4)))
        split = "train" if number % 4 else "val"
        path = folder / split / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(text).save(path)
        rows.append(f"{split}/{number}.png,{text},{split}")
        if pairs:
            path.with_suffix(".txt").write_text(f"{text}\n")
    if not pairs:
        (folder / "labels.csv").write_text("\n".join(rows) + "\n")
    return folder


def write_reader(path: Path, seed: int = 8) -> Path:
    """Write a network with random weights that reads the letters a, b and c: texts of several lengths."""
    torch.manual_seed(seed)
    encoder = ViTConfig(image_size=(8, 24), patch_size=4, channels=1, classes=0, dim=16, depth=1, heads=2, mlp_dim=32)
    decoder = DecoderConfig(vocabulary=6, length=7, dim=16, depth=2, heads=2, mlp_dim=32, memory_dim=16)
    model = EncoderDecoder(EncoderDecoderConfig(encoder, decoder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
        model.decoder.head.bias[:3] = torch.tensor([-1e4, -1e4, 0.5])  # no padding, no start, some ends
    prepared = Preprocessing(image_size=(8, 24), channels=1, mean=(0.5,), std=(0.2,))
    classes = ("<padding>", "<start>", "<end>", "a", "b", "c")
    native.save(path, native.Weights(model.config, model.state_dict(), prepared, classes, {}, {"task": "text"}))
    return path
