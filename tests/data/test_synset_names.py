"""A flat folder of ImageNet's images, with the class in their names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from vitral.data import load


def image(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(path)


def test_classes_are_the_synsets_in_file_names(tmp_path: Path):
    for name in ("n01440764_tench.JPEG", "n01440764_18.JPEG", "n02084071_dog.JPEG"):
        image(tmp_path / "samples" / name)
    found = load(tmp_path)
    assert found.classes == ("n01440764", "n02084071")
    assert list(found["train"].labels) == [0, 0, 1]
    assert any("WordNet" in note for note in found.notes)


def test_class_folders_and_other_names_are_read_as_before(tmp_path: Path):
    for path in ("a/n01440764/n01440764_1.JPEG", "a/n02084071/n02084071_2.JPEG"):
        image(tmp_path / path)
    assert not any("WordNet" in note for note in load(tmp_path / "a").notes)
    for path in ("b/cat/n01440764_1.JPEG", "b/dog/2.JPEG"):
        image(tmp_path / path)
    assert load(tmp_path / "b").classes == ("cat", "dog")


def test_real_photographs_by_their_names(shared_data: Path):
    found = load(shared_data / "imagenet-samples.tar")
    assert len(found.classes) == len(found["train"]) == 100
