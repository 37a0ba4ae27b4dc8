"""The glossary: terms of the field that pages and `--help` use, explained there. Its table is docs/glossary.md."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from importlib import resources


def terms_in(text: str) -> list[tuple[str, str]]:
    """Return the terms of the glossary that a text uses, each with its meaning."""
    return [(term, meaning) for term, meaning, pattern in _glossary() if pattern.search(text)]


def explained(terms: Iterable[str]) -> list[tuple[str, str]]:
    """Return terms of the glossary with their meanings. Raises `KeyError` for one that it does not have."""
    meanings = {term: meaning for term, meaning, _ in _glossary()}
    return [(term, meanings[term]) for term in terms]


@functools.cache
def _glossary() -> list[tuple[str, str, re.Pattern[str]]]:
    """Read the table. A term with a capital letter is a name; others may begin a sentence, or be plural."""
    found = []
    table = resources.files("vitral").joinpath("words.md").read_text("utf-8")
    for term, meaning in re.findall(r"^\| (.+?) \| (.+?) \|$", table, re.MULTILINE):
        meaning = re.sub(r": \[docs\]\(.*?\)$", "", meaning).replace("`", "").replace("*", "")
        names = [re.escape(name) for name in term.replace("`", "").split(", ")]
        flags = re.NOFLAG if any(map(str.isupper, term)) else re.IGNORECASE
        found.append((term.replace("`", ""), meaning, re.compile(rf"\b({'|'.join(names)})(s|es)?\b", flags)))
    return found[1:]
