"""RISE: average random masks, weighted by the prediction (Petsiuk, Das & Saenko, BMVC 2018, arXiv 1806.07421).

The paper keeps each cell of a coarse grid with probability p, multiplies the image by the upsampled mask, and averages
masks weighted by the class's probability, over p (equation 6). Here masks are over patches, and other patches are left
out of the tokens (see `occlusion`) instead of grayed. Every mask keeps the same number of patches, since the prediction
depends on their number, which would add noise. The average is of logits minus their mean over all masks, so that values
have a sign: E[logit | patch kept] − E[logit]. The paper's form differs by a constant, so the ranking is the same.
"""

from __future__ import annotations

import math
from itertools import combinations

import torch
from torch import Tensor, nn

from vitral.errors import UsageError
from vitral.explanation.methods.method import Maps, Method, grid_of
from vitral.explanation.methods.occlusion import logits_of_kept


@torch.no_grad()
def rise(
    model: nn.Module, images: Tensor, targets: Tensor, *, masks: int = 512, keep: float = 0.5, seed: int = 0
) -> Maps:
    """Maps (B, T, rows, columns) in logits, relative to the other patches: their sum is 0 up to sampling noise.

    `keep` is the fraction of patches in a mask. All images get the same masks. If there are at most `masks` different
    masks, all are used, and the map is exact.
    """
    network = getattr(model, "_orig_mod", model)
    grid = grid_of(network, images)
    kept = draw(grid[0] * grid[1], masks, keep, seed).to(images.device)
    logits = logits_of_kept(network, images, kept, targets)
    logits = logits - logits.mean(1, keepdim=True)
    share = kept.float() / kept.sum(0).clamp_min(1)
    return Maps(torch.einsum("bmt,mn->btn", logits, share).unflatten(-1, grid).cpu())


def draw(patches: int, masks: int, keep: float, seed: int) -> Tensor:
    """Draw masks (M, patches), bool, that keep the same number of patches: at least one, not all."""
    if patches < 2 or masks < 2 or not 0 < keep < 1:
        why = f"{masks} masks that keep {keep:g} of {patches} patches"
        raise UsageError(
            "these masks cannot distinguish patches", why=why, hint="more masks, and a share between 0 and 1"
        )
    count = min(max(round(keep * patches), 1), patches - 1)
    if math.comb(patches, count) <= masks:
        chosen = torch.tensor(list(combinations(range(patches), count)))
    else:
        numbers = torch.rand(masks, patches, generator=torch.Generator().manual_seed(seed))
        chosen = numbers.argsort(dim=1)[:, :count]
    return torch.zeros(len(chosen), patches, dtype=torch.bool).scatter(1, chosen, True)


RISE = Method(
    "rise",
    rise,
    "RISE",
    "Petsiuk et al., arXiv 1806.07421; tokens are left out",
    signed=True,
    any_network=True,
    passes=lambda patches: 512,
)
