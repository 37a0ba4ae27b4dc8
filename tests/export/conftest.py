"""Skips of tests that drive OpenVINO where it is not available."""

from __future__ import annotations

import pytest

from vitral.inference.engines import openvino


@pytest.fixture(autouse=True)
def _available(request: pytest.FixtureRequest) -> None:
    if "openvino" in request.node.nodeid.lower() and (why := openvino.limitation()):
        pytest.skip(why)
