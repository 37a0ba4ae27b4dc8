"""Fused blocks, patches, heads and int8 layers for prediction, by the kernels of `cpu`."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from test_cpu import drawn, near, there
from tiny import SHAPE, moderate
from torch import Tensor

from running import in_child
from vitral.errors import UsageError
from vitral.inference.engines import int8, openvino
from vitral.inference.engines.int8 import observe, quantized
from vitral.inference.engines.packed import packed
from vitral.inference.predictor import int8_engine
from vitral.kernels import cpu
from vitral.model import ViT, ViTConfig, create

pytestmark = there

WIDE = SHAPE | {"dim": 80, "heads": 5, "mlp_dim": 112, "image_size": 32, "depth": 3}
"""Five heads of 16; no multiples of the 64 columns that lie side by side."""

PLAIN = {
    "paper": {},
    "mean": {"pool": "mean"},
    "tanh": {"activation": "gelu-tanh"},
    "registers": {"registers": 3},
    "layer-scale": {"layer_scale": 0.1},
    "scale-by-width": {"attention_scale": "model"},
    "no-bias": {"qkv_bias": False, "proj_bias": False},
    "narrow": {"dim": 32, "heads": 2, "mlp_dim": 48},
    "panels": {"dim": 128, "heads": 2},
    "oblong": {"image_size": (16, 24), "patch_size": (8, 2)},
    "many-classes": {"classes": 37},
    "distilled": {"dist_token": True},
}
OTHER = {
    "post-norm": {"norm": "post"},
    "swiglu": {"activation": "swiglu"},
    "rotary": {"position": "rotary"},
    "qk-norm": {"qk_norm": True},
    "narrow-heads": {"heads": 10},
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def of(changes: dict[str, object], count: int = 5) -> tuple[ViT, Tensor]:
    model = moderate(ViTConfig(**WIDE | changes)).bfloat16()
    torch.manual_seed(0)
    return model, torch.randn(count, 3, *model.config.image).bfloat16()


def fused_blocks(network: ViT) -> list[bool]:
    blocks: list[int8._Block] = list(network.blocks)  # type: ignore[arg-type]  # as are those of `packed`
    return [block.fused is not None for block in blocks]


def in_pieces(network: ViT) -> ViT:
    for block in network.blocks:
        block.__dict__["whole"] = None
    return network


@pytest.mark.parametrize("pruned", [True, False])
@pytest.mark.parametrize("name", PLAIN)
def test_a_fused_block_equals_its_parts(name, pruned):
    model, images = of(PLAIN[name])
    model.prune_last_block = pruned
    with torch.inference_mode():
        twin, exact = packed(model), copy.deepcopy(model).double()(images.double())
        assert all(fused_blocks(twin))
        found, pieces = twin(images), in_pieces(packed(model))(images)
    assert near(found, pieces, 0.01)
    assert near(found, exact, 0.02)


@pytest.mark.parametrize("name", OTHER)
def test_other_blocks_are_not_fused(name):
    model, images = of(OTHER[name])
    with torch.inference_mode():
        twin = packed(model)
        ranges = observe(model, [images])
        assert name == "rotary" or (not any(fused_blocks(twin)) and not any(fused_blocks(quantized(model, ranges))))
        assert near(twin(images), model(images), 0.03)
        assert near(quantized(model, ranges)(images), model(images), 0.1)


@pytest.mark.parametrize("name", PLAIN)
def test_integers_are_those_of_onednn(name, monkeypatch):
    if int8.unavailable_reason():
        pytest.skip(int8.unavailable_reason())
    model, images = of(PLAIN[name])
    ranges = observe(model, [images])
    with torch.inference_mode():
        ours = quantized(model, ranges)
        assert all(fused_blocks(ours))
        found, pieces = ours(images), in_pieces(quantized(model, ranges))(images)
        monkeypatch.setattr(cpu, "supports_linear", lambda *_, **__: False)
        theirs = quantized(model, ranges)
        assert not any(fused_blocks(theirs))
        wanted, exact = theirs(images), copy.deepcopy(model).double()(images.double())
    # Numbers on the edge between two integers fall on either side, so each differs from each as from the truth.
    distance = (wanted.double() - exact).norm()
    for each in (found, pieces):
        assert (each.double() - exact).norm() < 1.3 * distance + 0.005 * exact.norm()


@pytest.mark.real
@pytest.mark.parametrize("by", [packed, "integers"])
def test_a_batch_is_its_images_on_any_number_of_threads(by):
    """More rows than a block processes at a time, and not a multiple of that."""
    model, images = of({"image_size": 64, "depth": 2}, count=9)
    assert 9 * 257 > 1536
    network = packed(model) if by is packed else quantized(model, observe(model, [images]))

    @torch.inference_mode()
    def compare() -> int:
        together = network(images)
        torch.set_num_threads(3)
        assert torch.equal(network(images), together)
        assert torch.equal(torch.cat([network(one) for one in images.split(1)]), together)
        assert network(images[:0]).shape == (0, model.config.classes)
        return 0

    assert in_child(compare) == 0


@pytest.mark.parametrize("by", [packed, "integers"])
def test_masks(by):
    model, images = of({})
    mask = torch.ones(5, 64, dtype=torch.bool)
    mask[:, 7:] = False
    ranges = observe(model, [images])
    network = packed(model) if by is packed else quantized(model, ranges)
    within = 0.03 if by is packed else 0.1
    with torch.inference_mode():
        assert near(network(images, mask), model(images, mask), within)
        assert not near(network(images, mask), network(images), within)


@pytest.mark.parametrize("by", [packed, "integers"])
def test_copies_and_originals_that_change(by):
    model, images = of({})
    ranges = observe(model, [images])
    tokens = torch.randn(2, 9, 80).bfloat16()

    def through(network: ViT) -> Tensor:
        x = tokens
        for block in network.blocks:
            x = block(x, None, None, None)
        return x

    with torch.inference_mode():
        network = packed(model) if by is packed else quantized(model, ranges)
        wanted = through(network)
        twin = copy.deepcopy(network)
        for part in model.parameters():
            part.fill_(torch.nan)
        model.float()
        del model, part
        others = [torch.full((1 << 16,), torch.nan) for _ in range(50)]  # where what was given up may have been
        assert torch.equal(through(network), wanted)
        del others, network
        assert torch.equal(through(twin), wanted)


def test_unsupported_inputs_are_refused():
    model, images = of({})
    with torch.inference_mode():
        network = packed(model)
        for wrong in (images.float(), images.half()):
            with pytest.raises(RuntimeError, match=r"want torch\.bfloat16"):
                network(wrong)
        with pytest.raises(RuntimeError, match=r"want torch\.bfloat16"):
            network.blocks[0].mlp_branch(torch.randn(2, 3, 80))
        with pytest.raises(RuntimeError, match="of width 80"):
            network.blocks[0].attention_branch(torch.randn(2, 3, 64).bfloat16(), None, None, None)
        with pytest.raises(RuntimeError, match="tokens are"):
            network.blocks[0].attention_branch(torch.randn(200, 80).bfloat16(), None, None, None)
        for wrong in (images.repeat(1, 2, 1, 1), images[:, :, :30], images[..., :31]):
            with pytest.raises(RuntimeError, match="no patches of 4×4"):
                network.patch_embed(wrong)
        turned = images.transpose(2, 3)
        assert torch.equal(network(turned), network(turned.contiguous()))
        assert network(images).view(-1).shape == (25,)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(network(images.float()), network(images))
        nothing = torch.randn(2, 0, 80).bfloat16()
        assert network.blocks[0].attention_branch(nothing, None, None, None).shape == (2, 0, 80)
    with pytest.raises(RuntimeError, match="there are no gradients"):
        network(images.requires_grad_())


def test_images_without_pixels_are_refused():
    model, _ = of({"position": "sincos"})
    for network in (model, packed(model)):
        for shape in ((1, 3, 0, 32), (1, 3, 32, 0)):
            with torch.inference_mode(), pytest.raises(UsageError, match="not divisible by patch size"):
                network(torch.zeros(shape).bfloat16())


def test_modified_heads_and_patches_are_not_packed():
    class Halved(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / 2

    def replaced(model: ViT) -> None:
        head = Halved(80, 5).bfloat16()
        head.load_state_dict(model.head.state_dict())
        model.head = head

    def hooked(model: ViT) -> None:
        model.head.register_forward_hook(lambda *found: found[2] / 2)

    def pruned(model: ViT) -> None:
        torch.nn.utils.prune.l1_unstructured(model.head, "weight", 0.5)

    def normed(model: ViT) -> None:
        torch.nn.utils.parametrizations.weight_norm(model.head)

    def watched(model: ViT) -> None:
        model.patch_embed.proj.register_forward_hook(lambda *found: found[2] / 2)

    def overridden(model: ViT) -> None:
        inner = model.patch_embed.forward
        model.patch_embed.forward = lambda *given: inner(*given) / 2  # type: ignore[method-assign]

    for change in (replaced, hooked, pruned, normed, watched, overridden):
        model, images = of({})
        before = copy.deepcopy(model)
        change(model)
        with torch.inference_mode():
            wanted = model(images)
            assert change is normed or not near(wanted, before(images), 0.03), change
            assert near(packed(model)(images), wanted, 0.03), change


@pytest.mark.parametrize("by", [packed, "integers"])
def test_the_form_of_gelu(by):
    """erf and tanh forms differ by 0.0005 at most, so weights amplify the difference."""
    found = []
    for activation in ("gelu", "gelu-tanh"):
        model, images = of({"activation": activation, "depth": 1})
        block, tokens = model.blocks[0], torch.randn(1, 500, 80).bfloat16()
        block.mlp.fc2.weight.data.fill_(1.0)
        network = packed(model) if by is packed else quantized(model, observe(model, [images]))
        with torch.inference_mode():
            twin = network.blocks[0].mlp_branch(tokens.float() if by != packed else tokens).double()
            exact = copy.deepcopy(block).double().mlp_branch(tokens.double())
        found.append((twin, exact))
    (by_erf, exact_by_erf), (by_tanh, exact_by_tanh) = found
    difference = (exact_by_tanh - exact_by_erf).flatten()
    # what ours differ by goes the way in which they ought to
    assert (by_tanh - by_erf).flatten() @ difference > 0.5 * difference @ difference


@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 16, 16), (7, 48, 80), (197, 384, 208), (50, 3072, 64)])
def test_products_of_integers_are_exact(rows, depth, columns):
    x, weight = torch.randint(0, 256, (rows, depth)).byte(), torch.randint(-127, 128, (columns, depth)).char()
    x[0], weight[0] = 255, 127  # the largest sum there is
    step, zero, steps, bias = 0.02, 117, torch.rand(columns) * 0.01, torch.randn(columns)
    steps[0] = 0.01  # so that the largest sum is beyond 8 bits
    layer = cpu.int8_layer(weight, steps, bias, step, zero)
    sums = (x.double() - zero) @ weight.double().T
    wanted = sums * (steps.double() * step) + bias.double()
    found = cpu.dense_int8(x, layer, torch.float32)
    assert torch.allclose(found.double(), wanted, rtol=1e-6, atol=1e-5)
    assert torch.equal(cpu.dense_int8(x, layer, torch.bfloat16), found.bfloat16())
    other = torch.randn(rows, columns)
    assert torch.equal(cpu.dense_int8(x, layer, torch.float32, other=other), found + other)
    for form in ("none", "tanh"):
        raised = F.gelu(found.double(), approximate=form)
        whole = cpu.dense_int8(x, layer, torch.uint8, gelu=form, quantization=(0.05, 5))
        edge = raised / 0.05 + 5
        assert ((whole.double() - edge.clamp(0, 255)).abs() < 0.501).all()
    assert whole.min() < 6
    assert whole.max() == 255


@pytest.mark.parametrize("form", ["none", "tanh"])
def test_gelu_of_large_values(form):
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e30, -1e30, 5.5, -5.5, 5.49, -5.49, 100.0] * 4)
    one = cpu.pack(torch.eye(16).bfloat16())
    bias = x[:16].bfloat16()
    found = cpu.dense_gelu(torch.zeros(1, 16).bfloat16(), one, 16, bias, form == "tanh")[0]
    wanted = F.gelu(bias.double(), approximate=form)
    wanted[bias == -torch.inf] = 0.0  # torch's by erf is NaN
    assert torch.allclose(found.double(), wanted, rtol=0.005, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("shape", [(1, 12, 20, 4, 4), (3, 32, 48, 16, 8), (2, 12, 40, 6, 20), (3, 224, 224, 16, 16)])
def test_patches_are_a_convolution(shape):
    C, H, W, p, q = shape
    images, weight, bias = drawn(9, C, H, W), drawn(48, C, p, q), drawn(48)
    layer = cpu.Layer(48, C * p * q, cpu.pack(weight.flatten(1)), bias)
    wanted = F.conv2d(images.double(), weight.double(), bias.double(), stride=(p, q)).flatten(2).transpose(1, 2)
    assert near(cpu.patches(images, (p, q), layer), wanted)


def test_patches_of_49_values_use_torch():
    model, images = of({"image_size": 28, "patch_size": 7, "channels": 1})
    images = images[:, :1].contiguous()
    with torch.inference_mode():
        twin = packed(model)
        assert twin.patch_embed is model.patch_embed
        assert near(twin(images), model(images), 0.02)


def test_these_kernels_come_first_in_int8(monkeypatch):
    monkeypatch.setattr(openvino, "installed", lambda: True)
    monkeypatch.setattr(openvino, "unsupported_reason", lambda _: "")
    model, _ = of({})
    assert int8_engine(model) == "int8"
    assert int8_engine(model.float()) == "openvino"
    for changes in OTHER.values():
        assert int8_engine(of(changes)[0]) == "openvino"


def test_named_networks():
    for name, size in (("Ti/16", 224), ("mu/4", 32)):
        model = create(name, image_size=size, classes=10).eval().bfloat16()
        torch.nn.init.normal_(model.head.weight, std=0.1)
        images = torch.randn(2, 3, size, size).bfloat16()
        with torch.inference_mode():
            twin = packed(model)
            assert all(fused_blocks(twin))
            assert near(twin(images), model.float()(images.float()), 0.03)
