"""Format numbers for pages."""

from __future__ import annotations

import re

from vitral import wording


def percent(fraction: float, digits: int = 1) -> str:
    return f"{100 * fraction:.{digits}f}%"


def amount(value: object) -> str:
    """Format a cell of the layer table; empty for 0 and for unknown values."""
    return compact(value) if isinstance(value, int | float) and value else ""


def shape(sizes: object) -> str:
    """Format a shape: [1, 65, 384] → "1 × 65 × 384"."""
    return " × ".join(map(str, sizes)) if isinstance(sizes, list | tuple) else str(sizes or "")


def compact(number: float) -> str:
    """Format a large number: 86567656 → "86.6 M"."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return (
                f"{number / size:.3g}\u202f{letter}" if number / size < 999.5 else f"{number / size:.0f}\u202f{letter}"
            )
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """3725 → "1 h 2 min", with narrow spaces that do not break."""
    return re.sub(r"(?<=\d) ", "\u202f", wording.duration(seconds))
