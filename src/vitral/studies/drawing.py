"""The figure of a study: accuracy over data or compute with intervals over seeds, or the options in order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from vitral.drawing import FONT, dress, png, svg
from vitral.evaluation import figures
from vitral.evaluation.figures import INK, LINE, MUTED, Plot
from vitral.evaluation.page_numbers import compact
from vitral.studies.results import Group, Outcome, Results
from vitral.studies.spans import Span
from vitral.studies.study import shown

PAPER = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9")
"""Colors of series in print: Okabe and Ito's, the yellow darker."""
_ON_PAGE = tuple(f"#0a0a0{number}" for number in range(len(PAPER)))
"""Placeholders of the variables that the page defines for light and dark."""
_IN_PRINT = {INK: "#000000", MUTED: "#404040", LINE: "#dddddd", **dict(zip(_ON_PAGE, PAPER, strict=True))}
_MARKERS = "osD^vP"
_DASHES: tuple[str | tuple[int, tuple[float, ...]], ...] = ("solid", (0, (4, 2)), (0, (1, 1.5)))
_DPI = 200


@dataclass(frozen=True)
class _Series:
    label: str
    groups: list[Group]
    color: str
    marker: str
    dash: str | tuple[int, tuple[float, ...]]


def on_page(results: Results) -> list[Plot]:
    """Draw the figure for the page, in its colors; nothing without a finished run."""
    if not any(group.done for group in results.groups):
        return []
    text = figures.inline(_draw(results), "study")
    for number, color in enumerate(_ON_PAGE):
        text = text.replace(color, f"var(--series-{number})")
    return [Plot("", text, _in_words(results))]


def in_print(results: Results) -> tuple[bytes, bytes] | None:
    """Draw the figure for a paper, on white: PNG and SVG; None without a finished run."""
    if not any(group.done for group in results.groups):
        return None
    drawn = _draw(results)
    drawn.set_layout_engine("constrained")
    text = svg(drawn)
    for placeholder, color in _IN_PRINT.items():
        text = text.replace(placeholder, color)
    printed = _draw(results, _IN_PRINT.__getitem__)
    printed.set_layout_engine("constrained")
    return png(printed, _DPI), text.encode()


def _draw(results: Results, color: Callable[[str], str] = lambda name: name) -> Figure:
    return DRAWINGS[results.study.kind](results, color)


def _draw_data(results: Results, color: Callable[[str], str]) -> Figure:
    drawn = Figure(figsize=(7.6, 4.4))
    _draw_over(drawn.subplots(), results, "train_images", "training images", color)
    return drawn


def _draw_compute(results: Results, color: Callable[[str], str]) -> Figure:
    drawn = Figure(figsize=(10.4, 4.4))
    for axes, cost, title in zip(
        drawn.subplots(1, 2), ("flops", "seconds"), ("FLOPs of training", "seconds of training"), strict=True
    ):
        _draw_over(axes, results, cost, title, color)
        _draw_front(axes, results, cost, color)
        _legend(axes, color)
    return drawn


def _series(results: Results, x: str) -> list[_Series]:
    """Groups that differ by their x alone."""
    found: dict[str, list[Group]] = {}
    for group in results.groups:
        if group.accuracy and group.mean(x):
            found.setdefault(group.label(("fraction", "epochs")), []).append(group)
    return [
        _Series(
            label,
            sorted(groups, key=lambda one: one.mean(x) or 0),
            _ON_PAGE[k % len(PAPER)],
            _MARKERS[k % len(_MARKERS)],
            _DASHES[k // len(PAPER) % len(_DASHES)],
        )
        for k, (label, groups) in enumerate(found.items())
    ]


def _draw_over(axes: Axes, results: Results, x: str, title: str, color: Callable[[str], str]) -> None:
    for one in _series(results, x):
        places = [group.mean(x) or 0.0 for group in one.groups]
        means = [group.accuracy for group in one.groups if group.accuracy]
        low, high = ([mean.interval[end] for mean in means] for end in (0, 1))
        shade = color(one.color)
        if results.study.seeds > 1:
            axes.fill_between(places, low, high, color=shade, alpha=0.16, linewidth=0)
            axes.vlines(places, low, high, color=shade, linewidth=1.4)
        axes.plot(
            places,
            [mean.value for mean in means],
            color=shade,
            marker=one.marker,
            markersize=6,
            linewidth=2,
            linestyle=one.dash,
            label=one.label,
        )
    dress(axes, "accuracy", color(MUTED), color(LINE))
    axes.tick_params(axis="x", length=3)
    axes.set_xlabel(title, fontfamily=FONT, fontsize=10.5, color=color(MUTED))
    places = sorted({group.mean(x) or 0.0 for group in results.groups if group.accuracy and group.mean(x)})
    axes.set_xscale("log")
    images = x == "train_images"
    axes.xaxis.set_major_locator(FixedLocator(places) if images and len(places) <= 8 else LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if images else compact(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(figures._percent))
    _legend(axes, color)


def _draw_front(axes: Axes, results: Results, cost: str, color: Callable[[str], str]) -> None:
    front = results.front(cost)
    points = [(group.mean(cost) or 0.0, group.accuracy.value) for group in front if group.accuracy]
    if len(points) > 1:
        axes.step(
            *zip(*points, strict=True),
            where="post",
            color=color(INK),
            linewidth=1,
            linestyle=(0, (1, 2)),
            label="front of best",
            zorder=0,
        )


def _draw_options(results: Results, color: Callable[[str], str]) -> Figure:
    measured = [group for group in results.groups if group.accuracy]
    ranked = sorted(measured, key=lambda group: group.accuracy.value if group.accuracy else 0.0)
    drawn = Figure(figsize=(7.6, 1.1 + 0.36 * len(ranked)))
    axes = drawn.subplots()
    for row, group in enumerate(ranked):
        accuracy = group.accuracy
        assert accuracy is not None
        shade = color(_ON_PAGE[0])
        axes.hlines(row, *accuracy.interval, color=shade, linewidth=2)
        seeds = [one.accuracy or 0.0 for one in group.done]
        axes.plot(seeds, [row] * len(seeds), color=shade, marker="o", markersize=4, linestyle="", alpha=0.5)
        axes.plot([accuracy.value], [row], color=shade, marker="D", markersize=7, linestyle="")
    dress(axes, "", color(MUTED), color(LINE))
    axes.tick_params(axis="x", length=3)
    axes.grid(visible=True, axis="x", color=color(LINE), linewidth=0.8)
    axes.grid(visible=False, axis="y")
    axes.set_yticks(range(len(ranked)), [group.label() for group in ranked], color=color(INK))
    axes.set_ylim(-0.6, len(ranked) - 0.4)
    axes.set_xlabel("accuracy", fontfamily=FONT, fontsize=10.5, color=color(MUTED))
    axes.xaxis.set_major_formatter(FuncFormatter(figures._percent))
    return drawn


def _draw_search(results: Results, color: Callable[[str], str]) -> Figure:
    """Draw accuracy over trials with the best so far, and over each option."""
    names = results.study.factors
    rows = -(-len(names) // 3)
    drawn = Figure(figsize=(9.6, 2.9 * (1 + rows)))
    parts = drawn.add_gridspec(1 + rows, 3)
    measured = [one for one in results.outcomes if one.accuracy is not None]
    first = drawn.add_subplot(parts[0, :])
    _points(first, [(results.outcomes.index(one), one) for one in measured], color)
    best = list(itertools.accumulate((one.accuracy or 0.0 if one.done else 0.0 for one in measured), max))
    started = next((k for k, value in enumerate(best) if value > 0), len(best))
    where = [results.outcomes.index(one) for one in measured]
    first.step(where[started:], best[started:], where="post", color=color(_ON_PAGE[1]), linewidth=1.6)
    _label(first, "trial", color)
    first.xaxis.set_major_locator(MaxNLocator(integer=True))
    for number, name in enumerate(names):
        axes, values = drawn.add_subplot(parts[1 + number // 3, number % 3]), results.study.vary[name]
        if isinstance(values, Span):
            _points(axes, [(one.cell.factors[name], one) for one in measured], color)
            axes.set_xscale("log" if values.log else "linear")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if values.log else MaxNLocator(4))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        else:
            _points(axes, [(values.index(one.cell.factors[name]), one) for one in measured], color)
            axes.set_xticks(range(len(values)), [shown(one) for one in values])
            axes.set_xlim(-0.5, len(values) - 0.5)
        _label(axes, name, color)
    return drawn


def _points(axes: Axes, points: Sequence[tuple[float, Outcome]], color: Callable[[str], str]) -> None:
    """Draw trials: filled if they ran to their end, else hollow."""
    for done in (False, True):
        chosen = [(x, one.accuracy or 0.0) for x, one in points if one.done == done]
        if chosen:
            xs, ys = zip(*chosen, strict=True)
            shade = color(_ON_PAGE[0])
            axes.plot(
                xs, ys, color=shade, marker="o", markersize=5, linestyle="", markerfacecolor=shade if done else "none"
            )


def _label(axes: Axes, name: str, color: Callable[[str], str]) -> None:
    dress(axes, "accuracy", color(MUTED), color(LINE))
    axes.tick_params(axis="x", length=3)
    axes.set_xlabel(name, fontfamily=FONT, fontsize=10.5, color=color(MUTED))
    axes.yaxis.set_major_formatter(FuncFormatter(figures._percent))


def _legend(axes: Axes, color: Callable[[str], str]) -> None:
    axes.legend(loc="best", frameon=False, labelcolor=color(INK), prop={"family": FONT, "size": 10}, handlelength=2.4)


def _in_words(results: Results) -> str:
    if results.study.design.searches:
        each = [f"{one.cell.name}: {one.accuracy:.1%}" for one in results.ranked if one.accuracy is not None]
        return f"Validation accuracy. {'; '.join(each)}."
    groups: Sequence[Group] = [group for group in results.groups if group.accuracy]
    parts = []
    for group in groups:
        accuracy = group.accuracy
        assert accuracy is not None
        low, high = accuracy.interval
        interval = f" ({low:.1%} to {high:.1%})" if accuracy.seeds > 1 else ""
        parts.append(f"{group.label()}: {accuracy.value:.1%}{interval}")
    return f"Mean accuracy. {'; '.join(parts)}."


DRAWINGS: dict[str, Callable[[Results, Callable[[str], str]], Figure]] = {
    "data": _draw_data,
    "compute": _draw_compute,
    "options": _draw_options,
    "search": _draw_search,
}
"""Kind of a study → its figure."""
