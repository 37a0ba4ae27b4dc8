"""Coverage of nominal 95 % intervals of images in groups, by simulation (`vitral.evaluation.intervals`).

The accuracy of each group is drawn from a beta distribution whose likeness ρ, the correlation of two images of a group,
is that of the column: 0 for independent images, 1 for copies. Of each row and column 2,000 data sets are drawn. Their
true accuracies lie evenly in the given range, since a single one would favor or disfavor whole numbers of images. "As
if independent" is Wilson's interval of all images at ρ = 0.7. The second table compares two networks of one accuracy,
whose images agree within groups likewise: how often the interval of the difference holds 0, and how often McNemar's
test, by groups and by images, claims a difference at 5 %.

Few large groups are the limit of any such interval: if hardly one of them is hard, its images may be missing from the
data, and nothing shows how much groups differ. Tried in place of the larger of both estimates: the linearized variance
alone (83 % for groups of unequal size), likeness alone (82 %, six groups of 20), Student's t with one degree of freedom
less than groups (up to 99 %), likeness estimated without the half image of each kind (84 %).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.results import Options, Table
from vitral.evaluation.intervals import proportion_interval
from vitral.studies.paired import mcnemar, paired_interval, sums_of

LIKENESS = (0.0, 0.1, 0.3, 0.7, 1.0)
RANGES = ((0.4, 0.6), (0.85, 0.95), (0.93, 0.99))
"""Ranges of the true accuracy."""
SIZES = {
    "100 of 1": [1] * 100,
    "300 of 3": [3] * 300,
    "50 of 2": [2] * 50,
    "80 of 5": [5] * 80,
    "20 of 5": [5] * 20,
    "10 of 5": [5] * 10,
    "8 of 5": [5] * 8,
    "40 of 20": [20] * 40,
    "15 of 20": [20] * 15,
    "50 of 1, 5 of 10": [1] * 50 + [10] * 5,
    "80 of 1 to 16": np.geomspace(1, 16, 80).astype(int).tolist(),
    "40 of 1 to 32": np.geomspace(1, 32, 40).astype(int).tolist(),
}
"""Groups of a data set → size of each."""


def run(options: Options) -> list[Table]:
    """Simulate both."""
    draws = 20 if options.quick else 2000
    return [_proportions(draws), _differences(draws)]


def drawn(rng: np.random.Generator, sizes: Sequence[int], accuracy: float, likeness: float) -> np.ndarray:
    """Draw whether each image is right, (n,) booleans in the order of the groups."""
    if likeness == 0:
        rates = np.full(len(sizes), accuracy)
    elif likeness == 1:
        rates = (rng.random(len(sizes)) < accuracy).astype(float)
    else:
        rest = (1 - likeness) / likeness
        rates = rng.beta(accuracy * rest, (1 - accuracy) * rest, len(sizes))
    return rng.random(sum(sizes)) < np.repeat(rates, sizes)


def coverage(
    sizes: Sequence[int], within: tuple[float, float], likeness: float, draws: int, *, grouped: bool = True
) -> float:
    """Return the share of data sets whose interval holds the true accuracy."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(len(sizes)), sizes) if grouped else None
    held = 0
    for truth in rng.uniform(*within, draws):
        low, high = proportion_interval(drawn(rng, sizes, truth, likeness), groups)
        held += low <= truth <= high
    return held / draws


def _proportions(draws: int) -> Table:
    columns = {"groups": "groups", "images": "images|,d", "accuracy": "accuracy"}
    columns |= {f"at_{one}": f"ρ = {one:g}|.1%" for one in LIKENESS} | {"alone": "as if independent|.1%"}
    rows = []
    for name, sizes in SIZES.items():
        known = LIKENESS if max(sizes) > 1 else (0.0,)  # an image alone is like no other
        for within in RANGES:
            row = {"groups": name, "images": sum(sizes), "accuracy": f"{within[0]:g} to {within[1]:g}"}
            row |= {f"at_{one}": coverage(sizes, within, one, draws) if one in known else None for one in LIKENESS}
            row["alone"] = coverage(sizes, within, 0.7 if 0.7 in known else 0.0, draws, grouped=False)
            rows.append(row)
    return Table("Accuracies: intervals that hold the truth", columns, rows)


def compared(
    rng: np.random.Generator, sizes: Sequence[int], accuracy: float, likeness: float
) -> tuple[np.ndarray, np.ndarray]:
    """Draw two equally good networks: differences (n,) of their right answers, and groups (n,) of the images."""
    first, second = (drawn(rng, sizes, accuracy, likeness).astype(int) for _ in range(2))
    return first - second, np.repeat(np.arange(len(sizes)), sizes)


def _differences(draws: int) -> Table:
    columns = {
        "groups": "groups",
        "images": "images|,d",
        "likeness": "ρ|g",
        "held": "interval holds 0|.1%",
        "claimed": "claimed, by groups|.1%",
        "alone": "claimed, by images|.1%",
    }
    rows = []
    for name in ("100 of 1", "80 of 5", "20 of 5", "15 of 20", "40 of 1 to 32"):
        for likeness in LIKENESS if name != "100 of 1" else (0.0,):
            rng, counts = np.random.default_rng(0), np.zeros(3)
            for _ in range(draws):
                each, groups = compared(rng, SIZES[name], 0.85, likeness)
                low, high = paired_interval(each, groups)
                counts += (low <= 0 <= high, mcnemar(sums_of(each, groups)) < 0.05, mcnemar(each) < 0.05)
            held, claimed, alone = (counts / draws).tolist()
            rows.append(
                {
                    "groups": name,
                    "images": sum(SIZES[name]),
                    "likeness": likeness,
                    "held": held,
                    "claimed": claimed,
                    "alone": alone,
                }
            )
    return Table("Two equally good networks", columns, rows)
