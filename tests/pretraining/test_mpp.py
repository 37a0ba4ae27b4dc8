"""Masked patch prediction against loops in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from images import noise as random_pixels
from vitral.data.images.preprocessing import Preprocessing
from vitral.model import ViT, ViTConfig
from vitral.pretraining.masking import divide
from vitral.pretraining.mpp import MaskedPatchPrediction, corrupt, mean_colors

CONFIG = ViTConfig(image_size=(8, 12), patch_size=4, classes=0, dim=16, depth=2, heads=2, mlp_dim=32)


@pytest.mark.parametrize("channels", [1, 3])
def test_colors_are_three_bits_of_each_mean(channels):
    images = np.stack([random_pixels(seed, (8, 12), channels).reshape(8, 12, channels) for seed in range(3)])
    images[0, :4, :4] = 255
    images[0, 4:, :4] = 0
    found = mean_colors(torch.from_numpy(images).permute(0, 3, 1, 2), (4, 4))
    for b, image in enumerate(images):
        for number in range(6):
            r, c = 4 * (number // 3), 4 * (number % 3)
            code = 0
            for channel in range(channels):
                code = code * 8 + int(image[r : r + 4, c : c + 4, channel].astype(float).mean() // 32)
            assert found[b, number] == code
    assert found[0, 0] == 8**channels - 1
    assert found[0, 3] == 0


def test_patches_are_corrupted_as_the_noise_says():
    patches, mask_token = torch.randn(2, 6, 5), torch.randn(1, 1, 5)
    places = torch.tensor([[0, 2, 3, 5], [1, 2, 3, 4]])
    kind = torch.tensor([[0.0, 0.9, 0.79, 0.85, 0.5, 0.95], [0.5, 0.81, 0.1, 0.99, 0.89, 0.85]])
    other = torch.tensor([[0.0, 0.1, 0.2, 0.0, 0.4, 0.999], [0.0, 0.5, 0.2, 0.3, 0.9999, 0.5]])
    found = corrupt(patches, places, kind, other, mask_token)
    flat = patches.flatten(0, 1)
    for b in range(2):
        for n in range(6):
            wanted = patches[b, n]
            if n in places[b]:
                rest = [k for k in range(12) if k != 6 * b + n]
                if kind[b, n] < 0.8:
                    wanted = mask_token[0, 0]
                elif kind[b, n] < 0.9:
                    wanted = flat[rest[int(other[b, n] * 11)]]
            assert torch.equal(found[b, n], wanted), (b, n)


def test_shares_of_the_corruptions():
    patches = torch.arange(200 * 50, dtype=torch.float32).view(200, 50, 1)
    drawn = torch.rand(3, 200, 50, generator=torch.Generator().manual_seed(0))
    _, places = divide(drawn[0], 0.5)
    found = corrupt(patches, places, drawn[1], drawn[2], torch.full((1, 1, 1), -1.0))
    chosen = torch.zeros(200, 50, dtype=torch.bool).scatter_(1, places, True)
    same = (found == patches)[..., 0]
    assert same[~chosen].all()
    masked = (found[chosen] == -1).float().mean()
    assert float(masked) == pytest.approx(0.8, abs=0.02)
    assert float(same[chosen].float().mean()) == pytest.approx(0.1, abs=0.02)


@torch.no_grad()
def test_the_loss_is_that_of_corrupted_patches_alone():
    torch.manual_seed(0)
    model = MaskedPatchPrediction(ViT(CONFIG), 0.5).eval()
    torch.nn.init.normal_(model.colors.weight)
    pixels = torch.randint(0, 256, (3, 3, 8, 12), dtype=torch.uint8)
    images, colors, drawn = MaskedPatchPrediction.draw(None, CONFIG)(pixels, Preprocessing((8, 12)))  # type: ignore[arg-type]
    loss, metrics = model(images, colors, drawn)
    total, right = 0.0, 0
    for b in range(3):
        places = np.argsort(drawn[0, b].numpy())[3:]
        embedded = model.encoder.patch_embed(images)
        changed = corrupt(embedded, divide(drawn[0], 0.5)[1], drawn[1], drawn[2], model.mask_token)[b, None]
        x = torch.cat([model.encoder.cls_token, changed], dim=1) + model.encoder.pos_embed
        for block in model.encoder.blocks:
            x = block(x)
        logits = model.colors(model.encoder.norm(x))[0, 1:]
        for place in places:
            total += float(F.cross_entropy(logits[place, None], colors[b, place, None]))
            right += int(logits[place].argmax() == colors[b, place])
    assert float(loss) == pytest.approx(total / 9, rel=1e-5)
    assert float(metrics["color_accuracy"]) == pytest.approx(right / 9)


def test_a_new_head_knows_nothing():
    model = MaskedPatchPrediction(ViT(CONFIG))
    drawn = torch.rand(3, 2, 6)
    loss, _ = model(torch.randn(2, 3, 8, 12), torch.randint(0, 512, (2, 6)), drawn)
    assert float(loss.detach()) == pytest.approx(np.log(512))
