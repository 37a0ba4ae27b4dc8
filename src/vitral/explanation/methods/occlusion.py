"""Occlusion: what the answer loses when a patch is not there (Zeiler & Fergus, arXiv 1311.2901, section 4).

A ViT need not be shown a grey patch, which is itself something to see: patches are embedded with their positions, and
then those tokens are left out, so that the blocks run on fewer tokens. That is what the network computes under a mask
over the patches, to the last rounding, but a mask saves no time. In a hybrid or behind a convolutional stem the tokens
go after the convolutions, whose features have seen their neighbours: what is left still knows a little of what is gone.
A ResNet has no tokens to leave out; its pictures are filled with 0 after standardisation, the mean colour of the data
that it was trained on.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitral.errors import UsageError
from vitral.explanation.methods.method import Maps, Method, grid_of, target_logits
from vitral.model import ViT

TOKENS_AT_ONCE = {"cpu": 4096, "cuda": 262_144}
"""How many tokens run through the blocks together. More do not fit the caches of a processor (docs/log.md)."""
PICTURES_AT_ONCE = {"cpu": 32, "cuda": 256}


@torch.no_grad()
def occlusion(model: nn.Module, images: Tensor, targets: Tensor, *, window: int = 1) -> Maps:
    """Maps (B, T, rows, columns) in logits: logit of all patches minus logit without this one.

    With a `window` of k, k × k neighbours go together, at every place on the grid, and a patch has the mean over the
    windows that it is in. One forward pass for each window, for all targets. `UsageError` where no patch would be left.
    """
    network = getattr(model, "_orig_mod", model)
    grid = grid_of(network, images)
    gone = windows(grid, window).to(images.device)
    whole = target_logits(network(images), targets)
    lost = whole[:, None] - logits_of_kept(network, images, ~gone, targets)
    share = gone.float() / gone.sum(0)
    return Maps(torch.einsum("bmt,mn->btn", lost, share).unflatten(-1, grid).cpu())


def windows(grid: tuple[int, int], size: int) -> Tensor:
    """Which patches (M, rows × columns) each window of size × size covers, at all M places that are wholly inside."""
    if not 1 <= size <= min(grid):
        raise UsageError(f"a window of {size} × {size} patches does not fit", why=f"the grid is {grid[0]} × {grid[1]}")
    first = [torch.arange(n - size + 1)[:, None] for n in grid]
    down, across = ((torch.arange(n) >= at) & (torch.arange(n) < at + size) for n, at in zip(grid, first, strict=True))
    return (down[:, None, :, None] & across[None, :, None, :]).flatten(2).flatten(0, 1)


def logits_of_kept(network: nn.Module, images: Tensor, kept: Tensor, targets: Tensor) -> Tensor:
    """Logits (B, M, T) of the targets (B, T) with only the patches `kept` (M, rows × columns), bool; every row of it
    keeps as many. fp32.
    """
    if isinstance(network, ViT):
        return _with_fewer_tokens(network, images, kept, targets)
    return _with_filled_cells(network, images, kept, targets)


def _with_fewer_tokens(network: ViT, images: Tensor, kept: Tensor, targets: Tensor) -> Tensor:
    config, count = network.config, int(kept[0].sum())
    if count == 0:
        raise UsageError("no patch of the picture would be left", why=f"the grid has {kept.shape[1]}")
    chosen = kept.nonzero()[:, 1].view(len(kept), count) + config.prefix
    prefix = torch.arange(config.prefix, device=kept.device).expand(len(kept), -1)
    chosen = torch.cat([prefix, chosen], dim=1)
    tokens, grid = network.embed(images)
    rotation = network.position.rotation(grid, config.dim // config.heads, config.prefix)
    if rotation is not None:
        rotation = rotation[0].to(images.device), rotation[1].to(images.device)
    picture, mask = _pairs(len(images), len(kept), images.device)
    at_once = max(1, TOKENS_AT_ONCE.get(images.device.type, 4096) // chosen.shape[1])
    parts = []
    for one, which in zip(picture.split(at_once), mask.split(at_once), strict=True):
        logits = _blocks(network, tokens[one[:, None], chosen[which]], rotation, chosen[which])
        parts.append(target_logits(logits, targets[one]))
    return torch.cat(parts).unflatten(0, (len(images), len(kept)))


def _blocks(network: ViT, x: Tensor, rotation: tuple[Tensor, Tensor] | None, places: Tensor) -> Tensor:
    """Logits (b, K) of tokens (b, n, D) that stood at `places` (b, n)."""
    read = network.config.read if network.lean else None
    if rotation is not None:
        rotation = rotation[0][places][:, None], rotation[1][places][:, None]  # each picture's own, (b, 1, n, d)
    last = len(network.blocks) - 1
    for number, block in enumerate(network.blocks):
        x = block(x, None, rotation, read if number == last else None)
    return network.classify(network.pool(x))


def _with_filled_cells(network: nn.Module, images: Tensor, kept: Tensor, targets: Tensor) -> Tensor:
    pixels = on_pixels(kept.unflatten(-1, grid_of(network, images)), images.shape[-2:])
    picture, mask = _pairs(len(images), len(kept), images.device)
    at_once = PICTURES_AT_ONCE.get(images.device.type, 32)
    parts = [
        target_logits(network(images[one] * pixels[which][:, None]), targets[one])
        for one, which in zip(picture.split(at_once), mask.split(at_once), strict=True)
    ]
    return torch.cat(parts).unflatten(0, (len(images), len(kept)))


def on_pixels(cells: Tensor, size: tuple[int, int] | torch.Size) -> Tensor:
    """Values of the cells of a grid (…, rows, columns) at each pixel (…, H, W)."""
    rows, columns = (torch.arange(n, device=cells.device) * cells.shape[i - 2] // n for i, n in enumerate(size))
    return cells[..., rows[:, None], columns]


def _pairs(pictures: int, masks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Every picture with every mask, as two lists of numbers."""
    both = torch.arange(pictures * masks, device=device)
    return both // masks, both % masks


OCCLUSION = Method(
    "occlusion", occlusion, "occlusion", "Zeiler & Fergus, arXiv 1311.2901; tokens are left out", signed=True,
    any_network=True, passes=lambda patches: patches + 1,
)  # fmt: skip
