"""Networks of other libraries: converted to vitral, or used as they are; compared with captum."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from captum.attr import InputXGradient, IntegratedGradients, LayerGradCam
from PIL import Image
from torch import Tensor, nn

import vitral
from images import noise
from vitral.errors import UsageError, WeightsError
from vitral.explanation.methods import METHODS
from vitral.explanation.methods.any_network import to_grid

METHODS_FOR_ALL = [name for name, one in METHODS.items() if one.any_network]
FEW: dict[str, dict[str, Any]] = {
    "rise": {"masks": 8},
    "smoothgrad": {"samples": 2},
    "integrated-gradients": {"steps": 2},
}
IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
TARGET = 3


@pytest.fixture(scope="module")
def resnet() -> nn.Module:
    torch.manual_seed(0)
    return torchvision.models.resnet18(num_classes=10).eval()


@pytest.fixture(scope="module")
def vit() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", depth=2, num_heads=6, img_size=64, num_classes=10).eval()


def stacked(maps: list[vitral.Heatmap]) -> Tensor:
    return torch.stack([torch.from_numpy(one.values) for one in maps])


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


# ---------------------------------------------------------------- captum


def test_input_gradient_is_captums(resnet: nn.Module):
    wanted = InputXGradient(resnet).attribute(IMAGES.clone().requires_grad_(), target=TARGET).detach()
    found = vitral.explain(resnet, IMAGES, TARGET, method="input-gradient", grid=(64, 64))
    close(stacked(found), wanted.sum(1))
    cells = vitral.explain(resnet, IMAGES, TARGET, method="input-gradient")
    assert cells[0].values.shape == (16, 16)
    close(stacked(cells), wanted.sum(1).unflatten(2, (16, 4)).unflatten(1, (16, 4)).sum((2, 4)))


def test_integrated_gradients_are_captums(resnet: nn.Module):
    wanted = IntegratedGradients(resnet).attribute(IMAGES, target=TARGET, n_steps=16, method="gausslegendre").detach()
    found = vitral.explain(resnet, IMAGES, TARGET, method="integrated-gradients", grid=(64, 64), steps=16)
    close(stacked(found), wanted.sum(1).float())


@pytest.mark.parametrize("layer", ["layer4", "layer3", "layer2.0.bn1", "layer3.1.conv2", "conv1"])
def test_grad_cam_is_captums(resnet: nn.Module, layer: str):
    """Of `bn1`, which a ReLU writes into, too."""
    wanted = LayerGradCam(resnet, resnet.get_submodule(layer)).attribute(IMAGES, target=TARGET, relu_attributions=True)
    found = vitral.explain(resnet, IMAGES, TARGET, layer=layer)
    assert found[0].method == "grad-cam"
    close(stacked(found), wanted[:, 0].detach())


# ---------------------------------------------------------------- layouts


def test_grad_cam_of_tokens_is_that_of_our_own(vit: nn.Module):
    """The input of our last block is the output of the block before it."""
    ours = vitral.explain(vit, IMAGES, TARGET, method="grad-cam")
    theirs = vitral.explain(vit, IMAGES, TARGET, method="grad-cam", layer="blocks.0")
    assert theirs[0].values.shape == (4, 4)
    close(stacked(theirs), stacked(ours))
    asked = vitral.explain(vit, IMAGES, TARGET, layer="blocks.0", prefix=1)
    close(stacked(asked), stacked(ours))


def test_grad_cam_of_channels_last():
    torch.manual_seed(0)
    swin = torchvision.models.swin_t(num_classes=10).eval()
    assert vitral.explain(swin, IMAGES, layer="features.5")[0].values.shape == (4, 4)


@pytest.mark.parametrize(
    ("shape", "image", "prefix", "grid"),
    [
        ((1, 5, 4, 8), (32, 64), None, (4, 8)),
        ((1, 4, 8, 5), (32, 64), None, (4, 8)),
        ((1, 33, 5), (32, 64), None, (4, 8)),
        ((1, 37, 5), (32, 64), None, (4, 8)),
        ((1, 9, 5), (32, 32), None, (3, 3)),
        ((1, 9, 5), (32, 32), 5, (2, 2)),
    ],
)
def test_layouts(shape: tuple[int, ...], image: tuple[int, int], prefix: int | None, grid: tuple[int, int]):
    places, found = to_grid(torch.zeros(shape), torch.zeros(1, 3, *image), prefix)
    assert found == grid
    assert places.shape == (1, grid[0] * grid[1], 5)


# ---------------------------------------------------------------- what is read as ours


@pytest.mark.parametrize("method", METHODS)
def test_every_method_for_a_network_that_is_read(vit: nn.Module, method: str):
    loaded = vitral.load(vit, precision="fp32", device="cpu")
    options = FEW.get(method, {})
    found = vitral.explain(vit, IMAGES, TARGET, method=method, **options)
    wanted = vitral.explain(loaded.model, IMAGES, TARGET, method=method, **options)
    close(stacked(found), stacked(wanted))


def test_files_for_a_network_that_is_read(vit: nn.Module, tmp_path: Path):
    Image.fromarray(noise(0, (70, 70))).save(tmp_path / "cat.png")
    [found] = vitral.explain(vit, tmp_path / "cat.png")
    assert (found.method, found.values.shape) == ("fullgrad+", (4, 4))
    with torch.no_grad():
        predictor = vitral.load(vit, precision="fp32", engine="plain")
        images = predictor.preprocessing.standardize(predictor.prepare(tmp_path / "cat.png")[None])
        assert found.probability == pytest.approx(float(vit(images).softmax(1)[0, found.target]), abs=1e-5)


@pytest.mark.slow
def test_labels_of_transformers():
    config = transformers.ViTConfig(
        hidden_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=96,
        image_size=64,
        id2label={0: "ant", 1: "bee"},
    )
    model = transformers.ViTForImageClassification(config)
    assert vitral.explain(model, IMAGES, "bee")[0].label == "bee"
    assert vitral.explain(model, IMAGES, "bee", layer="vit.layers.0.layernorm_before")[0].label == "bee"


def test_logits_in_an_answer_of_transformers():
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    model = transformers.ResNetForImageClassification(config)
    found = vitral.explain(model, IMAGES, 1, method="grad-cam", layer="resnet.encoder.stages.1")
    assert found[0].values.shape == (8, 8)


# ---------------------------------------------------------------- what is used as it is


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS_FOR_ALL)
def test_the_module_stays_as_it_was(method: str):
    torch.manual_seed(0)
    module = torchvision.models.resnet18(num_classes=10).train()
    module.layer1.eval()
    module.conv1.weight.requires_grad_(False)
    module.fc.register_forward_hook(lambda part, inputs, output: output * 2)
    before = _state(module)
    options = {"layer": "layer4"} if method == "grad-cam" else {**FEW.get(method, {}), "grid": (4, 4)}
    maps = vitral.explain(module, IMAGES, [1, 2], method=method, **options)
    assert [one.target for one in maps] == [1, 2, 1, 2]
    with pytest.raises(UsageError):
        vitral.explain(module, IMAGES, 99, method=method, **options)
    after = _state(module)
    assert all(torch.equal(after["tensors"][name], tensor) for name, tensor in before["tensors"].items())
    assert {**after, "tensors": None} == {**before, "tensors": None}


def test_the_module_that_is_read_stays_as_it_was(vit: nn.Module):
    vit.blocks[1].train()
    before = _state(vit)
    vitral.explain(vit, IMAGES, method="generic")
    vitral.explain(vit, IMAGES, layer="blocks.0.norm1")
    after = _state(vit)
    vit.eval()
    assert all(torch.equal(after["tensors"][name], tensor) for name, tensor in before["tensors"].items())
    assert {**after, "tensors": None} == {**before, "tensors": None}


def _state(module: nn.Module) -> dict[str, Any]:
    return {
        "training": [part.training for part in module.modules()],
        "hooks": [(len(p._forward_hooks), len(p._forward_pre_hooks), len(p._backward_hooks)) for p in module.modules()],
        "gradients": [(p.requires_grad, p.grad is None) for p in module.parameters()],
        "vars": [sorted(vars(part)) for part in module.modules()],
        "tensors": {name: tensor.clone() for name, tensor in module.state_dict().items()},
    }


@pytest.mark.slow
def test_check(resnet: nn.Module):
    [found] = vitral.explain(resnet, IMAGES[0], TARGET, layer="layer2", check=True)
    assert isinstance(found.checks["believable"], bool)


def test_occlusion_is_what_is_lost(resnet: nn.Module):
    [found] = vitral.explain(resnet, IMAGES[0], TARGET, method="occlusion", grid=(2, 2))
    hidden = IMAGES[:1].clone()
    hidden[:, :, :32, 32:] = 0
    with torch.no_grad():
        wanted = float((resnet(IMAGES[:1]) - resnet(hidden))[0, TARGET])
    assert found.values[0, 1] == pytest.approx(wanted, abs=1e-5)


# ---------------------------------------------------------------- refusals


class Dense(nn.Module):
    """Returns an image for an image."""

    def forward(self, images: Tensor) -> Tensor:
        return images


def _refusal(call: Callable[[], object]) -> UsageError:
    with pytest.raises(UsageError) as refused:
        call()
    assert len(str(refused.value).splitlines()) <= 5
    return refused.value


def test_methods_with_attention_are_refused_with_alternatives(resnet: nn.Module):
    error = _refusal(lambda: vitral.explain(resnet, IMAGES, method="rollout"))
    assert "'rollout' cannot explain this network" in error.what
    assert "ResNet is not a Vision Transformer" in str(error.why)
    assert all(name in str(error.hint) for name in METHODS_FOR_ALL)


def test_a_misspelled_layer(resnet: nn.Module):
    error = _refusal(lambda: vitral.explain(resnet, IMAGES, layer="layer5"))
    assert error.what == "unknown layer 'layer5'"
    assert "nearest: layer" in str(error.why)


def test_no_layer(resnet: nn.Module):
    error = _refusal(lambda: vitral.explain(resnet, IMAGES, method="grad-cam"))
    assert error.hint == "layer='layer4'"
    assert "layer2, layer3, layer4" in str(error.why)


def test_layers_that_cannot_be_explained(resnet: nn.Module, vit: nn.Module):
    assert "no grid over the image" in _refusal(lambda: vitral.explain(resnet, IMAGES, layer="fc")).what
    assert "no gradient reaches" in _refusal(lambda: vitral.explain(vit, IMAGES, layer="blocks.1")).what
    assert "prefix" in str(_refusal(lambda: vitral.explain(vit, IMAGES, layer="blocks.0", prefix=3)).hint)
    unused = nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.Flatten(), nn.Linear(256, 5))
    unused.add_module("idle", nn.Identity())
    unused.forward = lambda images: unused[2](unused[1](unused[0](images)))
    assert "computed nothing" in _refusal(lambda: vitral.explain(unused, IMAGES, layer="idle")).what


def test_unknown_options(resnet: nn.Module, vit: nn.Module):
    error = _refusal(lambda: vitral.explain(resnet, IMAGES, method="smoothgrad", sample=3))
    assert error.what == "unknown option of 'smoothgrad' 'sample'"
    assert "libra" in _refusal(lambda: vitral.explain(resnet, IMAGES, method="input-gradient", libra=True)).what
    assert "no option 'steps'" in _refusal(lambda: vitral.explain(vit, IMAGES, method="generic", steps=3)).what
    assert "no grid" in _refusal(lambda: vitral.explain(resnet, IMAGES, grid=(100, 1))).what


def test_images_without_known_preprocessing(resnet: nn.Module, tmp_path: Path):
    error = _refusal(lambda: vitral.explain(resnet, tmp_path / "cat.png"))
    assert "standardized tensors (B, C, H, W)" in error.what
    assert "not a Vision Transformer" in str(error.why)
    ours = vitral.create("S/8", classes=3, image_size=64)
    assert "standardized tensors" in _refusal(lambda: vitral.explain(ours, "cat.png")).what


def test_no_network():
    error = _refusal(lambda: vitral.explain(IMAGES, IMAGES))  # type: ignore[arg-type]
    assert (error.what, "vitral.load" in str(error.hint)) == ("cannot explain a Tensor, only a network", True)
    with pytest.raises(WeightsError, match="no such run or weights"):
        vitral.explain("runs/photos", IMAGES)


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning", "ignore:.torch.jit:DeprecationWarning")
def test_a_scripted_network_has_no_layers(resnet: nn.Module):
    scripted = torch.jit.trace(resnet, IMAGES)
    close(
        stacked(vitral.explain(scripted, IMAGES, TARGET, method="input-gradient")),
        stacked(vitral.explain(resnet, IMAGES, TARGET, method="input-gradient")),
    )
    assert "no accessible layers" in _refusal(lambda: vitral.explain(scripted, IMAGES, layer="layer4")).what


def test_images_of_other_channels(resnet: nn.Module):
    error = _refusal(lambda: vitral.explain(resnet, IMAGES[:, :1]))
    assert error.what == "ResNet cannot compute images of the shape (2, 1, 64, 64)"
    assert "channels" in str(error.why)


def test_no_classifier():
    assert "is no classifier" in _refusal(lambda: vitral.explain(Dense(), IMAGES)).what


def test_without_parameters():
    """The logits are sums of parts of the image."""
    network = nn.Sequential(nn.AvgPool2d(32), nn.Flatten())
    [found] = vitral.explain(network, IMAGES[0], 0, grid=(2, 2))
    assert found.values == pytest.approx((IMAGES[0, 0, :32, :32].mean() * torch.tensor([[1.0, 0], [0, 0]])).numpy())
