"""All measures of one network, with drawings and captions.

`inspect_network` measures, `Inspection` holds the results, `Inspection.panels` are drawings with captions. Loading
the network and images, and the page, are in `vitral.workflows.inspection`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor, nn

from vitral.console import Described
from vitral.explanation.capture import POOL, require_vit
from vitral.explanation.inspect import drawing
from vitral.explanation.inspect.attention_distance import AttentionDistance, Prefix, patch_distances
from vitral.explanation.inspect.cka import LEAST_FOR_CKA, Likeness
from vitral.explanation.inspect.drawing import PAPER, Theme
from vitral.explanation.inspect.filters import PatchFilters, patch_filters
from vitral.explanation.inspect.head_maps import HeadMaps, head_maps
from vitral.explanation.inspect.measure import measure
from vitral.explanation.inspect.norms import TokenNorms, prefix_names
from vitral.explanation.inspect.positions import PositionSimilarity, position_similarity
from vitral.explanation.subject import to_pixels
from vitral.model import ViT
from vitral.wording import count

_MAX_POSITIONS = 32
"""Rows and columns of positions that are compared with all others; a grid of 64 would give 16 million values."""


@dataclass(frozen=True, eq=False)
class Panel:
    """A drawing with title and caption."""

    name: str
    """Name of its files."""
    title: str
    caption: str
    draw: Callable[[Theme], Figure]


@dataclass(frozen=True, eq=False, repr=False)
class Inspection(Described):
    """Results of `inspect_network`. Parts that need images are None without images.

    Example:
        found = vitral.inspect("runs/photos", images=4)
        print(found.summary(), list(found.figures()))
    """

    name: str
    facts: dict[str, str]
    """Short description of the network."""
    filters: PatchFilters
    positions: PositionSimilarity
    attention: AttentionDistance | None = None
    norms: TokenNorms | None = None
    likeness: Likeness | None = None
    heads: HeadMaps | None = None
    image: np.ndarray | None = None
    """uint8 (H, W, C): the preprocessed image of `heads`."""
    source: str = ""
    """Source of the images."""
    notes: tuple[str, ...] = ()

    def described(self) -> dict[str, str]:
        """Return the facts that `repr` and notebooks show, as a dict from name to text."""
        return {"name": self.name, **{name: f"{name} {value}" for name, value in self.facts.items()}}

    def to_json(self) -> dict[str, object]:
        """All results as plain data; None for parts that were not measured."""
        parts = ("filters", "positions", "attention", "norms", "likeness", "heads")
        found = {part: None if (one := getattr(self, part)) is None else one.to_json() for part in parts}
        return {"model": self.name, "facts": self.facts, "images": self.source, **found, "notes": list(self.notes)}

    def summary(self) -> list[str]:
        """A few lines with the most important results."""
        share = self.filters.explained
        lines = [f"{self.name}: " + ", ".join(f"{key} {value}" for key, value in self.facts.items())]
        if len(share):
            lines.append(
                f"filters   {len(share)} components hold {share.sum():.0%} of the variance of the patch kernels"
            )
        if self.attention is not None:
            one = self.attention
            lines.append(
                f"distance  mean attention distance of the heads: {np.nanmin(one.distance):.1f} to"
                f" {np.nanmax(one.distance):.1f} px ({one.uniform:.1f} for uniform attention, {one.local:.1f} for a"
                f" patch and its neighbors); {self.source}"
            )
            used = one.entropy_share
            range_used = f"{np.nanmin(used):.0%} to {np.nanmax(used):.0%}"
            lines.append(f"entropy   the heads use {range_used} of the maximum, ln {one.keys}")
        if self.norms is not None:
            counts = dict(zip(self.norms.layers, self.norms.outliers.tolist(), strict=True))
            most = max(counts, key=lambda layer: counts[layer])
            of = f"of {self.norms.norms[0].size:,} patches"
            outliers = f"at most {counts[most]:,} {of}, after layer {most}" if counts[most] else f"none {of}"
            lines.append(f"norms     outliers: {outliers}")
        return lines

    def panels(self) -> list[Panel]:
        """Available drawings, in the order of the page."""
        panels = [_filters(self.filters), _kernels(self.filters), _positions(self.positions)]
        if self.attention is not None:
            panels += [_distance(self.attention), _entropy(self.attention)]
        if self.norms is not None:
            panels.append(_norms(self.norms))
        if self.likeness is not None:
            panels.append(_likeness(self.likeness))
        if self.heads is not None and self.image is not None:
            panels.append(_heads(self.heads, self.image))
        return [panel for panel in panels if panel is not None]

    def figures(self) -> dict[str, Figure]:
        """Return the available drawings as figures of matplotlib, by name, such as "distance"."""
        return {panel.name: panel.draw(PAPER) for panel in self.panels()}

    def save_drawings(self, folder: Path) -> list[Path]:
        """Write each panel as PNG and SVG, and remove stale files of panels that do not exist now."""
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
"""Names of all possible panels."""


def inspect_network(
    model: nn.Module,
    images: Tensor | None = None,
    image: np.ndarray | None = None,
    *,
    name: str = "",
    source: str = "",
    prefix: Prefix = "drop",
    layers: Sequence[int] | None = None,
    components: int = 28,
    notes: Sequence[str] = (),
    progress: Callable[[int], None] | None = None,
) -> Inspection:
    """Take all measures of a network: of its weights, and of standardized images (B, C, H, W) if given.

    Head maps are drawn over the first image; `image` is that image as uint8 pixels (H, W, C). Raises the errors of the
    single measures.
    """
    network, all_notes = require_vit(model), list(notes)
    filters = patch_filters(network, components)
    positions = position_similarity(network, _MAX_POSITIONS)
    all_notes += filters.notes
    if images is None:
        return Inspection(name, _facts(network), filters, positions, notes=tuple(all_notes))
    enough = len(images) >= LEAST_FOR_CKA or not len(images)
    if not enough:
        all_notes.append(f"layers are not compared: that needs {LEAST_FOR_CKA} images")
    parts = ("attention", "norms", "cka") if enough else ("attention", "norms")
    measured = measure(network, images, parts=parts, prefix=prefix, layers=layers, progress=progress)
    return Inspection(
        name,
        _facts(network),
        filters,
        positions,
        measured.attention,
        measured.norms,
        measured.likeness,
        head_maps(network, images[0], layers),
        image if image is not None else to_pixels(images[0]),
        source,
        tuple(all_notes),
    )


def _facts(network: ViT) -> dict[str, str]:
    config = network.config
    names = [name for name in prefix_names(network) if not name.startswith("register")]
    if config.registers:
        names.append(count(config.registers, "register"))
    return {
        "layers": f"{config.depth}",
        "heads": f"{config.heads} of width {config.dim // config.heads}",
        "images": "×".join(map(str, config.image)) + f" px, {count(config.channels, 'channel')}",
        "patches": f"{config.grid[0]} × {config.grid[1]} of {'×'.join(map(str, config.patch))} px",
        "positions": config.position,
        "other tokens": ", ".join(names) or "none",
        "the head reads": {"cls": "the class token", "cls-mean": "class token and mean", "map": "by attention"}.get(
            config.pool, "the mean"
        ),
    }


# Captions ------------------------------------------------------------------------------------------------------------


def _filters(found: PatchFilters) -> Panel | None:
    if not len(found.components):
        return None
    share, count = found.explained.sum(), len(found.components)
    what = f"of the {found.source}" if _convolved(found) else "that every patch is compared with"
    size = found.kernels[0].size
    random = (1 + (size / len(found.kernels)) ** 0.5) ** 2 / size  # Marchenko and Pastur 1967
    # A small share proves nothing: small or decorrelated kernels of a trained stem are as varied as random ones.
    verdict = ", so the filters have learned a structure" if found.explained[0] > 1.5 * random else ""
    caption = (
        f"{count} components explain {share:.0%} of the variance of the {len(found.kernels)} kernels {what}. The first"
        f" component explains {found.explained[0]:.0%}, against {random:.0%} for random kernels{verdict}. Mid-gray is"
        " zero; each component is scaled separately. The filters of a trained network are smooth: the first ones show"
        " brightness and color, later ones stripes."
    )
    title = f"{'First' if _convolved(found) else 'Patch'} filters: principal components"
    return Panel("filters", title, caption, lambda t: drawing.filters(found, t))


def _convolved(found: PatchFilters) -> bool:
    """True if convolutions read the image before patches are cut."""
    return "convolution" in found.source


def _kernels(found: PatchFilters) -> Panel:
    count = min(len(found.kernels), 128)
    shown = f"All {count} kernels" if count == len(found.kernels) else f"The {count} largest of {len(found.kernels)}"
    what, where = (
        ("channel of the input of the next layer", "image")
        if _convolved(found)
        else ("number of the token of a patch", "patch")
    )
    caption = (
        f"{shown}, the largest first, each scaled on its own. Each kernel computes one {what}. The result is"
        f" large where the {where} looks like the kernel."
    )
    return Panel("kernels", "The kernels themselves", caption, lambda t: drawing.kernels(found, t))


def _positions(found: PositionSimilarity) -> Panel | None:
    if found.values is None:
        return None
    kinds = {
        "learned": "Positions are not built in: the network learned a vector for each position. A bright area"
        " around each map's own position means that it learned which patches are neighbors; a bright cross, that it"
        " learned rows and columns.",
        "sincos": "These positions are computed, not learned, so this image is the same for every network of this"
        " grid and width: neighbors are similar, and so are patches of the same row or column.",
        "rotary": "These positions rotate queries and keys instead of being added. This image is computed, and the"
        " same for every network of this grid and head width. It compares a query with an equal key at each position,"
        " and shows what fraction of the attention score remains: 1 means all of it.",
    }
    caption = (
        "Each small map belongs to one patch of the image, and is drawn at its place. Colors show the similarity of"
        f" that patch's position to all others ({found.measure}; 1 is equal). {kinds[found.kind]}"
    )
    if found.kind == "learned" and min(found.values.shape[2:]) > 1:
        more = found.of_neighbors
        learned = "so the network has learned" if more > 0.1 else "so it has hardly learned yet"
        caption += f" Neighbors are {more:.2f} more similar than others, {learned} which are neighbors."
    return Panel("positions", "Similarity of positions", caption, lambda t: drawing.positions(found, t))


def _distance(found: AttentionDistance) -> Panel:
    near, far = np.nanmin(found.distance), np.nanmax(found.distance)
    kept = {
        "drop": "Only patches count: attention to other tokens is left out, and the rest is scaled to a sum of 1",
        "keep": "Weight on tokens other than patches counts as distance 0",
    }[found.prefix]
    caption = (
        "How far heads look. Each dot is one head. It shows the attention-weighted mean distance, in pixels, from a"
        f" patch to the patches that it attends to, over all patches of {found.images} images. Here heads lie between"
        f" {near:.1f} and {far:.1f} pixels. The dashed lines are for comparison: uniform attention to all patches"
        f" ({found.uniform:.1f} pixels), and only to a patch and its neighbors ({found.local:.1f} pixels). A head that"
        " attends only to its own patch is at 0. Dots spread from low to high in the first layers mean that some heads"
        f" work locally, as a convolution would, while others see the whole image at once. {kept}."
    )
    return Panel("distance", "Attention distance", caption, lambda t: drawing.distance(found, t))


def _entropy(found: AttentionDistance) -> Panel:
    share = found.entropy_share
    caption = (
        "How widely heads spread their attention, regardless of distance. 0 means all weight on one patch. The upper"
        f" dashed line (ln {found.keys} = {np.log(found.keys):.2f} nats) is uniform attention. Heads use"
        f" {np.nanmin(share):.0%} to {np.nanmax(share):.0%} of that range here. A head with a long distance and low"
        " entropy attends to a few distant patches. A head with a long distance and high entropy averages the image."
    )
    return Panel("entropy", "Attention entropy", caption, lambda t: drawing.entropy(found, t))


def _norms(found: TokenNorms) -> Panel:
    total = int(found.outliers.sum())
    if total:
        worst = int(found.outliers.argmax())
        outliers = (
            f"Here most are after layer {found.layers[worst]}: {int(found.outliers[worst]):,}, or"
            f" {found.outlier_share[worst]:.2%} of its patches."
        )
    else:
        outliers = "Here there are none."
    caption = (
        "Norms of tokens after each block: the box is the middle half of all patches, the thin line 5 to 95%."
        f" Dots are outliers: {found.rule}. Large networks with long training reuse a few background patches to store"
        " global information; such patches have huge norms and spoil attention maps. Register tokens take over that"
        f" role. {outliers}"
    )
    return Panel("norms", "Norms of tokens", caption, lambda t: drawing.norms(found, t))


def _likeness(found: Likeness) -> Panel:
    caption = (
        "Similarity of the layers' representations of the same images (1: equal up to rotation and scale;"
        " 0: unrelated). “in” is the input of the first block. Bright blocks are runs of layers that change little;"
        " a dark step is a layer that changes the representation. "
        f"{found.measure[0].upper()}{found.measure[1:]}, {found.images} images in batches of {found.batch}."
    )
    return Panel("likeness", "Similarity of layers (CKA)", caption, lambda t: drawing.likeness(found, t))


def _heads(found: HeadMaps, image: np.ndarray) -> Panel:
    rows = ", ".join(
        "the MAP head" if found.layers[i] == POOL else f"layer {found.layers[i]}"
        for i in drawing.drawn_layers(len(found.layers))
    )
    heads = found.values.shape[1]
    shown = f"{drawing.MAX_HEADS} of {heads} heads" if heads > drawing.MAX_HEADS else f"{heads} heads"
    caption = (
        f"Where {shown} look in one image, for {rows}: attention of {found.query} to each patch, each map scaled to"
        " its own brightest patch. Attention shows where information was routed, not why the network predicts its"
        f" class. On average {found.elsewhere.mean():.0%} of the attention is on other tokens than patches."
    )
    return Panel("heads", "Heads over an image", caption, lambda t: drawing.heads(found, image, t))


@dataclass(frozen=True, eq=False)
class Example:
    """Worked example of attention distance: one query on a grid of 3 × 3 patches of 16 pixels."""

    weights: np.ndarray
    """(3, 3): attention of the query in the upper left corner; the sum is 1."""
    pixels: np.ndarray
    """(3, 3): distance from the query's patch to each patch."""

    @property
    def products(self) -> np.ndarray:
        """(3, 3): weights × distances."""
        return self.weights * self.pixels

    @property
    def distance(self) -> float:
        """Sum of the products: the attention distance of the query."""
        return float(self.products.sum())


def worked_example() -> Example:
    """Example of the page."""
    weights = np.array([[0.4, 0.2, 0.0], [0.2, 0.1, 0.0], [0.0, 0.0, 0.1]])
    return Example(weights, patch_distances((3, 3), (16, 16))[0].double().numpy().reshape(3, 3))
