"""The pages of a comparison and of a study: one self-contained file each."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Template

from vitral.atomic import replacing
from vitral.data.dataset import spread
from vitral.evaluation import figures
from vitral.evaluation.pages import environment, finished, write_page
from vitral.pretraining.methods import command
from vitral.studies.comparison import Comparison
from vitral.studies.conclusions import conclusions
from vitral.studies.drawing import in_print, on_page
from vitral.studies.paired import Difference
from vitral.studies.results import Results
from vitral.studies.seeds import SeedDifference
from vitral.studies.study import StudyFolder, shown

_SHOWN, _SIDE = 12, 96
_CHANNELS = 3


def write_comparison(path: Path, comparison: Comparison, command: str) -> None:
    """Write the page, with the images that only one network classifies correctly; atomically."""
    text = _template("comparison.html.jinja").render(
        comparison=comparison,
        command=command,
        conclusion=comparison.conclusion(),
        only=[_only(comparison, place) for place in range(len(comparison.contenders))],
        scale=_scale(comparison.differences),
    )
    _write(path, text)


def write_study(place: StudyFolder, results: Results) -> None:
    """Write the page of a study and its figure for a paper; atomically."""
    study = results.study
    text = _template("study.html.jinja").render(
        study=study,
        results=results,
        title=study.title or study.design.title,
        sentences=conclusions(results),
        plots=on_page(results),
        figure_title=study.design.figure[0],
        figure_note=study.design.figure[1],
        scale=_scale(results.differences),
        command=f"{study.command} --out {shlex.quote(str(place.path))}",
        winner=command(results.best.cell.options) if study.design.searches and results.best else "",
    )
    _write(place.page, text)
    if drawn := in_print(results):
        for path, content in zip((place.png, place.svg), drawn, strict=True):
            with replacing(path) as temporary:
                temporary.write_bytes(content)


def _template(name: str) -> Template:
    pages = environment(__package__)
    pages.filters.update(points=points, p_value=p_value, on_axis=_on_axis, shown=shown)
    return pages.get_template(name)


def _write(path: Path, text: str) -> None:
    write_page(path, finished(text))


def points(difference: float) -> str:
    """0.0213 → "+2.13"."""
    return f"{100 * difference:+.2f}".replace("-", "−")


def p_value(p: float) -> str:
    """As journals print it: 0.0213 → "0.021", 3e-7 → "< 0.001"."""
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def _on_axis(difference: float, scale: tuple[float, float]) -> str:
    low, high = scale
    return f"{6 + 188 * (difference - low) / max(high - low, 1e-9):.1f}"


def _only(comparison: Comparison, place: int) -> dict[str, Any]:
    """Return the images that only this contender classifies correctly, with the predictions of the others."""
    contender, images = comparison.contenders[place], comparison.images
    numbers = comparison.only_right(place)
    others = [one for k, one in enumerate(comparison.contenders) if k != place]
    shown = [
        {
            "image": figures.embedded(images.image(int(i), _CHANNELS), _SIDE),
            "name": images.names[int(i)],
            "label": contender.predicted[int(i)],
            "others": [(other.name, other.predicted[int(i)]) for other in others],
        }
        for i in numbers[spread(len(numbers), _SHOWN)]
    ]
    return {"name": contender.name, "count": len(numbers), "shown": shown, "left_out": max(0, len(numbers) - _SHOWN)}


def _scale(differences: Sequence[Difference] | Sequence[SeedDifference]) -> tuple[float, float]:
    """The range of the differences' axis: symmetric, and as wide as the widest interval."""
    most = max((abs(bound) for one in differences for bound in one.interval), default=0.0)
    return -most, most
