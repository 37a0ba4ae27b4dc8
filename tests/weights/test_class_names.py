"""Class names: ImageNet's against timm's own lists, those in configs, and classes matched under other names."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from cases_jax import CASES

from vitral.data import DataSet, Split
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.options import DataOptions
from vitral.errors import DataError, WeightsError
from vitral.inference.options import InferenceOptions
from vitral.inference.predictor import Predictor
from vitral.model import ViT, ViTConfig, create
from vitral.weights.class_names import SYNSETS, default, distinct, from_config, imagenet_names, match
from vitral.weights.load import read
from vitral.weights.notes import OfClassNames
from vitral.workflows.evaluate import evaluate_images, in_classes_of


def lemmas() -> list[str]:
    """timm's names for the 1000 classes: all the lemmas of WordNet, as Hugging Face's configs have them."""
    data = pytest.importorskip("timm.data")
    info = data.ImageNetInfo("imagenet-1k")
    return [info.index_to_description(index, detailed=False) for index in range(1000)]


def test_synsets_are_timms():
    data = pytest.importorskip("timm.data")
    info = data.ImageNetInfo("imagenet-1k")
    assert list(SYNSETS) == [info.index_to_label_name(index) for index in range(1000)] == sorted(set(SYNSETS))


def test_the_names_are_in_the_order_of_the_ids():
    names = imagenet_names()
    assert len(set(names)) == 1000
    own = [[one.strip().lower() for one in lemma.split(",")] for lemma in lemmas()]
    differ = [i for i in range(1000) if names[i].lower() not in own[i]]
    assert [names[i] for i in differ] == ["crane bird", "maillot tank suit"]


def test_names_that_occur_twice():
    assert distinct(["crane", "nail", "crane"]) == ("crane (0)", "nail", "crane (2)")
    assert distinct(["a", "a", "a (0)"]) == ("a (0)", "a (1)", "a (0) (2)")


def test_default_names():
    assert default(1000) == imagenet_names()
    assert default(3) == ("0", "1", "2")
    assert default(21843)[-1] == "21842"


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"id2label": {"1": "dog", "0": "cat"}}, ("cat", "dog")),
        ({"id2label": {0: "cat", 1: "dog"}}, ("cat", "dog")),
        ({"id2label": {"0": "crane", "1": "crane"}}, ("crane (0)", "crane (1)")),
        ({}, None),
        ({"id2label": {}}, None),
        ({"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}, None),
        ({"label_names": ["cat", "dog"]}, ("cat", "dog")),
        ({"architecture": "vit", "pretrained_cfg": {"label_names": ["n01440764"]}}, ("n01440764",)),
        ({"pretrained_cfg": {"labels": {"0": "cat"}}}, ("cat",)),
        ({"pretrained_cfg": None}, None),
    ],
)
def test_names_in_a_config(config, names):
    assert from_config(config) == names


@pytest.mark.parametrize(
    "config",
    [
        {"id2label": {"0": "cat", "2": "dog"}},
        {"id2label": {"0": 1}},
        {"id2label": ["cat", None]},
        {"id2label": "cat"},
        {"label_names": [""]},
        {"id2label": {"0": {"name": "cat"}}},
    ],
)
def test_names_that_are_none(config):
    with pytest.raises(WeightsError, match=f"'{next(iter(config))}' should be one name for each number"):
        from_config(config)


def test_same_names_first_then_imagenet_then_case():
    assert match(["b", "a"], ["a", "b", "c"]) == [1, 0]
    assert match(["Cat", "DOG"], ["dog", "cat"]) == [1, 0]
    assert match(["golden_retriever"], ["Golden Retriever"]) == [0]
    assert match(["cat", "Cat"], ["cat", "dog"]) == [0, None]  # the exact name has it
    assert match(["CAT", "Cat"], ["cat"]) == [None, None]  # either could be meant
    assert match(["CAT"], ["cat", "Cat"]) == [None]
    assert match(["n01440764", "n15075141"], imagenet_names()) == [0, 999]
    assert match(["tench", "Great White Shark"], SYNSETS) == [0, 2]
    assert match(["n01440764_tench"], imagenet_names()) == [0]
    assert match(SYNSETS, imagenet_names()) == match(imagenet_names(), SYNSETS) == list(range(1000))
    # A name of ImageNet's among others may be something else; what stands for two classes is none.
    assert match(["nail", "rivet"], SYNSETS) == [None, None]
    assert match(["tench", "crane"], SYNSETS) == [0, None]
    assert match(["n99999999"], imagenet_names()) == [None]


def test_lemmas_are_imagenets_names_too():
    names = distinct(lemmas())
    assert names[134] == "crane (134)"
    assert match(["n02012849", "n03126707", "n01440764"], names) == [134, 517, 0]
    assert match(names, SYNSETS) == list(range(1000))


def network(classes: tuple[str, ...]) -> Predictor:
    config = ViTConfig(image_size=32, patch_size=16, dim=8, depth=1, heads=1, mlp_dim=8, classes=len(classes))
    torch.manual_seed(0)
    return Predictor(ViT(config), Preprocessing((32, 32)), classes)


def data_set(classes: tuple[str, ...]) -> DataSet:
    split = Split(("a", "b", "c"), np.array([0, 1, 1]), lambda index: b"")
    return DataSet("photos", classes, {"train": split}, ())


def test_a_data_set_of_synsets_is_counted_in_the_networks_classes():
    found = in_classes_of(network(imagenet_names()), data_set(("n15075141", "n01443537")))
    assert found["train"].labels.tolist() == [999, 1, 1]
    assert found.classes == imagenet_names()
    found = in_classes_of(network(SYNSETS), data_set(("goldfish", "tench")))
    assert found["train"].labels.tolist() == [1, 0, 0]
    with pytest.raises(DataError, match="1 class that the model does not have: n99999999"):
        in_classes_of(network(imagenet_names()), data_set(("n01443537", "n99999999")))


def test_photographs_of_imagenet_are_evaluated(shared_data: Path, tmp_path: Path):
    """100 photographs whose file names begin with the WordNet id, in folders of that name."""
    archive = shared_data / "imagenet-samples.tar"
    if not archive.is_file():
        pytest.skip(f"needs {archive}")
    with tarfile.open(archive) as tar:
        members = [m for m in tar.getmembers() if m.isfile()][::10]
        for member in members:
            name = Path(member.name).name
            folder = tmp_path / name.split("_")[0]
            folder.mkdir()
            (folder / name).write_bytes(tar.extractfile(member).read())  # type: ignore[union-attr]
    found = evaluate_images(network(imagenet_names()), DataOptions(tmp_path), InferenceOptions("cpu", "fp32"))
    words = {
        Path(name).stem: imagenet_names()[label]
        for name, label in zip(found.images.names, found.images.labels, strict=True)
    }
    assert found.evaluation.images == len(members) == 10
    assert all(stem.split("_", 1)[1].lower() == name.replace(" ", "_").lower() for stem, name in words.items()), words


def test_names_and_a_new_head_replace_notes_on_class_names_alone():
    network = create("S/4", classes=12, image_size=32)
    loaded = read(network)
    about = [note for note in loaded.account.notes if isinstance(note, OfClassNames)]
    rest = [note for note in loaded.account.notes if not isinstance(note, OfClassNames)]
    assert about
    assert rest
    for changes in ({"classes": [f"kind {n}" for n in range(12)]}, {"classes": 3, "new_head": True}):
        account = read(network, **changes).account
        assert list(account.notes[: len(rest)]) == rest, "the preprocessing is still assumed"
        assert not any(isinstance(note, OfClassNames) for note in account.notes)
        assert not account.nameless
    assert list(loaded.account.notes) == [*rest[:1], *about, *rest[1:]], "a report is a value: the steps made new ones"


def test_weights_can_be_built_more_than_once(tmp_path):
    loaded = read(CASES["jax/sincos"]().write(tmp_path))
    first, second = loaded.build(), loaded.build()
    assert first is not second
    for (name, one), (_, other) in zip(first.state_dict().items(), second.state_dict().items(), strict=True):
        assert torch.equal(one, other), name
