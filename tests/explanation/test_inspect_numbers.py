"""Measures of Figure 7, compared with closed forms, with numpy and with a computation that stores all matrices."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
import torch
from tiny import VARIANTS, network, random_images

from vitral.errors import UsageError
from vitral.explanation.capture import INPUT, POOL, capture
from vitral.explanation.inspect.attention_distance import local_attention, patch_distances, uniform_attention
from vitral.explanation.inspect.cka import gram, hsic
from vitral.explanation.inspect.filters import patch_filters
from vitral.explanation.inspect.head_maps import head_maps
from vitral.explanation.inspect.measure import _fitting, attention_distance, cka, measure, token_norms
from vitral.explanation.inspect.positions import position_similarity
from vitral.model import BiT, BiTConfig, ViT, ViTConfig

KINDS = (
    "paper",
    "oblong",
    "gray",
    "post-norm",
    "mean-no-cls",
    "mean-pooled-norm",
    "mean-all",
    "map",
    "map-with-prefix",
    "registers",
    "distilled-with-registers",
    "cls-mean",
    "cls-without-position",
    "none",
    "rotary",
    "hybrid",
    "root",
    "qk-norm",
    "scale-by-width",
    "regularized",
    "swiglu",
    "mnist-7562",
)
OBLONG = ViTConfig(image_size=(12, 40), patch_size=(4, 8), dim=16, depth=2, heads=2, mlp_dim=16, classes=3, registers=1)


def centers(config: ViTConfig) -> np.ndarray:
    rows, columns = config.grid
    return np.array([(r * config.patch[0], c * config.patch[1]) for r in range(rows) for c in range(columns)], float)


def dense(model: ViT, images: torch.Tensor, renormalize: bool) -> tuple[np.ndarray, np.ndarray]:
    """Distance and entropy (L, heads) by the definition, from whole matrices."""
    with torch.no_grad(), capture(model) as seen:
        model(images)
    far = np.linalg.norm(centers(model.config)[:, None] - centers(model.config)[None], axis=-1)
    distance, entropy = [], []
    for layer in seen.layers:
        a = seen.attention(layer).double().numpy()[:, :, seen.prefix :]
        keys = a
        a = a[..., seen.prefix :]
        if renormalize:
            a = keys = a / a.sum(-1, keepdims=True)
        distance.append((a * far).sum(-1).mean((0, 2)))
        entropy.append(-(keys * np.log(np.maximum(keys, 1e-300))).sum(-1).mean((0, 2)))
    return np.array(distance), np.array(entropy)


# ---------------------------------------------------------------- patch filters


@pytest.mark.parametrize("name", ["paper", "oblong", "gray", "map"])
def test_components_are_those_of_numpy(name):
    model = network(VARIANTS[name])
    found = patch_filters(model, 6)
    kernels = model.patch_embed.proj.weight.detach().numpy()
    flat = kernels.reshape(len(kernels), -1)
    _, sizes, rows = np.linalg.svd(flat - flat.mean(0), full_matrices=False)
    mine = found.components.reshape(6, -1)
    np.testing.assert_allclose(np.abs((mine * rows[:6]).sum(1)), 1, atol=1e-5)  # equal but for the sign
    np.testing.assert_allclose(found.explained, sizes[:6] ** 2 / (sizes**2).sum(), rtol=1e-6)
    assert (mine[np.arange(6), np.abs(mine).argmax(1)] > 0).all()
    assert found.components.shape == (6, *kernels.shape[1:])
    np.testing.assert_allclose(found.kernels, kernels, rtol=1e-6)


def test_signs_do_not_depend_on_the_kernels_order_and_there_are_as_many_components_as_there_can_be():
    model = network(VARIANTS["paper"])
    first = patch_filters(model)
    assert first.components.shape == (16, 3, 4, 4)  # 28 asked for, 16 kernels
    assert first.explained.sum() == pytest.approx(1)
    with torch.no_grad():
        model.patch_embed.proj.weight.copy_(model.patch_embed.proj.weight.flip(0))
    np.testing.assert_allclose(patch_filters(model, 5).components, first.components[:5], atol=1e-4)


def test_filters_of_hybrids_and_of_odd_channels_say_what_they_are():
    model = network(VARIANTS["hybrid"])
    found = patch_filters(model)
    assert found.components.shape == (28, 3, 7, 7)
    assert "root convolution" in found.source
    np.testing.assert_allclose(found.kernels.mean((1, 2, 3)), 0, atol=1e-6)  # as they are used: standardized
    assert "first three" in patch_filters(network(ViTConfig(**SMALL, channels=5))).notes[0]
    assert "two channels" in patch_filters(network(ViTConfig(**SMALL, channels=2))).notes[0]
    constant = ViT(ViTConfig(**SMALL))
    torch.nn.init.zeros_(constant.patch_embed.proj.weight)
    assert patch_filters(constant).components.shape == (0, 3, 4, 4)
    with pytest.raises(UsageError, match="0 components"):
        patch_filters(model, 0)


SMALL = {"image_size": 8, "patch_size": 4, "dim": 8, "depth": 1, "heads": 1, "mlp_dim": 8}


# ---------------------------------------------------------------- positions


@pytest.mark.parametrize("name", ["paper", "oblong", "registers", "distilled-with-registers", "cls-without-position"])
def test_similarity_of_learned_positions_is_the_cosine(name):
    model = network(VARIANTS[name])
    config = model.config
    rows, columns = config.grid
    table = model.pos_embed.detach().numpy()[0, -rows * columns :].reshape(rows, columns, -1)
    found = position_similarity(model)
    assert found.values is not None
    assert found.values.shape == (rows, columns, rows, columns)
    for r, c, i, j in ((0, 0, 1, 1), (1, 2, 0, 1), (1, 1, 1, 1)):
        a, b = table[r, c], table[i, j]
        assert found.values[r, c, i, j] == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), abs=1e-6)


def test_similarity_of_computed_positions():
    config = ViTConfig(image_size=(12, 20), patch_size=4, dim=16, depth=1, heads=2, mlp_dim=8, position="sincos")
    model = network(config)
    table = model.position.table(config.grid, 16).double().numpy()
    table /= np.linalg.norm(table, axis=1, keepdims=True)
    values = position_similarity(model).values
    np.testing.assert_allclose(values.reshape(15, 15), table @ table.T, atol=1e-6)

    rotary = network(VARIANTS["rotary"])
    values = position_similarity(rotary).values.reshape(9, 9)
    width = rotary.config.dim // rotary.config.heads
    rotation = rotary.position.rotation(rotary.config.grid, width, 0)
    from vitral.model.position import rotate

    same = rotate(torch.ones(1, 1, 9, width), rotation)[0, 0].numpy()
    np.testing.assert_allclose(values, same @ same.T / width, atol=1e-6)  # a query with equal keys everywhere
    np.testing.assert_allclose(np.diagonal(values), 1, atol=1e-6)


def test_a_network_without_positions_has_no_similarity_and_says_why():
    found = position_similarity(network(VARIANTS["none"]))
    assert found.values is None
    assert "bag of patches" in found.measure


def test_only_some_positions_of_a_large_grid():
    model = network(VARIANTS["paper"])
    every, some = position_similarity(model).values, position_similarity(model, most=2)
    assert (some.at_rows, some.at_columns) == ((0, 2), (0, 2))
    np.testing.assert_array_equal(some.values, every[::2, ::2])


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize("grid", [(3, 3), (1, 5), (4, 7), (1, 1)])
def test_reference_lines_are_what_the_definition_gives(grid):
    patch = (4, 6)
    far = patch_distances(grid, patch).double().numpy()
    assert uniform_attention(grid, patch) == pytest.approx(far.mean(), rel=1e-6)
    places = [(r, c) for r in range(grid[0]) for c in range(grid[1])]
    near = np.array([[max(abs(a - c), abs(b - d)) <= 1 for c, d in places] for a, b in places], float)
    near /= near.sum(1, keepdims=True)
    distance, entropy = local_attention(grid, patch)
    assert distance == pytest.approx((near * far).sum(1).mean(), rel=1e-6)
    assert entropy == pytest.approx(-(near * np.log(np.maximum(near, 1e-300))).sum(1).mean())


@pytest.mark.parametrize("config", [VARIANTS["paper"], VARIANTS["map"], OBLONG], ids=["square", "map", "oblong"])
def test_uniform_attention_has_the_closed_form(config):
    model = network(config)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight[: 2 * config.dim] = 0
            block.attn.qkv.bias[: 2 * config.dim] = 0
    found = attention_distance(model, random_images(config, 3))
    patches = config.grid[0] * config.grid[1]
    np.testing.assert_allclose(found.distance, uniform_attention(config.grid, config.patch), rtol=1e-6)
    np.testing.assert_allclose(found.entropy, math.log(patches), rtol=1e-6)
    np.testing.assert_allclose(found.entropy_share, 1, rtol=1e-6)
    kept = attention_distance(model, random_images(config, 3), prefix="keep")
    assert kept.keys == patches + config.prefix
    np.testing.assert_allclose(kept.distance, found.distance * patches / kept.keys, rtol=1e-6)
    np.testing.assert_allclose(kept.entropy_share, 1, rtol=1e-6)


def test_identity_attention_has_distance_zero(monkeypatch):
    def itself(q, k, mask, scale):
        return torch.eye(q.shape[2], dtype=q.dtype).expand(*q.shape[:2], -1, -1)

    monkeypatch.setattr("vitral.explanation.capture.attention_of", itself)
    found = attention_distance(network(OBLONG), random_images(OBLONG, 3))
    assert not found.distance.any()
    assert not found.entropy.any()


@pytest.mark.parametrize("prefix", ["drop", "keep"])
@pytest.mark.parametrize("name", KINDS)
def test_streaming_equals_whole_matrices(name, prefix):
    model, images = network(VARIANTS[name]), random_images(VARIANTS[name], 5)
    state, before = copy.deepcopy(model.state_dict()), {n: set(vars(m)) for n, m in model.named_modules()}
    distance, entropy = dense(model, images, renormalize=prefix == "drop")
    found = measure(model, images, parts=("attention",), prefix=prefix, batch_size=2).attention
    np.testing.assert_allclose(found.distance, distance, rtol=1e-5)
    np.testing.assert_allclose(found.entropy, entropy, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert {n: set(vars(m)) for n, m in model.named_modules()} == before


def test_queries_that_look_at_no_patch_do_not_count(monkeypatch):
    def prefix_only(q, k, mask, scale):
        a = torch.zeros(*q.shape[:3], q.shape[2], dtype=q.dtype)
        a[:, 0, :, 0] = 1  # head 0 looks at the class token alone
        a[:, 1, :, 1], a[:, 1, 3, :] = 1, 0
        a[:, 1, 3, 0] = 1  # head 1 at the first patch, but for one query
        return a

    monkeypatch.setattr("vitral.explanation.capture.attention_of", prefix_only)
    config = VARIANTS["paper"]
    found = attention_distance(network(config), random_images(config))
    assert np.isnan(found.distance[:, 0]).all()
    far = patch_distances(config.grid, config.patch)[:, 0].numpy()
    np.testing.assert_allclose(found.distance[:, 1], np.delete(far, 2).mean(), rtol=1e-6)
    assert json.loads(json.dumps(found.to_json()))["distance"][0][0] is None


# ---------------------------------------------------------------- norms


def test_norms_and_outliers():
    config = VARIANTS["registers"]
    model, images = network(config).float(), random_images(config, 6).float()
    with torch.no_grad(), capture(model, tokens=True) as seen:
        model(images)
    found = token_norms(model, images)
    for layer in seen.layers:
        norms = seen.tokens[layer].norm(dim=-1).numpy()
        np.testing.assert_allclose(found.prefix[layer], norms[:, :4].mean(0), rtol=1e-5)
        np.testing.assert_allclose(found.quantiles[layer, 3], np.median(norms[:, 4:]), rtol=1e-5)
    assert found.prefix_names == ("class", "register 1", "register 2", "register 3")


def test_planted_outliers_are_found_where_they_are(monkeypatch):
    config = VARIANTS["oblong"]
    model, images = network(config), random_images(config, 6)
    block = model.blocks[1]
    original = block.forward

    def planted(*args, **kwargs):
        x = original(*args, **kwargs).clone()
        x[2, config.prefix + 7] *= 50 / x[2, config.prefix + 7].norm() * x.norm(dim=-1).max()
        return x

    monkeypatch.setattr(block, "forward", planted)
    found = measure(model, images, parts=("norms",), batch_size=6).norms
    assert found.outliers.tolist() == [0, 1]
    assert found.where[1, 7 // config.grid[1], 7 % config.grid[1]] == 1
    assert found.where.sum() == 1
    assert found.outlier_share[1] == 1 / (6 * config.grid[0] * config.grid[1])


# ---------------------------------------------------------------- likeness of layers


def test_hsic_is_the_mean_over_quadruples():
    """Song et al. 2012, the definition: over all 4 different images i, j, q, r of k_ij (l_ij + l_qr − 2 l_iq)."""
    from itertools import permutations

    generator = torch.Generator().manual_seed(0)
    kernels = torch.stack([gram(torch.randn(6, 3, generator=generator, dtype=torch.float64)) for _ in range(2)])
    k, m = kernels.numpy()
    terms = [k[i, j] * (m[i, j] + m[q, r] - 2 * m[i, q]) for i, j, q, r in permutations(range(6), 4)]
    assert float(hsic(kernels)[0, 1]) == pytest.approx(np.mean(terms))


def test_likeness_of_a_layer_with_itself_and_turned():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 5, 4, generator=generator, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(20, 20, generator=generator, dtype=torch.float64))[0]
    turned = x.flatten(1) @ turn * 3 + 7  # rotation, scale, shift
    other = torch.randn(12, 20, generator=generator, dtype=torch.float64)
    sums = hsic(torch.stack([gram(x), gram(turned), gram(other)])).numpy()
    size = np.sqrt(np.diagonal(sums))
    likeness = sums / size[:, None] / size[None]
    assert likeness[0, 1] == pytest.approx(1)
    assert abs(likeness[0, 2]) < 0.5


@pytest.mark.parametrize("name", KINDS)
def test_cka_of_every_kind_of_network(name):
    model, images = network(VARIANTS[name]).float(), random_images(VARIANTS[name], 9).float()
    found = cka(model, images, batch_size=5)
    depth = model.config.depth
    assert found.layers == (INPUT, *range(depth))
    np.testing.assert_allclose(found.values, found.values.T, atol=1e-9)
    np.testing.assert_allclose(np.diagonal(found.values), 1, atol=1e-9)
    assert (found.images, found.batch) == (9, 5)
    with torch.no_grad(), capture(model, tokens=True) as seen:
        model(images)
    sums = sum(
        hsic(torch.stack([gram(seen.tokens[i][part]) for i in (INPUT, 0)])).numpy() for part in (slice(5), slice(5, 9))
    )
    assert found.values[0, 1] == pytest.approx(sums[0, 1] / math.sqrt(sums[0, 0] * sums[1, 1]), abs=1e-5)


def test_the_estimate_does_not_grow_with_the_batch():
    """The biased estimate is near 1 for few images with many features, for any features."""
    generator = torch.Generator().manual_seed(2)
    pairs = [
        hsic(torch.stack([gram(torch.randn(8, 500, generator=generator, dtype=torch.float64)) for _ in range(2)]))
        for _ in range(40)
    ]
    sums = torch.stack(pairs).sum(0)
    assert abs(sums[0, 1] / (sums[0, 0] * sums[1, 1]).sqrt()) < 0.2


# ---------------------------------------------------------------- one image


@pytest.mark.parametrize("name", KINDS)
def test_maps_of_heads_are_rows_of_attention(name):
    config = VARIANTS[name]
    model, images = network(config), random_images(config, 1)
    found = head_maps(model, images[0])
    with torch.no_grad(), capture(model) as seen:
        model(images)
    np.testing.assert_allclose(found.values.sum((2, 3)) + found.elsewhere, 1, atol=1e-5)
    assert found.values.shape[1:] == (config.heads, *config.grid)
    if config.pool == "cls" and not config.dist_token:
        row = seen.attention(0)[0, :, 0, config.prefix :].float().numpy()
        np.testing.assert_allclose(found.values[0].reshape(config.heads, -1), row, rtol=1e-5)
    if config.pool == "map":
        assert found.layers[-1] == POOL
        row = seen.attention(POOL)[0, :, 0, config.prefix :].float().numpy()
        np.testing.assert_allclose(found.values[-1].reshape(config.heads, -1), row, rtol=1e-5)


# ---------------------------------------------------------------- all at once, and what is refused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_one_pass_gives_what_single_passes_give(name, dtype):
    config = VARIANTS[name]
    model, images = network(config).to(dtype), random_images(config, 8).to(dtype)
    model.train()
    found = measure(model, images)
    assert model.training
    np.testing.assert_array_equal(found.attention.distance, attention_distance(model, images).distance)
    np.testing.assert_array_equal(found.norms.norms, token_norms(model, images).norms)
    np.testing.assert_array_equal(found.likeness.values, cka(model, images).values)
    for one in (found.attention, found.norms, found.likeness, patch_filters(model), position_similarity(model)):
        json.dumps(one.to_json(), allow_nan=False)


def test_chosen_layers():
    config = VARIANTS["paper"]
    model, images = network(config), random_images(config, 4)
    every, last = measure(model, images), measure(model, images, layers=[-1])
    assert last.attention.layers == last.norms.layers == (1,)
    assert last.likeness.layers == (INPUT, 1)
    np.testing.assert_array_equal(last.attention.distance, every.attention.distance[1:])
    with pytest.raises(UsageError, match="there is no layer 2"):
        measure(model, images, layers=[2])
    with pytest.raises(UsageError, match="no layers"):
        measure(model, images, layers=[])


def test_errors():
    config = VARIANTS["paper"]
    model, images = network(config), random_images(config, 4)
    with pytest.raises(UsageError, match="no images"):
        attention_distance(model, images[:0])
    masked = images.clone()
    masked[1] = torch.nan
    with pytest.raises(UsageError, match="not finite"):
        token_norms(model, masked)
    with pytest.raises(UsageError, match="too few"):
        cka(model, images[:3])
    with pytest.raises(UsageError, match="too small"):
        cka(model, images, batch_size=3)
    with pytest.raises(UsageError, match="unknown choice for prefix"):
        attention_distance(model, images, prefix="fold")
    with pytest.raises(UsageError, match="one image at a time"):
        head_maps(model, images)
    with pytest.raises(UsageError, match="no attention"):
        patch_filters(BiT(BiTConfig(image_size=32, layers=(1,), classes=2)))


def test_batches_stay_within_memory():
    long = ViT(ViTConfig(image_size=256, patch_size=4, dim=8, depth=1, heads=1, mlp_dim=8))
    assert _fitting(long, (64, 64)) == 8
    assert _fitting(long, (4, 4)) == 32
