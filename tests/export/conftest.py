"""Skips of tests of OpenVINO where it is not available; a browser, and the address of a `site`, for tests of pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import chromium, hosted
from vitral.inference.engines import openvino


@pytest.fixture(autouse=True)
def _available(request: pytest.FixtureRequest) -> None:
    if "openvino" in request.node.nodeid.lower() and (why := openvino.limitation()):
        pytest.skip(why)


@pytest.fixture(scope="module")
def url(site: Path) -> Iterator[str]:
    """The address of the module's `site`."""
    with hosted(site) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream") as running:
        yield running
