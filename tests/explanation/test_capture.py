"""`capture` records the actual computation, and leaves no trace."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from tiny import VARIANTS, moderate, network, random_images

from running import mostly_slow
from vitral.errors import UsageError
from vitral.explanation.capture import ANY_NETWORK, INPUT, POOL, capture
from vitral.explanation.methods import METHODS
from vitral.model import BiT, BiTConfig, ViT

VITS = {name: config for name, config in VARIANTS.items() if not isinstance(config, BiTConfig)}


def explicit(q, k, mask, scale):
    """softmax by hand, in double precision."""
    scores = torch.einsum("bhqd,bhkd->bhqk", q.double(), k.double()) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    raised = (scores - scores.amax(-1, keepdim=True)).exp()
    return raised / raised.sum(-1, keepdim=True)


@pytest.mark.parametrize("name", mostly_slow(VITS, 2))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_attention_is_that_of_the_explicit_softmax_and_gives_the_same_logits(name, dtype):
    config = VITS[name]
    model, images = moderate(config), random_images(config)
    with torch.no_grad():
        model, images = model.to(dtype), images.to(dtype)
        before = model(images)
        with capture(model, tokens=True, graph=True) as seen:
            during = model(images)
        after = model(images)
    assert torch.equal(before, after)
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(during, before, rtol=tolerance, atol=tolerance)
    tokens = config.prefix + config.grid[0] * config.grid[1]
    assert seen.grid == config.grid
    for layer in range(config.depth):
        found = seen.attention(layer)
        assert found.shape == (2, config.heads, tokens, tokens)
        wanted = explicit(seen.q[layer], seen.k[layer], None, seen.scales[layer])
        assert (found - wanted).abs().max() <= 1e-6
        assert (found.sum(-1) - 1).abs().max() <= 1e-5
        if dtype == torch.float64:  # what was seen is what the network went on with
            torch.testing.assert_close(seen.mixed[layer], wanted @ seen.v[layer], rtol=1e-9, atol=1e-9)
        assert seen.tokens[layer].shape == (2, tokens, config.dim)
    if config.pool == "map":
        assert seen.attention(POOL).shape == (2, config.pool_heads or config.heads, 1, tokens)


@pytest.mark.parametrize("name", ["paper", "map-with-prefix", "distilled", "post-norm"])
def test_everything_is_restored(name):
    model = network(VITS[name])
    model.prune_last_block = True
    before = {n: (set(vars(m)), len(m._forward_hooks)) for n, m in model.named_modules()}
    state = copy.deepcopy(model.state_dict())
    with capture(model, tokens=True):
        model(random_images(VITS[name]))
    with pytest.raises(ZeroDivisionError), capture(model, tokens=True):
        raise ZeroDivisionError
    assert {n: (set(vars(m)), len(m._forward_hooks)) for n, m in model.named_modules()} == before
    assert model.prune_last_block
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


def test_captures_inside_each_other_both_record():
    model, images = network(VITS["map-with-prefix"]), random_images(VITS["map-with-prefix"])
    before = {n: set(vars(m)) for n, m in model.named_modules()}
    rows = {}
    with capture(model) as outer:
        with capture(model, reduce=lambda layer, attention: rows.update({layer: attention})):
            model(images)
        inner, rows = rows, {}
        model(images)
    assert not rows
    assert set(outer.q) == set(inner) == {POOL, 0, 1}
    assert all(torch.equal(outer.attention(layer), inner[layer]) for layer in inner)
    assert {n: set(vars(m)) for n, m in model.named_modules()} == before


def test_gradient_of_attention_is_that_of_the_matrix():
    config = VITS["registers"]
    model, images = network(config), random_images(config)
    with capture(model, graph=True) as seen:
        logits = model(images)
    (of_mixed,) = torch.autograd.grad(logits[:, 2].sum(), seen.mixed[0], retain_graph=True)
    found = seen.attention_gradient(0, of_mixed)

    part = model.blocks[0].attn
    kept = []

    def backend(q, k, v, attn_mask=None, dropout_p=0.0, *, scale):
        matrix = explicit(q, k, attn_mask, scale)
        kept.append(matrix)
        return matrix @ v

    part.backend = backend
    model.prune_last_block = False
    (wanted,) = torch.autograd.grad(model(images)[:, 2].sum(), kept[0])
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["paper", "map-with-prefix", "distilled", "rotary", "mean"])
@pytest.mark.parametrize("pruned", [False, True])
def test_a_backward_pass_hands_over_attention_times_its_gradient(name, pruned):
    """In double precision: products, logits and the gradient of the first values are the explicit network's."""
    config = VITS[name]
    model, images = network(config), random_images(config)
    mask = torch.ones(2, config.grid[0] * config.grid[1], dtype=torch.bool)
    mask[0, 2] = False
    found, kept, order = {}, {}, []
    with capture(
        model, backward=lambda layer, one: (order.append(layer), found.update({layer: one})), prune_last_block=pruned
    ) as seen:
        logits = model(images, mask)
    (of_values,) = torch.autograd.grad(logits[:, 1].sum(), [seen.v[0]])
    pooled = [POOL] if config.pool == "map" else []
    assert order == [*pooled, *reversed(range(config.depth))]

    def materialize(layer, part):
        def backend(q, k, v, attn_mask=None, dropout_p=0.0, *, scale):
            kept[layer] = explicit(q, k, attn_mask, scale), v
            return kept[layer][0] @ v

        part.backend = backend

    for layer, block in enumerate(model.blocks):
        materialize(layer, block.attn)
    if pooled:
        materialize(POOL, model.attn_pool)
    model.prune_last_block = pruned
    plain = model(images, mask)
    torch.testing.assert_close(logits, plain)
    matrices = [kept[layer][0] for layer in order]
    *wanted, values = torch.autograd.grad(plain[:, 1].sum(), [*matrices, kept[0][1]])
    for layer, matrix, gradient in zip(order, matrices, wanted, strict=True):
        # A last block with an own backend computes all queries: those that no head reads have no gradient.
        rows = found[layer].shape[-2]
        torch.testing.assert_close(found[layer], (matrix * gradient)[..., :rows, :])
        assert not gradient[..., rows:, :].any()
    torch.testing.assert_close(of_values, values)


def test_masks_are_seen():
    config = VITS["sincos"]
    model, images = network(config), random_images(config)
    mask = torch.ones(2, config.grid[0] * config.grid[1], dtype=torch.bool)
    mask[0, 3] = False
    with capture(model) as seen:
        model(images, mask)
    assert not seen.attention(1)[0, :, :, config.prefix + 3].any()
    assert seen.attention(1)[1, :, :, config.prefix + 3].all()


def test_reductions_see_every_layer_and_keep_nothing():
    config = VITS["map-with-prefix"]
    model, images = network(config).float(), random_images(config).float()
    rows = {}
    with capture(model, reduce=lambda layer, attention: rows.update({layer: attention.sum(-1)})) as seen:
        model(images)
    assert set(rows) == {POOL, 0, 1}
    assert all((row - 1).abs().max() < 1e-5 for row in rows.values())
    assert not seen.q
    assert not seen.k


def test_chosen_layers_only():
    config = VITS["paper"]
    model, images = network(config), random_images(config)
    with capture(model, layers=[-1], tokens=True) as seen:
        model(images)
    assert seen.layers == (1,)
    assert set(seen.q) == {1}
    assert set(seen.tokens) == {INPUT, 1}
    with pytest.raises(UsageError, match="was not captured"):
        seen.attention(0)


def test_the_fused_kernel_stays_on(monkeypatch):
    config = VITS["paper"]
    model, images = network(config).float(), random_images(config).float()
    calls = []
    fused = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or fused(*a, **k))
    with capture(model):
        model(images)
    assert len(calls) == config.depth


def test_unsupported_models_are_refused():
    config = VITS["paper"]
    compiled = network(config).float()
    compiled.compile(backend="eager")
    for model, told in (
        (torch.compile(network(config).float(), backend="eager"), "_orig_mod"),
        (compiled, "model.compile()"),
        (torch.export.export(network(config).float(), (random_images(config).float(),)).module(), "exported from"),
        (BiT(BiTConfig(layers=(1,), image_size=32, classes=3)), "occlusion"),
    ):
        with pytest.raises(UsageError) as caught, capture(model):
            pass
        assert told in str(caught.value)
        assert len(str(caught.value).splitlines()) <= 5
    with pytest.raises(UsageError, match="no layer 7") as caught, capture(network(config), layers=[7]):
        pass
    assert "0 … 1" in str(caught.value)
    assert isinstance(network(config), ViT)


@pytest.mark.parametrize("modes", [{"explicit": True}, {"reduce": print, "backward": print}], ids=["explicit", "both"])
def test_modes_that_do_not_combine_are_refused(modes):
    model = network(VARIANTS["paper"])
    with pytest.raises(UsageError, match=r"goes with reduce|do not go together"), capture(model, **modes):
        pass


def test_the_hint_names_the_methods_that_need_no_attention():
    named = ANY_NETWORK.partition(": ")[2].split(", ")
    assert named == [name for name, one in METHODS.items() if one.any_network and name != "grad-cam"]  # of a layer
