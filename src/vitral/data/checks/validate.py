"""Validation of a data set: decode every image once and report all defects by name.

check(dataset) -> DataCheck       counts, sizes, modes, unreadable files, duplicates, small and absent classes
readable(dataset, unreadable, bad) -> DataSet       refuse unreadable images by name, or leave them out
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from vitral import errors
from vitral.console import counting, stderr
from vitral.containers import cores
from vitral.data.checks.findings import DataCheck, Found, NearPair, Place, Sizes, Unreadable, spare_copies
from vitral.data.checks.looks import LEAST_SIDE as LEAST_FOR_BLUR
from vitral.data.checks.looks import SIDE, Look, look, unusual
from vitral.data.checks.near import LEAST_SIDE, near_pairs, thumbnail, unsearchable
from vitral.data.dataset import DataSet, Split, relative_names
from vitral.data.files import UNOPENED
from vitral.data.images.decode import Probe, missing_reader, probe, read_image
from vitral.data.images.depth import depth_of
from vitral.data.images.lazy_torchvision import preload
from vitral.data.images.levels import check_levels
from vitral.errors import SKIP_HINT, DataError, ImageError, UsageError
from vitral.kinds import checked
from vitral.thread_pool import pool
from vitral.wording import count, natural, some

CHUNK = 64
"""Images per thread task."""

OnProgress = Callable[[int, int], object]
"""Called with (images done, images in total)."""


# ---------------------------------------------------------------- the pass over the images


class _Scan(NamedTuple):
    """Digest, thumbnail and header of one image, or the reason that it could not be read."""

    digest: bytes = b""
    thumbnail: np.ndarray = np.zeros(0, np.uint8)
    height: int = 0
    width: int = 0
    header: Probe = Probe(0, 0, "", 0, "")
    look: Look = Look(0.0, 0.0, 0.0)
    reason: str = ""


@checked
def check(dataset: DataSet, progress: OnProgress | None = None, *, levels: tuple[int, int] | None = None) -> DataCheck:
    """Decode every image of every split once, in threads, and report defects.

    Duplicates are found by a hash of the decoded pixels, so copies with another name, format or metadata count.
    Resized, recompressed, mirrored and slightly cropped copies are near-duplicates, found by a perceptual hash. Blurred
    images, images of one color, text among photographs, and unusual sizes are judged relative to the other images of
    the data set. Defects never raise.

    Args:
        dataset: The images, from `vitral.load_data`.
        progress: Function that is called as images are done, with their number and the total (default: a bar on
            standard error if that is a terminal).
        levels: Values of black and white of images with more than 8 bits, as for `vitral.train`.

    Returns:
        The findings.

    Raises:
        UsageError: An argument is of another type.

    Example:
        found = vitral.check_data(vitral.load_data("photos/"))
        print(found)
    """
    depth = depth_of(next(iter(dataset.splits.values())))
    check_levels(levels)
    levels, notes = depth.survey(levels, dataset.source) if depth else (levels, ())
    dataset = replace(dataset, splits={name: split.with_levels(levels) for name, split in dataset.splits.items()})
    scans: dict[str, list[_Scan]] = {}
    with _bar(progress) as report:
        total, done = sum(map(len, dataset.splits.values())), 0
        for split, images in dataset.splits.items():
            scans[split] = []
            for chunk in _scan_chunks(images):
                scans[split] += chunk
                done += len(chunk)
                report(done, total)
    good = [one for ones in scans.values() for one in ones if not one.reason]
    sizes = _sizes(good)
    near, near_note = _near(dataset, scans, sizes, progress)
    classes = len(dataset.classes)
    return DataCheck(
        name=dataset.name,
        source=dataset.source,
        classes=dataset.classes,
        counts={s: tuple(np.bincount(p.labels, minlength=classes).tolist()) for s, p in dataset.splits.items()},
        sizes=sizes,
        modes=dict(Counter(one.header.mode for one in good).most_common()),
        formats=dict(Counter(one.header.format for one in good).most_common()),
        unreadable=tuple(
            Unreadable(split, i, dataset.splits[split].names[i], one.reason)
            for split, ones in scans.items()
            for i, one in enumerate(ones)
            if one.reason
        ),
        duplicates=_duplicates(dataset, scans),
        near=near,
        near_note=near_note,
        unusual=_unusual(dataset, scans),
        checked=_checks(good, near_note),
        notes=(*dataset.notes, *notes, *_color_notes(good), *_page_notes(good)),
        unused=dataset.unused,
    )


def _scan_chunks(split: Split) -> Iterator[list[_Scan]]:
    """Scan all images in threads, in order, a chunk at a time."""

    def scan(start: int) -> list[_Scan]:
        return [_scan(split, i) for i in range(start, min(start + CHUNK, len(split)))]

    preload(len(split))
    with pool(min(cores(), 16)) as threads:
        yield from threads.map(scan, range(0, len(split), CHUNK))


def _scan(split: Split, index: int) -> _Scan:
    try:
        raw = split.raw(index)
        pixels = read_image(raw, name=split.names[index], levels=split.levels)
    except ImageError as error:
        return _Scan(reason=error.why or "unreadable")
    height, width, channels = pixels.shape
    header = Probe(height, width, "L" if channels == 1 else "RGB", channels, "pixels")
    if not isinstance(raw, np.ndarray):
        header = probe(raw)
    digest = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=16)
    digest.update(pixels.data)
    return _Scan(digest.digest(), thumbnail(pixels), height, width, header, look(pixels))


def _unusual(dataset: DataSet, scans: Mapping[str, Sequence[_Scan]]) -> tuple[Found, ...]:
    """Images that look unlike the others."""
    places, read = list[Place](), list[_Scan]()
    for name, ones in scans.items():
        for i, one in enumerate(ones):
            if not one.reason:
                places.append(_place(dataset, name, i))
                read.append(one)
    return tuple(unusual(places, [one.look for one in read], [(one.height, one.width) for one in read]))


def _checks(scans: Sequence[_Scan], near_note: str) -> tuple[str, ...]:
    """Names of the checks that were made."""
    near = [] if near_note else ["near-duplicates"]
    large = any(min(one.height, one.width) >= LEAST_FOR_BLUR for one in scans)
    return (
        "readable files",
        "copies",
        *near,
        *(["blur", "text and screenshots"] if large else []),
        "single colors",
        "sizes",
        "classes",
    )


def _sizes(scans: Sequence[_Scan]) -> Sizes | None:
    if not scans:
        return None
    sizes = np.array([(one.height, one.width) for one in scans])
    ranges = [(int(n.min()), int(np.median(n)), int(n.max())) for n in sizes.T]
    common = Counter((one.height, one.width) for one in scans).most_common(3)
    return Sizes(ranges[0], ranges[1], tuple((height, width, n) for (height, width), n in common))


def _color_notes(scans: Sequence[_Scan]) -> list[str]:
    """Notes on color profiles: what is converted, and what is ignored."""
    profiles = [one.header.profile for one in scans if one.header.profile]
    converted = Counter(profile.name for profile in profiles if profile.convert)
    notes = []
    if total := converted.total():
        names = some([f"{name} ({n:,})" for name, n in converted.most_common()])
        notes.append(f"{count(total, 'image')} with a color profile, converted to sRGB: {names}")
    if ignored := sum(not profile.name for profile in profiles):
        what = f"{count(ignored, 'image')} with a color profile that is damaged or of other colors"
        notes.append(f"{what}: it is ignored")
    return notes


def _page_notes(scans: Sequence[_Scan]) -> list[str]:
    """Note on animations and files of several pages."""
    several = Counter(one.header.format for one in scans if one.header.several)
    if not several:
        return []
    formats = some(f"{name} ({n:,})" for name, n in several.most_common())
    return [
        f"{count(several.total(), 'image')} with several frames or pages, of which the first one is read: {formats}"
    ]


def _place(dataset: DataSet, split: str, index: int) -> Place:
    """Return the place of an image, with its label as the task describes it: a class, several labels, or numbers."""
    images = dataset.splits[split]
    label = dataset.targets.describe(images.labels[index], dataset.classes)
    return Place(split, index, images.names[index], label)


def _duplicates(dataset: DataSet, scans: Mapping[str, Sequence[_Scan]]) -> tuple[tuple[Place, ...], ...]:
    """Groups of images with the same digest, in the order of the splits."""
    repeated = Counter(one.digest for ones in scans.values() for one in ones if one.digest)
    groups: dict[bytes, list[Place]] = {}
    for name, ones in scans.items():
        for i, one in enumerate(ones):
            if repeated[one.digest] > 1:
                groups.setdefault(one.digest, []).append(_place(dataset, name, i))
    return tuple(map(tuple, groups.values()))


def _near(
    dataset: DataSet, scans: Mapping[str, Sequence[_Scan]], sizes: Sizes | None, progress: OnProgress | None
) -> tuple[tuple[NearPair, ...], str]:
    """Near-duplicates among images of different pixels, or the reason that they are not searched."""
    places, thumbnails, seen = [], [], set()
    for name, ones in scans.items():
        for i, one in enumerate(ones):
            if one.digest and one.digest not in seen:
                seen.add(one.digest)
                places.append((name, i))
                thumbnails.append(one.thumbnail)
    if note := unsearchable(len(places), min(sizes.height[1], sizes.width[1]) if sizes else LEAST_SIDE):
        return (), note
    if len(places) < 2:
        return (), ""

    def place(number: int) -> Place:
        return _place(dataset, *places[number])

    with _bar(None if progress is None else lambda done, total: None, "comparing images") as report:
        pairs = near_pairs(np.stack(thumbnails), report)
    return tuple(NearPair(place(one.first), place(one.second), one.similarity, one.mirrored) for one in pairs), ""


@contextmanager
def _bar(progress: OnProgress | None, title: str = "reading images") -> Iterator[OnProgress]:
    """Yield the caller's function, or one that advances a progress bar if standard error is a terminal."""
    if progress is not None:
        yield progress
        return
    with counting(stderr(), title) as bar:
        yield bar.reach


GLANCE = 2.0
"""Seconds that a glance at all images may take."""


def glance(dataset: DataSet) -> list[Found]:
    """Look at all images at a reduced size, and return copies, blurred images, images of one color and unusual sizes.

    Returns nothing if that takes longer than `GLANCE` seconds, and for images that are not in files.
    """
    end = time.monotonic() + GLANCE
    numbered = [(name, split, i) for name, split in dataset.splits.items() for i in range(len(split))]
    if not numbered or len(numbered) > 1000 * GLANCE:
        return []

    def one(place: tuple[str, Split, int]) -> _Scan | None:
        _, split, i = place
        if time.monotonic() > end:
            return None
        try:
            raw = split.raw(i)
            if isinstance(raw, np.ndarray):
                return None
            pixels = read_image(raw, name=split.names[i], at_least=(SIDE, SIDE), levels=split.levels)
        except ImageError as error:
            return _Scan(reason=error.why or "unreadable")
        header = probe(raw)
        digest = hashlib.blake2b(raw, digest_size=16).digest()
        return _Scan(digest, height=header.height, width=header.width, header=header, look=look(pixels))

    with pool(min(cores(), 16)) as threads:
        seen = list(threads.map(one, numbered))
    if any(scan is None for scan in seen):
        return []
    scans: dict[str, list[_Scan]] = {name: [] for name in dataset.splits}
    for (name, _, _), scan in zip(numbered, seen, strict=True):
        scans[name].append(scan or _Scan())
    copies = [found for group in _duplicates(dataset, scans) for found in spare_copies(group)]
    return [*copies, *_unusual(dataset, scans)]


def sample_unreadable(dataset: DataSet, seconds: float = 1.0) -> list[Unreadable]:
    """Find unreadable images in a sample, spread evenly over every split, that can be decoded in this time."""
    end, unreadable = time.monotonic() + seconds, []
    for name, split in dataset.splits.items():
        share = time.monotonic() + max(0.0, end - time.monotonic()) / len(dataset.splits)
        for index in _spread(len(split)):
            if time.monotonic() > share:
                break
            try:
                if isinstance(raw := split.raw(index), np.ndarray):
                    break  # raw pixels: there is nothing to decode
                read_image(raw, name=split.names[index], at_least=_SMALL, levels=split.levels)
            except ImageError as error:
                unreadable.append(Unreadable(name, index, error.name, error.why or ""))
    return unreadable


_SMALL = (32, 32)
"""Height and width large enough to detect a JPEG that cannot be decoded."""


def _spread(count: int) -> Iterator[int]:
    """Yield all numbers below `count` in evenly spread order: every eighth, then those in between."""
    for first in range(8):
        yield from range(first, count, 8)


def drop_unopened(dataset: DataSet) -> DataSet:
    """Drop classes without any folder that can be opened; `left_out` names the folders.

    Such a folder may not contain images at all, so it is not a class. `DataError` if a split has nothing else.
    """
    if not dataset.targets.one_class:  # a table has no folders of a class
        return dataset
    closed = {name: _unopened(split) for name, split in dataset.splits.items()}
    some_closed, some_open = np.zeros((2, len(dataset.classes)), bool)
    for name, split in dataset.splits.items():
        some_closed[split.labels[closed[name]]] = True
        some_open[split.labels[~closed[name]]] = True
    gone = some_closed & ~some_open
    if not gone.any() or gone.all():  # if all classes are gone, decoding raises an error that names the folders
        return dataset
    number, splits, names = np.cumsum(~gone) - 1, dict[str, Split](), list[str]()
    for name, split in dataset.splits.items():
        lost = gone[split.labels]
        names += [split.names[int(i)] for i in np.flatnonzero(lost)]
        if lost.all():
            raise DataError(f"no readable image in the {name} split", where=dataset.source, why=some(names))
        kept = split.select(np.flatnonzero(~lost))
        splits[name] = replace(kept, labels=number[kept.labels])
    left = tuple(name for label, name in enumerate(dataset.classes) if not gone[label])
    return replace(dataset, classes=left, splits=splits, left_out=(*dataset.left_out, *names))


def _unopened(split: Split) -> np.ndarray:
    """Boolean array, True for placeholders of folders that cannot be opened."""
    return np.fromiter((path.endswith(UNOPENED) for path in relative_names(split.names)), bool, len(split))


def readable(
    dataset: DataSet,
    unreadable: Iterable[Unreadable],
    bad: Literal["error", "skip"] = "error",
    hint: str | None = None,
    most: int | None = None,
) -> DataSet:
    """Leave out unreadable images, which `left_out` then names ("skip"), or raise one `DataError` that names them, with
    a default hint or `hint` ("error").

    Labels and classes do not change. With "skip", too, no split and no class of train may lose all of its images, and
    at most `most` images may be left out, with those of `dataset.left_out`.
    """
    if bad not in ("error", "skip"):
        raise UsageError(f"unknown choice '{bad}' for bad images", why="known: error, skip")
    all_bad = sorted(unreadable, key=lambda one: (one.split, natural(one.name)))
    if not all_bad:
        return dataset
    reasons = [f"{one.name} ({one.reason})" for one in all_bad]
    if bad == "error":
        hint = hint or f"{SKIP_HINT}; `vitral data check {dataset.source}` lists them all"
        raise errors.unreadable(reasons, where=dataset.source, hint=hint)
    why = some(reasons)
    if most is not None and (gone_in_all := len(all_bad) + len(dataset.left_out)) > most:
        what = f"{gone_in_all:,} unreadable images, more than --max-bad {most:,}"
        raise DataError(
            what, where=dataset.source, why=why, hint=f"restore them, or allow them with --max-bad {gone_in_all}"
        )
    splits = dict(dataset.splits)
    for split, images in dataset.splits.items():
        kept = np.setdiff1d(np.arange(len(images)), [one.index for one in all_bad if one.split == split])
        if not len(kept):
            raise DataError(f"no readable image in the {split} split", where=dataset.source, why=why)
        gone = dataset.targets.absent(images.labels, images.labels[kept], len(dataset.classes))
        if split == "train" and len(gone):
            names = some([f"'{dataset.classes[label]}'" for label in gone])
            raise DataError(f"no readable training image of {names}", where=dataset.source, why=why)
        if len(kept) < len(images):
            splits[split] = images.select(kept)
    return replace(dataset, splits=splits, left_out=(*dataset.left_out, *(one.name for one in all_bad)))


def left_out(names: Sequence[str]) -> str:
    """Message about images left out; empty if there are none."""
    if not names:
        return ""
    left = f"left out {count(len(names), 'unreadable image')}: {some(names, 5)}"
    return "; ".join(filter(None, (left, missing_reader(names))))
