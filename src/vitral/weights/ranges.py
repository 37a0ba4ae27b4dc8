"""The ranges that an integer network needs, in a file beside the weights that they were measured on."""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from vitral.errors import WeightsError
from vitral.model.quantized import Ranges
from vitral.weights.files import write_text
from vitral.weights.references import is_run


@dataclass(frozen=True)
class Measured:
    """What `vitral quantize` found out."""

    ranges: Ranges
    warning: str = ""
    """Where integers were seen not to pay: in which respect."""


def ranges_file(weights: Path) -> Path:
    """Where the ranges of a weights file lie: model.safetensors → model.int8.json."""
    return weights.with_name(f"{weights.name.removesuffix('.safetensors')}.int8.json")


def write_ranges(file: Path, network: nn.Module, measured: Measured, *, measured_on: str) -> None:
    """Replace the file, atomically. `measured_on` tells a reader what pictures they come from."""
    warning = {"warning": measured.warning} if measured.warning else {}
    data = {"measured_on": measured_on, "weights": _fingerprint(network), **warning, "ranges": measured.ranges}
    write_text(file, json.dumps(data, indent=1) + "\n")


def read_ranges(file: Path, network: nn.Module, source: str | Path) -> Measured:
    """What `write_ranges` wrote. `WeightsError` where there is none, it is damaged, or is of other weights. `source` is
    what a person calls these.
    """
    hint = f"vitral quantize {shlex.quote(str(source))}{'' if is_run(Path(source)) else ' DATA'}"
    try:
        data = json.loads(file.read_text("utf-8"))
        found = {str(name): (float(least), float(greatest)) for name, (least, greatest) in data["ranges"].items()}
        weights, warning = data["weights"], str(data.get("warning", ""))
    except FileNotFoundError:
        why = "integers need the ranges of what they stand for, measured on pictures"
        raise WeightsError("these weights are not quantized yet", where=file, why=why, hint=hint) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError("damaged ranges", where=file, why=str(error), hint=hint) from error
    if weights != _fingerprint(network):
        why = "the weights have changed since"
        raise WeightsError("these ranges were measured on other weights", where=file, why=why, hint=hint)
    return Measured(found, warning)


def _fingerprint(network: nn.Module) -> str:
    """Of the first and the last dense layer of the blocks; bf16 holds what either precision knows of them."""
    layers = [part for part in network.modules() if isinstance(part, nn.Linear)]
    digest = hashlib.blake2b(digest_size=16)
    for layer in (layers[0], layers[-1]):
        digest.update(layer.weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
