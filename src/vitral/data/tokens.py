"""Text as tokens: a vocabulary of characters, and texts as rows of numbers.

A token is a character; three more stand for the start, the end, and the padding after it. Texts are in Unicode's
composed form (NFC), so that a letter with an accent is one character.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np

from vitral.errors import DataError

SPECIAL = ("<padding>", "<start>", "<end>")
"""Names of the first tokens: longer than a character, so that none of them is one."""
PADDING, START, END = range(3)


def composed(text: str) -> str:
    """The composed form of a text, without spaces at its ends."""
    return unicodedata.normalize("NFC", text).strip()


def vocabulary(texts: Iterable[str]) -> tuple[str, ...]:
    """Names of the tokens: the special ones, then every character of the texts, sorted."""
    return (*SPECIAL, *sorted(set().union(*texts)))


def encode(texts: Sequence[str], names: Sequence[str], length: int) -> np.ndarray:
    """Tokens (n, length) int64 of texts, each with its end and padding. Every character must be among `names`."""
    place = {name: number for number, name in enumerate(names)}
    rows = np.full((len(texts), length), PADDING, np.int64)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text) + 1] = [*(place[character] for character in text), END]
    return rows


def decode(tokens: Iterable[int], names: Sequence[str], joint: str = "") -> str:
    """The text of tokens up to their end; special tokens have no character. `joint` stands between two tokens."""
    found = []
    for token in map(int, tokens):
        if token == END:
            break
        if names[token] not in SPECIAL:
            found.append(names[token])
    return joint.join(found)


def check_characters(names: Sequence[str], source: str) -> None:
    """Raise `DataError` for a vocabulary without a character."""
    if len(names) <= len(SPECIAL):
        hint = "a text for each image: a column text, or cat.txt beside cat.png"
        raise DataError("there is no text", where=source, why="no character in any of the texts", hint=hint)
