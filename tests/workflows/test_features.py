"""Test frozen features: their values, cache invalidation, and few-shot and neighbor accuracy."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from images import noise
from vitral.cli.main import main
from vitral.data import load as load_data
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.options import DataOptions
from vitral.device import choose
from vitral.errors import DataError, UsageError
from vitral.inference.predictor import Predictor
from vitral.model import ViT, ViTConfig
from vitral.weights.files import read_tensors
from vitral.workflows.tables import features
from vitral.workflows.tables.features import FeatureCache, content, evaluate_features, feature_key, features_of

MACHINE = choose("cpu", "fp32")
SIZE = (8, 8)
TINY: dict[str, Any] = {
    "image_size": SIZE,
    "patch_size": 4,
    "dim": 16,
    "depth": 2,
    "heads": 2,
    "mlp_dim": 32,
    "classes": 3,
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a temporary folder as the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home/vitral/features"


def network(**changes: Any) -> ViT:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ViT(ViTConfig(**{**TINY, **changes}))


def predictor(**changes: Any) -> Predictor:
    model = network(**changes)
    return Predictor(model, Preprocessing(SIZE), tuple("xyz"[: model.config.classes]), machine=MACHINE)


@pytest.fixture
def colors(tmp_path: Path) -> Path:
    """Reddish, greenish and bluish noise, with 12 training and 6 test images of each."""
    for channel, label in enumerate(("red", "green", "blue")):
        for split, count in (("train", 12), ("test", 6)):
            folder = tmp_path / "colors" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = noise(100 * channel + number + 50 * (split == "test"), (10, 12)) // 2
                pixels[..., channel] += 100
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "colors"


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of images in each forward pass."""
    passes: list[int] = []
    original = features.head_features

    def count(model: Any, images: torch.Tensor, *rest: Any) -> torch.Tensor:
        passes.append(len(images))
        return original(model, images, *rest)

    monkeypatch.setattr(features, "head_features", count)
    return passes


# ---------------------------------------------------------------- what they are


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pool": "mean"},
        {"pool": "map"},
        {"pool": "cls-mean"},
        {"pre_logits": True},
        {"classes": 0},
        {"classes": 0, "pre_logits": True},
        {"registers": 2, "pool": "mean", "final_norm": "pooled"},
    ],
)
def test_the_head_of_the_features_is_the_logits(colors, changes):
    model = network(**changes).train()
    images = load_data(str(colors))["test"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    found = features_of(model, images, Preprocessing(SIZE), MACHINE)
    assert (found.shape, found.dtype) == ((18, model.config.features), torch.float32)
    assert model.training
    pixels = [Preprocessing(SIZE).geometry(images.image(i, 3)) for i in range(len(images))]
    with torch.no_grad():
        whole = model.eval()(Preprocessing(SIZE).standardize(torch.stack(pixels)))
        mine = model.head(found) if model.config.classes else found
    assert torch.allclose(mine, whole, atol=1e-6)


@pytest.mark.parametrize("classes", [0, 3])
def test_a_distilled_network_uses_the_class_token(colors, classes):
    model = network(dist_token=True, classes=classes).eval()
    images = load_data(str(colors))["test"]
    found = features_of(model, images, Preprocessing(SIZE), MACHINE)
    pixels = torch.stack([Preprocessing(SIZE).geometry(images.image(i, 3)) for i in range(len(images))])
    with torch.no_grad():
        of_cls = model.pool(model.encode(Preprocessing(SIZE).standardize(pixels)))[:, 0]
    assert torch.allclose(found, of_cls, atol=1e-6)


# ---------------------------------------------------------------- computed once


def test_cached_features_are_the_same_and_not_computed_again(colors, tmp_path, computed):
    model, images, cache = network(), load_data(str(colors))["train"], FeatureCache(tmp_path / "kept")
    first = features_of(model, images, Preprocessing(SIZE), MACHINE, cache=cache)
    again = features_of(model, images, Preprocessing(SIZE), MACHINE, cache=cache)
    assert torch.equal(first, again)
    assert (computed, cache.hits) == ([36], 1)


def test_what_changes_the_key(colors, monkeypatch):
    images, scaling = load_data(str(colors))["train"], Preprocessing(SIZE)

    def key(model: ViT | None = None, split: Any = images, how: Preprocessing = scaling, on: Any = MACHINE) -> str:
        return feature_key(model or network(), split, how, on)

    own = key()
    assert key() == own
    other_head, other = network(classes=7, head_bias_init=-3.0, dropout=0.1), network()
    body = {k: v for k, v in other.state_dict().items() if not k.startswith("head")}
    other_head.load_state_dict(body, strict=False)
    torch.nn.init.normal_(other_head.head.weight)
    assert key(other_head) == own  # what reads the features changes nothing in them
    other.blocks[1].mlp.fc1.bias.data[3] += 1e-6
    relabeled = type(images)(images.names, 1 - images.labels, images.fetch)
    changed = [
        key(other),
        key(network(pool="mean")),
        key(network(activation="gelu-tanh")),
        key(how=Preprocessing(SIZE, mean=(0.4,) * 3)),
        key(split=images.select(range(35))),
        key(split=relabeled),
        key(on=choose("cpu", "bf16")),
    ]
    monkeypatch.setattr(features, "__version__", "9.9")
    assert len({own, *changed, key()}) == len(changed) + 2


def test_changed_images_are_detected(colors, tmp_path):
    def found(data: Path) -> bytes:
        return content(load_data(str(data))["train"])

    own = found(colors)
    assert found(colors) == own
    path = colors / "train/red/3.png"
    before = path.stat()
    Image.fromarray(noise(7, (10, 12))).save(path)
    written = found(colors)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert len({own, written, found(colors)}) == 3
    archive = tmp_path / "colors.zip"

    def pack() -> None:
        with zipfile.ZipFile(archive, "w") as file:
            for image in sorted(colors.rglob("*.png")):
                file.write(image, image.relative_to(colors))

    pack()
    packed = found(archive)
    path.write_bytes(path.read_bytes()[:-1] + b"?")  # one byte, the same size
    pack()
    assert found(archive) != packed


def test_arrays_in_memory_are_hashed_whole():
    digits = load_data("digits")["test"]
    own = content(digits)
    assert content(load_data("digits")["test"]) == own
    digits.fetch.array[-1, -1, -1] += 1  # type: ignore[attr-defined]
    assert content(digits) != own


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "other", "folder", "rows"])
def test_a_damaged_cache_is_computed_again(colors, tmp_path, computed, damage):
    model, images, cache = network(), load_data(str(colors))["test"], FeatureCache(tmp_path / "kept")
    whole = features_of(model, images, Preprocessing(SIZE), MACHINE, cache=cache)
    (path,) = cache.folder.iterdir()
    data = bytearray(path.read_bytes())
    if damage == "folder":
        path.unlink()
        path.mkdir()
    elif damage == "other":
        cache.write(path.stem, whole + 1)
        path.rename(tmp_path / "aside")
        cache.write("another", whole)
        cache.path("another").rename(path)
    elif damage == "rows":
        cache.write(path.stem, whole[:-1])
    else:
        data[-1] ^= 1
        path.write_bytes({"cut": bytes(data[:-5]), "bit": bytes(data), "empty": b""}[damage])
    assert torch.equal(features_of(model, images, Preprocessing(SIZE), MACHINE, cache=cache), whole)
    assert computed == [18, 18]
    if damage != "folder":
        assert torch.equal(read_tensors(path)[0]["features"], whole)


def test_a_cache_that_cannot_be_written_costs_nothing(colors, tmp_path):
    (tmp_path / "file").write_text("in the way")
    found = evaluate_features(predictor(), DataOptions(colors), knn=3, cache=tmp_path / "file/kept")
    assert any("cannot be cached" in note for note in found.notes)


def test_the_default_folder(home, monkeypatch):
    assert FeatureCache().folder == home
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert FeatureCache().folder == Path.home() / ".cache/vitral/features"


# ---------------------------------------------------------------- what they tell


def test_a_random_network_separates_colors(colors, home, computed):
    found = evaluate_features(predictor(pool="mean"), DataOptions(colors), few_shot=(1, 5, 25), knn=5)
    assert (found.split, found.images, found.support, found.classes) == ("test", 18, 36, ("blue", "green", "red"))
    one, five, many = found.few_shot
    assert five.mean > 0.8 > 0.5 > 1 / 3  # chance is a third
    assert (one.short, many.short) == (0, 3)
    assert found.knn is not None
    assert found.knn.accuracy > 0.8
    assert len(list(home.iterdir())) == 2
    again = evaluate_features(predictor(pool="mean"), DataOptions(colors), few_shot=(1, 5, 25), knn=5)
    assert [entry.accuracies for entry in again.few_shot] == [entry.accuracies for entry in found.few_shot]
    assert computed == [36, 18]


def test_without_test_images_some_are_cut(colors):
    found = evaluate_features(predictor(), DataOptions(colors / "train"), knn=1)
    assert found.split == "cut from train"
    assert (found.images, found.support) == (4, 32)
    assert "cut from train" in found.notes[0]


def test_split_and_requests_are_checked(colors):
    with pytest.raises(UsageError, match="cannot evaluate few-shot"):
        evaluate_features(predictor(), DataOptions(colors, split="train"), knn=1)
    with pytest.raises(DataError, match="no 'val' split"):
        evaluate_features(predictor(), DataOptions(colors, split="val"), knn=1)
    with pytest.raises(UsageError, match="nothing to measure"):
        evaluate_features(predictor(), DataOptions(colors))
    with pytest.raises(UsageError, match="unknown choice for bad images"):
        evaluate_features(predictor(), DataOptions(colors, bad_images="ignore"), knn=1)


def test_bad_images(colors, computed):
    (colors / "train/red/1.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="1 unreadable image") as caught:
        evaluate_features(predictor(), DataOptions(colors), knn=1)
    assert "train/red/1.png" in str(caught.value)
    for _ in range(2):
        assert evaluate_features(predictor(), DataOptions(colors, bad_images="skip"), knn=1).support == 35
    assert computed == [35, 18]


def test_the_command(trained, colors, tmp_path, capsys):
    words = ["evaluate", str(trained.folder), str(colors), "--few-shot", "1,5", "--knn", "3", "--device", "cpu"]
    assert main([*words, "--cache", str(tmp_path / "kept")]) == 0
    out = capsys.readouterr().out
    for part in ("test images of", "1-shot least squares", "5-shot", "3 nearest neighbors", "±"):
        assert part in out
    assert len(list((tmp_path / "kept").iterdir())) == 2
    assert main([*words, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [entry["shots"] for entry in found["few_shot"]] == [1, 5]
    assert len(found["few_shot"][0]["accuracies"]) == 3
    assert (found["knn"]["neighbors"], found["knn"]["images"], found["classes"]) == (3, 18, 3)
    assert not any("trained these features" in note for note in found["notes"])
    own = ["evaluate", str(trained.folder), "--knn", "1", "--format", "json"]  # the run's own data
    assert main(own) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["knn"]["accuracy"] == 1.0
    assert any("the run trained these features on all of these training images" in note for note in found["notes"])


@pytest.mark.parametrize(
    "words",
    [
        ["--few-shot", "one"],
        ["--few-shot", "0"],
        ["--few-shot", ""],
        ["--knn", "0"],
        ["--cache", "x"],
        ["--knn", "3", "--report", "page.html"],
    ],
)
def test_refusals_of_the_command(trained, colors, words, capsys):
    assert main(["evaluate", str(trained.folder), str(colors), *words]) == 2
    assert 1 <= len(capsys.readouterr().err.strip().splitlines()) <= 5


def test_with_all_images_the_seeds_agree(colors):
    """Few-shot on all images of the classes is one least-squares fit, in any order."""
    found = evaluate_features(predictor(), DataOptions(colors), few_shot=(12,))
    assert np.ptp(found.few_shot[0].accuracies) == 0
    assert found.few_shot[0].short == 0
