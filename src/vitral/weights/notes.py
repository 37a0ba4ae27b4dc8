"""Notes on how weights were read. A plain string is for the report of a conversion; these kinds are shown always."""

from __future__ import annotations


class Caution(str):
    """A note on what was assumed because no file states it, or on what was left out."""


class Alarm(Caution):
    """A note on what may make every answer wrong; it begins with "WARNING "."""

    @property
    def plain(self) -> str:
        """The note without its first word."""
        return self.removeprefix("WARNING ")


class OfClassNames(str):
    """A note on the origin of the class names. Names that a caller gives make it obsolete, and so does a new head."""


class AssumedNames(Caution, OfClassNames):
    """A note on assumed names of the classes."""


class DoubtfulNames(Alarm, OfClassNames):
    """A note on assumed names of the classes, which may well be in another order."""


class LeftOut(Caution):
    """A note on fitted numbers that do not hold for what is computed now, and are not used."""
