"""Spellings of other programs, for every format of tables and shards: missing values, lists, whole numbers, accents."""

from __future__ import annotations

import ast
import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterable

from vitral.wording import count, some

_MISSING = frozenset(
    ("", "nan", "NaN", "NAN", "<NA>", "NA", "N/A", "n/a", "#N/A", "NaT", "None", "NULL", "Null", "null")
)
_WHOLE = re.compile(r"(-?\d+)\.0+")
_LONGEST_LIST = 1 << 16


def is_missing(cell: str, *, hidden: bool = False) -> bool:
    """True for a missing value, as pandas, R, SQL and Python write it; with `hidden`, for the class -1, too."""
    return cell in _MISSING or (hidden and whole(cell) == "-1")


def whole(cell: str) -> str:
    """Return a whole number that pandas wrote as a fraction, "3.0", without it; other cells as they are."""
    found = _WHOLE.fullmatch(cell)
    return found[1] if found else cell


def listed(cell: str) -> list[str] | None:
    """Return the labels of a list as Python or JSON prints it, "['cat', 'dog']"; None for any other cell."""
    if not (cell.startswith("[") and cell.endswith("]")) or len(cell) > _LONGEST_LIST:
        return None
    try:
        found = ast.literal_eval(cell)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    texts = [one for one in found if isinstance(one, str | int)]
    return [str(one) for one in texts] if len(texts) == len(found) else None


def nfc(text: str) -> str:
    """Return a name with composed letters: archives of a Mac hold "é" as two characters."""
    return unicodedata.normalize("NFC", text)


def by_composed(names: Iterable[str]) -> dict[str, list[str]]:
    """Composed name → the names, of those that are not ASCII."""
    found = defaultdict[str, list[str]](list)
    for name in names:
        if not name.isascii():
            found[nfc(name)].append(name)
    return dict(found)


def respelled_note(where: str, names: Collection[str]) -> str:
    """Return a note on names whose files are found in another form of Unicode."""
    are = "is" if len(names) == 1 else "are"
    return (
        f"{count(len(names), 'name')} of {where} {are} written in another form of Unicode than the files: {some(names)}"
    )
