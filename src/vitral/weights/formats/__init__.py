"""Formats of published weights: one file per family, one table entry per format."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from vitral.errors import WeightsError
from vitral.plugins import Extensible
from vitral.weights.architectures import architectures, named
from vitral.weights.formats.bit import FORMATS as BIT_FORMATS
from vitral.weights.formats.dino import FORMATS as DINO_FORMATS
from vitral.weights.formats.format import Format
from vitral.weights.formats.huggingface import FORMATS as HUGGINGFACE_FORMATS
from vitral.weights.formats.huggingface_text import FORMATS as TEXT_FORMATS
from vitral.weights.formats.jax import JAX
from vitral.weights.formats.timm import FORMATS as TIMM_FORMATS
from vitral.weights.formats.torchvision import TORCHVISION
from vitral.weights.read.source import Source
from vitral.wording import some

_BUILT_IN: Mapping[str, Format] = {
    **TIMM_FORMATS,
    "torchvision": TORCHVISION,
    **HUGGINGFACE_FORMATS,
    **TEXT_FORMATS,
    **DINO_FORMATS,
    "jax": JAX,
    **BIT_FORMATS,
}
FORMATS: Mapping[str, Format] = Extensible("vitral.formats", _BUILT_IN)
"""Name → format. A file has the one format whose declared names match all of its keys."""


def detect(source: Source) -> Format:
    """Detect the format of a file; `WeightsError` if none or several match, with the nearest one and the differences.

    A release that shares timm's names is preferred to timm, unless timm's config lies beside the file.
    """
    if source.stated is not None and source.stated.format is not None:
        return FORMATS[source.stated.format]
    where, config = source.where, source.config or {}
    if str(config.get("architecture")) in architectures():
        named(str(config["architecture"]), where)  # its reason is more useful than a list of unexpected names
    names = {one.name: list(one.canonical(dict(source.tensors))) for one in FORMATS.values() if one.required}
    fitting = _fitting(names)
    if len(fitting) > 1:
        fitting = [one for one in fitting if FORMATS[one].architectures == ("architecture" in config)]
    if len(fitting) == 1:
        return FORMATS[fitting[0]]
    if fitting:
        why = f"its names fit {', '.join(fitting)}"
        raise WeightsError("several formats match these weights", where=where, why=why, hint=f"--from {fitting[0]}")
    raise _refusal(names, where)


def has_format(tensors: Mapping[str, Tensor], format: str | None = None) -> bool:
    """True if these are the tensors of a whole network in `format`, or in any."""
    kinds = [FORMATS[format]] if format else [one for one in FORMATS.values() if one.required]
    return bool(_fitting({one.name: list(one.canonical(dict(tensors))) for one in kinds}))


def _fitting(names: Mapping[str, list[str]]) -> list[str]:
    """Formats whose names are exactly these; `names` are the tensors by each format's names."""
    return [one for one in names if not FORMATS[one].missing(names[one]) and not FORMATS[one].unexpected(names[one])]


def _refusal(names: Mapping[str, list[str]], where: object) -> WeightsError:
    """Error with the nearest format and its differences; `names` are the tensors by each format's names."""
    differing = {one: (FORMATS[one].unexpected(its), FORMATS[one].missing(its)) for one, its in names.items()}
    nearest = min(differing, key=lambda one: sum(map(len, differing[one])))
    unexpected, missing = differing[nearest]
    total = len(names[nearest])
    if 2 * len(unexpected) > total:  # it shares few names: to call it near would mislead
        why = f"its names fit no known network: {some(names[nearest], 8)}"
    else:
        reasons = (
            f"{word}: {some(names, 8)}" for word, names in (("foreign", unexpected), ("missing", missing)) if names
        )
        why = f"nearest is {nearest}: {'; '.join(reasons)}"
    return WeightsError("unknown format of weights", where=where, why=why, hint=f"formats: {', '.join(FORMATS)}")
