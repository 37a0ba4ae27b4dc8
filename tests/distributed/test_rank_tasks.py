"""Text, packed images and several patch sizes over ranks: the losses of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rank_runs import history
from together import on_ranks

import textlines
from images import noise
from running import TINY, as_words, mostly_slow
from vitral.cli.main import main
from vitral.kernels import random
from vitral.kernels.random import Rows

FIXED: dict[str, Any] = {**TINY, "epochs": 2, "val_fraction": 0.25}
CASES: dict[str, dict[str, Any]] = {
    "packed": {
        **FIXED,
        "pack": True,
        "image_size": 16,
        "pack_min_size": 8,
        "pack_drop": (0.5, 0.0),
        "flip": True,
        "erase": 0.5,
        "batch_size": 5,
    },
    "text": {**textlines.OPTIONS, "epochs": 2, "batch_size": 7},
    "patch sizes": {**FIXED, "patch_sizes": (2, 4, 8), "batch_size": 5, "flip": True, "mixup": 0.2},
    "packed, accumulated": {**FIXED, "pack": True, "image_size": 16, "accumulate": 2, "augment": "affine"},
    "text, dropout": {
        **textlines.OPTIONS,
        "epochs": 2,
        "drop_path": 0.2,
        "dropout": 0.1,
        "augment": "affine",
        "optimizer": "adamw",
    },
    "patch sizes, averaged weights": {**FIXED, "patch_sizes": (4, 8), "ema": 0.9, "drop_path": 0.2, "accumulate": 2},
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes in images of four sizes."""
    root = tmp_path_factory.mktemp("oblong")
    for number in range(24):
        folder = root / ("dark", "bright")[number % 2]
        folder.mkdir(exist_ok=True)
        size = [(8, 10), (16, 9), (12, 12), (30, 20)][number % 4]
        pixels = noise(number, size) // 2 + 127 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return textlines.write_lines(tmp_path_factory.mktemp("lines"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitral.workflows.running.execute._report", lambda *_: None)  # drawing is slow
    monkeypatch.setattr("vitral.workflows.planning.memory.EVAL_BATCH", 2)  # several batches of validation


def command(data: Path, out: Path, *more: str, **options: object) -> list[str]:
    return ["train", str(data), *as_words({**options, "out": out}), "--quiet", *more]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *mostly_slow([(name, 3) for name in CASES], every=9),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in list(CASES)[:3]),
    ],
)
def test_losses_do_not_depend_on_the_ranks(name, count, images, lines, tmp_path):
    data = lines if name.startswith("text") else images
    assert main(command(data, tmp_path / "one", **CASES[name])) == 0
    words = command(data, tmp_path / "many", **CASES[name])
    assert on_ranks(count, lambda: main(words)) == [0] * count
    for one, many in zip(history(tmp_path / "one"), history(tmp_path / "many"), strict=True):
        for measured in one.keys() - {"seconds", "images_per_second", "waited"}:
            assert one[measured] == pytest.approx(many[measured], rel=1e-5), measured


def test_each_packed_image_has_numbers_of_its_own():
    def drawn(rows: Rows | None, count: int) -> list[float]:
        torch.manual_seed(3)
        with random.drawing(rows):
            return [*random.each(range(count), lambda number: float(torch.rand(number + 1)[0])), float(torch.rand(()))]

    whole = drawn(None, 4)
    assert len(set(whole)) == 5
    assert drawn(Rows(1, 3, 4), 2) == [*whole[1:3], whole[-1]]


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("packed", ["--strategy", "fsdp"], "does not use all parts of the network"),
        ("patch sizes", ["--strategy", "fsdp"], "does not use all parts of the network"),
        ("packed", ["--dropout", "0.1"], "dropout acts on packed sequences"),
        ("text, dropout", ["--strategy", "fsdp"], "not tested with a decoder of text"),
    ],
)
def test_what_ranks_cannot_share_is_refused(name, more, why, images, lines, tmp_path, capfd):
    words = command(lines if name.startswith("text") else images, tmp_path / "run", *more, **CASES[name])
    assert on_ranks(2, lambda: main(words)) == [2, 2]
    printed = capfd.readouterr().err
    assert printed.count("error: ") == 1, printed
    assert why in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_lines_are_evaluated_and_predicted_as_by_one_process(lines, tmp_path, monkeypatch, capfd):
    assert main(command(lines, tmp_path / "run", **CASES["text"])) == 0
    capfd.readouterr()
    evaluate = ["evaluate", str(tmp_path / "run"), "--device", "cpu", "--format", "json"]
    assert main(evaluate) == 0
    alone = capfd.readouterr().out
    assert on_ranks(2, lambda: main(evaluate)) == [0, 0]
    assert capfd.readouterr().out == alone
    predict = ["predict", str(tmp_path / "run"), str(lines / "val"), "--device", "cpu", "--batch-size", "2", "--out"]
    assert main([*predict, str(tmp_path / "one.csv")]) == 0
    assert on_ranks(2, lambda: main([*predict, str(tmp_path / "many.csv")])) == [0, 0]
    assert (tmp_path / "many.csv").read_bytes() == (tmp_path / "one.csv").read_bytes()
