"""Files that hold more than a network: the largest whole one is found, and the rest is reported by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from torchvision.models import VisionTransformer

import vitral
from images import noise
from running import as_json, printed
from vitral.errors import WeightsError
from vitral.weights.load import read

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def network(**options: Any) -> Any:
    torch.manual_seed(0)
    given = {"img_size": 32, "patch_size": 8, "embed_dim": 192, "depth": 2, "num_heads": 3, "num_classes": 5}
    model = timm.models.VisionTransformer(**{**given, **options})
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.05
    return model.eval()


def below(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


def image_file(folder: Path) -> Path:
    Image.fromarray(noise(0)).save(folder / "image.png")
    return folder / "image.png"


def logits(path: Path, **options: Any) -> Tensor:
    with torch.no_grad():
        return read(path, **options).build().eval()(IMAGES)


HEADS = {"dino_head.mlp.0.weight": torch.ones(9, 192), "dino_head.last_layer.weight_v": torch.ones(5, 9)}
LOSSES = {"criterion.weight": torch.ones(5)}
WRAPPED = {
    "a wrapper and a loss": lambda own: {"state_dict": below("model.", own) | LOSSES, "epoch": 1},
    "torch's averaged model": lambda own: {"n_averaged": torch.tensor(10)} | below("module.", own),
    "an attribute": lambda own: below("vit.", own),
    "an attribute and metrics": lambda own: below("net.vit.", own) | {"val_accuracy.tp": torch.ones(3)},
    "two wrappers": lambda own: {"state_dict": below("module.model.", own) | {"loss_fn.pos_weight": torch.ones(5)}},
    "a loss beside the names themselves": lambda own: own | LOSSES | {"train_metrics.count": torch.ones(())},
    "a teacher's backbone": lambda own: {"teacher": below("backbone.", own) | HEADS},
    "teacher and student": lambda own: {
        "model": below("student.backbone.", {name: tensor + 1 for name, tensor in own.items()})
        | below("teacher.backbone.", own)
        | HEADS,
        "iteration": 5,
    },
    "averaged weights beside current ones": lambda own: (
        below("model.", {n: t + 1 for n, t in own.items()}) | below("ema_model.", own)
    ),
    "the same weights twice": lambda own: below("first.", own) | below("second.", own),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_the_network_is_found(name, tmp_path):
    model = network()
    torch.save(WRAPPED[name](model.state_dict()), tmp_path / "w.pth")
    torch.testing.assert_close(logits(tmp_path / "w.pth"), model(IMAGES), atol=2e-5, rtol=1e-5)


def test_what_is_left_out_is_named(tmp_path, capsys):
    torch.save({"state_dict": below("model.", network().state_dict()) | LOSSES}, tmp_path / "w.pth")
    report = read(tmp_path / "w.pth").account
    assert any("left out criterion.weight: no part of the network" in line for line in report.highlights())
    found = as_json(capsys, "convert", str(tmp_path / "w.pth"), str(tmp_path / "own.safetensors"))
    assert found["counts"]["left out"] == 1


def test_another_copy_is_taken_by_its_name(tmp_path, capsys):
    model = network()
    student = {name: tensor * 2 for name, tensor in model.state_dict().items()}
    save_file(below("student.vit.", student) | below("teacher.vit.", model.state_dict()), tmp_path / "w.safetensors")
    torch.testing.assert_close(logits(tmp_path / "w.safetensors"), model(IMAGES), atol=2e-5, rtol=1e-5)
    report = read(tmp_path / "w.safetensors").account
    assert "networks also there: 'student.vit'" in " ".join(report.notes)
    with pytest.warns(UserWarning, match="networks also there: 'student.vit'") as raised:
        vitral.load(tmp_path / "w.safetensors", device="cpu", precision="fp32")
    assert raised[0].filename == __file__
    _, said = printed(capsys, "predict", str(tmp_path / "w.safetensors"), str(image_file(tmp_path)))
    assert "WARNING networks also there: 'student.vit'" in said
    model.load_state_dict(student)
    for key in ("student.vit", "student.vit."):
        found = logits(tmp_path / "w.safetensors", weights_key=key)
        torch.testing.assert_close(found, model(IMAGES), atol=2e-5, rtol=1e-5)
    words = [str(tmp_path / "w.safetensors"), str(tmp_path / "a.safetensors"), "--weights-key", "student.vit"]
    printed(capsys, "convert", *words)
    torch.testing.assert_close(logits(tmp_path / "a.safetensors"), model(IMAGES), atol=2e-5, rtol=1e-5)
    with pytest.raises(WeightsError, match="no whole network below 'nothing'") as caught:
        read(tmp_path / "w.safetensors", weights_key="nothing")
    assert "'student.vit', 'teacher.vit'" in str(caught.value)


def test_two_equally_good_networks_are_refused_with_both_names(tmp_path):
    state = network().state_dict()
    save_file(below("left.", state) | below("right.", {n: t + 1 for n, t in state.items()}), tmp_path / "w.safetensors")
    with pytest.raises(WeightsError, match="2 networks in one file") as caught:
        read(tmp_path / "w.safetensors")
    assert "'left', 'right'" in str(caught.value)
    assert "--weights-key left" in str(caught.value)


def test_of_two_sizes_the_larger_is_taken(tmp_path):
    large, small = network(), network(embed_dim=64, num_heads=2)
    save_file(below("small.", small.state_dict()) | below("large.", large.state_dict()), tmp_path / "w.safetensors")
    torch.testing.assert_close(logits(tmp_path / "w.safetensors"), large(IMAGES), atol=2e-5, rtol=1e-5)


def test_an_unknown_part_among_the_names_is_no_loss(tmp_path):
    """It may belong to the arithmetic: nothing is left out by guessing."""
    save_file(network().state_dict() | {"adapter.weight": torch.ones(3)}, tmp_path / "w.safetensors")
    with pytest.raises(WeightsError, match="unknown format") as caught:
        read(tmp_path / "w.safetensors")
    assert "foreign: adapter.weight" in str(caught.value)


def test_nothing_is_called_near_that_shares_few_names(tmp_path):
    save_file({f"conv{i}.kernel": torch.ones(3) for i in range(9)}, tmp_path / "w.safetensors")
    with pytest.raises(WeightsError, match="unknown format") as caught:
        read(tmp_path / "w.safetensors")
    assert "nearest" not in str(caught.value)
    assert "conv0.kernel" in str(caught.value)


@pytest.mark.parametrize("heads", [torch.nn.Linear(64, 3), torch.nn.Sequential(torch.nn.Linear(64, 3))])
def test_a_replaced_head_of_torchvision(heads, tmp_path):
    torch.manual_seed(0)
    model = VisionTransformer(32, 8, 2, 4, 64, 128, num_classes=10)
    model.heads = heads
    torch.nn.init.normal_(model.conv_proj.weight, std=0.05)
    save_file(model.eval().state_dict(), tmp_path / "w.safetensors")
    found = logits(tmp_path / "w.safetensors", heads=4)
    torch.testing.assert_close(found, model(IMAGES), atol=2e-5, rtol=1e-5)


# ---------------------------------------------------------------- the grid


@pytest.mark.parametrize("registers", [0, 2])
@pytest.mark.parametrize(("size", "patch"), [((64, 96), 16), ((96, 64), 16), ((24, 40), 8), ((40, 56), 8)])
def test_the_given_size_decides_the_grid(size, patch, registers, tmp_path):
    """4 × 6 patches and a class token are as many positions as 5 × 5."""
    model = network(img_size=size, patch_size=patch, reg_tokens=registers)
    model.pos_embed.data *= 10
    images = torch.randn(2, 3, *size)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    with torch.no_grad():
        own = read(tmp_path / "w.safetensors", heads=3, image_size=size).build().eval()(images)
        torch.testing.assert_close(own, model(images), atol=2e-5, rtol=1e-5)


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(value, tmp_path, capsys):
    state = network().state_dict()
    state["blocks.1.mlp.fc1.bias"][0] = value
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(WeightsError, match="not finite") as caught:
        read(tmp_path / "w.safetensors")
    assert "blocks.1.mlp.fc1.bias" in str(caught.value)
    image = tmp_path / "a.png"
    _, err = printed(capsys, "predict", str(tmp_path / "w.safetensors"), str(image), code=2)
    assert "not finite" in err or "no such" in err
    words = ["convert", str(tmp_path / "w.safetensors"), str(tmp_path / "own.safetensors")]
    printed(capsys, *words, code=2)
    out, _ = printed(capsys, *words, "--allow-non-finite")
    assert "WARNING values that are not finite in blocks.1.mlp.fc1.bias" in out


def test_values_of_a_part_that_is_left_out_do_not_matter(tmp_path):
    state = below("model.", network().state_dict()) | {"loss.x": torch.tensor(float("nan"))}
    save_file(state, tmp_path / "w.safetensors")
    assert read(tmp_path / "w.safetensors").build()
