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
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
import torchvision.transforms.v2.functional as tv
from rich.console import Console
from scipy import stats
from torch import Tensor, nn

from vitral.console import table
from vitral.data.dataset import Split
from vitral.errors import UsageError, unknown
from vitral.explanation.explain import check_method, find_method
from vitral.explanation.methods import METHODS, Maps, Method
from vitral.explanation.methods.method import grid_of, on_grid, quiet
from vitral.explanation.methods.occlusion import PICTURES_AT_ONCE, on_pixels
from vitral.model import ViT
from vitral.predict import Picture, Predictor

Order = Literal["most", "least"]
Scale = Literal["logit", "probability"]
MaskOf = Callable[[int], "np.ndarray | None"]
"""Picture number -> where the truth lies: bool (H, W) of the stored picture or (rows, columns); None where unknown."""


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
    return tv.gaussian_blur(images.float(), [width, height], [sigma, sigma]).to(images.dtype)


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
    found = _gains(model, images, ranking(maps, images), targets[..., None], _grid(maps), steps, fill)
    return found["srg"][..., 0]


def _gains(
    model: nn.Module, images: Tensor, ranked: Tensor, targets: Tensor, grid: tuple[int, int], steps: int, fill: str
) -> dict[str, Tensor]:
    """SRG and deletion, (B, R, T) each, from the same passes."""
    most, deletion = follow(model, images, ranked, targets, grid, steps, fill)
    least, _ = follow(model, images, ranked.flip(-1), targets, grid, steps, fill)
    patches = ranked.shape[-1]
    gain = area(least - most, patches, steps)
    rounding = max(torch.finfo(images.dtype).eps, 1e-6) * torch.maximum(most.abs(), least.abs()).amax(-1)
    return {"srg": gain.where(gain.abs() > rounding, 0.0), "deletion": area(deletion, patches, steps)}


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
    `believable`: `better_than_random`; `target_sensitivity`: 1 − rank correlation with the map of the most probable
    other class, 0 where the class changes nothing, None where there is no other; `completeness`: the method's error,
    None where it promises nothing. It takes 2 · (20 + T) · (steps + 1) forward passes for each picture.
    """
    chosen = method if isinstance(method, Method) else find_method(method)
    with quiet(model):
        maps = maps or chosen.run(model, images, targets, **options)
        grid = _grid(maps.values)
        ranked = ranking(maps.values, images)
        gain = _gains(model, images, ranked, targets[..., None], grid, steps, fill)["srg"][..., 0]
        blind = torch.cat([random_maps(images, grid, RANDOM_MAPS), _gaussian(images, grid)], dim=1)
        every = targets[:, None].expand(-1, blind.shape[1], -1)
        without = _gains(model, images, ranking(blind, images), every, grid, steps, fill)["srg"]
        random, gaussian = without[:, :-1], without[:, -1]
        sensitivity = _target_sensitivity(model, images, targets, chosen, maps.values, options)
    believed, spread, mean = better_than_random(gain, random), random.std(1), random.mean(1)
    return [
        {
            "srg": float(gain[b, t]),
            "random_srg": float(mean[b, t]),
            "random_srg_std": float(spread[b, t]),
            "gaussian_srg": float(gaussian[b, t]),
            "believable": bool(believed[b, t]),
            "target_sensitivity": None if sensitivity is None else float(sensitivity[b, t]),
            "completeness": None if maps.completeness is None else float(maps.completeness[b, t]),
            "protocol": protocol("SRG", fill, ranked.shape[-1], steps),
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


def _gaussian(images: Tensor, grid: tuple[int, int]) -> Tensor:
    return gaussian_map(grid).expand(len(images), 1, -1, -1)


def _grid(maps: Tensor) -> tuple[int, int]:
    return maps.shape[-2], maps.shape[-1]


# Methods side by side, on many pictures.


@dataclass(frozen=True)
class Estimate:
    """A mean over pictures and its 95 % interval (Student's t; None with a single picture)."""

    mean: float
    low: float | None
    high: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate | None:
        """None where there are no values."""
        if len(values) == 0:
            return None
        mean, count = float(np.mean(values)), len(values)
        if count == 1:
            return cls(mean, None, None, 1)
        half = float(stats.t.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count))
        return cls(mean, mean - half, mean + half, count)

    def shown(self, digits: int = 3) -> str:
        """ "1.23 ± 0.10"."""
        half = "" if self.high is None else f" ± {self.high - self.mean:.{digits}f}"
        return f"{self.mean:.{digits}f}{half}"


@dataclass(frozen=True)
class Row:
    """How one method fares; None where something was not measured or means nothing for it."""

    method: str
    srg: Estimate | None = None
    deletion: Estimate | None = None
    insertion: Estimate | None = None
    believable: Estimate | None = None
    """The share of pictures on which its map beats the random ones; 10 % of random maps would."""
    inside: Estimate | None = None
    """The share of positive relevance inside the mask; the mask's area is the random value."""
    hits: Estimate | None = None
    target_sensitivity: Estimate | None = None
    randomised: Estimate | None = None
    """Rank correlation with the map of the network with other weights; should be near 0."""
    completeness: Estimate | None = None
    milliseconds: float | None = None
    """For a picture and one class: the median over batches."""


@dataclass(frozen=True)
class Benchmark:
    """What `benchmark` found: a row for each method, then random maps and the centred Gaussian."""

    network: str
    pictures: int
    right: int | None
    """How many of them the network answers rightly; None where labels are not known."""
    masks: int
    """How many have a mask; where labels are known, of those answered rightly."""
    area: Estimate | None
    """The masks' share of the picture."""
    grid: tuple[int, int]
    protocols: tuple[str, str, str]
    """Full names of SRG, deletion and insertion."""
    rows: tuple[Row, ...]

    @property
    def best(self) -> str:
        """The method with the highest SRG."""
        known = [row for row in self.rows if row.method in METHODS and row.srg is not None]
        return max(known, key=lambda row: row.srg.mean if row.srg else -math.inf).method

    def to_json(self) -> dict[str, Any]:
        """Plain data. All but `milliseconds` is the same every time."""

        def plain(value: Any) -> Any:
            if isinstance(value, Estimate | Row):
                return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
            return [plain(one) for one in value] if isinstance(value, tuple) else value

        return {f.name: plain(getattr(self, f.name)) for f in fields(self)}

    def print_table(self, console: Console) -> None:
        """A line a method, the highest SRG first; a column that nobody has is left out."""
        columns: dict[str, Callable[[Row], str]] = {
            "method": lambda row: row.method,
            "SRG": lambda row: _shown(row.srg),
            "deletion ↓": lambda row: _shown(row.deletion),
            "insertion ↑": lambda row: _shown(row.insertion),
            "believable": lambda row: _per_cent(row.believable),
            "in mask": lambda row: _per_cent(row.inside),
            "hits": lambda row: _per_cent(row.hits),
            "by class": lambda row: _shown(row.target_sensitivity),
            "by weights": lambda row: _shown(row.randomised),
            "completeness": lambda row: f"{row.completeness.mean:.1e}" if row.completeness else "",
            "ms": lambda row: f"{row.milliseconds:.1f}" if row.milliseconds is not None else "",
        }
        rows = sorted(self.rows, key=lambda row: -(row.srg.mean if row.srg else -math.inf))
        cells = {name: [cell(row) for row in rows] for name, cell in columns.items()}
        shown = {name: column for name, column in cells.items() if any(column)}
        right = "" if self.right is None else f", {self.right} of them answered rightly"
        found = table(f"{self.network}: {self.pictures} pictures{right}")
        for name in shown:
            found.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
        for line in zip(*shown.values(), strict=True):
            found.add_row(*line)
        console.print(found)
        masks = f"; masks of {self.masks} pictures cover {_per_cent(self.area)} of them" if self.area else ""
        notes = (
            f"{', '.join(self.protocols)}; 95 % intervals{masks}\n"
            "believable: beats the random maps of its picture, as 10 % of random maps would\n"
            "by class: 1 − rank correlation with another class's map, 0 where the class changes nothing\n"
            "by weights: rank correlation with the map of the network with random weights, near 0 where they matter"
        )
        console.print(notes, style="dim", highlight=False)


def _shown(value: Estimate | None) -> str:
    return value.shown() if value else ""


def _per_cent(value: Estimate | None) -> str:
    return f"{100 * value.mean:.1f} %" if value else ""


def benchmark(
    predictor: Predictor,
    pictures: Split | Sequence[Picture],
    methods: Sequence[str] | Mapping[str, Mapping[str, Any]] | None = None,
    *,
    count: int = 100,
    steps: int = 100,
    fill: str = "mean",
    masks: MaskOf | None = None,
    batch_size: int = 8,
    progress: Callable[[int], None] | None = None,
) -> Benchmark:
    """Methods side by side on `count` pictures, evenly spaced through the set, each explained for its answered class.

    `methods` are names, or names with options; None are all that this network has parts for. `masks` gives the truth of
    a picture by its number in the set; it is compared only on pictures that are answered rightly, where labels are
    known. `progress` is told of pictures that are done. Everything but the time is the same every time.

    Raises `UsageError` for an unknown method or one without its parts, `ImageError` for a picture that cannot be read.
    """
    chosen = _chosen(methods, predictor.model)
    if not len(pictures) or count < 1:
        raise UsageError("there is no picture to measure on")
    numbers = np.unique(np.linspace(0, len(pictures) - 1, min(count, len(pictures))).round().astype(int))
    bench = _Bench(predictor, chosen, steps, fill)
    with quiet(predictor.model):
        for start in range(0, len(numbers), batch_size):
            part = [int(i) for i in numbers[start : start + batch_size]]
            bench.measure(_images(predictor, pictures, part), *_truth(predictor, pictures, part, masks))
            if progress:
                progress(len(part))
    patches = math.prod(bench.grid)
    names = (("SRG", fill), ("deletion", fill), ("insertion", "blur"))
    return Benchmark(
        predictor.source, len(numbers), bench.right if isinstance(pictures, Split) else None, len(bench.areas),
        Estimate.of(bench.areas), bench.grid,
        (*(protocol(what, by, patches, steps) for what, by in names),),  # type: ignore[arg-type]
        bench.rows(),
    )  # fmt: skip


def _chosen(
    methods: Sequence[str] | Mapping[str, Mapping[str, Any]] | None, network: nn.Module
) -> dict[str, Mapping[str, Any]]:
    if methods is None:
        methods = [name for name, one in METHODS.items() if one.any_network or isinstance(network, ViT)]
    for name in methods:
        check_method(find_method(name), network)
    return dict(methods) if isinstance(methods, Mapping) else {name: {} for name in methods}


def _images(predictor: Predictor, pictures: Split | Sequence[Picture], numbers: Sequence[int]) -> Tensor:
    """Standardised pictures, as the network takes them."""
    if isinstance(pictures, Split):
        prepared = [predictor.prepare(pictures.raw(i), pictures.names[i]) for i in numbers]
    else:
        prepared = [predictor.prepare(pictures[i], f"image {i}") for i in numbers]
    parameter = next(predictor.model.parameters())
    return predictor.preprocessing.standardise(torch.stack(prepared).to(parameter.device)).to(parameter.dtype)


def _truth(
    predictor: Predictor, pictures: Split | Sequence[Picture], numbers: Sequence[int], masks: MaskOf | None
) -> tuple[list[int] | None, list[Tensor | None]]:
    """Labels, and how much of each patch the masks cover."""
    labels = [int(pictures.labels[i]) for i in numbers] if isinstance(pictures, Split) else None
    height, width = predictor.preprocessing.image_size
    grid = grid_of(predictor.model, torch.empty(1, 1, height, width))
    found = [None if masks is None else masks(i) for i in numbers]
    return labels, [None if mask is None else _as_seen(mask, grid, predictor) for mask in found]


def _as_seen(mask: np.ndarray, grid: tuple[int, int], predictor: Predictor) -> Tensor:
    """A mask goes the way of its picture: resized, cut and filled alike, where it is not on the grid already."""
    if mask.shape == grid:
        return coverage(mask, grid)
    channels = predictor.preprocessing.channels
    # What a letterbox adds is filled with the mean, which for a mask is nothing.
    geometry = replace(predictor.preprocessing, mean=(0.0,) * channels, std=(1.0,) * channels).geometry
    pixels = np.repeat(np.asarray(mask, bool)[..., None].astype(np.uint8) * 255, channels, axis=2)
    return coverage(geometry(pixels)[0].float() / 255, grid)


class _Bench:
    """Values of all pictures so far: by method, by measure."""

    def __init__(self, predictor: Predictor, methods: Mapping[str, Mapping[str, Any]], steps: int, fill: str):
        self.model, self.methods, self.steps, self.fill = predictor.model, methods, steps, fill
        self.blank = randomised(predictor.model).eval().requires_grad_(False)
        self.values: dict[str, dict[str, list[float]]] = {name: {} for name in (*methods, "random", "gaussian")}
        self.areas: list[float] = []
        self.right, self.grid = 0, (0, 0)

    def measure(self, images: Tensor, labels: Sequence[int] | None, covered: Sequence[Tensor | None]) -> None:
        """Add a batch."""
        self.grid = grid_of(self.model, images)
        with torch.no_grad():
            logits = self.model(images).float()
        best = logits.topk(min(2, logits.shape[1]), dim=1).indices
        answers = best[:, :1]
        right = [labels is None or int(answer) == labels[i] for i, answer in enumerate(answers)]
        self.right += sum(right)
        truth = [mask if ok else None for mask, ok in zip(covered, right, strict=True)]
        self.areas += [float(mask.mean()) for mask in truth if mask is not None]
        random = self.score("random", random_maps(images, self.grid, RANDOM_MAPS), images, answers, truth)
        self.score("gaussian", _gaussian(images, self.grid), images, answers, truth)
        for name, options in self.methods.items():
            maps = self.timed(name, images, answers, options)
            gain = self.score(name, maps.values, images, answers, truth)
            self.add(name, "believable", better_than_random(gain, random[..., None]))
            if maps.completeness is not None:
                self.add(name, "completeness", maps.completeness)
            if best.shape[1] == 2:
                second = METHODS[name].run(self.model, images, best[:, 1:], **options).values
                self.add(name, "target_sensitivity", 1 - rank_correlation(maps.values, second))
            other = METHODS[name].run(self.blank, images, answers, **options).values
            self.add(name, "randomised", rank_correlation(maps.values, other))

    def timed(self, name: str, images: Tensor, targets: Tensor, options: Mapping[str, Any]) -> Maps:
        """The method's maps; their time is kept."""
        wait = torch.cuda.synchronize if images.device.type == "cuda" else lambda: None
        wait()
        start = time.perf_counter()
        maps = METHODS[name].run(self.model, images, targets, **options)
        wait()
        self.values[name].setdefault("milliseconds", []).append(1000 * (time.perf_counter() - start) / len(images))
        return maps

    def score(self, name: str, maps: Tensor, images: Tensor, answers: Tensor, truth: Sequence[Tensor | None]) -> Tensor:
        """Keep what patches that are hidden in the maps' order say, and masks; SRG (B, R) of maps (B, R, …).

        Insertion takes passes of its own; of many random maps four are enough for its mean.
        """
        ranked, targets = ranking(maps, images), answers[:, None].expand(-1, maps.shape[1], -1)
        found = _gains(self.model, images, ranked, targets, self.grid, self.steps, self.fill)
        few = ranked[:, :4].flip(-1)
        _, inserted = follow(self.model, images, few, targets[:, :4], self.grid, self.steps, "blur")
        self.add(name, "srg", found["srg"].mean((1, 2)))
        self.add(name, "deletion", found["deletion"].mean((1, 2)))
        self.add(name, "insertion", area(inserted, ranked.shape[-1], self.steps).mean((1, 2)))
        for one, mask in zip(maps, truth, strict=True):
            if mask is not None:
                self.add(name, "inside", inside(one[None], mask[None]).mean(1))
                self.add(name, "hits", hits(one[None], mask[None]).mean(1))
        return found["srg"][..., 0]

    def add(self, name: str, measure: str, values: Tensor) -> None:
        self.values[name].setdefault(measure, []).extend(values.flatten().double().tolist())

    def rows(self) -> tuple[Row, ...]:
        """What is known of each method."""
        found = []
        for name, values in self.values.items():
            times = values.pop("milliseconds", None)
            estimates: dict[str, Any] = {measure: Estimate.of(numbers) for measure, numbers in values.items()}
            found.append(Row(name, **estimates, milliseconds=float(np.median(times)) if times else None))
        return tuple(found)
