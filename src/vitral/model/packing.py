"""NaViT: images of any size, packed into sequences (arXiv 2307.06304).

    images ─ tokens of each, at its own grid ─ sequences (S, T, D) ─ blocks ─ pool of each ─ head ─ logits (B, K)

A sequence holds the tokens of several images one after another, each with its own class token and registers. Attention
is block-diagonal: a token attends only to tokens of its own image. Logits therefore equal the logits that each image
gets on its own, in any packing. The weights are the weights of an ordinary ViT; learned positions are resized to the
grid of each image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from vitral.errors import UsageError, type_of
from vitral.kernels import random
from vitral.model.edited import edited
from vitral.model.masks import check_images
from vitral.model.position import Grid, Rotation
from vitral.model.vit import ViT


@dataclass(frozen=True)
class Packing:
    """Places of images in sequences of `length` tokens."""

    lengths: tuple[int, ...]
    """Tokens of each image."""
    starts: tuple[int, ...]
    """First token of each image, counted over all sequences."""
    length: int

    @cached_property
    def sequences(self) -> int:
        """Number of sequences."""
        return 1 + max(start // self.length for start in self.starts)

    @cached_property
    def places(self) -> Tensor:
        """Place of each token, image after image: indices into the tokens of all sequences."""
        pairs = zip(self.starts, self.lengths, strict=True)
        return torch.cat([torch.arange(start, start + length) for start, length in pairs])

    @cached_property
    def owners(self) -> Tensor:
        """Number of the image that each token belongs to, (S, T); -1 for padding."""
        owners = torch.full((self.sequences * self.length,), -1)
        owners[self.places] = torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))
        return owners.view(self.sequences, self.length)

    @property
    def mask(self) -> Tensor:
        """Block-diagonal attention mask (S, 1, T, T), True within an image.

        Padding attends to padding: a row without any key would be a softmax over nothing.
        """
        return (self.owners[:, :, None] == self.owners[:, None, :])[:, None]


def pack(lengths: Sequence[int], budget: int | None = None) -> Packing:
    """Pack images with these numbers of tokens into sequences of at most `budget`, by default of the longest image.

    Greedy: the longest image first, each into the first sequence with room. Raises `UsageError` for no image, and for
    one that exceeds the budget.
    """
    if not lengths or min(lengths) < 1:
        raise UsageError("no images to pack", why=f"got lengths {list(lengths)}")
    budget = max(lengths) if budget is None else budget
    if (longest := max(lengths)) > budget:
        why = f"an image has {longest} tokens"
        raise UsageError(f"images do not fit into sequences of {budget} tokens", why=why, hint="smaller images")
    used: list[int] = []
    starts = [0] * len(lengths)
    for image in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        row = next((row for row, taken in enumerate(used) if taken + lengths[image] <= budget), len(used))
        if row == len(used):
            used.append(0)
        starts[image] = row * budget + used[row]
        used[row] += lengths[image]
    return Packing(tuple(lengths), tuple(starts), budget)


def check_packable(network: nn.Module, training: bool = False) -> None:
    """Refuse networks that cannot compute packed images, and in `training` options that mix or drop whole sequences."""
    if not isinstance(network, ViT):
        raise UsageError("packed images need a ViT", why=f"this network is {type_of(network)}")
    if changed := edited("ViT.forward", "ViT.answer", "ViT.embed", "ViT.transform"):
        why = f"{changed}, and packed images are computed without it"
        raise UsageError("this network cannot compute packed images", why=why)
    config = network.config
    options = {"a stem": config.hybrid, "drop path": config.drop_path > 0, "patch dropout": config.patch_dropout > 0}
    if training and (bad := [name for name, on in options.items() if on]):
        why = "the batch norms of a stem, drop path and patch dropout act on whole batches or sequences, not on images"
        raise UsageError(f"packed images cannot train a network with {bad[0]}", why=why, hint="leave it out")


def packed_logits(model: ViT, images: Sequence[Tensor], budget: int | None = None, drop: float = 0.0) -> Tensor:
    """Logits (B, K) of standardized images (C, H, W) of any sizes in whole patches; pooled features with `classes=0`.

    `budget` is the number of tokens of a sequence, class tokens included. `drop` is the fraction of each image's
    patches to drop at random. Raises `UsageError` for an image whose sides are not multiples of the patch, or that has
    more tokens than the budget.
    """
    check_packable(model, model.training)
    tokens, grids = embed_each(model, images)
    prefix, device = model.config.prefix, tokens[0].device
    if not drop:
        kept = [_kept(grid, prefix, 0.0, device) for grid in grids]
    else:
        kept = random.each(grids, lambda grid: _kept(grid, prefix, drop, device))
        tokens = [x[places] for x, places in zip(tokens, kept, strict=True)]
    packing = pack([len(x) for x in tokens], budget)
    x = torch.cat(tokens)
    places = packing.places.to(x.device)
    x = _spread(x, places, packing).view(packing.sequences, packing.length, -1)
    x = model.run_blocks(x, packing.mask.to(x.device), _rotations(model, grids, kept, places, packing))
    return model.classify(_pool(model, x, packing))


def embed_each(model: ViT, images: Sequence[Tensor]) -> tuple[list[Tensor], list[Grid]]:
    """Tokens (prefix + rows × columns, D) and grid of each image; images of one size are embedded together."""
    patch, groups = model.config.patch, dict[tuple[int, ...], list[int]]()
    for number, image in enumerate(images):
        groups.setdefault(tuple(image.shape), []).append(number)
    tokens = [torch.empty(0)] * len(images)
    grids = [(0, 0)] * len(images)
    for shape, numbers in groups.items():
        batch = torch.stack([images[number] for number in numbers])
        check_images(batch, model.config, one_size=False)
        grid = shape[1] // patch[0], shape[2] // patch[1]
        embedded = model.place(model.patch_embed(batch, model.checkpointing), grid)
        for number, x in zip(numbers, embedded.unbind(), strict=True):
            tokens[number], grids[number] = x, grid
    return tokens, grids


def _kept(grid: Grid, prefix: int, drop: float, device: torch.device) -> Tensor:
    """Indices of an image's tokens without a random share of its patches; at least one stays."""
    patches = grid[0] * grid[1]
    if not drop:
        return torch.arange(prefix + patches, device=device)
    count = max(1, round(patches * (1 - drop)))
    drawn = torch.rand(patches, device=device).argsort()[:count].sort().values
    return torch.cat([torch.arange(prefix, device=device), drawn + prefix])


def _spread(x: Tensor, places: Tensor, packing: Packing) -> Tensor:
    """Rows of x (tokens, …), image after image, at their places in all sequences; zeros for padding."""
    return x.new_zeros(packing.sequences * packing.length, *x.shape[1:]).index_copy(0, places, x)


def _rotations(
    model: ViT, grids: Sequence[Grid], kept: Sequence[Tensor], places: Tensor, packing: Packing
) -> list[Rotation | None]:
    """Rotations of the blocks, each (S, 1 or heads, T, d), from the rotations of each image's own grid."""
    device = places.device
    of_grid = {grid: model.rotations(grid, device) for grid in dict.fromkeys(grids)}
    every = [of_grid[grid] for grid in grids]

    def packed(part: int, block: int) -> Tensor:
        own = [rotations[block][part][..., k, :] for rotations, k in zip(every, kept, strict=True)]  # type: ignore[index]
        x = torch.cat(own, dim=-2)
        x = x[None] if x.ndim == 2 else x  # (1 or heads, tokens, d)
        spread = _spread(x.transpose(0, 1), places, packing).unflatten(0, (packing.sequences, packing.length))
        return spread.transpose(1, 2)

    return [first and (packed(0, block), packed(1, block)) for block, first in enumerate(every[0])]


def _pool(model: ViT, x: Tensor, packing: Packing) -> Tensor:
    """Pooled features of each image from sequences (S, T, D), as `ViT.pool` computes them for a padded batch."""
    lengths, starts = torch.tensor(packing.lengths), torch.tensor(packing.starts)
    own = torch.arange(model.config.num_queries or max(packing.lengths))
    counts = own < lengths[:, None]
    index = torch.where(counts, starts[:, None] + own, starts[:, None]).to(x.device)
    whole = model.config.num_queries is not None or bool(counts.all())
    return model.pool(x.flatten(0, 1)[index], None if whole else counts[:, model.config.prefix :].to(x.device))
