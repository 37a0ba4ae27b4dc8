"""Drawings of a method's work on a few images, as rows of uint8 images (H, W, C) with titles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batches
from vitral.device import seeded
from vitral.explanation.capture import capture
from vitral.pretraining.mae import MaskedAutoencoder
from vitral.pretraining.masking import divide, images_of, patches_of
from vitral.pretraining.method import Method
from vitral.pretraining.mpp import BITS, MaskedPatchPrediction
from vitral.workflows.running.running import Running

COUNT = 4
"""Images that are drawn."""

Cells = list[tuple[np.ndarray, str]]


def draw_samples(running: Running, model: Any) -> Cells:
    """Draw a method's work on some held-out images, else training images: three cells for each."""
    job = running.job
    split = job.dataset.splits.get("val") or job.dataset["train"]
    chosen = split.spread(COUNT)
    batches = Batches(chosen, job.run.preprocessing, batch_size=COUNT, device=job.machine.device)
    pixels = next(batches.epoch()).images
    was_training = model.training
    model.eval()
    with torch.no_grad(), seeded(job.run.seed):
        titles, drawn = DRAWINGS[job.run.recipe](model, pixels, job.run.preprocessing)
    model.train(was_training)
    columns = [of.permute(0, 2, 3, 1).cpu().numpy() for of in (pixels, *drawn)]
    return [(image, title) for row in zip(*columns, strict=True) for image, title in zip(row, titles, strict=True)]


Drawn = tuple[tuple[str, str, str], tuple[Tensor, Tensor]]
"""Titles of the image and of two drawings, and these: uint8 (B, C, H, W)."""


def _reconstructions(model: MaskedAutoencoder, pixels: Tensor, preprocessing: Preprocessing) -> Drawn:
    config = model.encoder.config
    noise = torch.rand(len(pixels), config.grid[0] * config.grid[1], device=pixels.device)
    masked, filled = model.reconstruct(preprocessing.standardize(pixels), noise)
    mean, std = (masked.new_tensor(of)[:, None, None] for of in (preprocessing.mean, preprocessing.std))
    masked, filled = ((part * std + mean).mul(255).round().clamp(0, 255).byte() for part in (masked, filled))
    return ("image", "visible", "reconstructed"), (masked, filled)


def _colors(model: MaskedPatchPrediction, pixels: Tensor, preprocessing: Preprocessing) -> Drawn:
    """Mean colors of all patches, and the predicted ones of masked patches among the true ones of others."""
    config = model.encoder.config
    noise = torch.rand(len(pixels), config.grid[0] * config.grid[1], device=pixels.device)
    _, places = divide(noise, model.share)
    logits = model.logits(preprocessing.standardize(pixels), places, torch.zeros_like(noise), torch.zeros_like(noise))
    shifts = BITS * torch.arange(config.channels - 1, -1, -1, device=pixels.device)
    levels = (logits.argmax(-1)[..., None] >> shifts) % 2**BITS  # (B, N, C)
    area, width = config.patch[0] * config.patch[1], 256 // 2**BITS
    predicted = (levels * width + width // 2).float().repeat(1, 1, area)
    true = patches_of(pixels.float(), config.patch).unflatten(-1, (area, -1)).mean(2).repeat(1, 1, area)
    hidden = torch.zeros_like(noise, dtype=torch.bool).scatter_(1, places, True)[..., None]
    drawn = [torch.where(hidden, of, true) for of in (torch.full_like(true, 128.0), predicted)]
    masked, filled = (images_of(of, config.patch, config.grid).round().byte() for of in drawn)
    return ("image", "visible mean colors", "predicted"), (masked, filled)


def _attention(model: Method, pixels: Tensor, preprocessing: Preprocessing) -> Drawn:
    """Attention to the patches in the last block of the kept network: the mean of its heads, and one head. It is that
    of the class token, or where others are pooled the mean of all tokens.
    """
    network = model.kept
    with capture(network, [-1]) as captured:
        network(preprocessing.standardize(pixels))
    (layer,) = captured.layers
    attention = captured.attention(layer)[..., captured.prefix :]  # (B, heads, tokens, patches)
    of = attention[:, :, 0] if network.config.pool == "cls" else attention.mean(2)
    heads = of.unflatten(-1, captured.grid)  # (B, heads, r, c)
    peak = heads.flatten(2).amax(-1).argmax(1)  # the head that attends to the fewest patches
    single = heads[torch.arange(len(heads), device=heads.device), peak]
    size = pixels.shape[2], pixels.shape[3]
    drawn = tuple(_heat(of, size, pixels.shape[1]) for of in (heads.mean(1), single))
    return ("image", "attention, all heads", "most selective head"), drawn  # type: ignore[return-value]


def _heat(values: Tensor, size: tuple[int, int], channels: int) -> Tensor:
    """Draw values (B, rows, columns), each image on its own scale, as uint8 (B, 3 or 1, H, W)."""
    from matplotlib import colormaps  # takes a second to import, for which errors of a command do not wait

    low, high = values.amin((1, 2), keepdim=True), values.amax((1, 2), keepdim=True)
    scaled = torch.nn.functional.interpolate(((values - low) / (high - low).clamp(min=1e-12))[:, None], size=size)
    if channels == 1:
        return scaled.mul(255).round().byte()
    colors = torch.from_numpy(colormaps["inferno"](scaled[:, 0].cpu().numpy())[..., :3])
    return colors.mul(255).round().byte().permute(0, 3, 1, 2)


DRAWINGS: Mapping[str, Callable[[Any, Tensor, Preprocessing], Drawn]] = {
    "mae": _reconstructions,
    "mpp": _colors,
    "dino": _attention,
    "distill": _attention,
}
"""Method → the function that draws its work on uint8 images (B, C, H, W)."""
