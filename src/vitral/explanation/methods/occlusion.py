"""Occlusion: drop of the logit when a patch is removed (Zeiler & Fergus, arXiv 1311.2901, section 4).

For a ViT, patches are not grayed, since a gray patch is visible content, too. Patches are embedded with their
positions, then tokens are left out, so that the blocks run on fewer tokens. The result equals a mask over patches, up
to rounding, in less time. In a hybrid or behind a convolutional stem, tokens are removed after the convolutions, so the
other features still contain a little of the removed patches. A ResNet has no tokens to leave out; patches are filled
with 0 after standardization, the mean color of its training data.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitral.errors import UsageError
from vitral.explanation.methods.method import Maps, Method, grid_of, target_logits
from vitral.model import ViT
from vitral.model.position import rotation_at
from vitral.model.watched import pooled_queries

TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 262_144}
"""Tokens per batch, by device. More do not fit the caches of a CPU (docs/log/explanation.md)."""
IMAGES_PER_BATCH = {"cpu": 32, "cuda": 256}


@torch.no_grad()
def occlusion(model: nn.Module, images: Tensor, targets: Tensor, *, window: int = 1) -> Maps:
    """Maps (B, T, rows, columns) in logits: logit of all patches minus logit without this patch.

    With a `window` of k, windows of k × k patches are removed at every position, and the value of a patch is the mean
    over its windows. Each window takes one forward pass, for all targets. `UsageError` if no patch would be left.
    """
    network = getattr(model, "_orig_mod", model)
    grid = grid_of(network, images)
    removed = windows(grid, window).to(images.device)
    full = target_logits(network(images), targets)
    drop = full[:, None] - logits_of_kept(network, images, ~removed, targets)
    share = removed.float() / removed.sum(0)
    return Maps(torch.einsum("bmt,mn->btn", drop, share).unflatten(-1, grid).cpu())


def windows(grid: tuple[int, int], size: int) -> Tensor:
    """Patches (M, rows × columns), bool, that each window of size × size covers, at all M positions inside the grid."""
    if not 1 <= size <= min(grid):
        raise UsageError(f"a window of {size} × {size} patches does not fit", why=f"the grid is {grid[0]} × {grid[1]}")
    first = [torch.arange(n - size + 1)[:, None] for n in grid]
    down, across = ((torch.arange(n) >= at) & (torch.arange(n) < at + size) for n, at in zip(grid, first, strict=True))
    return (down[:, None, :, None] & across[None, :, None, :]).flatten(2).flatten(0, 1)


def logits_of_kept(network: nn.Module, images: Tensor, kept: Tensor, targets: Tensor) -> Tensor:
    """Logits (B, M, T), fp32, of the targets (B, T) with only the patches `kept` (M, rows × columns), bool.

    Every row of `kept` must keep the same number of patches.
    """
    if isinstance(network, ViT):
        return _with_fewer_tokens(network, images, kept, targets)
    return _with_filled_cells(network, images, kept, targets)


def _with_fewer_tokens(network: ViT, images: Tensor, kept: Tensor, targets: Tensor) -> Tensor:
    config, count = network.config, int(kept[0].sum())
    if count == 0:
        raise UsageError("no patch of the image would be left", why=f"the grid has {kept.shape[1]}")
    chosen = kept.nonzero()[:, 1].view(len(kept), count) + config.prefix
    prefix = torch.arange(config.prefix, device=kept.device).expand(len(kept), -1)
    chosen = torch.cat([prefix, chosen], dim=1)
    tokens, grid = network.embed(images)
    rotations = network.rotations(grid, images.device)
    num_queries = pooled_queries(network)
    image, mask = _pairs(len(images), len(kept), images.device)
    batch_size = max(1, TOKENS_PER_BATCH.get(images.device.type, 4096) // chosen.shape[1])
    parts = []
    for one, which in zip(image.split(batch_size), mask.split(batch_size), strict=True):
        own = [rotation and rotation_at(rotation, chosen[which]) for rotation in rotations]
        x = network.run_blocks(tokens[one[:, None], chosen[which]], None, own, num_queries)
        parts.append(target_logits(network.classify(network.pool(x)), targets[one]))
    return torch.cat(parts).unflatten(0, (len(images), len(kept)))


def _with_filled_cells(network: nn.Module, images: Tensor, kept: Tensor, targets: Tensor) -> Tensor:
    pixels = on_pixels(kept.unflatten(-1, grid_of(network, images)), images.shape[-2:])
    image, mask = _pairs(len(images), len(kept), images.device)
    batch_size = IMAGES_PER_BATCH.get(images.device.type, 32)
    parts = [
        target_logits(network(images[one] * pixels[which][:, None]), targets[one])
        for one, which in zip(image.split(batch_size), mask.split(batch_size), strict=True)
    ]
    return torch.cat(parts).unflatten(0, (len(images), len(kept)))


def on_pixels(cells: Tensor, size: tuple[int, int] | torch.Size) -> Tensor:
    """Upsample values of grid cells (…, rows, columns) to pixels (…, H, W)."""
    rows, columns = (torch.arange(n, device=cells.device) * cells.shape[i - 2] // n for i, n in enumerate(size))
    return cells[..., rows[:, None], columns]


def _pairs(images: int, masks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices of all pairs of an image and a mask."""
    both = torch.arange(images * masks, device=device)
    return both // masks, both % masks


OCCLUSION = Method(
    "occlusion",
    occlusion,
    "occlusion",
    "Zeiler & Fergus, arXiv 1311.2901; tokens are left out",
    signed=True,
    any_network=True,
    passes=lambda patches: patches + 1,
)
