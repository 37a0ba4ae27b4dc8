"""Methods of attribution by name: one file each, one line each."""

from __future__ import annotations

from collections.abc import Mapping

from vitral.explanation.methods.attcat import ATTCAT
from vitral.explanation.methods.attention import ATTENTION
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

METHODS: Mapping[str, Method] = {
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

__all__ = ["METHODS", "Maps", "Method"]
