"""Can a map be believed? Patches are taken from the picture in the map's order, and the answer is watched.

**SRG**, the symmetric relevance gain (Blücher, Vielhaben & Strodthoff, arXiv 2401.06654): patches are hidden once from
the most relevant to the least and once the other way round, in up to 100 steps, and the logit of the class is followed.
SRG is the mean logit of the second curve minus that of the first: above 0 if the map knows what matters, 0 for a random
order, and exactly the opposite for the opposite map. **Deletion** and **insertion** (RISE, arXiv 1806.07421, section
3.2) follow the class's probability while patches are hidden, or uncovered from a blurred picture, most relevant first;
the fill and the number of steps change their values and even the ranks of methods, so they are part of their names.

Beside every map stand random ones and a centred Gaussian, which knows only that objects are in the middle. What a map
says of the class is asked by maps of two classes, what it says of the network by maps of the same network with weights
drawn anew (Adebayo et al., arXiv 1810.03292), each by the rank correlation of the two.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from vitral.data.kernels import torchvision
from vitral.errors import UsageError, unknown
from vitral.explanation.explain import find_method
from vitral.explanation.methods import Maps, Method
from vitral.explanation.methods.method import on_grid, quiet
from vitral.explanation.methods.occlusion import PICTURES_AT_ONCE, on_pixels

Order = Literal["most", "least"]
Scale = Literal["logit", "probability"]


# What hidden patches are filled with.


def own_mean(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """Each picture's own mean colour."""
    return images.mean((2, 3), keepdim=True).expand_as(images)


def data_mean(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """The mean colour of the data for which pictures are standardised: 0 after it."""
    return torch.zeros_like(images)


def blurred(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """The picture under a Gaussian of half a patch's deviation, which leaves little of a patch but its colour. (RISE
    has 5 of 224 pixels, from which a network with small patches still reads.)
    """
    sides = list(images.shape[2:])
    sigma = max(n / cells for n, cells in zip(sides, grid, strict=True)) / 2
    height, width = (2 * min(round(2 * sigma), (n - 1) // 2) + 1 for n in sides)
    return (
        torchvision()
        .transforms.v2.functional.gaussian_blur(images.float(), [width, height], [sigma, sigma])
        .to(images.dtype)
    )


FILLS: Mapping[str, Callable[[Tensor, tuple[int, int]], Tensor]] = {
    "mean": own_mean,
    "data-mean": data_mean,
    "blur": blurred,
}


# Orders and curves.


def seed_of(image: Tensor) -> int:
    """The same for the same picture: what is drawn for it does not depend on the batch it is in."""
    return zlib.crc32(image.detach().float().cpu().numpy().tobytes())


def ranking(maps: Tensor, images: Tensor) -> Tensor:
    """Patches (B, T, rows × columns) from the most to the least relevant of maps (B, T, rows, columns).

    Equal values come in an order drawn for the picture: what noise of less than half the smallest gap would do, without
    its rounding. The least relevant come first in the reverse of this, ties too.
    """
    values = maps.flatten(2).float().cpu()
    if not values.isfinite().all():
        raise UsageError("a map with values that are not finite has no order")
    draws = [torch.randperm(values.shape[2], generator=torch.Generator().manual_seed(seed_of(one))) for one in images]
    drawn = torch.stack(draws)[:, None].expand_as(values)
    return drawn.gather(-1, values.gather(-1, drawn).argsort(dim=-1, descending=True, stable=True))


def hidden_at(patches: int, steps: int) -> Tensor:
    """How many patches are hidden at each point of a curve: from none to all in `steps` equal steps, or one by one."""
    points = min(steps, patches)
    return (torch.arange(points + 1, dtype=torch.float64) * patches / points).round().long()


@torch.no_grad()
def curves(
    model: nn.Module,
    images: Tensor,
    maps: Tensor,
    targets: Tensor,
    order: Order,
    *,
    steps: int = 100,
    fill: str = "mean",
    of: Scale = "logit",
) -> Tensor:
    """The class's logit (or probability) while patches are hidden, most or least relevant first: (B, T, S + 1), from
    the whole picture to none of it, with S the smaller of `steps` and the number of patches. The network is in
    evaluation mode, here and in all that follows.

    `images` (B, C, H, W) are standardised, `maps` (B, T, rows, columns), `targets` (B, T) classes. `fill` is a name in
    `FILLS`; "mean" is the picture's own mean colour, "data-mean" that of the data.
    """
    ranked = ranking(maps, images)
    ranked = ranked.flip(-1) if order == "least" else ranked
    logits, probabilities = follow(model, images, ranked, targets[..., None], _grid(maps), steps, fill)
    return (logits if of == "logit" else probabilities)[:, :, 0]


@torch.no_grad()
def follow(
    model: nn.Module, images: Tensor, ranked: Tensor, targets: Tensor, grid: tuple[int, int], steps: int, fill: str
) -> tuple[Tensor, Tensor]:
    """Logits and probabilities, each (B, R, T, S + 1) fp32 on the CPU, of classes (B, R, T) while the patches of the
    grid are hidden in the orders `ranked` (B, R, rows × columns).
    """
    if fill not in FILLS:
        raise unknown("fill", fill, FILLS)
    B, R, N = ranked.shape
    device, count = images.device, hidden_at(N, steps)
    hidden = (ranked.argsort(-1)[:, :, None] < count[:, None]).view(-1, *grid)
    filled = FILLS[fill](images, grid)
    picture = torch.arange(B, device=device).repeat_interleave(R * len(count))
    followed = targets.to(device)[:, :, None].expand(-1, -1, len(count), -1).flatten(0, 2)
    parts, at_once = [], PICTURES_AT_ONCE.get(device.type, 32)
    for one in torch.arange(len(hidden)).split(at_once):
        pixels = on_pixels(hidden[one].to(device), images.shape[-2:])[:, None]
        shown = torch.where(pixels, filled[picture[one]], images[picture[one]])
        logits = model(shown).float()
        parts.append(torch.stack([logits.gather(1, followed[one]), logits.softmax(1).gather(1, followed[one])]).cpu())
    logits, probabilities = torch.cat(parts, dim=1).view(2, B, R, len(count), -1).transpose(-1, -2)
    return logits, probabilities


def area(curve: Tensor, patches: int, steps: int) -> Tensor:
    """The mean of curves (…, S + 1) over the share of hidden patches, by trapezia."""
    return torch.trapezoid(curve.double(), hidden_at(patches, steps) / patches).float()


@torch.no_grad()
def srg(
    model: nn.Module, images: Tensor, maps: Tensor, targets: Tensor, *, steps: int = 100, fill: str = "mean"
) -> Tensor:
    """Symmetric relevance gain (B, T) in logits. What is no more than the rounding of the logits is 0."""
    found = gains(model, images, ranking(maps, images), targets[..., None], _grid(maps), steps, fill)
    return found["srg"][..., 0]


def gains(
    model: nn.Module, images: Tensor, ranked: Tensor, targets: Tensor, grid: tuple[int, int], steps: int, fill: str
) -> dict[str, Tensor]:
    """SRG and deletion, (B, R, T) each, and deletion's curve (B, R, T, S + 1), from the same passes."""
    most, deletion = follow(model, images, ranked, targets, grid, steps, fill)
    least, _ = follow(model, images, ranked.flip(-1), targets, grid, steps, fill)
    patches = ranked.shape[-1]
    gain = area(least - most, patches, steps)
    rounding = max(torch.finfo(images.dtype).eps, 1e-6) * torch.maximum(most.abs(), least.abs()).amax(-1)
    steady = gain.where(gain.abs() > rounding, 0.0)
    return {"srg": steady, "deletion": area(deletion, patches, steps), "deletion_curve": deletion}


def deletion(
    model: nn.Module, images: Tensor, maps: Tensor, targets: Tensor, *, steps: int = 100, fill: str = "mean"
) -> Tensor:
    """The class's mean probability (B, T) while the most relevant patches are hidden first: lower is better."""
    found = curves(model, images, maps, targets, "most", steps=steps, fill=fill, of="probability")
    return area(found, maps[0, 0].numel(), steps)


def insertion(
    model: nn.Module, images: Tensor, maps: Tensor, targets: Tensor, *, steps: int = 100, fill: str = "blur"
) -> Tensor:
    """The class's mean probability (B, T) while the most relevant patches are uncovered first: higher is better.

    It is the curve of hiding the least relevant first, read from its end.
    """
    found = curves(model, images, maps, targets, "least", steps=steps, fill=fill, of="probability")
    return area(found, maps[0, 0].numel(), steps)


# Maps that know nothing of the network.


def random_maps(images: Tensor, grid: tuple[int, int], count: int) -> Tensor:
    """(B, count, rows, columns), uniform; others for each picture, the same for the same one."""
    generators = [torch.Generator().manual_seed(seed_of(image) ^ 0x5EED) for image in images]
    return torch.stack([torch.rand(count, *grid, generator=generator) for generator in generators])


def gaussian_map(grid: tuple[int, int]) -> Tensor:
    """(rows, columns): a Gaussian in the middle, whose deviation is a quarter of each side."""
    down, across = ((torch.arange(n) + 0.5) / n * 4 - 2 for n in grid)
    return torch.exp(-(down[:, None] ** 2 + across**2) / 2)


# Where the truth is known, and what a map depends on.


def coverage(mask: np.ndarray | Tensor, grid: tuple[int, int]) -> Tensor:
    """The share (rows, columns) of each patch that a mask (H, W) or (rows, columns) covers."""
    pixels = torch.as_tensor(np.asarray(mask)).float()[None]
    return (on_grid(pixels, grid) * (grid[0] * grid[1] / pixels.numel()))[0]


def inside(maps: Tensor, covered: Tensor) -> Tensor:
    """The share (B, T) of the positive relevance that lies in the mask: `covered` (B, rows, columns). A map that knows
    nothing has the mask's area; one without positive relevance has 0.
    """
    positive = maps.clamp_min(0)
    total = positive.sum((-2, -1))
    return (positive * covered[:, None]).sum((-2, -1)) / total.clamp_min(torch.finfo(total.dtype).tiny)


def hits(maps: Tensor, covered: Tensor) -> Tensor:
    """The pointing game (B, T): 1 where the largest value is in the mask, on a patch that the mask covers at least half
    as much as any other; of several equally large values the share that is. An empty mask is never hit.
    """
    most = covered.amax((-2, -1), keepdim=True)
    aims = ((covered >= most / 2) & (covered > 0))[:, None]
    largest = maps == maps.amax((-2, -1), keepdim=True)
    return (largest & aims).sum((-2, -1)) / largest.sum((-2, -1))


def rank_correlation(first: Tensor, second: Tensor) -> Tensor:
    """Spearman's ρ of maps (…, rows, columns) with their counterparts; equal values share the mean rank.

    Where a map is constant there is none: 1 if both are, else 0.
    """
    one, other = (stats.rankdata(x.flatten(-2).double().cpu().numpy(), axis=-1) for x in (first, second))
    one, other = (torch.from_numpy(x - x.mean(-1, keepdims=True)) for x in (one, other))
    norms = one.square().sum(-1).sqrt(), other.square().sum(-1).sqrt()
    found = (one * other).sum(-1) / (norms[0] * norms[1]).clamp_min(1e-12)
    return found.where((norms[0] > 0) | (norms[1] > 0), 1.0).float()


@torch.no_grad()
def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """The same network with every parameter drawn anew from a normal distribution of its own mean and deviation."""
    network: nn.Module = copy.deepcopy(getattr(model, "_orig_mod", model))
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        spread = parameter.float().std(correction=0).cpu()
        drawn = torch.randn(parameter.shape, generator=generator) * spread + parameter.float().mean().cpu()
        parameter.copy_(drawn)
    return network


# One map.

RANDOM_MAPS = 19
"""How many random maps stand beside one that is to be believed."""
ALLOWED = 3
"""How many of them may be as far from 0."""


def better_than_random(gain: Tensor, random: Tensor) -> Tensor:
    """Whether gains (B, T) beat those of random maps (B, R, T) on the same pictures, as one in ten random maps would.

    A random map and its opposite have opposite gains, so that 19 maps stand for 38. A gain is believed if it is above 0
    and no more than three of the 19 are as far from 0: another random map is equally likely to have any of the 20
    places, and either sign, so that its chance is 4/20 · 1/2, however gains are distributed.

    Mean and deviation would not do: where a single patch decides, gains of random maps are spread evenly over all that
    is possible, and two deviations are more than the best of maps can have. Nor would one in twenty: by chance two of
    19 orders in 64 begin or end with that patch in 12 % of the pictures, and in more with larger steps.
    """
    as_far = (random.abs() >= gain[:, None]).sum(1)
    return (gain > 0) & (as_far <= ALLOWED)


def believe(
    model: nn.Module,
    images: Tensor,
    targets: Tensor,
    method: str | Method,
    *,
    maps: Maps | None = None,
    steps: int = 25,
    fill: str = "mean",
    **options: Any,
) -> list[dict[str, Any]]:
    """The checks of each map on its own picture, as plain data: for each picture and each target, in that order.

    `images` (B, C, H, W) are standardised, `targets` (B, T) classes, `maps` those of the method where they are there
    already, `options` the method's own. `srg` beside `random_srg` with its deviation and `gaussian_srg`, in logits;
    `believable`: `better_than_random`; `deletion` and `insertion` with their curves of probabilities, from the first
    step to the last; `target_sensitivity`: 1 − rank correlation with the map of the most probable other class, 0 where
    the class changes nothing, None where there is no other; `randomised`: rank correlation with the map of the network
    with random weights; `completeness`: the method's error, None where it promises nothing. It takes
    (2 · (20 + T) + T) · (steps + 1) forward passes for each picture, and two more maps.
    """
    chosen = method if isinstance(method, Method) else find_method(method)
    with quiet(model):
        maps = maps or chosen.run(model, images, targets, **options)
        grid = _grid(maps.values)
        ranked = ranking(maps.values, images)
        found = gains(model, images, ranked, targets[..., None], grid, steps, fill)
        _, covered = follow(model, images, ranked.flip(-1), targets[..., None], grid, steps, "blur")
        gaussians = gaussian_map(grid).expand(len(images), 1, -1, -1)
        blind = torch.cat([random_maps(images, grid, RANDOM_MAPS), gaussians], dim=1)
        every = targets[:, None].expand(-1, blind.shape[1], -1)
        without = gains(model, images, ranking(blind, images), every, grid, steps, fill)["srg"]
        random, gaussian = without[:, :-1], without[:, -1]
        sensitivity = _target_sensitivity(model, images, targets, chosen, maps.values, options)
        other = chosen.run(randomised(model), images, targets, **options).values
    gain, alike = found["srg"][..., 0], rank_correlation(maps.values, other)
    deleted, covered = found["deletion_curve"][:, :, 0], covered[:, :, 0]
    patches, inserted = ranked.shape[-1], covered.flip(-1)
    means = {"deletion": area(deleted, patches, steps), "insertion": area(covered, patches, steps)}
    believed, spread, mean = better_than_random(gain, random), random.std(1), random.mean(1)
    return [
        {
            "srg": float(gain[b, t]),
            "random_srg": float(mean[b, t]),
            "random_srg_std": float(spread[b, t]),
            "gaussian_srg": float(gaussian[b, t]),
            "believable": bool(believed[b, t]),
            **{name: float(value[b, t]) for name, value in means.items()},
            "deletion_curve": deleted[b, t].tolist(),
            "insertion_curve": inserted[b, t].tolist(),
            "target_sensitivity": None if sensitivity is None else float(sensitivity[b, t]),
            "randomised": float(alike[b, t]),
            "completeness": None if maps.completeness is None else float(maps.completeness[b, t]),
            "protocol": protocol("SRG", fill, patches, steps),
        }
        for b in range(len(images))
        for t in range(targets.shape[1])
    ]


def protocol(what: str, fill: str, patches: int, steps: int) -> str:
    """A measure by its full name: "deletion (mean, 49 steps)"."""
    return f"{what} ({fill}, {min(steps, patches)} steps)"


def _target_sensitivity(
    model: nn.Module, images: Tensor, targets: Tensor, method: Method, values: Tensor, options: Mapping[str, Any]
) -> Tensor | None:
    with torch.no_grad():
        logits = model(images).float()
    if logits.shape[1] < 2:
        return None
    first, second = logits.topk(2, dim=1).indices.split(1, dim=1)
    other = torch.where(targets == first, second, first)
    return 1 - rank_correlation(values, method.run(model, images, other, **options).values)


def _grid(maps: Tensor) -> tuple[int, int]:
    return maps.shape[-2], maps.shape[-1]
