"""pyarrow on first use: it is an optional package."""

from __future__ import annotations

from typing import Any

from vitral.errors import MissingExtraError


def pyarrow(otherwise: str = "") -> Any:
    """Import pyarrow; `otherwise` ends the hint of the `MissingExtraError` if it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        hint = f"pip install 'vitral[parquet]'{otherwise}"
        raise MissingExtraError("Parquet files need pyarrow", why=str(error), hint=hint) from error
    return pyarrow
