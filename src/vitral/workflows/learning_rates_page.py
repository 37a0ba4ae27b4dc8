"""The curve of a range test: on a terminal, as a page, as a PNG."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from vitral.atomic import replacing, write_text
from vitral.drawing import FONT, dress, png
from vitral.errors import RunError
from vitral.evaluation import figures
from vitral.evaluation.figures import FIRST, INK, LINE, MUTED, SECOND, Plot
from vitral.evaluation.pages import environment, finished, write_page
from vitral.workflows.learning_rates import RULE, RangeTest

PAGE, PNG, JSON = "learning-rate.html", "learning-rate.png", "learning-rate.json"
_PRINTED = {INK: "#000000", MUTED: "#404040", LINE: "#dddddd", FIRST: "#0072b2", SECOND: "#d55e00"}
_COLUMNS = 50
_BARS = "▁▂▃▄▅▆▇█"


def check_free(folder: Path) -> None:
    """Raise `RunError` unless the folder is missing, empty or of an earlier range test."""
    if folder.exists() and not (folder / JSON).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(
            "this folder has other files",
            where=folder,
            why="it is of no range test",
            hint="choose another folder with --out",
        )


def write(folder: Path, test: RangeTest, command: str) -> None:
    """Write page, PNG and JSON, each atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    alt = f"Loss over {len(test.rates)} learning rates, from {test.averaged[0]:.3g}, lowest {test.averaged.min():.3g}."
    figure = Plot("Loss over learning rates", figures.inline(_draw(test), "rate"), f"{alt} {in_words(test)}")
    page = (
        environment(__package__)
        .get_template("learning_rates.html.jinja")
        .render(test=test, rule=RULE, figure=figure, command=command)
    )
    write_page(folder / PAGE, finished(page))
    drawn = _draw(test, printed=True)
    drawn.set_layout_engine("constrained")
    with replacing(folder / PNG) as temporary:
        temporary.write_bytes(png(drawn, 200))
    write_text(folder / JSON, json.dumps(test.to_json(), indent=2) + "\n")


def in_words(test: RangeTest) -> str:
    """State the suggested rate and its rule in a sentence."""
    if test.suggested is None:
        return (
            "No rate is suggested, because the averaged loss falls over too few steps, or not at all. "
            "More images, or a smaller --batch-size, give more to measure."
        )
    return f"Suggested: --lr {test.suggested:g}, {RULE} (the plan: {test.planned:g}; lowest at {test.lowest:.2g})."


def on_terminal(test: RangeTest) -> list[str]:
    """Return the averaged loss as a line of bars, with the suggested rate marked below."""
    at = np.linspace(0, len(test.rates) - 1, min(_COLUMNS, len(test.rates))).round().astype(int)
    values = test.averaged[at]
    low, high = float(values.min()), float(values.max())
    heights = ((values - low) / max(high - low, 1e-12) * (len(_BARS) - 1)).round().astype(int)
    ends = [f"{rate * test.scale:.2g}" for rate in (test.rates[0], test.rates[-1])]
    lines = [f"loss {low:.3g} to {high:.3g}", "".join(_BARS[k] for k in heights)]
    if test.suggested is not None:
        place = int(np.abs(np.log(test.rates[at] * test.scale / test.suggested)).argmin())
        lines.append(" " * place + "↑")
    return [*lines, ends[0] + ends[1].rjust(max(1, len(at) - len(ends[0]))) + "  learning rate"]


def _draw(test: RangeTest, printed: bool = False) -> Figure:
    color: Callable[[str], str] = _PRINTED.__getitem__ if printed else str
    drawn = Figure(figsize=(7.2, 4.0))
    axes = drawn.subplots()
    rates = test.rates * test.scale
    axes.plot(rates, test.losses, color=color(MUTED), linewidth=0.8, label="loss of a step")
    axes.plot(rates, test.averaged, color=color(FIRST), linewidth=2, label="averaged")
    axes.axvline(test.planned, color=color(INK), linewidth=1.2, linestyle=(0, (1, 2)), label=f"plan, {test.planned:g}")
    if test.suggested is not None:
        axes.axvline(test.suggested, color=color(SECOND), linewidth=1.6, label=f"suggested, {test.suggested:g}")
    _dress(axes, test, color)
    return drawn


def _dress(axes: Axes, test: RangeTest, color: Callable[[str], str]) -> None:
    dress(axes, "loss", color(MUTED), color(LINE))
    axes.tick_params(axis="x", length=3)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("learning rate", fontfamily=FONT, fontsize=10.5, color=color(MUTED))
    low, start = float(test.averaged.min()), float(max(test.averaged[0], test.losses[0]))
    axes.set_ylim(low - 0.15 * (start - low), start + 0.5 * (start - low))
    axes.legend(loc="best", frameon=False, labelcolor=color(INK), prop={"family": FONT, "size": 10})
