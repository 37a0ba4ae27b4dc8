"""Texts explained character by character: cross-attention computed apart, files, JSON, and refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from textlines import draw, write_reader
from vitral.cli.main import main
from vitral.errors import UsageError
from vitral.explanation.texts import explain_texts


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    file = write_reader(tmp_path_factory.mktemp("weights") / "reader.safetensors")
    return vitral.load(file, precision="fp32", device="cpu")


@pytest.fixture
def image(tmp_path):
    draw("bbb").save(tmp_path / "bbb.png")
    return str(tmp_path / "bbb.png")


@torch.no_grad()
def attention_by_hand(reader, image: str, tokens: list[int]) -> torch.Tensor:
    """Attention (blocks, heads, T, rows, columns) from each token's place to the patches, from the weights alone."""
    model = reader.model
    memory = model.encode(reader.preprocessing.standardize(reader.prepare(image)[None]))
    x = model.decoder.embed(torch.tensor([[1, *tokens[:-1]]]))
    maps = []
    for block in model.decoder.blocks:
        x = x + block.attn(block.norm1(x))[0]
        heads, width = block.cross.heads, block.cross.head_dim
        q = block.cross.q(block.norm2(x)).unflatten(2, (heads, width)).transpose(1, 2)
        k = block.cross.kv(memory).unflatten(2, (2, heads, width))[:, :, 0].transpose(1, 2)
        maps.append((q @ k.transpose(2, 3) / width**0.5).softmax(-1)[0])
        x = x + block.cross(block.norm2(x), memory)[0]
        x = x + block.mlp(block.norm3(x))
    return torch.stack(maps)[..., model.config.encoder.prefix :].unflatten(-1, model.config.encoder.grid)


def test_a_map_is_the_attention_from_which_its_character_was_chosen(reader, image):
    text, maps = reader(image), vitral.explain(reader, image)
    assert "".join(one.label for one in maps) == text.text
    assert len(maps) >= 2
    wanted = attention_by_hand(reader, image, [one.target for one in maps])
    for place, (one, (character, probability)) in enumerate(zip(maps, text.characters, strict=True)):
        assert (one.label, one.method) == (character, "cross-attention")
        assert one.probability == pytest.approx(probability, rel=1e-4)
        np.testing.assert_allclose(one.values, wanted.mean((0, 1))[place], atol=1e-6)
    last = vitral.explain(reader, image, layer=-1)
    np.testing.assert_allclose(last[1].values, wanted[-1].mean(0)[1], atol=1e-6)
    assert not np.allclose(last[1].values, maps[1].values, atol=1e-4)
    assert all(block.cross.observer is None for block in reader.model.decoder.blocks)


def test_a_batch_is_explained_as_each_image_alone(reader, tmp_path):
    for text in ("a", "bab", "ba"):
        draw(text).save(tmp_path / f"{text}.png")
    together = explain_texts(reader, [str(tmp_path / f"{text}.png") for text in ("a", "bab", "ba")], batch_size=2)
    for one in together:
        (alone,) = explain_texts(reader, one.text.name)
        assert one.text.text == alone.text.text
        for a, b in zip(one.maps, alone.maps, strict=True):
            np.testing.assert_allclose(a.values, b.values, atol=1e-6)


def test_an_image_without_a_character_has_no_map(reader, image):
    blind = vitral.load(reader.source, precision="fp32", device="cpu")
    with torch.no_grad():
        blind.model.decoder.head.bias[2] = 1e4  # the end comes first
    assert blind(image).text == ""
    assert vitral.explain(blind, image) == []


def test_the_command_draws_a_panel_for_each_character(reader, image, tmp_path, capsys):
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no image")
    words = ["explain", reader.source, image, str(bad), "--device", "cpu", "--out", str(tmp_path / "out")]
    assert main([*words, "--format", "json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    (one,) = answer["explanations"]
    text = reader(image)
    assert (one["text"], one["method"]) == (text.text, "cross-attention")
    assert one["confidence"] == pytest.approx(text.confidence, rel=1e-4)
    assert "".join(part["character"] for part in one["characters"]) == text.text
    assert np.shape(one["characters"][0]["values"]) == reader.model.config.encoder.grid
    assert [failure["image"] for failure in answer["errors"]] == [str(bad)]
    with Image.open(one["file"]) as drawn:
        assert drawn.width > 300
    vitral.explain(reader, image)[0].save(tmp_path / "one.png")
    assert main([*words[:3], "--device", "cpu", "--out", str(tmp_path / "why.svg")]) == 0
    out, err = capsys.readouterr()
    assert text.text in out
    assert "not why this character was read" in err
    svg = (tmp_path / "why.svg").read_text("utf-8")
    assert svg.count("<image") == 1 + len(text.text)
    assert main([*words[:3], "--device", "cpu", "--out", str(tmp_path / "why.json")]) == 0
    saved = json.loads((tmp_path / "why.json").read_text("utf-8"))
    assert saved["characters"] == one["characters"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--method", "rollout"], "'rollout' does not explain texts"),
        (["--method", "fullgrad+"], "--method cross-attention"),
        (["--method", "cross"], "--method cross-attention"),
        (["--target", "a"], "a target is not defined for texts"),
        (["--compare"], "a comparison is not defined for texts"),
        (["--check"], "a check is not defined for texts"),
        (["--layer", "2"], "there is no layer 2"),
        (["--layer", "-3"], "there is no layer -3"),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, list) else "",
)
def test_what_makes_no_sense_for_texts_is_refused(words, expected, reader, image, capsys):
    assert main(["explain", reader.source, image, "--device", "cpu", *words]) == 2
    assert expected in capsys.readouterr().err


def test_cross_attention_is_refused_for_networks_of_classes_and_modules(reader, image):
    with pytest.raises(UsageError, match="'cross-attention' cannot explain this network"):
        vitral.explain(vitral.load("demo"), image, method="cross-attention")
    with pytest.raises(UsageError, match="explained by a predictor"):
        vitral.explain(reader.model, torch.zeros(1, 1, 8, 24))
