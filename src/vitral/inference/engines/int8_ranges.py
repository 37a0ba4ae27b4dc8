"""Files of the activation ranges of an int8 network, next to its weights."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from vitral.atomic import write_text
from vitral.digest import read_json, sealed_json
from vitral.errors import WeightsError
from vitral.folders import is_run
from vitral.inference.engines.int8 import Ranges
from vitral.weights.fitted import kept


@dataclass(frozen=True)
class Calibration:
    """Result of `vitral quantize`."""

    ranges: Ranges
    warning: str = ""
    """Reason why int8 is not worthwhile for this network, if measured so."""
    output: Mapping[str, object] = field(default_factory=dict)
    """Fields of the output that were fitted in int8; empty without validation images."""

    def refitted(self, fields: Mapping[str, object]) -> tuple[Mapping[str, object], list[str]]:
        """Return the fields of the output as they hold with these ranges, and notes on those that are left out."""
        if not self.ranges:
            return fields, []
        others = {name: value for name, value in fields.items() if name not in self.output}
        still, notes = kept(others, "int8")
        return {**still, **self.output}, notes


def ranges_file(weights: Path) -> Path:
    """Path of the ranges of a weights file: model.safetensors → model.int8.json."""
    return weights.with_name(f"{weights.name.removesuffix('.safetensors')}.int8.json")


def write_ranges(file: Path, network: nn.Module, measured: Calibration, *, measured_on: str) -> None:
    """Write the file atomically. `measured_on` names the images for a reader."""
    warning = {"warning": measured.warning} if measured.warning else {}
    output = {"output": dict(measured.output)} if measured.output else {}
    known = {"measured_on": measured_on, "weights": _fingerprint(network), **warning, **output}
    data = {**known, "ranges": measured.ranges}
    write_text(file, sealed_json(data, indent=1))


def read_ranges(file: Path, network: nn.Module, source: str | Path) -> Calibration:
    """Read a file of `write_ranges`. `WeightsError` if it is missing, damaged, or belongs to other weights.

    `source` is the user's name for the weights, for the hint.
    """
    hint = f"vitral quantize {shlex.quote(str(source))}{'' if is_run(Path(source)) else ' DATA'}"
    try:
        data = read_json(file)
        ranges = {str(name): (float(low), float(high)) for name, (low, high) in data["ranges"].items()}
        weights, warning, output = data["weights"], str(data.get("warning", "")), dict(data.get("output", {}))
    except FileNotFoundError:
        why = "int8 needs activation ranges, measured on images"
        raise WeightsError("these weights are not quantized yet", where=file, why=why, hint=hint) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError("damaged ranges", where=file, why=str(error), hint=hint) from error
    if weights != _fingerprint(network):
        why = "the weights have changed since"
        raise WeightsError("these ranges were measured on other weights", where=file, why=why, hint=hint)
    return Calibration(ranges, warning, output)


def _fingerprint(network: nn.Module) -> str:
    """Hash of the first and the last dense layer of the blocks, in bf16, so that fp32 and bf16 weights agree."""
    layers = [part for part in network.modules() if isinstance(part, nn.Linear)]
    digest = hashlib.blake2b(digest_size=16)
    for layer in (layers[0], layers[-1]):
        digest.update(layer.weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
