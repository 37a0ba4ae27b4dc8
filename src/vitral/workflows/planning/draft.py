"""A draft of a plan. Each planning step takes a draft and returns a new one with its choices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vitral.data import DataSet
from vitral.data.checks.groups import Sets
from vitral.device import Machine
from vitral.model import ModelConfig
from vitral.recipes.stats import DatasetStats
from vitral.training.options import Run
from vitral.training.plan import Choice, Plan
from vitral.weights.loaded import Loaded
from vitral.workflows.planning.earlier import Earlier


@dataclass(frozen=True)
class Draft:
    """The state of a plan between two steps."""

    given: Mapping[str, Any]
    """Options stated by the user, which override the recipe's."""
    whole: DataSet
    """The data as loaded."""
    dataset: DataSet
    """The data with the run's own splits."""
    split_choices: tuple[Choice, ...]
    stats: DatasetStats
    machine: Machine
    recipe: Plan
    """The plan that the recipe proposes."""
    run: Run
    choices: tuple[Choice, ...] = ()
    init: Loaded | None = None
    teacher: Loaded | None = None
    start: Choice | None = None
    """The line on the weights that the run starts from."""
    near: Sets = ()
    """Near-duplicates among the train images of the whole data."""
    near_held_out: Mapping[str, Sets] = field(default_factory=dict)
    """Other split of the whole data → its near-duplicates."""
    earlier: Earlier | None = None
    """The run on the same data whose held-out images are kept."""
    network: ModelConfig | None = None

    @property
    def config(self) -> ModelConfig:
        """The configuration of the network; available after `build_config`."""
        assert self.network is not None
        return self.network

    @property
    def images(self) -> int:
        """Number of training images."""
        return len(self.dataset["train"])

    def change(self, *choices: Choice, **options: Any) -> Draft:
        """Return a draft with changed options of the run, and the choices that explain them."""
        run = dataclasses.replace(self.run, **options) if options else self.run
        return dataclasses.replace(self, run=run, choices=(*self.choices, *choices))


Step = Callable[[Draft], Draft]


def format_value(value: object) -> str:
    """Format a value for the printed plan."""
    if isinstance(value, bool):
        return "on" if value else "off"
    separator = "×" if isinstance(value, tuple) and all(isinstance(one, int) for one in value) else " "
    return separator.join(map(str, value)) if isinstance(value, tuple) else str(value)
