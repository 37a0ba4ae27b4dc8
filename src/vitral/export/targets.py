"""Targets by name: one module and one line for each."""

from __future__ import annotations

from collections.abc import Mapping

from vitral.export.onnx import ONNX
from vitral.export.openvino import OPENVINO
from vitral.export.target import Target
from vitral.export.torch import TORCH
from vitral.export.web import WEB

TARGETS: Mapping[str, Target] = {one.name: one for one in (ONNX, TORCH, OPENVINO, WEB)}
