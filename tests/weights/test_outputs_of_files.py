"""Outputs of a file's network: their names, order and kind, stated or left open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import vitral
from images import MakeImages
from running import as_json, printed
from vitral.errors import DataError, UsageError, WeightsError
from vitral.weights.load import read
from vitral.workflows.evaluate import evaluate

transformers = pytest.importorskip("transformers")


def bare(folder: Path, classes: int) -> Path:
    """A file of timm's names without any config."""
    import timm

    torch.manual_seed(0)
    model = timm.models.VisionTransformer(
        img_size=8, patch_size=4, embed_dim=192, depth=1, num_heads=3, num_classes=classes
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    save_file(model.state_dict(), folder / "bare.safetensors")
    return folder / "bare.safetensors"


def labeled_by(predictor: vitral.Predictor, make_images: MakeImages, order: list[str]) -> Path:
    """A folder for each output, `order[i]` for output i, with the images that the network gives it."""
    photos = make_images({"all": 60})
    numbers = predictor.probabilities(sorted(photos.rglob("*.png"))).argmax(1)
    root = photos.with_name("sorted")
    for name in order:
        (root / name).mkdir(parents=True)
    for file, number in zip(sorted(photos.rglob("*.png")), numbers, strict=True):
        file.rename(root / order[number] / file.name)
    return root


NATURAL = [str(i) for i in range(12)]


@pytest.mark.parametrize("order", ["natural", "text"])
def test_numbers_are_matched_in_the_stated_order(order, make_images, tmp_path):
    weights = bare(tmp_path, 12)
    names = sorted(NATURAL) if order == "text" else NATURAL
    predictor = vitral.load(weights, class_order=order, precision="fp32")
    assert list(predictor.classes) == names
    data = labeled_by(predictor, make_images, names)
    assert evaluate(predictor, str(data)).accuracy == 1.0
    with pytest.warns(UserWarning, match="--class-order text"):
        assumed = vitral.load(weights, precision="fp32")
    assert (evaluate(assumed, str(data)).accuracy == 1.0) == (order == "natural")


def test_the_assumed_order_is_a_note_of_every_command(make_images, tmp_path, capsys):
    weights, photos = bare(tmp_path, 12), make_images(dict.fromkeys(NATURAL, 2))
    for words in (["predict", str(weights), str(photos / "0/0.png")], ["evaluate", str(weights), str(photos)]):
        _, err = printed(capsys, *words)
        assert err.count("--class-order text") == 1
        assert "class names assumed" in err
    _, err = printed(capsys, "explain", str(weights), str(photos / "0/0.png"), "--out", str(tmp_path / "why.png"))
    assert "class names assumed" in err
    found = as_json(capsys, "train", str(photos), "--init", str(weights), "--plan-only")
    assert "class names assumed" in json.dumps(found)


def test_names_of_a_file_and_refusals(make_images, tmp_path, capsys):
    weights = bare(tmp_path, 3)
    (tmp_path / "names.txt").write_text("zebra\ncat\n\ndog house\n")
    assert vitral.load(weights, class_order=str(tmp_path / "names.txt")).classes == ("zebra", "cat", "dog house")
    for text in ("zebra\ncat\n", "a\na\nb\n"):
        (tmp_path / "names.txt").write_text(text)
        with pytest.raises(UsageError, match="different names for 3 classes"):
            vitral.load(weights, class_order=str(tmp_path / "names.txt"))
    with pytest.raises(UsageError, match="cannot read the names of the classes"):
        vitral.load(weights, class_order="alphabetical")
    photos = make_images({"zebra": 1, "cat": 1, "dog": 1})
    _, err = printed(capsys, "evaluate", str(weights), str(photos), code=2)
    assert "--class-order natural" in err
    predictor = vitral.load(weights, class_order="text")
    with pytest.raises(DataError, match="the weights state no names"):
        evaluate(vitral.load(weights), str(photos))
    assert tuple(evaluate(predictor, str(photos)).classes) == ("cat", "dog", "zebra")
    assert predictor.classes == ("0", "1", "2"), "as it was given"


def test_own_weights_and_networks_in_memory_state_all(trained):
    for source in (trained.folder, vitral.load(trained.folder).model):
        with pytest.raises(UsageError, match="already contain the names of their classes"):
            read(source, class_order="text")
        with pytest.raises(UsageError, match="the file contains one network"):
            read(source, weights_key="teacher")


# ---------------------------------------------------------------- Hugging Face's folders


def folder_of(path: Path, names: list[str], **options: Any) -> Path:
    torch.manual_seed(1)
    labels = dict(enumerate(names))
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=16,
        patch_size=8,
        id2label=labels,
        label2id={name: i for i, name in labels.items()},
        **options,
    )
    model = transformers.ViTForImageClassification(config).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(path)
    transformers.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["beach", "dog", "sunset"], "multi_label_classification"),
        (["safe"], "multi_label_classification"),
        (["safe"], None),
        (["a", "b"], "single_label_classification"),
        (["a", "b"], None),
    ],
)
def test_probabilities_are_those_of_their_pipeline(names, problem, make_images, tmp_path):
    folder = folder_of(tmp_path / "hf", names, problem_type=problem)
    image = make_images({"a": 1}, size=(16, 16)) / "a/0.png"
    found = transformers.pipeline("image-classification", str(folder))(str(image))
    expected = {one["label"]: one["score"] for one in found}
    predictor = vitral.load(folder, precision="fp32", device="cpu")
    values = dict(zip(names, predictor.probabilities([image])[0].tolist(), strict=True))
    assert values == pytest.approx(expected, abs=1e-4)
    assert predictor.output.task == ("class" if len(names) == 2 else "labels")


def test_regression_gives_the_numbers_themselves(make_images, tmp_path):
    folder = folder_of(tmp_path / "hf", ["height", "width"], problem_type="regression")
    image = make_images({"a": 1}, size=(16, 16)) / "a/0.png"
    predictor = vitral.load(folder, precision="fp32", device="cpu")
    pixels = predictor.preprocessing.standardize(predictor.prepare(image)[None])
    with torch.no_grad():
        logits = predictor.model(pixels)[0].numpy()
    assert predictor.output.task == "numbers"
    np.testing.assert_allclose(predictor.probabilities([image])[0], logits, rtol=1e-5)


def test_an_unknown_problem_is_refused(tmp_path):
    folder = folder_of(tmp_path / "hf", ["a", "b"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "problem_type": "segmentation"}))
    with pytest.raises(WeightsError, match="unknown kind of output"):
        read(folder)


def test_every_command_takes_a_folder_of_hugging_face(make_images, tmp_path, capsys):
    folder = folder_of(tmp_path / "hf", ["dog", "cat"])
    photos = make_images({"train/dog": 3, "train/cat": 3, "val/dog": 2, "val/cat": 2}, size=(16, 16))
    image = str(photos / "val/dog/0.png")
    printed(capsys, "evaluate", str(folder), str(photos), "--split", "val")
    printed(capsys, "predict", str(folder), image)
    printed(capsys, "embed", str(folder), image, "--out", str(tmp_path / "features.npz"))
    printed(capsys, "explain", str(folder), image, "--out", str(tmp_path / "why.png"))
    printed(capsys, "inspect", str(folder), "--data", str(photos), "--images", "2", "--out", str(tmp_path / "inside"))
    printed(capsys, "summary", str(folder))
    plan = as_json(capsys, "train", str(photos), "--init", str(folder), "--plan-only")
    assert "the head already knows 2 of your 2 classes" in json.dumps(plan)


@pytest.mark.parametrize("classes", [0, 1])
def test_a_network_without_classes_is_refused_where_they_are_needed(classes, make_images, tmp_path, capsys):
    weights, photos = bare(tmp_path, classes), make_images({"a": 2, "b": 2})
    for words in (["predict", str(weights), str(photos / "a/0.png")], ["evaluate", str(weights), str(photos)]):
        _, err = printed(capsys, *words, code=2)
        assert ("ends in features" if classes == 0 else "has one output") in err
        assert "vitral train DATA --init" in err
    printed(capsys, "embed", str(weights), str(photos / "a/0.png"), "--out", str(tmp_path / "features.npz"))
