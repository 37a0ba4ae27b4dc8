"""The work of `vitral data check`: run the checks, print and write what they find, suggest what is next."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitral.cli.output import print_json, print_notes, print_result, program, say
from vitral.console import counting, stderr, stdout
from vitral.errors import UsageError
from vitral.wording import count

if TYPE_CHECKING:
    from vitral.data import DataSet
    from vitral.data.checks.findings import DataCheck, Found
    from vitral.workflows.checks.near import FeatureSearch

MOST_COMPARED = 1000
"""Images up to which a check computes features without --labels or --near, to find images unlike all others."""
LEAST_SIDE = 64
"""Median side in pixels from which the features of the built-in model tell images apart."""


@dataclasses.dataclass(frozen=True)
class Files:
    """Files that a check writes or moves."""

    write: str | None
    move_to: str | None
    sheet: str | None
    kinds: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise `UsageError` for names with another suffix."""
        from vitral.workflows.checks.contact_sheet import check_png

        if self.sheet is not None:
            check_png(self.sheet, "--sheet")
        if self.write is not None and not self.write.lower().endswith(".csv"):
            raise UsageError(f"--write needs a name that ends in .csv, not {self.write}", hint="--write findings.csv")


def check_images(
    dataset: DataSet, near: bool, init: str, levels: tuple[int, int] | None, files: Files, device: str, format: str
) -> int:
    """Check the images; return the exit code."""
    from vitral.data.checks.validate import check
    from vitral.workflows.checks.contact_sheet import draw_near

    report = check(dataset, levels=levels)
    if near or (report.images <= MOST_COMPARED and _photographs(report)):
        report = _by_features(dataset, report, init, device)
    by_features = _near(dataset, report, init, device) if near else None
    if by_features is not None:
        report = dataclasses.replace(report, near=(*report.near, *by_features.pairs))
    if format == "json":
        print_json(report.to_json() | ({"near_by_features": by_features.to_json()} if by_features else {}))
    else:
        report.print_table(stdout())
    print_notes(by_features.notes if by_features else ())
    if files.sheet is not None and report.near:
        drawn = draw_near(dataset, report.near, Path(files.sheet))
        say(f"Sheet    {files.sheet}: {drawn:,} of {count(len(report.near), 'pair')}")
    elif files.sheet is not None:
        say("Sheet    none: there are no near-duplicates")
    _write(dataset, report.found(files.kinds), files)
    if format == "text":
        _print_next(dataset, report, files)
    return 1 if report.invalidates else 0


def _photographs(report: DataCheck) -> bool:
    """True for readable color images that are large enough for the features of the built-in model."""
    lost = Counter(bad.split for bad in report.unreadable)
    if any(lost[split] == sum(counts) for split, counts in report.counts.items()):
        return False
    colored = sum(number for mode, number in report.modes.items() if mode not in ("1", "L", "I;16"))
    large = report.sizes is not None and min(report.sizes.height[1], report.sizes.width[1]) >= LEAST_SIDE
    return large and 2 * colored > report.images


def _by_features(dataset: DataSet, report: DataCheck, init: str, device: str) -> DataCheck:
    """Add images that are unlike all others, and classes that look like one, by features of a network."""
    from vitral.inference.options import InferenceOptions
    from vitral.workflows.checks.classes import alike_classes
    from vitral.workflows.checks.set_features import set_features
    from vitral.workflows.checks.strangers import strangers
    from vitral.workflows.tables.features import FeatureCache

    with counting(stderr(), "comparing the images") as done:
        found = set_features(dataset, init, InferenceOptions(device), skip=True, cache=FeatureCache(), progress=done)
    known = {one.place for one in report.unusual}
    more = [one for one in strangers(found) if one.place not in known]
    checked = (*report.checked, f"features of {init}")
    return dataclasses.replace(
        report, unusual=(*report.unusual, *more), alike=tuple(alike_classes(found)), checked=checked
    )


def _near(dataset: DataSet, report: DataCheck, init: str, device: str) -> FeatureSearch:
    from vitral.inference.options import InferenceOptions
    from vitral.workflows.checks.near import search_features

    with counting(stderr(), "reading the images") as done:
        return search_features(dataset, report, init, InferenceOptions(device), progress=done)


def _write(dataset: DataSet, found: Sequence[Found], files: Files) -> None:
    """Write findings, and move their files."""
    from vitral.data.checks.moving import MOVED, move_found, write_found

    if files.write is not None:
        write_found(found, Path(files.write))
        say(f"Table    {files.write}: {count(len(found), 'finding')}")
    if files.move_to is not None:
        moved = move_found(found, dataset, Path(files.move_to))
        back = f"{program()} data check {shlex.quote(files.move_to)} --move-back"
        undo = f"; {MOVED} there lists the old paths, and this moves them back: {back}" if moved else ""
        say(f"Moved    {count(moved, 'file')} to {files.move_to}{undo}")


def _print_next(dataset: DataSet, report: DataCheck, files: Files) -> None:
    """Suggest what to do about the findings, then the check of the labels."""
    command = f"{program()} data check {shlex.quote(dataset.source)}"
    found = report.found()
    lines = []
    if found and files.write is None:
        lines.append(f"{command} --write findings.csv")
    if found and files.move_to is None and os.path.isdir(os.path.expanduser(dataset.source)):
        lines.append(f"{command} --move-to aside")
    if len(report.classes) > 1:
        lines.append(f"{command} --labels")
    if lines:
        say("\nNext:")
    for line in lines:
        say(f"  {line}")


def check_labels(
    dataset: DataSet, init: str, folds: int, bad_images: str, files: Files, device: str, format: str
) -> int:
    """Rank the labels; return the exit code."""
    from vitral.data.checks.findings import Found
    from vitral.data.checks.validate import drop_unopened
    from vitral.inference.options import InferenceOptions
    from vitral.workflows.checks import labels
    from vitral.workflows.tables.features import FeatureCache

    skip = bad_images == "skip"
    dataset = drop_unopened(dataset) if skip else dataset
    with counting(stderr(), "reading the images") as done:
        found = labels.check_labels(
            dataset, init, InferenceOptions(device), folds=folds, skip=skip, cache=FeatureCache(), progress=done
        )
    print_result(found, format)
    print_notes(found.notes)
    if files.write is not None:
        found.write(Path(files.write))
        relabeled = sum(one.likely_wrong for one in found.ranked())
        say(f"Table    {files.write}: {count(len(found.places), 'image')}, {relabeled:,} with another label")
    sheet = files.sheet or (f"{dataset.name}-labels.png" if format == "text" else None)
    if sheet is not None:
        drawn = found.draw(dataset, Path(sheet))
        say(f"Sheet    {sheet}: {count(drawn, 'image')}")
    wrong = [one for one in found.ranked() if one.likely_wrong]
    moving = dataclasses.replace(files, write=None)
    _write(dataset, [Found("wrong-label", one.place, f"suggested: {one.suggested}") for one in wrong], moving)
    if format == "text":
        say(f"\nNext, look at {sheet}. Then move the images with a wrong label to the folder of their class, or type:")
        table = files.write or "fixed.csv"
        if files.write is None:
            say(f"  {program()} data check {shlex.quote(dataset.source)} --labels --write {table}")
        say(f"  {program()} label {shlex.quote(table)}")
        say(f"  {program()} train {shlex.quote(table)}")
    return 0
