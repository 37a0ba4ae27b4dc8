"""Parts of a report that a task adds: a headline, and sections of tables, figures and images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitral.evaluation.figures import Plot


@dataclass(frozen=True)
class Headline:
    """The main result."""

    title: str
    value: str
    note: str


@dataclass(frozen=True)
class Grid:
    """A table: the first column names its rows, the others are numbers."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    shades: Sequence[Sequence[float]] = ()
    """Opacity of the color behind each cell but the first, from 0 to 1; empty for none."""


@dataclass(frozen=True, eq=False)
class Example:
    """An image, uint8 (H, W, C), with a caption and its name."""

    image: np.ndarray
    caption: str
    name: str


@dataclass(frozen=True, eq=False)
class Section:
    """A section of the page."""

    key: str
    """Anchor of the section."""
    title: str
    note: str = ""
    grids: Sequence[Grid] = ()
    plots: Sequence[Plot] = ()
    examples: Sequence[Example] = ()
