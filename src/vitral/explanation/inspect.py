"""Everything that `figure7` can say of one network, drawn and told in plain words.

`look` measures, `Inspection` holds what was found, `Inspection.panels` are the drawings with their captions. Which
network, which pictures and the page are `vitral.recipes.inspection`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor, nn

from vitral.explanation import drawing_inspect as drawing
from vitral.explanation.capture import POOL, plain
from vitral.explanation.drawing_inspect import PAPER, Theme
from vitral.explanation.figure7 import (
    LEAST_FOR_CKA,
    AttentionDistance,
    HeadMaps,
    Likeness,
    PatchFilters,
    PositionSimilarity,
    Prefix,
    TokenNorms,
    head_maps,
    measure,
    patch_distances,
    patch_filters,
    position_similarity,
    prefix_names,
)

_POSITIONS_AT_MOST = 32
"""Positions a side that are compared with all others; a grid of 64 would make 16 million numbers."""


@dataclass(frozen=True, eq=False)
class Panel:
    """A drawing with the words that belong to it."""

    name: str
    """Of its files."""
    title: str
    caption: str
    draw: Callable[[Theme], Figure]


@dataclass(frozen=True, eq=False)
class Inspection:
    """What was found inside a network. Parts that need pictures are None where there were none."""

    name: str
    facts: dict[str, str]
    """The network in a few words."""
    filters: PatchFilters
    positions: PositionSimilarity
    attention: AttentionDistance | None = None
    norms: TokenNorms | None = None
    likeness: Likeness | None = None
    heads: HeadMaps | None = None
    picture: np.ndarray | None = None
    """uint8 (H, W, C): the picture of `heads`, as the network saw it."""
    source: str = ""
    """Where the pictures are from."""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """All the numbers as plain data; None for what was not measured."""
        parts = ("filters", "positions", "attention", "norms", "likeness", "heads")
        found = {part: None if (one := getattr(self, part)) is None else one.to_json() for part in parts}
        return {"model": self.name, "facts": self.facts, "pictures": self.source, **found, "notes": list(self.notes)}

    def summary(self) -> list[str]:
        """A few lines with the numbers that matter most."""
        share = self.filters.explained
        lines = [f"{self.name}: " + ", ".join(f"{key} {value}" for key, value in self.facts.items())]
        if len(share):
            lines.append(
                f"filters   {len(share)} components hold {share.sum():.0%} of the variance of the patch kernels"
            )
        if self.attention is not None:
            one = self.attention
            lines.append(
                f"distance  heads look {np.nanmin(one.distance):.1f} to {np.nanmax(one.distance):.1f} px far"
                f" (all patches alike {one.uniform:.1f}, own patch and neighbours {one.local:.1f}); {self.source}"
            )
            used = one.entropy_share
            lines.append(f"entropy   {np.nanmin(used):.0%} to {np.nanmax(used):.0%} of the largest, ln {one.keys}")
        if self.norms is not None:
            counts = dict(zip(self.norms.layers, self.norms.outliers.tolist(), strict=True))
            most = max(counts, key=lambda layer: counts[layer])
            told = f"most after layer {most}, {counts[most]:,}" if counts[most] else "none"
            lines.append(f"norms     outliers of {self.norms.norms[0].size:,} patches: {told}")
        return lines

    def panels(self) -> list[Panel]:
        """What can be drawn, in the order of the page."""
        made = [_filters(self.filters), _kernels(self.filters), _positions(self.positions)]
        if self.attention is not None:
            made += [_distance(self.attention), _entropy(self.attention)]
        if self.norms is not None:
            made.append(_norms(self.norms))
        if self.likeness is not None:
            made.append(_likeness(self.likeness))
        if self.heads is not None and self.picture is not None:
            made.append(_heads(self.heads, self.picture))
        return [panel for panel in made if panel is not None]

    def save_drawings(self, folder: Path) -> list[Path]:
        """Write each panel as PNG and SVG; those of an earlier look that were not drawn now are taken away."""
        panels = self.panels()
        written: list[Path] = []
        for panel in panels:
            paths = [folder / f"{panel.name}{suffix}" for suffix in (".png", ".svg")]
            drawing.save(panel.draw(PAPER), *paths)
            written += paths
        for name in set(NAMES) - {panel.name for panel in panels}:
            for suffix in (".png", ".svg"):
                (folder / f"{name}{suffix}").unlink(missing_ok=True)
        return written


NAMES = ("filters", "kernels", "positions", "distance", "entropy", "norms", "likeness", "heads")
"""Files that a look can write."""


def look(
    model: nn.Module,
    images: Tensor | None = None,
    picture: np.ndarray | None = None,
    *,
    name: str = "",
    source: str = "",
    prefix: Prefix = "drop",
    layers: Sequence[int] | None = None,
    components: int = 28,
    notes: Sequence[str] = (),
    progress: Callable[[int], None] | None = None,
) -> Inspection:
    """Measure all that can be measured: of the weights, and of standardised pictures (B, C, H, W) where there are any.

    Heads are drawn over the first picture; `picture` is the same as uint8 pixels (H, W, C). Raises as the functions of
    `figure7` do.
    """
    network, told = plain(model), list(notes)
    filters = patch_filters(network, components)
    positions = position_similarity(network, _POSITIONS_AT_MOST)
    told += filters.notes
    if images is None:
        return Inspection(name, _facts(network), filters, positions, notes=tuple(told))
    enough = len(images) >= LEAST_FOR_CKA or not len(images)
    if not enough:
        told.append(f"layers are not compared: that needs {LEAST_FOR_CKA} pictures")
    parts = ("attention", "norms", "cka") if enough else ("attention", "norms")
    found = measure(network, images, parts=parts, prefix=prefix, layers=layers, progress=progress)
    return Inspection(
        name, _facts(network), filters, positions, found.attention, found.norms, found.likeness,
        head_maps(network, images[0], layers), picture if picture is not None else _pixels(images[0]), source,
        tuple(told),
    )  # fmt: skip


def _pixels(image: Tensor) -> np.ndarray:
    """A standardised picture (C, H, W) as uint8 (H, W, C), from its own darkest to its brightest value."""
    low, high = image.min(), image.max()
    found = ((image - low) / (high - low).clamp_min(1e-12) * 255).round().byte()
    return found.permute(1, 2, 0).cpu().numpy()


def _facts(network: Any) -> dict[str, str]:
    config = network.config
    names = [name for name in prefix_names(network) if not name.startswith("register")]
    if config.registers:
        names.append(f"{config.registers} register{'s' * (config.registers > 1)}")
    return {
        "layers": f"{config.depth}",
        "heads": f"{config.heads} of width {config.dim // config.heads}",
        "pictures": "×".join(map(str, config.image)) + f" px, {config.channels} channel{'s' * (config.channels > 1)}",
        "patches": f"{config.grid[0]} × {config.grid[1]} of {'×'.join(map(str, config.patch))} px",
        "positions": config.position,
        "other tokens": ", ".join(names) or "none",
        "the head reads": {"cls": "the class token", "cls-mean": "class token and mean", "map": "by attention"}.get(
            config.pool, "the mean"
        ),
    }


# The drawings in words ------------------------------------------------------------------------------------------------


def _filters(found: PatchFilters) -> Panel | None:
    if not len(found.components):
        return None
    share, count = found.explained.sum(), len(found.components)
    what = f"of the {found.source}" if _convolved(found) else "that every patch is compared with"
    caption = (
        f"Mixing these {count} patterns gives back {share:.0%} of what varies between the {len(found.kernels)} kernels"
        f" {what}, the first one alone {found.explained[0]:.0%}. Mid-grey is zero; each"
        " pattern is scaled on its own. A trained network has smooth shapes here, from plain brightness and colour to"
        " stripes and checks, much like the waves of a Fourier or cosine basis; an untrained one has noise."
    )
    title = f"{'First' if _convolved(found) else 'Patch'} filters: principal components"
    return Panel("filters", title, caption, lambda t: drawing.filters(found, t))


def _convolved(found: PatchFilters) -> bool:
    """Whether the picture is read by convolutions before there are patches."""
    return "convolution" in found.source


def _kernels(found: PatchFilters) -> Panel:
    count = min(len(found.kernels), 128)
    shown = f"All {count} kernels" if count == len(found.kernels) else f"The {count} largest of {len(found.kernels)}"
    what, where = ("channel of what the next layer reads", "picture") if _convolved(found) else (
        "number of a patch's token", "patch")  # fmt: skip
    caption = (
        f"{shown}, the largest first, each scaled on its own. One kernel is one {what}: where the {where} has the"
        " kernel's pattern, the number is large."
    )
    return Panel("kernels", "The kernels themselves", caption, lambda t: drawing.kernels(found, t))


def _positions(found: PositionSimilarity) -> Panel | None:
    if found.values is None:
        return None
    kinds = {
        "learned": "Nobody told the network where its patches are: it learned a vector for each. Bright around each"
        " map's own place means that it found out which patches are neighbours; a bright cross, that it found rows and"
        " columns. Just after initialisation only the own place is bright.",
        "sincos": "These positions are computed, not learned, so this picture is the same for every network of this"
        " grid and width: neighbours are alike, and so are patches of the same row or column.",
        "rotary": "These positions turn queries and keys instead of being added, so this picture is computed and the"
        " same for every network of this grid and head width: how much of its score an equal key keeps at that place.",
    }
    caption = (
        "One small map for each patch of the picture, placed as the patch is: the map's colours tell how alike that"
        f" patch's position is to all others ({found.measure}; 1 is equal). {kinds[found.kind]}"
    )
    return Panel("positions", "Similarity of positions", caption, lambda t: drawing.positions(found, t))


def _distance(found: AttentionDistance) -> Panel:
    near, far = np.nanmin(found.distance), np.nanmax(found.distance)
    kept = {
        "drop": "Tokens that are no patch are left out, and each query's weights divided by what is left",
        "keep": "Weight on tokens that are no patch counts as distance 0",
    }[found.prefix]
    caption = (
        "How far heads look. Each dot is a head: the mean distance, in pixels, from a patch to the patches that it"
        f" attends to, weighted by attention, over all patches of {found.pictures} pictures. Here heads lie between"
        f" {near:.1f} and {far:.1f} pixels. A head that looks at all patches alike would lie at {found.uniform:.1f}"
        f" (dashed), one that looks at its own patch and the neighbours alike at {found.local:.1f} (dashed), one that"
        " looks at its own patch alone at 0. Dots spread from low to high in the first layers mean that some heads work"
        f" locally, as a convolution would, while others see the whole picture at once. {kept}."
    )
    return Panel("distance", "Attention distance", caption, lambda t: drawing.distance(found, t))


def _entropy(found: AttentionDistance) -> Panel:
    share = found.entropy_share
    caption = (
        "How widely heads spread their attention, wherever it lies: 0 is all weight on one patch, the upper dashed line"
        f" (ln {found.keys} = {np.log(found.keys):.2f} nats) is every patch alike. Heads use {np.nanmin(share):.0%} to"
        f" {np.nanmax(share):.0%} of that range here. Far and narrow is a head that looks for one thing; far and wide"
        " one that takes an average of the picture."
    )
    return Panel("entropy", "Attention entropy", caption, lambda t: drawing.entropy(found, t))


def _norms(found: TokenNorms) -> Panel:
    total = int(found.outliers.sum())
    if total:
        worst = int(found.outliers.argmax())
        told = (
            f"Here most are after layer {found.layers[worst]}: {int(found.outliers[worst]):,}, or"
            f" {found.outlier_share[worst]:.2%} of its patches."
        )
    else:
        told = "Here there is none."
    caption = (
        "How large tokens are after each block: the box holds the middle half of all patches, the thin line 5 to 95 %."
        f" Dots are outliers: {found.rule}. Large networks that were trained for long turn a few patches of plain"
        " background into stores of something else; such patches have huge norms and spoil attention maps, and register"
        f" tokens exist to take their place. {told}"
    )
    return Panel("norms", "Norms of tokens", caption, lambda t: drawing.norms(found, t))


def _likeness(found: Likeness) -> Panel:
    caption = (
        "How alike the layers' representations of the same pictures are (1: the same up to turning and scale;"
        " 0: unrelated). “in” is what enters the first block. Bright blocks are runs of layers that change little;"
        " a dark step is where the network does something new. "
        f"{found.measure[0].upper()}{found.measure[1:]}, {found.pictures} pictures in batches of {found.batch}."
    )
    return Panel("likeness", "Likeness of layers (CKA)", caption, lambda t: drawing.likeness(found, t))


def _heads(found: HeadMaps, picture: np.ndarray) -> Panel:
    rows = ", ".join(
        "the MAP head" if found.layers[i] == POOL else f"layer {found.layers[i]}"
        for i in drawing.shown_layers(len(found.layers))
    )
    heads = found.values.shape[1]
    shown = f"{drawing.HEADS_AT_MOST} of {heads} heads" if heads > drawing.HEADS_AT_MOST else f"{heads} heads"
    caption = (
        f"Where {shown} look in one picture, for {rows}: attention of {found.query} to each patch, each map scaled to"
        " its own brightest patch. Attention shows where information was routed, not why the network answers what it"
        f" answers. On average {found.elsewhere.mean():.0%} of the attention lies on no patch."
    )
    return Panel("heads", "Heads over a picture", caption, lambda t: drawing.heads(found, picture, t))


@dataclass(frozen=True, eq=False)
class Example:
    """Attention distance by hand: one query on a grid of 3 × 3 patches of 16 pixels."""

    weights: np.ndarray
    """(3, 3), the query in the upper left corner; they add up to 1."""
    pixels: np.ndarray
    """(3, 3): from the query's patch to each."""

    @property
    def products(self) -> np.ndarray:
        """(3, 3)."""
        return self.weights * self.pixels

    @property
    def distance(self) -> float:
        """Their sum: what the query adds to the mean."""
        return float(self.products.sum())


def worked_example() -> Example:
    """The numbers of the page's example."""
    weights = np.array([[0.4, 0.2, 0.0], [0.2, 0.1, 0.0], [0.0, 0.0, 0.1]])
    return Example(weights, patch_distances((3, 3), (16, 16))[0].double().numpy().reshape(3, 3))
