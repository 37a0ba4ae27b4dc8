"""Numbers fitted to the outputs of a network, and the changes after which they still hold.

A run fits them on its validation images: to one network, at one size, from one view of each image, in floating point.
They are saved with the weights and travel with them. Whoever changes what is computed asks `kept` for those that hold:
reading weights at another size or for other classes (`weights.load`), and a predictor that averages views or computes
in int8 (`inference.outputs.holding`). The table in docs/reliability.md has a row for each number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from vitral.data.targets import DEFAULT_TASK, TARGETS
from vitral.errors import UsageError
from vitral.weights.native import Weights
from vitral.weights.notes import LeftOut
from vitral.weights.report import LoadReport

Fields = Mapping[str, Any]
"""The output of `native.Weights`: its task, and the fitted numbers."""


class Change(NamedTuple):
    """A change of what a network computes from an image."""

    where: str
    """Words for a network with the change: "at another size"."""
    undo: str
    """Words to type for a network without it."""


CHANGES: Mapping[str, Change] = {
    "size": Change(
        "at another size of images, patches or pixels",
        "leave out --patch-size, or train at that size: vitral train DATA --init WEIGHTS",
    ),
    "levels": Change(
        "at other levels than in training", "leave out --levels, or train with them: vitral train DATA --init WEIGHTS"
    ),
    "head": Change("with other classes", "vitral train DATA --init WEIGHTS"),
    "weights": Change("with changed weights", "vitral train DATA --init WEIGHTS"),
    "views": Change("averaged over views", "leave out --tta"),
    "int8": Change("in int8", "leave out --precision int8"),
}
"""Rounding is none: fp32, bf16 and every engine compute the same network."""

NUMBERS: Mapping[str, str] = {
    "temperature": "the temperature",
    "scores": "the sets of --coverage",
    "cuts": "the thresholds of --right",
    "unknown": "the threshold of unknown images",
    "thresholds": "the thresholds of the labels",
    "mean": "the mean and deviation of the numbers",
    "ranges": "the ranges of int8",
}
"""Number → words for it. All are fields of an output, but ranges, which are in a file beside the weights."""

_ON_REQUEST = {"scores", "cuts"}
"""Numbers that are used only if a user asks for them, who then gets `not_fitted`."""

_HOLDS: Mapping[str, tuple[str, ...]] = {
    "temperature": ("views", "int8"),  # it divides the logits of each view; int8 approximates the same logits
    "mean": ("size", "levels", "weights", "views", "int8"),  # of the training targets, not of outputs
    "ranges": ("views",),  # a view is an image as any other, and values beyond a range are clipped
}


def holds(number: str, changes: Iterable[str]) -> bool:
    """True if a fitted number still holds after all of these changes."""
    return set(changes) <= set(_HOLDS.get(number, ()))


def kept(fields: Fields, change: str) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of an output that still hold after a change, and a note on those that do not.

    Thresholds become those of a task that has fitted none (`Targets.threshold`). Without scores or cuts `unfitted` has
    the change, which `not_fitted` explains. Fields with `integers` were fitted in int8.
    """
    if change == "int8" and fields.get("integers"):
        return dict(fields), []
    lost = [name for name in NUMBERS if name in fields and not holds(name, [change])]
    task = fields.get("task", DEFAULT_TASK)
    threshold = TARGETS[task].threshold if task in TARGETS else None
    if "thresholds" in lost and threshold is None:  # a field of another package's task, which means something else
        lost.remove("thresholds")
    still = {name: value for name, value in fields.items() if name not in lost}
    if "thresholds" in lost:
        still["thresholds"] = [threshold] * len(fields["thresholds"])
        lost = lost if list(fields["thresholds"]) != still["thresholds"] else []
    if _ON_REQUEST & {*lost}:
        still["unfitted"] = change
    if {*lost} <= _ON_REQUEST:
        return still, []
    named = ", ".join(NUMBERS[name] for name in lost)
    note = f"not fitted to the answers {CHANGES[change].where}, and left out: {named}"
    return still, [LeftOut(note)]


def still_fitted(weights: Weights, account: LoadReport, change: str) -> tuple[dict[str, object], LoadReport]:
    """Return the output with the numbers that still hold after a change, and the report with the change."""
    output, notes = kept(weights.output, change)
    return output, replace(account.noted(*notes), changes=(*account.changes, change))


def not_fitted(number: str, change: str) -> UsageError:
    """The error for a number that is asked for after a change."""
    where, undo = CHANGES[change]
    why = "they were fitted to the probabilities of the validation images as the run computed them"
    return UsageError(f"{NUMBERS[number]} do not hold {where}", why=why, hint=undo)


def check_ranges(changes: Iterable[str], source: object) -> None:
    """Raise `UsageError` if the ranges of int8 do not hold for a network with these changes."""
    if bad := [change for change in changes if not holds("ranges", [change])]:
        where, undo = CHANGES[bad[0]]
        why = "they were measured on the network as it was trained"
        raise UsageError(f"the ranges of int8 do not hold {where}", where=str(source), why=why, hint=undo)
