"""What a report shows of the inside of a network: what it looked at where it was most wrongly sure, and Figure 7."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vitral.data import Split
from vitral.errors import VitralError
from vitral.evaluation import figures
from vitral.evaluation.figures import Plot
from vitral.evaluation.report import LookedAt, Mistake
from vitral.explanation.drawing import enlarged
from vitral.explanation.drawing_inspect import Theme
from vitral.explanation.explain import default_method, explain
from vitral.explanation.figure7 import attention_distance, patch_filters, position_similarity
from vitral.explanation.inspect import Inspection
from vitral.explanation.methods import METHODS
from vitral.explanation.methods.method import grid_of
from vitral.model import ViT
from vitral.predict import Predictor

MISTAKES = 12
"""Pictures that are explained."""
_SHOWN = 96  # pictures that a report may show
SAMPLE = 32
"""Pictures over which attention distance is averaged; the paper takes 128, which `vitral inspect` does, too."""

_FLOPS = {"cpu": 5e11}
_FLOPS_ELSEWHERE = 5e13
"""What either part may cost: some seconds. Counted, not timed, so that the same run gives the same page."""
_SIDE = 160  # pixels
_PANELS = ("filters", "positions", "distance")
_ON_PAGE = Theme(figures.INK, figures.MUTED, figures.LINE, figures.FIRST, figures.SECOND)


@dataclass(frozen=True, eq=False)
class Looks:
    """The parts of `ReportContent` that are made here."""

    looked_at: Sequence[LookedAt] = ()
    looked_note: str = ""
    inside: Sequence[Plot] = ()
    inside_note: str = ""


def confident_mistakes(probabilities: np.ndarray, split: Split, classes: tuple[str, ...]) -> list[Mistake]:
    """The mistakes that the network is surest of, with their pictures, surest first."""
    predicted, confidence = probabilities.argmax(1), probabilities.max(1)
    wrong = np.flatnonzero(predicted != split.labels)
    return [
        Mistake(
            picture=split.image(int(i), 3),
            name=split.names[int(i)],
            label=classes[split.labels[i]],
            predicted=classes[predicted[i]],
            confidence=float(confidence[i]),
        )
        for i in wrong[np.argsort(-confidence[wrong], kind="stable")][:_SHOWN]
    ]


def look_inside(predictor: Predictor, mistakes: Sequence[Mistake], pictures: Split, flops: int) -> Looks:
    """Maps for the most confident mistakes and the panels of Figure 7, at the cost of seconds; `flops` are of one
    picture. Nothing for a network without attention, and less, with a note, for a large one. Never an error: a report
    is worth more than its ornaments.
    """
    if not isinstance(predictor.model, ViT):
        return Looks()
    budget = _FLOPS.get(predictor.machine.device.type, _FLOPS_ELSEWHERE) / max(1, flops)
    try:
        looked_at, looked_note = _mistakes(predictor, mistakes, budget)
    except VitralError as error:
        looked_at, looked_note = [], f"Could not be drawn: {error.what}."
    try:
        inside, inside_note = _figure7(predictor, pictures, min(SAMPLE, int(budget)))
    except VitralError as error:
        inside, inside_note = [], f"Could not be drawn: {error.what}."
    return Looks(looked_at, looked_note, inside, inside_note)


def _mistakes(predictor: Predictor, mistakes: Sequence[Mistake], forwards: float) -> tuple[list[LookedAt], str]:
    """Maps of as many mistakes as so many forward passes allow."""
    if not mistakes:
        return [], ""
    method = METHODS[default_method(predictor.model)]
    rows, columns = grid_of(predictor.model, torch.empty(1, 1, *predictor.preprocessing.image_size, device="meta"))
    count = min(MISTAKES, int(forwards / method.passes(rows * columns)))
    if count < 1:
        return [], "The network is too large to be explained here within seconds."
    found, signed = [], False
    for mistake in mistakes[:count]:
        answer, truth = predictor.classes.index(mistake.predicted), predictor.classes.index(mistake.label)
        classes = [answer] if method.routing else [answer, truth]
        maps = explain(predictor, [mistake.picture], classes, method=method.name)
        signed |= any(bool((one.values < 0).any()) for one in maps)
        drawn = [(one.label, one.probability, np.asarray(one.overlay(_SIDE))) for one in maps]
        seen = np.asarray(enlarged(maps[0].image, _SIDE))
        found.append(LookedAt(seen, drawn, mistake.name, mistake.label, mistake.predicted))
    colours = "Red speaks for the class, blue against it." if signed else "The brighter, the more."
    routing = " It shows where information was routed, not why this class." if method.routing else ""
    note = f"The most confident mistakes, by {method.title}.{routing} {colours}"
    return found, note


def _figure7(predictor: Predictor, pictures: Split, count: int) -> tuple[list[Plot], str]:
    network, attention, note = predictor.model, None, ""
    if count:
        indices = np.unique(np.linspace(0, len(pictures) - 1, min(count, len(pictures))).round().astype(int))
        channels, geometry = predictor.preprocessing.channels, predictor.preprocessing.geometry
        images = torch.stack([geometry(pictures.image(int(index), channels)) for index in indices])
        parameter = next(network.parameters())
        images = predictor.preprocessing.standardise(images.to(parameter.device)).to(parameter.dtype)
        attention = attention_distance(network, images)
        note = f"Attention distance is over {len(images)} of these pictures."
    found = Inspection("", {}, patch_filters(network), position_similarity(network, 32), attention)
    panels = [panel for panel in found.panels() if panel.name in _PANELS]
    drawn = [(one, figures._inline(one.draw(_ON_PAGE), f"inside-{one.name}")) for one in panels]
    return [Plot(one.title, svg, one.caption) for one, svg in drawn], note
