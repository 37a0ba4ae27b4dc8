"""The optional packages that serving needs."""

from __future__ import annotations

from importlib.util import find_spec

from vitral.errors import MissingExtraError

PACKAGES = {
    "starlette": "starlette",
    "uvicorn": "uvicorn",
    "prometheus_client": "prometheus-client",
    "python_multipart": "python-multipart",
}
"""Module → the name that pip knows."""


def check_installed() -> None:
    """Raise `MissingExtraError` if a package of `vitral[serve]` is not installed."""
    if missing := [package for module, package in PACKAGES.items() if find_spec(module) is None]:
        hint = "pip install 'vitral[serve]'"
        raise MissingExtraError("serving needs packages that are not installed", why=", ".join(missing), hint=hint)
