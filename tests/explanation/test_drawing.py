"""Drawings of heat maps: strong values are visible at their position, in consistent colors."""

from __future__ import annotations

import dataclasses
import json
import warnings
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from PIL import Image

from vitral import web
from vitral.errors import UsageError
from vitral.explanation.drawing import SHEET_IMAGES, _limits, _rows, contact_sheet, overlay, save, style
from vitral.explanation.heatmap import Heatmap, contrast

GRAY = np.full((16, 24, 3), 128, np.uint8)


def heatmap(values=None, **changes) -> Heatmap:
    values = np.array([[0, 1, 2], [3, 4, 8]], np.float32) if values is None else np.asarray(values, np.float32)
    given = {"label": "cat", "probability": 0.75, "method": "attention", "image": GRAY, "name": "a/cat.png"} | changes
    return Heatmap(values, given.pop("target", 3), **given)


def colorfulness(pixels: np.ndarray) -> float:
    return float((pixels.max(-1).astype(int) - pixels.min(-1)).max())


def test_size_is_readable_by_default_and_as_asked():
    assert overlay(heatmap()).size == (448, 299)
    assert overlay(heatmap(), 60).size == (60, 40)
    assert overlay(heatmap(image=np.zeros((600, 900, 3), np.uint8))).size == (900, 600)
    assert overlay(heatmap(image=np.zeros((8, 8, 1), np.uint8)), 16).mode == "RGB"
    with pytest.raises(UsageError):
        overlay(heatmap(), 0)


def test_the_strongest_patch_is_where_it_is_and_the_weakest_lets_the_image_through():
    drawn = np.asarray(overlay(heatmap(), 240, smooth=False)).astype(int)  # patches of 80 × 80
    saturation = drawn.max(-1) - drawn.min(-1)
    patches = saturation.reshape(2, 80, 3, 80).transpose(0, 2, 1, 3).reshape(6, -1)
    assert (patches == patches[:, :1]).all()  # each patch one color on a gray image
    assert patches[0, 0] == 0  # the least: the image in gray, nothing over it
    brightness = drawn.sum(-1).reshape(2, 80, 3, 80).mean((1, 3)).flatten()
    assert brightness.argmax() == 5
    smooth = np.asarray(overlay(heatmap(), 240)).sum(-1)
    row, column = np.unravel_index(smooth.argmax(), smooth.shape)
    assert (row // 80, column // 80) == (1, 2)


def test_signs_are_red_and_blue_around_zero():
    drawn = np.asarray(overlay(heatmap([[4, 0], [-1, -4]]), 240, smooth=False)).astype(int)
    red, nothing, against = drawn[5, 5], drawn[5, -5], drawn[-5, -5]
    assert red[0] > red[2] + 40
    assert against[2] > against[0] + 40
    assert nothing[0] == nothing[1] == nothing[2]
    assert _limits(heatmap([[4, 0], [-1, -2]])) == (-4, 4)
    assert _limits(heatmap([[4, 1], [1, 2]])) == (1, 4)


def test_a_map_that_is_not_believable_is_gray_and_labeled(tmp_path):
    for values in (None, [[4, 0], [-1, -2]]):
        doubted = heatmap(values, checks={"believable": False, "srg": -0.1})
        assert colorfulness(np.asarray(doubted.overlay(300))) == 0
        assert colorfulness(np.asarray(heatmap(values, checks={"believable": True}).overlay(300))) > 60
        plain = heatmap(values, image=GRAY, checks={"believable": False})
        words = np.asarray(overlay(plain, 300))[-8:]
        assert words.min() < 60  # the dark band with the words
        assert words.max() > 200
    text = tmp_path / "doubted.svg"
    save([doubted], text)
    assert doubted.note == "no better than a random map on this image"


def test_a_flat_map_and_one_that_is_not_finite():
    flat = np.asarray(overlay(heatmap(np.full((2, 3), 0.25)), 240))
    assert colorfulness(flat) == 0
    with pytest.raises(UsageError, match="not finite"):
        overlay(heatmap([[np.nan, 1]]))


def test_contrast_is_antisymmetric_and_of_shares():
    a, b = heatmap([[1, 3], [0, 0]]), heatmap([[10, 0], [0, 30]], label="dog", target=4)
    found = contrast(a, b)
    np.testing.assert_allclose(found.values, [[0, 0.75], [0, -0.75]], atol=1e-7)
    np.testing.assert_array_equal(found.values, -contrast(b, a).values)
    assert found.title == "cat rather than dog"
    assert found.to_json()["against"] == "dog"
    assert not contrast(a, a).values.any()
    assert contrast(a, dataclasses.replace(b, checks={"believable": False})).note.startswith("no better")
    for other in ({"method": "rollout"}, {"image": GRAY + 1}):
        with pytest.raises(UsageError, match="same"):
            contrast(a, dataclasses.replace(b, **other))


def test_strips_of_one_method_stand_side_by_side_where_both_are_several():
    maps = [heatmap(method=m, label=c) for m in ("rollout", "attention") for c in ("cat", "dog")]
    assert [[(one.method, one.label) for one in row] for row in _rows(maps)] == [
        [("rollout", "cat"), ("rollout", "dog")],
        [("attention", "cat"), ("attention", "dog")],
    ]
    assert [len(row) for row in _rows([heatmap(label=str(i)) for i in range(7)])] == [2, 2, 2, 1]


@pytest.mark.parametrize("suffix", [".png", pytest.param(".svg", marks=pytest.mark.slow), ".json"])
def test_files_match_their_suffix_and_are_deterministic(tmp_path, suffix):
    hostile = heatmap(label="$\\frac{<b>", name="a/\udc80\x07\n猫" * 9 + ".png")
    signed = heatmap([[1, -2]], checks={"believable": False, "srg": 0.5, "random_srg": 0.1})
    maps = [heatmap(), signed, hostile]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = save(maps, tmp_path / f"deep/a{suffix}").read_bytes()
        again = save(maps, tmp_path / f"b{suffix}").read_bytes()
    assert first == again
    if suffix == ".png":
        with Image.open(tmp_path / "b.png") as image:
            assert image.width > 1000
    elif suffix == ".svg":
        ids = [e.get("id") for e in ET.fromstring(first).iter() if e.get("id")]
        assert len(ids) == len(set(ids))
    else:
        read = json.loads(first)
        assert [one["values"] for one in read] == [one.values.tolist() for one in maps]


def test_other_files_are_refused(tmp_path):
    for name in ("a.html", "a.jpg", "a"):
        with pytest.raises(UsageError, match=r"\.png, \.svg or \.json") as caught:
            heatmap().save(tmp_path / name)
        assert "try: a.png" in str(caught.value)
    with pytest.raises(UsageError, match="no heat map"):
        save([], tmp_path / "a.png")


def test_a_contact_sheet_grows_with_its_images_up_to_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("vitral.explanation.drawing.SHEET_IMAGES", 7)
    assert SHEET_IMAGES > 7
    heights = []
    for count in (1, 7, 30):
        path = contact_sheet([heatmap(name=f"{i}.png") for i in range(count)], tmp_path / f"{count}.png")
        with Image.open(path) as image:
            heights.append(image.height)
    assert heights[0] < heights[1] < heights[2] <= heights[1] + 60  # one line more: how many were left out


def test_wrong_predictions_are_marked_by_the_folder_of_the_image(tmp_path):
    maps = [heatmap(name="photos/cat/1.png"), heatmap(name="photos/dog/2.png"), heatmap(name="elsewhere/3.png")]
    for classes, wrong in (((), 0), (("cat", "dog"), 1), (("cat", "dog", "elsewhere"), 2)):
        text = contact_sheet(maps, tmp_path / f"{wrong}.svg", classes=classes).read_text("utf-8")
        assert text.count("<!-- ✗ cat") == wrong
        assert (f"✗ wrong: {wrong}" in text) == bool(wrong)


def test_colors_of_the_page_are_those_of_drawings():
    """If they changed: write `json.dumps(style(method), separators=(",", ":"))` into web/styles.js."""
    text = web.text("styles.js")
    for name, method in (("signed", "occlusion"), ("unsigned", "rollout")):
        assert f"{name}: {json.dumps(style(method), separators=(',', ':'))}," in text
