"""What the tests of runs share."""

from __future__ import annotations

from pathlib import Path

import pytest

from pictures import MakePictures
from vitral.evaluation import report


@pytest.fixture
def photos(make_pictures: MakePictures) -> Path:
    return make_pictures({"cat": 12, "dog": 8})


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs end without a report, which takes longer than they do."""
    monkeypatch.setattr(report, "write_report", lambda path, content: None)
