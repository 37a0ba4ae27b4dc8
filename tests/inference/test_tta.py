"""Test-time augmentation."""

from __future__ import annotations

import pytest
import torch
from tiny import VARIANTS, moderate, random_images

from vitral.errors import UsageError
from vitral.inference.tta import COUNTS, averaged, views_of


@pytest.mark.parametrize("count", list(COUNTS.items())[1:])
def test_probabilities_are_the_mean_over_views(count):
    views, number = count
    network = moderate(VARIANTS["paper"]).float().eval()
    images = random_images(VARIANTS["paper"]).float()
    seen = list(views_of(images, views))
    assert len(seen) == number
    assert len({view.numpy().tobytes() for view in seen}) == number
    with torch.no_grad():
        wanted = sum(network(view).softmax(-1) for view in seen) / number
        found = averaged(network, views)(images).softmax(-1)
    assert torch.allclose(found, wanted, atol=1e-6)


def test_an_image_and_its_mirror_image_have_the_same_logits():
    network = averaged(moderate(VARIANTS["paper"]).float().eval(), "mirror")
    images = random_images(VARIANTS["paper"]).float()
    with torch.no_grad():
        assert torch.allclose(network(images), network(images.flip(-1)), atol=1e-5)


def test_shifts_by_a_pixel_with_reflection_padding():
    image = torch.arange(16.0).view(1, 1, 4, 4)
    _, upper_left, lower_right = views_of(image, "shifts")
    assert upper_left[0, 0, 1:, 1:].equal(image[0, 0, :3, :3]), "the window moves, and the image in it the other way"
    assert lower_right[0, 0, :3, :3].equal(image[0, 0, 1:, 1:])
    assert upper_left[0, 0, 0, 1:].equal(image[0, 0, 1, :3])
    seen = list(views_of(image, "both"))
    assert all(view.flip(-1).equal(mirrored) for view, mirrored in zip(seen[::2], seen[1::2], strict=True))


def test_without_views_it_is_the_network_itself():
    network = moderate(VARIANTS["paper"])
    assert averaged(network, "none") is network
    assert not averaged(network.eval(), "mirror").training
    with pytest.raises(UsageError, match=r"unknown --tta 'mirrors'\n.*nearest: mirror"):
        averaged(network, "mirrors")
    with pytest.raises(UsageError, match="nearest: mirror"):
        averaged(network, "flip")
