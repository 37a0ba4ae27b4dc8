"""The earlier run on the same images, whose held-out images a new run keeps, so that both can be compared.

The data of both are one folder or file, or one is a table of the images of the other, as `vitral label` writes it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitral.data import DataSet, Split
from vitral.data.dataset import relative_names
from vitral.data.same import Identity, find, short_name
from vitral.errors import RunError
from vitral.folders import is_run, same_path
from vitral.pretraining.methods import METHODS
from vitral.training.options import Run
from vitral.training.plan import Choice, Plan
from vitral.training.run_folder import RunFolder
from vitral.wording import count
from vitral.workflows.planning.job import Job

SPLIT_OPTIONS = ("val_fraction", "train_share", "stratified", "val_share", "seed", "split_seed")
"""Options that change the split."""
_TYPED_AGAIN = ("val_fraction", "seed", "split_seed")
"""Those that ask for the split of an earlier run if it had the same values."""
_ALIKE = ("model", "image_size", "batch_size", "minutes", "recipe", "precision")
"""Options on which the number of epochs that fit into a time depends."""
_LATEST = 50
"""Finished runs that are looked at."""
_SAME = 0.5
"""Share of the held-out images of a run that other data must contain to be of the same images."""
_MOST_GROWTH = 0.1
"""Share by which the number of training images may differ for the same number of epochs."""


@dataclass(frozen=True)
class Earlier:
    """A finished run on the same images."""

    folder: Path
    plan: Plan
    device: str
    """Name of the device that it was trained on."""
    train_images: int
    kept: tuple[int, ...] = ()
    """Its held-out images that are still there, by number in the train split of the data."""

    def epochs_of(self, job: Job) -> int | None:
        """Return the epochs that it planned, if those of `job` would be the same but for what a trial measures."""
        before, now = self.plan.run, job.run
        alike = all(getattr(before, name) == getattr(now, name) for name in _ALIKE)
        growth = abs(len(job.dataset["train"]) / self.train_images - 1)
        return before.epochs if alike and self.device == job.machine.name and growth <= _MOST_GROWTH else None

    def choice(self) -> Choice:
        """Return the line of the plan on the images that are kept."""
        why = f"{self.folder} held them out, too, so both runs can be compared; --split-seed 0 picks others"
        return Choice("held out before", count(len(self.kept), "image"), why)


def find_earlier(given: Mapping[str, Any], dataset: DataSet, folder: str, run: Run) -> Earlier | None:
    """Return the latest finished run on these images beside `folder`; None if there is none with held-out images.

    None as well with options that ask for a split of its own, for data with validation images, and for data by name.
    """
    asked = {name: given[name] for name in SPLIT_OPTIONS if name in given}
    own_split = not asked.keys() <= set(_TYPED_AGAIN) or "val" in dataset.splits
    if own_split or run.recipe in METHODS or not os.path.exists(os.path.expanduser(dataset.source)):
        return None
    with suppress(OSError):
        done = [one for one in Path(folder).parent.iterdir() if (one / "result.json").is_file() and is_run(one)]
        done.sort(key=lambda one: (one / "result.json").stat().st_mtime, reverse=True)
        for place in done[:_LATEST]:
            with suppress(RunError, KeyError):
                found = _read(RunFolder(place), dataset)
                if found and all(getattr(found.plan.run, name) == value for name, value in asked.items()):
                    return found
    return None


def _read(folder: RunFolder, dataset: DataSet) -> Earlier | None:
    """Return a run if it began with these images, and cut its validation images from them."""
    plan = folder.read_plan()
    cuts = plan.fingerprint is not None and plan.fingerprint.cuts_validation
    if not cuts or plan.run.task != dataset.targets.task:
        return None
    record = folder.read_held_out()
    if record is None or "val" not in record.splits:
        return None
    data, held, train = plan.located("data"), record.splits["val"].images, dataset["train"]
    is_source = same_path(data, dataset.source)
    if not is_source and not (_has_table(data, dataset.source) and _shares_names(held, train)):
        return None
    result = folder.read_result()
    kept = sorted(find(held, train).values())
    if not kept or (not is_source and len(kept) < _SAME * len(held)):
        return None
    return Earlier(folder.path, plan, str(result["device"]), int(result["images"]["train"]), tuple(kept))


def trained_on_held_out(folder: RunFolder, dataset: DataSet) -> bool:
    """True if a run was trained on images that this data holds out, in a table or folder of the same images.

    The run recorded the names of its training images, and the content of those that it held out. Of these, one must be
    here, since other data may have the same names.
    """
    record = None
    with suppress(RunError):  # weights load without it
        record = folder.read_held_out()
    if record is None:
        return False
    held = [name for part, split in dataset.splits.items() if part != "train" for name in relative_names(split.names)]
    if set(record.trained).isdisjoint(map(short_name, held)):
        return False
    images = [one for split in record.splits.values() for one in split.images]
    return any(find(images, split) for split in dataset.splits.values())


def _has_table(*places: str) -> bool:
    """True if one of these places is a file."""
    return any(os.path.isfile(os.path.expanduser(place)) for place in places)


def _shares_names(held: Sequence[Identity], split: Split) -> bool:
    """True if enough images have the same class folder and name: a fast look, before any of them is read."""
    there = {short_name(name) for name in relative_names(split.names)}
    return sum(short_name(one.name) in there for one in held) >= _SAME * len(held)
