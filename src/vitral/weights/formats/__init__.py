"""The formats of published weights, one file for each family, one line for each in the table."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from vitral.errors import WeightsError
from vitral.weights.formats.bit import FORMATS as BIT_FORMATS
from vitral.weights.formats.dino import FORMATS as DINO_FORMATS
from vitral.weights.formats.format import Format
from vitral.weights.formats.huggingface import FORMATS as HUGGINGFACE_FORMATS
from vitral.weights.formats.jax import JAX
from vitral.weights.formats.timm import FORMATS as TIMM_FORMATS
from vitral.weights.formats.torchvision import TORCHVISION

FORMATS: Mapping[str, Format] = {
    **TIMM_FORMATS,
    "torchvision": TORCHVISION,
    **HUGGINGFACE_FORMATS,
    **DINO_FORMATS,
    "jax": JAX,
    **BIT_FORMATS,
}
"""Name → format. A file is of the one format whose declared names its whole set of keys fits."""


def detect(tensors: Mapping[str, Tensor], where: object) -> Format:
    """The format of a file with these tensors; `WeightsError` where none or more than one fits, with the nearest one
    and what differs from it.
    """
    names = {one.name: list(one.canonical(dict(tensors))) for one in FORMATS.values() if one.required}
    fitting = [one for one in names if not FORMATS[one].missing(names[one]) and not FORMATS[one].strange(names[one])]
    if len(fitting) == 1:
        return FORMATS[fitting[0]]
    if fitting:
        why = f"its names fit {', '.join(fitting)}"
        raise WeightsError("cannot tell whose weights these are", where=where, why=why, hint=f"--from {fitting[0]}")
    raise _refusal(names, where)


def _refusal(names: Mapping[str, list[str]], where: object) -> WeightsError:
    """What a file differs in from the nearest format; `names` are its tensors as each format calls them."""
    differing = {one: (FORMATS[one].strange(its), FORMATS[one].missing(its)) for one, its in names.items()}
    nearest = min(differing, key=lambda one: sum(map(len, differing[one])))
    strange, missing = differing[nearest]
    told = [f"{_few(strange)} not in it"] * bool(strange) + [f"{_few(missing)} missing"] * bool(missing)
    return WeightsError(
        "weights of no format that vitral knows",
        where=where,
        why=f"nearest is {nearest}: {'; '.join(told)}",
        hint=f"formats: {', '.join(FORMATS)}",
    )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
