"""pyarrow on first use: it is an optional package."""

from __future__ import annotations

from typing import Any

from vitral.errors import MissingExtraError


def pyarrow(instead: str = "") -> Any:
    """Import pyarrow with its submodule `parquet`. Without it `MissingExtraError`, with a hint what to do `instead`."""
    try:
        import pyarrow
        import pyarrow.parquet  # `import pyarrow` alone leaves it out
    except ImportError as error:
        hint = ", or ".join(filter(None, ("pip install 'vitral[parquet]'", instead)))
        raise MissingExtraError("Parquet files need pyarrow", why=str(error), hint=hint) from error
    return pyarrow
