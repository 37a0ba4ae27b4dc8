"""Shared fixtures of the tests of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from images import MakeImages


@pytest.fixture
def photos(make_images: MakeImages) -> Path:
    return make_images({"cat": 12, "dog": 8})
