"""Draw with matplotlib in one way: its own font, axes without a frame, files whose bytes are reproducible."""

from __future__ import annotations

import io
import re

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

FONT = "DejaVu Sans"  # comes with matplotlib: the same letters on every machine


def dress(axes: Axes, ylabel: str, muted: str, line: str) -> None:
    """Draw horizontal grid lines and the lower spine alone, and name the y axis."""
    axes.set_facecolor("none")
    axes.set_axisbelow(True)
    axes.grid(visible=True, axis="y", color=line, linewidth=0.8, linestyle="solid")
    axes.grid(visible=False, axis="x")
    for side, spine in axes.spines.items():
        spine.set(visible=side == "bottom", color=muted, linewidth=0.8)
    axes.tick_params(which="both", colors=muted, labelsize=10, labelfontfamily=FONT, length=0, pad=5)
    axes.set_ylabel(ylabel, fontfamily=FONT, fontsize=10.5, color=muted)


def svg(figure: Figure, prefix: str = "v") -> str:
    """Return a figure as SVG. matplotlib's ids are random: they become `prefix` and a number."""
    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    ids = {name: f"{prefix}{i}" for i, name in enumerate(dict.fromkeys(re.findall(r'\bid="([^"]*)"', text)))}
    text = re.sub(r'\bid="([^"]*)"', lambda m: f'id="{ids[m[1]]}"', text)
    text = re.sub(r'href="#([^"]*)"', lambda m: f'href="#{ids[m[1]]}"', text)
    return re.sub(r"url\(#([^)]*)\)", lambda m: f"url(#{ids[m[1]]})", text)


def png(figure: Figure, dpi: int) -> bytes:
    """Return a figure as PNG."""
    figure.set_dpi(dpi)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()
