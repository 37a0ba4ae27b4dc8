"""`vitral train LINES --task text --init WEIGHTS`: encoders of classifiers and readers, decoders kept or new."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_resume import interrupt

import vitral
from running import call_at_batch, same_bits, weights_of
from textlines import OPTIONS, draw, write_lines
from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import Interrupted, UsageError
from vitral.model import ViT, ViTConfig
from vitral.weights import native
from vitral.workflows.planning.plan import plan_run
from vitral.workflows.running.build import initial_model

NETWORK = ("model", "dim", "depth", "heads", "mlp_dim")
FREE = {name: value for name, value in OPTIONS.items() if name not in (*NETWORK, "decoder_depth", "image_size")}


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    return write_lines(tmp_path_factory.mktemp("data") / "lines")


@pytest.fixture(scope="module")
def reader(lines, tmp_path_factory):
    return vitral.train(lines, out=tmp_path_factory.mktemp("runs") / "reader", quiet=True, **OPTIONS).folder


@pytest.fixture
def other_lines(tmp_path):
    """Lines with a character that `lines` have not."""
    folder = tmp_path / "others"
    (folder / "train").mkdir(parents=True)
    for number, text in enumerate(("ab", "bc", "c", "ca") * 4):
        draw(text.replace("c", "b")).save(folder / "train" / f"{number}.png")
        (folder / "train" / f"{number}.txt").write_text(text)
    return folder


def planned(data, init, **options):
    given = {**FREE, "data": str(data), "init": str(init), **options}
    return plan_run({name: value for name, value in given.items() if value is not None})


def written(path, **changes) -> str:
    """A classifier's weights file, with random weights."""
    config = ViTConfig(image_size=8, patch_size=4, channels=1, classes=3, dim=16, depth=2, heads=2, mlp_dim=32)
    config = dataclasses.replace(config, **changes)
    torch.manual_seed(0)
    state = {name: torch.randn_like(one) for name, one in ViT(config).state_dict().items()}
    prepared = Preprocessing(image_size=(8, 8), channels=1, resize="crop", mean=(0.3,), std=(0.2,))
    native.save(path, native.Weights(config, state, prepared, ("x", "y", "z"), {}))
    return str(path)


@pytest.mark.parametrize(
    "changes", [{}, {"pool": "mean", "final_norm": "pooled"}, {"pool": "map"}, {"pre_logits": True}], ids=str
)
def test_the_encoder_has_the_weights_of_a_classifier(changes, lines, tmp_path):
    file = written(tmp_path / "vit.safetensors", **changes)
    job = planned(lines, file)
    state = vitral.load(file, precision="fp32", device="cpu").model.state_dict()
    own = initial_model(job).encoder.state_dict()
    assert {name for name in own if not name.startswith(("pos_embed", "norm."))} == {
        name for name in state if not name.startswith(("pos_embed", "head", "norm.", "fc_norm.", "attn_pool", "pre_"))
    }
    for name, one in own.items():
        if name == "pos_embed":
            assert one.shape == (1, 1 + 8 * 24, 16)
        else:
            source = name.replace("norm.", "fc_norm.") if "final_norm" in changes and name.startswith("norm.") else name
            assert torch.equal(one, state[source]), name


def test_lines_keep_their_shape_and_colors_are_those_of_the_weights(lines, tmp_path):
    job = planned(lines, written(tmp_path / "vit.safetensors"))
    run = job.run
    assert run.size == (32, 96)  # as without initial weights: a line of 8 × 24
    assert (run.resize, run.crop_fraction, run.mean, run.std, run.channels) == ("letterbox", 1.0, (0.3,), (0.2,), 1)
    assert job.config.encoder.dim == 16
    assert job.config.decoder.depth == 2
    assert planned(lines, written(tmp_path / "vit.safetensors"), image_size=(8, 24)).run.size == (8, 24)


def test_a_name_with_three_channels_is_an_encoder(lines):
    job = planned(lines, "demo", decoder_depth=1)
    demo = vitral.load("demo", precision="fp32", device="cpu").model
    model = initial_model(job)
    assert job.run.channels == 3
    assert torch.equal(model.encoder.blocks[0].mlp.fc1.weight, demo.blocks[0].mlp.fc1.weight)
    assert len(model.decoder.blocks) == 1


def test_a_reader_of_the_same_characters_reads_on(lines, reader):
    job = planned(lines, reader, image_size=(8, 24))
    before = vitral.load(reader, precision="fp32", device="cpu").model
    images = torch.rand(2, 1, 8, 24, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted, found = (
            before(images, torch.tensor([[1, 3, 4]] * 2)),
            initial_model(job).eval()(images, torch.tensor([[1, 3, 4]] * 2)),
        )
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert (job.run.decoder_dim, job.run.decoder_depth) == (16, 1)
    assert job.run.lr == OPTIONS["lr"]
    assert planned(lines, reader, lr=None).run.lr == pytest.approx(3e-4)
    assert not job.init.account.fresh


@pytest.mark.parametrize("why", ["characters", "depth"])
def test_another_decoder_is_new_and_the_plan_says_why(why, lines, other_lines, reader):
    job = planned(other_lines, reader) if why == "characters" else planned(lines, reader, decoder_depth=3)
    model, state = initial_model(job), vitral.load(reader, precision="fp32", device="cpu").model.state_dict()
    assert torch.equal(model.encoder.blocks[0].attn.qkv.weight, state["encoder.blocks.0.attn.qkv.weight"])
    assert not torch.equal(model.decoder.blocks[0].attn.qkv.weight, state["decoder.blocks.0.attn.qkv.weight"])
    (reported,) = [choice.reason for choice in job.plan.choices if choice.name == "weights"]
    expected = "other characters" if why == "characters" else "another decoder depth is requested"
    assert f"the decoder is new: {expected}" in reported.replace("the data have ", "")
    assert len(model.decoder.blocks) == (2 if why == "characters" else 3)


@pytest.mark.parametrize("options", [{}, {"decoder_depth": 2}], ids=["kept", "new"])
def test_stopped_and_resumed_with_initial_weights_is_the_same_to_the_bit(options, lines, reader, tmp_path, monkeypatch):
    given = {**FREE, "init": str(reader), "image_size": (8, 24), "epochs": 2, **options}
    whole = vitral.train(lines, out=tmp_path / "whole", quiet=True, **given)
    call_at_batch(monkeypatch, 4, interrupt)
    with pytest.raises(Interrupted):
        vitral.train(lines, out=tmp_path / "cut", quiet=True, **given)
    monkeypatch.undo()
    again = vitral.train(out=tmp_path / "cut", resume=True, quiet=True)
    assert same_bits(weights_of(whole.folder), weights_of(again.folder))


@pytest.mark.slow
def test_networks_without_tokens_are_refused(lines, tmp_path):
    model = vitral.create("BiT-R50x1", classes=2, image_size=32)
    prepared = Preprocessing(image_size=(32, 32))
    weights = native.Weights(model.config, model.state_dict(), prepared, ("x", "y"), {})
    native.save(tmp_path / "bit.safetensors", weights)
    with pytest.raises(UsageError, match="cannot read text"):
        planned(lines, tmp_path / "bit.safetensors")
    with pytest.raises(UsageError, match="contradicts --init"):
        planned(lines, "demo", dim=32)
