"""Kernels for CPUs with AVX512_BF16, compared with torch in fp64, and their compilation."""

from __future__ import annotations

import copy
import dataclasses
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from running import in_child
from vitral.data.images.preprocessing import Preprocessing
from vitral.inference.engines.packed import packed
from vitral.inference.predictor import Predictor
from vitral.kernels import cpu, cpu_library, fused, reference_ops
from vitral.kernels.dense import linear
from vitral.model import create
from vitral.model.vit import MLP, ViT

there = pytest.mark.skipif(not cpu.ready(), reason="needs an AMD CPU with AVX512_BF16 and a C++ compiler")


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).bfloat16()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def near(found: Tensor, wanted: Tensor, within: float = 0.005) -> bool:
    return bool((found.double() - wanted.double()).norm() <= within * wanted.double().norm())


@there
@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [(1, 16, 16), (2, 48, 80), (37, 64, 96), (197, 384, 1536), (131, 512, 208), (3000, 32, 64)],
)
def test_dense_layers(rows, depth, columns):
    x, weight, bias, other = drawn(rows, depth), drawn(columns, depth), drawn(columns), drawn(rows, columns)
    right, wanted = cpu.pack(weight), x.double() @ weight.double().T
    assert near(cpu.dense(x, right, columns), wanted)
    assert torch.equal(cpu.dense(x, right, columns), cpu.dense(x, cpu.pack(weight.float()), columns))
    assert near(cpu.dense(x, right, columns, bias), wanted + bias.double())
    assert near(cpu.dense(x, right, columns, bias, other), wanted + bias.double() + other.double())
    back = cpu.dense(other, cpu.pack_transposed(weight), depth)
    assert near(back, other.double() @ weight.double())
    assert torch.equal(back, cpu.dense(other, cpu.pack_transposed(weight.float()), depth))
    slope, total = cpu.weight_gradient(other, x, bias=True)
    assert slope.dtype == torch.float32
    assert near(slope, other.double().T @ x.double(), 1e-5)
    assert total is not None
    assert near(total, other.double().sum(0), 1e-5)


@there
@pytest.mark.parametrize("form", ["none", "tanh"])
def test_gelu(form):
    x = torch.linspace(-12, 12, 48_000).reshape(-1, 48).bfloat16()
    one = cpu.pack(torch.eye(48).bfloat16())
    wide = x.double().requires_grad_()
    wanted = F.gelu(wide, approximate=form)
    (slope,) = torch.autograd.grad(wanted.sum(), wide)
    before, found = cpu.dense_then_gelu(x, one, 48, None, form == "tanh")
    assert torch.equal(before, x)
    assert torch.equal(found, cpu.dense_gelu(x, one, 48, None, form == "tanh"))
    assert torch.allclose(found.double(), wanted, rtol=0.005, atol=1e-6)
    back = cpu.gelu_backward(torch.ones_like(x), x, form == "tanh")
    assert torch.allclose(back.double(), slope, rtol=0.005, atol=1e-5)


SHAPES = [
    (2, 197, 6, 64),
    (1, 50, 3, 32),
    (1, 1, 1, 16),
    (1, 577, 2, 64),
    (3, 17, 2, 48),
    (1, 300, 1, 80),
    (1, 64, 2, 128),
]


@there
@pytest.mark.parametrize(("images", "tokens", "heads", "width"), SHAPES)
def test_attention_forward_and_backward(images, tokens, heads, width):
    qkv, scale = drawn(images, tokens, 3, heads, width), width**-0.5
    wide = qkv.double().requires_grad_()
    wanted = F.scaled_dot_product_attention(*wide.permute(2, 0, 3, 1, 4).unbind(), scale=scale)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
    found, lse = cpu.attention(q, k, v, scale, lse=True)
    assert lse is not None
    assert found.transpose(1, 2).is_contiguous()
    assert near(found, wanted)
    change = drawn(images, tokens, heads, width)
    (slope,) = torch.autograd.grad(wanted, wide, change.transpose(1, 2).double())
    assert near(cpu.attention_backward(qkv, found.transpose(1, 2), change, lse, scale), slope)


@there
def test_attention_of_few_queries_and_of_turned_ones():
    q, k, v = drawn(2, 3, 1, 64), drawn(2, 3, 90, 64), drawn(2, 90, 3, 64).transpose(1, 2)
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=0.1)
    assert near(cpu.attention(q, k, v, 0.1)[0], wanted)


@there
@pytest.mark.parametrize("size", [30.0, 3000.0])
def test_attention_with_scores_that_are_far_apart(size):
    qkv = drawn(1, 70, 3, 1, 64)
    qkv[:, :, 0] *= size
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
    found, lse = cpu.attention(q, k, v, 0.125, lse=True)
    assert near(found, F.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=0.125), 0.02)
    back = cpu.attention_backward(qkv, found.transpose(1, 2), drawn(1, 70, 1, 64), lse, 0.125)  # type: ignore[arg-type]
    assert back.isfinite().all()


@there
def test_nan_is_not_hidden():
    x = drawn(20, 64)
    x[3, 5] = torch.nan
    right = cpu.pack(drawn(32, 64))
    for found in (cpu.dense(x, right, 32), *cpu.dense_then_gelu(x, right, 32, None, False)):
        assert found[3].isnan().all()
        assert found[4].isfinite().all()
    assert cpu.gelu_backward(torch.ones_like(x), x, False).isnan().sum() == 1
    qkv = drawn(1, 20, 3, 1, 32)
    qkv[0, 7, 0] = torch.nan
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
    assert cpu.attention(q, k, v, 0.2)[0].isnan().any(-1).nonzero()[:, 2].tolist() == [7]


@pytest.mark.real
@there
def test_nothing_depends_on_threads_or_on_the_batch():
    x, weight, qkv = drawn(500, 128), drawn(192, 128), drawn(3, 90, 3, 2, 64)

    def all_of_it() -> list[Tensor]:
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        mixed, lse = cpu.attention(q, k, v, 0.1, lse=True)
        back = cpu.attention_backward(qkv, mixed.transpose(1, 2), mixed.transpose(1, 2), lse, 0.1)  # type: ignore[arg-type]
        out = cpu.dense(x, cpu.pack(weight), 192)
        return [out, *cpu.weight_gradient(out, x, True), mixed, back]  # type: ignore[list-item]

    def compare() -> int:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(all_of_it())
        assert all(torch.equal(a, b) for others in found[1:] for a, b in zip(found[0], others, strict=True))
        assert torch.equal(cpu.dense(x[7:8], cpu.pack(weight), 192), found[0][0][7:8])
        last = (each[2:] for each in qkv.permute(2, 0, 3, 1, 4).unbind())
        assert torch.equal(cpu.attention(*last, 0.1)[0], found[0][3][2:])
        return 0

    assert in_child(compare) == 0


@there
def test_no_rows():
    right = cpu.pack(drawn(32, 64))
    assert cpu.dense(drawn(0, 64), right, 32).shape == (0, 32)
    cpu.weight_gradient(drawn(0, 32), drawn(0, 64), bias=True)
    nothing = drawn(0, 2, 5, 32)
    assert cpu.attention(nothing, nothing, nothing, 1.0)[0].shape == (0, 2, 5, 32)


def by_reference(model: nn.Module) -> nn.Module:
    """Copy a module to use PyTorch's own operators."""
    twin = copy.deepcopy(model)
    reference_ops(twin)
    return twin


def network() -> ViT:
    torch.manual_seed(1)
    model = create("mu/4", image_size=32, classes=3, dim=128, heads=2, depth=2)
    torch.nn.init.normal_(model.head.weight)
    return model


@there
@pytest.mark.parametrize("activation", ["gelu", "gelu-tanh", "swiglu"])
def test_a_training_step_matches_torch(activation):
    model = create("mu/4", image_size=32, classes=3, dim=256, heads=4, depth=3, activation=activation).train()
    torch.nn.init.normal_(model.head.weight)  # from zeros nothing would go back
    images, found = torch.randn(32, 3, 32, 32), []
    for one in (by_reference(model), model):
        with torch.autocast("cpu", torch.bfloat16):
            one(images).float().square().sum().backward()
        found.append([p.grad for p in one.parameters() if p.grad is not None])
    assert len(found[0]) == len(list(model.parameters()))
    assert all(each.abs().max() > 0 for each in found[0])
    assert all(near(ours, torchs, 0.05) for torchs, ours in zip(*found, strict=True))


@there
def test_predictions_match_torch():
    model, images = network().eval().bfloat16(), torch.randn(5, 3, 32, 32).bfloat16()
    with torch.inference_mode():
        ours, twin, wanted = model(images), packed(model)(images), by_reference(model)(images)
    assert near(ours, wanted, 0.02)
    assert near(twin, wanted, 0.02)


def wide_layer() -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(2)
    return nn.Linear(512, 256).bfloat16(), drawn(256, 512)


@there
def test_errors_are_those_of_torch():
    layer, x = wide_layer()
    with pytest.raises(RuntimeError):
        layer(x[:, :256].repeat(4, 1))
    layer.bias = torch.nn.Parameter(torch.zeros(16).bfloat16())
    with pytest.raises(RuntimeError):
        layer(x)


@there
def test_weights_of_other_dtypes_use_torch():
    x = torch.randn(256, 512)
    half = MLP(dataclasses.replace(network().config, dim=512, mlp_dim=512)).half()
    with torch.autocast("cpu", torch.bfloat16):
        found = half(x)
    wanted = half.float()(x)
    assert near(found, wanted, 0.02)

    class Other(Tensor):
        pass

    layer, x = wide_layer()
    wanted = layer(x)
    layer.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(Other))
    assert not cpu.supports_linear(x, layer.weight)
    assert near(layer(x).as_subclass(Tensor), wanted)


@there
def test_strided_biases_and_heads():
    layer, x = wide_layer()
    for bias in (drawn(256, 2)[:, 0], drawn(1).expand(256)):
        wanted = x.double() @ layer.weight.double().T + bias.double()
        assert near(linear(x, layer.weight, bias), wanted)
    whole = drawn(2, 30, 3, 2, 96).requires_grad_()
    turned = drawn(2, 30, 64, 3, 2).requires_grad_()
    for leaf, qkv in ((whole, whole[..., :64]), (turned, turned.permute(0, 1, 3, 4, 2))):
        wide = qkv.detach().double().requires_grad_()
        wanted = F.scaled_dot_product_attention(*wide.permute(2, 0, 3, 1, 4).unbind(), scale=0.1)
        wanted = wanted.transpose(1, 2).flatten(2)
        found = fused.qkv_attention(qkv, 0.1)
        assert near(found, wanted)
        (ours,) = torch.autograd.grad(found.float().square().sum(), qkv)
        assert near(ours, torch.autograd.grad(wanted.square().sum(), wide)[0], 0.02)
        assert leaf.grad is None
    odd = drawn(1, 2, 30, 65)[..., :64]
    with torch.no_grad():
        assert not fused.supports_attention(odd, odd, odd)
        assert not fused.supports_attention(drawn(1, 2, 30, 32), drawn(1, 2, 30, 32), drawn(1, 2, 30, 64))


@there
def test_many_gradients_at_once():
    block, x = network().blocks[0].train().bfloat16(), drawn(64, 65, 128).requires_grad_()
    out, changes = block(x), drawn(2, 64, 65, 128)
    (found,) = torch.autograd.grad(out, x, changes, is_grads_batched=True, retain_graph=True)
    for change, ours in zip(changes, found, strict=True):
        assert near(ours, torch.autograd.grad(out, x, change, retain_graph=True)[0], 0.02)


@there
def test_a_bias_alone_is_trained():
    layer, x = wide_layer()
    layer.weight.requires_grad_(False)
    layer(x.repeat(2, 1)).float().sum().backward()
    assert near(layer.bias.grad, torch.full((256,), 512.0))
    one = nn.Linear(8192, 4096).bfloat16()
    one.weight.requires_grad_(False)
    one(drawn(8192)).float().sum().backward()
    assert near(one.bias.grad, torch.ones(4096))


@there
@pytest.mark.filterwarnings("default:.*leaf Tensor is being accessed:UserWarning")  # by torch's compiler
def test_backward_compiled_counted_or_recomputed():
    model, images = network().train(), torch.randn(32, 3, 32, 32)

    def gradient(how: Callable[[Tensor], object], again: bool = False) -> Tensor:
        model.zero_grad()
        model.checkpointing = again
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(images).float().square().sum()
        how(loss)
        return model.blocks[0].mlp.fc1.weight.grad.clone()

    def counted(loss: Tensor) -> None:
        with FlopCounterMode(display=False):
            loss.backward()

    wanted = gradient(Tensor.backward)
    assert wanted.abs().max() > 0
    assert near(gradient(torch.compile(lambda loss: loss.backward(), backend="eager")), wanted, 0.05)
    assert near(gradient(counted), wanted, 0.05)
    assert near(gradient(Tensor.backward, again=True), wanted, 0.05)


@there
@pytest.mark.filterwarnings("ignore")  # tracing is deprecated, and warns of sizes
def test_a_packed_network_refuses_unsupported_inputs():
    with torch.no_grad():
        twin = packed(network().eval().bfloat16().requires_grad_(False))
        with pytest.raises(RuntimeError, match=r"want torch\.bfloat16"):
            twin.blocks[0].attn.qkv(torch.randn(2, 128))
        with pytest.raises(RuntimeError, match="for prediction only: it cannot be traced"):
            torch.jit.trace(twin, torch.randn(1, 3, 32, 32).bfloat16())
        with (
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
            pytest.raises(RuntimeError, match="for prediction only: it cannot be traced"),
        ):
            twin(mode.from_tensor(torch.randn(1, 3, 32, 32).bfloat16()))


@there
def test_first_call_under_fake_tensors(monkeypatch):
    monkeypatch.setattr(cpu, "_self_test", cache(cpu._self_test.__wrapped__))
    with FakeTensorMode():
        assert not cpu.ready()
    with torch.device("meta"):
        assert cpu.ready()


@there
def test_patches_by_a_hooked_or_replaced_layer():
    model, images = network().eval().bfloat16(), torch.randn(64, 3, 32, 32).bfloat16()
    seen = []
    model.patch_embed.proj.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        wanted = model(images)
        model.patch_embed.proj = torch.nn.Sequential(model.patch_embed.proj)
        assert torch.equal(model(images), wanted)
    assert len(seen) == 2


@there
def test_a_gradients_gradient():
    x, found = torch.randn(64, 65, 128), []
    block = network().blocks[0].train().bfloat16()
    for one in (by_reference(block), block):
        tokens = x.bfloat16().requires_grad_()
        (slope,) = torch.autograd.grad(one(tokens).float().square().sum(), tokens, create_graph=True)
        found.append(torch.autograd.grad(slope.float().square().sum(), tokens)[0])
    assert near(found[1], found[0], 0.05)


@there
@pytest.mark.filterwarnings("default:.*torch.jit.script")  # torch's own formulas
def test_tracing_and_transforms_use_torch_operators(monkeypatch):
    def refused(*_: object) -> None:
        raise AssertionError("asked for")

    for name in ("dense", "dense_then_gelu", "attention"):
        monkeypatch.setattr(cpu, name, refused)
    block, x = network().blocks[0].train().bfloat16(), drawn(64, 65, 128)
    with pytest.raises(AssertionError, match="asked for"):
        block(x)
    torch.func.vmap(block)(x[None])
    torch.func.grad(lambda y: block(y).float().sum())(x)
    with torch.autograd.forward_ad.dual_level():
        block(torch.autograd.forward_ad.make_dual(x, x))
    torch.export.export(block, (x,), strict=False)
    with FlopCounterMode(display=False) as counter:
        block(x)
    assert counter.get_total_flops() >= 2 * 64 * 65 * sum(p.numel() for p in block.parameters() if p.ndim == 2)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert block(mode.from_tensor(x)).shape == x.shape
    assert torch.compile(block, backend="eager")(x).shape == x.shape


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++") or platform.machine() != "x86_64", reason="needs g++ for x86-64")
def test_the_source_compiles_without_a_warning(monkeypatch, tmp_path):
    """On any CPU; a failure would otherwise show only as slowness."""
    strict = ("-Wall", "-Wextra", "-Werror", "-Wno-uninitialized", "-Wno-maybe-uninitialized")  # GCC's own headers
    flags = [each for each in cpu_library._FLAGS if each != "-w"]
    monkeypatch.setattr(cpu_library, "_FLAGS", (*flags, *strict))
    assert cpu_library._compiled("g++", tmp_path).stat().st_size
    if cpu_library.is_supported():
        assert cpu.ready()


def test_without_a_compiler_torch_is_used(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr(cpu_library, "is_supported", lambda: True)
    monkeypatch.setattr(cpu, "load_library", cpu_library.load_library.__wrapped__)
    assert not cpu._self_test.__wrapped__()


def test_a_compiler_that_fails_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name: "/bin/false" if name == "g++" else None)
    with pytest.raises((OSError, subprocess.SubprocessError)):
        cpu_library.load_library.__wrapped__()
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.slow
@there
def test_it_is_compiled_once_and_a_damaged_file_is_replaced(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu_library.load_library.__wrapped__()
    (kept,) = tmp_path.rglob("*.so")
    written = kept.stat().st_mtime_ns
    cpu_library.load_library.__wrapped__()
    assert kept.stat().st_mtime_ns == written
    kept.unlink()  # not written over: it is mapped
    kept.write_bytes(b"")
    assert cpu_library.load_library.__wrapped__().dense
    assert [each.name for each in kept.parent.iterdir()] == [kept.name]


@pytest.mark.slow
@there
def test_a_cache_that_cannot_be_written_to(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cpu_library.load_library.__wrapped__().dense


def test_the_source_is_in_the_package():
    assert cpu_library.SOURCE.parent == Path(cpu.__file__).parent
    assert "extern" in cpu_library.SOURCE.read_text()


@pytest.mark.slow
@there
def test_the_compile_time_is_reported(tmp_path, monkeypatch):
    compiler = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))))
    monkeypatch.setattr(cpu_library, "_seconds", [])
    assert cpu_library.compile_note() == ""
    cpu_library._compiled(compiler, tmp_path)
    assert re.fullmatch(r"kernels for this CPU compiled in \d+\.\d s, cached", cpu_library.compile_note())
    cpu_library._seconds[:] = [6.5]
    assert "6.5 s" in Predictor(network().eval(), Preprocessing((32, 32)), ("a", "b", "c"), engine="packed").note
