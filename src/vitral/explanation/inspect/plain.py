"""Convert results to plain data for JSON."""

from __future__ import annotations

import dataclasses
import math

import numpy as np


def to_plain(value: object) -> object:
    """Convert arrays to nested lists, floats to six digits, and NaN to None."""
    if isinstance(value, np.ndarray):
        return to_plain(value.tolist())
    if isinstance(value, dict):
        return {str(key): to_plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


class PlainData:
    """Base of dataclasses with `to_json`. Fields in `_left_out` are large and available elsewhere."""

    _left_out: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return {f.name: to_plain(getattr(self, f.name)) for f in fields if f.name not in self._left_out}
