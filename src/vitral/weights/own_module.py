"""Weights of a network of vitral in memory: its tensors, with the configuration, which must state what it computes."""

from __future__ import annotations

import dataclasses

from vitral.data.images.preprocessing import Preprocessing
from vitral.model import BiT, EncoderDecoder, EncoderDecoderConfig, Foreign, ModelConfig, Network, ViT
from vitral.model.settings import changed_setting, check_head, outputs_of
from vitral.weights import class_names
from vitral.weights.architectures.timm_module import UnreadableError, name_of
from vitral.weights.in_memory import modification, refusing
from vitral.weights.native import Weights, assumed_output


def own_weights(module: Network, classes: int | None = None) -> Weights:
    """Return the weights of a network of vitral, with assumed preprocessing and class names.

    `classes` is the number of classes if the head was replaced by one with as many outputs. Raises `WeightsError` for a
    module whose configuration does not state what it computes, `UsageError` for one without values, and for a replaced
    head without `classes`.
    """
    config = _config(module, classes)
    with refusing(module):
        if type(module) not in (ViT, BiT, Foreign, EncoderDecoder):
            raise UnreadableError(f"{name_of(module)} is a subclass, and may compute something else")
        if changed := modification(module):
            raise UnreadableError(changed)
        check_head(module, config.classes)
        if changed := changed_setting(module, config):
            raise UnreadableError(f"{changed}, and its configuration does not state that")
    half = (0.5,) * config.channels
    preprocessing = Preprocessing(config.image, config.channels, mean=half, std=half)
    return Weights(
        config, module.state_dict(), preprocessing, class_names.default(config.classes), {}, assumed_output(config)
    )


def _config(module: Network, classes: int | None) -> ModelConfig:
    """Return the module's configuration, with the number of classes of a replaced head."""
    config = module.config
    if classes is None or isinstance(config, EncoderDecoderConfig) or outputs_of(module) == config.classes:
        return config
    return dataclasses.replace(config, classes=classes)
