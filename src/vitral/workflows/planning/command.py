"""The command line of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitral.console import command_line
from vitral.pretraining.methods import METHODS


def command(given: Mapping[str, Any]) -> str:
    """Return the command line for these options."""
    data = [given["data"]] if "data" in given else []
    options = {name: value for name, value in given.items() if name != "data"}
    if (recipe := given.get("recipe")) in METHODS:
        del options["recipe"]
        return command_line("pretrain", data, {"method": recipe, **options})
    return command_line("train", data, options)
