"""BiT: the formulas in numpy, timm's logits, errors, and one training step of every name."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import vitral
from vitral.cli.main import main
from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import UsageError
from vitral.model import BITS, BiT, BiTConfig, config, create, summarize
from vitral.model.registry import config_from_json, config_to_json
from vitral.model.resnet import BIT_NUMERICS, HYBRID_NUMERICS, HybridStem, StdConv2d
from vitral.model.variants import RESNETS
from vitral.training.optimizer_set import OptimizerSet, freeze, parameter_groups
from vitral.training.optimizers import OPTIMIZERS
from vitral.training.options import Run
from vitral.weights import native

SMALL = BiTConfig(image_size=32, classes=5, layers=(2, 1))


def random_network(shape: BiTConfig, seed: int = 0, std: float | None = None) -> BiT:
    """A network with random parameters, since zeros and ones of a new network hide errors."""
    torch.manual_seed(seed)
    model = BiT(shape).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if std is not None:
                parameter.normal_(std=std)
            elif parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.normal_(1.0 if name.endswith("weight") else 0.0, 0.3)
    return model


def random_images(*size: int, channels: int = 3) -> torch.Tensor:
    return torch.randn(2, channels, *size, generator=torch.Generator().manual_seed(1))


# Formulas -------------------------------------------------------------------------------------------------------------


def by_the_formulas(state: dict[str, np.ndarray], c: BiTConfig, x: np.ndarray) -> np.ndarray:
    """Reference of big_transfer's network on one image (C, H, W): windows, loops and sums."""
    x = windows(convolved(state, c, "stem.conv", x, 2, 3), 3, 2, 1, BIT_NUMERICS[c.numerics].pool_border)
    x = x.max(axis=(1, 2))
    for stage, units in enumerate(c.layers):
        for unit in range(units):
            name, stride = f"stages.{stage}.blocks.{unit}", 2 if stage and not unit else 1
            a = activated(state, f"{name}.norm1", x)
            residual = x if unit else convolved(state, c, f"{name}.downsample.conv", a, stride, 0)
            y = convolved(state, c, f"{name}.conv1", a, 1, 0)
            y = convolved(state, c, f"{name}.conv2", activated(state, f"{name}.norm2", y), stride, 1)
            x = residual + convolved(state, c, f"{name}.conv3", activated(state, f"{name}.norm3", y), 1, 0)
    features = activated(state, "norm", x).mean(axis=(1, 2))
    return state["head.weight"] @ features + state["head.bias"] if c.classes else features


def convolved(s: dict[str, np.ndarray], c: BiTConfig, name: str, x: np.ndarray, stride: int, pad: int) -> np.ndarray:
    kernel = s[f"{name}.weight"]
    centered = kernel - kernel.mean(axis=(1, 2, 3), keepdims=True)
    eps = 1e-8 if c.numerics == "timm" else 1e-10
    kernel = centered / np.sqrt((centered**2).mean(axis=(1, 2, 3), keepdims=True) + eps)
    return np.einsum("cijhw,ocij->ohw", windows(x, kernel.shape[2], stride, pad, 0.0), kernel)


def windows(x: np.ndarray, kernel: int, stride: int, pad: int, border: float) -> np.ndarray:
    x = np.pad(x, [(0, 0), (pad, pad), (pad, pad)], constant_values=border)
    seen = np.lib.stride_tricks.sliding_window_view(x, (kernel, kernel), axis=(1, 2))[:, ::stride, ::stride]
    return seen.transpose(0, 3, 4, 1, 2)


def activated(s: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    groups = x.reshape(32, -1)
    centered = groups - groups.mean(axis=1, keepdims=True)
    y = (centered / np.sqrt((centered**2).mean(axis=1, keepdims=True) + 1e-5)).reshape(x.shape)
    return np.maximum(y * s[f"{name}.weight"][:, None, None] + s[f"{name}.bias"][:, None, None], 0)


@pytest.mark.slow
@pytest.mark.parametrize("numerics", BIT_NUMERICS)
@pytest.mark.parametrize(
    "changes",
    [{}, {"image_size": (24, 37), "channels": 1}, {"width": 2, "layers": (1,)}, {"classes": 0}],
    ids=["plain", "odd-gray", "wide", "headless"],
)
def test_logits_equal_the_formulas(changes, numerics):
    shape = dataclasses.replace(SMALL, **changes, numerics=numerics)
    model = random_network(shape, std=1e-3 if numerics == "timm" else None).double()  # 1e-8 is seen in small kernels
    images = random_images(*shape.image, channels=shape.channels).double()
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    wanted = np.stack([by_the_formulas(state, shape, image) for image in images.numpy()])
    with torch.no_grad():
        found = model(images).numpy()
    assert found.shape == (2, shape.classes or shape.dim)
    np.testing.assert_allclose(found, wanted, atol=1e-9 * np.abs(wanted).max())


@pytest.mark.parametrize("one", BIT_NUMERICS)
@pytest.mark.parametrize("other", BIT_NUMERICS)
def test_the_kinds_of_numerics_differ(one, other):
    """Otherwise the tests above could not distinguish them."""
    shape = dataclasses.replace(SMALL, numerics=one)
    models = [random_network(dataclasses.replace(shape, numerics=n), std=1e-3).double() for n in (one, other)]
    with torch.no_grad():
        a, b = (model(random_images(32, 32).double()) for model in models)
    assert torch.equal(a, b) == (one == other)


@pytest.mark.parametrize("numerics", [*BIT_NUMERICS.values(), *HYBRID_NUMERICS.values()])
def test_standardized_kernels(numerics):
    conv = StdConv2d(3, 4, 3, 1, numerics, same=True)
    kernel = conv.standardized().detach().flatten(1)
    torch.testing.assert_close(kernel.mean(1), torch.zeros(4), atol=1e-6, rtol=0)
    torch.testing.assert_close(kernel.std(1, correction=0), torch.ones(4), atol=1e-3, rtol=0)
    half = conv.bfloat16().standardized()
    assert half.dtype == torch.float32, "bf16 keeps 8 bits: the statistics must not"


@pytest.mark.parametrize("numerics", [*BIT_NUMERICS.values(), *HYBRID_NUMERICS.values()])
def test_epsilons_are_in_the_right_place(numerics):
    conv = StdConv2d(3, 4, 3, 1, numerics, same=True).double()
    torch.nn.init.normal_(conv.weight, std=1e-5)
    kernel = conv.weight.detach().numpy()
    centered, variance = kernel - kernel.mean((1, 2, 3), keepdims=True), kernel.var((1, 2, 3), keepdims=True)
    eps = numerics.standard_eps
    spread = np.sqrt(variance) + eps if numerics.spread == "std" else np.sqrt(variance + eps)
    np.testing.assert_allclose(conv.standardized().detach().numpy(), centered / spread, rtol=1e-9)


def test_epsilons_are_those_of_the_sources():
    """vit_jax (Flax's norm), big_transfer, big_vision; timm's hybrids and resnetv2_*_bit."""
    assert HYBRID_NUMERICS["authors"][:3] == ("std", 1e-5, 1e-6)
    assert HYBRID_NUMERICS["timm"][:3] == BIT_NUMERICS["timm"][:3] == ("variance", 1e-8, 1e-5)
    assert BIT_NUMERICS["authors"] == ("variance", 1e-10, 1e-5, 0.0)
    assert BIT_NUMERICS["big_vision"] == ("variance", 1e-10, 1e-5, -np.inf)
    for name, numerics in BIT_NUMERICS.items():
        model = BiT(dataclasses.replace(SMALL, numerics=name))
        assert {m.eps for m in model.modules() if isinstance(m, torch.nn.GroupNorm)} == {numerics.norm_eps}
        assert {m.numerics for m in model.modules() if isinstance(m, StdConv2d)} == {numerics}
    for name, numerics in HYBRID_NUMERICS.items():
        stem = HybridStem(3, (1, 1), name)
        assert {m.eps for m in stem.modules() if isinstance(m, torch.nn.GroupNorm)} == {numerics.norm_eps}
        assert {m.numerics for m in stem.modules() if isinstance(m, StdConv2d)} == {numerics}


@pytest.mark.parametrize("size", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_gradients_of_the_smallest_images_in_bf16(size):
    """oneDNN's padding gives a wrong gradient of the kernel here, from uninitialized memory."""
    conv = StdConv2d(64, 64, 3, 2, BIT_NUMERICS["authors"], same=False)
    images = torch.randn(16, 64, *size, generator=torch.Generator().manual_seed(0))
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        rubbish = [torch.full((1 << n,), torch.nan) for n in range(8, 20)]
        del rubbish
        conv.weight.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            conv(images.requires_grad_()).square().sum().backward()
        gradients.append(conv.weight.grad)
    assert (gradients[0] - gradients[1]).abs().max() < 0.05 * gradients[0].abs().max()


@pytest.mark.parametrize("numerics", [*BIT_NUMERICS.values(), *HYBRID_NUMERICS.values()])
def test_a_constant_kernel_has_a_finite_gradient(numerics):
    conv = StdConv2d(3, 4, 3, 1, numerics, same=False)
    torch.nn.init.constant_(conv.weight, 0.5)
    conv(random_images(8, 8)).square().sum().backward()
    assert conv.weight.grad.isfinite().all()


# timm -----------------------------------------------------------------------------------------------------------------


def timm_network(shape: BiTConfig, seed: int = 0):
    """timm's network and ours with the same random weights."""
    resnetv2 = pytest.importorskip("timm.models.resnetv2")
    layers = pytest.importorskip("timm.layers")
    theirs = resnetv2.ResNetV2(
        layers=shape.layers,
        channels=[256 * 2**i for i in range(len(shape.layers))],
        num_classes=shape.classes,
        in_chans=shape.channels,
        width_factor=shape.width,
        stem_type="fixed",
        conv_layer=lambda *args, **options: layers.StdConv2d(*args, **options, eps=1e-8),
    )
    ours = random_network(shape, seed)
    state = {name.replace("head.", "head.fc."): value for name, value in ours.state_dict().items()}
    state["head.fc.weight"] = state["head.fc.weight"][:, :, None, None]  # a 1×1 convolution there
    theirs.load_state_dict(state)
    return theirs.eval(), ours


@pytest.mark.parametrize("size", [(64, 64), (48, 80), (33, 65)])
@pytest.mark.parametrize(
    "changes", [{}, {"layers": (1, 1, 1), "width": 2}, {"channels": 1}], ids=["two-stages", "wide", "gray"]
)
def test_logits_equal_timms(size, changes):
    shape = dataclasses.replace(SMALL, image_size=size, numerics="timm", **changes)
    theirs, ours = timm_network(shape)
    with torch.no_grad():
        wanted, found = (model(random_images(*size, channels=shape.channels)) for model in (theirs, ours))
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.slow
def test_a_whole_r50x1_equals_timms():
    shape = config("BiT-R50x1", image_size=(64, 96), numerics="timm")
    theirs, ours = timm_network(shape)
    with torch.no_grad():
        wanted, found = theirs(random_images(64, 96)), ours(random_images(64, 96))
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


# The network as a part of the library ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", BITS)
def test_every_name_has_its_shape(name):
    summary = summarize(name, 64, batch=2)
    rows = {row.name: row for row in summary.layers}
    shape = config(name)
    assert rows["head"].output_shape == (2, 1000)
    assert rows["norm"].output_shape == (2, shape.dim, 2, 2)
    assert shape.dim == 2048 * int(name[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", BITS)
def test_every_name_learns_in_a_step(name):
    """The stages of each name, but of width 1 and with one bottleneck each: the largest have 900 million parameters."""
    layers = tuple(min(count, 1) for count in config(name).layers)
    torch.manual_seed(0)
    model = create(name, image_size=32, classes=3, layers=layers, width=1)
    images, labels = random_images(32, 32), torch.tensor([0, 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(model(images), labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[0] == pytest.approx(np.log(3), abs=1e-5), "a new network is undecided"
    assert losses[2] < losses[0]


def test_every_parameter_is_used():
    model = random_network(SMALL).train()
    model(random_images(32, 32)).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().max() < 1e-9] == []


def test_recomputing_gives_the_same_gradients():
    gradients = []
    for checkpointing in (False, True):
        model = random_network(SMALL).train()
        model.checkpointing = checkpointing
        model(random_images(32, 32)).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_images_of_a_batch_are_independent():
    model = random_network(SMALL).double()
    images = random_images(32, 32).double()
    with torch.no_grad():
        torch.testing.assert_close(model(images)[1:], model(images[1:]))


@pytest.mark.parametrize("size", [(1, 1), (7, 40), (32, 32)])
def test_any_size_of_image_will_do(size):
    with torch.no_grad():
        assert random_network(SMALL)(random_images(*size)).isfinite().all()


def test_half_precision_is_close():
    model, images = random_network(SMALL), random_images(32, 32)
    with torch.no_grad():
        exact = model(images)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = model(images).float()
        half = model.bfloat16()(images.bfloat16()).float()
    for found in (mixed, half):
        assert (found - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.slow
def test_initialization():
    """big_vision `bit_paper.py`, Flax defaults: LeCun-normal kernels, norms of one, a head of zero."""
    torch.manual_seed(0)
    model = create("BiT-R50x1", classes=10, head_bias_init=-6.9)
    for conv in (model.stages[3].blocks[0].conv2, model.stages[2].blocks[1].conv1):
        assert conv.weight.std().item() == pytest.approx(conv.weight[0].numel() ** -0.5, rel=0.02)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.GroupNorm)]
    assert len(norms) == 3 * 16 + 1
    assert all((norm.weight == 1).all() and not norm.bias.any() and norm.num_groups == 32 for norm in norms)
    assert not model.head.weight.any()
    assert (model.head.bias == -6.9).all()


@pytest.mark.parametrize("name", BITS)
def test_configurations_survive_json(name):
    shape = config(name, image_size=(64, 48), classes=7)
    assert config_from_json(json.loads(json.dumps(config_to_json(shape)))) == shape


def test_layers_learn_slower_towards_the_root():
    groups = parameter_groups(BiT(SMALL), Run(layer_decay=0.5, weight_decay=0.1))
    factor = {name: group["factor"] for group in groups for name in group["names"]}
    decay = {name: group["weight_decay"] for group in groups for name in group["names"]}
    wanted = {
        "head.weight": 1,
        "norm.bias": 1,
        "stages.1.blocks.0.conv1.weight": 0.5,
        "stages.0.blocks.1.norm1.bias": 0.25,
        "stages.0.blocks.0.downsample.conv.weight": 0.125,
        "stem.conv.weight": 0.0625,
    }
    assert {name: factor[name] for name in wanted} == wanted
    assert all(value == (0.1 if BiT(SMALL).get_parameter(n).ndim > 1 else 0.0) for n, value in decay.items())


def test_stages_can_be_frozen():
    model = BiT(SMALL)
    freeze(model, ["stem", "stages.0"])
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if name.startswith(("stem.", "stages.0."))}
    with pytest.raises(UsageError, match=r"stages\.0, stages\.1, stem"):
        freeze(model, ["blocks.0"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_takes_it(optimizer):
    model = random_network(SMALL).train()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    steps = OptimizerSet(model, Run(optimizer=optimizer))
    model(random_images(32, 32)).square().sum().backward()
    steps.set_lr(0.01)
    steps.step()
    assert [name for name, parameter in model.named_parameters() if torch.equal(before[name], parameter)] == []


def test_weights_come_back(tmp_path):
    shape = dataclasses.replace(SMALL, image_size=(24, 32))
    model = random_network(shape)
    weights = native.Weights(shape, model.state_dict(), Preprocessing((24, 32)), tuple("abcde"), {})
    native.save(tmp_path / "m.safetensors", weights)
    read = native.read(tmp_path / "m.safetensors")
    assert read.config == shape
    again = native.build(read)
    assert not again.training
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in again.parameters())
    with torch.no_grad():
        assert torch.equal(again(random_images(24, 32)), model(random_images(24, 32)))


@pytest.fixture(scope="module")
def small_names():
    """BiT-R50x1 with two stages of one bottleneck, for runs of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RESNETS, 50, (1, 1))
        yield


@pytest.mark.slow
def test_the_commands_take_it(small_names, make_images, tmp_path, capsys):
    photos = str(
        make_images({"train/cat": 6, "train/dog": 6, "val/cat": 2, "val/dog": 2, "test/cat": 2, "test/dog": 2})
    )
    options = ["--image-size", "16", "--epochs", "1", "--batch-size", "4", "--device", "cpu", "--layer-decay", "0.9"]
    out = str(tmp_path / "run")
    assert main(["train", photos, "--model", "BiT-R50x1", "--out", out, "--freeze", "stages.0", *options]) == 0
    plan = json.loads((tmp_path / "run/config.json").read_text())["plan"]
    assert "muon is for the matrices" in json.dumps(plan)
    state = native.read(tmp_path / "run" / "model.safetensors").config
    assert state == config("BiT-R50x1", image_size=16, classes=2)
    for command in (["evaluate", out], ["predict", out, photos], ["summary", out]):
        assert main(command) == 0, capsys.readouterr().err
    assert "stages.1" in capsys.readouterr().out
    assert main(["train", photos, "--init", out, "--out", str(tmp_path / "again"), "--epochs", "1", *options[4:]]) == 0
    assert vitral.load(tmp_path / "again").model.config == state


@pytest.mark.parametrize("how", ["--model", "--init"])
def test_unsupported_options_of_a_resnet(small_names, make_images, tmp_path, capsys, how):
    photos, weights = str(make_images({"cat": 4, "dog": 4})), tmp_path / "m.safetensors"
    shape = config("BiT-R50x1", image_size=16, classes=2)
    state = BiT(shape).state_dict()
    native.save(weights, native.Weights(shape, state, Preprocessing((16, 16)), ("cat", "dog"), {}))
    source = "BiT-R50x1" if how == "--model" else str(weights)
    for flag in ("heads", "dropout"):
        assert main(["train", photos, how, source, f"--{flag}", "0" if flag == "dropout" else "4"]) == 2
        told = capsys.readouterr().err
        assert f"has no {flag}" in told or f"--{flag} " in told
        assert "is a bug in vitral" not in told


REFUSED = {
    "option of a ViT": (lambda: config("BiT-R50x1", heads=4), "BiT-R50x1 has no heads", "it has image_size"),
    "misspelt option": (lambda: config("BiT-R50x1", clases=4), "unknown model option 'clases'", "classes"),
    "depth": (lambda: config("BiT-R51x1"), "unknown model 'BiT-R51x1'", "BiT-R50x1"),
    "width": (lambda: config("BiT-R50x5"), "unknown model 'BiT-R50x5'", "BiT-R50x1"),
    "no layers": (lambda: BiTConfig(layers=()), "must be positive: layers", ""),
    "empty stage": (lambda: BiTConfig(layers=(1, 0)), "must be positive: layers", ""),
    "layers in a string": (lambda: BiTConfig(layers="11"), "layers cannot be '11'", ""),
    "size": (lambda: BiTConfig(image_size=0), "must be positive: image_size", ""),
    "classes": (lambda: BiTConfig(classes=-1), "classes cannot be negative", ""),
    "numerics": (lambda: BiTConfig(numerics="keras"), "unknown numerics 'keras'", "big_vision"),
    "kind": (lambda: config_from_json({"kind": "vgg"}), "unknown kind of network 'vgg'", "bit"),
    "kind of a kind": (lambda: config_from_json({"kind": ["vit"]}), "unknown kind of network", ""),
    "no mapping": (lambda: config_from_json([1]), "names and values", ""),
    "field of another kind": (lambda: config_from_json({"kind": "bit", "heads": 3}), "unknown field .*'heads'", ""),
    "channels": (lambda: BiT(SMALL)(torch.zeros(1, 1, 32, 32)), "wrong shape", "3, 32, 32"),
}


@pytest.mark.parametrize(("request_", "message", "hint"), REFUSED.values(), ids=REFUSED)
def test_refusal(request_, message, hint):
    with pytest.raises(UsageError) as caught:
        request_()
    text = str(caught.value)
    assert re.search(message, text, re.DOTALL), text
    assert hint in text
    assert len(text.splitlines()) <= 5
