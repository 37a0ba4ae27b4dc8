"""Texts explained character by character: from images to a map for each character."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from vitral.errors import UsageError, unknown
from vitral.explanation.heatmap import Heatmap
from vitral.explanation.methods import METHODS, TEXT_METHODS, Method
from vitral.explanation.methods.method import quiet
from vitral.explanation.methods.select import Target, check_options
from vitral.explanation.subject import Subject
from vitral.inference.outputs.text import ReadText
from vitral.inference.predictor import Predictor
from vitral.model import EncoderDecoder

DEFAULT_FOR_TEXT = "cross-attention"


@dataclass(frozen=True, eq=False)
class TextExplanation:
    """A text read from an image, with the map of each character in order."""

    text: ReadText
    method: str
    maps: tuple[Heatmap, ...]

    def save(self, path: str | Path) -> Path:
        """Draw one panel a character to .png or .svg, or write the values as .json."""
        from vitral.explanation.text_drawing import save_text

        return save_text(self.text, self.maps, self.to_json(), path)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        characters = [
            {"character": one.label, "probability": one.probability, "values": one.values.tolist()} for one in self.maps
        ]
        entry = TEXT_METHODS[self.method]
        return {
            "image": self.text.name,
            "text": self.text.text,
            "confidence": self.text.confidence,
            "method": self.method,
            "characters": characters,
            "note": entry.note,
        }


def text_method(name: str | None) -> Method:
    """Look up a method that explains texts; `UsageError` for one that does not, with one that does."""
    if name in METHODS:
        why = "it attributes one output of one pass; a text is many passes of a decoder"
        raise UsageError(f"'{name}' does not explain texts", why=why, hint=f"--method {DEFAULT_FOR_TEXT}")
    if name is not None and name not in TEXT_METHODS:
        raise unknown("method", name, TEXT_METHODS, hint=f"--method {DEFAULT_FOR_TEXT}")
    return TEXT_METHODS[name or DEFAULT_FOR_TEXT]


def refuse_for_text(targets: Sequence[Target], *, check: bool, compare: bool = False) -> None:
    """Raise `UsageError` for options that are defined for classes and numbers only."""
    asked = {"a target": any(one is not None for one in targets), "a comparison": compare, "a check": check}
    if bad := [name for name, on in asked.items() if on]:
        why = "every character of the text is explained, by one method"
        raise UsageError(f"{bad[0]} is not defined for texts", why=why, hint="leave it out")


def explain_texts(
    predictor: Predictor, images: Any, method: str | None = None, *, batch_size: int = 8, **options: Any
) -> list[TextExplanation]:
    """Explain the text of each image. `images`, `method` and `options` are those of `vitral.explain`."""
    entry = text_method(method)
    check_options(entry, options)
    prepared, _, names = Subject(predictor.network, predictor.classes, predictor).images(images)
    found: list[TextExplanation] = []
    for start in range(0, len(prepared), batch_size):
        part = slice(start, start + batch_size)
        found += explain_prepared(predictor, prepared[part], names[part], entry, **options)
    return found


def explain_prepared(
    predictor: Predictor,
    images: Tensor,
    names: Sequence[str],
    entry: Method,
    rows: Tensor | None = None,
    **options: object,
) -> list[TextExplanation]:
    """Explain the texts of prepared images (B, C, H, W) uint8: the texts that the network reads, or the texts in its
    `rows`."""
    network = cast(EncoderDecoder, predictor.network)
    batch = Subject(network, predictor.classes, predictor).standardized(images)
    with quiet(network):
        with torch.no_grad():
            rows = network(batch).float() if rows is None else rows.to(batch.device)
        texts = [predictor.output.prediction(name, row) for name, row in zip(names, rows.cpu().numpy(), strict=True)]
        tokens = rows.unflatten(1, (2, -1))[:, 0].long()[:, : max(len(text.characters) for text in texts)]
        maps = entry.run(network, batch, tokens, **options).values if tokens.shape[1] else rows[:, :0].cpu()
    pixels = [image.permute(1, 2, 0).cpu().numpy() for image in images]
    return [
        TextExplanation(text, entry.name, _heatmaps(text, own.cpu(), map_, entry, image))
        for text, own, map_, image in zip(texts, tokens, maps, pixels, strict=True)
    ]


def _heatmaps(text: ReadText, tokens: Tensor, maps: Tensor, entry: Method, pixels: np.ndarray) -> tuple[Heatmap, ...]:
    """Return the maps (T, rows, columns) of a text as heat maps, one per character."""
    return tuple(
        Heatmap(values.numpy().astype(np.float32), int(token), character, probability, entry.name, pixels, text.name)
        for (character, probability), token, values in zip(text.characters, tokens, maps, strict=False)
    )
