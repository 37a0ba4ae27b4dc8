"""Optimizers by name: torch's own, except for Muon's step."""

from __future__ import annotations

from vitral.model.own import is_own
from vitral.training.optimizers.adam import ADAM, ADAMW
from vitral.training.optimizers.muon import MUON
from vitral.training.optimizers.own import own_rule
from vitral.training.optimizers.rule import UpdateRule
from vitral.training.optimizers.sgd import SGD

OPTIMIZERS: dict[str, UpdateRule] = {
    "adamw": ADAMW,
    "adam": ADAM,
    "sgd": SGD,
    "muon": MUON,
}


def rule_of(name: str) -> UpdateRule:
    """Return the rule of an optimizer by name, or of one of the user."""
    return own_rule(name) if is_own(name) else OPTIMIZERS[name]
