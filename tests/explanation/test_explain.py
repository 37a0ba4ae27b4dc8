"""`vitral.explain`: predictors and bare modules, one image and many, classes by name and number."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tiny import VARIANTS, network, random_images

import vitral
from images import noise
from vitral.data.images.preprocessing import Preprocessing
from vitral.device import choose
from vitral.errors import ImageError, UsageError
from vitral.explanation.methods import METHODS
from vitral.inference.predictor import Predictor
from vitral.model import BiT, BiTConfig

CONFIG = VARIANTS["oblong"]  # images of 8 × 12, patches of 4 × 2
CLASSES = ("ant", "bee", "cat", "7", "emu")
CHEAP = {"rise": {"masks": 8}, "integrated-gradients": {"steps": 2}, "smoothgrad": {"samples": 2}}


@pytest.fixture
def predictor() -> Predictor:
    machine = choose("cpu", "fp32")
    model = network(CONFIG).float()
    return Predictor(model, Preprocessing(CONFIG.image, 3), CLASSES, machine=machine, source="tiny")


def test_one_map_for_each_image_and_target_in_that_order(predictor, tmp_path):
    shots = [noise(i, (20, 30)) for i in range(3)]
    found = vitral.explain(predictor, shots, ["bee", None, 3], method="attention", batch_size=2)
    assert [one.name for one in found] == [f"image {i}" for i in range(3) for _ in range(3)]
    answers = predictor(shots)
    assert [one.label for one in found] == [x for answer in answers for x in ("bee", answer.label, "7")]
    for i, answer in enumerate(answers):
        for one in found[3 * i : 3 * i + 3]:
            assert one.probability == pytest.approx(float(answer.probabilities[one.target]), abs=1e-5)
            assert one.values.shape == (2, 6)
            assert one.image.shape == (8, 12, 3)
            assert one.image.dtype == np.uint8
    path = tmp_path / "one.png"
    found[0].save(path)
    (of_path,) = vitral.explain(predictor, path)
    assert of_path.name == str(path)


def test_a_batch_is_its_singles(predictor):
    shots = [noise(i, (8, 12)) for i in range(5)]
    together = vitral.explain(predictor, shots, method="rollout", batch_size=2)
    for shot, one in zip(shots, together, strict=True):
        (alone,) = vitral.explain(predictor, shot, method="rollout")
        np.testing.assert_allclose(one.values, alone.values, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [(4, 64), (64, 4)])
def test_maps_of_very_wide_and_tall_images_are_drawn(size, tmp_path):
    """As of spectrograms."""
    config = dataclasses.replace(CONFIG, image_size=size, patch_size=4)
    model = network(config).float()
    narrow = Predictor(model, Preprocessing(size, 3), CLASSES, machine=choose("cpu", "fp32"))
    found = vitral.explain(narrow, noise(0, size), ["bee", "cat"], method="attention")
    for suffix in ("png", "svg"):
        assert found[0].save(tmp_path / f"one.{suffix}").stat().st_size > 1000


def test_a_number_among_classes_called_by_numbers_is_a_name(predictor):
    numbered = Predictor(predictor.model, predictor.preprocessing, tuple("12345"), machine=predictor.machine)
    assert vitral.explain(numbered, noise(0), "1")[0].target == 0
    assert vitral.explain(numbered, noise(0), 1)[0].label == "2"
    for target in ("0", "²"):
        with pytest.raises(UsageError, match="unknown class"):
            vitral.explain(numbered, noise(0), target)
    with pytest.raises(UsageError, match="unknown class '²'"):
        vitral.explain(predictor, noise(0), "²")


def test_classes_by_name_come_before_numbers(predictor):
    assert vitral.explain(predictor, noise(0), "7")[0].target == 3
    assert vitral.explain(predictor, noise(0), "2")[0].label == "cat"
    assert vitral.explain(predictor, noise(0), 0)[0].label == "ant"


def test_a_bare_module_takes_standardized_tensors():
    model, images = network(CONFIG).float(), random_images(CONFIG, 2).float()
    found = vitral.explain(model, images, [0, 1], method="attention")
    assert [(one.name, one.label) for one in found] == [(f"image {i}", str(t)) for i in range(2) for t in range(2)]
    (single,) = vitral.explain(model, images[1], 0, method="attention")
    np.testing.assert_allclose(single.values, found[2].values, rtol=1e-4, atol=1e-6)
    assert single.image.shape == (8, 12, 3)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"target": "bes"}, "nearest: bee"),
        ({"target": 5}, "numbered from 0"),
        ({"target": -1}, "numbered from 0"),
        ({"method": "rolout"}, "nearest: rollout"),
    ],
)
def test_errors_name_the_nearest_options(predictor, words, told):
    with pytest.raises(UsageError) as caught:
        vitral.explain(predictor, noise(0), **words)
    assert told in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 5


def test_invalid_images(predictor, tmp_path):
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"nothing")
    with pytest.raises(ImageError) as caught:
        vitral.explain(predictor, [noise(0), bad])
    assert caught.value.name == str(bad)
    with pytest.raises(UsageError, match="no image"):
        vitral.explain(predictor, [])
    with pytest.raises(UsageError, match="no image"):
        vitral.explain(network(CONFIG).float(), torch.zeros(0, 3, 8, 12))


def test_networks_that_a_method_does_not_fit():
    model = BiT(BiTConfig(image_size=32, layers=(1, 1), classes=5)).eval()
    with pytest.raises(UsageError, match="no attention") as caught:
        vitral.explain(model, torch.randn(1, 3, 32, 32), method="rollout")
    assert "occlusion" in str(caught.value)
    (found,) = vitral.explain(model, torch.randn(1, 3, 32, 32))  # without a name: one that fits
    assert METHODS[found.method].any_network
    headless = network(dataclasses.replace(CONFIG, classes=0)).float()
    with pytest.raises(UsageError, match="no classes"):
        vitral.explain(headless, torch.randn(1, 3, 8, 12))


@pytest.mark.parametrize("method", METHODS)
def test_the_global_generator_is_not_used(predictor, method):
    torch.manual_seed(5)
    before, of_numpy = torch.get_rng_state(), np.random.get_state()[1].copy()
    vitral.explain(predictor, noise(0), method=method, **CHEAP.get(method, {}))
    assert torch.equal(before, torch.get_rng_state())
    assert (of_numpy == np.random.get_state()[1]).all()
