"""Hash of everything in a predictor that determines its results, except the machine."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from vitral.model.registry import config_to_json
from vitral.weights.native import digest

if TYPE_CHECKING:
    from vitral.inference.predictor import Predictor


def model_hash(predictor: Predictor) -> str:
    """Return 64 hexadecimal digits: a hash of the weights, the dtype that they compute in, the configuration, the
    preprocessing, the classes, the output and the int8 ranges.
    """
    network = predictor.model
    described: list[object] = [config_to_json(network.config), predictor.preprocessing.to_json(), predictor.classes]
    described += [predictor.output.to_json()] if predictor.output.to_json() else []
    dtype = str(predictor.dtype)
    text = json.dumps([digest(network.state_dict()), dtype, *described, predictor.ranges], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
