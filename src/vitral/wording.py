r"""Words of messages, tables and pages.

shown("a\nb.png")            a\nb.png on one line         some("abcde")          a, b, c and 2 more
count(2, "image")            2 images                     duration(3725)         1 h 2 min
flag("lr_batch")             --lr-batch                   sorted(…, key=natural) 2 before 10
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_ACTS = "\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_UNPRINTABLE = re.compile(f"[\x00-\x08{_ACTS}]")
_UNSHOWN = re.compile(f"[\x00-\x0a{_ACTS}]")


def printable(text: str) -> str:
    """Escape invisible characters that a terminal acts on: control characters except line breaks and tabs, marks that
    change the text direction, and bytes of file names that are not text.
    """
    return _UNPRINTABLE.sub(as_escape, text)


def shown(name: str) -> str:
    """Escape as `printable`, with line breaks and tabs, for a name on one line.

    Joiners (U+200C, U+200D) stay: they are ordinary letters of Persian and Malayalam, and join emoji.
    """
    return name if name.isprintable() else _UNSHOWN.sub(as_escape, name)


def as_escape(found: re.Match[str]) -> str:
    r"""Return the escape of a character, and of a byte that is no text as Python writes bytes: `\xff`."""
    if "\udc80" <= found[0] <= "\udcff":
        return f"\\x{ord(found[0]) & 0xFF:02x}"
    return found[0].encode("unicode_escape").decode("ascii")


def some(items: Iterable[object], limit: int = 3) -> str:
    """Abbreviate a list for a message: "a, b, c and 9 more"."""
    texts = [shown(str(item)) for item in items]
    rest = f" and {len(texts) - limit:,} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + rest


def either(items: Iterable[str]) -> str:
    """List alternatives: "a, b or c"."""
    *others, last = items
    return f"{', '.join(others)} or {last}" if others else last


def natural(text: str) -> tuple[object, ...]:
    """Sort key that puts "2" before "10" and ignores case."""
    # Digits compare by length, then as text: int() refuses more than 4,300 of them, and a name may hold more.
    parts = re.split(r"([0-9]+)", text.casefold())
    return (*((len(p.lstrip("0")), p.lstrip("0")) if i % 2 else p for i, p in enumerate(parts)), text)


def duration(seconds: float) -> str:
    """3725 → "1 h 2 min", 105 → "1 min 45 s", 3.2 → "3.2 s"."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def count(number: float, singular: str = "", plural: str = "") -> str:
    """Format a count: 1234 → "1,234"; with words, "1 image", "2 images"."""
    word = singular if number == 1 else plural or f"{singular}s"
    return f"{number:,} {word}" if singular else f"{number:,}"


def in_groups(images: int, groups: int, kind: str = "image") -> str:
    """Count images, and their groups if these are fewer: "400 images in 80 groups"."""
    return count(images, kind) if groups >= images else f"{count(images, kind)} in {count(groups, 'group')}"


def memory_size(count: float) -> str:
    """Format bytes of memory or disk: "3.5 GiB", "120 MiB", "12 KiB"."""
    if count >= 2**30:
        return f"{count / 2**30:,.1f} GiB"
    return f"{count / 2**20:,.0f} MiB" if count >= 2**20 else f"{count / 2**10:,.0f} KiB"


def flag(name: str) -> str:
    """Return the flag of an option: `--lr-batch` for `lr_batch`."""
    return f"--{name.replace('_', '-')}"
