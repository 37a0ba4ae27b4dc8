"""Token merging matches a reference that replaces merged tokens by equal copies."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import reference
import torch
from tiny import MERGED, VARIANTS, moderate, random_images
from torch import nn

from running import mostly_slow
from vitral.errors import UsageError
from vitral.inference import int8
from vitral.inference import packed as packing
from vitral.inference.int8 import observe, quantized
from vitral.inference.packed import packed
from vitral.inference.tome import destinations, merged, tokens_left, weighted_mean
from vitral.inference.tta import averaged
from vitral.model import BiT, BiTConfig, ViTConfig

# A head as wide as two of the tiny ones and more patches, so that there is something to merge twice.
LARGER = {name: dataclasses.replace(c, image_size=tuple(2 * n for n in c.image)) for name, c in MERGED.items()}


def match(keys: np.ndarray, prefix: int, count: int) -> list[tuple[int, int]]:
    """Pairs (from, to) of tokens (N, d) to merge, by loops, as the paper describes them."""
    places = range(prefix, len(keys))
    best = []
    for i in (place for place in places if place % 2 == 0):
        others = [place for place in places if place % 2 == 1]
        cosines = [keys[i] @ keys[j] / np.linalg.norm(keys[i]) / np.linalg.norm(keys[j]) for j in others]
        best.append((-max(cosines), i, others[int(np.argmax(cosines))]))
    return [(i, j) for _, i, j in sorted(best)[:count]]


def logits(s: reference.State, c: ViTConfig, image: np.ndarray, count: int) -> np.ndarray:
    """Logits of one image (C, H, W). A token of three patches is three equal tokens here, which attention and pooling
    count three times.
    """
    x = reference.tokens(s, c, reference.patches(s, c, image))
    x = reference.norm(s, "norm_pre", x, c) if c.norm_pre else x
    groups = [[i] for i in range(len(x))]
    centers = [((2 * r + 1) / c.grid[0] - 1, (2 * k + 1) / c.grid[1] - 1) for r, k in np.ndindex(*c.grid)]
    places = np.array([(0.0, 0.0)] * c.prefix + centers)
    everything = np.ones(len(x), bool)
    for number in range(c.depth):
        part = {k.removeprefix(f"blocks.{number}."): v for k, v in s.items() if k.startswith(f"blocks.{number}.")}
        x, keys = attended(part, c, x, places)
        fewer = min(count, (len(groups) - c.prefix) // 2)
        pairs = match(np.array([keys[group[0]] for group in groups]), c.prefix, fewer)
        for i, j in pairs:
            groups[j] = groups[j] + groups[i]
        gone = {i for i, _ in pairs}
        later = range(c.prefix, len(groups))
        kept = [i for i in later if i % 2 == 0 and i not in gone], [i for i in later if i % 2 == 1]
        groups = groups[: c.prefix] + [groups[i] for half in kept for i in half]
        for group in groups:
            x[group], places[group] = x[group].mean(0), places[group].mean(0)
        x = processed(part, c, x)
    return answer(s, c, reference.pooled(s, c, x, everything))


def attended(s: reference.State, c: ViTConfig, x: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Equation 2, and the keys averaged over heads."""
    width, entering = c.dim // c.heads, reference.norm(s, "norm1", x, c) if c.norm == "pre" else x
    out, seen = [], []
    parts = np.split(reference.dense(s, "attn.qkv", entering), 3, axis=1)
    for head in range(c.heads):
        q, k, v = (part[:, head * width : (head + 1) * width] for part in parts)
        if c.qk_norm:
            q, k = reference.norm(s, "attn.q_norm", q, c), reference.norm(s, "attn.k_norm", k, c)
        if c.position == "rotary":
            q, k = turned(q, places), turned(k, places)
        scale = math.sqrt(width if c.attention_scale == "head" else c.dim)
        out.append(reference.weights(q @ k.T / scale, np.ones(len(x), bool)) @ v)
        seen.append(k)
    gamma = s["ls1.gamma"] if c.layer_scale is not None else 1.0
    mixed = np.concatenate(out, axis=1)
    mixed = reference.norm(s, "attn.norm", mixed, c) if c.attn_norm else mixed
    added = reference.dense(s, "attn.proj", mixed)
    x = x + gamma * (reference.norm(s, "norm1", added, c) if c.norm == "res-post" else added)
    return x if c.norm != "post" else reference.norm(s, "norm1", x, c), np.mean(seen, axis=0)


def processed(s: reference.State, c: ViTConfig, x: np.ndarray) -> np.ndarray:
    """Equation 3."""
    gamma = s["ls2.gamma"] if c.layer_scale is not None else 1.0
    if c.norm == "pre":
        return x + gamma * reference.mlp(s, "mlp", c, reference.norm(s, "norm2", x, c))
    if c.norm == "res-post":
        return x + gamma * reference.norm(s, "norm2", reference.mlp(s, "mlp", c, x), c)
    return reference.norm(s, "norm2", x + gamma * reference.mlp(s, "mlp", c, x), c)


def turned(x: np.ndarray, places: np.ndarray) -> np.ndarray:
    half = x.shape[1] // 2
    z = x[:, :half] + 1j * x[:, half:]
    speeds = 2 * math.pi / 100 ** (np.arange(half // 2) / (half // 2))
    z = z * np.exp(1j * np.concatenate([places[:, :1] * speeds, places[:, 1:] * speeds], axis=1))
    return np.concatenate([z.real, z.imag], axis=1)


def answer(s: reference.State, c: ViTConfig, x: np.ndarray) -> np.ndarray:
    if c.dist_token:
        return (reference.dense(s, "head", x[0]) + reference.dense(s, "head_dist", x[1])) / 2
    x = np.tanh(reference.dense(s, "pre_logits", x)) if c.pre_logits else x
    x = reference.dense(s, "head", x) if c.classes else x
    return np.tanh(x) * c.logit_scale if c.logits_tanh else x


@pytest.mark.parametrize("count", [2, 100])
@pytest.mark.parametrize("name", mostly_slow(LARGER, 3))
def test_logits_are_those_of_a_network_of_equal_copies(name, count):
    config = LARGER[name]
    model, images = moderate(config), random_images(config)
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    with torch.inference_mode():
        found, plain = merged(model, count)(images), model(images)
    wanted = np.stack([logits(state, config, image, count) for image in images.numpy()])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    assert not torch.allclose(found, plain, rtol=1e-4), "nothing was merged"


@pytest.mark.parametrize("name", mostly_slow(MERGED, 3))
def test_merging_nothing_is_the_network_to_the_last_bit(name):
    config = VARIANTS[name]
    model, images = moderate(config).float(), random_images(config).float()
    with torch.inference_mode():
        assert torch.equal(merged(model, 0)(images), model(images))


def test_a_token_that_stands_for_equal_ones_changes_nothing():
    """Equal patches without positions: merging does not change the logits."""
    config = LARGER["none"]
    model, images = moderate(config), random_images(config)
    images = images[:, :, :4, :4].repeat(1, 1, config.grid[0], config.grid[1])
    with torch.inference_mode():
        torch.testing.assert_close(merged(model, 9)(images), model(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["mean-no-cls", "paper", "distilled", "distilled-with-registers", "cls-mean"])
def test_numbers_and_sizes_of_tokens(name):
    config = LARGER[name]
    model, images = moderate(config).float(), random_images(config).float()
    model.prune_last_block = False
    patches = config.grid[0] * config.grid[1]
    for count in (1, 5, 1000):
        with torch.inference_mode():
            tokens, sizes = merged(model, count).transform(*model.embed(images))
        assert tokens.shape[1] == sizes.shape[1] == tokens_left(config, count, config.depth)
        assert tokens.shape[1] == config.prefix + max(patches - 2 * count, -(-patches // 4))
        assert torch.equal(sizes[:, : config.prefix], torch.ones(2, config.prefix))
        assert torch.equal(sizes.sum(1), torch.full((2,), float(config.prefix + patches)))


@pytest.mark.parametrize("prefix", [0, 1, 2, 3])
@pytest.mark.parametrize("tokens", [8, 9])
def test_pairs_are_the_nearest_and_places_are_filled(prefix, tokens):
    keys = torch.randn(3, prefix + tokens, 4, generator=torch.Generator().manual_seed(0))
    for count in range(tokens // 2 + 1):
        where = destinations(keys, prefix, count)
        for one, image in zip(where.tolist(), keys.numpy(), strict=True):
            assert one[:prefix] == list(range(prefix))
            assert set(one) == set(range(prefix + tokens - count))
            shared = [(i, j) for i in range(len(one)) for j in range(len(one)) if i != j and one[i] == one[j]]
            assert {(i, j) for i, j in shared if i % 2 == 0 and j % 2 == 1} == set(match(image, prefix, count))


def test_the_mean_is_weighted_and_keeps_its_type():
    x, sizes = torch.tensor([[[1.0], [4.0], [7.0]]]), torch.tensor([[1.0, 2.0, 1.0]])
    where = torch.tensor([[0, 0, 1]])
    assert weighted_mean(x, sizes, where, 2).tolist() == [[[3.0], [7.0]]]
    assert weighted_mean(x.bfloat16(), sizes, where, 2).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["paper", "post-norm", "mean", "map-with-prefix", "rotary", "layer-scale", "swiglu"])
def test_packed_and_integer_networks_merge_too(name):
    config = LARGER[name]
    model, images = moderate(config).float(), random_images(config).float()
    with torch.inference_mode():
        wanted = merged(model, 2)(images)
        if not int8.unavailable_reason():
            twin = quantized(model, observe(model, [images]))
            assert _far(merged(twin, 2)(images), wanted) < _far(twin(images), model(images)) + 0.3
            assert torch.equal(merged(twin, 0)(images), twin(images))
        if packing.self_test(torch.bfloat16):
            half = model.bfloat16()
            plain = merged(half, 2)(images.bfloat16())
            twin = packed(half)
            assert _far(merged(twin, 2)(images.bfloat16()), wanted) < 2 * _far(plain, wanted) + 0.3
            assert torch.equal(merged(twin, 0)(images.bfloat16()), twin(images.bfloat16()))


def _far(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).abs().max() / wanted.abs().max())


def test_the_network_stays_as_it_is():
    config = LARGER["paper"]
    model, images = moderate(config).float(), random_images(config).float()
    before = {name: (type(part), set(vars(part)), set(part._modules)) for name, part in model.named_modules()}
    with torch.inference_mode():
        wanted = model(images)
        twin = merged(model, 3)
        first = twin(images)
        assert torch.equal(model(images), wanted)
        assert torch.equal(twin(images), first)
    assert {name: (type(part), set(vars(part)), set(part._modules)) for name, part in model.named_modules()} == before


@pytest.mark.parametrize("training", [True, False])
def test_parts_stay_in_the_mode_that_they_were_in(training):
    """Wrappers share modules: in training mode, the norms of a stem would update."""
    model = moderate(LARGER["conv-stem"]).train(training)
    for module in averaged(merged(model, 2), "mirror").modules():
        assert module.training is training or isinstance(module, nn.ModuleList), type(module)


def test_refusals():
    with pytest.raises(UsageError, match="only a ViT has tokens"):
        merged(BiT(BiTConfig(image_size=32, classes=5, layers=(2, 1))), 2)
    with pytest.raises(UsageError, match="only a ViT has tokens"):
        merged(nn.Linear(2, 2), 2)
    with pytest.raises(UsageError, match="-1 tokens"):
        merged(moderate(VARIANTS["paper"]), -1)


def test_rotary_positions_of_whole_numbers_are_refused():
    with pytest.raises(UsageError, match="cannot be merged"):
        merged(moderate(VARIANTS["axial"]), 2)
