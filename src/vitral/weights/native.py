"""vitral's own format: one safetensors file with the network's configuration, preprocessing and class names in it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitral.data.transforms import Preprocessing
from vitral.errors import UsageError, WeightsError
from vitral.model import ModelConfig, Network, network
from vitral.model.kinds import config_from_json, config_to_json
from vitral.weights.files import read_tensors, write_tensors

FORMAT = 1


@dataclass(frozen=True)
class Weights:
    """All that is needed to use a trained network."""

    config: ModelConfig
    state: Mapping[str, Tensor]
    preprocessing: Preprocessing
    classes: tuple[str, ...]
    trained: Mapping[str, Any]
    """Where it comes from: data, recipe, accuracy, versions."""


def save(path: Path, weights: Weights) -> None:
    """Write the file, atomically."""
    header = {
        "format": FORMAT,
        "model": config_to_json(weights.config),
        "preprocessing": weights.preprocessing.to_json(),
        "classes": list(weights.classes),
        "trained": dict(weights.trained),
    }
    write_tensors(path, weights.state, header)


def read(path: Path) -> Weights:
    """Read the file; `WeightsError` says what is wrong with one that does not hold together."""
    state, header = read_tensors(path)
    if header.get("format") != FORMAT:
        raise WeightsError("unknown version of vitral's format", where=path, why=f"version {header.get('format')}")
    try:
        weights = Weights(
            config_from_json(header["model"]),
            state,
            Preprocessing.from_json(header["preprocessing"]),
            tuple(header["classes"]),
            header.get("trained", {}),
        )
    except (KeyError, TypeError, UsageError) as error:
        raise WeightsError("damaged header in weights file", where=path, why=str(error)) from error
    _check(weights, path)
    return weights


def _check(weights: Weights, path: Path) -> None:
    """The parts of the header must be of one network: a name too few would be found at some later picture."""
    config, preprocessing = weights.config, weights.preprocessing
    for what, own, networks in (
        ("class names", len(weights.classes), config.classes),
        ("image size of the preprocessing", preprocessing.image_size, config.image),
        ("channels of the preprocessing", preprocessing.channels, config.channels),
    ):
        if own != networks:
            why = f"{what}: {own}, but the network has {networks}"
            raise WeightsError("damaged header in weights file", where=path, why=why)


def in_16_bits(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors at half the size: floats as fp16 or as bf16, whichever is nearer to these numbers. `build` makes
    them fp32 again.
    """

    def error(dtype: torch.dtype) -> float:
        return sum(float((one.to(dtype).double() - one.double()).square().sum()) for one in floats.values())

    floats = {name: one for name, one in state.items() if one.is_floating_point()}
    dtype = min((torch.float16, torch.bfloat16), key=error)  # what fp16 cannot hold is infinite there, and so the error
    return {name: one.to(dtype) if name in floats else one for name, one in state.items()}


def digest(state: Mapping[str, Tensor]) -> str:
    """A hash of the tensors: their names, kinds, shapes and every byte."""
    found = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def build(weights: Weights, path: Path | None = None, empty: Network | None = None) -> Network:
    """The network with these weights, in fp32 and in evaluation mode.

    No number is drawn only to be overwritten, and tensors that are fp32 are taken as they are, not copied: training the
    network changes `weights.state`. `empty` is such a network without numbers, where there is one already.
    """
    if empty is None:
        with torch.device("meta"):
            empty = network(weights.config)
    model = empty
    _check_fit(model, weights.state, path)
    model.load_state_dict({name: value.float() for name, value in weights.state.items()}, assign=True)
    return model.eval()


def load_state(model: nn.Module, state: Mapping[str, Tensor], path: Path | None = None) -> None:
    """Copy the weights in, strictly: `WeightsError` names what is missing, left over or of another shape."""
    _check_fit(model, state, path)
    model.load_state_dict(dict(state))


def _check_fit(model: nn.Module, state: Mapping[str, Tensor], path: Path | None) -> None:
    own = dict(model.state_dict())
    problems = [f"{name} is missing" for name in own if name not in state]
    problems += [f"{name} has no place" for name in state if name not in own]
    problems += [
        f"{name} is {tuple(state[name].shape)}, not {tuple(own[name].shape)}"
        for name in own
        if name in state and own[name].shape != state[name].shape
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise WeightsError("weights do not fit the model", where=path, why="; ".join(problems[:3]) + more)
