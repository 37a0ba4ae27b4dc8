"""Registry of attribution methods: one file and one line each."""

from __future__ import annotations

from collections.abc import Mapping

from vitral.explanation.methods.attcat import ATTCAT
from vitral.explanation.methods.attention import ATTENTION
from vitral.explanation.methods.cross_attention import CROSS_ATTENTION
from vitral.explanation.methods.fullgrad import FULLGRAD
from vitral.explanation.methods.generic import GENERIC
from vitral.explanation.methods.gradcam import GRAD_CAM
from vitral.explanation.methods.input_gradient import INPUT_GRADIENT
from vitral.explanation.methods.integrated_gradients import INTEGRATED_GRADIENTS
from vitral.explanation.methods.legrad import LEGRAD
from vitral.explanation.methods.method import Maps, Method
from vitral.explanation.methods.occlusion import OCCLUSION
from vitral.explanation.methods.rise import RISE
from vitral.explanation.methods.rollout import ROLLOUT
from vitral.explanation.methods.smoothgrad import SMOOTHGRAD
from vitral.plugins import Extensible

BUILT_IN = {
    one.name: one
    for one in (
        ROLLOUT,
        ATTENTION,
        GENERIC,
        LEGRAD,
        GRAD_CAM,
        ATTCAT,
        FULLGRAD,
        INPUT_GRADIENT,
        INTEGRATED_GRADIENTS,
        SMOOTHGRAD,
        OCCLUSION,
        RISE,
    )
}
METHODS: Mapping[str, Method] = Extensible("vitral.methods", BUILT_IN)

TEXT_METHODS: Mapping[str, Method] = {CROSS_ATTENTION.name: CROSS_ATTENTION}
"""Methods for networks that read text; their targets (B, T) are the tokens of the texts."""

__all__ = ["METHODS", "TEXT_METHODS", "Maps", "Method", "method_named"]


def method_named(name: str) -> Method:
    """Return the entry of a method for classes or for texts."""
    return TEXT_METHODS[name] if name in TEXT_METHODS else METHODS[name]
