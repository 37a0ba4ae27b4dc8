"""Weights of timm for a network that vitral does not compute itself: its own library builds it.

A folder of timm's layout states the architecture and the preprocessing in config.json; nothing of the file is run.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.util import find_spec

import torch
from torch import Tensor

from vitral.errors import UsageError, WeightsError
from vitral.model import ForeignConfig, network
from vitral.model.foreign import version_of
from vitral.weights import class_names
from vitral.weights.architectures import architectures
from vitral.weights.formats import has_format
from vitral.weights.native import Weights, misfit
from vitral.weights.preprocessing_configs import from_timm
from vitral.weights.read.source import Source
from vitral.weights.report import Line, LoadReport


def library_network(source: Source) -> str | None:
    """Return the architecture that timm's config.json states, as "timm:NAME", if timm has it and it is no network of
    vitral's own; None for all others.
    """
    name = (source.config or {}).get("architecture")
    if not isinstance(name, str) or name in architectures() or not find_spec("timm") or has_format(source.tensors):
        return None
    return f"timm:{name}" if name in importlib.import_module("timm").list_models() else None


def library_weights(source: Source, named: str, class_order: str | None = None) -> tuple[Weights, LoadReport]:
    """Return the weights of a network of timm, and their report. Raises `WeightsError` for tensors that do not fit."""
    config = source.config or {}
    described = config.get("pretrained_cfg")
    described = described if isinstance(described, Mapping) else {}
    preprocessing = from_timm(described)
    count = config.get("num_classes", described.get("num_classes", 1000))
    try:
        built = ForeignConfig(
            source=named,
            image_size=preprocessing.image_size,
            channels=preprocessing.channels,
            classes=count,
            version=version_of(named),
        )
    except UsageError as error:
        raise WeightsError(f"config.json describes no {named}", where=source.where, why=error.what) from error
    tensors = source.tensors
    state: dict[str, Tensor] = {f"body.{name}": tensor for name, tensor in tensors.items()}
    with torch.random.fork_rng(devices=[]):
        why = misfit(network(built), state)
    if why:
        raise WeightsError(f"these are not weights of {named}", where=source.where, why=why.replace("body.", ""))
    lines = [Line(name, tuple(tensor.shape), "loaded", f"body.{name}") for name, tensor in tensors.items()]
    naming = class_names.naming(class_names.from_config(config), count, class_order, source.where)
    account = LoadReport(
        source.where,
        named,
        tuple(lines),
        notes=naming.notes,
        nameless=naming.nameless,
        class_order=naming.order,
    )
    trained = {"origin": source.where, "format": "timm", "model": named}
    return Weights(built, state, preprocessing, naming.names, trained), account
