"""Registry of network kinds: build a network from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from vitral.errors import UsageError, unknown
from vitral.model.config import ViTConfig
from vitral.model.decoder import EncoderDecoder
from vitral.model.decoder_config import EncoderDecoderConfig
from vitral.model.foreign import Foreign, ForeignConfig
from vitral.model.resnet import BiT, BiTConfig
from vitral.model.vit import ViT

ModelConfig = ViTConfig | BiTConfig | ForeignConfig | EncoderDecoderConfig
Network = ViT | BiT | Foreign | EncoderDecoder


class Kind(NamedTuple):
    """Classes of one kind of network."""

    config: type[ModelConfig]
    network: type[Network]


KINDS: dict[str, Kind] = {
    "vit": Kind(ViTConfig, ViT),
    "bit": Kind(BiTConfig, BiT),
    "foreign": Kind(ForeignConfig, Foreign),
    "encoder-decoder": Kind(EncoderDecoderConfig, EncoderDecoder),
}
"""Name of a kind in files → its classes."""


def network(config: ModelConfig) -> Network:
    """Build a newly initialized network."""
    return KINDS[_kind(config)].network(config)  # type: ignore[arg-type]  # mypy cannot pair them


def with_image_size(config: ModelConfig, size: int | tuple[int, int]) -> ModelConfig:
    """The same network for images of another size, in pixels."""
    if isinstance(config, EncoderDecoderConfig):
        return replace(config, encoder=replace(config.encoder, image_size=size))
    return replace(config, image_size=size)


def config_to_json(config: ModelConfig) -> dict[str, object]:
    """Plain data with the kind, for `config_from_json`."""
    return {"kind": _kind(config), **config.to_json()}


def config_from_json(data: Mapping[str, object]) -> ModelConfig:
    """Build a configuration from the output of `config_to_json`. Without a kind it is a ViT, as in older files.

    Raises `UsageError` for an unknown kind or field, and for invalid values.
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
