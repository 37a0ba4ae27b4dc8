"""Figures of a report about the network itself: attributions for the most confident errors, and Figure 7."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from vitral.data import Split
from vitral.data.dataset import spread
from vitral.errors import VitralError
from vitral.evaluation import figures
from vitral.evaluation.figures import Plot
from vitral.evaluation.report import ExplainedMistake, Mistake
from vitral.explanation.drawing import enlarged
from vitral.explanation.explain import explain
from vitral.explanation.inspect.drawing import Theme
from vitral.explanation.inspect.filters import patch_filters
from vitral.explanation.inspect.measure import attention_distance
from vitral.explanation.inspect.panels import Inspection
from vitral.explanation.inspect.positions import position_similarity
from vitral.explanation.methods import METHODS
from vitral.explanation.methods.method import grid_of
from vitral.explanation.methods.select import default_method
from vitral.inference.predictor import Predictor
from vitral.model import ViT

T = TypeVar("T")

MISTAKES = 12
"""Most images to explain."""
_MOST_SHOWN = 96  # images in a report
SAMPLE = 32
"""Images over which attention distance is averaged; the paper and `vitral inspect` use 128."""

_FLOPS = {"cpu": 5e11}
_FLOPS_ELSEWHERE = 5e13
"""Compute budget of each part, some seconds. In FLOPs rather than time, so that the same run gives the same page."""
_SIDE = 160  # pixels
_PANELS = ("filters", "positions", "distance")
_ON_PAGE = Theme(figures.INK, figures.MUTED, figures.LINE, figures.FIRST, figures.SECOND)


@dataclass(frozen=True, eq=False)
class ReportFigures:
    """The parts of `ReportContent` that this module creates."""

    explained: Sequence[ExplainedMistake] = ()
    explained_note: str = ""
    inside: Sequence[Plot] = ()
    inside_note: str = ""


def confident_mistakes(probabilities: np.ndarray, split: Split, classes: tuple[str, ...]) -> list[Mistake]:
    """Return the most confident errors with their images, most confident first."""
    predicted, confidence = probabilities.argmax(1), probabilities.max(1)
    wrong = np.flatnonzero(predicted != split.labels)
    return [
        Mistake(
            image=split.image(int(i), 3),
            name=split.names[int(i)],
            label=classes[split.labels[i]],
            predicted=classes[predicted[i]],
            confidence=float(confidence[i]),
        )
        for i in wrong[np.argsort(-confidence[wrong], kind="stable")][:_MOST_SHOWN]
    ]


def draw_figures(predictor: Predictor, mistakes: Sequence[Mistake], images: Split, flops: int) -> ReportFigures:
    """Draw heat maps for the most confident errors and the panels of Figure 7, within some seconds.

    `flops` is for one image. Returns nothing for a network without attention, and less, with a note, for a large one.
    Errors become notes, so that they never prevent a report.
    """
    if not isinstance(predictor.network, ViT):
        return ReportFigures()
    budget = _FLOPS.get(predictor.machine.device.type, _FLOPS_ELSEWHERE) / max(1, flops)
    explained, explained_note = _drawn(lambda: _mistakes(predictor, mistakes, budget))
    count = 0 if predictor.preprocessing.native else min(SAMPLE, int(budget))
    inside, inside_note = _drawn(lambda: _figure7(predictor, images, count))
    return ReportFigures(explained, explained_note, inside, inside_note)


def _drawn(draw: Callable[[], tuple[list[T], str]]) -> tuple[list[T], str]:
    """Return drawings with their note; of a failing one, no drawings and the reason."""
    try:
        return draw()
    except Exception as error:  # of any kind: one figure must not cost the others
        what = error.what if isinstance(error, VitralError) else f"{type(error).__name__}: {error}"
        return [], f"Could not be drawn: {what}."


_ROUTING = "This method shows where information was routed, not why the class was predicted."


def _mistakes(predictor: Predictor, mistakes: Sequence[Mistake], forwards: float) -> tuple[list[ExplainedMistake], str]:
    """Explain as many errors as the number of forward passes allows."""
    if not mistakes:
        return [], ""
    method = METHODS[default_method(predictor.network)]
    rows, columns = grid_of(predictor.network, torch.empty(1, 1, *predictor.preprocessing.image_size, device="meta"))
    count = min(MISTAKES, int(forwards / method.passes(rows * columns)))
    if count < 1:
        return [], "There are no heat maps, because drawing them would take more than a few seconds with this network."
    explained, signed = [], False
    for mistake in mistakes[:count]:
        predicted, truth = predictor.classes.index(mistake.predicted), predictor.classes.index(mistake.label)
        classes = [predicted] if method.routing else [predicted, truth]
        maps = explain(predictor, [mistake.image], classes, method=method.name)
        signed |= any(bool((one.values < 0).any()) for one in maps)
        drawn = [(one.label, one.probability, np.asarray(one.overlay(_SIDE))) for one in maps]
        seen = np.asarray(enlarged(maps[0].image, _SIDE))
        explained.append(ExplainedMistake(seen, drawn, mistake.name, mistake.label, mistake.predicted))
    colors = "Red supports the class, blue contradicts it." if signed else "Brighter parts matter more."
    routing = f" {_ROUTING}" if method.routing else ""
    note = f"Heat maps of the most confident errors, computed with {method.title}.{routing} {colors}"
    return explained, note


def _figure7(predictor: Predictor, split: Split, count: int) -> tuple[list[Plot], str]:
    network, attention, note = predictor.network, None, ""
    if count:
        channels, geometry = predictor.preprocessing.channels, predictor.preprocessing.geometry
        images = torch.stack([geometry(split.image(int(index), channels)) for index in spread(len(split), count)])
        parameter = next(network.parameters())
        images = predictor.preprocessing.standardize(images.to(parameter.device)).to(parameter.dtype)
        attention = attention_distance(network, images)
        note = f"Attention distance is averaged over {len(images)} of the images that the report measures."
    inspection = Inspection("", {}, patch_filters(network), position_similarity(network, 32), attention)
    panels = [panel for panel in inspection.panels() if panel.name in _PANELS]
    drawn = [(one, figures.inline(one.draw(_ON_PAGE), f"inside-{one.name}")) for one in panels]
    return [Plot(one.title, svg, one.caption) for one, svg in drawn], note
