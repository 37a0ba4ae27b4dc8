"""Ranges of an option, from which a search draws its values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vitral.errors import UsageError

LOG = ("lr", "weight_decay", "layer_scale", "min_lr")
"""Options whose effect goes by ratios: they are drawn on a logarithmic scale."""


@dataclass(frozen=True)
class Span:
    """Numbers from `low` to `high`, both inclusive; integers if both are."""

    low: float
    high: float
    log: bool = False
    """Drawn uniformly on a logarithmic scale."""

    @classmethod
    def of(cls, name: str, low: Any, high: Any) -> Span:
        """Return the range of an option; `UsageError` if it is none."""
        if any(isinstance(one, bool) or not isinstance(one, int | float) for one in (low, high)):
            raise UsageError(f"{name} has no range", why="it is not a number", hint=f"--vary {name}=A,B")
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            hint = f"--vary {name}={min(low, high):g}..{max(low, high):g}"
            raise UsageError(f"the range of {name} goes from low to high", why=f"{low:g} to {high:g}", hint=hint)
        if name in LOG and low <= 0:
            why = f"{name} is drawn on a logarithmic scale"
            raise UsageError(
                f"the range of {name} begins above 0", why=why, hint=f"--vary {name}={high / 100:g}..{high:g}"
            )
        return cls(low, high, name in LOG)

    @classmethod
    def read(cls, value: object) -> Any:
        """Read the form in a study.json; lists of values are returned as they are."""
        return cls(**value) if isinstance(value, Mapping) else value

    @property
    def whole(self) -> bool:
        """True if the values are integers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def rounded(self, value: float) -> float:
        """Round to four significant digits, so that a command can be typed; the bounds stay as they are."""
        if self.whole:
            return int(value)
        return min(max(float(f"{value:.4g}"), self.low), self.high)

    def __str__(self) -> str:
        return f"{self.low:g}..{self.high:g}"


def corners(vary: Mapping[str, tuple[object, ...] | Span]) -> dict[str, tuple[object, ...]]:
    """Replace each range by its bounds."""
    return {name: (values.low, values.high) if isinstance(values, Span) else values for name, values in vary.items()}


def combinations(vary: Mapping[str, tuple[object, ...]]) -> Iterator[dict[str, object]]:
    """Return every combination of values, the last option changing first."""
    for values in itertools.product(*vary.values()):
        yield dict(zip(vary, values, strict=True))


def in_range(vary: Mapping[str, tuple[Any, ...] | Span], factors: Mapping[str, Any]) -> bool:
    """True if each varied option has one of its values."""
    return set(vary) == set(factors) and all(
        values.low <= factors[name] <= values.high if isinstance(values, Span) else factors[name] in values
        for name, values in vary.items()
    )
