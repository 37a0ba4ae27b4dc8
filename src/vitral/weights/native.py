"""vitral's own format: one safetensors file that contains configuration, preprocessing and class names."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitral import bounded
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.targets import DEFAULT_TASK
from vitral.digest import KEY
from vitral.errors import UsageError, WeightsError
from vitral.model import EncoderDecoderConfig, Foreign, ModelConfig, Network, network
from vitral.model.foreign import version_of
from vitral.model.registry import config_from_json, config_to_json
from vitral.weights.files import read_tensors, write_tensors
from vitral.weights.read.source import non_finite

FORMAT = 1
"""Version of files of one class per image …"""
TASK_FORMAT = 2
"""… and of other tasks, which a vitral that does not know them must not read as classes."""
_STATISTICS = "unknown."
"""Prefix of the tensors in a file that belong to the output, not to the network."""


@dataclass(frozen=True)
class Weights:
    """A trained network with everything needed to use it."""

    config: ModelConfig
    state: Mapping[str, Tensor]
    preprocessing: Preprocessing
    classes: tuple[str, ...]
    trained: Mapping[str, Any]
    """Origin: data, recipe, accuracy, versions."""
    output: Mapping[str, Any] = field(default_factory=dict)
    """The task with its fields (`vitral.inference.outputs`); empty for one class per image, uncalibrated."""
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors of the output: those that a distance to the training images needs, else none."""

    @property
    def task(self) -> str:
        """Name of the task."""
        return str(self.output.get("task", DEFAULT_TASK))


def assumed_output(config: ModelConfig) -> Mapping[str, object]:
    """The output of a network that states none: a classifier, or texts of numbered tokens."""
    if isinstance(config, EncoderDecoderConfig):
        return {"task": "text", "joint": " ", "end": config.decoder.end_token}
    return {}


def save(path: Path, weights: Weights, beside: Mapping[str, str] | None = None) -> None:
    """Write the file atomically, with metadata for other programs `beside` vitral's own."""
    header = {
        "format": FORMAT if weights.task == DEFAULT_TASK else TASK_FORMAT,
        "model": config_to_json(weights.config),
        "preprocessing": weights.preprocessing.to_json(),
        "classes": list(weights.classes),
        "trained": dict(weights.trained),
        "finite": not non_finite({**weights.state, **weights.statistics}),
        **({"output": dict(weights.output)} if weights.output else {}),
    }
    statistics = {_STATISTICS + name: tensor for name, tensor in weights.statistics.items()}
    write_tensors(path, {**weights.state, **statistics}, header, beside)


def read(path: Path) -> Weights:
    """Read the file; `WeightsError` if it is damaged or inconsistent."""
    return whole(path, *read_tensors(path))


def whole(path: Path, state: Mapping[str, Tensor], header: Mapping[str, Any]) -> Weights:
    """Build `Weights` from tensors and header of a file; `WeightsError` as `read`."""
    if header.get("format") not in (FORMAT, TASK_FORMAT):
        raise WeightsError("unknown version of vitral's format", where=path, why=f"version {header.get('format')}")
    beside = {name: tensor for name, tensor in state.items() if name.startswith(_STATISTICS)}
    try:
        weights = Weights(
            config_from_json(header["model"]),
            {name: tensor for name, tensor in state.items() if name not in beside},
            Preprocessing.from_json(header["preprocessing"]),
            tuple(header["classes"]),
            header.get("trained", {}),
            dict(header.get("output", {})),
            {name.removeprefix(_STATISTICS): tensor for name, tensor in beside.items()},
        )
    except (KeyError, TypeError, ValueError, UsageError) as error:
        raise WeightsError("damaged header in weights file", where=path, why=str(error)) from error
    _check(weights, path)
    return weights


def known_finite(metadata: Mapping[str, str]) -> bool:
    """True if the metadata state that all values are finite, and carry a digest that proves them unchanged."""
    header = _header(metadata)
    return bool(header.get("finite")) and KEY in header


def stated_digest(metadata: Mapping[str, str]) -> str:
    """Return the digest that the metadata state, which reading has compared; empty if they state none."""
    return str(_header(metadata).get(KEY, ""))


def from_metadata(path: Path, state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Weights:
    """Build `Weights` from tensors and metadata that `weights.read.source` has read and checked."""
    return whole(path, state, _header(metadata))


def _header(metadata: Mapping[str, str]) -> Mapping[str, object]:
    try:
        header = bounded.parse(metadata.get("vitral", "{}"))
    except (ValueError, RecursionError):
        return {}
    return header if isinstance(header, dict) else {}


def _check(weights: Weights, path: Path) -> None:
    """Check that the parts of the header belong together: a missing class name would surface at some later image."""
    config, preprocessing = weights.config, weights.preprocessing
    for what, own, networks in (
        ("class names", len(weights.classes), config.classes),
        ("image size of the preprocessing", preprocessing.image_size, config.image),
        ("channels of the preprocessing", preprocessing.channels, config.channels),
    ):
        if own != networks:
            why = f"{what}: {own}, but the network has {networks}"
            raise WeightsError("damaged header in weights file", where=path, why=why)


def digest(state: Mapping[str, Tensor]) -> str:
    """Hash the tensors: names, dtypes, shapes and every byte."""
    hashed = hashlib.sha256()
    hash_state(hashed, state)
    return hashed.hexdigest()


def hash_state(hashed: hashlib._Hash | hashlib.blake2b, state: Mapping[str, Tensor]) -> None:
    """Add names, dtypes, shapes and every byte of the tensors to a hash, in the order of their names."""
    for name, tensor in sorted(state.items()):
        hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        hashed.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def build(weights: Weights, path: Path | None = None) -> Network:
    """Build the network with these weights, in fp32 and in evaluation mode.

    Nothing is initialized only to be overwritten, and fp32 tensors are used without a copy: training the network
    changes `weights.state`.
    """
    with torch.device("meta"):
        model = network(weights.config)
    _check_fit(model, weights.state, path)
    model.load_state_dict(
        {name: value.float() if value.is_floating_point() else value for name, value in weights.state.items()},
        assign=True,
    )
    return model.eval()


def load_state(model: nn.Module, state: Mapping[str, Tensor], path: Path | None = None) -> None:
    """Copy the weights in, strictly: `WeightsError` names parameters missing, unexpected or of another shape."""
    _check_fit(model, state, path)
    model.load_state_dict(dict(state))


def misfit(model: nn.Module, state: Mapping[str, Tensor]) -> str:
    """Name the first parameters that are missing, unexpected or of another shape; "" if the tensors fit."""
    own = model.state_dict()
    problems = [f"{name} is missing" for name in own if name not in state]
    problems += [f"{name} is unexpected" for name in state if name not in own]
    problems += [
        f"{name} is {tuple(state[name].shape)}, not {tuple(own[name].shape)}"
        for name in own
        if name in state and own[name].shape != state[name].shape
    ]
    return "; ".join(problems[:3]) + (f" and {len(problems) - 3} more" if len(problems) > 3 else "")


def _check_fit(model: nn.Module, state: Mapping[str, Tensor], path: Path | None) -> None:
    if why := misfit(model, state):
        hint = None
        if isinstance(model, Foreign):
            built, source = model.config.version, model.config.source
            now = version_of(source) or "the code as it is now"
            why = f"{source} was built by {built or 'other code'}, and {now} builds another network: {why}"
            hint = f"pip install {built.replace(' ', '==')}" if built else None
        raise WeightsError("weights do not fit the model", where=path, why=why, hint=hint)
