"""`vitral pretrain`, whose options are fields of `Run`."""

from __future__ import annotations

import dataclasses
import shlex
import time
from pathlib import Path
from typing import Any

from vitral.cli import plan_only
from vitral.cli.options import Option
from vitral.cli.output import print_json, program, say
from vitral.cli.ranks import NPROC
from vitral.cli.train import DIGITS, NOT_IN_RUN, grouped, run_options
from vitral.distributed.environment import is_follower
from vitral.epoch_metrics import KNN, PROBE
from vitral.wording import in_groups


def pretrain(format: str = "text", **given: Any) -> int:
    """Train a network on images without labels.

    The weights are ordinary: `vitral train DATA --init RUN` starts from them. Options left out are chosen by the plan,
    which is printed before training.
    """
    began = time.monotonic()
    from vitral.workflows.pretrain import checked_method
    from vitral.workflows.pretrain import pretrain as run_pretraining

    if (planning := plan_only.take(given)) is not None:
        given["recipe"] = checked_method(given.pop("method", None))
        return plan_only.print_only(given, planning["report"], format)
    if given.get("data") is None and not (given.get("resume") and given.get("out")):
        given["data"] = DIGITS
    run = run_pretraining(began=began, **given)
    if is_follower():  # the first rank prints
        return 0
    if format == "json":
        print_json(run.result)
        return 0
    _print_result(run.folder, run.result)
    if not given.get("quiet"):
        _print_next_commands(run.folder)
    return 0


def pretrain_options() -> list[Option]:
    """Return the options of `vitral pretrain`: the fields of `Run` that it reads, the most used ones first."""
    from vitral.recipes.pretrain import UNSUPPORTED
    from vitral.training.options import LABEL_OPTIONS, PRETRAINING_OPTIONS

    fields = run_options(hidden=("recipe", *LABEL_OPTIONS, *UNSUPPORTED))
    fields["out"] = dataclasses.replace(fields["out"], default="runs/NAME-pretrain")
    first = [fields.pop(name) for name in (*_FIRST, *PRETRAINING_OPTIONS)]
    method = Option("method", str, "mae, mpp, dino or distill", "mae")
    return [first[0], method, *first[1:], NPROC, *NOT_IN_RUN, plan_only.OPTIONS[0], *grouped(fields)]


_FIRST = (
    "data",
    "init",
    "model",
    "image_size",
    "epochs",
    "minutes",
    "batch_size",
    "lr",
    "seed",
    "device",
    "precision",
    "out",
)
"""Options that `--help` lists first, after the method."""


def _print_result(folder: Path, result: Any) -> None:
    from vitral.evaluation.intervals import wilson_interval
    from vitral.evaluation.metrics import with_interval

    for metric in (KNN, PROBE):
        if metric.key in result:
            probed = result["probed"]
            interval = wilson_interval(result[metric.key] * probed["independent"], probed["independent"])
            images = in_groups(probed["images"], probed["groups"], "validation image")
            accuracy = with_interval(result[metric.key], interval)
            say(f"{metric.title}: accuracy {accuracy} on {images}, not used in training")
    if (report := folder / "report.html").is_file():
        say(f"Report   {report}")
    say(f"Weights  {folder / 'model.safetensors'}")


def _print_next_commands(folder: Path) -> None:
    run = shlex.quote(str(folder))
    say("\nNext:")
    for command in (f"train LABELED --init {run}", f"embed {run} IMAGES", f"inspect {run}"):
        say(f"  {program()} {command}")
