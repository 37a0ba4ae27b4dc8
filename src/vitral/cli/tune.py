"""`vitral tune`: search the options that the plan leaves open."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from vitral.cli.options import DataRoot, Format, Help
from vitral.cli.output import say
from vitral.cli.study import Data, Set, carry_out, fixed


def tune(
    data: Data,
    *,
    trials: Annotated[
        int, Help("most runs; an option is varied for every four of them, the most important first")
    ] = 20,
    minutes: Annotated[
        float | None, Help("time for training and validation of all trials together (default: the plan's epochs each)")
    ] = None,
    set_: Set = (),
    data_root: DataRoot = "data",
    out: Annotated[str | None, Help("folder of the search (default: studies/NAME-tune)")] = None,
    format: Format = "text",
) -> int:
    """Search for the best training options, such as learning rate and augmentation, with Optuna.

    The first trial has the plan's own values. Validation images choose; the winner's accuracy on test images, which
    chose nothing, is reported with the command that trains it. The same command continues a search that was stopped.
    """
    from vitral.studies.sampling import check_installed
    from vitral.studies.spans import Span
    from vitral.studies.study import shown
    from vitral.studies.tuning import tune_study

    check_installed()
    folder = out or os.path.join("studies", f"{Path(data).stem or 'data'}-tune")
    study = tune_study(data, trials, minutes, fixed(set_, data_root), folder)
    for name, values in study.vary.items():
        searched = str(values) if isinstance(values, Span) else ", ".join(map(shown, values))
        say(f"tuning {name}: {searched} (the plan: {shown(study.first[name])})")
    return carry_out(study, folder, format)
