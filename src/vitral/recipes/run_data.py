"""The data of a run: split as it asks, and found again later, when they may have changed."""

from __future__ import annotations

import dataclasses
import os
import shlex
from dataclasses import dataclass
from functools import cached_property

from vitral.data import DataSet, load
from vitral.data.contents import Contents
from vitral.data.dataset import check_classes
from vitral.data.splits import subset, with_validation
from vitral.errors import DataError, VitralError
from vitral.training.run import Choice, Plan, Run

_FEW_TO_JUDGE, _WIDER_FRACTION = 20, 0.3
"""Validation pictures below which a wider share is recommended, and that share."""


def split_for(run: Run, dataset: DataSet, reasons: list[Choice]) -> DataSet:
    """The data with the validation split that the run asks for; the `reasons` get a line about it."""
    check_classes(dataset)
    found = set(dataset.splits)
    if run.val_share == 1.0:  # a smaller one is drawn beside the training share where there is no val (Places365)
        dataset = with_validation(dataset, run.val_fraction, run.seed)
    if (run.train_share, run.val_share) != (1.0, 1.0):
        val_share = run.val_share if "val" in dataset.splits or run.val_share < 1 else 0.0
        dataset = subset(dataset, run.train_share, val_share, run.seed)
        reasons.append(Choice("share", f"{run.train_share:.0%} / {run.val_share:.0%}", "of train and validation"))
    counts = {name: len(split) for name, split in dataset.splits.items()}
    if "val" in found:
        reasons.append(Choice("validation", f"{counts['val']:,} pictures", "the data's own split"))
    elif "val" in counts:
        why = (
            "cut from train, about the same share of each class; test is left for the end"
            if "test" in counts
            else "cut from train, about the same share of each class"
        )
        if counts["val"] < _FEW_TO_JUDGE and (run.val_fraction or 0) < _WIDER_FRACTION:
            why += f"; so few say little of the accuracy: --val-fraction {_WIDER_FRACTION}"
        reasons.append(Choice("validation", f"{counts['val']:,} pictures", why))
    elif "test" in counts:
        dataset = dataclasses.replace(dataset, splits={"train": dataset["train"], "val": dataset["test"]})
        reasons.append(
            Choice("validation", f"{counts['test']:,} pictures", "the test split, because nothing is cut from train")
        )
    else:
        why = "all pictures are learned from: how good it becomes is not measured, and the last epoch is kept"
        reasons.append(Choice("validation", "none", why))
    return dataset


@dataclass(frozen=True, eq=False)
class OwnData:
    """The data of a run that was planned before, as they are now and in its splits."""

    dataset: DataSet
    began: Contents | None
    """What they held when the run was planned; None where a run from before this was kept does not say."""
    now: Contents

    @cached_property
    def changes(self) -> tuple[str, ...]:
        """What has changed since, a clause each."""
        return self.began.changes(self.now) if self.began else ()

    def changed(self, hint: str) -> DataError:
        """The error for data that cannot be used as they are now."""
        return _changed(self.dataset, self.changes, hint)

    def measured_on(self, split: str) -> str:
        """What to say of figures on this split: nothing where its pictures are those that it had when the run was
        planned, else what has changed. `DataError` where the run may have learned from some of them.
        """
        if self.began is None or self._same(split):
            return ""
        if split != "train" and not self._same("train") and (origin := self._origin(split, self.began)):
            raise DataError(
                f"the run may have learned from the {split} pictures that there are now",
                where=self.dataset.source,
                why=f"{origin}, and its data have changed: {'; '.join(self.changes)}",
                hint="put them back as they were, or name pictures that it has never seen where the command takes DATA",
            )
        return f"The {split} pictures are not those that the run began with: {'; '.join(self.changes)}."

    def instead(self, split: str) -> str:
        """What to say where this split is measured because test, which would be, is gone; nothing where it is not."""
        gone = self.began and "test" in self.began.digests and "test" not in self.now.digests
        return f"The run's test pictures are gone: measured on {split}." if gone else ""

    def _origin(self, split: str, began: Contents) -> str:
        """How pictures of a changed split may have been training pictures; nothing where they were not."""
        if split == "val" and (began.cuts or self.now.cuts):
            return "they are cut from train"
        if split not in began.digests:
            return "there were none when it began"
        return "some may have been moved there from train" if began.moved(self.now, split) else ""

    def _same(self, split: str) -> bool:
        """Whether a split has the pictures that it had, or, if it is new, those of another that is not learned from:
        without val, test was the run's val. A split that there never was is the same.
        """
        if self.began is None:
            return True
        before, found = self.began.digests, self.now.digests.get(split)
        if split in before:
            return found == before[split]
        return found is None or found in [digest for name, digest in before.items() if name != "train"]


def own_data(plan: Plan) -> OwnData:
    """The data of a saved run; `DataError` where they are gone, or no longer such that they can be split."""
    if (kept := plan.paths.get("data")) and not os.path.exists(os.path.expanduser(plan.located("data"))):
        why = f"it began with {plan.run.data}, and from the run's folder that would be here"
        moved = f"vitral train PLACE --out {shlex.quote(plan.run.out or 'RUN')} --resume tells it where"
        hint = f"put them back, or name others where the command takes DATA; if they have moved, {moved}"
        raise DataError("the run's own pictures are gone", where=kept, why=why, hint=hint)
    whole = load(plan.located("data"), root=plan.located("data_root"))
    try:
        dataset = split_for(plan.run, whole, [])
    except VitralError as error:  # what cannot be split could be when the run was planned
        if plan.contents is None:
            raise
        raise _changed(whole, plan.contents.changes(Contents.of(whole, whole)), "put them back as they were") from error
    return OwnData(dataset, plan.contents, Contents.of(whole, dataset))


def are_its(plan: Plan, dataset: DataSet) -> bool:
    """Whether these are the data that a saved run began with, wherever they lie; False where it does not say."""
    if plan.contents is None:
        return False
    try:
        return Contents.of(dataset, split_for(plan.run, dataset, [])) == plan.contents
    except VitralError:  # they cannot be split as its were
        return False


def _changed(dataset: DataSet, changes: tuple[str, ...], hint: str) -> DataError:
    why = "; ".join(changes)
    return DataError("the run's data are not what they were when it began", where=dataset.source, why=why, hint=hint)
