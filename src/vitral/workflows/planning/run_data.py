"""The data of a run: splitting by its options, and loading again later with a check for changes."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vitral.data import DataSet, Split, load
from vitral.data.checks.fingerprint import Fingerprint, digest
from vitral.data.checks.groups import Sets, groups_of_several, with_near
from vitral.data.checks.validate import drop_unopened
from vitral.data.dataset import in_order
from vitral.data.held_out import FoundAgain, HeldOut
from vitral.data.same import same_images
from vitral.data.sources.unlabeled import load_images
from vitral.data.splits import subset, with_validation
from vitral.data.targets import Labeling
from vitral.errors import DataError, VitralError
from vitral.evaluation.enough import FOR_ADVICE
from vitral.evaluation.intervals import count_groups
from vitral.pretraining.methods import METHODS, command_of
from vitral.training.options import Run
from vitral.training.plan import Choice, Plan
from vitral.training.run_folder import RunFolder
from vitral.wording import count, in_groups, some

_WIDER_FRACTION = 0.3
"""Fraction to hold out that is recommended where validation images are few."""


def cuts_validation(run: Run, dataset: DataSet) -> bool:
    """True if the labeled images of a validation split are cut from train."""
    cut = run.val_fraction != 0 and run.val_share == 1.0 and "val" not in dataset.splits
    return cut and run.recipe not in METHODS and "train" in dataset.splits


def split_for(run: Run, dataset: DataSet, kept: Sequence[int] = ()) -> tuple[DataSet, tuple[Choice, ...]]:
    """Return the data with the splits of the run, and the choices that explain them.

    The train images `kept`, by number, are held out: an earlier run did so.
    """
    if run.recipe not in METHODS:
        dataset.targets.check(dataset.classes, dataset.source)
    reasons: list[Choice] = []
    original = set(dataset.splits)
    if run.val_share == 1.0:  # without val, `subset` draws a smaller share together with that of train (Places365)
        seed = run.seed if run.split_seed is None else run.split_seed
        dataset = with_validation(dataset, run.val_fraction, seed, kept)
    if (run.train_share, run.val_share) != (1.0, 1.0):
        val_share = run.val_share if "val" in dataset.splits or run.val_share < 1 else 0.0
        dataset = subset(dataset, run.train_share, val_share, run.seed, stratified=run.stratified)
        why = f"the rest is not used; of the validation images, {run.val_share:.0%} are used"
        reasons.append(Choice("share", f"{run.train_share:.0%} of the training images", why))
    counts = {name: len(split) for name, split in dataset.splits.items()}
    reasons.append(Choice("training", count(counts["train"], "image"), _described(run, dataset)))
    if "val" in original:
        reasons.append(Choice("validation", _counted(dataset["val"]), "the images of the val split"))
    elif "val" in counts:
        why = f"set aside to measure accuracy, about the same fraction of {dataset.targets.strata_noun}"
        if "test" in counts:
            why += "; the test images are used once, at the end"
        if groups := groups_of_several(dataset["train"]) + groups_of_several(dataset["val"]):
            together = "near-duplicates, and other images that belong together, are in the same split"
            why += f"; {together} ({count(groups, 'group')})"
        if missing := _absent(dataset, "val"):
            why += f"; no image of {some([repr(name) for name in missing])}"
        few = count_groups(dataset["val"].groups, counts["val"]) < FOR_ADVICE
        if few and (run.val_fraction or 0) < _WIDER_FRACTION:
            why += f"; too few for a reliable accuracy: --val-fraction {_WIDER_FRACTION} sets aside more"
        reasons.append(Choice("validation", _counted(dataset["val"]), why))
    elif "test" in counts:
        dataset = dataclasses.replace(dataset, splits={"train": dataset["train"], "val": dataset["test"]})
        reasons.append(
            Choice(
                "validation",
                _counted(dataset["val"]),
                "the images of the test split, because nothing is split off from the training images",
            )
        )
    else:
        why = "all images are used for training: accuracy is not measured, and the last epoch is kept"
        reasons.append(Choice("validation", "none", why))
    return dataset, (*reasons, *_absent_classes(run, dataset))


def _described(run: Run, dataset: DataSet) -> str:
    """Name what the images are labeled with, so that a wrong layout of folders is seen before training."""
    if run.recipe in METHODS:
        return "without labels"
    if dataset.targets.sequence:
        return "labeled with texts"
    nouns = ("class", "classes") if dataset.targets.one_class else ("column", "columns")
    return f"{count(len(dataset.classes), *nouns)}: {some(dataset.classes, _NAMED)}"


_NAMED = 8
"""Classes that the plan names."""


def _counted(split: Split) -> str:
    """Number of images, and of groups if there are fewer."""
    return in_groups(len(split), count_groups(split.groups, len(split)))


def _absent(dataset: DataSet, split: str) -> list[str]:
    """List the classes without an image in a split; none for tasks without classes."""
    if not dataset.targets.one_class:
        return []
    counts = dataset.targets.counts(dataset[split].labels, len(dataset.classes))
    return [name for name, count in zip(dataset.classes, counts, strict=True) if not count]


def _absent_classes(run: Run, dataset: DataSet) -> list[Choice]:
    """Warn of classes without a training image, which the network cannot learn."""
    if not dataset.targets.one_class or run.recipe in METHODS:
        return []
    absent = _absent(dataset, "train")
    if not absent:
        return []
    way = (
        "use a larger --train-share, or add --stratified" if run.train_share < 1 else "add images, or remove the class"
    )
    why = f"no training image of {some(absent, 5)}: {way}"
    return [Choice("classes", f"WARNING: {len(absent)} of {len(dataset.classes)} without images", why)]


@dataclass(frozen=True, eq=False)
class RunData:
    """The current data of a saved run, in its splits."""

    dataset: DataSet
    began: Fingerprint | None
    """Their contents when the run was planned; None for a run from before these were recorded."""
    now: Fingerprint
    record: HeldOut | None = None
    """The held-out images when the run began; None if the data have not changed since, or without a record."""
    again: Mapping[str, FoundAgain] = dataclasses.field(default_factory=dict)
    """Splits that were put together again from the record."""

    @cached_property
    def changes(self) -> tuple[str, ...]:
        """Changes since the run was planned, one clause each."""
        return self.began.changes(self.now) if self.began else ()

    @cached_property
    def trains_alike(self) -> bool:
        """True if the training images are those that the run began with, whatever became of those that it left out."""
        if not self.changes:
            return True
        if self.record is None or self.began is None or self.dataset.classes != self.began.classes:
            return False
        train = self.record.without_skipped(self.dataset["train"])
        return digest(train, self.dataset.classes) == self.record.trained_on

    @property
    def continues(self) -> bool:
        """True if training can go on as it began: the held-out images are the same, too."""
        held_out = [name for name in self.dataset.splits if name != "train"]
        return self.trains_alike and all(
            self.again[name].as_before if name in self.again else self.is_same(name) for name in held_out
        )

    def changed(self, hint: str) -> DataError:
        """Return the error for changed data, with the names of missing training images."""
        missing = self.record.missing(self.dataset["train"]) if self.record and "train" in self.dataset.splits else []
        named = (f"missing: {some(missing)}",) if missing else ()
        return _changed(self.dataset, (*self.changes, *named), hint)

    def check_split(self, split: str) -> str:
        """Return a note on the changes if the images of `split` are not those that the run was planned with.

        Raises `DataError` if the network may have been trained on some of them.
        """
        if split in self.again:
            return self.again[split].describe(split)
        if self.began is None or self.is_same(split):
            return ""
        if origin := self.doubt(split):
            what = f"the network may have been trained on the current {split} images"
            why = f"{origin}, and the data have changed since: {'; '.join(self.changes)}"
            hint = "restore the data, or set DATA to a folder of images that the network has never seen"
            raise DataError(what, where=self.dataset.source, why=why, hint=hint)
        return f"The {split} images have changed since the run began: {'; '.join(self.changes)}."

    def missing_test(self, split: str) -> str:
        """Return a note that `split` is used because the run's test images are missing; else ""."""
        gone = self.began and "test" in self.began.digests and "test" not in self.now.digests
        return f"The run's test images are missing: evaluated on {split}." if gone else ""

    def doubt(self, split: str) -> str:
        """Return how images of a changed split may have been training images; "" if they were not."""
        began = self.began
        if began is None or split == "train" or self.is_same(split) or self.is_same("train"):
            return ""
        if split == "val" and (began.cuts_validation or self.now.cuts_validation):
            return "the val images were split off from the training images"
        if split not in began.digests:
            return f"the data had no {split} images when the run began"
        return "some may have been moved there from train" if began.may_have_moved(self.now, split) else ""

    def is_same(self, split: str) -> bool:
        """True if a split has its original images or never existed.

        A new split may have the images of another one that is not trained on: without val, test was the run's val.
        """
        if self.began is None:
            return True
        before, now = self.began.digests, self.now.digests.get(split)
        if split in before:
            return now == before[split]
        return now is None or now in [one for name, one in before.items() if name != "train"]


def load_run_data(plan: Plan) -> RunData:
    """Load the data of a saved run. Raises `DataError` if they are missing or can no longer be split.

    After changes, held-out images that cannot be told from training images by their split are found by their record.
    """
    if (kept := plan.paths.get("data")) and not os.path.exists(os.path.expanduser(plan.located("data"))):
        why = f"the run was trained on {plan.run.data}, which vitral looks for relative to the run folder"
        moved = f"vitral {command_of(plan.run.recipe)} PATH --out {shlex.quote(plan.run.out or 'RUN')} --resume"
        hint = f"restore them, or give other images as DATA; if they have moved: {moved}"
        raise DataError("the run's own images are missing", where=kept, why=why, hint=hint)
    data, root = plan.located("data"), plan.located("data_root")
    if plan.run.recipe in METHODS:
        whole = load_images(data, root=root)
    else:
        wanted = Labeling(plan.run.task, plan.run.label_separator, plan.run.targets, plan.run.class_folders)
        whole = load(data, root=root, wanted=wanted, tasks=(plan.run.task,))
    opened = _opened(plan, whole)
    try:
        found = _split_again(plan, opened)
    except VitralError as error:  # the data could be split when the run was planned
        if plan.fingerprint is None:
            raise
        unsplit = RunData(opened, plan.fingerprint, Fingerprint.of(opened, opened))
        found = _found_again(plan, opened, unsplit)
        if "val" not in found.again:
            raise _changed(whole, unsplit.changes, "restore them") from error
        return found
    return _found_again(plan, opened, found) if found.changes else found


def _split_again(plan: Plan, opened: DataSet) -> RunData:
    """Split the present data as the run's options say."""
    dataset, _ = split_for(plan.run, with_near(opened, _near(plan)), plan.kept)
    found = RunData(dataset, plan.fingerprint, Fingerprint.of(opened, dataset))
    if plan.near_held_out and found.changes:  # their numbers are those of other images
        dataset, _ = split_for(plan.run, with_near(opened, {"train": plan.near}), plan.kept)
        found = dataclasses.replace(found, dataset=dataset)
    return found


def _found_again(plan: Plan, opened: DataSet, found: RunData) -> RunData:
    """Put the splits in doubt together again, as far as the run's record has their images and these are there."""
    record = RunFolder(plan.folder).read_held_out() if plan.folder else None
    if record is None or found.began is None:
        return found
    before = found.began.classes
    known = before if set(before) <= set(opened.classes) else None  # else classes have other names now
    splits, again = dict(found.dataset.splits), dict[str, FoundAgain]()
    for split in record.splits:
        cut = split == "val" and found.began.cuts_validation
        where = "train" if cut else split
        if where not in opened.splits or not (found.doubt(split) or (cut and not found.is_same(split))):
            continue
        there = record.find(split, opened, where, known)
        if not len(there.images):
            continue
        splits[split], again[split] = there.images, there
        if cut:
            rest = np.setdiff1d(np.arange(len(opened["train"])), there.places)
            splits["train"] = opened["train"].select(rest)
    if known and opened.targets.one_class and again:
        splits["train"] = _of_classes(splits["train"], opened.classes, known)
    return dataclasses.replace(
        found, record=record, again=again, dataset=dataclasses.replace(found.dataset, splits=in_order(splits))
    )


def _of_classes(split: Split, classes: Sequence[str], known: Sequence[str]) -> Split:
    """Return the images of known classes: those of a class that came later are not the run's."""
    numbers = [number for number, name in enumerate(classes) if name in set(known)]
    return split.select(np.flatnonzero(np.isin(split.labels, numbers)))


def is_data_of(plan: Plan, dataset: DataSet) -> bool:
    """True if a saved run began with this data, in any place; False if the run has no record of its data."""
    if plan.fingerprint is None:
        return False
    try:
        dataset = with_near(_opened(plan, dataset), {"train": plan.near})
        return Fingerprint.of(dataset, split_for(plan.run, dataset, plan.kept)[0]) == plan.fingerprint
    except VitralError:  # this data cannot be split like the run's
        return False


def with_known_groups(plan: Plan, dataset: DataSet) -> DataSet:
    """Join the near-duplicates that the plan of a run found, if it began with this data."""
    found = _near(plan)
    return with_near(dataset, found) if any(found.values()) and is_data_of(plan, dataset) else dataset


_PROBES = 16
"""Images of equal names whose bytes are compared."""


def seen_as(plan: Plan, images: Split) -> str:
    """Return the split of a run's own data, "train" or "val", that has some of `images`; "" if none has.

    A run whose data cannot be opened any more has none.
    """
    with suppress(VitralError):
        own = load_run_data(plan).dataset
        for part in (name for name in ("train", "val") if name in own.splits):
            if any(same_images(images, own[part], _PROBES)):
                return part
    return ""


def _opened(plan: Plan, dataset: DataSet) -> DataSet:
    """Remove class folders that the run skips because no file in them can be opened."""
    return drop_unopened(dataset) if plan.run.bad_images == "skip" else dataset


def _near(plan: Plan) -> dict[str, Sets]:
    """Split of the data → the near-duplicates that the plan found in it."""
    return {"train": plan.near, **plan.near_held_out}


def _changed(dataset: DataSet, changes: tuple[str, ...], hint: str) -> DataError:
    why = "; ".join(changes)
    return DataError("the run's data have changed since it began", where=dataset.source, why=why, hint=hint)
