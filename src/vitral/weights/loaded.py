"""Weights as they were read, with their load report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vitral.model import Network
from vitral.weights import native
from vitral.weights.native import Weights
from vitral.weights.report import LoadReport


@dataclass(frozen=True, eq=False)
class Loaded:
    """Weights in vitral's layout, and their load report."""

    weights: Weights
    account: LoadReport
    format: str
    reference: str
    """The requested reference; one of a hub is pinned to the fetched revision."""
    scheme: str = "bilinear-corners"
    """Scheme of the weights' origin to resize positions."""
    switches: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    """Part → settings of a network in memory that change how it computes, not what (`model.settings.SWITCHES`)."""

    def build(self) -> Network:
        """Build the network with these weights, see `native.build`."""
        built = native.build(self.weights)
        for part, switches in self.switches.items():
            vars(built.get_submodule(part)).update(switches)
        return built
