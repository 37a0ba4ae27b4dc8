"""Names that people of timm expect of a network: width of the features, another classifier, maps of inner layers."""

from __future__ import annotations

import pytest
import torch

import vitral
from vitral.errors import UsageError
from vitral.model.settings import changed_setting

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("changes", [{}, {"pool": "mean", "cls_token": False}, {"dist_token": True, "registers": 2}])
def test_a_classifier_is_reset(changes):
    model = vitral.create("mu/4", classes=3, image_size=16, head_bias_init=-2.0, **changes)
    model.reset_classifier(7)
    fresh = vitral.create("mu/4", classes=7, image_size=16, head_bias_init=-2.0, **changes)
    assert model.state_dict().keys() == fresh.state_dict().keys()
    assert model.config == fresh.config
    assert not changed_setting(model)
    assert model(IMAGES).equal(torch.full((2, 7), -2.0))
    assert model.head.in_features == model.num_features
    model.reset_classifier(0)
    assert model(IMAGES).shape == (2, model.num_features)
    model.reset_classifier(4)
    assert model(IMAGES).shape == (2, 4)
    with pytest.raises(UsageError, match="negative"):
        model.reset_classifier(-1)


def test_a_new_classifier_has_the_device_and_type_of_the_network():
    model = vitral.create("mu/4", classes=3, image_size=16).double()
    model.reset_classifier(2)
    assert model(IMAGES.double()).dtype == torch.float64


def test_a_resnet_has_the_same_names():
    model = vitral.BiT(vitral.BiTConfig(image_size=32, classes=2, layers=(1, 1)))
    model.reset_classifier(5)
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 5)
    assert model.num_features == model.head.in_features


@pytest.mark.parametrize("changes", [{}, {"position": "rotary", "registers": 1}])
def test_maps_are_the_tokens_after_blocks(changes):
    model = vitral.create("mu/4", image_size=16, **changes).eval()
    depth = len(model.blocks)
    after = []
    hooks = [block.register_forward_hook(lambda _, __, out: after.append(out)) for block in model.blocks]
    last = model.encode(IMAGES)
    for hook in hooks:
        hook.remove()
    maps = model.features(IMAGES, [0, -1, depth - 1])
    for found, tokens in zip(maps, (after[0], last, last), strict=True):
        patches = tokens[:, model.config.prefix :]
        torch.testing.assert_close(found.flatten(2).transpose(1, 2), patches)
    assert maps[0].shape == (2, model.config.dim, 4, 4)
    with pytest.raises(UsageError, match=f"of a network of {depth} blocks"):
        model.features(IMAGES, [depth])


def test_features_of_a_layer_are_embedded():
    model = vitral.create("mu/4", classes=3, image_size=16, depth=2).eval()
    with torch.no_grad():
        model.blocks[1].mlp.fc2.bias.fill_(3.0)
    predictor = vitral.load(model, device="cpu", precision="fp32")
    image = (torch.arange(768) % 251).to(torch.uint8).reshape(16, 16, 3).numpy()
    (tokens,) = predictor.embed([image], tokens=True, layer=1)
    pixels = predictor.preprocessing.standardize(predictor.prepare(image)[None])
    (maps,) = model.features(pixels, layers=[1])
    torch.testing.assert_close(torch.from_numpy(tokens), maps[0].flatten(1).T)
    (mean,) = predictor.embed([image], layer=1)
    assert mean == pytest.approx(tokens.mean(0), abs=1e-5)
    assert predictor.embed([], layer=1).shape == (0, model.config.dim)
    with pytest.raises(UsageError, match="blocks"):
        predictor.embed([image], layer=99)
    bit = vitral.load(vitral.BiT(vitral.BiTConfig(image_size=16, classes=2, layers=(1, 1))), device="cpu")
    with pytest.raises(UsageError, match="no layers of BiT"):
        bit.embed([image], layer=0)
