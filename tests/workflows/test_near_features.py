"""Near-duplicates by features: copies are found, strangers are not, and the share that is found is measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from images import MakeImages, noise, scene
from running import as_json, printed
from vitral.data.images.preprocessing import Preprocessing
from vitral.model import BiTConfig, network
from vitral.weights import native
from vitral.workflows.checks import near as near_features
from vitral.workflows.checks.near import CHANGES, least_similarity, most_similar, similar_pairs, whitening


def test_the_limit_is_that_of_one_stranger_in_a_thousand() -> None:
    strangers = np.tanh(np.random.default_rng(0).normal(0.6, 0.1, 100_000))
    limit = least_similarity(strangers)
    assert 0.0005 < (strangers > limit).mean() < 0.002
    copies = np.full(20_000, 0.99)  # near-duplicates among a sixth of the images
    assert limit - 0.01 < least_similarity(np.concatenate([strangers, copies])) < limit + 0.06


def test_whitened_features_vary_equally_in_all_directions() -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(0, [100, 1, 0.1], (2000, 3)) + 50
    rows = whitening(features)(features)
    assert np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
    assert np.allclose(rows.T @ rows / 2000, np.eye(3) / 3, atol=0.03)
    assert np.isfinite(whitening(np.ones((5, 4)))(np.ones((5, 4)))).all()


def test_all_pairs_above_the_limit_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(40, 16))
    vectors[[7, 33]] = vectors[[3, 3]] + rng.normal(0, 0.1, (2, 16))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    cosines = vectors @ vectors.T
    wanted = {(i, j) for i in range(40) for j in range(i + 1, 40) if cosines[i, j] >= 0.4}
    found = similar_pairs(*most_similar(vectors), 0.4)
    assert {(one, other) for one, other, _ in found} == wanted >= {(3, 7), (3, 33), (7, 33)}
    assert [value for *_, value in found] == sorted((value for *_, value in found), reverse=True)
    monkeypatch.setattr(near_features, "_BLOCK", 7)
    assert [pair[:2] for pair in similar_pairs(*most_similar(vectors), 0.4)] == [pair[:2] for pair in found]
    monkeypatch.setattr(near_features, "_PARTNERS", 1)
    assert len(similar_pairs(*most_similar(vectors), -1.0)) < 40


def photograph(seed: int) -> Image.Image:
    """Draw a scene with a light and a contrast of its own, as photographs have."""
    light = Image.fromarray(noise(seed, (2, 2))).resize((24, 24), Image.Resampling.BICUBIC)
    return Image.blend(light, scene(seed, (24, 24)), 0.2 + seed % 7 / 10)


@pytest.fixture
def mirrored(tmp_path: Path) -> str:
    """A folder with 60 images in two classes, too small for the hash, and mirrored copies of six in another split."""
    root = tmp_path / "photos"
    for number in range(60):
        path = root / "train" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        photograph(number).save(path)
        if number % 10 == 0:
            copy = root / "test" / "ab"[number % 2] / f"{number}.png"
            copy.parent.mkdir(parents=True, exist_ok=True)
            CHANGES["mirrored"](photograph(number)).save(copy)
    return str(root)


def test_copies_are_found_that_the_hash_does_not_look_for(
    mirrored: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert as_json(capsys, "data", "check", mirrored)["near_duplicates"] == []
    sheet = tmp_path / "near.png"
    found = as_json(capsys, "data", "check", mirrored, "--near", "--sheet", str(sheet))
    names = [{Path(pair[side]["name"]).name for side in ("first", "second")} for pair in found["near_duplicates"]]
    right = [one for one in names if len(one) == 1]  # the same file name in two splits
    assert len(right) >= 3
    assert len(names) - len(right) <= 1
    assert all(pair["similarity"] >= found["near_by_features"]["least"] for pair in found["near_duplicates"])
    assert found["near_by_features"]["recall"].keys() == CHANGES.keys()
    assert found["near_by_features"]["recall"]["mirrored"] > 0.2
    assert sheet.is_file()
    out, err = printed(capsys, "data", "check", mirrored, "--near")
    assert "near-duplicates between splits" in " ".join(out.split())
    assert "of changed copies they find: cropped to 75%" in err


@pytest.mark.slow
def test_a_network_without_patches_compares_the_input_of_its_head(
    mirrored: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = BiTConfig(image_size=32, layers=(1, 1), classes=5)
    torch.manual_seed(0)
    weights = native.Weights(config, network(config).state_dict(), Preprocessing((32, 32)), tuple("abcde"), {})
    native.save(tmp_path / "bit.safetensors", weights)
    found = as_json(capsys, "data", "check", mirrored, "--near", "--init", str(tmp_path / "bit.safetensors"))
    assert found["near_by_features"]["weights"].endswith("bit.safetensors")


def test_what_cannot_be_compared_is_refused(
    mirrored: str, make_images: MakeImages, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "two checks" in printed(capsys, "data", "check", mirrored, "--near", "--labels", code=2)[1]
    few = make_images({"a": 1, "b": 1}, name="few")
    assert "three or more" in printed(capsys, "data", "check", str(few), "--near", code=2)[1]
    Image.new("RGB", (9, 9)).save(few / "a" / "more.png")
    (few / "a" / "broken.png").write_text("no image")
    assert "1 are unreadable" in printed(capsys, "data", "check", str(few), "--near", code=2)[1]
