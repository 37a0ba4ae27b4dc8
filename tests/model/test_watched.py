"""A module that is hooked, pruned, parametrized, patched or offloaded computes what PyTorch alone would.

Each module in turn, in every kind of network, beside the same network without kernels and with a whole last block.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.utils as old
from tiny import SHAPE
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.flop_counter import FlopCounterMode

from vitral.kernels import dense, reference_ops
from vitral.model import BiT, BiTConfig, DecoderConfig, EncoderDecoder, EncoderDecoderConfig, ViT, ViTConfig
from vitral.model.position import Rope
from vitral.model.watched import is_watched, pooled_queries

TEXT = DecoderConfig(vocabulary=11, length=5, dim=16, depth=1, heads=2, mlp_dim=24, memory_dim=16)

KINDS: dict[str, Callable[[], nn.Module]] = {
    "class token": lambda: ViT(ViTConfig(**SHAPE)),
    "registers": lambda: ViT(ViTConfig(**SHAPE, registers=2, layer_scale=0.5, qk_norm=True, position="rotary")),
    "distilled": lambda: ViT(ViTConfig(**SHAPE, dist_token=True)),
    "map": lambda: ViT(ViTConfig(**SHAPE, pool="map", cls_token=False, activation="swiglu")),
    "mean": lambda: ViT(ViTConfig(**SHAPE, pool="mean", final_norm="pooled", rope=Rope("mixed"), position="none")),
    "post-norm": lambda: ViT(ViTConfig(**SHAPE, norm="post", final_norm="none", pre_logits=True, activation="silu")),
    "inner norms": lambda: ViT(ViTConfig(**SHAPE, attn_norm=True, mlp_norm=True, norm_pre=True, norm="res-post")),
    "hybrid": lambda: ViT(ViTConfig(**SHAPE | {"patch_size": 8, "image_size": 16}, stem=(1, 1))),
    "conv-stem": lambda: ViT(ViTConfig(**SHAPE, conv_stem=((6, 1), (8, 2), (10, 2)))),
    "bit": lambda: BiT(BiTConfig(image_size=32, classes=5, layers=(1, 1))),
    "text": lambda: EncoderDecoder(EncoderDecoderConfig(ViTConfig(**SHAPE | {"classes": 0}), TEXT)),
}
OFTEN = ("class token", "distilled", "text")
kinds = pytest.mark.parametrize("kind", [pytest.param(k, marks=[] if k in OFTEN else pytest.mark.slow) for k in KINDS])


def built(kind: str, *, plain: bool = False, dtype: torch.dtype = torch.float64) -> Any:
    """A network with random weights; `plain` by PyTorch alone."""
    torch.manual_seed(0)
    model = KINDS[kind]().to(dtype).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    if plain:
        reference_ops(model)
        for part in model.modules():
            if isinstance(part, ViT):
                part.prune_last_block = False
    return model


def given(model: Any) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(2, 3, *model.config.image, generator=generator).to(next(model.parameters()).dtype)
    return (images, torch.tensor([[1, 5, 2], [1, 7, 3]])) if isinstance(model, EncoderDecoder) else (images,)


def modules(kind: str) -> list[str]:
    """Names of all modules that are called: not lists of modules."""
    return [name for name, part in KINDS[kind]().named_modules() if not isinstance(part, nn.ModuleList)]


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.detach()]
    return [one for part in value for one in tensors(part)] if isinstance(value, tuple) else []


class Kept:
    """Hooks that keep what they see of a module."""

    def __init__(self, part: nn.Module, *, backward: bool):
        self.seen: dict[str, list[list[Tensor]]] = {"before": [], "after": [], "backward": []}
        part.register_forward_pre_hook(lambda _, inputs: self.seen["before"].append(tensors(inputs)))
        part.register_forward_hook(lambda _, __, output: self.seen["after"].append(tensors(output)))
        if backward:
            part.register_full_backward_hook(lambda _, __, out: self.seen["backward"].append(tensors(out)))


@kinds
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of images, which have no gradient
@pytest.mark.parametrize("gradient", [False, True])
def test_hooks_see_what_they_would_without_kernels(kind, gradient):
    for name in modules(kind):
        found = []
        for plain in (False, True):
            model = built(kind, plain=plain)
            kept = Kept(model.get_submodule(name), backward=gradient)
            with torch.set_grad_enabled(gradient):
                output = model(*given(model))
            if gradient:
                output.square().sum().backward()
            assert len(kept.seen["before"]) == len(kept.seen["after"]) == 1, f"{name} was called once"
            assert len(kept.seen["backward"]) == gradient, name
            found.append([*kept.seen.values(), output.detach()])
        torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def scaled(value: Any) -> Any:
    return (scaled(value[0]), *value[1:]) if isinstance(value, tuple) else value * 1.5


def pruned(part: nn.Module) -> None:
    prune.l1_unstructured(part, "weight", 0.5)
    part.weight_orig.data.mul_(1.5)  # as a file of weights that is loaded afterwards


def parametrized(part: nn.Module) -> None:
    parametrize.register_parametrization(part, "weight", Twice())
    part.parametrizations.weight.original.data.mul_(1.5)


def weight_norm(part: nn.Module) -> None:
    parametrizations.weight_norm(part)
    part.parametrizations.weight.original0.data.mul_(1.5)


def spectral_norm(part: nn.Module) -> None:
    parametrizations.spectral_norm(part.train())


def old_weight_norm(part: nn.Module) -> None:
    old.weight_norm(part)
    part.weight_g.data.mul_(1.5)


def old_spectral_norm(part: nn.Module) -> None:
    old.spectral_norm(part.train())


def patched(part: nn.Module) -> None:
    forward = part.forward
    part.forward = lambda *given, **options: scaled(forward(*given, **options))  # type: ignore[method-assign]


def offloaded(part: nn.Module) -> None:
    """As accelerate does: a patched `forward` fetches the tensors, and leaves none behind."""
    kept, forward = dict(part._parameters), part.forward

    def leave() -> None:
        part._parameters.update({n: p if p is None else nn.Parameter(p.detach().to("meta")) for n, p in kept.items()})

    def fetched(*given: Any, **options: Any) -> Any:
        part._parameters.update({n: p if p is None else nn.Parameter(p.detach()) for n, p in kept.items()})
        output = forward(*given, **options)
        leave()
        return output

    part.forward = fetched  # type: ignore[method-assign]
    leave()


def offloaded_by_hooks(part: nn.Module) -> None:
    """As parallel training does: hooks fetch the tensors, and leave none behind."""
    kept = dict(part._parameters)

    def move(device: str) -> None:
        moved = {n: p if p is None else nn.Parameter(p.detach().to(device)) for n, p in kept.items()}
        part._parameters.update(moved)

    part.register_forward_pre_hook(lambda *_: move("cpu"))
    part.register_forward_hook(lambda *_: move("meta"))
    move("meta")


def has_matrix(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear | nn.Conv2d | nn.Embedding)


def has_weight(part: nn.Module) -> bool:
    return isinstance(part._parameters.get("weight"), Tensor)


CHANGES: dict[Callable[[Any], None], Callable[[nn.Module], bool]] = {
    pruned: has_weight,
    parametrized: has_weight,
    weight_norm: has_matrix,
    spectral_norm: has_matrix,
    old_weight_norm: has_matrix,
    old_spectral_norm: has_matrix,
    patched: lambda part: True,
    offloaded: lambda part: bool(part._parameters),
    offloaded_by_hooks: lambda part: bool(part._parameters),
}


def changed(
    kind: str, change: Callable[[Any], None], dtype: torch.dtype = torch.float64
) -> Iterator[tuple[str, Any, Any]]:
    """Each module to which a change applies: its name, the changed network, and the same by PyTorch alone."""
    for name, part in KINDS[kind]().named_modules():
        if CHANGES[change](part) and not isinstance(part, nn.ModuleList):
            both = built(kind, dtype=dtype), built(kind, plain=True, dtype=dtype)
            for model in both:
                torch.manual_seed(2)
                change(model.get_submodule(name))
            yield name, *both


@kinds
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_module_is_computed(kind, change):
    gradient = not change.__name__.startswith("offloaded")
    for name, model, plain in changed(kind, change):
        found = []
        for each in (model, plain):
            with torch.set_grad_enabled(gradient):
                output = each(*given(each))
                found.append([output.detach()])
            if gradient:
                output.square().sum().backward()
                found[-1] += [p.grad for p in each.parameters() if p.grad is not None]
                found[-1].append(each(*given(each)).detach())  # a second pass, after a first backward
        assert all(one.isfinite().all() for one in found[0]), name
        torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.skipif(not dense.self_test(), reason="this torch has no such operator here")
@pytest.mark.parametrize("change", [pruned, parametrized, old_weight_norm, patched], ids=lambda one: one.__name__)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`")
def test_kernels_compute_a_changed_layer(change, monkeypatch):
    """In bf16, where each dense layer has a kernel that takes its weights."""
    monkeypatch.setattr(dense, "_MIN_MULTIPLICATIONS", 1)
    unchanged = built("class token", dtype=torch.float32)
    for name, model, plain in changed("class token", change, torch.float32):
        if not isinstance(plain.get_submodule(name), nn.Linear | nn.Conv2d):
            continue
        with torch.autocast("cpu", torch.bfloat16):
            found, wanted, before = (one(*given(one)).detach().float() for one in (model, plain, unchanged))
        error = (found - wanted).norm()
        assert error < 0.05 * wanted.norm(), name
        assert error < 0.5 * (before - wanted).norm(), f"the change of {name} shows"


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_of_torchs_own_classes(kind):
    """Tools find them by type; a standardized convolution is another operation."""
    allowed = (nn.Linear, nn.LayerNorm, nn.GroupNorm, nn.BatchNorm2d, nn.Embedding, nn.ModuleList)
    for name, part in KINDS[kind]().named_modules():
        if isinstance(part, nn.Linear | nn.LayerNorm):
            assert type(part) in allowed, name
        if isinstance(part, nn.Conv2d) and not ("backbone" in name and kind == "hybrid") and kind != "bit":
            assert type(part) is nn.Conv2d, name


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per:UserWarning")  # torch.ao itself
def test_layers_found_by_type_are_quantized():
    model = built("class token", dtype=torch.float32)
    layers = [name for name, part in model.named_modules() if type(part) is nn.Linear]
    assert len(layers) == 9
    small = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert all("quantized" in type(small.get_submodule(name)).__module__ for name in layers)
    with torch.no_grad():
        found, wanted = small(*given(model)), model(*given(model))
    assert 0 < (found - wanted).norm() < 0.1 * wanted.norm()


def test_counters_of_operators_see_every_product(monkeypatch):
    monkeypatch.setattr(dense, "_MIN_MULTIPLICATIONS", 1)
    counts = []
    for plain in (False, True):
        model = built("mean", plain=plain, dtype=torch.bfloat16)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(*given(model))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


class Mixer(nn.Module):
    """A part of another library that mixes tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


def test_a_part_that_mixes_tokens_gets_all_of_them():
    found = []
    for plain in (False, True):
        model = built("class token", plain=plain)
        model.blocks[-1].norm2 = nn.Sequential(model.blocks[-1].norm2, Mixer())
        found.append(model(*given(model)))
    torch.testing.assert_close(*found)


def test_only_what_is_watched_computes_all_tokens():
    def own(*_: Any) -> None:
        return None

    model = built("class token")
    assert pooled_queries(model) == 1
    handle = model.blocks[0].register_forward_hook(own)
    assert pooled_queries(model) == 1, "of another block"
    for part in (model.blocks[-1].attn.qkv, model.blocks[-1], model.norm):
        for register in (part.register_forward_hook, part.register_full_backward_hook):
            handle = register(own)
            assert pooled_queries(model) is None
            handle.remove()
            assert pooled_queries(model) == 1
    model.blocks[-1].attn.observer = own
    assert pooled_queries(model) is None
    model.blocks[-1].attn.observer = None
    own.__module__ = "vitral.explanation.capture"
    model.blocks[-1].register_forward_hook(own)
    assert pooled_queries(model) == 1, "vitral says itself what its hooks need"
    assert not is_watched(copy.deepcopy(model).blocks[-1])
    with_hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert pooled_queries(model) is None
    with_hook.remove()
    with FlopCounterMode(display=False):
        assert pooled_queries(model) == 1, "what runs is counted"


@pytest.mark.slow
def test_a_compiled_network_is_one_graph_and_prunes_as_well():
    model = built("class token", dtype=torch.float32)
    nodes = []
    for pruning in (True, False):
        model.prune_last_block = pruning
        torch._dynamo.reset()
        graphs: list[Any] = []
        compiled = torch.compile(model, backend=lambda graph, _, into=graphs: into.append(graph) or graph.forward)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*given(model)), model(*given(model)))
        assert len(graphs) == 1
        nodes.append(str(graphs[0].code))
    assert nodes[0] != nodes[1]
