"""Gradient methods, compared with plain implementations, with captum and with closed forms."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from captum.attr import InputXGradient, IntegratedGradients
from test_methods_contract import BIT, KINDS, built, images_for
from tiny import VARIANTS, moderate, random_images
from torch import nn

from running import mostly_slow
from vitral.errors import UsageError
from vitral.explanation.capture import capture
from vitral.explanation.libra import libra_backward
from vitral.explanation.methods import METHODS
from vitral.explanation.methods.fullgrad import bias_terms
from vitral.explanation.methods.gradients import block_inputs, gradients_of
from vitral.explanation.methods.integrated_gradients import quadrature
from vitral.explanation.methods.method import grid_of, on_grid, quiet, readout
from vitral.model import BiT, ViT, ViTConfig
from vitral.model.vit import MLP

ATTENTIVE = (
    "paper",
    "oblong",
    "post-norm",
    "swiglu",
    "mean",
    "mean-all",
    "mean-pooled-norm",
    "map",
    "map-with-prefix",
    "distilled",
    "cls-mean",
    "rotary",
    "qk-norm",
    "layer-scale",
    "pre-logits",
    "hybrid",
)
TARGETS = torch.tensor([[1, 3], [0, 2]])


def materialize(part: nn.Module, kept: list[torch.Tensor]) -> None:
    """Attention as an explicit matrix in the graph, kept with its gradient."""

    def backend(q, k, v, attn_mask=None, dropout_p=0.0, *, scale):
        attention = ((q @ k.transpose(-2, -1)) * scale).softmax(-1)
        if not attention.requires_grad:
            attention.requires_grad_()
        kept.append(attention)
        return attention @ v

    part.backend = backend


def explicit(config: ViTConfig) -> tuple[ViT, list[torch.Tensor], list[torch.Tensor]]:
    """A network that records the attention of its layers and of its MAP head in two lists."""
    model, layers, pooled = moderate(config), [], []
    model.prune_last_block = False
    for block in model.blocks:
        materialize(block.attn, layers)
    if config.pool == "map":
        materialize(model.attn_pool, pooled)
    return model, layers, pooled


@pytest.mark.parametrize("name", ATTENTIVE)
def test_generic_is_the_product_of_whole_relevance_matrices(name):
    config = VARIANTS[name]
    model, images = moderate(config), random_images(config)
    with quiet(model):
        found = METHODS["generic"].run(model, images, TARGETS).values
    plain, layers, pooled = explicit(config)
    logits = plain(images)
    for i in range(2):
        for t in range(2):
            gradients = torch.autograd.grad(logits[i, TARGETS[i, t]], layers + pooled, retain_graph=True)
            weighted = [(a * g).clamp(min=0)[i].mean(0) for a, g in zip(layers + pooled, gradients, strict=True)]
            identity = torch.eye(layers[0].shape[-1], dtype=torch.float64)
            relevance = identity
            for one in weighted[: config.depth]:
                relevance = relevance + one @ relevance
            if config.pool == "map":
                row = (weighted[-1] @ relevance)[0]
            else:
                row = readout(model, len(identity), 1, images.device)[0].double() @ (relevance - identity)
            wanted = row[config.prefix :].view(config.grid).detach()
            torch.testing.assert_close(found[i, t].double(), wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", ATTENTIVE)
def test_legrad_is_the_head_behind_every_layer(name):
    config = VARIANTS[name]
    model, images = moderate(config), random_images(config)
    with quiet(model):
        found = METHODS["legrad"].run(model, images, TARGETS).values
        last = METHODS["legrad"].run(model, images, TARGETS, layers=[-1]).values
    plain, layers, pooled = explicit(config)
    outputs: list[torch.Tensor] = []
    for block in plain.blocks:
        block.register_forward_hook(lambda _, __, output: outputs.append(output))
    plain(images)
    for i in range(2):
        for t in range(2):
            maps = []
            for layer in range(config.depth):
                pooled.clear()
                score = plain.classify(plain.pool(outputs[layer]))[i, TARGETS[i, t]]
                attention = pooled[0] if config.pool == "map" else layers[layer]
                (gradient,) = torch.autograd.grad(score, attention, retain_graph=True)
                maps.append(gradient.clamp(min=0)[i].mean((0, 1))[config.prefix :].view(config.grid))
            for shown, wanted in ((found, sum(maps) / len(maps)), (last, maps[-1])):
                tolerance = 1e-6 * float(wanted.abs().max())
                torch.testing.assert_close(shown[i, t].double(), wanted, rtol=1e-5, atol=tolerance)


def test_grad_cam_of_a_vit_and_of_a_bit():
    config = VARIANTS["paper"]
    model, images = moderate(config), random_images(config)
    with quiet(model):
        found = METHODS["grad-cam"].run(model, images, TARGETS).values
        first = METHODS["grad-cam"].run(model, images, TARGETS, layer=0).values
        with pytest.raises(UsageError, match="no layer 2"):
            METHODS["grad-cam"].run(model, images, TARGETS, layer=2)
    tokens, _ = model.embed(images)
    for shown, begin in ((first, 0), (found, 1)):
        x = tokens.detach().requires_grad_()
        for block in list(model.blocks)[:begin]:
            x = block(x)
        y = x
        for block in list(model.blocks)[begin:]:
            y = block(y)
        (gradient,) = torch.autograd.grad(model.classify(model.pool(y))[0, 3], x)
        wanted = (x[0, 1:] @ gradient[0, 1:].mean(0)).clamp(min=0).view(3, 3)
        torch.testing.assert_close(shown[0, 1].double(), wanted, rtol=1e-5, atol=1e-7)
    torch.manual_seed(0)
    bit, images = BiT(BIT).eval(), images_for("bit", 2)
    nn.init.normal_(bit.head.weight)
    with quiet(bit):
        found = METHODS["grad-cam"].run(bit, images, TARGETS).values
    features = torch.relu(bit.norm(bit.encode(images)))
    wanted = torch.einsum("bchw,btc->bthw", features, bit.head.weight[TARGETS]).clamp(min=0) / features[0, 0].numel()
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-4, atol=1e-6)  # CAM


@pytest.mark.parametrize("name", ["paper", "mean", "post-norm", "map", "hybrid", "bit"])
def test_input_gradient_and_integrated_gradients_are_those_of_captum(name):
    model = BiT(BIT).double().eval() if name == "bit" else moderate(VARIANTS[name])
    images = images_for("bit", 2).double() if name == "bit" else random_images(VARIANTS[name])
    if name == "bit":
        nn.init.normal_(model.head.weight)
    integrated, method = IntegratedGradients(model), METHODS["integrated-gradients"].run
    for t in range(2):
        targets = TARGETS[:, t : t + 1]
        with quiet(model):
            product = METHODS["input-gradient"].run(model, images, targets).values
            gauss = method(model, images, targets, steps=6)
            trapezoid = method(model, images, targets, steps=6, rule="trapezoid")
        grid = grid_of(model, images)

        def summed(pixels: torch.Tensor, grid: tuple[int, int] = grid) -> torch.Tensor:
            return on_grid(pixels.detach().sum(1), grid)[:, None].float()

        inputs, target = images.clone().requires_grad_(), targets[:, 0]
        wanted = summed(InputXGradient(model).attribute(inputs, target=target))
        torch.testing.assert_close(product, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))
        wanted, delta = integrated.attribute(images, target=target, n_steps=6, return_convergence_delta=True)
        torch.testing.assert_close(
            gauss.values, summed(wanted), rtol=1e-4, atol=1e-5 * float(summed(wanted).abs().max())
        )
        gained = (model(images) - model(torch.zeros_like(images))).gather(1, targets)[:, 0]
        torch.testing.assert_close(gauss.completeness[:, 0], (delta / gained).abs().float(), rtol=1e-3, atol=1e-4)
        # captum's trapezoid rule has weights that sum to (n − 1) / n
        wanted = summed(integrated.attribute(images, target=target, n_steps=6, method="riemann_trapezoid")) * 6 / 5
        torch.testing.assert_close(trapezoid.values, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


def test_integrated_gradients_become_complete_with_more_steps():
    model, images = moderate(VARIANTS["paper"]), random_images(VARIANTS["paper"])
    with quiet(model):
        errors = [
            METHODS["integrated-gradients"].run(model, images, TARGETS, steps=n).completeness.max() for n in (2, 64)
        ]
    assert errors[1] <= 1e-4 < errors[0]


@pytest.mark.parametrize("rule", ["gauss-legendre", "trapezoid"])
def test_quadrature_of_polynomials(rule):
    places, weights = (torch.tensor(part, dtype=torch.float64) for part in quadrature(rule, 5))
    assert abs(weights.sum() - 1) < 1e-12
    assert abs(weights @ places - 1 / 2) < 1e-12
    assert abs(weights @ places**9 - 1 / 10) < (1e-12 if rule == "gauss-legendre" else 0.1)


def test_wrong_options_are_refused():
    with pytest.raises(UsageError, match="no quadrature rule 'simpson'"):
        quadrature("simpson", 4)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="1 steps are too few"):
        quadrature("trapezoid", 1)
    model, images = moderate(VARIANTS["paper"]), random_images(VARIANTS["paper"])
    with pytest.raises(UsageError, match="0 samples"), quiet(model):
        METHODS["smoothgrad"].run(model, images, TARGETS, samples=0)
    with pytest.raises(UsageError, match="no layer 7"), quiet(model):
        METHODS["legrad"].run(model, images, TARGETS, layers=[7])


def test_smoothgrad_of_no_noise_is_the_gradient_and_noise_follows_the_image():
    model, images = moderate(VARIANTS["paper"]), random_images(VARIANTS["paper"])
    x = images.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).gather(1, TARGETS[:, :1]).sum(), x)
    run = METHODS["smoothgrad"].run
    with quiet(model):
        still = run(model, images, TARGETS[:, :1], noise=0.0, samples=2).values
        signed = run(model, images, TARGETS[:, :1], noise=0.0, samples=2, times_input=True).values
        noisy = run(model, images, TARGETS[:, :1], samples=4).values
        swapped = run(model, images.flip(0), TARGETS[:, :1].flip(0), samples=4).values.flip(0)
        many = [run(model, images, TARGETS[:, :1], samples=n).values for n in (128, 256)]
    torch.testing.assert_close(still[:, 0], on_grid(gradient.abs().sum(1), (3, 3)).float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(signed[:, 0], on_grid((gradient * images).sum(1), (3, 3)).float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(noisy, swapped, rtol=1e-5, atol=1e-6)
    assert (noisy - still).abs().max() > 1e-2 * still.abs().max()
    assert (many[0] - many[1]).abs().max() < 0.3 * (noisy - many[1]).abs().max()  # a mean, which settles


# LibraGrad ------------------------------------------------------------------------------------------------------------

ALL = {name: config for name, config in VARIANTS.items() if config.classes and config.dropout == 0}


@pytest.mark.parametrize("name", mostly_slow(ALL, 3))
def test_libra_leaves_the_forward_pass_and_the_network_alone(name):
    config = ALL[name]
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.bfloat16, 0.1)):
        model, images = moderate(config).to(dtype), random_images(config).to(dtype)
        before = {part: set(vars(module)) for part, module in model.named_modules()}
        with torch.no_grad():
            plain = model(images)
            with libra_backward(model):
                balanced = model(images)
            with capture(model) as seen, libra_backward(model):
                model(images)
            with libra_backward(model), capture(model):
                model(images)
            assert torch.equal(model(images), plain)
        assert set(seen.q) >= set(range(config.depth))
        assert (balanced - plain).abs().max() <= tolerance * plain.abs().max()
        assert {part: set(vars(module)) for part, module in model.named_modules()} == before


@pytest.mark.parametrize("name", mostly_slow(ALL, 3))
def test_libra_makes_fullgrad_complete_and_the_plain_gradient_does_not(name):
    config = ALL[name]
    model, images, targets = moderate(config), random_images(config), TARGETS % config.classes
    with quiet(model):
        exact = METHODS["fullgrad+"].run(model, images, targets)
        plain = METHODS["fullgrad+"].run(model, images, targets, libra=False)
        single = METHODS["fullgrad+"].run(model.float(), images.float(), targets)
    assert exact.completeness.max() <= 1e-9
    assert single.completeness.max() <= 1e-4
    assert plain.completeness.max() > 0.01


@pytest.mark.parametrize("name", ["root", "hybrid", "hybrid-of-two-layers", "bit"])
def test_libra_is_complete_from_the_pixels_on_through_convolutions_too(name):
    """Without class token and learned positions, a network is a function of its pixels and biases."""
    if name == "bit":
        model, images = BiT(BIT).double().eval(), images_for("bit", 2).double()
        with torch.no_grad():
            for part, parameter in model.named_parameters():
                parameter.normal_(std=0.5) if part.endswith("bias") or "head" in part else None
    else:
        config = dataclasses.replace(VARIANTS[name], cls_token=False, pool="mean", position="none")
        model, images = moderate(config), random_images(config)
    errors = []
    for balance in (True, False):
        x = images.clone().requires_grad_()
        with quiet(model), bias_terms(model) as terms:
            if balance:
                with libra_backward(model):
                    logits = model(x)
            else:
                logits = model(x)
            (gradient,) = torch.autograd.grad(logits[:, 1].sum(), x)
        total = (x * gradient).sum((1, 2, 3)) + sum(term.sum(1) for _, term in terms)
        with quiet(model):
            chosen = torch.ones(2, 1, dtype=torch.long)
            values = METHODS["input-gradient"].run(model, images, chosen, libra=balance).values
        products = (x * gradient).detach().sum((1, 2, 3))
        torch.testing.assert_close(values.double().sum((1, 2, 3)), products, rtol=1e-4, atol=1e-4)
        errors.append(float(((total - logits[:, 1]) / logits[:, 1]).detach().abs().max()))
    assert errors[0] <= 1e-9
    assert errors[1] > 0.01


def test_values_of_fullgrad_are_inputs_and_biases_of_all_layers():
    """By gradients of parameters instead of hooks: all terms of all tokens sum to Σ over layers and biases."""
    config = dataclasses.replace(VARIANTS["mean-all"], cls_token=False, pool="mean", final_norm="tokens")
    model, images = moderate(config), random_images(config, 1)
    with quiet(model):
        whole = METHODS["fullgrad+"].run(model, images, torch.tensor([[2]])).values.double().sum()
        bare = METHODS["fullgrad+"].run(model, images, torch.tensor([[2]]), biases=False).values.double().sum()
    with libra_backward(model), block_inputs(model) as inputs:
        logit = model(images)[0, 2]
    biases = {n: p for n, p in model.named_parameters() if n.endswith("bias") and n.startswith(("blocks", "norm"))}
    found = torch.autograd.grad(logit, inputs + list(biases.values()), allow_unused=True)
    layers = sum((x * g).sum() for x, g in zip(inputs, found[: len(inputs)], strict=True))
    added = sum((b * g).sum() for b, g in zip(biases.values(), found[len(inputs) :], strict=True) if g is not None)
    torch.testing.assert_close(bare, layers.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole, (layers + added).detach(), rtol=1e-5, atol=1e-5)


def test_attcat_is_attention_times_token_times_gradient():
    config = VARIANTS["paper"]
    model, images = moderate(config), random_images(config)
    for balance in (True, False):
        with quiet(model):
            found = METHODS["attcat"].run(model, images, TARGETS, libra=balance).values
        plain, layers, _ = explicit(config)
        with block_inputs(plain) as inputs:
            if balance:
                with libra_backward(plain):
                    logits = plain(images)
            else:
                logits = plain(images)
        gradients = torch.autograd.grad(logits[1, 2], inputs)
        wanted = sum(
            a[1].mean((0, 1)) * (x[1] * g[1]).sum(-1) for a, x, g in zip(layers, inputs, gradients, strict=True)
        )[1:].view(3, 3)
        torch.testing.assert_close(found[1, 1].double(), wanted.detach(), rtol=1e-4, atol=1e-6)


def backward(function, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad((function(x) * weight).sum(), x)[0]


@pytest.mark.parametrize("kind", ["layer", "group"])
def test_libra_of_a_norm_is_its_linear_part(kind):
    torch.manual_seed(0)
    norm = (nn.LayerNorm(8) if kind == "layer" else nn.GroupNorm(2, 8)).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x, weight = torch.randn(3, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    with libra_backward(norm):
        found, value = backward(norm, x, weight), norm(x)
    torch.testing.assert_close(value, norm(x), rtol=1e-12, atol=1e-12)
    groups = (x.view(3, -1, 8 if kind == "layer" else 4), (weight * norm.weight.detach()).view_as(x))
    sigma = (groups[0].var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
    scaled = groups[1].view_as(groups[0]) / sigma
    torch.testing.assert_close(found, (scaled - scaled.mean(-1, keepdim=True)).view_as(x), rtol=1e-10, atol=1e-10)


def test_libra_of_gates_is_the_gate():
    x = torch.linspace(-3, 3, 7, dtype=torch.float64)[None].requires_grad_()
    gates = {
        "gelu": (1 + torch.erf(x / 2**0.5)) / 2,
        "gelu-tanh": torch.nn.functional.gelu(x, approximate="tanh") / x,
        "swiglu": None,
    }
    for name, gate in gates.items():
        config = ViTConfig(image_size=4, patch_size=4, dim=4, heads=1, mlp_dim=7, depth=1, activation=name)
        mlp = MLP(config).double()
        inner = nn.Identity()
        mlp.fc1, mlp.fc2 = inner, nn.Identity()
        if name == "swiglu":
            x2 = torch.cat([x, x.flip(1) + 1], dim=1).detach()
            with libra_backward(mlp):
                found = backward(mlp, x2, torch.ones(1, 7, dtype=torch.float64))
            a, b = x2.chunk(2, 1)
            wanted = torch.cat([a.sigmoid() * b, a * a.sigmoid()], 1) / 2
        else:
            with libra_backward(mlp):
                found = backward(mlp, x, torch.ones(1, 7, dtype=torch.float64))
            wanted = torch.where(x == 0, 0.5, gate)
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-10, atol=1e-10)


def test_libra_of_attention_is_the_transposed_matrix_for_values_and_nothing_for_queries_and_keys():
    attention = moderate(VARIANTS["paper"]).blocks[0].attn
    generator = torch.Generator().manual_seed(0)
    q, k, v, weight = (torch.randn(1, 2, 5, 8, dtype=torch.float64, generator=generator) for _ in range(4))
    q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    with libra_backward(attention):
        dq, dk, dv = torch.autograd.grad((attention.attend(q, k, v, None) * weight).sum(), [q, k, v], allow_unused=True)
    matrix = (q @ k.mT * attention.scale).softmax(-1)
    assert dq is None
    assert dk is None
    torch.testing.assert_close(dv, (matrix.mT @ weight).detach(), rtol=1e-10, atol=1e-10)


def test_targets_share_a_forward_pass_and_no_graph_is_built_before_the_first_block():
    model, images = built("hybrid"), images_for("hybrid", 2)
    calls = {"embed": 0}
    model.patch_embed.register_forward_hook(lambda *_: calls.update(embed=calls["embed"] + 1))
    for name in ("generic", "legrad", "grad-cam", "attcat", "fullgrad+", "input-gradient"):
        with quiet(model):
            calls["embed"] = 0
            METHODS[name].run(model, images, TARGETS)
        assert calls["embed"] == 1, name
    with quiet(model), block_inputs(model) as inputs:
        model(images)
    assert inputs[0].is_leaf
    assert inputs[0].requires_grad
    assert not inputs[1].is_leaf
    assert len(list(gradients_of(model(images.requires_grad_()), TARGETS, [images]))) == 2


def test_every_kind_has_methods_of_both_sorts():
    assert {"root", "hybrid"} <= set(KINDS)
    assert {m for m in METHODS if METHODS[m].any_network} >= {
        "grad-cam",
        "input-gradient",
        "integrated-gradients",
        "smoothgrad",
    }
