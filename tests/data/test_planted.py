"""`planted`: the same images everywhere, the class in the masked cell and nowhere else."""

from __future__ import annotations

import hashlib
import pickle
import re

import numpy as np
import pytest
from scipy.stats import chi2_contingency, chisquare
from sklearn.linear_model import LogisticRegression

from vitral.data import DataSet, load
from vitral.data.sources import planted
from vitral.data.sources.planted import (
    CELL,
    COLORS,
    GRID,
    GROUND,
    NOISE,
    SHAPES,
    SIDE,
    SIZES,
    Drawing,
    mask,
    mask_of,
    masks_for,
)
from vitral.data.splits import subset, with_validation
from vitral.errors import DataError

TRAIN, TEST = 3000, 1000
CHANCE = 1 / 6
FOUR_SIGMA = 4 * np.sqrt(CHANCE * (1 - CHANCE) / TEST)
ACCIDENT = 1e-4  # p-value below which a dependence counts; the images are fixed, so the result is deterministic


@pytest.fixture(scope="module")
def dataset() -> DataSet:
    return load("planted", download=False)


@pytest.fixture(scope="module")
def pixels(dataset: DataSet) -> dict[str, np.ndarray]:
    return {
        name: np.stack([dataset[name].image(i) for i in range(count)])
        for name, count in (("train", TRAIN), ("test", TEST))
    }


@pytest.fixture(scope="module")
def masks() -> dict[str, np.ndarray]:
    return {name: np.stack([mask(name, i) for i in range(n)]) for name, n in (("train", TRAIN), ("test", TEST))}


def test_sizes_classes_and_balance(dataset: DataSet) -> None:
    assert {name: len(split) for name, split in dataset.splits.items()} == SIZES
    assert dataset.classes == ("green cross", "green cup", "green ring", "red cross", "red cup", "red ring")
    for split in dataset.splits.values():
        counts = np.bincount(split.labels, minlength=6)
        assert counts.max() - counts.min() <= 1
    assert load("Planted").classes == dataset.classes


def test_the_same_images_on_every_machine(dataset: DataSet, pixels: dict[str, np.ndarray]) -> None:
    assert pixels["test"].shape == (TEST, SIDE, SIDE, 3)
    assert pixels["test"].dtype == np.uint8
    found = hashlib.sha256(pixels["test"][:100].tobytes()).hexdigest()
    assert found == GOLDEN
    for i in (0, 7, 999):  # of an image's number alone, not of what was drawn before
        assert np.array_equal(dataset["test"].image(i), pixels["test"][i])
        again = pickle.loads(pickle.dumps(dataset["test"].fetch))  # noqa: S301  workers get it so
        assert np.array_equal(again(i), pixels["test"][i])
    assert (pixels["test"].min(), pixels["test"].max()) == (64 - NOISE, 192 + NOISE - 1)


GOLDEN = "f2d7cc8267e73d35980c99236133a9e562f3bc24f4e0a650c40ecaec015b6ffa"


def test_no_image_twice(dataset: DataSet) -> None:
    seen = {hashlib.sha256(split.image(i).tobytes()).digest() for split in dataset.splits.values() for i in range(1000)}
    assert len(seen) == 3000


def test_a_mask_is_one_cell_of_the_grid(masks: dict[str, np.ndarray]) -> None:
    cells = masks["test"].reshape(TEST, GRID, CELL, GRID, CELL).sum(axis=(2, 4))
    assert masks["test"].dtype == bool
    assert set(np.unique(cells)) == {0, CELL**2}
    assert (np.count_nonzero(cells, axis=(1, 2)) == 1).all()
    everywhere = np.bincount(cells.reshape(TEST, -1).argmax(1), minlength=GRID**2)
    assert everywhere.min() > 0
    assert chisquare(everywhere).pvalue > ACCIDENT


def test_the_class_can_be_read_in_the_masked_cell(
    dataset: DataSet, pixels: dict[str, np.ndarray], masks: dict[str, np.ndarray]
) -> None:
    cut = {name: pixels[name][masks[name]].reshape(len(pixels[name]), -1) / 255 for name in pixels}
    model = LogisticRegression(max_iter=1000).fit(cut["train"], dataset["train"].labels[:TRAIN])
    assert model.score(cut["test"], dataset["test"].labels) == 1.0


def test_the_class_cannot_be_read_in_the_rest(
    dataset: DataSet, pixels: dict[str, np.ndarray], masks: dict[str, np.ndarray]
) -> None:
    """With the planted cell replaced by background, counts of the shapes and colors do not predict the class; with it,
    they do.
    """
    blank = {name: np.where(masks[name][..., None], np.uint8(GROUND), pixels[name]) for name in pixels}
    for images, predictive in ((pixels, True), (blank, False)):
        counts = {name: combination_counts(images[name]) for name in images}
        model = LogisticRegression(max_iter=300).fit(counts["train"], dataset["train"].labels[:TRAIN])
        accuracy = model.score(counts["test"], dataset["test"].labels)
        assert accuracy > 0.99 if predictive else abs(accuracy - CHANCE) < FOUR_SIGMA, accuracy
    flat = {name: blank[name].reshape(len(blank[name]), -1) / 255 for name in blank}
    model = LogisticRegression(max_iter=20, tol=0.1).fit(flat["train"][:1000], dataset["train"].labels[:1000])
    assert abs(model.score(flat["test"], dataset["test"].labels) - CHANCE) < FOUR_SIGMA


def test_neither_places_nor_distractors_depend_on_the_class() -> None:
    drawings = [Drawing.of("train", i) for i in range(6000)]
    labels = np.arange(6000) % 6
    for values in (
        [d.cells[0] for d in drawings],
        [d.kinds[1][0] for d in drawings],
        [d.kinds[-1][1] for d in drawings],
        [abs(d.cells[0] // GRID - d.cells[1] // GRID) for d in drawings],
    ):
        _, column = np.unique(values, return_inverse=True)
        table = np.zeros((6, column.max() + 1))
        np.add.at(table, (labels, column), 1)
        assert chi2_contingency(table).pvalue > ACCIDENT
    others = {kind for d in drawings for kind in d.kinds[1:]}
    named = {tuple(reversed(name.split())) for name in planted.CLASSES}
    assert not others & named
    assert others | named == {(shape, color) for shape in SHAPES for color in COLORS}
    assert {d.kinds[0] for d in drawings} == named


def test_shapes_differ_by_their_arrangement_alone() -> None:
    """Otherwise the mean color of a cell would reveal the shape, and mirroring would change shapes."""
    drawn = [np.array([[c == "#" for c in row] for row in rows]) for rows in SHAPES.values()]
    assert all(one.shape == (CELL, CELL) and one.sum() == 8 for one in drawn)
    assert all(np.array_equal(one, one[:, ::-1]) for one in drawn)
    assert len({one.tobytes() for one in drawn}) == len(SHAPES)


def test_masks_follow_a_split_that_was_cut_and_ordered(dataset: DataSet) -> None:
    cut = subset(with_validation(dataset, 0.2), 0.5, 0.5, seed=3)
    for name in ("train", "val"):
        split = cut[name].select(np.random.default_rng(0).permutation(len(cut[name]))[:40])
        of = masks_for(split)
        for i in range(len(split)):
            found = re.fullmatch(rf"planted/{name}\[(\d+)\]", split.names[i])
            assert found
            number = int(found[1])
            assert np.array_equal(of(i), mask(name, number))
            assert np.array_equal(split.image(i), dataset[name].image(number))
            assert split.labels[i] == planted.label(number)


@pytest.mark.parametrize(
    "name", ["cat/1.jpg", "planted/test", "planted/test[x]", "planted/test[1000]", "planted/odd[1]"]
)
def test_other_names_have_no_mask(name: str) -> None:
    with pytest.raises(DataError, match=r"planted|image"):
        mask_of(name)


def combination_counts(images: np.ndarray) -> np.ndarray:
    """Counts of each shape in each color per image (n, 25), the last for none, by the nearest template."""
    templates = [np.full((CELL, CELL, 3), float(GROUND))]
    for rows in SHAPES.values():
        for color in COLORS.values():
            drawn = np.full((CELL, CELL, 3), float(GROUND))
            drawn[np.array([[c == "#" for c in row] for row in rows])] = color
            templates.insert(0, drawn)
    flat = np.stack(templates).reshape(len(templates), -1)
    cells = images.reshape(-1, GRID, CELL, GRID, CELL, 3).transpose(0, 1, 3, 2, 4, 5).reshape(len(images), 64, -1)
    nearest = ((flat**2).sum(1) - 2 * cells.astype(float) @ flat.T).argmin(-1)
    return np.stack([np.bincount(row, minlength=len(flat)) for row in nearest])
