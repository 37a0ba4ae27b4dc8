"""Benchmark of attribution methods: their faithfulness for one network on many images.

    result = benchmark(predictor, split, ["rollout", "fullgrad+"], count=100)
    result.print_table(console)

The measures are those of `vitral.explanation.faithfulness`, reported here as means with intervals.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from scipy import stats
from torch import Tensor, nn

from vitral.console import table
from vitral.data.dataset import Split
from vitral.errors import UsageError
from vitral.explanation.faithfulness import (
    RANDOM_MAPS,
    area,
    better_than_random,
    coverage,
    gains,
    gaussian_map,
    hits,
    inside,
    perturb,
    protocol,
    random_maps,
    randomized,
    rank_correlation,
    ranking,
)
from vitral.explanation.methods import METHODS, Maps
from vitral.explanation.methods.method import grid_of, quiet
from vitral.explanation.methods.select import check_method, find_method
from vitral.inference.inputs import ImageInput
from vitral.inference.outputs.output import require_classes
from vitral.inference.predictor import Predictor
from vitral.model import Foreign, ViT

MaskOf = Callable[[int], "np.ndarray | None"]
"""Image number → ground-truth mask: bool (H, W) of the stored image or (rows, columns); None if unknown."""


@dataclass(frozen=True)
class Estimate:
    """Mean over images with a 95% interval (Student's t; None for a single image)."""

    mean: float
    low: float | None
    high: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate | None:
        """Estimate from values; None without values."""
        if len(values) == 0:
            return None
        mean, count = float(np.mean(values)), len(values)
        if count == 1:
            return cls(mean, None, None, 1)
        half = float(stats.t.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count))
        return cls(mean, mean - half, mean + half, count)

    def text(self, digits: int = 2) -> str:
        """Format as "1.23 ± 0.10"."""
        half = "" if self.high is None else f" ± {self.high - self.mean:.{digits}f}"
        return f"{self.mean:.{digits}f}{half}"


@dataclass(frozen=True)
class Row:
    """Results of one method; None for measures that were not taken or do not apply."""

    method: str
    srg: Estimate | None = None
    deletion: Estimate | None = None
    insertion: Estimate | None = None
    believable: Estimate | None = None
    """Share of images on which the map beats the random ones, as 10% of random maps would."""
    inside: Estimate | None = None
    """Share of positive relevance inside the mask; a random map has the mask's area."""
    hits: Estimate | None = None
    target_sensitivity: Estimate | None = None
    randomized: Estimate | None = None
    """Rank correlation with the map of the same network with random weights; should be near 0."""
    completeness: Estimate | None = None
    milliseconds: float | None = None
    """Time for an image and one class: median over batches."""


@dataclass(frozen=True)
class Benchmark:
    """Result of `benchmark`: a row for each method, then random maps and the centered Gaussian."""

    network: str
    images: int
    right: int | None
    """Number of images classified correctly; None without labels."""
    masks: int
    """Number of images with a mask; with labels, of those classified correctly."""
    area: Estimate | None
    """Share of the image that masks cover."""
    grid: tuple[int, int]
    protocols: tuple[str, str, str]
    """Full names of SRG, deletion and insertion."""
    rows: tuple[Row, ...]

    @property
    def best(self) -> str:
        """Method with the highest SRG."""
        known = [row for row in self.rows if row.method in METHODS and row.srg is not None]
        return max(known, key=lambda row: row.srg.mean if row.srg else -math.inf).method

    def to_json(self) -> dict[str, object]:
        """Plain data, deterministic except for `milliseconds`."""

        def plain(value: object) -> object:
            if isinstance(value, Estimate | Row):
                return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
            return [plain(one) for one in value] if isinstance(value, tuple) else value

        return {f.name: plain(getattr(self, f.name)) for f in fields(self)}

    def print_table(self, console: Console) -> None:
        """Print a line for each method, the highest SRG first, without empty columns."""
        right = "" if self.right is None else f", {self.right} of them classified correctly"
        rows = sorted(self.rows, key=lambda row: -(row.srg.mean if row.srg else -math.inf))
        for part, title in zip(_COLUMNS, (f"{self.network}: {self.images} images{right}", None), strict=True):
            cells = {name: [cell(row) for row in rows] for name, cell in part.items()}
            columns = {name: column for name, column in cells.items() if any(column)}
            output = table(title)
            for name in columns:
                output.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
            for line in zip(*columns.values(), strict=True):
                output.add_row(*line)
            console.print(output)
        masks = f"; masks of {self.masks} images cover {_per_cent(self.area)} of them" if self.area else ""
        notes = (
            f"{', '.join(self.protocols)}; 95% intervals{masks}\n"
            "believable: beats the random maps of its image, as 10% of random maps would\n"
            "by class: 1 − rank correlation with another class's map, 0 where the class changes nothing\n"
            "by weights: rank correlation with the map of the network with random weights, near 0 where they matter"
        )
        console.print(notes, style="dim", highlight=False)


def _cell(value: Estimate | None) -> str:
    return value.text() if value else ""


def _per_cent(value: Estimate | None) -> str:
    return f"{100 * value.mean:.1f}%" if value else ""


_COLUMNS: tuple[dict[str, Callable[[Row], str]], ...] = (
    {
        "method": lambda row: row.method,
        "SRG": lambda row: _cell(row.srg),
        "deletion ↓": lambda row: _cell(row.deletion),
        "insertion ↑": lambda row: _cell(row.insertion),
        "believable": lambda row: _per_cent(row.believable),
    },
    {
        "method": lambda row: row.method,
        "in mask": lambda row: _per_cent(row.inside),
        "hits": lambda row: _per_cent(row.hits),
        "by class": lambda row: _cell(row.target_sensitivity),
        "by weights": lambda row: _cell(row.randomized),
        "completeness": lambda row: f"{row.completeness.mean:.1e}" if row.completeness else "",
        "ms": lambda row: f"{row.milliseconds:.1f}" if row.milliseconds is not None else "",
    },
)
"""Two tables, since one would not fit 80 columns: faithfulness of the patch order, and other measures."""


def benchmark(
    predictor: Predictor,
    images: Split | Sequence[ImageInput],
    methods: Sequence[str] | Mapping[str, Mapping[str, object]] | None = None,
    *,
    count: int = 20,
    steps: int = 100,
    fill: str = "mean",
    masks: MaskOf | None = None,
    batch_size: int = 8,
    progress: Callable[[int], None] | None = None,
) -> Benchmark:
    """Compare methods on `count` evenly spaced images of a set, each explained for its predicted class.

    `methods` are names, or names with options; None is all methods that support the network. `masks` gives the ground
    truth of an image by its number in the set. With labels, only correctly classified images are compared with it.
    `progress` is called with numbers of finished images. Everything but the time is deterministic.

    Raises `UsageError` for an unknown or unsupported method, `ImageError` for an unreadable image.
    """
    require_classes(predictor.output, "the benchmark", f"vitral predict {predictor.source} IMAGE")
    if isinstance(predictor.model, Foreign):
        why = f"{predictor.model.config.source} is used as it is"
        raise UsageError("the benchmark is for vitral's own networks", why=why, hint="vitral explain --check")
    selected = _selected(methods, predictor.model)
    if not len(images) or count < 1:
        raise UsageError("there is no image to measure on")
    numbers = np.unique(np.linspace(0, len(images) - 1, min(count, len(images))).round().astype(int))
    bench = _Bench(predictor, selected, steps, fill)
    with quiet(predictor.model):
        for start in range(0, len(numbers), batch_size):
            part = [int(i) for i in numbers[start : start + batch_size]]
            bench.measure(_images(predictor, images, part), *_truth(predictor, images, part, masks))
            if progress:
                progress(len(part))
    patches = math.prod(bench.grid)
    names = (("SRG", fill), ("deletion", fill), ("insertion", "blur"))
    return Benchmark(
        predictor.source,
        len(numbers),
        bench.right if isinstance(images, Split) else None,
        len(bench.areas),
        Estimate.of(bench.areas),
        bench.grid,
        (*(protocol(what, by, patches, steps) for what, by in names),),  # type: ignore[arg-type]
        bench.rows(),
    )


def _selected(
    methods: Sequence[str] | Mapping[str, Mapping[str, object]] | None, network: nn.Module
) -> dict[str, Mapping[str, object]]:
    if methods is None:
        methods = [name for name, one in METHODS.items() if one.any_network or isinstance(network, ViT)]
    for name in methods:
        check_method(find_method(name), network)
    return dict(methods) if isinstance(methods, Mapping) else {name: {} for name in methods}


def _images(predictor: Predictor, images: Split | Sequence[ImageInput], numbers: Sequence[int]) -> Tensor:
    """Prepared and standardized images on the network's device."""
    if isinstance(images, Split):
        prepared = [predictor.prepare(images.raw(i), images.names[i]) for i in numbers]
    else:
        prepared = [predictor.prepare(images[i], f"image {i}") for i in numbers]
    parameter = next(predictor.model.parameters())
    return predictor.preprocessing.standardize(torch.stack(prepared).to(parameter.device)).to(parameter.dtype)


def _truth(
    predictor: Predictor, images: Split | Sequence[ImageInput], numbers: Sequence[int], masks: MaskOf | None
) -> tuple[list[int] | None, list[Tensor | None]]:
    """Labels, and the fraction of each patch that the masks cover."""
    labels = [int(images.labels[i]) for i in numbers] if isinstance(images, Split) else None
    height, width = predictor.preprocessing.image_size
    grid = grid_of(predictor.model, torch.empty(1, 1, height, width))
    given = [None if masks is None else masks(i) for i in numbers]
    return labels, [None if mask is None else _preprocessed(mask, grid, predictor) for mask in given]


def _preprocessed(mask: np.ndarray, grid: tuple[int, int], predictor: Predictor) -> Tensor:
    """Resize, crop and pad a mask like its image, unless it is on the grid already."""
    if mask.shape == grid:
        return coverage(mask, grid)
    channels = predictor.preprocessing.channels
    # A letterbox pads with the mean, which for a mask must be 0.
    geometry = replace(predictor.preprocessing, mean=(0.0,) * channels, std=(1.0,) * channels).geometry
    pixels = np.repeat(np.asarray(mask, bool)[..., None].astype(np.uint8) * 255, channels, axis=2)
    return coverage(geometry(pixels)[0].float() / 255, grid)


class _Bench:
    """Accumulated values by method and measure."""

    def __init__(self, predictor: Predictor, methods: Mapping[str, Mapping[str, object]], steps: int, fill: str):
        self.model, self.methods, self.steps, self.fill = predictor.model, methods, steps, fill
        self.randomized = randomized(predictor.model).eval().requires_grad_(False)
        self.values: dict[str, dict[str, list[float]]] = {name: {} for name in (*methods, "random", "gaussian")}
        self.areas: list[float] = []
        self.right, self.grid = 0, (0, 0)

    def measure(self, images: Tensor, labels: Sequence[int] | None, covered: Sequence[Tensor | None]) -> None:
        """Add a batch."""
        self.grid = grid_of(self.model, images)
        with torch.no_grad():
            logits = self.model(images).float()
        best = logits.topk(min(2, logits.shape[1]), dim=1).indices
        predicted = best[:, :1]
        right = [labels is None or int(one) == labels[i] for i, one in enumerate(predicted)]
        self.right += sum(right)
        truth = [mask if ok else None for mask, ok in zip(covered, right, strict=True)]
        self.areas += [float(mask.mean()) for mask in truth if mask is not None]
        random = self.score("random", random_maps(images, self.grid, RANDOM_MAPS), images, predicted, truth)
        self.score("gaussian", gaussian_map(self.grid).expand(len(images), 1, -1, -1), images, predicted, truth)
        for name, options in self.methods.items():
            maps = self.timed(name, images, predicted, options)
            gain = self.score(name, maps.values, images, predicted, truth)
            self.add(name, "believable", better_than_random(gain, random[..., None]))
            if maps.completeness is not None:
                self.add(name, "completeness", maps.completeness)
            if best.shape[1] == 2:
                second = METHODS[name].run(self.model, images, best[:, 1:], **options).values
                self.add(name, "target_sensitivity", 1 - rank_correlation(maps.values, second))
            other = METHODS[name].run(self.randomized, images, predicted, **options).values
            self.add(name, "randomized", rank_correlation(maps.values, other))

    def timed(self, name: str, images: Tensor, targets: Tensor, options: Mapping[str, object]) -> Maps:
        """Run a method and record its time."""
        wait = torch.cuda.synchronize if images.device.type == "cuda" else lambda: None
        wait()
        start = time.perf_counter()
        maps = METHODS[name].run(self.model, images, targets, **options)
        wait()
        self.values[name].setdefault("milliseconds", []).append(1000 * (time.perf_counter() - start) / len(images))
        return maps

    def score(
        self, name: str, maps: Tensor, images: Tensor, predicted: Tensor, truth: Sequence[Tensor | None]
    ) -> Tensor:
        """Record the perturbation and mask measures of maps (B, R, …); return their SRG (B, R).

        Insertion takes separate passes, for which four of many random maps are enough.
        """
        ranked, targets = ranking(maps, images), predicted[:, None].expand(-1, maps.shape[1], -1)
        scores = gains(self.model, images, ranked, targets, self.grid, self.steps, self.fill)
        few = ranked[:, :4].flip(-1)
        _, inserted = perturb(self.model, images, few, targets[:, :4], self.grid, self.steps, "blur")
        self.add(name, "srg", scores["srg"].mean((1, 2)))
        self.add(name, "deletion", scores["deletion"].mean((1, 2)))
        self.add(name, "insertion", area(inserted, ranked.shape[-1], self.steps).mean((1, 2)))
        for one, mask in zip(maps, truth, strict=True):
            if mask is not None:
                self.add(name, "inside", inside(one[None], mask[None]).mean(1))
                self.add(name, "hits", hits(one[None], mask[None]).mean(1))
        return scores["srg"][..., 0]

    def add(self, name: str, measure: str, values: Tensor) -> None:
        self.values[name].setdefault(measure, []).extend(values.flatten().cpu().double().tolist())

    def rows(self) -> tuple[Row, ...]:
        """One row for each method."""
        rows = []
        for name, values in self.values.items():
            times = values.pop("milliseconds", None)
            estimates: dict[str, Any] = {measure: Estimate.of(numbers) for measure, numbers in values.items()}
            rows.append(Row(name, **estimates, milliseconds=float(np.median(times)) if times else None))
        return tuple(rows)
