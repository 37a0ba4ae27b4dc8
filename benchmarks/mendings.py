"""Answers to “did it become better?” after a folder was mended and trained on again.

Each row is a folder of 300 drawn images in 5 classes, 72 × 96 pixels, with planted faults: wrong labels, 5 copies, 3
blurred images, 2 strangers, an empty file, a PDF (`tests/faults.py`). `vitral train FOLDER` runs on it at 64 pixels for
6 epochs. Then some of the wrong labels and all other faults are mended, and the same command runs again. In the last
two rows many right labels are made wrong, too. Where 40 % of the images are held out, both commands say so.

"Said" is the end of the second run's last line, which compares both runs on the images that both hold out, with their
labels as they are now. "True difference" is measured on 1,000 new images without faults. An answer is wrong if it says
better or worse, and the true difference is not on that side.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import vitral
from benchmarks.machine import ROOT
from benchmarks.results import Options, Table
from vitral.studies.comparison import before_and_now

sys.path.append(str(ROOT / "tests"))

from faults import Faults, drawn, write_faulty

SIZE = (72, 96)
STRENGTH = 0.2
CLASSES = 5
NEW = range(700, 900)
"""Numbers of the new images of each class: no folder has them."""


@dataclass(frozen=True)
class Case:
    """A folder and what is done to it."""

    wrong: int
    """Wrong labels before."""
    mended: float
    """Fraction of them that is mended."""
    spoiled: int = 0
    """Right labels that are made wrong."""
    val_fraction: float | None = None
    """Fraction of the images held out; the default's if None."""


CASES = (
    Case(8, 1.0),
    Case(8, 0.5),
    Case(40, 1.0),
    Case(40, 0.5),
    Case(100, 1.0),
    Case(40, 1.0, val_fraction=0.4),
    Case(100, 0.5, val_fraction=0.4),
    Case(100, 1.0, val_fraction=0.4),
    Case(8, 1.0, spoiled=60),
    Case(8, 1.0, spoiled=100, val_fraction=0.4),
)


def run(options: Options) -> list[Table]:
    """Train, mend and train again, once for each case."""
    cases = CASES[-1:] if options.quick else CASES
    training: dict[str, Any] = {"image_size": 32, "epochs": 1} if options.quick else {"image_size": 64, "epochs": 6}
    with TemporaryDirectory() as folder:
        new = _write_new(Path(folder) / "new", NEW[:4] if options.quick else NEW)
        rows = [_row(seed, case, Path(folder) / str(seed), new, training) for seed, case in enumerate(cases)]
    columns = {
        "wrong": "wrong labels|d",
        "mended": "mended|d",
        "spoiled": "made wrong|d",
        "held_out": "held out of both|d",
        "before": "before, on these|.1%",
        "now": "now|.1%",
        "said": "said",
        "new_before": "before, on new images|.1%",
        "new_now": "now|.1%",
        "difference": "true difference|+.1%",
        "wrong_answer": "wrong answer",
    }
    return [Table("Is it better? Asked after mending", columns, rows)]


def _write_new(folder: Path, numbers: Sequence[int]) -> Path:
    for kind in range(CLASSES):
        (folder / f"kind {kind}").mkdir(parents=True)
        for number in numbers:
            drawn(kind, number, SIZE, STRENGTH).save(folder / f"kind {kind}" / f"{kind}-{number}.jpg", quality=92)
    return folder


def _row(seed: int, case: Case, folder: Path, new: Path, training: dict[str, Any]) -> dict[str, Any]:
    photos = folder / "photos"
    faults = write_faulty(photos, wrong_labels=case.wrong, seed=seed, size=SIZE, strength=STRENGTH)
    training = {**training, "bad_images": "skip", "device": "cpu", "precision": "fp32", "quiet": True}
    if case.val_fraction:
        training["val_fraction"] = case.val_fraction
    first = vitral.train(str(photos), out=str(folder / "first"), **training)
    _mend(photos, faults, case, np.random.default_rng(seed))
    second = vitral.train(str(photos), out=str(folder / "second"), **training)
    sentences = before_and_now(first.folder, second.folder)
    pattern = r"On the same ([\d,]+) images.* reaches ([\d.]+)% accuracy and this run ([\d.]+)%\. .*, (.*)"
    rates = re.fullmatch(pattern, sentences)
    assert rates, sentences
    before, now = (vitral.evaluate(one.folder, str(new)).accuracy for one in (first, second))
    claimed = {"so this run is better": 1, "so this run is worse": -1, "which may be chance": 0}[rates[4]]
    return {
        "wrong": case.wrong,
        "mended": round(case.mended * case.wrong),
        "spoiled": case.spoiled,
        "held_out": int(rates[1].replace(",", "")),
        "before": float(rates[2]) / 100,
        "now": float(rates[3]) / 100,
        "said": rates[4],
        "new_before": before,
        "new_now": now,
        "difference": now - before,
        "wrong_answer": "yes" if claimed and claimed * (now - before) <= 0 else "no",
    }


def _mend(photos: Path, faults: Faults, case: Case, rng: np.random.Generator) -> None:
    """Remove what is no good image, put wrong labels right, and some right ones wrong."""
    for name in (*faults.blurred, *faults.strangers, *faults.unreadable, *faults.other):
        next(photos.glob(f"*/{name}")).unlink()
    for name in faults.copies:
        if name.startswith("copy"):
            next(photos.glob(f"*/{name}")).unlink()
    wrong = sorted(faults.wrong)
    for name in rng.permutation(wrong)[: round(case.mended * len(wrong))]:
        _move(photos, str(name), int(str(name)[0]))
    right = sorted(path.name for path in photos.glob("*/*-*.jpg") if path.parent.name == f"kind {path.name[0]}")
    for name in rng.permutation(right)[: case.spoiled]:
        _move(photos, str(name), (int(str(name)[0]) + int(rng.integers(1, CLASSES))) % CLASSES)


def _move(photos: Path, name: str, kind: int) -> None:
    path = next(photos.glob(f"*/{name}"))
    path.rename(photos / f"kind {kind}" / name)
