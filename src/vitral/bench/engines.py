"""Engines of vitral other than `Predictor`'s default, which is always measured.

All use the same network; an engine adds weights in its own layout, if any.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vitral.bench.models import ModelUnderTest
from vitral.errors import MissingExtraError, UsageError, VitralError, unknown
from vitral.inference import predictor as predict
from vitral.inference.engines import int8, openvino
from vitral.inference.engines.int8 import Ranges
from vitral.inference.predictor import Predictor
from vitral.model import ViTConfig

DEFAULT = "auto"


@dataclass(frozen=True)
class Engine:
    """An engine of `Predictor`, in floats or integers."""

    name: predict.Engine  # in `Predictor`
    integers: bool
    settings: str


_INTEGERS = "dense layers in int8, ranges from the images of the measurement, the rest as in vitral by default"

ENGINES: dict[str, Engine] = {
    "plain": Engine("plain", False, "the network itself"),
    "int8": Engine("packed", True, _INTEGERS),
    "openvino": Engine("openvino", False, "compiled by OpenVINO, anew each time"),
    "openvino-int8": Engine("openvino", True, f"compiled by OpenVINO, anew each time; {_INTEGERS}"),
}
"""Name → engine."""


def chosen(names: Iterable[str], subject: ModelUnderTest, device: str) -> tuple[tuple[str, ...], list[str]]:
    """Select engines in addition to `auto` ("all", or names), with notes on those that "all" leaves out here.

    Raises `UsageError` for an unknown name, and for a named engine that cannot compute this network on this device
    (cpu, cuda or mps); `MissingExtraError` if OpenVINO is named and not installed.
    """
    requested = tuple(names)
    known = (*ENGINES, DEFAULT, "all")
    if bad := [name for name in requested if name not in known]:
        raise unknown("engine", bad[0], known)
    if len(set(requested)) > 1 and "all" in requested:
        raise UsageError("--engines all excludes other names", hint="--engines plain openvino")
    found, notes = [], []
    for name in ENGINES:
        if name not in requested and "all" not in requested:
            continue
        if (refusal := _refusal(name, subject, device)) is None:
            found.append(name)
        elif "all" not in requested:
            raise refusal
        else:
            install = f" ({refusal.hint})" if isinstance(refusal, MissingExtraError) else ""
            notes.append(f"left out: engine {name}: {refusal.what}{install}")
    return tuple(found), notes


def _refusal(name: str, subject: ModelUnderTest, device: str) -> VitralError | None:
    """Return the reason why this engine is unavailable here; None if it is available."""
    engine = ENGINES[name]
    hint = "--engines all, which measures what is available"
    if name != "plain" and device != "cpu":
        return UsageError(f"{name} runs on a CPU, not on {device}", hint=f"--device cpu, or {hint}")
    if engine.integers and not isinstance(subject.config, ViTConfig):
        return UsageError("int8 is available for a ViT only", where=subject.name, hint=hint)
    unavailable_reason = int8.unavailable_reason
    if engine.name == "openvino":
        try:
            openvino.package()
        except MissingExtraError as error:
            return error
        if why := openvino.limitation():
            return UsageError(why, where=f"engine {name}", hint=hint)
        unavailable_reason = openvino.unavailable_reason
    if engine.integers and (why := unavailable_reason()):
        return UsageError(why, where=f"engine {name}", hint=hint)
    return None


def predictor_by(engine: Engine, default: Predictor, ranges: Ranges | None) -> Predictor:
    """Make a predictor of the same network on the same machine with another engine; integer engines need `ranges`.

    OpenVINO neither reads the user's cache nor writes to it: compilation is to be measured, and a network with random
    weights must not replace one in use.
    """
    with openvino.without_cache():
        return Predictor(
            default.model,
            default.preprocessing,
            default.classes,
            machine=default.machine,
            engine=engine.name,
            ranges=ranges if engine.integers else None,
        )
