"""`vitral train`, whose options are the fields of `Run`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from vitral.cli import plan_only
from vitral.cli.options import Option
from vitral.cli.output import print_json, print_text, program, say
from vitral.cli.ranks import NPROC
from vitral.console import command_line, stderr
from vitral.distributed.environment import is_follower, launched
from vitral.errors import ImageError, UsageError, VitralError
from vitral.folders import is_run
from vitral.wording import flag

if TYPE_CHECKING:
    from vitral.training.options import Run


def train(format: str = "text", find_lr: bool = False, **given: Any) -> int:
    """Train a network on your images.

    vitral chooses every option that you leave out, and prints its choices with reasons before training.
    """
    began = time.monotonic()
    if (planning := plan_only.take(given)) is not None:
        return plan_only.print_only(given, planning["report"], format)
    if find_lr:
        return _find_lr(format, given)
    from vitral.data.label_table import labels_beside
    from vitral.workflows.train import lacks_data
    from vitral.workflows.train import train as run_training

    if lacks_data(given, given.get("resume", False)):
        given["data"] = DIGITS
        if not (given.get("resume") or is_follower()):
            say("note: no DATA given, so vitral trains on the handwritten digits of scikit-learn")
    run = run_training(began=began, **given)
    if is_follower():  # the first rank prints
        return 0
    if format == "json":
        print_json(run.result)
    else:
        _print_result(run.folder, run.result)
        if not given.get("quiet"):
            for note in labels_beside(str(run.result["data"])):
                say(f"note: {note}")
            _print_before(run.folder, run.result)
            _print_worth_a_look(run.folder)
            _print_next_commands(run.folder, run.result)
    return 0


DIGITS = "digits"
"""Data of a command without DATA, so that the first one needs no images."""


def _find_lr(format: str, given: dict[str, Any]) -> int:
    """Test learning rates, print the suggestion and the curve, and write them with --out."""
    for name in ("resume", "overwrite"):
        if given.pop(name, False):
            what = f"--find-lr and {flag(name)} are mutually exclusive"
            raise UsageError(what, why="it makes no run", hint="leave one out")
    from vitral.pretraining.methods import command
    from vitral.workflows import learning_rates_page as page
    from vitral.workflows.learning_rates import find_lr

    console, out = stderr(quiet=given.pop("quiet", False)), given.pop("out", None)
    if out:
        page.check_free(Path(out))
    test = find_lr(given, console)
    if format == "json":
        print_json(test.to_json())
    else:
        for line in (*page.on_terminal(test), "", page.in_words(test)):
            print_text(line)
    if out:
        page.write(Path(out), test, command({**given, "find_lr": True, "out": out}))
        say(f"Page     {Path(out) / page.PAGE}")
    if test.suggested is not None:
        say(f"\nNext:\n  {command({**given, 'lr': test.suggested}).replace('vitral', program(), 1)}")
    return 0


def train_options() -> list[Option]:
    """Return the options of `vitral train`: the fields of `Run`, the most used ones first, and some others."""
    from vitral.training.options import DECODER_OPTIONS, PRETRAINING_OPTIONS

    fields = run_options(hidden=[name for name in PRETRAINING_OPTIONS if name not in DECODER_OPTIONS])
    first = [fields.pop(name) for name in _FIRST]
    return [*first, NPROC, FIND_LR, *NOT_IN_RUN, *plan_only.OPTIONS, *grouped(fields)]


def grouped(fields: Mapping[str, Option]) -> Iterator[Option]:
    """Yield options of `Run`, each with the heading of its group."""
    from vitral.training.options import Run
    from vitral.training.signatures import GROUPS

    titles, title = {first: title for title, first in GROUPS.items()}, ""
    for name in Run.__dataclass_fields__:
        title = titles.get(name, title)
        if name in fields:
            yield dataclasses.replace(fields[name], group=title)


def run_options(hidden: Sequence[str]) -> dict[str, Option]:
    """Return an option for each field of `Run`, without the `hidden` ones."""
    from vitral.model.own import OWN_PARTS
    from vitral.training.options import Run

    kinds = get_type_hints(Run)
    fields = {
        name: Option(name, kinds[name], field.metadata["help"], _DEFAULTS.get(name), own=name in OWN_PARTS)
        for name, field in Run.__dataclass_fields__.items()
        if name not in hidden
    }
    fields["data"] = dataclasses.replace(fields["data"], usage="[DATA]")
    return fields


_FIRST = (
    "data",
    "init",
    "recipe",
    "model",
    "image_size",
    "epochs",
    "minutes",
    "batch_size",
    "lr",
    "augment",
    "val_fraction",
    "bad_images",
    "early_stop",
    "seed",
    "device",
    "precision",
    "out",
)
"""Options that `--help` lists first."""

FIND_LR = Option(
    "find_lr",
    bool,
    "test a range of learning rates and suggest one, without training; --out also writes the curve to a folder",
    False,
)
NOT_IN_RUN = (
    Option("resume", bool, "continue the run in --out where it stopped; bit-identical on a CPU", False),
    Option("overwrite", bool, "replace the run in --out", False),
    Option("quiet", bool, "print only the result", False),
    Option("format", Literal["text", "json"], "output format", "text"),
)

_DEFAULTS = {
    "data": "digits",
    "data_root": "data",
    "seed": "0",
    "recipe": "usually backbone for color images, otherwise small; finetune with --init WEIGHTS",
    "out": "runs/NAME",
    "device": "auto",
    "bad_images": "error",
    "freeze": "nothing",
    "loss": "mse",
}
"""Defaults that `--help` shows; the plan chooses the values of the other options."""


def _print_result(folder: Path, result: Mapping[str, Any]) -> None:
    from vitral.evaluation.enough import FOR_ADVICE
    from vitral.evaluation.metrics import GROUPED
    from vitral.workflows.tasks import evaluation_of

    split = "test" if "test" in result else "val"
    chosen = "best epoch" if result["epochs"] else "regularization"
    last = result.get("keep") == "last"
    kind, use = {
        "test": ("test image", "not used in training"),
        "val": ("validation image", "not used in training" if last else f"also used to choose the {chosen}"),
    }[split]
    if split in result:
        evaluation = evaluation_of(result[split])
        say("")
        say(f"{evaluation.headline()} on {evaluation.counted(kind)}, {use}")
        if evaluation.widened:
            say(f"({GROUPED})")
        if expected := evaluation.of_ten_new():
            say(expected)
        if unmeasured := evaluation.unmeasured():
            say(unmeasured)
    if (report := folder / "report.html").is_file():
        say(f"Report   {report}")
    best, epochs = result.get("best_epoch"), result["epochs"]
    if best == 0 and epochs:
        say("No epoch was better than the linear probe of the initial weights, which was kept")
    enough = result.get("val", {}).get("groups", result["images"].get("val", 0)) >= FOR_ADVICE
    if best and enough and not last and epochs - best >= _WASTED_EPOCHS and epochs >= 2 * best:
        say(f"Epoch {best} of {epochs} was the best; --early-stop {_WASTED_EPOCHS} would have stopped earlier")


def _print_before(folder: Path, result: Mapping[str, Any]) -> None:
    """Compare with the earlier run whose held-out images this one keeps, if they are few enough to take no time."""
    from vitral.training.run_folder import RunFolder

    earlier = RunFolder(folder).read_plan().paths.get("earlier")
    images = sum(count for split, count in result["images"].items() if split != "train")
    if launched() or earlier is None or not is_run(Path(earlier)) or images > _QUICKLY:
        return
    from vitral.studies.comparison import before_and_now

    before = os.path.relpath(earlier)
    with contextlib.suppress(VitralError, OSError, ValueError):
        say(f"{before_and_now(before, folder)}: vitral compare {shlex.join([before, str(folder)])}")


_QUICKLY = 500
"""Held-out images up to which two runs are compared at the end of the second."""

_WASTED_EPOCHS = 20
"""Epochs after the best one at which `--early-stop` is suggested."""


def _print_worth_a_look(folder: Path) -> None:
    """Print the findings about the images that are most worth a look, if a second is enough to see them."""
    from vitral.data.checks.findings import counted
    from vitral.data.checks.validate import glance
    from vitral.training.run_folder import RunFolder
    from vitral.workflows.planning.run_data import load_run_data

    with contextlib.suppress(VitralError):
        plan = RunFolder(folder).read_plan()
        if worst := counted(glance(load_run_data(plan).dataset), most=3):
            command = command_line("data", ["check", plan.run.data], {}).replace("vitral", program(), 1)
            say(f"Images   worth a look: {worst}: {command}")


def _print_next_commands(folder: Path, result: Mapping[str, Any]) -> None:
    """Suggest what a person does next: classify a folder, explain an image that was held out, show it to others."""
    from vitral.data.targets import DEFAULT_TASK
    from vitral.training.run_folder import RunFolder

    say("\nNext:")
    run, data = shlex.quote(str(folder)), result["data"]
    image = _held_out_image(folder)
    if image or os.path.exists(data) or "://" in data:
        named = shlex.quote(image) if image else "IMAGE"  # an archive and shards have no files
        first = [f"predict {run} YOUR_IMAGES/ --out answers.csv{_sure(folder)}", f"explain {run} {named}"]
    else:  # a data set by its name
        first = ["train YOUR_IMAGES/"]
    plan = RunFolder(folder).read_plan()
    labels = [_check_labels(plan.run)] if plan.run.task == DEFAULT_TASK else []
    for line in (*first, f"evaluate {run}", *labels, f"serve {run}"):
        if not (plan.run.pack and line.startswith(("explain", "serve"))):  # neither explained nor served
            say(f"  {program()} {line}")


def _sure(folder: Path) -> str:
    """Return the option `--right 0.95`, if the run can promise that this share of the sure answers is correct."""
    from vitral.inference.sure import cuts_from_json
    from vitral.weights import native

    with contextlib.suppress(VitralError):
        cuts = native.read(folder / "model.safetensors").output.get("cuts")
        if cuts and cuts_from_json({"cuts": cuts})[-1].promised >= _PROMISED:
            return f" --right {_PROMISED}"
    return ""


_PROMISED = 0.95


def _check_labels(run: Run) -> str:
    """Return the command that ranks the labels of a run's data, without the name of the program."""
    from vitral.training.options import Run

    options = {"labels": True, "class_folders": run.class_folders, "data_root": run.data_root}
    defaults = {"class_folders": Run.class_folders, "data_root": Run.data_root}
    changed = {name: value for name, value in options.items() if value != defaults.get(name)}
    return command_line("data", ["check", run.data], changed).removeprefix("vitral ")


def _held_out_image(folder: Path) -> str | None:
    """Return the file of a readable image, held out if any was; None if the data are no files."""
    from vitral.data.images.decode import read_image
    from vitral.training.run_folder import RunFolder
    from vitral.workflows.planning.run_data import load_run_data

    with contextlib.suppress(VitralError):
        splits = load_run_data(RunFolder(folder).read_plan()).dataset.splits
        for split in (splits[name] for name in ("test", "val", "train") if name in splits):
            for name in split.names[:5]:
                with contextlib.suppress(ImageError):
                    read_image(name)
                    return name
    return None
