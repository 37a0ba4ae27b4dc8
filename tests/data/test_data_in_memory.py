"""Data of this process: every form becomes the same data set, and what is none says what to pass."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

import vitral
from images import noise
from running import TINY
from vitral.data import DataSet
from vitral.errors import DataError, UsageError
from vitral.model import own
from vitral.training.callbacks import Callback

pytestmark = pytest.mark.python

PIXELS = np.stack([noise(seed) for seed in range(12)])
LABELS = ["cat", "dog"] * 6
NUMBERS = np.array([0, 1] * 6)


class Pairs(Dataset[Any]):
    """A torch data set of PIL images and class numbers."""

    classes = ("cat", "dog")

    def __len__(self) -> int:
        return len(PIXELS)

    def __getitem__(self, i: int) -> tuple[Image.Image, int]:
        return Image.fromarray(PIXELS[i]), int(NUMBERS[i])


class ImageFeature:
    """Stands for `datasets.Image`."""


ImageFeature.__name__ = "Image"


class ClassLabel:
    """Stands for `datasets.ClassLabel`."""

    names = ("cat", "dog")


class HuggingFace:
    """The interface of a `datasets.Dataset`: columns with features, and rows as dictionaries."""

    features: Mapping[str, Any] = {"id": SimpleNamespace(), "image": ImageFeature(), "animal": ClassLabel()}
    column_names = ("id", "image", "animal")

    def __len__(self) -> int:
        return len(PIXELS)

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            return {"animal": NUMBERS.tolist(), "id": list(range(len(PIXELS)))}[key]
        return {"id": key, "image": Image.fromarray(PIXELS[key]), "animal": int(NUMBERS[key])}


class TableLike:
    """The interface of a DataFrame: columns by name."""

    def __init__(self, **columns: list[Any]):
        self.columns, self._values = list(columns), columns

    def __len__(self) -> int:
        return len(self._values[self.columns[0]])

    def __getitem__(self, name: str) -> list[Any]:
        return self._values[name]


def check_equal(dataset: DataSet, split: str = "train") -> None:
    images = dataset[split]
    assert [dataset.classes[label] for label in images.labels] == LABELS
    for i in (0, 1, len(PIXELS) - 1):
        assert np.array_equal(images.image(i), PIXELS[i])
    assert pickle.loads(pickle.dumps(images)).image(1).shape == PIXELS[1].shape  # noqa: S301 - written on this line


@pytest.mark.parametrize(
    "data",
    [
        (PIXELS, LABELS),
        (PIXELS, np.array(LABELS)),
        (torch.from_numpy(PIXELS).permute(0, 3, 1, 2), LABELS),
        (PIXELS / 255, LABELS),
        (list(PIXELS), LABELS),
        Pairs(),
        Subset(Pairs(), range(len(PIXELS))),
        [(Image.fromarray(one), label) for one, label in zip(PIXELS, LABELS, strict=True)],
        [{"image": one, "label": label} for one, label in zip(PIXELS, LABELS, strict=True)],
        HuggingFace(),
        {"training": Pairs()},
    ],
    ids=lambda data: type(data).__name__,
)
def test_every_form_is_the_same_data(data):
    dataset = vitral.load_data(data)
    check_equal(dataset)
    assert vitral.load_data(dataset) is dataset


def test_numbers_are_classes_in_their_own_order():
    dataset = vitral.load_data(TensorDataset(torch.from_numpy(PIXELS).permute(0, 3, 1, 2), torch.from_numpy(NUMBERS)))
    assert dataset.classes == ("0", "1")
    assert dataset["train"].labels.tolist() == NUMBERS.tolist()

    class Unsorted(Pairs):
        classes = ("zebra", "ant")

    assert vitral.load_data(Unsorted()).classes == ("zebra", "ant")
    assert vitral.load_data(Unsorted())["train"].labels.tolist() == NUMBERS.tolist()


def test_tables_are_read_as_files_are(make_images, monkeypatch, tmp_path):
    pandas = pytest.importorskip("pandas")
    photos = make_images({"cat": 4, "dog": 4}, size=(8, 8))
    files = sorted(photos.rglob("*.png"))
    monkeypatch.chdir(tmp_path)
    columns = {"path": [str(one.relative_to(tmp_path)) for one in files], "label": [one.parent.name for one in files]}
    for table in (columns, pandas.DataFrame(columns), pandas.DataFrame({**columns, "path": files})):
        dataset = vitral.load_data(table)
        assert dataset.classes == ("cat", "dog")
        assert len(dataset["train"]) == 8
    splits = vitral.load_data({"train": pandas.DataFrame(columns), "val": pandas.DataFrame(columns).iloc[::2]})
    assert {name: len(split) for name, split in splits.splits.items()} == {"train": 8, "val": 4}
    ages = vitral.load_data(pandas.DataFrame({"path": files, "age": np.arange(8) / 2}), tasks=("numbers",))
    assert ages.targets.task == "numbers"


def test_labels_that_a_data_set_lists_are_trusted_only_if_they_are_its_own():
    read = []

    class Listed(Pairs):
        targets = NUMBERS.tolist()

        def __getitem__(self, i: int) -> tuple[Image.Image, int]:
            read.append(i)
            return super().__getitem__(i)

    class Unlisted(Listed):
        targets = None

    vitral.load_data(Listed())
    listed = len(read)
    vitral.load_data(Unlisted())
    assert len(read) - listed == listed + len(PIXELS) - 2  # the labels at both ends are compared

    class Changed(Listed):
        def __getitem__(self, i: int) -> tuple[Image.Image, int]:
            return Image.fromarray(PIXELS[i]), 1 - int(NUMBERS[i])

    assert vitral.load_data(Changed())["train"].labels.tolist() == (1 - NUMBERS).tolist()


def test_a_data_set_that_augments_is_noted():
    class Noisy(Pairs):
        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            return torch.rand(3, 8, 8), int(NUMBERS[i])

    (note,) = vitral.load_data(Noisy()).notes
    assert "pass the transform as augment=" in note


def test_a_data_set_that_flips_is_noted():
    """A flip leaves about half of the images as they are, among them the first one here."""

    class Flipped(Pairs):
        reads = 0

        def __getitem__(self, i: int) -> tuple[Image.Image, int]:
            self.reads += 1
            image, label = super().__getitem__(i)
            return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if i == 3 and self.reads % 2 else image, label

    (note,) = vitral.load_data(Flipped()).notes
    assert "pass the transform as augment=" in note


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (3, "an int is not a data set"),
        (torch.utils.data.DataLoader(Pairs()), r"(?s)is not a data set.*pass its .dataset"),
        ((one for one in ()), r"(?s)is not a data set.*no length"),
        (TableLike(id=["a"], target=[1]), r"(?s)no column of image files.*id, target.*rename the columns"),
        (TableLike(image=[PIXELS[0]], label=[1]), r"(?s)images instead of their paths.*list\(table\['image'\]\)"),
        (PIXELS, "an example is not"),
        ((PIXELS, LABELS[:3]), "12 images and 3 labels"),
        ((PIXELS, np.linspace(0, 1, 12)), "labels cannot be read"),
        ((PIXELS, [None] * 12), "labels cannot be read"),
        ((PIXELS, NUMBERS - 1), "6 labels below 0"),
        ((PIXELS / 255 * 4 - 2, LABELS), r"(?s)images cannot be read.*before standardization"),
        ([], "no images"),
        ({"train": Pairs(), "other": Pairs()}, "are not clear"),
        ({"train": (PIXELS, ["a"] * 12), "val": (PIXELS, ["b"] * 12)}, "classes that train lacks"),
    ],
    ids=range(14),
)
def test_what_is_not_a_data_set_says_what_to_pass(data, said):
    with pytest.raises((UsageError, DataError), match=said):
        vitral.load_data(data)


class Stop(Callback):
    def on_epoch_end(self, line: Any, best: bool) -> None:
        raise RuntimeError("stopped here")


def options(**more: Any) -> dict[str, Any]:
    return {
        **TINY,
        "epochs": 2,
        "val_fraction": 0.5,
        "init": "none",
        "probe": False,
        "quiet": True,
        "threads": 1,
        **more,
    }


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(own, "_here", {})
    return tmp_path


def test_a_run_on_a_torch_data_set_is_that_on_its_arrays(place):
    first = vitral.train(Pairs(), **options(out="first"))
    second = vitral.train((PIXELS, LABELS), **options(out="second"))
    assert [line["train_loss"] for line in first.history] == [line["train_loss"] for line in second.history]
    assert first.predictor.classes == ("cat", "dog")
    assert vitral.evaluate(first.folder, split="val").accuracy == first.result["val_accuracy"]
    assert vitral.evaluate(first.predictor, (PIXELS, LABELS)).images == 12
    assert vitral.compare(["first", "second"]).contenders[0].evaluation.images == 6


def test_another_process_asks_for_the_data_again(place, monkeypatch):
    data = Pairs()
    with pytest.raises(RuntimeError, match="stopped here"):
        vitral.train(data, **options(out="run"), callbacks=[Stop()])
    monkeypatch.setattr(own, "_here", {})
    with pytest.raises(UsageError, match=r"(?s)needs your data again.*resume=True, data=…"):
        vitral.train(out="run", resume=True, quiet=True)
    run = vitral.train(Pairs(), out="run", resume=True, quiet=True)
    (why,) = (one["reason"] for one in run.config["plan"] if one["name"] == "your data")
    assert why.startswith("they exist only in this Python process; in another one, pass data again to resume")
    monkeypatch.setattr(own, "_here", {})
    with pytest.raises(UsageError, match=r"(?s)needs your data again.*vitral.evaluate\(RUN, data\)"):
        vitral.evaluate("run")
    assert vitral.evaluate("run", Pairs()).images == 12


def test_other_data_do_not_continue_a_run(place, monkeypatch):
    with pytest.raises(RuntimeError, match="stopped here"):
        vitral.train(Pairs(), **options(out="run"), callbacks=[Stop()])
    with pytest.raises(DataError, match="data have changed"):
        vitral.train(Subset(Pairs(), range(10)), out="run", resume=True, quiet=True)


def test_pretraining_reads_data_in_memory(place):
    run = vitral.pretrain(Pairs(), "mae", epochs=1, model="mu/4", image_size=8, out="run", quiet=True, device="cpu")
    assert run.result["epochs"] == 1
