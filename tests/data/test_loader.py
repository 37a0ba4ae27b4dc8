"""Batches: the same pixels for every residency, an order that is a function of seed and epoch."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image

from images import noise
from running import sampled
from vitral.data import Split
from vitral.data.images.augmentation import Augmentation
from vitral.data.images.decode import read_image
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batches
from vitral.data.prepared import Images

CPU = torch.device("cpu")


class Mixed:
    """Images of many sizes, some much larger than the network's."""

    def __call__(self, i: int) -> np.ndarray:
        if i == 5 and self.broken:
            raise OSError("gone")
        return noise(i, (9 + 7 * (i % 5), 10 + 11 * (i % 4)))

    def __init__(self, broken: bool = False):
        self.broken = broken


def split(count: int = 23, broken: bool = False) -> Split:
    return Split([f"p{i}.png" for i in range(count)], np.arange(count) % 3, Mixed(broken))


def batches(images: Split | None = None, size: tuple[int, int] = (8, 12), **options) -> Batches:
    given = {"batch_size": 4, "device": CPU, "workers": 0, **options}
    return Batches(images or split(), Preprocessing(size), **given)


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
        images = split()
        decoded = sum(images.image(i).nbytes for i in range(len(images)))
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


def test_evaluation_sees_every_image_once_in_order():
    images, labels, indices = all_of(batches())
    assert indices.tolist() == list(range(23))
    assert labels.tolist() == [i % 3 for i in range(23)]
    assert torch.equal(images[7], Preprocessing((8, 12)).geometry(Mixed()(7)))
    assert len(batches()) == 6


def test_training_drops_an_incomplete_batch_unless_it_is_the_only_one():
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


def test_random_geometry_is_a_function_of_seed_epoch_and_image():
    a = batches(augmentation=Augmentation(crop="random-resized"), seed=4)
    first = all_of(a, epoch=1)
    torch.manual_seed(99)
    assert torch.equal(first[0], all_of(a, epoch=1)[0])
    later = all_of(a, epoch=2)
    image = int(later[2][0])
    place = list(first[2]).index(image) if image in first[2] else None
    assert place is None or not torch.equal(first[0][place], later[0][0])


def test_balanced_sampling_draws_classes_equally():
    labels = np.array([0] * 900 + [1] * 90 + [2] * 10)
    images = Split([str(i) for i in range(1000)], labels, lambda i: np.zeros((4, 4, 3), np.uint8))
    weights = (1 / np.bincount(labels))[labels]
    found = batches(images, size=(4, 4), augmentation=Augmentation(), weights=weights, batch_size=100)
    drawn = np.bincount(labels[np.concatenate([found.order(e) for e in range(5)])]) / 5000
    assert drawn == pytest.approx([1 / 3] * 3, abs=0.03)


@pytest.mark.parametrize("residency", ["memory", "stream"])
def test_unreadable_images_are_collected_not_raised(residency):
    found = batches(split(broken=True), residency=residency)
    assert [(index, error.name, error.why) for index, error in found.unreadable] == [(5, "p5.png", "gone")]


def test_large_jpegs_that_are_cropped_are_decoded_no_larger_than_needed(monkeypatch):
    y, x = np.mgrid[0:256, 0:400]
    pixels = np.stack([255 * x / 400, 255 * y / 256, 128 + 60 * np.sin(x / 9)], -1).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=95)
    images = Split(["large.jpg"], np.zeros(1, np.int64), lambda i: file.getvalue())
    sizes = []

    def seen(*args, **options):
        image = read_image(*args, **options)
        sizes.append(image.shape[:2])
        return image

    monkeypatch.setattr("vitral.data.dataset.read_image", seen)

    def decoded(crop: str, scaled: bool = True) -> torch.Tensor:
        sizes.clear()
        return Images(images, Preprocessing((16, 24), 3), Augmentation(crop=crop, scaled=scaled)).decode(0)

    small = decoded("random-resized")
    assert sizes == [(32, 50)], "an eighth, which is still twice what is read"
    assert decoded("shift").shape == (3, 256, 400)
    assert sizes == [(256, 400)]
    whole = Preprocessing((16, 24), 3).resized(torch.from_numpy(pixels).permute(2, 0, 1), tuple(small.shape[1:]))
    assert (small.float() - whole.float()).abs().mean() < 1.5, "levels of 255"
    full = decoded("random-resized", scaled=False)
    assert sizes == [(256, 400)], "the plain way, where it is asked for"
    assert (small.float() - full.float()).abs().mean() < 1.5
    settings = [
        Images(images, Preprocessing((16, 24), 3), Augmentation(crop="random-resized", scaled=scaled)).settings
        for scaled in (True, False)
    ]
    assert settings[0] != settings[1], "the cache must not mistake one for the other"


def test_progress_counts_every_image():
    done = []
    batches(split(23), progress=done.append)
    assert sum(done) == 23


def test_batches_are_copies(tmp_path):
    found = batches()
    for batch in found.epoch():
        batch.images.zero_()
    assert all_of(found)[0].any()


# ---------------------------------------------------------------- workers


def streamed(**options) -> Batches:
    crop = Augmentation(crop="random-resized")
    return batches(augmentation=crop, residency="stream", **{"workers": 2, **options})


def workers_now() -> set[int | None]:
    return {process.pid for process in multiprocessing.active_children()}


@pytest.mark.parametrize("end", ["close", "forget"])
def test_workers_persist_across_epochs_and_end_with_their_batches(end):
    assert not workers_now()
    found, alone = streamed(), streamed(workers=0)
    seen = []
    for epoch, start in ((0, 0), (1, 0), (1, 3), (0, 2), (5, 0)):
        again, wanted = all_of(found, epoch, start), all_of(alone, epoch, start)
        assert all(np.array_equal(a, b) for a, b in zip(again, wanted, strict=True))
        seen.append(workers_now())
    assert len(seen[0]) == 2
    assert all(pids == seen[0] for pids in seen)
    if end == "close":
        found.close()
        assert not workers_now()
        assert np.array_equal(all_of(found)[0], all_of(alone)[0])  # begins new ones
    del found
    assert not workers_now()


def test_workers_end_with_batches_that_the_garbage_collector_finds():
    """As those of a traceback in a notebook: the collector closes queues before it deletes what reads them."""
    found = streamed()
    epoch = found.epoch()
    next(epoch)
    ring: list[object] = [found, epoch]
    ring.append(ring)
    del found, epoch, ring
    gc.collect()
    assert not workers_now()


def test_an_interrupted_check_leaves_no_process(monkeypatch):
    monkeypatch.setattr("vitral.data.loader.cores", lambda: 16)
    monkeypatch.setattr("vitral.data.loader._WINDOW", 16)

    def interrupted(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped:
        batches(split(200), residency="stream", workers=2, progress=interrupted)
    assert not workers_now()
    assert stopped.traceback, "which holds the generator"


def test_an_abandoned_epoch_does_not_disturb_the_next():
    found, wanted = streamed(), all_of(streamed(workers=0), 1)
    left = found.epoch(0)
    next(left)
    assert all(np.array_equal(a, b) for a, b in zip(all_of(found, 1), wanted, strict=True))
    with pytest.raises(RuntimeError, match="another one"):
        next(left)
    found.close()


def test_the_global_generator_is_not_used():
    found = streamed(workers=0)
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    all_of(found)
    assert torch.equal(torch.rand(2), wanted)


PROGRAM = """
import multiprocessing, os, signal, sys, time, torch
sys.path.insert(0, {tests!r}); sys.path.insert(0, {here!r})
from test_loader import streamed
from vitral.data import workers
if {late}:
    init = workers._init_worker
    workers._init_worker = lambda *given: (init(*given), time.sleep(0.5 * given[-1]))
found = streamed()
epoch = found.epoch()
next(epoch)
print(*(process.pid for process in multiprocessing.active_children()), flush=True)
{rest}
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", sampled(["early kill", "return", "interrupt", "error", "kill"], 2))
def test_workers_end_with_the_program(end):
    """For every kind of end, in the middle of an epoch, with the batches in a global variable; also if the second
    worker has not begun to wait for work when its parent is killed.
    """
    rest = {"return": "", "error": "1 / 0"}.get(end, "time.sleep(60)")
    here = os.path.dirname(__file__)
    program = PROGRAM.format(tests=os.path.dirname(here), here=here, rest=rest, late=end == "early kill")
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        if end == "interrupt":  # as from a terminal: to the whole process group
            os.killpg(process.pid, signal.SIGINT)
        elif "kill" in end:
            process.kill()
        assert process.wait(30) == {"return": 0, "error": 1, "interrupt": -signal.SIGINT}.get(end, -signal.SIGKILL)
        deadline = time.monotonic() + 30
        while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        left = [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left
