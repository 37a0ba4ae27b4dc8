"""Public reports about other libraries, replayed as their authors would meet them here.

Each docstring begins with the thread that the case was made after; docs/log/people.md has the table.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import nn

import vitral
from running import recorded, train
from vitral.data import load
from vitral.errors import DataError, Interrupted
from vitral.training.callbacks import Callback


def colored(
    folder: Path, counts: dict[str, int], colors: dict[str, tuple[int, int, int]], suffix: str = ".png"
) -> Path:
    """Write images of one color a class, with little noise."""
    rng = np.random.default_rng(0)
    for name, count in counts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            color = np.array(colors[name.rpartition("/")[2]])
            pixels = (color + rng.integers(-20, 20, (8, 8, 3))).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}{suffix}", quality=95)
    return folder


RED_BLUE = {"red": (200, 40, 40), "blue": (40, 40, 200)}


def test_suffixes_in_capitals_are_images(tmp_path):
    """open-edge-platform/anomalib#3058."""
    for number, suffix in enumerate((".JPG", ".Jpeg", ".PNG", ".jpg")):
        colored(tmp_path / "photos", {"red": 1, "blue": 1}, RED_BLUE, f"-{number}{suffix}")
    assert len(load(tmp_path / "photos")["train"]) == 8


def test_copies_of_a_notebook_server_are_no_images(tmp_path):
    """huggingface/datasets#4115."""
    photos = colored(tmp_path / "photos", {"red": 3, "blue": 3}, RED_BLUE)
    for place in (photos, photos / "red"):
        shutil.copytree(photos / "blue", place / ".ipynb_checkpoints")
    found = load(photos)
    assert (found.classes, len(found["train"])) == (("blue", "red"), 6)


def test_files_of_a_file_manager_are_no_classes(tmp_path):
    """pytorch/vision#109."""
    photos = colored(tmp_path / "photos", {"train/red": 3, "train/blue": 3, "val/red": 1, "val/blue": 1}, RED_BLUE)
    for place in (photos, photos / "train", photos / "train/red"):
        (place / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
        (place / "Thumbs.db").write_bytes(b"\xd0\xcf\x11\xe0")
    (photos / "train/red/._0.png").write_bytes(b"\0\5\x16\7")
    (photos / "__MACOSX/train/red").mkdir(parents=True)
    (photos / "__MACOSX/train/red/._0.png").write_bytes(b"\0\5\x16\7")
    found = load(photos)
    assert found.classes == ("blue", "red")
    assert {name: len(split) for name, split in found.splits.items()} == {"train": 6, "val": 2}


def test_an_empty_folder_of_val_moves_no_class(tmp_path):
    """huggingface/pytorch-image-models#957, pytorch/vision#4925. Numbers that each split gives by itself move: accuracy
    falls to that of chance.
    """
    colors = {"a": (200, 40, 40), "b": (40, 200, 40), "c": (40, 40, 200)}
    photos = colored(tmp_path / "photos", {**{f"train/{name}": 8 for name in colors}, "val/b": 4, "val/c": 4}, colors)
    (photos / "val/a").mkdir()
    run = train(photos, tmp_path / "run", epochs=12)
    assert run.result["val_accuracy"] == 1


def test_one_channel_of_published_weights_is_the_network_on_gray():
    """huggingface/pytorch-image-models#976."""
    color = vitral.create("mu/4", image_size=16, channels=3, classes=4, dim=16, depth=2, heads=2, mlp_dim=32).eval()
    for parameter in color.parameters():
        nn.init.normal_(parameter, std=0.2)
    gray = np.random.default_rng(0).integers(0, 256, (16, 16), dtype=np.uint8)
    one, three = (vitral.load(color, channels=channels, precision="fp32") for channels in (1, 3))
    assert one.model.config.channels == 1
    assert np.allclose(one(gray).probabilities, three(gray).probabilities, atol=1e-5)
    assert np.allclose(three(gray).probabilities, three(np.stack([gray] * 3, -1)).probabilities, atol=1e-6)


def test_the_learning_rate_goes_on_where_it_stopped(tmp_path):
    """Lightning-AI/pytorch-lightning#1772, lightly-ai/lightly-train#301."""
    photos = colored(tmp_path / "photos", {"red": 8, "blue": 8}, RED_BLUE)

    class Stop(Callback):
        def on_epoch_end(self, line: Any, best: bool) -> None:
            if line["epoch"] == 2:
                raise KeyboardInterrupt

    options = {"epochs": 5, "warmup": 2.0}
    train(photos, tmp_path / "whole", **options)
    with pytest.raises(Interrupted):
        train(photos, tmp_path / "run", callbacks=[Stop()], **options)
    vitral.train(out=str(tmp_path / "run"), resume=True, quiet=True)
    rates = [[line["lr"] for line in recorded(tmp_path / name)] for name in ("whole", "run")]
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 3


@pytest.mark.parametrize("method", ["rollout", "attention", "grad-cam", "legrad"])
def test_maps_are_of_patches_without_registers(method):
    """facebookresearch/dinov2#90."""
    network = vitral.create(
        "mu/4",
        image_size=(24, 40),
        channels=3,
        classes=3,
        dim=16,
        depth=2,
        heads=2,
        mlp_dim=32,
        registers=4,
        pool="cls",
        cls_token=True,
    )
    (found,) = vitral.explain(network, torch.randn(3, 24, 40), 0, method=method)
    assert found.values.shape == (6, 10)


def test_maps_of_oblong_images_lie_where_the_evidence_is(tmp_path):
    """lucidrains/vit-pytorch#219, saccharomycetes/mllms_know#15. A white patch at the right tells the class: there is
    the largest value of the map.
    """
    rng = np.random.default_rng(0)
    for label in ("with", "without"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(24):
            pixels = rng.integers(0, 120, (8, 32, 3)).astype(np.uint8)
            if label == "with":
                pixels[4:8, 24:28] = 255
            Image.fromarray(pixels).save(tmp_path / "photos" / label / f"{number}.png")
    run = train(tmp_path / "photos", tmp_path / "run", image_size=(8, 32), epochs=15, dim=16, mlp_dim=32)
    assert run.result["val_accuracy"] == 1
    (found,) = vitral.explain(run.predictor, tmp_path / "photos/with/0.png", "with", method="occlusion")
    assert found.values.shape == (2, 8)
    assert np.unravel_index(found.values.argmax(), found.values.shape) == (1, 6)


def test_a_saved_network_keeps_its_head(tmp_path):
    """google-research/vision_transformer#91."""
    photos = colored(tmp_path / "photos", {"red": 12, "blue": 12}, RED_BLUE)
    others = colored(tmp_path / "others", {"red": 9, "blue": 3}, RED_BLUE)
    run = train(photos, tmp_path / "run", epochs=10)
    assert vitral.evaluate(run.folder, str(others), split="all").accuracy == 1
    again = train(photos, tmp_path / "again", epochs=1, init=str(run.folder), lr=0.0)
    assert vitral.evaluate(again.folder, str(others), split="all").accuracy == 1


def test_weights_of_another_image_size_are_fitted(tmp_path):
    """YuchenLiu98/ECCV2022-SDA-FAS#1. `size mismatch for pos_embed`."""
    network = vitral.create("mu/4", image_size=32, channels=3, classes=4, dim=16, depth=2, heads=2, mlp_dim=32)
    found = vitral.load(network, image_size=24)
    assert found.model.config.image == (24, 24)
    assert math.isclose(found(np.zeros((24, 24, 3), np.uint8)).probabilities.sum(), 1, rel_tol=1e-5)


def test_a_last_batch_of_one_trains(tmp_path):
    """fastai/fastai#1352. `Expected more than 1 value per channel`: 9 images in batches of 4, a stem with norms."""
    photos = colored(tmp_path / "photos", {"train/red": 5, "train/blue": 4, "val/red": 1, "val/blue": 0}, RED_BLUE)
    run = vitral.train(
        str(photos),
        out=str(tmp_path / "run"),
        quiet=True,
        model="C+Femto/4",
        epochs=2,
        batch_size=4,
        precision="fp32",
        device="cpu",
    )
    assert all(math.isfinite(line["train_loss"]) for line in recorded(run.folder))


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_tables_as_spreadsheets_write_them(separator, encoding, tmp_path):
    """p2irc/deepplantphenomics#41, solivr/tf-crnn#18."""
    colored(tmp_path, {"red": 2, "blue": 2}, RED_BLUE)
    rows = [("file", "label"), *((f"{name}/{i}.png", name) for name in RED_BLUE for i in range(2))]
    table = tmp_path / "labels.csv"
    table.write_text("\r\n".join(separator.join(row) for row in rows), encoding)
    found = load(table)
    assert (found.classes, len(found["train"])) == (("blue", "red"), 4)


def test_a_truncated_image_is_named_before_training(tmp_path):
    """pytorch/pytorch#7238, pytorch/vision#138."""
    photos = colored(tmp_path / "photos", {"red": 6, "blue": 6}, RED_BLUE, ".jpg")
    bad = photos / "red/3.jpg"
    bad.write_bytes(bad.read_bytes()[:-80])
    with pytest.raises(DataError, match=r"red/3\.jpg"):
        train(photos, tmp_path / "run")
    run = train(photos, tmp_path / "run", bad_images="skip")
    assert "red/3.jpg" in (run.folder / "config.json").read_text() + json.dumps(run.result)


def test_mean_and_deviation_are_those_of_the_folder(tmp_path):
    """microsoft/Olive#1781."""
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=4,
        num_labels=3,
    )
    torch.manual_seed(0)
    network = transformers.ViTForImageClassification(config).eval()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    network.save_pretrained(tmp_path / "hf")
    mean, std = [0.1, 0.5, 0.9], [0.7, 0.2, 0.4]
    prepare = transformers.ViTImageProcessor(size={"height": 16, "width": 16}, image_mean=mean, image_std=std)
    prepare.save_pretrained(tmp_path / "hf")
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    with torch.no_grad():
        inputs = prepare(images=Image.fromarray(image), return_tensors="pt")
        wanted = network(**inputs).logits.softmax(1)[0].numpy()
    found = vitral.load(tmp_path / "hf", precision="fp32")(image)
    assert np.allclose(found.probabilities, wanted, atol=1e-5)
