"""The plan of a run: every option with its reason."""

from __future__ import annotations

import dataclasses
import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitral.console import html_table
from vitral.data.checks.fingerprint import Fingerprint
from vitral.data.checks.groups import Sets
from vitral.training.options import Run


@dataclass(frozen=True)
class Choice:
    """A line of the plan: a choice and its reason."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """A complete run and the reasons for its choices."""

    run: Run
    choices: tuple[Choice, ...] = ()
    paths: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Option → absolute path at the start of the run, for a saved run."""
    fingerprint: Fingerprint | None = None
    """Fingerprint of the data at planning; None for runs of versions without it."""
    near: Sets = ()
    """Near-duplicates among the train images of the data, by number, which the validation cut kept together."""
    near_held_out: Mapping[str, Sets] = dataclasses.field(default_factory=dict)
    """Other split of the data → its near-duplicates, by number, which an interval counts once."""
    command: str = ""
    """Command that started a saved run."""
    most_epochs: int | None = None
    """With `--minutes`, the most epochs that the recipe allows …"""
    training_seconds: float | None = None
    """… and the seconds of them for training and validation; None for all."""
    kept: Sequence[int] = ()
    """Train images of the data that an earlier run held out, by number; this run holds them out, too."""
    folder: Path | None = None
    """Folder of a saved run, which has the record of its held-out images."""

    def _repr_html_(self) -> str:
        """Every choice with its reason, for a notebook."""
        return html_table("Plan", [(one.name, one.value, html.escape(one.reason)) for one in self.choices])

    @property
    def restart_hint(self) -> str:
        """Hint for a saved run that cannot be resumed."""
        return f"begin again: {self.command} --overwrite (or another --out)"

    def located(self, option: str) -> Any:
        """Resolve an option that may be a path: as typed, or the saved absolute path if that exists and the typed path,
        seen from here, is missing or another file.
        """
        typed, saved = getattr(self.run, option), self.paths.get(option)
        if saved is None or not os.path.exists(saved):
            return typed
        here = os.path.expanduser(typed)
        return typed if os.path.exists(here) and os.path.samefile(here, saved) else saved
