"""Run every test of the command line in an empty folder, with a wide terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from images import MakeImages


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def photos(make_images: MakeImages) -> str:
    make_images({"cat": 6, "dog": 6})
    return "photos"
