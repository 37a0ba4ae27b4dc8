"""A network of vitral in memory whose settings differ from its configuration is stopped, naming the setting."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vitral
from images import noise
from vitral.errors import UsageError, WeightsError
from vitral.model import BiTConfig, DecoderConfig, EncoderDecoderConfig, ForeignConfig, ViTConfig, network
from vitral.model.position import POSITIONS, Rope
from vitral.model.settings import SWITCHES, changed_setting, settings_of
from vitral.weights.load import read

SIZES: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 16,
    "classes": 5,
    "dim": 32,
    "depth": 2,
    "heads": 2,
    "mlp_dim": 48,
}
CONFIGS: dict[str, Any] = {
    "vit": ViTConfig(**SIZES),
    "parts": ViTConfig(
        **SIZES,
        qk_norm=True,
        attn_norm=True,
        mlp_norm=True,
        layer_scale=0.1,
        norm_pre=True,
        pre_logits=True,
        registers=1,
        position="sincos",
        rope=Rope(offset=0.5),
    ),
    "map": ViTConfig(**SIZES, pool="map", final_norm="pooled"),
    "distilled": ViTConfig(**SIZES, dist_token=True),
    "stem": ViTConfig(**SIZES, conv_stem=((8, 2), (16, 2)), conv_pool=True),
    "hybrid": ViTConfig(**SIZES, stem=(1,)),
    "bit": BiTConfig(image_size=32, classes=5, layers=(1, 1)),
    "text": EncoderDecoderConfig(
        ViTConfig(**{**SIZES, "classes": 0}),
        DecoderConfig(vocabulary=12, length=5, dim=32, depth=1, heads=2, mlp_dim=48),
    ),
    "foreign": ForeignConfig("timm:resnet10t", image_size=32, classes=5),
}


@functools.cache
def built(name: str) -> Any:
    torch.manual_seed(0)
    return network(CONFIGS[name]).eval()


def other(value: object) -> object:
    """A value that differs from this one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, tuple):
        return (*value, 1)
    return F.relu if isinstance(value, str) else "another"


def settings(model: nn.Module) -> list[tuple[str, str]]:
    """Module and name of every setting, one module of each kind."""
    first = {}
    for name, part in model.named_modules():
        for setting in settings_of(part):
            first.setdefault((type(part), setting), (name, setting))
    return list(first.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_every_setting_is_carried_or_stopped(name):
    assert changed_setting(built(name)) == ""
    for part, setting in settings(built(name)):
        if setting in ("config", "backend") or (part, setting) == ("head", "out_features"):
            continue  # below
        model = copy.deepcopy(built(name))
        module = model.get_submodule(part)
        value = vars(module)[setting]
        vars(module)[setting] = other(value)
        if setting in SWITCHES:
            assert vars(read(model).build().get_submodule(part))[setting] == other(value)
            continue
        shown = f"{part}.{setting}" if part else setting
        with pytest.raises((WeightsError, UsageError)) as caught:
            read(model)
        assert f"'{shown}'" in str(caught.value), (part, setting)


def test_a_configuration_is_carried_with_what_it_changes():
    """The forward pass reads it; what the modules were built with must agree."""
    model = network(ViTConfig(**SIZES, logits_tanh=True)).eval()
    images = torch.randn(1, 3, 32, 32)
    model.config = ViTConfig(**SIZES, logits_tanh=True, logit_scale=3.0)
    with torch.no_grad():
        assert torch.equal(read(model).build()(images), model(images))
    model.config = ViTConfig(**SIZES, norm_eps=0.1)
    with pytest.raises(WeightsError, match=r"'blocks\.0\.norm1\.eps' is 1e-06, not 0\.1"):
        read(model)


def replaced_position(model: Any) -> None:
    model.position = POSITIONS["none"]


def rotary_base(model: Any) -> None:
    model._tables.rotary = Rope(base=50.0)


def own_tanh(model: Any) -> None:
    model.tanh = torch.sigmoid


def gradient(model: Any) -> None:
    model.blocks[0].attn.scale = nn.Parameter(torch.tensor(0.3))


def tensor(model: Any) -> None:
    model.blocks[0].attn.scale = torch.tensor(0.3)


def callable_backend(model: Any) -> None:
    model.blocks[1].attn.backend = functools.partial(F.scaled_dot_product_attention, is_causal=True)


def no_head(model: Any) -> None:
    model.head = nn.Identity()


def removed(model: Any) -> None:
    del model.blocks[1]


def sequential(model: Any) -> None:
    model.blocks[0].mlp.fc1 = nn.Sequential(model.blocks[0].mlp.fc1, nn.Tanh())


EDITS = {
    replaced_position: "position",
    rotary_base: "_tables",
    own_tanh: "tanh",
    gradient: "blocks.0.attn.scale",
    tensor: "blocks.0.attn.scale",
    callable_backend: "blocks.1.attn.backend",
    no_head: "head",
    removed: "blocks.1",
    sequential: "blocks.0.mlp.fc1",
}


@pytest.mark.parametrize("edit", EDITS)
def test_other_edits_are_stopped_everywhere(edit, tmp_path):
    model = copy.deepcopy(built("vit"))
    edit(model)
    for call in (
        lambda: vitral.load(model),
        lambda: vitral.convert(model, tmp_path / "a.safetensors", to="native"),
        lambda: read(model, classes=7, new_head=True),
    ):
        with pytest.raises(WeightsError, match="cannot compute this network") as caught:
            call()
        assert f"'{EDITS[edit]}" in str(caught.value)


def test_plain_layers_and_notes_of_the_user_are_no_edits():
    model = copy.deepcopy(built("vit"))
    layer = model.blocks[0].attn.proj
    model.blocks[0].attn.proj = nn.Linear(32, 32)
    model.blocks[0].attn.proj.load_state_dict(layer.state_dict())
    model.remark = {"run": 7}
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(read(model).build()(images), model(images), atol=1e-6)


# ---- heads


def with_head(outputs: int, name: str = "vit") -> Any:
    model = copy.deepcopy(built(name))
    model.head = nn.Linear(model.head.in_features, outputs)
    return model


@pytest.mark.parametrize("name", ["vit", "bit"])
@pytest.mark.parametrize("outputs", [7, 3, 1])
def test_a_replaced_head_needs_names(name, outputs):
    model = with_head(outputs, name)
    with pytest.raises(UsageError, match=rf"{outputs} outputs.*5 classes") as caught:
        vitral.load(model)
    assert "classes=[" in caught.value.hint
    with pytest.raises(UsageError, match=f"{outputs} outputs"):
        vitral.explain(model, torch.randn(1, 3, 32, 32))


@pytest.mark.parametrize("name", ["vit", "bit"])
def test_names_are_given_with_a_replaced_head(name):
    model, names = with_head(7, name), list("gfedcba")
    predictor = vitral.load(model, classes=names, device="cpu", precision="fp32")
    assert predictor.classes == tuple(names)
    image = noise(0, (32, 32), 3)
    pixels = predictor.preprocessing.standardize(predictor.prepare(image)[None])
    with torch.no_grad():
        wanted = names[int(model(pixels).argmax())]
    assert predictor(image).label == wanted
    assert vitral.load(model, classes=7).classes == tuple("0123456")
    assert predictor.account.notes == ("preprocessing assumed: not stated by the module",)


def test_names_are_given_to_a_network_in_memory():
    assert vitral.load(built("vit"), classes=list("edcba")).classes == tuple("edcba")
    timm = pytest.importorskip("timm")
    module = timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=32, depth=1)
    assert vitral.load(module, classes=list("edcba")).classes == tuple("edcba")
    for bad in (list("abc"), "abcde", list("aabcd"), [1, 2, 3, 4, 5], []):
        with pytest.raises(UsageError):
            vitral.load(built("vit"), classes=bad)
    with pytest.raises(UsageError, match="no names yet"):
        vitral.load(built("vit"), classes=list("abc"), new_head=True)
    with pytest.raises(UsageError, match="are requested"):
        vitral.load(built("vit"), classes=7)


def test_names_of_a_file_are_its_own(tmp_path):
    vitral.convert(built("vit"), tmp_path / "a.safetensors", to="native")
    with pytest.raises(UsageError, match="already contain the names of their classes"):
        vitral.load(tmp_path / "a.safetensors", classes=list("edcba"))


@pytest.mark.parametrize("engine", ["auto", "plain", "packed"])
@pytest.mark.parametrize("outputs", [7, 3])
def test_a_head_replaced_in_a_predictor_is_stopped(engine, outputs, tmp_path):
    predictor = vitral.load(copy.deepcopy(built("vit")), engine=engine, device="cpu", precision="fp32")
    image = noise(0, (32, 32), 3)
    predictor(image)
    predictor.model.head = nn.Linear(32, outputs)
    calls = [
        lambda: predictor(image),
        lambda: predictor.probabilities([image]),
        lambda: list(predictor.stream([image])),
        lambda: vitral.explain(predictor, image),
        lambda: vitral.evaluate(predictor, tmp_path),
    ]
    for call in calls:
        with pytest.raises(UsageError, match=f"{outputs} outputs, and there are names for 5 classes"):
            call()
    predictor.model.head = nn.Linear(32, 5)
    assert predictor(image).probabilities.shape == (5,)
