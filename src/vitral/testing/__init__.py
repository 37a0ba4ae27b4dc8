"""Contracts of what a package `vitral-x` adds by entry points, as classes that its tests inherit and pytest collects.

    from vitral.testing import SourceContract

    class TestLetters(SourceContract):
        source = letters
        data = "letters:abc"

vitral's own entries are tested by the same classes and functions. Nothing here needs pytest itself.
"""

from __future__ import annotations

from vitral.testing.formats import Case, FormatContract, check_parity
from vitral.testing.methods import MethodContract, check_maps
from vitral.testing.sources import SourceContract
from vitral.testing.trackers import TrackerContract

__all__ = [
    "Case",
    "FormatContract",
    "MethodContract",
    "SourceContract",
    "TrackerContract",
    "check_maps",
    "check_parity",
]
