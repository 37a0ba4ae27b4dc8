from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.model_selection import StratifiedShuffleSplit

from vitral.data import DataSet, Split, load
from vitral.data.dataset import Numbered, Pixels, spread
from vitral.data.splits import subset, with_validation
from vitral.errors import DataError, UsageError
from vitral.training.options import Run
from vitral.workflows.planning.run_data import split_for


def made(counts: dict[str, list[int]]) -> DataSet:
    """A data set with these numbers of images per class; each image contains its own number."""
    splits = {}
    for name, numbers in counts.items():
        labels = np.random.default_rng(1).permutation(np.repeat(np.arange(len(numbers)), numbers)).astype(np.int64)
        pixels = np.arange(len(labels), dtype=np.int64).reshape(-1, 1, 1).astype(np.uint8)
        splits[name] = Split(Numbered(name, len(labels)), labels, Pixels(pixels))
    classes = tuple(str(i) for i in range(len(next(iter(counts.values())))))
    return DataSet("made", classes, splits, "made")


def per_class(split: Split, classes: int) -> list[int]:
    return np.bincount(split.labels, minlength=classes).tolist()


def test_a_tenth_of_every_class_by_default() -> None:
    dataset = with_validation(made({"train": [100, 50, 200], "test": [5, 5, 5]}))
    assert list(dataset.splits) == ["train", "val", "test"]
    assert per_class(dataset["val"], 3) == [10, 5, 20]
    assert sorted([*dataset["train"].names, *dataset["val"].names]) == sorted(
        made({"train": [100, 50, 200]})["train"].names
    )
    assert list(dataset["test"].names) == list(made({"test": [5, 5, 5]})["test"].names)


def test_at_most_2500_by_default_but_any_share_if_given() -> None:
    large = made({"train": [40_000, 40_000]})
    assert per_class(with_validation(large)["val"], 2) == [1250, 1250]
    assert per_class(with_validation(large, 0.25)["val"], 2) == [10_000, 10_000]


def test_the_cut_is_a_function_of_the_seed() -> None:
    dataset = made({"train": [50, 50]})
    first, again, other = (list(with_validation(dataset, seed=seed)["val"].names) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_kept_images_are_held_out_first() -> None:
    """Others follow in the same share; and if they are more than the share, all stay."""
    dataset = made({"train": [50, 50]})
    train = dataset["train"]
    natural = set(with_validation(dataset)["val"].names)
    few, many = np.flatnonzero(train.labels == 0)[:3], np.flatnonzero(train.labels == 0)[:20]
    for kept, counts in ((few, [5, 5]), (many, [20, 5])):
        cut = with_validation(dataset, kept=kept.tolist())
        assert {train.names[i] for i in kept} <= set(cut["val"].names)
        assert per_class(cut["val"], 2) == counts
        assert set(cut["val"].names).isdisjoint(cut["train"].names)
    places = [i for i, name in enumerate(train.names) if name in natural]
    assert set(with_validation(dataset, kept=places)["val"].names) == natural
    assert per_class(with_validation(dataset, kept=range(100))["train"], 2) == [1, 1], "a class keeps one to learn from"
    assert set(with_validation(dataset, kept=[1000])["val"].names) == natural, "there is no such image any more"


def test_images_that_belong_to_kept_ones_are_held_out_with_them() -> None:
    dataset = made({"train": [50, 50]})
    groups = np.arange(100) // 2
    dataset = replace(dataset, splits={"train": replace(dataset["train"], groups=groups)})
    cut = with_validation(dataset, kept=[0, 7, 11])
    assert {"train[0]", "train[1]", "train[6]", "train[7]", "train[10]", "train[11]"} <= set(cut["val"].names)
    assert 8 <= len(cut["val"]) <= 12
    assert not set(cut["train"].groups) & set(cut["val"].groups)  # type: ignore[arg-type]


def test_an_existing_validation_split_stays() -> None:
    dataset = made({"train": [5, 5], "val": [1, 1]})
    assert with_validation(dataset, 0.5) is dataset


def test_nothing_is_cut_when_the_share_is_zero() -> None:
    dataset = made({"train": [5, 5]})
    assert with_validation(dataset, 0) is dataset


@pytest.mark.parametrize(
    "counts", [[1, 1, 2], [2, 2, 2, 2, 2], [3, 100, 1, 7], [0, 4, 9], [1, 1000], [2, 3, 4, 5, 6] * 30]
)
@pytest.mark.parametrize("fraction", [None, 0.01, 0.1, 0.5, 0.9, 0.99])
def test_every_class_keeps_an_image_in_train(counts: list[int], fraction: float | None) -> None:
    dataset = with_validation(made({"train": counts}), fraction)
    train, val = (np.array(per_class(dataset[split], len(counts))) for split in ("train", "val"))
    assert (train + val == counts).all()
    assert (train[np.array(counts) > 0] >= 1).all()
    assert val.sum() >= 1
    if fraction is None:
        assert (val[np.array(counts) > 1] >= 1).all()


def test_the_shares_are_those_of_scikit_learn() -> None:
    counts = [137, 55, 311, 90, 24]
    dataset = made({"train": counts})
    ours = per_class(with_validation(dataset, 0.2)["val"], 5)
    labels = dataset["train"].labels
    _, index = next(StratifiedShuffleSplit(1, test_size=sum(ours), random_state=0).split(labels, labels))
    assert np.abs(np.array(ours) - np.bincount(labels[index])).max() <= 1


def test_impossible_cuts_are_refused() -> None:
    for fraction in (-0.1, 1.0, 3, float("nan")):
        with pytest.raises(UsageError, match="share"):
            with_validation(made({"train": [5, 5]}), fraction)
    with pytest.raises(DataError, match="single image"):
        with_validation(made({"train": [1, 1, 1]}))
    with pytest.raises(DataError, match="no 'train' split"):
        with_validation(made({"test": [5, 5]}))


def test_a_subset_of_one_split_gives_two_without_a_common_image() -> None:
    places = made({"train": [100] * 365})
    dataset = subset(places, 0.10, 0.05, seed=3)
    assert (len(dataset["train"]), len(dataset["val"])) == (3650, 1825)
    assert not set(dataset["train"].names) & set(dataset["val"].names)
    assert list(subset(places, 0.10, 0.05, seed=3)["val"].names) == list(dataset["val"].names)
    assert list(subset(places, 0.10, 0.05, seed=4)["val"].names) != list(dataset["val"].names)


def test_a_subset_of_two_splits_takes_from_each() -> None:
    dataset = subset(made({"train": [60, 40], "val": [10, 10], "test": [3, 3]}), 0.5, 0.1)
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 50, "val": 2, "test": 6}
    assert all(name.startswith("val") for name in dataset["val"].names)


def test_a_subset_without_validation_leaves_the_cut_to_later() -> None:
    dataset = with_validation(subset(load("digits"), 0.5, 0.0))
    assert len(dataset["train"]) + len(dataset["val"]) == 718


@pytest.mark.parametrize("seed", [0, 1])
def test_stratified_shares_are_nested_and_have_every_class(seed: int) -> None:
    dataset = made({"train": [200, 60, 3], "val": [5, 5, 5]})
    before: set[str] = set()
    for share in (0.02, 0.1, 0.25, 0.5, 1.0):
        part = subset(dataset, share, 1.0, seed, stratified=True)
        train, names = part["train"], set(part["train"].names)
        assert len(train) == round(share * 263)
        assert before <= names, "a smaller share is part of a larger one"
        counts = np.bincount(train.labels, minlength=3)
        assert (abs(counts - share * np.array([200, 60, 3])) <= 1.01).all()
        assert counts.min() >= 1
        assert list(part["val"].names) == list(dataset["val"].names)
        before = names
    other = subset(dataset, 0.1, 1.0, seed + 2, stratified=True)
    assert set(other["train"].names) != set(subset(dataset, 0.1, 1.0, seed, stratified=True)["train"].names)
    with pytest.raises(UsageError, match="keeps the validation images"):
        subset(dataset, 0.1, 0.5, seed, stratified=True)


@pytest.mark.parametrize(("train", "val"), [(0.8, 0.3), (0, 0.5), (-1, 0.5), (1.5, 0), (0.0001, 0.1)])
def test_impossible_subsets_are_refused(train: float, val: float) -> None:
    with pytest.raises(UsageError):
        subset(made({"train": [5, 5]}), train, val)


def grouped(groups: list[int]) -> DataSet:
    """Twenty images of two classes, in these groups."""
    dataset = made({"train": [10, 10]})
    labels = np.repeat([0, 1], 10)
    return replace(dataset, splits={"train": replace(dataset["train"], labels=labels, groups=np.array(groups))})


def test_a_class_that_no_group_brings_into_validation_is_named() -> None:
    dataset = grouped([*range(10), *[99] * 10])
    cut, choices = split_for(Run(val_fraction=0.2), dataset)
    assert per_class(cut["val"], 2)[1] == 0
    assert "no image of '1'" in next(one.reason for one in choices if one.name == "validation")


def test_groups_that_are_too_large_are_named_as_the_cause() -> None:
    with pytest.raises(DataError, match="or of near-duplicates") as caught:
        with_validation(grouped([0] * 10 + [1] * 10))
    assert "vitral data check made counts near-duplicates" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("count", "most", "expected"),
    [(10, 4, [0, 3, 6, 9]), (3, 12, [0, 1, 2]), (5, 1, [0]), (0, 4, []), (1_000_000, 3, [0, 500_000, 999_999])],
)
def test_images_spread_evenly_over_a_split(count, most, expected):
    assert spread(count, most).tolist() == expected


def test_a_spread_split_has_those_images():
    some = made({"train": [5, 5]})["train"].spread(4)
    assert [int(some.image(i).flat[0]) for i in range(len(some))] == [0, 3, 6, 9]
