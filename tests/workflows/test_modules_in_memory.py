"""Test networks of other libraries in place of a run, a file or a predictor."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
import torchvision
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import vitral
from images import noise
from vitral.errors import UsageError, WeightsError


@pytest.fixture
def module() -> nn.Module:
    torch.manual_seed(0)
    built = timm.create_model("vit_tiny_patch16_224", depth=1, num_heads=6, num_classes=2, img_size=32, in_chans=3)
    built.pretrained_cfg["label_names"] = ["ant", "bee"]
    return built.eval()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number, name in enumerate(("ant", "bee") * 3):
        (tmp_path / "photos" / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(number, (40, 40))).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


def test_load_and_predictor(module: nn.Module, photos: Path):
    image = photos / "ant" / "0.png"
    found = vitral.load(module, precision="fp32", device="cpu")
    images = found.preprocessing.standardize(found.prepare(image)[None])
    with torch.no_grad():
        wanted = module(images).softmax(1)[0].numpy()
    assert found(image).probabilities == pytest.approx(wanted, abs=1e-5)
    assert found.classes == ("ant", "bee")
    assert found.preprocessing.image_size == (32, 32)
    assert found.account is not None
    assert any("images prepared as 32×32" in note for note in found.account.notes)
    direct = vitral.Predictor(module)
    assert direct(image).probabilities == pytest.approx(wanted, abs=0.02)  # perhaps in bf16
    assert direct.classes == found.classes
    assert direct.preprocessing == found.preprocessing


def test_a_predictor_is_accepted(module: nn.Module):
    found = vitral.load(module)
    assert vitral.load(found) is found
    with pytest.raises(UsageError, match="loaded already"):
        vitral.load(found, tta="mirror")


def test_a_network_of_vitral():
    network = vitral.create("S/4", classes=10, image_size=32)
    found = vitral.load(network)
    assert found.classes == tuple("0123456789")
    assert found.account is not None
    assert found.account.notes == (
        "preprocessing assumed: not stated by the module",
        "class names assumed: not stated by the module",
    )
    assert found.model is not network
    assert network.training


def test_evaluate(module: nn.Module, photos: Path):
    found = vitral.evaluate(module, photos)
    predictor = vitral.load(module, precision="fp32", device="cpu")
    files = sorted(photos.rglob("*.png"))
    right = [predictor(file).label == file.parent.name for file in files]
    assert found.accuracy == sum(right) / len(files)
    with pytest.raises(UsageError, match="weights without a run") as refused:
        vitral.evaluate(module)
    assert refused.value.hint == "vitral evaluate WEIGHTS DATA, or data=DATA in Python"


def test_inspect(module: nn.Module, photos: Path):
    found = vitral.inspect(module, photos)
    assert found.facts["heads"].startswith("6")
    assert found.attention is not None
    assert vitral.inspect(module, torch.zeros(1, 3, 32, 32)).attention is not None
    with pytest.raises(WeightsError, match="is not a Vision Transformer"):
        vitral.inspect(torchvision.models.resnet18())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_convert(module: nn.Module, tmp_path: Path, layout: torch.memory_format):
    account = vitral.convert(module.to(memory_format=layout), tmp_path / "timm", to="timm")
    assert {line.fate for line in account.lines} == {"loaded"}
    images = torch.randn(2, 3, 32, 32)
    again = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(images), module(images), rtol=2e-5, atol=2e-5)


def test_int8_needs_a_file(module: nn.Module):
    with pytest.raises(UsageError, match="not computed in int8"):
        vitral.load(module, precision="int8")


def test_a_resnet_is_refused_with_an_alternative():
    with pytest.raises(WeightsError) as refused:
        vitral.load(torchvision.models.resnet18())
    assert "is not a Vision Transformer" in str(refused.value.why)
    assert "vitral.explain(module, images" in str(refused.value.hint)


def test_another_size_and_head(module: nn.Module):
    found = vitral.load(module, image_size=64, classes=3, new_head=True)
    assert found.model.config.image == (64, 64)
    assert found.classes == ("0", "1", "2")


def test_the_module_is_not_modified(module: nn.Module, photos: Path):
    module.train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    vitral.load(module)(photos / "ant" / "0.png")
    vitral.evaluate(module, photos)
    assert all(part.training for part in module.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_without_create_model(photos: Path):
    """A timm class that is called directly has no `pretrained_cfg`."""
    found = vitral.load(VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=1, num_heads=4, num_classes=2))
    assert found.account is not None
    assert any("assumed: AugReg's default (the module does not state it)" in note for note in found.account.notes)
