"""Masked autoencoder (arXiv 2111.06377): reconstruct most of an image from a few of its patches.

The encoder computes only the visible patches. A light decoder computes all of them, with one learned token in the
place of each masked patch, and predicts the pixels of the masked ones.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitral.data.images.preprocessing import Preprocessing
from vitral.kernels import random
from vitral.model import ViT, ViTConfig
from vitral.model.dropout import with_prefix
from vitral.model.initialization import init_vit_
from vitral.model.position import POSITIONS
from vitral.model.vit import Block
from vitral.model.watched import is_watched
from vitral.pretraining.masking import divide, images_of, patches_of, rows_at
from vitral.pretraining.method import Draw, Inputs, Method
from vitral.training.objectives.objective import share_of
from vitral.training.options import Run

HEAD_WIDTH = 32
"""Width of an attention head of the decoder, as in the paper (512 / 16)."""
EPSILON = 1e-6
"""Added to the variance of a patch."""


class Decoder(nn.Module):
    """Predict pixels of masked patches from the encoder's tokens of the others."""

    position: Tensor
    """(1, prefix + rows × columns, D): fixed sines and cosines, zero for the prefix."""

    def __init__(self, config: ViTConfig, dim: int, depth: int, heads: int | None = None, mlp_dim: int | None = None):
        super().__init__()
        own = ViTConfig(
            image_size=config.image_size,
            patch_size=config.patch_size,
            channels=config.channels,
            dim=dim,
            depth=depth,
            heads=heads or max(1, dim // HEAD_WIDTH),
            mlp_dim=mlp_dim or 4 * dim,
            norm_eps=config.norm_eps,
        )
        self.prefix = config.prefix
        self.embed = nn.Linear(config.dim, dim)
        self.blocks = nn.ModuleList(Block(own) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=config.norm_eps)
        self.pixels = nn.Linear(dim, config.patch[0] * config.patch[1] * config.channels)
        init_vit_(self, own)
        self.mask_token = nn.Parameter(torch.empty(1, 1, dim).normal_(std=0.02))
        table = POSITIONS["sincos"].table(config.grid, dim)
        assert table is not None
        self.register_buffer("position", torch.cat([torch.zeros(config.prefix, dim), table])[None])

    def forward(self, x: Tensor, visible: Tensor, masked: Tensor, everywhere: bool = False) -> Tensor:
        """Pixels (B, m, p · q · C) of the patches `masked` (B, m), in their order, from tokens (B, prefix + n, D) of
        the prefix and of the patches `visible` (B, n). With `everywhere` those of `visible` follow.

        Attention does not depend on the order of tokens, so that masked ones come first, and the last block computes no
        others, unless it is hooked.
        """
        x = self.embed(x)
        position = self.position.to(x.dtype).expand(len(x), -1, -1)
        first, table = position[:, : self.prefix], position[:, self.prefix :]
        tokens = [
            self.mask_token.to(x.dtype) + rows_at(table, masked),
            x[:, self.prefix :] + rows_at(table, visible),
            x[:, : self.prefix] + first,
        ]
        x = torch.cat(tokens, dim=1)
        wanted = masked.shape[1] + (visible.shape[1] if everywhere else 0)
        for block in self.blocks[:-1]:
            x = block(x)
        x = self.blocks[-1](x, num_queries=None if is_watched(self.blocks[-1]) else wanted)
        return self.pixels(self.norm(x[:, :wanted]))


class MaskedAutoencoder(Method):
    """Encoder, decoder, and the mean squared error of the pixels of masked patches.

    With `normalize`, the pixels of each patch have mean 0 and variance 1, which works better (section 4, table 1d).
    """

    def __init__(self, encoder: ViT, decoder: Decoder, share: float = 0.75, normalize: bool = True):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.share, self.normalize = share, normalize

    @classmethod
    def of(cls, encoder: ViT, run: Run, steps: int) -> MaskedAutoencoder:
        """The method as a run describes it."""
        dim = run.decoder_dim or max(HEAD_WIDTH, encoder.config.dim // 2 // HEAD_WIDTH * HEAD_WIDTH)
        return cls(encoder, Decoder(encoder.config, dim, run.decoder_depth), run.mask)

    @staticmethod
    def draw(run: Run, config: ViTConfig) -> Draw:
        """Standardized images, and uniform noise (B, N) that chooses the patches."""

        def draw(pixels: Tensor, preprocessing: Preprocessing) -> Inputs:
            noise = torch.rand(random.total(len(pixels)), config.grid[0] * config.grid[1], device=pixels.device)
            noise = random.kept(noise)
            return preprocessing.standardize(pixels), noise, None

        return draw

    def forward(self, images: Tensor, noise: Tensor, _: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of standardized images (B, C, H, W), masked by `noise` (B, N)."""
        visible, masked = divide(noise, self.share)
        predicted = self.decoder(self.encode(images, visible), visible, masked)
        wanted = rows_at(self.target(images), masked)
        return share_of((predicted.float() - wanted).square().mean()), {}

    def encode(self, images: Tensor, visible: Tensor) -> Tensor:
        """Tokens (B, prefix + n, D) of the patches `visible` (B, n), after the final norm."""
        tokens, grid = self.encoder.embed(images)
        config = self.encoder.config
        x = self.encoder.transform(tokens, grid, places=with_prefix(visible, config.prefix))
        return self.encoder.norm(x) if config.final_norm == "tokens" else x

    def target(self, images: Tensor) -> Tensor:
        """Pixels to predict, (B, N, p · q · C)."""
        pixels = patches_of(images.float(), self.encoder.config.patch)
        if not self.normalize:
            return pixels
        mean, variance = pixels.mean(-1, keepdim=True), pixels.var(-1, keepdim=True)
        return (pixels - mean) / (variance + EPSILON).sqrt()

    @torch.no_grad()
    def predicted_pixels(self, images: Tensor, noise: Tensor) -> Tensor:
        """Predictions for all patches, visible ones too, in the places of the patches: (B, N, p · q · C)."""
        visible, masked = divide(noise, self.share)
        predicted = self.decoder(self.encode(images, visible), visible, masked, everywhere=True)
        back = torch.cat([masked, visible], dim=1).argsort(dim=1)
        return rows_at(predicted, back)

    @torch.no_grad()
    def reconstruct(self, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The images as the encoder sees them, with gray masked patches, and with these filled in: (B, C, H, W) each.

        Normalized predictions get the mean and variance of the true patch, as in the authors' figures.
        """
        config = self.encoder.config
        predicted, pixels = self.predicted_pixels(images, noise).float(), patches_of(images.float(), config.patch)
        if self.normalize:
            mean, variance = pixels.mean(-1, keepdim=True), pixels.var(-1, keepdim=True)
            predicted = predicted * (variance + EPSILON).sqrt() + mean
        visible, _ = divide(noise, self.share)
        seen = torch.zeros_like(noise, dtype=torch.bool).scatter_(1, visible, True)[..., None]
        masked, filled = torch.where(seen, pixels, 0.0), torch.where(seen, pixels, predicted)
        return images_of(masked, config.patch, config.grid), images_of(filled, config.patch, config.grid)
