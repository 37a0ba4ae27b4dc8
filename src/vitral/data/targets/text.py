"""One text an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vitral.data.targets.columns import LabelColumns, cell_of
from vitral.data.targets.target import Labeling, Targets
from vitral.data.tokens import PADDING, check_characters, composed, decode, encode, vocabulary
from vitral.errors import DataError
from vitral.wording import shown

TEXTS = ("text", "transcription", "transcript", "caption")
"""Names of a column of texts, in lower case, which `--task text` reads."""
TEXT_COLUMNS = (*TEXTS, "label")
"""Names of the column that `--task text` reads, in lower case; the first in the table counts."""
LONGEST_TEXT = 1_000
"""Most characters of a text; a longer one is a paragraph, or a mistake."""


@dataclass(frozen=True)
class Text(Targets):
    """One text an image: tokens (n, length) int64, each text with its end and padding; the names are the tokens'."""

    task = "text"
    sequence = True
    column, strata_noun = "text", "short and long texts"

    def describe(self, label: np.ndarray, names: Sequence[str]) -> str:
        return decode(label.tolist(), names)

    def reader(self, columns: LabelColumns, wanted: Labeling) -> OneText | None:
        lower = [name.lower() for name in columns.header]
        known = next((lower.index(name) for name in TEXT_COLUMNS if name in lower), None)
        column = columns.label if columns.named else known
        return None if column is None else OneText(column)

    def counts(self, labels: np.ndarray, names: int) -> np.ndarray:
        """Images whose text has the token."""
        return np.array([(labels == token).any(axis=1).sum() for token in range(names)], np.int64)

    def strata(self, labels: np.ndarray, names: int) -> np.ndarray:
        """By length, as far as the names go: splits have about the same share of short and of long texts."""
        return np.minimum((labels != PADDING).sum(axis=1), names) - 1

    def renumbered(self, labels: np.ndarray, place: Sequence[int | None], names: int) -> np.ndarray:
        return np.array([PADDING if index is None else index for index in place])[labels]

    def check(self, names: Sequence[str], source: str) -> None:
        check_characters(names, source)


TEXT = Text()


@dataclass(frozen=True)
class OneText:
    """A column with a text, or texts from elsewhere."""

    column: int = 0
    reason: str = "the images are lines of text"
    targets: Targets = TEXT
    missing: str = "text"

    def parse(self, row: Sequence[str]) -> str | None:
        return composed(cell_of(row, self.column)) or None

    def build(self, labels: Mapping[str, list[str]], where: str) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
        every = [text for own in labels.values() for text in own]
        longest = max(map(len, every), default=0)
        if longest > LONGEST_TEXT:
            why = f"“{shown(max(every, key=len)[:40])}…” has {longest:,} characters, and the most is {LONGEST_TEXT:,}"
            raise DataError("a text is too long", where=where, why=why, hint="one line of text in each image")
        names = vocabulary(every)
        return names, {split: encode(own, names, longest + 1) for split, own in labels.items()}
