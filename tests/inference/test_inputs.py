"""Every listed form of image is accepted; any other object is refused by its type."""

from __future__ import annotations

import io
import itertools
import os
import shutil
import tarfile
import threading
import time
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from images import noise
from vitral.data import load
from vitral.errors import DataError, ImageError, UsageError
from vitral.inference.inputs import Item, expand
from vitral.inference.predictor import Predictor
from vitral.model import BITS, CONV_STEMMED, HYBRIDS, SIZES, WITH_PRESET, WRITE_UPS


@pytest.fixture(scope="module")
def predictor(trained: vitral.TrainedRun) -> Predictor:
    return vitral.load(trained.folder, device="cpu", precision="fp32")


@pytest.fixture
def folder(make_images) -> Path:
    return make_images({"b": 2, "a": 3})


def names(images: Any) -> list[str]:
    return [item.name for item in expand(images)]


PIXELS = noise(3, (8, 10))
KINDS = {
    "bytearray": lambda data: bytearray(data),
    "memoryview": lambda data: memoryview(data),
    "open file": io.BytesIO,
    "tensor": lambda _: torch.from_numpy(PIXELS).permute(2, 0, 1),
    "floats": lambda _: torch.from_numpy(PIXELS).permute(2, 0, 1) / 255,
    "bytes as floats": lambda _: torch.from_numpy(PIXELS).permute(2, 0, 1).float(),
    "bytes as doubles": lambda _: PIXELS.astype(np.float64),
    "bfloat16": lambda _: torch.from_numpy(PIXELS).permute(2, 0, 1).double().to(torch.bfloat16),
    "integers": lambda _: torch.from_numpy(PIXELS).permute(2, 0, 1).long(),
    "half": lambda _: (torch.from_numpy(PIXELS).permute(2, 0, 1) / 255).half(),
    "with gradient": lambda _: (torch.from_numpy(PIXELS).permute(2, 0, 1) / 255).requires_grad_(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_image_of_each_kind(predictor, kind):
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, "PNG")
    found = predictor(KINDS[kind](file.getvalue()))
    assert isinstance(found, vitral.Prediction)
    assert found.name == "image 0"
    assert np.array_equal(found.probabilities, predictor(PIXELS).probabilities)


MANY = {
    "tensor": lambda all: torch.from_numpy(all).permute(0, 3, 1, 2),
    "array": lambda all: all,
    "list": list,
    "tuple": tuple,
    "generator": lambda all: (one for one in all),
    "iterator of tensors": lambda all: map(torch.Tensor.byte, torch.from_numpy(all).permute(0, 3, 1, 2)),
    "nested": lambda all: [all[0], [all[1:2]], iter(all[2:])],
}


@pytest.mark.parametrize("kind", MANY)
def test_many_images_of_each_kind(predictor, kind):
    pixels = np.stack([noise(seed) for seed in range(4)])
    found = predictor(MANY[kind](pixels))
    assert isinstance(found, list)
    assert [one.name for one in found] == [f"image {i}" for i in range(4)]
    wanted = predictor.probabilities(list(pixels))
    assert np.allclose([one.probabilities for one in found], wanted, atol=1e-6)
    assert np.allclose(predictor.probabilities(MANY[kind](pixels)), wanted, atol=1e-6)


def test_folders_archives_and_lists(predictor, folder, monkeypatch):
    wanted = ["a/0.png", "a/1.png", "a/2.png", "b/0.png", "b/1.png"]
    with zipfile.ZipFile(folder / "all.zip", "w") as file:
        for name in wanted:
            file.write(folder / name, name)
        file.writestr("notes.md", "no image")
    with tarfile.open(folder / "all.tar.gz", "w:gz") as file:
        file.add(folder / "a", "a")
    (folder / "list.txt").write_bytes(b"\xef\xbb\xbfa/0.png\r\n\nb/1.png\n" + os.fsencode(folder / "a/1.png"))
    assert names(folder) == names(str(folder)) == [str(folder / name) for name in wanted]
    assert names(folder / "all.zip") == [f"{folder}/all.zip:{name}" for name in wanted]
    assert names(folder / "all.tar.gz") == [f"{folder}/all.tar.gz:{name}" for name in wanted[:3]]
    assert names(folder / "list.txt") == [str(folder / name) for name in ("a/0.png", "b/1.png", "a/1.png")]
    monkeypatch.chdir(folder)
    assert names("list.txt")[:2] == ["a/0.png", "b/1.png"]
    mixed = [folder / "a", PIXELS, "all.zip", np.array(["b/0.png"])]
    assert names(mixed)[3:5] == ["image 3", "all.zip:a/0.png"]
    assert names(mixed)[-1] == "b/0.png"
    of_folder, of_archive, of_list = predictor(folder), predictor("all.zip"), predictor("list.txt")
    same = [0, 4, 1]
    for one, other in [*zip(of_folder, of_archive, strict=True), *zip((of_folder[i] for i in same), of_list)]:  # noqa: B905 - the same length by `same`
        assert np.allclose(one.probabilities, other.probabilities, atol=1e-6)


def test_an_open_file_is_named(folder):
    path = folder / "a/0.png"
    with open(path, "rb") as first, open(path, "rb") as second:
        assert names(first) == [str(path)]
        items = list(expand([second, second]))
    assert (items[0].image, items[1].image) == (path.read_bytes(), b"")


REFUSED = {
    "number": (3, "an int is no image"),
    "nothing": (None, "a NoneType is no image"),
    "mapping": ({"image": PIXELS}, r"a dict is a table with the columns image(.|\n)*table\['image'\]"),
    "object": (object(), "an object is no image"),
    "text file": (io.StringIO("x"), "open as text"),
    "channels last": (torch.from_numpy(PIXELS), r"a tensor \(8, 10, 3\) is not \(C, H, W\)"),
    "flat": (torch.zeros(8, 10), r"a tensor \(8, 10\) is not(.|\n)*try: tensor\[None\], with its one channel"),
    "clips": ([torch.zeros(2, 4, 3, 8, 10)], r"is not \(C, H, W\)(.|\n)*try: tensor\.flatten\(0, -4\)"),
    "empty": (torch.zeros(3, 0, 10), r"a tensor \(3, 0, 10\) is not"),
    "standardized": (torch.linspace(-2, 2, 240).view(3, 8, 10), "floats from -2 to 2, which are not surely"),
    "standardized array": (np.linspace(-2, 2.6, 240).reshape(8, 10, 3), "floats from -2 to 2.6, which are not surely"),
    "linear light": (np.linspace(0, 4, 240).reshape(8, 10, 3), "floats from 0 to 4, which are not surely"),
    "not a number": (torch.full((3, 8, 10), torch.nan), "floats without a finite value"),
    "integers": (torch.full((3, 8, 10), 256), "integers from 256 to 256"),
    "complex": (torch.zeros(3, 8, 10, dtype=torch.complex64), "values of type complex64"),
    "sparse": (torch.zeros(3, 8, 10).to_sparse(), r"a tensor of torch\.float32 and torch\.sparse_coo"),
    "zero byte": ("a\0b.png", "null"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_objects_are_refused_by_type(predictor, kind):
    given, why = REFUSED[kind]
    with pytest.raises(ImageError, match=why) as caught:
        predictor(given)
    assert len(str(caught.value).splitlines()) <= 5
    if "is no image" in why:
        for accepted in ("path", "bytes", "PIL", "numpy", "torch", "iterable"):
            assert accepted in str(caught.value)
    found = list(predictor.stream([PIXELS, given, PIXELS]))
    assert [isinstance(one, ImageError) for one in found] == [False, True, False]
    assert found[1].name == str(given) if isinstance(given, str) else "image 1"


def test_a_table_in_memory_is_no_images_but_its_column_is(predictor, folder):
    pandas, arrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    paths = [str(folder / "a/0.png"), str(folder / "b/1.png")]
    frame = pandas.DataFrame({"label": ["a", "b"], "path": paths})
    table = arrow.table({"label": ["a", "b"], "path": paths})
    for given in (frame, table, table.to_batches()[0], frame.to_dict("list"), frame.iloc[0].to_dict()):
        for call in (predictor, predictor.embed, lambda images: list(predictor([images]))):
            with pytest.raises(ImageError, match="is a table with the columns label, path") as caught:
                call(given)
            assert "table['path']" in str(caught.value)
    for column in (frame["path"], table["path"], table["path"].chunk(0)):
        assert [one.name for one in predictor(column)] == paths
    assert load(frame).classes == ("a", "b")  # as data, the table has labels beside its images
    for given, why in (
        ({"a": 1}, "a dict has data by split"),
        (["a.png"], "the first one is a str"),
        (3, "not a data set"),
    ):
        for call in (vitral.train, vitral.pretrain, load, lambda data: vitral.evaluate(predictor, data)):
            with pytest.raises((UsageError, DataError), match=why):
                call(given)


def test_sources_without_images(predictor, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "binary.txt").write_bytes(b"a\0b\n")
    (tmp_path / "endless.txt").write_bytes(b"x" * 70_000)
    (tmp_path / "damaged.zip").write_bytes(b"PK")
    for name, why in {
        "empty": "no images",
        "empty.txt": "the list is empty",
        "binary.txt": "not a list",
        "endless.txt": "not a list",
        "damaged.zip": "cannot read archive",
    }.items():
        with pytest.raises(DataError, match=why):
            predictor(tmp_path / name)
    (tmp_path / "gone.txt").write_text("gone.png\n")
    with pytest.raises(ImageError, match=r"gone\.png"):
        predictor(tmp_path / "gone.txt")


def test_a_damaged_member_of_an_archive_is_named(predictor, folder):
    with zipfile.ZipFile(folder / "all.zip", "w") as file:
        file.write(folder / "a/0.png", "0.png")
        file.writestr("1.png", b"x" * 500)
    data = bytearray((folder / "all.zip").read_bytes())
    data[data.index(b"x" * 500) + 7] = ord("y")
    (folder / "all.zip").write_bytes(data)
    good, bad = predictor.stream(folder / "all.zip")
    assert isinstance(good, vitral.Prediction)
    assert (bad.name, "checksum" in str(bad)) == (f"{folder}/all.zip:1.png", True)


def test_a_stream_is_lazy_and_takes_no_more_than_two_batches_ahead(predictor):
    taken = []

    def endless():
        for number in itertools.count():
            taken.append(number)
            yield noise(number % 5)

    stream = predictor.stream(endless(), batch_size=3)
    assert taken == []
    found = list(itertools.islice(stream, 7))
    assert [one.name for one in found] == [f"image {i}" for i in range(7)]
    assert len(taken) == 12
    threads = threading.active_count()
    stream.close()
    until = time.monotonic() + 20
    while threading.active_count() >= threads and time.monotonic() < until:
        time.sleep(0.01)  # they end by themselves
    assert threading.active_count() < threads
    wanted = predictor.probabilities([noise(i % 5) for i in range(7)])
    assert np.allclose([one.probabilities for one in found], wanted, atol=1e-6)


def test_an_error_of_the_iterable_is_raised(predictor):
    def broken():
        yield PIXELS
        raise RuntimeError("the camera is gone")

    with pytest.raises(RuntimeError, match="the camera is gone"):
        list(predictor.stream(broken()))
    with pytest.raises(UsageError, match="batches of 0 images"):
        list(predictor.stream([PIXELS], 0))


def test_memory_of_a_stream_does_not_grow(predictor):
    """1,000 arrays of 192 KiB: only two batches are held."""
    images = (np.zeros((256, 256, 3), np.uint8) for _ in range(1000))
    tracemalloc.start()
    try:
        assert sum(1 for _ in predictor.stream(images, batch_size=8)) == 1000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 30 << 20


def test_features(predictor, folder):
    config = predictor.model.config
    images = [folder / "a/0.png", PIXELS, folder / "b"]
    features = predictor.embed(images)
    assert (features.shape, features.dtype) == ((4, config.features), np.float32)
    with torch.inference_mode():
        head = predictor.model.head
        logits = torch.nn.functional.linear(torch.from_numpy(features), head.weight, head.bias)
    assert np.allclose(logits.softmax(1), predictor.probabilities(images), atol=1e-5)
    assert np.allclose(predictor.embed(PIXELS), features[1:2], atol=1e-5)
    assert predictor.embed([]).shape == (0, config.features)
    tokens = predictor.embed(images, tokens=True, batch_size=3)
    assert tokens.shape == (4, config.grid[0] * config.grid[1], config.dim)
    assert predictor.embed([], tokens=True).shape == (0, 0, config.dim)
    with pytest.raises(ImageError, match=r"gone\.png"):
        predictor.embed("gone.png")


@pytest.mark.parametrize("name", ["mu/4", pytest.param("BiT-R50x1", marks=pytest.mark.slow), "R+Ti/16"])
def test_patch_tokens_average_to_pooled_features(name):
    """The mean of the patch tokens equals the features of a network with mean pooling."""
    pool = {} if name.startswith("BiT") else {"pool": "mean", "registers": 2, "cls_token": True}
    image_size = 32 if name != "R+Ti/16" else 64
    network = vitral.create(name, classes=3, image_size=image_size, **pool)
    predictor = Predictor(network, machine=vitral.load("demo", device="cpu", precision="fp32").machine)
    tokens = predictor.embed([noise(0, (40, 40))], tokens=True)
    assert np.allclose(tokens.mean(1), predictor.embed([noise(0, (40, 40))]), atol=1e-5)


def test_features_of_several_views_are_refused(trained):
    predictor = vitral.load(trained.folder, device="cpu", precision="fp32", tta="mirror")
    with pytest.raises(UsageError, match="plainly"):
        predictor.embed([PIXELS])
    assert predictor.plainly().embed([PIXELS]).shape[0] == 1


def test_explain_takes_what_a_predictor_takes(predictor, folder):
    maps = vitral.explain(predictor, [folder / "a", torch.from_numpy(PIXELS).permute(2, 0, 1)])
    assert [one.name for one in maps] == [*(str(folder / f"a/{i}.png") for i in range(3)), "image 3"]


def test_an_item_names_an_image(predictor):
    assert predictor([Item("mine", PIXELS)])[0].name == "mine"


def test_repr_of_a_predictor(predictor, trained):
    text = repr(predictor)
    for part in (
        "ViT of 2 blocks, width 8, patch 4",
        repr(str(trained.folder)),
        "2 classes: 'day', 'night'",
        "8×12",
        "cpu fp32",
    ):
        assert part in text
    assert repr(vitral.load("demo", device="cpu")).startswith(
        "Predictor(ViT of 4 blocks, width 64, patch 4 with pool='mean', 'demo', 10 classes"
    )


@pytest.mark.parametrize(
    "name",
    [
        *(f"{size}/16" for size in SIZES),
        *WITH_PRESET,
        *CONV_STEMMED,
        *HYBRIDS,
        *BITS,
        *WRITE_UPS,
        "Ti/8x4",
        "g-opt+/14",
        "C+Micro+/8",
        "R26+S+/32",
    ],
)
def test_named_networks_have_their_names(name):
    from vitral.model.variants import config, name_of

    same = {"b/16": "S/16", "tensordot-b16": "B/16 with norm_eps=1e-05"}
    assert name_of(config(name, classes=7)) == same.get(name, name)


def test_unnamed_networks_are_described():
    from vitral.model.variants import config, name_of

    assert name_of(config("S/16", dim=96)) == "ViT of 12 blocks, width 96, patch 16"
    assert name_of(config("BiT-R50x1", layers=(1, 1))) == "ResNet of 2 bottlenecks, width 1"
    assert name_of(config("S/16", dim=96, pool="mean")) == "ViT of 12 blocks, width 96, patch 16 with pool='mean'"


def test_a_name_states_what_differs_from_the_named_network():
    from vitral.model.variants import config, name_of

    registers = config("Ti/16", registers=4, position="rotary", dropout=0.1)
    assert registers == config("Ti+/16", dropout=0.1)
    assert name_of(registers) == "Ti+/16"
    assert name_of(config("Ti+/16", qk_norm=True)) == "Ti+/16 with qk_norm=True"
    assert name_of(config("Ti/16", registers=2, position="rotary")) == "Ti/16 with position='rotary', registers=2"
    assert name_of(config("S/16", channels=1)) == "S/16 with channels=1"
    assert name_of(config("tensordot-b16")) == "B/16 with norm_eps=1e-05"


def test_every_field_that_a_name_leaves_out_is_one():
    """Whatever else a network may have is named: a new field of `ViTConfig` is not forgotten."""
    from vitral.model.config import ViTConfig
    from vitral.model.variants import UNNAMED

    assert ViTConfig.__dataclass_fields__.keys() >= UNNAMED


def test_html_is_escaped(predictor, tmp_path, trained):
    evil = "<script>alert(1)</script>"
    named = Predictor(predictor.model, predictor.preprocessing, (evil, "b"), machine=predictor.machine, source=evil)
    path = tmp_path / "<img src=x>.png"
    Image.fromarray(PIXELS).save(path)
    pages = [named._repr_html_(), named(path)._repr_html_()]
    pages += [vitral.explain(named, [path], target)[0]._repr_html_() for target in (0, 1)]
    for page in pages:
        assert "<script" not in page
        assert "<img src=x>" not in page
    assert "&lt;script&gt;" in pages[0]
    assert "&lt;img src=x&gt;" in pages[1]
    assert 'src="data:image/png;base64,' in pages[2]


def test_predictions_as_a_data_frame(predictor, folder):
    pandas = pytest.importorskip("pandas")
    found = predictor(folder)
    frame = found.to_frame()
    assert list(frame.columns) == ["path", "class", "probability"]
    assert list(frame["path"]) == [str(path) for path in sorted(folder.rglob("*.png"))]
    assert list(frame["class"]) == [one.label for one in found]
    assert np.array_equal(np.float32(frame["probability"]), [np.float32(one.confidence) for one in found])
    wide = found[1:3].to_frame(top=5, all=True)
    assert list(wide.columns) == [
        "path",
        "class",
        "probability",
        "label_1",
        "probability_1",
        "label_2",
        "probability_2",
        "p_day",
        "p_night",
    ]
    assert np.array_equal(np.float32(wide[["p_day", "p_night"]]), [one.probabilities for one in found[1:3]])
    assert predictor([]).to_frame().shape == (0, 3)
    assert isinstance(frame, pandas.DataFrame)


def test_classes_of_the_same_name_have_separate_columns(predictor):
    pytest.importorskip("pandas")
    named = Predictor(predictor.model, predictor.preprocessing, ("crane", "crane"), machine=predictor.machine)
    assert list(named([PIXELS]).to_frame(all=True).columns)[3:] == ["p_0_crane", "p_1_crane"]


def test_missing_pandas_is_reported(predictor, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(vitral.errors.MissingExtraError, match="pip install pandas"):
        predictor([PIXELS]).to_frame()


def test_a_subfolder_that_cannot_be_opened_is_an_error_in_order(predictor, folder):
    shutil.rmtree(folder / "b")
    (folder / "b").symlink_to("b")
    found = list(predictor.stream(folder))
    assert [isinstance(one, ImageError) for one in found] == [False, False, False, True]
