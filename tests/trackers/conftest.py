"""Trackers with programs of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_service() -> Iterator[None]:
    """End the process that wandb starts for all of its runs."""
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()
    os.environ.pop("WANDB_SERVICE", None)
