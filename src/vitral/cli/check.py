"""`vitral data check`."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from vitral.cli.data import Data
from vitral.cli.options import BadImages, ClassFolders, DataRoot, Device, Format, Help
from vitral.cli.output import print_json, print_notes, print_result, program, say
from vitral.console import counting, stderr, stdout
from vitral.defects import Kind
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
class _Files:
    """Files that a check writes or moves."""

    write: str | None
    move_to: str | None
    sheet: str | None
    kinds: tuple[str, ...] = ()

    def check(self) -> None:
        from vitral.workflows.checks.contact_sheet import check_png

        if self.sheet is not None:
            check_png(self.sheet, "--sheet")
        if self.write is not None and not self.write.lower().endswith(".csv"):
            raise UsageError("--write writes a .csv", hint="--write findings.csv")


def data_check(
    data: Data,
    *,
    labels: Annotated[
        bool, Help("instead: rank labels by how likely they are wrong, by predictions out of fold; with a sheet")
    ] = False,
    near: Annotated[
        bool, Help("also search near-duplicates by features of a network, and measure how many it finds")
    ] = False,
    init: Annotated[str, Help("weights of the features: a run, a file, timm:NAME, …")] = "backbone",
    folds: Annotated[int, Help("with --labels: number of folds")] = 5,
    write: Annotated[
        str | None, Help("write all findings to this .csv; with --labels, all images with suggested labels")
    ] = None,
    move_to: Annotated[
        str | None, Help("move the files of the findings to this folder; with --labels, those likely wrong")
    ] = None,
    move_back: Annotated[bool, Help("instead: DATA is a folder of --move-to; move its files back")] = False,
    kinds: Annotated[tuple[Kind, ...], Help("with --write and --move-to: only these findings")] = (),
    sheet: Annotated[
        str | None, Help("draw near-duplicates side by side in this .png; with --labels, doubtful labels")
    ] = None,
    device: Device = "auto",
    bad_images: BadImages = "skip",
    class_folders: ClassFolders = None,
    levels: Annotated[
        tuple[int, int] | None, Help("black and white of floats and of gray images with 16 bits and more")
    ] = None,
    data_root: DataRoot = "data",
    format: Format = "text",
) -> int:
    """Check a data set: unreadable files, copies, leaks between splits, blurred and odd images, doubtful labels."""
    from vitral.data import load
    from vitral.data.checks.moving import check_movable
    from vitral.data.checks.moving import move_back as take_back
    from vitral.data.targets import Labeling

    if move_back:
        say(f"moved {count(take_back(Path(data)), 'file')} back")
        return 0
    files = _Files(write, move_to, sheet, kinds)
    files.check()
    if near and labels:
        raise UsageError("--near and --labels are two checks", hint="leave one out")
    dataset = load(data, root=data_root, wanted=Labeling(class_folders=class_folders or "auto"))
    if move_to is not None:
        check_movable(dataset, Path(move_to))
    if labels:
        return _check_labels(dataset, init, folds, bad_images, files, device, format)
    return _check_images(dataset, near, init, levels, files, device, format)


def _check_images(
    dataset: DataSet, near: bool, init: str, levels: tuple[int, int] | None, files: _Files, device: str, format: str
) -> int:
    from vitral.data.checks.validate import check
    from vitral.workflows.checks.contact_sheet import draw_near

    report = check(dataset, levels=levels)
    if near or (report.images <= MOST_COMPARED and _photographs(report)):
        report = _with_strangers(dataset, report, init, device)
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


def _with_strangers(dataset: DataSet, report: DataCheck, init: str, device: str) -> DataCheck:
    """Add images that are unlike all others, by features of a network."""
    from vitral.inference.options import InferenceOptions
    from vitral.workflows.checks.set_features import set_features
    from vitral.workflows.checks.strangers import strangers
    from vitral.workflows.tables.features import FeatureCache

    with counting(stderr(), "comparing the images") as done:
        found = set_features(dataset, init, InferenceOptions(device), skip=True, cache=FeatureCache(), progress=done)
    return dataclasses.replace(
        report, unusual=(*report.unusual, *strangers(found)), checked=(*report.checked, f"features of {init}")
    )


def _near(dataset: DataSet, report: DataCheck, init: str, device: str) -> FeatureSearch:
    from vitral.inference.options import InferenceOptions
    from vitral.workflows.checks.near import search_features

    with counting(stderr(), "reading the images") as done:
        return search_features(dataset, report, init, InferenceOptions(device), progress=done)


def _write(dataset: DataSet, found: Sequence[Found], files: _Files) -> None:
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


def _print_next(dataset: DataSet, report: DataCheck, files: _Files) -> None:
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


def _check_labels(
    dataset: DataSet, init: str, folds: int, bad_images: str, files: _Files, device: str, format: str
) -> int:
    from vitral.data.checks.findings import Found
    from vitral.data.checks.validate import drop_unopened
    from vitral.inference.options import InferenceOptions
    from vitral.workflows.checks.labels import check_labels
    from vitral.workflows.tables.features import FeatureCache

    skip = bad_images == "skip"
    dataset = drop_unopened(dataset) if skip else dataset
    with counting(stderr(), "reading the images") as done:
        found = check_labels(
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
        say(f"\nNext: look at {sheet}, and move images with a wrong label to the folder of their class; or")
        table = files.write or "fixed.csv"
        if files.write is None:
            say(f"  {program()} data check {shlex.quote(dataset.source)} --labels --write {table}")
        say(f"  {program()} train {shlex.quote(table)}")
    return 0
