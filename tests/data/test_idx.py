from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from vitral.data import load
from vitral.errors import DataError

N, H, W = 6, 4, 5
PIXELS = np.arange(N * H * W, dtype=np.uint8).reshape(N, H, W)
LABELS = np.array([3, 0, 1, 3, 1, 0], np.uint8)


def idx_bytes(array: np.ndarray, kind: int = 8) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, kind, array.ndim, *array.shape) + array.tobytes()


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_set(folder: Path, suffix: str = "", prefixes: tuple[str, ...] = ("train", "t10k"), sign: str = "-") -> Path:
    for prefix in prefixes:
        write(folder / f"{prefix}-images{sign}idx3-ubyte{suffix}", idx_bytes(PIXELS))
        write(folder / f"{prefix}-labels{sign}idx1-ubyte{suffix}", idx_bytes(LABELS))
    return folder


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("sign", ["-", "."])
def test_idx_files_gzip_or_not(tmp_path: Path, suffix: str, sign: str) -> None:
    dataset = load(write_set(tmp_path / "mine", suffix, sign=sign))
    assert (dataset.name, dataset.classes) == ("mine", ("0", "1", "3"))
    assert list(dataset.splits) == ["train", "test"]
    assert dataset["train"].labels.tolist() == [2, 0, 1, 2, 1, 0]
    assert dataset["test"].names[4] == "mine/test[4]"
    assert np.array_equal(dataset["train"].image(2)[..., 0], PIXELS[2])
    assert np.array_equal(pickle.loads(pickle.dumps(dataset["train"])).image(5, 3)[..., 1], PIXELS[5])  # noqa: S301
    dataset["train"].image(0)[:] = 0  # an image belongs to whoever asked for it
    assert np.array_equal(dataset["train"].image(0)[..., 0], PIXELS[0])


def test_more_than_ten_classes_are_sorted_by_number(tmp_path: Path) -> None:
    write(tmp_path / "train-images-idx3-ubyte", idx_bytes(PIXELS))
    write(tmp_path / "train-labels-idx1-ubyte", idx_bytes(np.array([10, 2, 1, 10, 2, 1], np.uint8)))
    assert load(tmp_path).classes == ("1", "2", "10")


def test_color_and_a_wrapping_folder_and_both_spellings(tmp_path: Path) -> None:
    color = np.arange(N * H * W * 3, dtype=np.uint8).reshape(N, H, W, 3)
    folder = tmp_path / "set/raw"
    write(folder / "train-images-idx4-ubyte", idx_bytes(color))
    write(folder / "train-images-idx4-ubyte.gz", b"rubbish that is not read")
    write(folder / "train-labels-idx1-ubyte", idx_bytes(LABELS))
    assert np.array_equal(load(tmp_path / "set")["train"].image(1), color[1])


def test_a_named_set_under_the_root_or_in_it(tmp_path: Path) -> None:
    write_set(tmp_path / "mnist", ".gz")
    for root in (tmp_path, tmp_path / "mnist"):
        dataset = load("mnist", root=root, download=False)
        assert (dataset.name, dataset["train"].names[0]) == ("mnist", "mnist/train[0]")
    with pytest.raises(DataError):  # the digits are not taken for clothes
        load("fashion-mnist", root=tmp_path / "mnist", download=False)


def test_fashion_mnist_knows_its_classes(tmp_path: Path) -> None:
    folder = tmp_path / "fashion-mnist"
    write(folder / "train-images-idx3-ubyte", idx_bytes(np.zeros((10, H, W), np.uint8)))
    write(folder / "train-labels-idx1-ubyte", idx_bytes(np.arange(10, dtype=np.uint8)))
    dataset = load("fashion-mnist", root=tmp_path, download=False)
    assert (dataset.classes[0], dataset.classes[9]) == ("T-shirt/top", "Ankle boot")


GOOD = idx_bytes(PIXELS)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("images", "labels", "why"),
    [
        (b"", idx_bytes(LABELS), "does not start with the magic number"),
        (b"\0\0\x08", idx_bytes(LABELS), "does not start with the magic number"),
        (idx_bytes(PIXELS, kind=13), idx_bytes(LABELS), "does not start with the magic number"),
        (idx_bytes(LABELS), idx_bytes(LABELS), "does not start with the magic number"),
        (GOOD[:10], idx_bytes(LABELS), "its header states"),
        (GOOD[:-1], idx_bytes(LABELS), "its header states 120 bytes, but there are 119"),
        (GOOD + b"\0", idx_bytes(LABELS), "but there are more"),
        (struct.pack(">HBB3I", 0, 8, 3, *[2**32 - 1] * 3), idx_bytes(LABELS), "its header states"),
        (struct.pack(">HBB3I", 0, 8, 3, 0, 4, 5), idx_bytes(LABELS), "its header states 0"),
        (GOOD, idx_bytes(LABELS[:-1]), "6 images but 5 labels"),
        (GOOD, idx_bytes(PIXELS), "does not start with the magic number"),
    ],
)
def test_damaged_idx_files_are_refused(tmp_path: Path, suffix: str, images: bytes, labels: bytes, why: str) -> None:
    write(tmp_path / f"train-images-idx3-ubyte{suffix}", images)
    write(tmp_path / f"train-labels-idx1-ubyte{suffix}", labels)
    with pytest.raises(DataError, match=why) as caught:
        load(tmp_path)
    assert len(str(caught.value).splitlines()) <= 5
    assert str(tmp_path) in str(caught.value)


def test_a_gzip_that_is_none_or_ends_early_is_refused(tmp_path: Path) -> None:
    write_set(tmp_path, ".gz", ("train",))
    path = tmp_path / "train-images-idx3-ubyte.gz"
    for data in (b"not gzip", path.read_bytes()[:-12]):
        path.write_bytes(data)
        with pytest.raises(DataError, match="not a valid IDX file"):
            load(tmp_path)


def test_a_bomb_stops_at_the_size_in_its_header(tmp_path: Path) -> None:
    write_set(tmp_path, ".gz", ("train",))
    write(tmp_path / "train-images-idx3-ubyte.gz", GOOD + bytes(50_000_000))
    with pytest.raises(DataError, match="but there are more"):
        load(tmp_path)


def test_incomplete_and_doubled_sets_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "half/train-images-idx3-ubyte", GOOD)
    with pytest.raises(DataError, match="no IDX file with the labels of the train split"):
        load(tmp_path / "half")
    write_set(tmp_path / "two/a")
    write_set(tmp_path / "two/b")
    with pytest.raises(DataError, match="more than one IDX set"):
        load(tmp_path / "two")
