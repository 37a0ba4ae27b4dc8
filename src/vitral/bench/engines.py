"""Our other engines beside the one that `Predictor` takes by itself, which is measured in any case.

All compute from the one network that they are given: what each adds is weights of its own layout, if any.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vitral import openvino, predict
from vitral.bench.subject import Subject
from vitral.errors import MissingExtraError, UsageError, VitralError, unknown
from vitral.model import ViTConfig, quantized
from vitral.model.quantized import Ranges
from vitral.predict import Predictor

DEFAULT = "auto"


@dataclass(frozen=True)
class Engine:
    """What computes our predictions."""

    name: predict.Engine  # in `Predictor`
    integers: bool
    settings: str


_INTEGERS = "dense layers in int8, ranges from the pictures of the measurement, the rest as ours by default"

ENGINES: dict[str, Engine] = {
    "plain": Engine("plain", False, "the network itself"),
    "int8": Engine("packed", True, _INTEGERS),
    "openvino": Engine("openvino", False, "compiled by OpenVINO, anew each time"),
    "openvino-int8": Engine("openvino", True, f"compiled by OpenVINO, anew each time; {_INTEGERS}"),
}
"""Name → what it is."""


def chosen(names: Iterable[str], subject: Subject, device: str) -> tuple[tuple[str, ...], list[str]]:
    """The engines beside `auto` that were named ("all", or names), and notes on those that "all" leaves out here.

    Raises `UsageError` for a name that is none of theirs, and for an engine that is named and cannot compute this
    network on this device (cpu, cuda or mps); `MissingExtraError` where OpenVINO is named and not installed.
    """
    asked = tuple(names)
    known = (*ENGINES, DEFAULT, "all")
    if bad := [name for name in asked if name not in known]:
        raise unknown("engine", bad[0], known)
    if len(set(asked)) > 1 and "all" in asked:
        raise UsageError("--engines all stands alone", hint="--engines plain openvino")
    found, notes = [], []
    for name in ENGINES:
        if name not in asked and "all" not in asked:
            continue
        if (refusal := _refusal(name, subject, device)) is None:
            found.append(name)
        elif "all" not in asked:
            raise refusal
        else:
            install = f" ({refusal.hint})" if isinstance(refusal, MissingExtraError) else ""
            notes.append(f"left out: engine {name}: {refusal.what}{install}")
    return tuple(found), notes


def _refusal(name: str, subject: Subject, device: str) -> VitralError | None:
    """Why this engine cannot compute here; None where it can."""
    engine = ENGINES[name]
    hint = "--engines all, which measures what can be computed"
    if name != "plain" and device != "cpu":
        return UsageError(f"{name} computes on a processor, not on {device}", hint=f"--device cpu, or {hint}")
    if engine.integers and not isinstance(subject.config, ViTConfig):
        return UsageError("only a ViT computes in int8", where=subject.name, hint=hint)
    lacking = quantized.lacking
    if engine.name == "openvino":
        try:
            openvino.package()
        except MissingExtraError as error:
            return error
        lacking = openvino.lacking
    if engine.integers and (why := lacking()):
        return UsageError(why, where=f"engine {name}", hint=hint)
    return None


def predictor_by(engine: Engine, ours: Predictor, ranges: Ranges | None) -> Predictor:
    """The same network on the same machine by another engine; `ranges` are for those that compute in integers.

    What OpenVINO compiles is neither read from the user's cache nor kept there: measured, it shall be compiled, and a
    network with random weights must not take the place of one in use.
    """
    with openvino.anew():
        return Predictor(
            ours.model, ours.preprocessing, ours.classes, machine=ours.machine, engine=engine.name,
            ranges=ranges if engine.integers else None,
        )  # fmt: skip
