"""Protocol of an export target, and the shared parts: the job, the traced module, the recorded warnings."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from vitral.data.images.preprocessing import Preprocessing
from vitral.export.graph import WithPreprocessing
from vitral.inference.unknown import Detector
from vitral.kernels import reference_ops
from vitral.model import Network

Precision = Literal["fp32", "fp16", "int8"]


@dataclass(frozen=True, eq=False)
class Job:
    """Everything to export: the network, its preprocessing and its metadata."""

    network: Network
    """The network, in fp32 on the CPU, in evaluation mode."""
    preprocessing: Preprocessing
    precision: Precision
    with_preprocessing: bool
    metadata: Mapping[str, str]
    """Labels, hash and version as text; `exporting.metadata` has the keys."""
    name: str = "network"
    """Title of the network: the last part of its reference."""
    runtime: str | Path | None = None
    """File of the package that has the target's runtime, if it is not to be fetched."""
    example: bytes = b""
    """PNG that a page offers to try."""
    calibration: list[np.ndarray] = field(default_factory=list)
    """Inputs of the graph to calibrate int8 with, from training images."""
    temperature: float = 1.0
    """Divisor of the logits before the softmax."""
    unknown: Detector | None = None
    """Score and threshold of unknown images that a reader of the outputs can compute; None if there are none."""
    names_any: bool = False
    """True if unknown images get a class, because a reader cannot compute the network's score for them."""
    warnings: list[str] = field(default_factory=list)
    """Every warning of a tracer or converter, in order."""

    @property
    def input_name(self) -> str:
        return "image" if self.with_preprocessing else "images"

    @property
    def output_name(self) -> str:
        return "probabilities" if self.with_preprocessing else "logits"


@dataclass(frozen=True)
class Runtime:
    """An export, loaded in its runtime."""

    name: str
    """Program, version and device: "ONNX Runtime 1.32.0, CPU"."""
    run: Callable[[np.ndarray], np.ndarray]
    """From the graph's input to its output: images (B, C, H, W) float32 to logits (B, K), or with preprocessing one
    image (H, W, C) uint8 to probabilities (K,)."""


class Target(Protocol):
    """A format of exported networks."""

    name: str
    title: str
    """For messages: "ONNX"."""
    precisions: tuple[Precision, ...]
    preprocesses: bool
    """True if preprocessing can be part of the graph."""
    distances: bool
    """True if the distance of the features from the classes is an output of the graph, for networks with a map."""
    opening: str
    """Command that opens the export in `{folder}`, for people."""

    def check_installed(self) -> None:
        """Raise `MissingExtraError` if a package is missing."""

    def write(self, job: Job, folder: Path) -> dict[str, str]:
        """Write the network into an empty folder. Return versions and opset for `export.json`."""

    def load(self, folder: Path) -> Runtime:
        """Load the files of `write`, as a program without vitral does."""


def traced(job: Job, module: nn.Module | None = None) -> ExportedProgram:
    """Trace the network, or `module` instead, by torch.export: for batches of any size, with preprocessing for one
    image of any size.
    """
    module, prep = module or exportable(job.network), job.preprocessing
    example, shapes = torch.zeros(2, prep.channels, *prep.image_size), {0: Dim("batch", min=1)}
    if job.with_preprocessing:
        module = WithPreprocessing(module, prep, job.temperature)
        example, shapes = torch.zeros(5, 7, prep.channels, dtype=torch.uint8), {0: Dim("height"), 1: Dim("width")}
    with recorded_warnings(job.warnings):
        return torch.export.export(module.eval(), (example,), dynamic_shapes=(shapes,))


def exportable(network: Network) -> nn.Module:
    """Copy the network without gradients, and with PyTorch's operators instead of our kernels."""
    copied = copy.deepcopy(network).eval().requires_grad_(False)
    reference_ops(copied)
    return copied


@contextlib.contextmanager
def recorded_warnings(record: list[str]) -> Iterator[None]:
    """Append each distinct warning, also of `logging`, to `record`: they are reported with the parity check."""
    handler = _Recorder(record)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        root.removeHandler(handler)
        for one in caught:
            handler.add(f"{one.category.__name__}: {one.message}")


class _Recorder(logging.Handler):
    def __init__(self, lines: list[str]):
        super().__init__(logging.WARNING)
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.add(f"{record.name}: {record.getMessage()}")

    def add(self, text: str) -> None:
        line = " ".join(text.split())
        if line not in self.lines:
            self.lines.append(line)
