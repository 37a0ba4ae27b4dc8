"""TrOCR's weights: what a configuration states is honored or refused."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from cases_trocr import BASE, SMALL, built
from safetensors.torch import load_file, save_file

from vitral.errors import UsageError, WeightsError
from vitral.inference.generation import Search, generate
from vitral.weights import native
from vitral.weights.convert import convert
from vitral.weights.formats.huggingface_config import EVERY
from vitral.weights.formats.huggingface_text import FIELDS
from vitral.weights.load import read


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("trocr")
    built().save_pretrained(path)
    return path


def changed(folder, tmp_path, name="config.json", **changes):
    """A copy whose configuration has other fields; `decoder.NAME` is one of the decoder's."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / name).read_text())
    for key, value in changes.items():
        part, _, field = key.rpartition("__")
        (config[part] if part else config)[field] = value
    (tmp_path / name).write_text(json.dumps(config))
    return tmp_path


def test_every_field_of_the_decoder_has_its_use():
    fields = set(transformers.TrOCRConfig().to_dict()) - {"model_type", "hidden_size", "output_attentions"}
    assert fields - set(EVERY) - {"_name_or_path"} <= set(FIELDS)


@pytest.mark.parametrize("options", [{}, BASE, SMALL], ids=["learned", "base", "small"])
def test_a_converted_file_computes_the_same(options, tmp_path):
    built(**options).save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "own", to="native")
    theirs, ours = read(tmp_path / "theirs"), read(tmp_path / "own")
    images, text = torch.randn(1, 3, 16, 16), torch.tensor([[2, 3]])
    with torch.no_grad():
        assert torch.equal(theirs.build()(images, text), ours.build()(images, text))
    with pytest.raises(WeightsError, match="of --task text"):
        convert(tmp_path / "own", tmp_path / "again", to="hf")
    with pytest.raises(UsageError, match="used as it was trained"):
        read(tmp_path / "own", image_size=32)


def test_special_tokens_are_those_of_generation(folder, tmp_path):
    assert (read(folder).weights.config.decoder.start_token, read(folder).weights.config.decoder.end_token) == (2, 2)
    path = changed(folder, tmp_path, "generation_config.json", decoder_start_token_id=5, eos_token_id=[6], num_beams=4)
    loaded = read(path)
    assert (loaded.weights.config.decoder.start_token, loaded.weights.config.decoder.end_token) == (5, 6)
    assert any("num_beams" in note for note in loaded.account.notes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decoder__model_type": "bert"}, "decoder.model_type"),
        ({"encoder__model_type": "swin"}, "encoder.model_type"),
        ({"model_type": "vit"}, "vision-encoder-decoder"),
        ({"decoder__activation_function": "mish"}, "activation_function"),
        ({"decoder__pruned_heads": {"0": [1]}}, "pruned_heads"),
        ({"encoder__is_decoder": True}, "is_decoder"),
        ({"decoder__eos_token_id": [2, 3]}, "eos_token_id"),
        ({"decoder__vocab_size": 5}, "whole network"),
        ({"decoder__decoder_attention_heads": 5}, "impossible decoder"),
        ({"decoder__max_position_embeddings": 10}, "whole network"),
        ({"decoder__tie_word_embeddings": False}, "decoder.head.weight is missing"),
        ({"decoder__layernorm_embedding": False}, "unexpected"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_is_not_carried_is_refused_by_name(changes, words, folder, tmp_path):
    path = changed(folder, tmp_path, **changes)
    if "eos" in words:
        (path / "generation_config.json").unlink()
    with pytest.raises(WeightsError, match=words):
        read(path)


def test_without_its_configuration_it_is_refused(folder, tmp_path):
    file = tmp_path / "weights.safetensors"
    file.write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(WeightsError, match=r"no config\.json"):
        read(file)


def test_a_tied_head_may_be_in_the_file_if_it_is_the_same(folder, tmp_path):
    path = changed(folder, tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["decoder.output_projection.weight"] = tensors["decoder.model.decoder.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors")
    images, text = torch.randn(1, 3, 16, 16), torch.tensor([[2, 3]])
    with torch.no_grad():
        both = [native.build(read(one).weights)(images, text) for one in (path, folder)]
    torch.testing.assert_close(*both)
    tensors["decoder.output_projection.weight"] += 1
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(WeightsError, match="other values than the tokens"):
        read(path)


def learned(config, images):
    """A network that has trained a little on random texts, so that the generated ones differ."""
    torch.manual_seed(0)
    model = transformers.VisionEncoderDecoderModel(config=config)
    texts = torch.randint(3, 17, (8, 8), generator=torch.Generator().manual_seed(0))
    for row, length in zip(texts, (2, 3, 4, 5, 6, 7, 3, 8), strict=True):
        row[length - 1 :] = torch.tensor([2] + [-100] * (8 - length))
    model.config.pad_token_id, model.config.decoder_start_token_id = 1, 2
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        model(pixel_values=images, labels=texts).loss.backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize("options", [{}, BASE, {"encoder": "DeiT", **SMALL}], ids=["learned", "base", "small"])
def test_generated_text_is_that_of_transformers(options, tmp_path):
    images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    model = learned(built(**options).config, images)
    model.save_pretrained(tmp_path)
    ours = read(tmp_path).build()
    for beams, penalty in ((1, 1.0), (4, 1.0), (3, 0.3)):
        settings = {"num_beams": beams, "length_penalty": penalty, "early_stopping": "never"} if beams > 1 else {}
        with torch.no_grad():
            theirs = model.generate(images, max_new_tokens=10, do_sample=False, **settings)
            texts = generate(ours.decoder, ours.encode(images), Search(beams, penalty, longest=10))
        for text, row in zip(texts, theirs[:, 1:].tolist(), strict=True):
            wanted = row[: row.index(2)] if 2 in row else row
            assert list(text.tokens) == wanted
        assert len({text.tokens for text in texts}) >= 4
        assert any(text.ended for text in texts)
