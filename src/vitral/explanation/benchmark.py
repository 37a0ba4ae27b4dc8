"""Methods side by side on many pictures: which of them can be believed for this network, on these data.

    found = benchmark(predictor, split, ["rollout", "fullgrad+"], count=100)
    found.print_table(console)

What is measured is `vitral.explanation.faithfulness`'s; here it is gathered into means with their intervals.
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
from vitral.explanation.explain import check_method, find_method
from vitral.explanation.faithfulness import (
    RANDOM_MAPS,
    area,
    better_than_random,
    coverage,
    follow,
    gains,
    gaussian_map,
    hits,
    inside,
    protocol,
    random_maps,
    randomised,
    rank_correlation,
    ranking,
)
from vitral.explanation.methods import METHODS, Maps
from vitral.explanation.methods.method import grid_of, quiet
from vitral.model import ViT
from vitral.predict import Picture, Predictor

MaskOf = Callable[[int], "np.ndarray | None"]
"""Picture number -> where the truth lies: bool (H, W) of the stored picture or (rows, columns); None where unknown."""


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

    def shown(self, digits: int = 2) -> str:
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
        right = "" if self.right is None else f", {self.right} of them answered rightly"
        rows = sorted(self.rows, key=lambda row: -(row.srg.mean if row.srg else -math.inf))
        for part, title in zip(_COLUMNS, (f"{self.network}: {self.pictures} pictures{right}", None), strict=True):
            cells = {name: [cell(row) for row in rows] for name, cell in part.items()}
            shown = {name: column for name, column in cells.items() if any(column)}
            found = table(title)
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


_COLUMNS: tuple[dict[str, Callable[[Row], str]], ...] = (
    {
        "method": lambda row: row.method,
        "SRG": lambda row: _shown(row.srg),
        "deletion ↓": lambda row: _shown(row.deletion),
        "insertion ↑": lambda row: _shown(row.insertion),
        "believable": lambda row: _per_cent(row.believable),
    },
    {
        "method": lambda row: row.method,
        "in mask": lambda row: _per_cent(row.inside),
        "hits": lambda row: _per_cent(row.hits),
        "by class": lambda row: _shown(row.target_sensitivity),
        "by weights": lambda row: _shown(row.randomised),
        "completeness": lambda row: f"{row.completeness.mean:.1e}" if row.completeness else "",
        "ms": lambda row: f"{row.milliseconds:.1f}" if row.milliseconds is not None else "",
    },
)
"""Two tables, since one would not fit 80 columns: what the order of patches is worth, and what else is known."""


def benchmark(
    predictor: Predictor,
    pictures: Split | Sequence[Picture],
    methods: Sequence[str] | Mapping[str, Mapping[str, Any]] | None = None,
    *,
    count: int = 20,
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
        self.score("gaussian", gaussian_map(self.grid).expand(len(images), 1, -1, -1), images, answers, truth)
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
        found = gains(self.model, images, ranked, targets, self.grid, self.steps, self.fill)
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
