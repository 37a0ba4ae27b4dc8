"""Batches: the same pixels however they are kept, an order that is a function of seed and epoch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pictures import noise
from vitral.data import Split
from vitral.data.loader import Batches
from vitral.data.transforms import Augmentation, Preprocessing

CPU = torch.device("cpu")


class Mixed:
    """Pictures of many sizes, some much larger than what is read."""

    def __call__(self, i: int) -> np.ndarray:
        if i == 5 and self.broken:
            raise OSError("gone")
        return noise(i, (9 + 7 * (i % 5), 10 + 11 * (i % 4)))

    def __init__(self, broken: bool = False):
        self.broken = broken


def split(count: int = 23, broken: bool = False) -> Split:
    return Split([f"p{i}.png" for i in range(count)], np.arange(count) % 3, Mixed(broken))


def batches(pictures: Split | None = None, size: tuple[int, int] = (8, 12), **options) -> Batches:
    given = {"batch_size": 4, "device": CPU, "workers": 0, **options}
    return Batches(pictures or split(), Preprocessing(size), **given)


def all_of(found: Batches, epoch: int = 0, start: int = 0) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    parts = list(found.epoch(epoch, start))
    return (
        torch.cat([p.images for p in parts]),
        torch.cat([p.labels for p in parts]),
        np.concatenate([p.indices for p in parts]),
    )


@pytest.mark.parametrize("crop", [None, "none", "shift", "random-resized"])
def test_pixels_do_not_depend_on_where_they_are_kept(crop, monkeypatch):
    augmentation = Augmentation(crop=crop) if crop else None
    found = {
        "memory": batches(augmentation=augmentation, residency="memory"),
        "stream": batches(augmentation=augmentation, residency="stream"),
        "workers": batches(augmentation=augmentation, residency="stream", workers=2),
    }
    if crop != "random-resized":  # too large for one tensor at this size, small enough as they are
        pictures = split()
        decoded = sum(pictures.image(i).nbytes for i in range(len(pictures)))
        monkeypatch.setattr("vitral.data.loader.MEMORY_SHARE", 1.0)
        monkeypatch.setattr("vitral.data.loader.memory_bytes", lambda: decoded * 1.5)
        found = {k: batches(size=(64, 64), augmentation=augmentation, residency=k) for k in ("stream", "memory")}
        found["ragged"] = batches(size=(64, 64), augmentation=augmentation, residency="auto")
        assert "of decoded pixels in memory" in found["ragged"].residency
    kinds = [store.residency for store in found.values()]
    assert len(set(kinds)) == 3
    first = all_of(found.pop("memory"), epoch=3)
    for other in found.values():
        again = all_of(other, epoch=3)
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
        assert all(np.array_equal(a[8:], b) for a, b in zip(first, all_of(other, epoch=3, start=2), strict=True))


def test_evaluation_sees_every_picture_once_in_order():
    images, labels, indices = all_of(batches())
    assert indices.tolist() == list(range(23))
    assert labels.tolist() == [i % 3 for i in range(23)]
    assert torch.equal(images[7], Preprocessing((8, 12)).geometry(Mixed()(7)))
    assert len(batches()) == 6


def test_training_leaves_out_an_incomplete_batch_only_where_there_is_a_whole_one():
    train = batches(augmentation=Augmentation())
    assert len(train) == 5
    assert len(all_of(train)[2]) == 20
    small = batches(split(3), augmentation=Augmentation())
    assert len(small) == 1
    assert sorted(all_of(small)[2]) == [0, 1, 2]


def test_order_is_a_function_of_seed_and_epoch():
    a, b = (batches(augmentation=Augmentation(), seed=4) for _ in range(2))
    torch.rand(3)  # the global generator has no say
    assert np.array_equal(a.order(2), b.order(2))
    assert sorted(a.order(2)) == list(range(23))
    other = batches(augmentation=Augmentation(), seed=5)
    orders = [tuple(found.order(epoch)) for found in (a, other) for epoch in range(3)]
    assert len(set(orders)) == 6


def test_random_geometry_is_a_function_of_seed_epoch_and_picture():
    a = batches(augmentation=Augmentation(crop="random-resized"), seed=4)
    first = all_of(a, epoch=1)
    torch.manual_seed(99)
    assert torch.equal(first[0], all_of(a, epoch=1)[0])
    later = all_of(a, epoch=2)
    picture = int(later[2][0])
    place = list(first[2]).index(picture) if picture in first[2] else None
    assert place is None or not torch.equal(first[0][place], later[0][0])


def test_balanced_sampling_draws_classes_equally():
    labels = np.array([0] * 900 + [1] * 90 + [2] * 10)
    pictures = Split([str(i) for i in range(1000)], labels, lambda i: np.zeros((4, 4, 3), np.uint8))
    weights = (1 / np.bincount(labels))[labels]
    found = batches(pictures, size=(4, 4), augmentation=Augmentation(), weights=weights, batch_size=100)
    drawn = np.bincount(labels[np.concatenate([found.order(e) for e in range(5)])]) / 5000
    assert drawn == pytest.approx([1 / 3] * 3, abs=0.03)


@pytest.mark.parametrize("residency", ["memory", "stream"])
def test_unreadable_pictures_are_gathered_not_raised(residency):
    found = batches(split(broken=True), residency=residency)
    assert [(index, error.name, error.why) for index, error in found.unreadable] == [(5, "p5.png", "gone")]


def test_progress_counts_every_picture():
    done = []
    batches(split(23), progress=done.append)
    assert sum(done) == 23


def test_batches_are_copies(tmp_path):
    found = batches()
    for batch in found.epoch():
        batch.images.zero_()
    assert all_of(found)[0].any()
