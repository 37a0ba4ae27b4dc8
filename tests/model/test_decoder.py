"""The decoder, compared with torch's and with the definition of its masks."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn

from vitral.errors import UsageError
from vitral.inference.predictor import Predictor
from vitral.model import DecoderConfig, EncoderDecoder, EncoderDecoderConfig, ViTConfig, summarize, with_image_size
from vitral.model.decoder import Decoder, causal_mask
from vitral.model.registry import config_from_json, config_to_json, network
from vitral.model.variants import name_of

SHAPE = DecoderConfig(vocabulary=11, length=9, dim=16, depth=2, heads=2, mlp_dim=24)
VARIANTS = {
    "pre": {},
    "post": {"norm": "post", "final_norm": False, "activation": "relu"},
    "another memory": {"memory_dim": 12},
    "sinusoidal": {"position": "sinusoidal", "first_position": 2, "scale_embedding": True},
    "tied": {"tied_head": True, "head_bias": False, "norm_embedding": True},
}
variants = pytest.mark.parametrize("name", VARIANTS)


def decoder(name: str = "pre", **changes: object) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(dataclasses.replace(SHAPE, **{**VARIANTS[name], **changes})).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    return model


def inputs(model: Decoder, length: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    width = model.config.memory_dim or model.config.dim
    memory = torch.randn(3, 5, width, generator=generator, dtype=torch.float64)
    tokens = torch.randint(model.config.vocabulary, (3, length), generator=generator)
    return tokens, memory, torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [1, 0, 0, 0, 0]]).bool()


def of_torch(model: Decoder) -> nn.TransformerDecoder:
    """torch's decoder with the same weights."""
    config = model.config
    layer = nn.TransformerDecoderLayer(
        config.dim,
        config.heads,
        config.mlp_dim,
        0.0,
        config.activation,
        batch_first=True,
        norm_first=config.norm == "pre",
    )
    norm = nn.LayerNorm(config.dim, eps=config.norm_eps) if config.final_norm else None
    theirs = nn.TransformerDecoder(layer, config.depth, norm).double().eval()
    state = {}
    for name, value in model.state_dict().items():
        for ours, other in (
            ("blocks.", "layers."),
            ("attn.qkv.", "self_attn.in_proj_"),
            ("attn.proj.", "self_attn.out_proj."),
            ("cross.proj.", "multihead_attn.out_proj."),
            ("mlp.fc1", "linear1"),
            ("mlp.fc2", "linear2"),
        ):
            name = name.replace(ours, other)
        if "cross.q." in name:
            kv = model.state_dict()[name.replace("layers.", "blocks.").replace("cross.q.", "cross.kv.")]
            name, value = name.replace("cross.q.", "multihead_attn.in_proj_"), torch.cat([value, kv])
        state[name] = value
    theirs.load_state_dict({name: state[name] for name in theirs.state_dict()})
    return theirs


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["pre", "post"])
def test_blocks_equal_torch_transformer_decoder(name, masked):
    model = decoder(name)
    tokens, memory, mask = inputs(model)
    x = model.embed(tokens)
    wanted = of_torch(model)(x, memory, tgt_mask=~causal_mask(7, 7), memory_key_padding_mask=~mask if masked else None)
    torch.testing.assert_close(model(tokens, memory, mask if masked else None), model.head(wanted))


@variants
def test_cached_decoding_equals_whole_texts(name):
    model = decoder(name)
    tokens, memory, mask = inputs(model)
    whole, cache = model(tokens, memory, mask), model.begin(memory, mask)
    pieces = [model.step(part, cache) for part in tokens.split([1, 3, 1, 2], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole)
    assert cache.length == 7
    rows = torch.tensor([2, 0, 0])
    more, again = tokens[rows, :2], model.begin(memory, mask)
    model.step(tokens, again)
    wanted = model(torch.cat([tokens[rows], more], dim=1), memory[rows], mask[rows])[:, 7:]
    torch.testing.assert_close(model.step(more, again.select(rows)), wanted)


@variants
def test_no_token_sees_a_later_one(name):
    model = decoder(name)
    tokens, memory, _ = inputs(model)
    changed = tokens.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % model.config.vocabulary
    before, after = model(tokens, memory), model(changed, memory)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not before[:, 4].isclose(after[:, 4]).all(dim=-1).any()


def test_masked_attention_of_write_up_002():
    """Scores of the current and earlier tokens stay, those of later tokens become minus infinity before softmax."""
    attention = decoder().blocks[0].attn
    x = torch.randn(2, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    q, k, v = attention.qkv(x).view(2, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)
    look_ahead = torch.full((6, 6), -math.inf, dtype=torch.float64).triu(1)
    seen = ((q @ k.mT) / math.sqrt(8) + look_ahead).softmax(-1) @ v
    torch.testing.assert_close(attention(x)[0], attention.proj(seen.transpose(1, 2).flatten(2)))


def test_the_whole_decoder_of_write_up_002():
    """Its steps (14) to (16), without any mask: each word attends to a list that ends with itself."""
    model = decoder("post")
    tokens, memory, _ = inputs(model)
    weights, config = model.state_dict(), model.config

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.unflatten(-1, (config.heads, -1)).transpose(1, 2) for one in (q, k, v))
        scores = q @ k.mT / math.sqrt(config.dim // config.heads)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def add_and_normalize(x: torch.Tensor, branch: torch.Tensor, name: str) -> torch.Tensor:
        centered = (x + branch) - (x + branch).mean(-1, keepdim=True)
        scaled = centered / (centered.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    x = weights["token_embed.weight"][tokens] + weights["pos_embed"][:, :7]
    for block in (f"blocks.{i}" for i in range(config.depth)):
        q, k, v = linear(x, f"{block}.attn.qkv").chunk(3, -1)
        so_far = [attend(q[:, n : n + 1], k[:, : n + 1], v[:, : n + 1]) for n in range(7)]
        x = add_and_normalize(x, linear(torch.cat(so_far, dim=1), f"{block}.attn.proj"), f"{block}.norm1")
        keys_values = linear(memory, f"{block}.cross.kv").chunk(2, -1)
        image = attend(linear(x, f"{block}.cross.q"), *keys_values)
        x = add_and_normalize(x, linear(image, f"{block}.cross.proj"), f"{block}.norm2")
        hidden = linear(x, f"{block}.mlp.fc1").clamp(min=0)
        x = add_and_normalize(x, linear(hidden, f"{block}.mlp.fc2"), f"{block}.norm3")
    torch.testing.assert_close(model(tokens, memory).softmax(-1), linear(x, "head").softmax(-1), rtol=0, atol=1e-6)


@variants
def test_every_parameter_is_used(name):
    model = decoder(name)
    tokens, memory, _ = inputs(model, 9)
    model(tokens, memory).square().sum().backward()
    unused = [key for key, parameter in model.named_parameters() if parameter.grad is None]
    assert not unused


def test_a_network_for_text_is_made_of_its_configuration():
    encoder = ViTConfig(image_size=8, patch_size=4, dim=12, depth=1, heads=2, mlp_dim=16, classes=0)
    config = EncoderDecoderConfig(encoder, dataclasses.replace(SHAPE, memory_dim=12))
    assert config_from_json(config_to_json(config)) == config
    model = network(config).double().eval()
    assert isinstance(model, EncoderDecoder)
    images, tokens = torch.randn(2, 3, 8, 8, dtype=torch.float64), torch.tensor([[1, 5], [1, 7]])
    memory = model.encoder.norm(model.encoder.encode(images))
    torch.testing.assert_close(model(images, tokens), model.decoder(tokens, memory))
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1]]).bool()
    padded = images.clone()
    padded[0, :, 4:, :4] = 9.0
    torch.testing.assert_close(model(padded, tokens, mask), model(images, tokens, mask))
    projected = dataclasses.replace(config, decoder=SHAPE, project=True)
    assert network(projected)(images.float(), tokens).shape == (2, 2, 11)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dim": 15}, "divisible"),
        ({"position": "sinusoidal", "dim": 3, "heads": 1}, "even width"),
        ({"first_position": 1}, "sinusoidal"),
        ({"tied_head": True}, "no bias"),
        ({"end_token": 11}, "vocabulary"),
        ({"dropout": 1.0}, "probability"),
        ({"norm": "none"}, "nearest|known"),
        ({"depth": 0}, "positive"),
        ({"memory_dim": 0}, "no width"),
    ],
)
def test_impossible_configurations_are_refused(changes, words):
    with pytest.raises(UsageError, match=words):
        dataclasses.replace(SHAPE, **changes)


def test_parts_that_do_not_fit_are_refused():
    encoder = ViTConfig(image_size=8, patch_size=4, dim=12, depth=1, heads=2, mlp_dim=16, classes=0)
    with pytest.raises(UsageError, match="do not fit"):
        EncoderDecoderConfig(encoder, SHAPE)
    with pytest.raises(UsageError, match="no head"):
        EncoderDecoderConfig(dataclasses.replace(encoder, classes=3), dataclasses.replace(SHAPE, memory_dim=12))
    model = decoder()
    with pytest.raises(UsageError, match="too long"):
        model(torch.zeros(1, 10, dtype=torch.long), inputs(model)[1][:1])


def test_a_network_for_text_is_summarized_with_its_longest_text():
    encoder = ViTConfig(image_size=8, patch_size=4, dim=12, depth=1, heads=2, mlp_dim=16, classes=0)
    config = EncoderDecoderConfig(encoder, dataclasses.replace(SHAPE, memory_dim=12))
    summary = summarize(config, 16)
    assert summary.input_shape == (1, 3, 16, 16)
    shapes = {layer.name: layer.output_shape for layer in summary.layers}
    assert shapes["decoder.head"] == (1, 9, 11)
    assert summary.parameters == sum(p.numel() for p in network(with_image_size(config, 16)).parameters())
    assert name_of(config) == "ViT of 1 blocks, width 12, patch 4 + decoder of 2 blocks, width 16"
    predictor = Predictor(network(config))
    (text,) = predictor([np.zeros((8, 8, 3), np.uint8)])
    assert text.text == " ".join(one for one, _ in text.characters)
    for changed in ({"tta": "mirror"}, {"engine": "packed"}):
        with pytest.raises(UsageError, match="computed by its module"):
            Predictor(network(config), **changed)
