"""SmoothGrad: mean gradient over noisy copies of the image, for any network (Smilkov et al., arXiv 1706.03825)."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from vitral.errors import UsageError
from vitral.explanation.methods.gradients import gradients_of, patch_sums
from vitral.explanation.methods.method import Maps, Method


@torch.enable_grad()
def smoothgrad(
    model: nn.Module,
    images: Tensor,
    targets: Tensor,
    *,
    samples: int = 16,
    noise: float = 0.15,
    times_input: bool = False,
) -> Maps:
    """Maps (B, T, rows, columns): mean gradient over `samples` copies with normal noise.

    The deviation of the noise is `noise` times the image's range (maximum minus minimum). As in the paper, maps show
    the magnitude: absolute values, summed over the channels and pixels of each patch. With `times_input`, they are the
    mean gradient times the image, signed. The noise is seeded by the image, so maps do not depend on batch and device.
    """
    if samples < 1:
        raise UsageError(f"{samples} samples are too few", why="SmoothGrad needs at least one")
    generators = [_generator(image) for image in images]
    spread = noise * (images.flatten(1).amax(1) - images.flatten(1).amin(1)).float()[:, None, None, None]
    total: Tensor | float = 0.0
    for _ in range(samples):
        drawn = torch.stack([torch.randn(images.shape[1:], generator=generator) for generator in generators])
        x = (images.detach() + (spread * drawn.to(images.device)).to(images.dtype)).requires_grad_()
        gradients = [gradient for (gradient,) in gradients_of(model(x), targets, [x])]
        total = total + torch.stack(gradients, dim=1).float() / samples
    assert isinstance(total, Tensor)
    values = total * images.detach().float()[:, None] if times_input else total.abs()
    return Maps(patch_sums(values, model, images))


def _generator(image: Tensor) -> torch.Generator:
    """Generator seeded by the image's content."""
    content = image.detach().float().cpu().contiguous().numpy().tobytes()
    seed = int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "little")
    return torch.Generator().manual_seed(seed)


SMOOTHGRAD = Method(
    "smoothgrad",
    smoothgrad,
    "SmoothGrad",
    "Smilkov et al., arXiv 1706.03825",
    any_network=True,
    passes=lambda patches: 48,
)
