"""Satellite images with 8 channels of 16 bits: a network of vitral in a plain PyTorch loop, with all bits of all bands.

    python examples/satellite.py fields fields.safetensors

`fields/` has a folder for each class, of arrays (8, height, width) uint16 in `.npy` files. vitral's commands read
images with one or three channels of 8 bits, and refuse others. Its networks take any number of channels in floats:
weights, heat maps and the layer table are the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import vitral

SCALE = 65535.0
"""Bands are stored as values from 0 to this; `Preprocessing` has mean and deviation of values from 0 to 1."""


def load(folder: str) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Read all images (N, C, H, W) from 0 to 1, their labels (N,), and the classes."""
    paths = sorted(Path(folder).glob("*/*.npy"))
    classes = tuple(sorted({path.parent.name for path in paths}))
    images = torch.from_numpy(np.stack([np.load(path) for path in paths]).astype(np.float32)) / SCALE
    return images, torch.tensor([classes.index(path.parent.name) for path in paths]), classes


def main(folder: str, out: str, size: str = "mu/4", epochs: int = 20) -> float:
    """Train on four fifths of the images, write the weights to `out`, and return the accuracy on the others."""
    torch.manual_seed(0)
    images, labels, classes = load(folder)
    order = torch.randperm(len(images))
    held_out, train = order[: len(order) // 5], order[len(order) // 5 :]
    std, mean = torch.std_mean(images[train], (0, 2, 3))  # a band each
    images = (images - mean[:, None, None]) / std[:, None, None]
    channels, height, width = images.shape[1:]

    model = vitral.create(size, image_size=(height, width), channels=channels, classes=len(classes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    for epoch in range(epochs):
        model.train()
        for batch in train[torch.randperm(len(train))].split(32):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.inference_mode():
            accuracy = float((model(images[held_out]).argmax(1) == labels[held_out]).float().mean())
        print(f"epoch {epoch + 1}: loss {loss:.3f}, held-out accuracy {accuracy:.1%}")

    bands = {"mean": tuple(mean.tolist()), "std": tuple(std.tolist())}
    prepared = vitral.Preprocessing((height, width), channels=channels, **bands)
    vitral.save(model, out, classes=classes, preprocessing=prepared)
    found = vitral.explain(model, images[held_out[:1]])[0]
    row, column = np.unravel_index(found.values.argmax(), found.values.shape)
    print(f"{classes[found.target]}: most evidence in row {row}, column {column} of the patches")
    return accuracy


if __name__ == "__main__":
    main(*sys.argv[1:])
