"""Masked patch prediction, as in appendix B.1.2 of "An Image is Worth 16x16 Words" (arXiv 2010.11929).

Half of the patches are corrupted: 80% of these become one learned token, 10% another patch, and 10% stay as they
are. From the output for each corrupted patch, a linear layer predicts its mean color in 3 bits for each channel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.data.images.preprocessing import Preprocessing
from vitral.distributed.whole_batch import all_rows, own_rows
from vitral.kernels import random
from vitral.model import ViT, ViTConfig
from vitral.pretraining.masking import divide, patches_of, rows_at
from vitral.pretraining.method import Draw, Inputs, Method
from vitral.training.objectives.objective import share_of
from vitral.training.options import Run

BITS = 3
"""Bits of a channel's mean."""
MASKED, REPLACED = 0.8, 0.1
"""Shares of the corrupted patches that become the mask token, and another patch."""


def mean_colors(pixels: Tensor, patch: tuple[int, int]) -> Tensor:
    """Class (B, N) of each patch of uint8 images (B, C, H, W): the mean of each channel in 3 bits, the first channel in
    the highest ones. 512 classes for color images, 8 for gray ones.
    """
    channels = pixels.shape[1]
    means = patches_of(pixels.float(), patch).unflatten(-1, (-1, channels)).mean(-2)
    levels = (means * (2**BITS / 256)).long().clamp(0, 2**BITS - 1)
    weights = 2 ** (BITS * torch.arange(channels - 1, -1, -1, device=pixels.device))
    return (levels * weights).sum(-1)


def corrupt(patches: Tensor, places: Tensor, kind: Tensor, other: Tensor, mask_token: Tensor) -> Tensor:
    """Corrupt the patches (B, N, D) at `places` (B, m).

    `kind` and `other` (B, N) are uniform in 0..1, one per patch. `kind` chooses the corruption, and `other` the patch
    of any image of the batch that replaces this one, also of another rank's.
    """
    B, N, _ = patches.shape
    of_batch, rows = all_rows(patches), own_rows(B)
    total = len(of_batch) * N
    own = torch.arange(rows.start * N, rows.stop * N, device=patches.device).view(B, N)
    drawn = (other * (total - 1)).long().clamp(max=total - 2)
    source = drawn + (drawn >= own)  # every patch but this one
    corrupted = torch.zeros(B, N, dtype=torch.bool, device=patches.device).scatter_(1, places, True)
    masked = corrupted & (kind < MASKED)
    replaced = corrupted & (kind >= MASKED) & (kind < MASKED + REPLACED)
    replacement = of_batch.flatten(0, 1).index_select(0, source.flatten()).view_as(patches)
    patches = torch.where(replaced[..., None], replacement, patches)
    return torch.where(masked[..., None], mask_token.to(patches.dtype), patches)


class MaskedPatchPrediction(Method):
    """Encoder, mask token, and the cross-entropy of the colors of corrupted patches."""

    def __init__(self, encoder: ViT, share: float = 0.5):
        super().__init__()
        config = encoder.config
        self.encoder, self.share = encoder, share
        self.mask_token = nn.Parameter(torch.empty(1, 1, config.dim).normal_(std=0.02))
        self.colors = nn.Linear(config.dim, 2 ** (BITS * config.channels))
        nn.init.zeros_(self.colors.weight)
        nn.init.zeros_(self.colors.bias)

    @classmethod
    def of(cls, encoder: ViT, run: Run, steps: int) -> MaskedPatchPrediction:
        """The method as a run describes it."""
        return cls(encoder, run.mask)

    @staticmethod
    def draw(run: Run, config: ViTConfig) -> Draw:
        """Standardized images, the class of each patch (B, N), and uniform noise (3, B, N)."""

        def draw(pixels: Tensor, preprocessing: Preprocessing) -> Inputs:
            colors = mean_colors(pixels, config.patch)
            noise = torch.rand(3, random.total(len(colors)), colors.shape[1], device=pixels.device)
            return preprocessing.standardize(pixels), colors, random.kept(noise, 1)

        return draw

    def forward(self, images: Tensor, colors: Tensor, noise: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of standardized images (B, C, H, W) with classes of patches `colors` (B, N), corrupted by `noise`
        (3, B, N): it chooses the patches, their corruption and their replacement.
        """
        assert noise is not None
        _, places = divide(noise[0], self.share)
        logits = rows_at(self.logits(images, places, noise[1], noise[2]), places).flatten(0, 1).float()
        wanted = colors.gather(1, places).flatten()
        accuracy = (logits.detach().argmax(1) == wanted).float().mean()
        return share_of(F.cross_entropy(logits, wanted)), {"color_accuracy": share_of(accuracy)}

    def logits(self, images: Tensor, places: Tensor, kind: Tensor, other: Tensor) -> Tensor:
        """Logits of the colors of all patches, (B, N, 512), after those at `places` (B, m) were corrupted."""
        encoder, config = self.encoder, self.encoder.config
        patches = corrupt(encoder.patch_embed(images), places, kind, other, self.mask_token)
        x = encoder.transform(encoder.place(patches, config.grid), config.grid)
        x = encoder.norm(x) if config.final_norm == "tokens" else x
        return self.colors(x[:, config.prefix :])
