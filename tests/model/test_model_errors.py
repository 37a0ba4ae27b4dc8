"""Errors of the network: at most five lines, with a command to type."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from vitral.errors import UsageError
from vitral.model import ViTConfig, config, create, summarize

REFUSED = {
    "not divisible": (lambda: ViTConfig(image_size=225), r"225×225 is not divisible .*16×16", "--image-size 224"),
    "too small": (lambda: config("S/16", image_size=5), r"5×5 is not divisible", "--image-size 16"),
    "oblong": (lambda: ViTConfig(image_size=(33, 60), patch_size=(8, 16)), r"33×60", "32×64"),
    "heads": (lambda: ViTConfig(heads=7), "768 is not divisible by 7 heads", "--heads 6"),
    "model": (lambda: config("X/16"), "unknown model 'X/16'", "vitral models"),
    "write-up": (lambda: config("mnist-7526"), "nearest: .*mnist-7562", "vitral models"),
    "patch": (lambda: config("S"), "unknown model 'S'.*needs a patch size", "--model S/16"),
    "patch zero": (lambda: config("S/0"), "unknown model 'S/0'", "S/16"),
    "option": (lambda: config("S/16", droput=0.1), "unknown model option 'droput'.*nearest: dropout", "dropout"),
    "position": (lambda: ViTConfig(position="rotry"), "unknown position 'rotry'.*rotary", "rotary"),
    "activation": (lambda: ViTConfig(activation="tanh"), "unknown activation 'tanh'", "gelu"),
    "pool": (lambda: ViTConfig(pool="avg"), "unknown pool 'avg'", "mean"),
    "norm": (lambda: ViTConfig(norm="sandwich"), "unknown norm", "pre"),
    "pool without token": (lambda: ViTConfig(cls_token=False), "needs a class token", "--pool mean"),
    "probability": (lambda: ViTConfig(dropout=1.0), "not a probability", ""),
    "share": (lambda: ViTConfig(patch_dropout=1.0), "patch_dropout 1.0 is not a probability", ""),
    "not a number": (lambda: ViTConfig(drop_path=float("nan")), "not a probability", ""),
    "depth": (lambda: ViTConfig(depth=0), "must be positive: depth=0", ""),
    "registers": (lambda: ViTConfig(registers=-1), "negative", ""),
    "sincos": (lambda: ViTConfig(position="sincos", dim=18, heads=2), "sincos .* divisible by 4, not 18", ""),
    "rotary": (lambda: ViTConfig(position="rotary", dim=36, heads=6), "rotary .* head width .* not 6", ""),
    "kind": (lambda: ViTConfig(dim="768"), "dim cannot be '768'", ""),
    "size": (lambda: ViTConfig(image_size=(1, 2, 3)), "whole number or", ""),
    "schema": (lambda: ViTConfig.from_json({"dim": 8, "widht": 9}), "unknown field .*'widht'", ""),
    "nested": (lambda: ViTConfig.from_json({"dim": {"_target_": "os.system"}}), "dim cannot be", ""),
    "image too large": (lambda: config("S/16", image_size=10**6), "image size must be at most 16,384, not 1000000", ""),
    "depth too large": (lambda: ViTConfig(depth=10**20), "depth must be at most 1,000", ""),
    "classes too large": (lambda: config("BiT-R50x1", classes=10**20), "classes must be at most 10,000,000", ""),
    "summary batch too large": (lambda: summarize("mu/16", batch=10**20), "at most 1,000,000", "--batch 1"),
    "summary overflow": (
        lambda: summarize(config("S/1", image_size=16384), batch=1000),
        "too large to summarize",
        "a smaller image",
    ),
    "summary batch": (lambda: summarize("mu/16", batch=0), "batch of 0", "--batch 1"),
}


@pytest.mark.parametrize(("request_", "message", "hint"), REFUSED.values(), ids=REFUSED)
def test_refusal(request_, message, hint):
    with pytest.raises(UsageError) as caught:
        request_()
    text = str(caught.value)
    assert re.search(message, text, re.DOTALL), text
    assert hint in text
    assert len(text.splitlines()) <= 5
    assert all(len(line) < 200 for line in text.splitlines())


@pytest.mark.timeout(5)
@pytest.mark.parametrize("damaged", [{"dim": 2**31, "heads": 3}, {"dim": 2**70}, {"depth": 2**40}])
def test_sizes_of_a_damaged_file_are_refused_quickly(damaged):
    """Found by fuzzing: the search for a number of heads that divides the width took longer than 20 s."""
    with pytest.raises(UsageError, match="must be at most"):
        ViTConfig(**damaged)


@pytest.mark.parametrize("size", [(225, 224), (5, 5), (100, 30)])
@pytest.mark.parametrize("patch", [(16, 16), (14, 14), (7, 32)])
def test_the_hinted_image_size_fits(size, patch):
    with pytest.raises(UsageError) as caught:
        ViTConfig(image_size=size, patch_size=patch)
    numbers = [int(n) for n in re.findall(r"\d+", caught.value.hint)]
    ViTConfig(image_size=(numbers[0], numbers[-1]), patch_size=patch)


@pytest.mark.parametrize("heads", [5, 7, 11, 100, 767, 1000])
def test_the_hinted_heads_fit(heads):
    with pytest.raises(UsageError) as caught:
        ViTConfig(heads=heads)
    ViTConfig(heads=int(caught.value.hint.removeprefix("--heads ")))


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 1, 32, 32), (1, 32, 32, 3), (1, 3, 48, 32), (1, 3, 33, 33)])
def test_images_of_the_wrong_shape(shape):
    with pytest.raises(UsageError) as caught:
        create("mu/16", image_size=32)(torch.zeros(shape))
    assert len(str(caught.value).splitlines()) <= 5
    assert "32" in str(caught.value)


def test_computed_positions_still_need_whole_patches():
    model = create("mu/16", image_size=32, position="sincos")
    with pytest.raises(UsageError, match="40×32 is not divisible"):
        model(torch.zeros(1, 3, 40, 32))


def test_a_configuration_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ViTConfig().dim = 5
