"""Optimizers by name: torch's own, except for Muon's step."""

from __future__ import annotations

from vitral.training.optimizers.adam import ADAM, ADAMW
from vitral.training.optimizers.muon import MUON
from vitral.training.optimizers.rule import UpdateRule
from vitral.training.optimizers.sgd import SGD

OPTIMIZERS: dict[str, UpdateRule] = {
    "adamw": ADAMW,
    "adam": ADAM,
    "sgd": SGD,
    "muon": MUON,
}
