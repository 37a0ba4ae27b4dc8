"""Networks that read text as ONNX: an encoder and a decoder step, run by a program of numpy and ONNX Runtime alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

import vitral
from textlines import draw, write_reader
from vitral.cli.main import main
from vitral.errors import ExportError, UsageError
from vitral.export import export_model, onnx_text
from vitral.model import DecoderConfig, EncoderDecoder, EncoderDecoderConfig, ViTConfig

EXACT = {"device": "cpu", "precision": "fp32"}
LINES = ("a", "b", "ab", "ba", "aab", "bbb", "")
TROCR = {
    "position": "sinusoidal",
    "first_position": 2,
    "scale_embedding": True,
    "norm_embedding": True,
    "norm": "post",
    "final_norm": False,
    "tied_head": True,
    "head_bias": False,
    "start_token": 2,
    "end_token": 2,
    "pad_token": 1,
}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return str(write_reader(tmp_path_factory.mktemp("weights") / "reader.safetensors"))


@pytest.fixture(scope="module")
def exported(file, tmp_path_factory):
    return export_model(file, "onnx", out=tmp_path_factory.mktemp("export") / "onnx")


def read_without_vitral(folder: Path, images: np.ndarray) -> list[tuple[str, float]]:
    """Texts and confidences of standardized images, with what the files state about themselves."""
    about = json.loads((folder / "preprocessing.json").read_text("utf-8"))
    encoder, step = (onnxruntime.InferenceSession(folder / f"{name}.onnx") for name in ("encoder", "decoder_step"))
    of, cache = about["output"]["generation"], about["output"]["generation"]["cache"]
    keys, values = encoder.run(None, {"images": images})
    none = np.zeros((cache["blocks"], len(images), cache["heads"], 0, cache["head_dim"]), np.float32)
    past, tokens = {"past_keys": none, "past_values": none}, np.full((len(images), 1), of["start"])
    chosen, logs = [], []
    for _ in range(of["length"]):
        logits, *new = step.run(None, {**past, "tokens": tokens, "keys": keys, "values": values})
        past = dict(zip(past, new, strict=True))
        tokens = logits.argmax(1)[:, None]
        chosen.append(tokens[:, 0])
        logs.append(torch.tensor(logits).log_softmax(1).max(1).values.numpy())
    found = []
    for row, own in zip(np.stack(chosen, 1).tolist(), np.stack(logs, 1), strict=True):
        end = row.index(of["end"]) if of["end"] in row else len(row)
        text = about["output"]["between"].join(about["classes"][token] for token in row[:end])
        found.append((text, float(np.exp(own[: end + 1].sum()))))
    return found


@pytest.mark.slow
def test_the_two_graphs_read_the_same_texts(file, exported):
    assert {path.name for path in exported.folder.iterdir()} == {
        "encoder.onnx",
        "decoder_step.onnx",
        "preprocessing.json",
        "export.json",
    }
    assert exported.record["files"] == ["decoder_step.onnx", "encoder.onnx", "preprocessing.json"]
    reader = vitral.load(file, **EXACT)
    images = [np.asarray(draw(line)) for line in LINES]
    prepared = reader.preprocessing.standardize(torch.stack([reader.prepare(image) for image in images]))
    texts = [(text.text, pytest.approx(text.confidence, rel=1e-4)) for text in reader(images)]
    assert read_without_vitral(exported.folder, prepared.numpy()) == texts
    assert len({text for text, _ in texts}) > 2


@pytest.mark.slow
def test_the_proof_compares_texts_and_probabilities(exported):
    proof = exported.proof
    assert proof.images >= 64
    assert proof.agreement == 1
    assert 0 < proof.difference < 1e-5
    assert not proof.failure


@pytest.mark.slow
def test_the_files_state_characters_and_axes(file, exported):
    onnx = pytest.importorskip("onnx")
    for name in ("encoder.onnx", "decoder_step.onnx"):
        model = onnx.load(str(exported.folder / name))
        stated = {
            one.key: json.loads(one.value)
            for one in model.metadata_props
            if one.key != "vitral.version" and one.key != "vitral.weights"
        }
        assert stated["vitral.classes"] == list(vitral.load(file, **EXACT).classes)
        assert stated["vitral.text"]["end"] == 2
    axes = {
        value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in (*model.graph.input, *model.graph.output)
    }
    assert axes["past_keys"] == [2, "batch", 2, "past", 8]
    assert axes["next_past_values"] == [2, "batch", 2, "past + 1", 8]


@pytest.mark.slow
@pytest.mark.parametrize("project", [False, True])
def test_decoders_of_the_kind_of_trocr_are_exported(project, tmp_path):
    torch.manual_seed(0)
    encoder = ViTConfig(image_size=(8, 24), patch_size=4, channels=1, classes=0, dim=16, depth=1, heads=2, mlp_dim=32)
    decoder = DecoderConfig(
        vocabulary=9, length=5, dim=24, depth=1, heads=2, mlp_dim=32, memory_dim=24 if project else 16, **TROCR
    )
    model = EncoderDecoder(EncoderDecoderConfig(encoder, decoder, project))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
    done = export_model(vitral.load(model, **EXACT), "onnx", out=tmp_path / "there")
    assert done.proof.agreement == 1
    assert done.record["proof"]["difference"] <= 1e-4


@pytest.mark.slow
def test_a_step_that_forgets_its_cache_fails_the_proof(file, tmp_path, monkeypatch):
    def forgetful(self, past_keys, past_values, tokens, keys, values):
        return whole(self, past_keys, 0.5 * past_values, tokens, keys, values)

    whole = onnx_text.Step.forward
    monkeypatch.setattr(onnx_text.Step, "forward", forgetful)
    with pytest.raises(ExportError, match="does not match its network"):
        export_model(file, "onnx", out=tmp_path / "there")
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--to", "torch"], "torch.export does not support networks that read text"),
        (["--to", "openvino"], "OpenVINO IR does not support networks that read text"),
        (["--to", "web"], "does not support networks that read text"),
        (["--to", "onnx", "--precision", "fp16"], "fp16 does not support networks that read text"),
        (["--to", "onnx", "--precision", "int8"], "int8 does not support networks that read text"),
        (["--to", "onnx", "--with-preprocessing"], "preprocessing in the graph does not support"),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, list) else "",
)
def test_other_targets_and_options_are_refused_by_name(words, expected, file, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["export", file, *words]) == 2
    err = capsys.readouterr().err
    assert expected in err
    assert "--to onnx" in err
    assert list(tmp_path.iterdir()) == []


def test_beams_and_texts_of_one_character_are_refused(file, tmp_path):
    with pytest.raises(UsageError, match="reads by beam search"):
        export_model(vitral.load(file, beams=2, **EXACT), "onnx", out=tmp_path / "there")
    encoder = ViTConfig(image_size=8, patch_size=4, channels=1, classes=0, dim=16, depth=1, heads=2, mlp_dim=32)
    decoder = DecoderConfig(vocabulary=5, length=2, dim=16, depth=1, heads=2, mlp_dim=32, memory_dim=16)
    model = EncoderDecoder(EncoderDecoderConfig(encoder, decoder))
    with pytest.raises(UsageError, match="texts of one character"):
        export_model(vitral.load(model, **EXACT), "onnx", out=tmp_path / "there")
