"""Faithfulness of attribution maps: hide patches in the order of the map, and measure the prediction.

**SRG**, the symmetric relevance gain (Blücher, Vielhaben & Strodthoff, arXiv 2401.06654): hide patches from the most to
the least relevant and in the reverse order, in up to 100 steps, and record the logit of the class. SRG is the mean
logit of the second curve minus the mean logit of the first. It is above 0 for an informative map, 0 for a random order,
and negated for the negated map. **Deletion** and **insertion** (RISE, arXiv 1806.07421, section 3.2) record the class's
probability while patches are hidden, or uncovered from a blurred image, most relevant first. The fill and the number of
steps change their values and even the ranking of methods, so they are part of the name.

Baselines are random maps and a centered Gaussian, which knows only that objects are in the middle. Dependence on the
class is measured by maps of two classes. Dependence on the network is measured by maps of the same network with random
weights (Adebayo et al., arXiv 1810.03292), each by the rank correlation of the two.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from vitral.data.images.lazy_torchvision import torchvision
from vitral.errors import UsageError, unknown
from vitral.explanation.methods import Maps, Method
from vitral.explanation.methods.method import on_grid, quiet
from vitral.explanation.methods.occlusion import IMAGES_PER_BATCH, on_pixels
from vitral.explanation.methods.select import find_method

Order = Literal["most", "least"]
Scale = Literal["logit", "probability"]


# Fills of hidden patches.


def own_mean(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """Each image's own mean color."""
    return images.mean((2, 3), keepdim=True).expand_as(images)


def data_mean(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """Mean color of the data: 0 after standardization."""
    return torch.zeros_like(images)


def blurred(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """The image blurred by a Gaussian with a deviation of half a patch, which leaves little but the color of a patch.

    (RISE uses 5 of 224 pixels, which a network with small patches can still read.)
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
    """Seed from the content of an image, so that random draws do not depend on its batch."""
    return zlib.crc32(image.detach().float().cpu().numpy().tobytes())


def ranking(maps: Tensor, images: Tensor) -> Tensor:
    """Patch indices (B, T, rows × columns) of maps (B, T, rows, columns), most relevant first.

    Ties are broken by a random order, seeded by the image: like noise below half the smallest gap, without its
    rounding. Reversing the ranking reverses the ties, too.
    """
    values = maps.flatten(2).float().cpu()
    if not values.isfinite().all():
        raise UsageError("a map with values that are not finite has no order")
    draws = [torch.randperm(values.shape[2], generator=torch.Generator().manual_seed(seed_of(one))) for one in images]
    drawn = torch.stack(draws)[:, None].expand_as(values)
    return drawn.gather(-1, values.gather(-1, drawn).argsort(dim=-1, descending=True, stable=True))


def hidden_at(patches: int, steps: int) -> Tensor:
    """Number of hidden patches at each point of a curve: none to all in `steps` equal steps, at least one each."""
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
    """The class's logit or probability while patches are hidden, most or least relevant first: (B, T, S + 1).

    Curves go from the whole image to none of it; S is the smaller of `steps` and the number of patches. `images`
    (B, C, H, W) are standardized, `maps` (B, T, rows, columns), `targets` (B, T) classes. `fill` is a name in `FILLS`:
    "mean" is the mean color of the image, "data-mean" that of the data. Here and below, the network must be in
    evaluation mode.
    """
    ranked = ranking(maps, images)
    ranked = ranked.flip(-1) if order == "least" else ranked
    logits, probabilities = perturb(model, images, ranked, targets[..., None], _grid(maps), steps, fill)
    return (logits if of == "logit" else probabilities)[:, :, 0]


@torch.no_grad()
def perturb(
    model: nn.Module, images: Tensor, ranked: Tensor, targets: Tensor, grid: tuple[int, int], steps: int, fill: str
) -> tuple[Tensor, Tensor]:
    """Hide patches in the orders `ranked` (B, R, rows × columns) and record the classes `targets` (B, R, T).

    Returns logits and probabilities, each (B, R, T, S + 1), fp32 on the CPU.
    """
    if fill not in FILLS:
        raise unknown("fill", fill, FILLS)
    B, R, N = ranked.shape
    device, count = images.device, hidden_at(N, steps)
    hidden = (ranked.argsort(-1)[:, :, None] < count[:, None]).view(-1, *grid)
    filled = FILLS[fill](images, grid)
    image = torch.arange(B, device=device).repeat_interleave(R * len(count))
    classes = targets.to(device)[:, :, None].expand(-1, -1, len(count), -1).flatten(0, 2)
    parts, batch_size = [], IMAGES_PER_BATCH.get(device.type, 32)
    for one in torch.arange(len(hidden)).split(batch_size):
        pixels = on_pixels(hidden[one].to(device), images.shape[-2:])[:, None]
        perturbed = torch.where(pixels, filled[image[one]], images[image[one]])
        logits = model(perturbed).float()
        parts.append(torch.stack([logits.gather(1, classes[one]), logits.softmax(1).gather(1, classes[one])]).cpu())
    logits, probabilities = torch.cat(parts, dim=1).view(2, B, R, len(count), -1).transpose(-1, -2)
    return logits, probabilities


def area(curve: Tensor, patches: int, steps: int) -> Tensor:
    """Mean of curves (…, S + 1) over the fraction of hidden patches, by the trapezoidal rule."""
    return torch.trapezoid(curve.double(), hidden_at(patches, steps) / patches).float()


@torch.no_grad()
def srg(
    model: nn.Module, images: Tensor, maps: Tensor, targets: Tensor, *, steps: int = 100, fill: str = "mean"
) -> Tensor:
    """Symmetric relevance gain (B, T) in logits; 0 if below the rounding error of the logits."""
    scores = gains(model, images, ranking(maps, images), targets[..., None], _grid(maps), steps, fill)
    return scores["srg"][..., 0]


def gains(
    model: nn.Module, images: Tensor, ranked: Tensor, targets: Tensor, grid: tuple[int, int], steps: int, fill: str
) -> dict[str, Tensor]:
    """SRG and deletion, (B, R, T) each, and deletion's curve (B, R, T, S + 1), from the same passes."""
    most, deletion = perturb(model, images, ranked, targets, grid, steps, fill)
    least, _ = perturb(model, images, ranked.flip(-1), targets, grid, steps, fill)
    patches = ranked.shape[-1]
    gain = area(least - most, patches, steps)
    rounding = max(torch.finfo(images.dtype).eps, 1e-6) * torch.maximum(most.abs(), least.abs()).amax(-1)
    significant = gain.where(gain.abs() > rounding, 0.0)
    return {"srg": significant, "deletion": area(deletion, patches, steps), "deletion_curve": deletion}


def deletion(
    model: nn.Module, images: Tensor, maps: Tensor, targets: Tensor, *, steps: int = 100, fill: str = "mean"
) -> Tensor:
    """The class's mean probability (B, T) while the most relevant patches are hidden first: lower is better."""
    curve = curves(model, images, maps, targets, "most", steps=steps, fill=fill, of="probability")
    return area(curve, maps[0, 0].numel(), steps)


def insertion(
    model: nn.Module, images: Tensor, maps: Tensor, targets: Tensor, *, steps: int = 100, fill: str = "blur"
) -> Tensor:
    """The class's mean probability (B, T) while the most relevant patches are uncovered first: higher is better.

    This is the curve of hiding the least relevant first, in reverse.
    """
    curve = curves(model, images, maps, targets, "least", steps=steps, fill=fill, of="probability")
    return area(curve, maps[0, 0].numel(), steps)


# Baseline maps, independent of the network.


def random_maps(images: Tensor, grid: tuple[int, int], count: int) -> Tensor:
    """Uniform random maps (B, count, rows, columns), seeded by the image."""
    generators = [torch.Generator().manual_seed(seed_of(image) ^ 0x5EED) for image in images]
    return torch.stack([torch.rand(count, *grid, generator=generator) for generator in generators])


def gaussian_map(grid: tuple[int, int]) -> Tensor:
    """Centered Gaussian (rows, columns) with a deviation of a quarter of each side."""
    down, across = ((torch.arange(n) + 0.5) / n * 4 - 2 for n in grid)
    return torch.exp(-(down[:, None] ** 2 + across**2) / 2)


# Measures against ground truth, and of what a map depends on.


def coverage(mask: np.ndarray | Tensor, grid: tuple[int, int]) -> Tensor:
    """Share (rows, columns) of each patch that a mask (H, W) or (rows, columns) covers."""
    pixels = torch.as_tensor(np.asarray(mask)).float()[None]
    return (on_grid(pixels, grid) * (grid[0] * grid[1] / pixels.numel()))[0]


def inside(maps: Tensor, covered: Tensor) -> Tensor:
    """Share (B, T) of the positive relevance inside the mask, given by `covered` (B, rows, columns).

    The expected value of a random map is the mask's area. A map without positive relevance has 0.
    """
    positive = maps.clamp_min(0)
    total = positive.sum((-2, -1))
    return (positive * covered[:, None]).sum((-2, -1)) / total.clamp_min(torch.finfo(total.dtype).tiny)


def hits(maps: Tensor, covered: Tensor) -> Tensor:
    """Pointing game (B, T): 1 if the largest value of the map is inside the mask.

    A patch counts as inside if its coverage is at least half of the maximum. For several maxima, the share inside. An
    empty mask is never hit.
    """
    most = covered.amax((-2, -1), keepdim=True)
    aims = ((covered >= most / 2) & (covered > 0))[:, None]
    largest = maps == maps.amax((-2, -1), keepdim=True)
    return (largest & aims).sum((-2, -1)) / largest.sum((-2, -1))


def rank_correlation(first: Tensor, second: Tensor) -> Tensor:
    """Spearman's ρ of pairs of maps (…, rows, columns); ties share the mean rank.

    It is undefined for a constant map: 1 if both are constant, otherwise 0.
    """
    one, other = (stats.rankdata(x.flatten(-2).cpu().double().numpy(), axis=-1) for x in (first, second))
    one, other = (torch.from_numpy(x - x.mean(-1, keepdims=True)) for x in (one, other))
    norms = one.square().sum(-1).sqrt(), other.square().sum(-1).sqrt()
    correlation = (one * other).sum(-1) / (norms[0] * norms[1]).clamp_min(1e-12)
    return correlation.where((norms[0] > 0) | (norms[1] > 0), 1.0).float()


@torch.no_grad()
def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """Copy a network, with each parameter drawn from a normal distribution of its own mean and deviation."""
    network: nn.Module = copy.deepcopy(getattr(model, "_orig_mod", model))
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        spread = parameter.float().std(correction=0).cpu()
        drawn = torch.randn(parameter.shape, generator=generator) * spread + parameter.float().mean().cpu()
        parameter.copy_(drawn)
    return network


# One map.

RANDOM_MAPS = 19
"""Number of random maps that a map is compared with."""
ALLOWED = 3
"""Number of random maps whose gain may be as far from 0."""


def better_than_random(gain: Tensor, random: Tensor) -> Tensor:
    """True where gains (B, T) exceed the gains of random maps (B, R, T) on the same images, at a level of 10%.

    A random map and its negative have opposite gains, so 19 maps represent 38. A gain passes if it is above 0 and at
    most three of the 19 are as far from 0. Another random map has any of the 20 ranks, and either sign, with equal
    probability. So it passes with probability 4/20 · 1/2, for any distribution of gains.

    A bound by mean and deviation would fail: if a single patch decides, the gains of random maps are uniform over the
    possible range, and two deviations exceed the best possible map. A level of 5% would fail, too: by chance, two of
    19 orders of 64 patches begin or end with that patch in 12% of the images, and in more with larger steps.
    """
    as_far = (random.abs() >= gain[:, None]).sum(1)
    return (gain > 0) & (as_far <= ALLOWED)


def check_faithfulness(
    model: nn.Module,
    images: Tensor,
    targets: Tensor,
    method: str | Method,
    *,
    maps: Maps | None = None,
    steps: int = 25,
    fill: str = "mean",
    **options: object,
) -> list[dict[str, object]]:
    """Checks of each map on its own image, as plain data: for each image and each target, in that order.

    `images` (B, C, H, W) are standardized, `targets` (B, T) classes, `maps` those of the method if already computed,
    `options` those of the method. It takes (2 · (20 + T) + T) · (steps + 1) forward passes for each image, and two more
    maps.

    `srg`, with `random_srg`, its deviation, and `gaussian_srg`: gains of the map and the baselines, in logits.
    `believable`: the result of `better_than_random`.
    `deletion`, `insertion`: mean probabilities, with their curves from the first step to the last.
    `target_sensitivity`: 1 − rank correlation with the map of the most probable other class. 0 if the class changes
    nothing, None without another class.
    `randomized`: rank correlation with the map of the network with random weights.
    `completeness`: error of the method's sum, None for a method without completeness.
    """
    entry = method if isinstance(method, Method) else find_method(method)
    with quiet(model):
        maps = maps or entry.run(model, images, targets, **options)
        grid = _grid(maps.values)
        ranked = ranking(maps.values, images)
        scores = gains(model, images, ranked, targets[..., None], grid, steps, fill)
        _, covered = perturb(model, images, ranked.flip(-1), targets[..., None], grid, steps, "blur")
        gaussians = gaussian_map(grid).expand(len(images), 1, -1, -1)
        baselines = torch.cat([random_maps(images, grid, RANDOM_MAPS), gaussians], dim=1)
        repeated = targets[:, None].expand(-1, baselines.shape[1], -1)
        baseline_gains = gains(model, images, ranking(baselines, images), repeated, grid, steps, fill)["srg"]
        random, gaussian = baseline_gains[:, :-1], baseline_gains[:, -1]
        sensitivity = _target_sensitivity(model, images, targets, entry, maps.values, options)
        other = entry.run(randomized(model), images, targets, **options).values
    gain, correlation = scores["srg"][..., 0], rank_correlation(maps.values, other)
    deleted, covered = scores["deletion_curve"][:, :, 0], covered[:, :, 0]
    patches, inserted = ranked.shape[-1], covered.flip(-1)
    means = {"deletion": area(deleted, patches, steps), "insertion": area(covered, patches, steps)}
    believable, spread, mean = better_than_random(gain, random), random.std(1), random.mean(1)
    return [
        {
            "srg": float(gain[b, t]),
            "random_srg": float(mean[b, t]),
            "random_srg_std": float(spread[b, t]),
            "gaussian_srg": float(gaussian[b, t]),
            "believable": bool(believable[b, t]),
            **{name: float(value[b, t]) for name, value in means.items()},
            "deletion_curve": deleted[b, t].tolist(),
            "insertion_curve": inserted[b, t].tolist(),
            "target_sensitivity": None if sensitivity is None else float(sensitivity[b, t]),
            "randomized": float(correlation[b, t]),
            "completeness": None if maps.completeness is None else float(maps.completeness[b, t]),
            "protocol": protocol("SRG", fill, patches, steps),
        }
        for b in range(len(images))
        for t in range(targets.shape[1])
    ]


def protocol(measure: str, fill: str, patches: int, steps: int) -> str:
    """Full name of a measure: "deletion (mean, 49 steps)"."""
    return f"{measure} ({fill}, {min(steps, patches)} steps)"


def _target_sensitivity(
    model: nn.Module, images: Tensor, targets: Tensor, method: Method, values: Tensor, options: Mapping[str, object]
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
