"""Result of `vitral data check`: defects of a data set, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitral.console import Described, table
from vitral.defects import HEADINGS, Kind
from vitral.errors import SKIP_HINT
from vitral.wording import count, shown, some

SMALL_CLASS = 10
"""Train images below which a class is reported as small."""
IMBALANCE = 10.0
"""Ratio of the largest to the smallest class in train from which imbalance is reported."""
MOST_LISTED = 20
"""Findings of a kind that are listed on a terminal; tables and JSON have all."""


@dataclass(frozen=True)
class Unreadable:
    """An image that cannot be read."""

    split: str
    index: int
    name: str
    reason: str


@dataclass(frozen=True)
class Place:
    """Position of an image in the data set."""

    split: str
    index: int
    name: str
    label: str


@dataclass(frozen=True)
class Found:
    """An image that something was found about: a file to look at, and perhaps to take away.

    Of images that are the same, one is not listed: the one to keep.
    """

    kind: Kind
    place: Place
    why: str
    like: str = ""
    """Name of the image that it is the same as."""


@dataclass(frozen=True)
class NearPair:
    """Two near-duplicates: one image, resized, compressed again, mirrored or cropped."""

    first: Place
    second: Place
    similarity: float
    """Similarity of their perceptual hashes, at most 1 (`vitral.data.checks.near`)."""
    mirrored: bool

    @property
    def leaks(self) -> bool:
        """True for images of two splits."""
        return self.first.split != self.second.split


@dataclass(frozen=True)
class AlikeClasses:
    """Two classes that features hardly tell apart."""

    first: str
    second: str
    auc: float
    """Share of pairs, an image of each class, that features order rightly: about 0.5 if they tell nothing."""


@dataclass(frozen=True)
class Sizes:
    """Sizes in pixels, upright; each range is (least, median, greatest)."""

    height: tuple[int, int, int]
    width: tuple[int, int, int]
    most_common: tuple[tuple[int, int, int], ...]
    """(height, width, images), the most frequent first."""


@dataclass(frozen=True, repr=False)
class DataCheck(Described):
    """Result of `check`.

    Example:
        found = vitral.check_data(vitral.load_data("photos/"))
        print(found.images, found.duplicates, found.invalidates)
    """

    name: str
    source: str
    classes: tuple[str, ...]
    counts: Mapping[str, tuple[int, ...]]
    """Split -> images of each class, unreadable ones included."""
    sizes: Sizes | None
    """None where no image is readable."""
    modes: Mapping[str, int]
    """Pillow's pixel mode, "RGB", "L", "CMYK" … -> images."""
    formats: Mapping[str, int]
    """ "JPEG", "PNG" … -> images; "pixels" for sources of arrays."""
    unreadable: tuple[Unreadable, ...]
    duplicates: tuple[tuple[Place, ...], ...]
    """Groups of images with equal decoded pixels; the files may differ."""
    near: tuple[NearPair, ...]
    """Near-duplicates, the most similar first; of images with equal pixels, only the first one is compared."""
    near_note: str
    """Reason that near-duplicates were not searched, or ""."""
    unusual: tuple[Found, ...]
    """Images that are blurred, of one color, of an unusual size, or unlike all others."""
    checked: tuple[str, ...]
    """Names of the checks that were made."""
    notes: tuple[str, ...]
    """Notes of the source on what it left out."""
    unused: int = 0
    """Images that the source left out."""
    alike: tuple[AlikeClasses, ...] = ()
    """Pairs of classes that look like one, the most alike first."""

    def described(self) -> dict[str, str]:
        """Return the facts that `repr` and notebooks show, as a dict from name to text."""
        found = {heading: f"{heading}: {text}" for heading, text in self.findings()}
        return {"name": self.name, "images": count(self.images, "image"), **(found or {"findings": "no findings"})}

    @property
    def images(self) -> int:
        """Images in all splits."""
        return sum(sum(counts) for counts in self.counts.values())

    @property
    def leaks(self) -> tuple[tuple[Place, ...], ...]:
        """Groups of duplicates in more than one split."""
        return tuple(group for group in self.duplicates if len({place.split for place in group}) > 1)

    @property
    def conflicts(self) -> tuple[tuple[Place, ...], ...]:
        """Groups of duplicates with more than one label."""
        return tuple(group for group in self.duplicates if len({place.label for place in group}) > 1)

    @property
    def invalidates(self) -> bool:
        """True with defects that invalidate results, or images that are not used: unreadable files, leaks,
        contradicting labels, images that the source left out.
        """
        return bool(self.unreadable or self.leaks or self.conflicts or self.unused)

    def found(self, kinds: Iterable[str] = ()) -> list[Found]:
        """Findings about single images, worst kinds first; all kinds by default."""
        found = [Found("unreadable", Place(bad.split, bad.index, bad.name, ""), bad.reason) for bad in self.unreadable]
        for group in self.duplicates:
            found += spare_copies(group)
        for pair in self.near:
            kept, spare = sorted((pair.first, pair.second), key=_worth)
            mirrored = ", mirrored" if pair.mirrored else ""
            found.append(Found("near-duplicate", spare, f"similarity {pair.similarity:.1%}{mirrored}", kept.name))
        found += self.unusual
        order = get_args(Kind)
        wanted = set(kinds) or set(order)
        return sorted((one for one in found if one.kind in wanted), key=lambda one: order.index(one.kind))

    def absent(self) -> dict[str, tuple[str, ...]]:
        """Split -> classes without an image in it, for splits with such classes."""
        gaps = {
            split: tuple(name for name, n in zip(self.classes, counts, strict=True) if not n)
            for split, counts in self.counts.items()
        }
        return {split: names for split, names in gaps.items() if names}

    def small(self) -> dict[str, int]:
        """Class -> train images, for classes with fewer than `SMALL_CLASS`."""
        train = zip(self.classes, self.counts.get("train", ()), strict=False)
        return {name: n for name, n in train if n < SMALL_CLASS}

    @property
    def imbalance(self) -> float | None:
        """Ratio of the largest to the smallest class in train; None if a class has no images."""
        fewest, most = min(self.counts.get("train", (0,))), max(self.counts.get("train", (0,)))
        return most / fewest if fewest else None

    def findings(self) -> list[tuple[str, str]]:
        """Findings for the user, worst first: (heading, text)."""
        findings = []
        if self.unreadable:
            names = _listed(f"{bad.name} ({bad.reason})" for bad in self.unreadable)
            text = f"{count(len(self.unreadable), 'image')}; before training, {SKIP_HINT}{names}"
            findings.append(("unreadable", text))
        rest = tuple(group for group in self.duplicates if group not in self.leaks and group not in self.conflicts)
        groups: tuple[tuple[Kind, Sequence[Sequence[Place]]], ...] = (
            ("leak", self.leaks),
            ("contradiction", self.conflicts),
            ("copy", rest),
        )
        for kind, copies in groups:
            if copies:
                findings.append((HEADINGS[kind], f"{_copied(copies)}{_listed(map(_equation, copies))}"))
        for leaks, heading in {True: "near-duplicates between splits", False: "near-duplicates"}.items():
            if pairs := [pair for pair in self.near if pair.leaks == leaks]:
                findings.append((heading, f"{count(len(pairs), 'pair')}{_listed(map(_resemblance, pairs))}"))
        for kind, number in Counter(one.kind for one in self.unusual).items():
            lines = (f"{one.place.name}: {one.why}" for one in self.unusual if one.kind == kind)
            findings.append((HEADINGS[kind], f"{count(number, 'image')}{_listed(lines)}"))
        return findings + self._class_findings() + [("source", note) for note in self.notes]

    def _class_findings(self) -> list[tuple[str, str]]:
        findings = []
        if len(self.classes) < 2:
            sentence = f"every image is {some(self.classes)}: a classifier needs at least two classes"
            findings.append(("one class", sentence))
        for split, absent in self.absent().items():
            findings.append(("absent classes", f"{split} has no image of {some(absent, 5)}"))
        if small := self.small():
            counts = some((f"{name} ({n})" for name, n in small.items()), 5)
            findings.append(("small classes", f"fewer than {SMALL_CLASS} train images: {counts}"))
        if self.imbalance is not None and self.imbalance >= IMBALANCE:
            sentence = f"the largest class has {self.imbalance:.0f} times the images of the smallest"
            findings.append(("imbalance", sentence))
        if self.alike:
            lines = (f"'{pair.first}' and '{pair.second}': AUC {pair.auc:.2f} by features" for pair in self.alike)
            sentence = f"{count(len(self.alike), 'pair')} of classes that look like one (0.5 is chance)"
            findings.append(("alike classes", f"{sentence}{_listed(lines)}"))
        return findings

    def to_json(self) -> dict[str, object]:
        """Convert to JSON types."""
        counts = {split: dict(zip(self.classes, n, strict=True)) for split, n in self.counts.items()}

        def groups(duplicates: Sequence[Sequence[Place]]) -> list[list[dict[str, object]]]:
            return [[asdict(place) for place in group] for group in duplicates]

        return {
            "data": self.source,
            "name": self.name,
            "invalidates_results": self.invalidates,
            "checked": list(self.checked),
            "found": dict(Counter(one.kind for one in self.found())),
            "images": self.images,
            "classes": list(self.classes),
            "counts": counts,
            "sizes": asdict(self.sizes) if self.sizes else None,
            "modes": dict(self.modes),
            "formats": dict(self.formats),
            "unreadable": [asdict(bad) for bad in self.unreadable],
            "duplicates": groups(self.duplicates),
            "leaks": groups(self.leaks),
            "conflicts": groups(self.conflicts),
            "near_duplicates": [asdict(pair) for pair in self.near],
            "near_note": self.near_note,
            "unusual": [asdict(one) for one in self.unusual],
            "absent_classes": {split: list(names) for split, names in self.absent().items()},
            "small_classes": self.small(),
            "imbalance": self.imbalance,
            "alike_classes": [asdict(pair) for pair in self.alike],
            "unused": self.unused,
            "notes": list(self.notes),
        }

    def print_table(self, console: Console, most_classes: int = 20) -> None:
        """Print counts, sizes and findings."""
        counts = f"{count(self.images, 'image')}, {count(len(self.classes), 'class', 'classes')}"
        console.print(Text(f"{self.source}: {counts}", style="bold"))
        console.print(self._counts_table(most_classes))
        rows = table(header=False)
        if self.sizes:
            low, middle, high = zip(self.sizes.height, self.sizes.width, strict=True)
            common = ", ".join(f"{h} × {w} ({n:,})" for h, w, n in self.sizes.most_common)
            rows.add_row("height × width", f"{_by(low)} to {_by(high)}, median {_by(middle)}; most common {common}")
        for title, counted in (("pixels", self.modes), ("formats", self.formats)):
            rows.add_row(title, ", ".join(f"{name} ({n:,})" for name, n in counted.items()) or "none")
        if self.near_note:
            rows.add_row("near-duplicates", self.near_note)
        for heading, sentence in self.findings():
            rows.add_row(Text(heading, style="yellow"), Text(sentence))
        rows.add_row("checked", Text(", ".join(self.checked)))
        rows.add_row("found", Text(self.summary))
        console.print(rows)

    @property
    def summary(self) -> str:
        """Counts of what was found, on one line."""
        return counted(self.found()) or "nothing"

    def _counts_table(self, most_classes: int) -> Table:
        rows = table()
        rows.add_column("class", overflow="fold")
        for split in self.counts:
            rows.add_column(split, justify="right")
        lines = list(zip(self.classes, *self.counts.values(), strict=True))
        for name, *numbers in lines[:most_classes]:
            rows.add_row(Text(name), *(f"{n:,}" for n in numbers))
        if rest := lines[most_classes:]:
            rows.add_row(f"… {len(rest):,} more", *(f"{sum(n):,}" for n in list(zip(*rest, strict=True))[1:]))
        rows.add_row("all", *(f"{sum(counts):,}" for counts in self.counts.values()))
        return rows


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]} × {size[1]}"


def _copied(groups: Sequence[Sequence[Place]]) -> str:
    return f"{count(len(groups), 'image')} in {sum(map(len, groups)):,} files"


def _listed(lines: Iterable[str]) -> str:
    """Format the first findings of a kind, one per line."""
    texts = [shown(line) for line in lines]
    rest = len(texts) - MOST_LISTED
    more = [f"and {rest:,} more: --write findings.csv lists all"] if rest > 0 else []
    return "".join(f"\n{line}" for line in [*texts[:MOST_LISTED], *more])


def _equation(group: Sequence[Place]) -> str:
    """All files with the same pixels."""
    return " = ".join(f"{place.name} [{place.label}]" for place in group)


def counted(found: Iterable[Found], most: int | None = None) -> str:
    """Count findings by kind, worst first, at most so many kinds: "copies (5), blurred (3)"."""
    order = get_args(Kind)
    numbers = Counter(one.kind for one in found)
    kinds = sorted(numbers, key=order.index)[:most]
    return ", ".join(f"{HEADINGS[kind]} ({numbers[kind]:,})" for kind in kinds)


def _worth(place: Place) -> tuple[int, int]:
    """Sort key of copies: the one to keep is first. A held-out image stays, and its copy in train goes."""
    return ("test", "val", "train").index(place.split), place.index


def spare_copies(group: Sequence[Place]) -> list[Found]:
    """Findings about copies without the one to keep; all of them, if their labels contradict each other."""
    first, *others = sorted(group, key=_worth)
    if len({place.label for place in group}) > 1:
        why = f"the same pixels with the labels {some(sorted({place.label for place in group}))}"
        return [Found("contradiction", first, why, others[0].name)] + [
            Found("contradiction", place, why, first.name) for place in others
        ]
    return [
        Found("leak", place, f"the same pixels in {first.split}", first.name)
        if place.split != first.split
        else Found("copy", place, "the same pixels", first.name)
        for place in others
    ]


def _resemblance(pair: NearPair) -> str:
    mirrored = ", mirrored" if pair.mirrored else ""
    first, second = (f"{place.name} [{place.label}]" for place in (pair.first, pair.second))
    return f"{first} ≈ {second} ({pair.similarity:.1%}{mirrored})"
