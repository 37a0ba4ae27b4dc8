"""The kinds of network behind one door: a configuration in, the network that it describes out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from vitral.errors import UsageError, unknown
from vitral.model.resnet import BiT, BiTConfig
from vitral.model.vit import ViT, ViTConfig

ModelConfig = ViTConfig | BiTConfig
Network = ViT | BiT


class Kind(NamedTuple):
    """What a configuration is called in a file, its class, and the network's."""

    config: type[ModelConfig]
    network: type[Network]


KINDS: dict[str, Kind] = {"vit": Kind(ViTConfig, ViT), "bit": Kind(BiTConfig, BiT)}


def network(config: ModelConfig) -> Network:
    """A freshly initialised network of this configuration."""
    return KINDS[_kind(config)].network(config)  # type: ignore[arg-type]  # mypy cannot pair them


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """Plain data, with the kind in it; `config_from_json` is the way back."""
    return {"kind": _kind(config), **config.to_json()}


def config_from_json(data: Mapping[str, Any]) -> ModelConfig:
    """Read `config_to_json`'s form; without a kind it is a ViT, the only one there was at first.

    `UsageError` for a kind or field that is not known, and for values that make no network.
    """
    if not isinstance(data, Mapping):
        raise UsageError("a model's configuration is names and values")
    fields = dict(data)
    kind = fields.pop("kind", "vit")
    if not isinstance(kind, str) or kind not in KINDS:
        raise unknown("kind of network", kind, KINDS)
    return KINDS[kind].config.from_json(fields)


def _kind(config: ModelConfig) -> str:
    return next(name for name, kind in KINDS.items() if isinstance(config, kind.config))
