"""`vitral train --find-lr`: a rate from the curve by a stated rule, and nothing touched."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from images import MakeImages
from running import TINY, as_json, as_words, printed, train
from vitral.errors import RunError
from vitral.workflows import learning_rates
from vitral.workflows.learning_rates import RangeTest, averaged, has_diverged, steepest
from vitral.workflows.learning_rates_page import check_free, in_words, on_terminal

OPTIONS = {**{name: value for name, value in TINY.items() if name != "lr"}, "val_fraction": 0.25}


def stamps(folder: Path) -> dict[str, int]:
    return {str(file): file.stat().st_mtime_ns for file in sorted(folder.rglob("*")) if file.is_file()}


def a_test(losses: Any, scale: float = 1.0) -> RangeTest:
    values = np.asarray(losses, float)
    rates = np.geomspace(1e-5, 1.0, len(values))
    return RangeTest("x", "mu/4", "adamw", 1e-3, rates, values, values, scale, False)


def test_the_suggested_rate_is_where_the_loss_falls_fastest():
    """A logistic fall around 3e-4 and a rise beyond 0.1."""
    x = np.log10(np.geomspace(1e-5, 1.0, 100))
    losses = 2 - 1 / (1 + np.exp(-6 * (x - np.log10(3e-4)))) + np.exp(8 * (x + 0.5))
    found = a_test(losses)
    assert found.suggested == pytest.approx(3e-4, rel=0.25)
    assert a_test(losses, scale=2.0).suggested == pytest.approx(6e-4, rel=0.25), "as --lr takes it with --lr-batch"
    assert 1e-3 < found.lowest < 0.3
    assert f"--lr {found.suggested:g}" in in_words(found)


def test_a_loss_that_falls_nowhere_suggests_nothing():
    assert a_test(np.linspace(1, 5, 60)).suggested is None
    assert "No rate is suggested" in in_words(a_test(np.linspace(1, 5, 60)))
    assert steepest(np.geomspace(1, 2, 4), np.array([4.0, 3.0, 2.0, 1.0])) is None, "too few steps"


def test_the_average_is_corrected_for_its_start():
    losses = [4.0, 2.0, 3.0]
    weights = [[1.0], [0.9, 1.0], [0.81, 0.9, 1.0]]
    expected = [np.average(losses[: len(one)], weights=one) for one in weights]
    assert averaged(losses) == pytest.approx(expected)


def test_the_test_ends_when_the_loss_grows():
    falling = list(np.linspace(2, 1, 20))
    assert not has_diverged(falling)
    assert has_diverged([*falling, float("nan")])
    assert has_diverged([*falling, *[40.0] * 5])


def test_the_curve_on_a_terminal_marks_the_rate():
    lines = on_terminal(a_test([2.0] * 40 + list(np.linspace(2, 1, 20)) + list(np.linspace(1, 2, 40))))
    assert lines[1][0] == "█"
    assert 18 <= lines[2].index("↑") <= 30
    assert lines[-1].startswith("1e-05")


def test_it_prints_writes_and_touches_nothing(make_images: MakeImages, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(learning_rates, "STEPS", 24)
    photos = make_images({"cat": 12, "dog": 12})
    run = train(photos, tmp_path / "run", epochs=1)
    before = stamps(run.folder)
    of_network = ("model", "dim", "depth", "heads", "mlp_dim", "image_size")
    words = as_words({name: value for name, value in OPTIONS.items() if name not in of_network})
    words = [*words, "--init", str(run.folder), "--find-lr"]
    out, err = printed(capsys, "train", str(photos), *words, "--out", str(tmp_path / "rates"))
    assert stamps(run.folder) == before
    assert not (tmp_path / "runs").exists()
    assert "learning rate" in out
    suggested = json.loads((tmp_path / "rates/learning-rate.json").read_text())["suggested"]
    if suggested is not None:
        assert re.search(rf"vitral train .*--lr {suggested:g}", err)
    with Image.open(tmp_path / "rates/learning-rate.png") as image:
        assert min(image.size) > 500
    page = (tmp_path / "rates/learning-rate.html").read_text("utf-8")
    assert "--find-lr" in page
    found, again = (as_json(capsys, "train", str(photos), *words) for _ in range(2))
    assert found == again, "a function of the options"
    assert len(found["steps"]) <= 24
    assert found["steps"][0]["lr"] == pytest.approx(found["planned"] / learning_rates.BELOW)


def test_mistakes_name_what_to_type(make_images: MakeImages, tmp_path, capsys):
    photos = str(make_images({"cat": 4, "dog": 4}))
    _, err = printed(capsys, "train", photos, "--find-lr", "--resume", code=2)
    assert "--find-lr and --resume are mutually exclusive" in err
    _, err = printed(capsys, "train", photos, "--find-lr", "--recipe", "linear-probe", "--init", "demo", code=2)
    assert "no learning rate to find" in err
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(RunError, match="other files"):
        check_free(tmp_path)
    check_free(tmp_path / "new")
