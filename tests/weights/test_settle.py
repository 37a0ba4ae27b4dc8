"""Fields that tensors do not determine are stated, known from a published architecture, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from parity import randomized
from safetensors.torch import save_file
from torch import nn

import vitral
from vitral.cli.main import main
from vitral.errors import UsageError, WeightsError
from vitral.model import ViTConfig, config, network
from vitral.weights import native
from vitral.weights.load import read
from vitral.weights.loaded import Loaded

B = {"embed_dim": 768, "num_heads": 12, "depth": 1, "img_size": 32, "num_classes": 5}
CLIP = {"depth": 1, "img_size": 64, "num_classes": 5}


def bare(model: nn.Module, path: Path) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in randomized(model).state_dict().items()}, path)
    return path


def folder(model: nn.Module, path: Path, config: dict[str, Any]) -> Path:
    path.mkdir()
    bare(model, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def difference(loaded: Loaded, model: nn.Module) -> float:
    images = torch.randn(2, 3, *loaded.weights.config.image, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return float((loaded.build()(images) - model.eval()(images)).abs().max())


def torchvision_of(heads: int, dim: int) -> nn.Module:
    return torchvision.models.VisionTransformer(32, 8, 1, heads, dim, 4 * dim, num_classes=5)


def test_heads_of_an_unknown_width_must_be_stated(tmp_path: Path):
    model = torchvision_of(2, 128)
    path = bare(model, tmp_path / "tv.safetensors")
    with pytest.raises(WeightsError, match="number of heads") as caught:
        read(path)
    assert "--heads" in str(caught.value.hint)
    found = read(path, heads=2)
    assert difference(found, model) < 1e-5
    assert "heads" not in found.account.assumed.fields  # it was stated


def test_heads_of_a_published_width_are_assumed_and_reported(tmp_path: Path):
    found = read(bare(torchvision_of(12, 768), tmp_path / "tv.safetensors"))
    assert found.account.assumed.fields["heads"] == 12
    assert found.account.assumed.source == "torchvision's published networks"
    assert any("assumed, as in torchvision" in line for line in found.account.highlights())
    assert found.account.to_json()["assumed"]["fields"]["norm_eps"] == 1e-6
    assert found.weights.trained["assumed"] == found.account.to_json()["assumed"]


def test_the_plain_network_is_taken_and_the_others_are_named(tmp_path: Path):
    model = timm.create_model("vit_small_patch16_224", depth=1, img_size=32, num_classes=5)
    found = read(bare(model, tmp_path / "vit.safetensors"))
    assert difference(found, model) < 1e-5
    assert found.account.assumed.fields["heads"] == 6
    rope = timm.create_model("vit_small_patch16_rope_ape_224", depth=1, img_size=32, num_classes=5)
    found = read(bare(rope, tmp_path / "rope.safetensors"))
    assert "vit_small_patch16_rope_ape_224" in found.account.assumed.alternatives
    assert "--like timm:NAME" in str(found.account.assumed)
    assert difference(read(tmp_path / "rope.safetensors", like="timm:vit_small_patch16_rope_ape_224"), rope) < 1e-5


def test_networks_that_the_tensors_cannot_tell_apart_are_refused(tmp_path: Path):
    path = bare(timm.create_model("vit_base_patch16_clip_quickgelu_224", **CLIP), tmp_path / "clip.safetensors")
    with pytest.raises(WeightsError, match="no file states which") as caught:
        read(path)
    assert "vit_base_patch16_clip_224" in caught.value.why
    assert "vit_base_patch16_clip_quickgelu_224" in caught.value.why
    assert read(path, like="timm:vit_base_patch16_clip_quickgelu_224").weights.config.activation == "quick-gelu"
    assert read(path, like="vit_base_patch16_clip_224").weights.config.activation == "gelu"


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
def test_a_bare_file_of_transformers_clip_is_refused_and_read_with_its_config(activation: str, tmp_path: Path):
    sizes: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 1, "image_size": 32}
    config = transformers.CLIPVisionConfig(**sizes, patch_size=16, num_attention_heads=12, hidden_act=activation)
    transformers.CLIPVisionModel(config).save_pretrained(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "config.aside")
    with pytest.raises(WeightsError, match="cannot determine the arithmetic") as caught:
        read(tmp_path / "model.safetensors")
    assert "LAION's, gelu" in caught.value.why
    assert "config.json" in caught.value.hint
    (tmp_path / "config.aside").rename(tmp_path / "config.json")
    assert read(tmp_path).weights.config.activation == activation.replace("_", "-")


def test_a_name_that_is_not_that_of_the_tensors_is_refused(tmp_path: Path):
    path = bare(timm.create_model("vit_base_patch16_clip_224", **CLIP), tmp_path / "clip.safetensors")
    with pytest.raises(WeightsError, match="not weights of"):
        read(path, like="timm:vit_large_patch14_clip_224")
    with pytest.raises(WeightsError, match="unknown architecture 'vit_bse_patch16_224'") as caught:
        read(path, like="timm:vit_bse_patch16_224")
    assert "vit_base_patch16_224" in caught.value.why
    with pytest.raises(WeightsError, match="cannot compute 'vit_relpos_base_patch16_224'"):
        read(path, like="timm:vit_relpos_base_patch16_224")


def test_a_name_and_a_config_must_agree(tmp_path: Path):
    model = timm.create_model("vit_base_patch16_224", **B)
    path = folder(model, tmp_path / "vit", {"architecture": "vit_base_patch16_224", "model_args": {"img_size": 32}})
    with pytest.raises(WeightsError, match="not weights of 'vit_base_patch16_rpn_224'") as caught:
        read(path, like="timm:vit_base_patch16_rpn_224")
    assert "config.json beside the weights states 'vit_base_patch16_224'" in caught.value.why


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"act_layer": "mish"}, "act_layer"),
        ({"rope_temperature": 3.0}, "rope_temperature"),
        ({"num_heads": "6"}, "num_heads"),
        ({"global_pool": "avgmax"}, "global_pool"),
        ({"norm_layer": "rmsnorm"}, "norm_layer"),
        ([1], "model_args"),
    ],
)
def test_an_argument_that_is_not_honored_is_refused(given: Any, named: str, tmp_path: Path):
    model = timm.create_model("vit_base_patch16_224", **B)
    path = folder(model, tmp_path / "vit", {"architecture": "vit_base_patch16_224", "model_args": given})
    with pytest.raises(WeightsError, match="cannot honor the configuration") as caught:
        read(path)
    assert named in caught.value.why


def test_arguments_are_honored(tmp_path: Path):
    given = {**B, "num_heads": 8, "act_layer": "quick_gelu", "global_pool": "avg", "reg_tokens": 2}
    model = timm.create_model("vit_base_patch16_224", **given)
    found = read(folder(model, tmp_path / "vit", {"architecture": "vit_base_patch16_224", "model_args": given}))
    assert difference(found, model) < 1e-5
    assert found.account.assumed is None
    assert (found.weights.config.heads, found.weights.config.activation) == (8, "quick-gelu")


def test_assumptions_are_kept_in_the_written_file(tmp_path: Path, capsys):
    model = timm.create_model("vit_small_patch16_224", depth=1, img_size=32, num_classes=5)
    path = bare(model, tmp_path / "vit.safetensors")
    assert main(["convert", str(path), str(tmp_path / "own"), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["assumed"]["fields"]["heads"] == 6
    own = vitral.load(tmp_path / "own")
    assert "assumed, as in timm:" in str(own.account.assumed)
    assert own.account.assumed == read(path).account.assumed


def test_the_line_of_the_assumption_is_printed_before_predictions(tmp_path: Path, make_images, capsys):
    model = timm.create_model("vit_small_patch16_224", depth=1, img_size=32, num_classes=5)
    path = bare(model, tmp_path / "vit.safetensors")
    images = make_images({"cat": 1})
    assert main(["predict", str(path), str(images)]) == 0
    assert "assumed, as in timm:" in capsys.readouterr().err


NARROW = {"embed_dim": 48, "num_heads": 3, "depth": 1, "img_size": 32, "num_classes": 5}


def timm_folder(path: Path) -> Path:
    model = timm.create_model("vit_base_patch16_224", **NARROW)
    return folder(model, path, {"architecture": "vit_base_patch16_224", "model_args": NARROW})


def transformers_folder(path: Path) -> Path:
    shape = transformers.ViTConfig(
        hidden_size=48, num_attention_heads=3, num_hidden_layers=1, intermediate_size=96, image_size=32
    )
    model = transformers.ViTForImageClassification(shape)
    return folder(model, path, {"architectures": [type(model).__name__], **json.loads(shape.to_json_string())})


def own_file(path: Path) -> Path:
    shape = ViTConfig(image_size=32, patch_size=16, dim=48, depth=1, heads=3, mlp_dim=96, classes=5)
    native.save(path / "model.safetensors", read(network(shape)).weights)
    return path


STATED = {
    "timm": (timm_folder, "config.json"),
    "transformers": (transformers_folder, "config.json"),
    "own": (own_file, "vitral's own"),
}


@pytest.mark.parametrize("name", STATED)
def test_heads_that_a_file_states_are_not_overridden(name: str, tmp_path: Path):
    make, by = STATED[name]
    path = make(tmp_path / "weights")
    with pytest.raises(WeightsError, match="have 3 heads, not 6") as caught:
        vitral.load(path, heads=6)
    assert by in caught.value.why
    assert "--heads" in caught.value.hint
    equal = vitral.load(path, heads=3)
    assert equal.model.config.heads == 3
    assert not any("given" in line for line in equal.account.highlights())


def test_heads_of_tensors_that_have_an_axis_of_them_are_not_overridden(tmp_path: Path):
    path = tmp_path / "weights.npz"
    shape = ViTConfig(
        image_size=32, patch_size=16, dim=48, depth=1, heads=3, mlp_dim=96, classes=5, activation="gelu-tanh"
    )
    vitral.convert(network(shape), path, "jax")
    assert read(path, heads=3).weights.config.heads == 3
    with pytest.raises(WeightsError, match="have 3 heads, not 6") as caught:
        read(path, heads=6)
    assert "tensors" in caught.value.why


@pytest.mark.parametrize("given", [{"like": "timm:vit_base_patch16_224"}, {"format": "timm"}, {"heads": 6}])
def test_what_contradicts_our_own_weights_is_refused(given: dict[str, Any], tmp_path: Path):
    path = own_file(tmp_path / "own")
    for source in (path, path / "model.safetensors", read(path).build()):
        with pytest.raises(WeightsError, match=r"these (are not weights of|weights)") as caught:
            read(source, **given)
        assert f"{next(iter(given))} in Python" in caught.value.hint
        assert read(source, format="native", heads=3).weights.config.heads == 3


def test_the_command_line_refuses_what_contradicts_a_file(tmp_path: Path, capsys):
    path = own_file(tmp_path / "own")
    for words in (["--heads", "6"], ["--like", "timm:vit_base_patch16_224"], ["--from", "hf-vit"]):
        assert main(["convert", str(path), str(tmp_path / "out"), "--to", "timm", *words]) == 2
        assert f"leave out {words[0]}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_heads_that_the_name_of_an_architecture_states_are_not_overridden(tmp_path: Path):
    path = bare(timm.create_model("vit_small_patch16_224", depth=1, img_size=32), tmp_path / "vit.safetensors")
    with pytest.raises(WeightsError, match="have 6 heads, not 4"):
        read(path, like="timm:vit_small_patch16_224", heads=4)
    assert read(path, like="timm:vit_small_patch16_224", heads=6).weights.config.heads == 6


def test_what_only_the_user_states_is_reported_as_given(tmp_path: Path, capsys):
    model = torchvision_of(2, 128)
    path = bare(model, tmp_path / "tv.safetensors")
    assert "heads 2, given" in read(path, heads=2).account.highlights()
    small = timm.create_model("vit_small_patch16_224", depth=1, img_size=32)
    named = read(bare(small, tmp_path / "vit.safetensors"), like="timm:vit_small_patch16_224").account
    assert "as timm:vit_small_patch16_224, given" in named.to_json()["notes"]
    assert main(["convert", str(path), str(tmp_path / "own"), "--heads", "2"]) == 0
    assert "heads 2, given" in capsys.readouterr().out


def test_a_network_of_other_tensors_takes_no_architecture_of_timm(tmp_path: Path):
    with pytest.raises(WeightsError, match="no architecture of timm") as caught:
        read(transformers_folder(tmp_path / "hf"), like="timm:vit_base_patch16_224", heads=3)
    assert "hf-vit" in caught.value.why


def test_a_format_that_follows_no_config_is_refused_beside_one(tmp_path: Path):
    path = timm_folder(tmp_path / "vit")
    with pytest.raises(WeightsError, match="cannot honor the configuration") as caught:
        read(path, format="deit", heads=6)
    assert "'architecture'" in caught.value.why
    with pytest.raises(WeightsError, match="cannot honor the configuration"):  # even if it agrees
        read(path, format="deit", heads=3)


@pytest.mark.slow
def test_a_resnet_has_no_heads(tmp_path: Path):
    path = tmp_path / "bit.npz"
    vitral.convert(network(config("BiT-R50x1", image_size=32, classes=3)), path, "jax")
    with pytest.raises(WeightsError, match="have no heads, not 3") as caught:
        read(path, heads=3)
    assert "ResNet" in caught.value.why
    with pytest.raises(WeightsError, match="no architecture of timm"):
        read(path, like="timm:vit_base_patch16_224")


def test_heads_below_one_are_refused(tmp_path: Path):
    path = bare(torchvision_of(12, 768), tmp_path / "tv.safetensors")
    with pytest.raises(UsageError, match="at least 1, not 0"):
        read(path, heads=0)
