"""`vitral pretrain` over ranks: the losses of one process, exact resume, one writer, refusals by name."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from rank_runs import at_step, history
from together import on_ranks

from running import TINY, as_words, mostly_slow, same_bits, weights_of, write_teacher
from vitral.cli.main import main
from vitral.pretraining.methods import needs_teacher

OPTIONS: dict[str, Any] = {
    **{name: value for name, value in TINY.items() if name not in ("ema", "crop")},
    "image_size": 12,
    "batch_size": 5,
    "epochs": 2,
    "val_fraction": 0.2,
    "warmup": 0.5,
}
MAE: dict[str, Any] = {"decoder_dim": 32, "decoder_depth": 1, "crop": "shift"}
DINO: dict[str, Any] = {"prototypes": 16, "local_crops": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mae": ("mae", MAE),
    "distill": ("distill", {"teacher_views": 1, "drop_path": 0.2}),
    "distill: computed in every step, with a stem": ("distill", {"teacher_views": 0, "model": "C+mu/4"}),
    "mpp": ("mpp", {"drop_path": 0.2, "crop": "none"}),
    "dino: sinkhorn, masked patches, koleo, dropped branches": (
        "dino",
        {**DINO, "centering": "sinkhorn", "ibot": 1.0, "koleo": 0.1, "drop_path": 0.2},
    ),
    "dino: centered, accumulated": ("dino", {**DINO, "ibot": 0.5, "accumulate": 2}),
    "mae: recomputed blocks, dropout, accumulated": (
        "mae",
        {**MAE, "checkpointing": True, "dropout": 0.1, "accumulate": 2},
    ),
    "mpp: gray images, clipped": ("mpp", {"channels": 1, "clip": 0.01, "crop": "none"}),
}


@pytest.fixture
def photos(make_images) -> Path:
    return make_images({"a": 16, "b": 12})


def command(photos: Path, out: Path, method: str, *more: str, **options: object) -> list[str]:
    settings = {**OPTIONS, "method": method, "out": out}
    if needs_teacher(method):
        settings["teacher"] = write_teacher(out.parent)
        del settings["augment"]
    words = as_words({**settings, **options})
    return ["pretrain", str(photos), *words, "--quiet", *more]


def assert_same(one: list[dict[str, Any]], other: list[dict[str, Any]], tolerance: float = 1e-5) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - {"seconds", "images_per_second", "waited"}:
            assert a[name] == pytest.approx(b[name], rel=tolerance if "loss" in name else 1e-3), name


@pytest.mark.parametrize(
    ("name", "count", "strategy"),
    [
        *mostly_slow([(name, 3, "ddp") for name in CASES], every=9),
        *mostly_slow([(name, 2, "fsdp") for name in CASES], every=20),
        pytest.param("dino: centered, accumulated", 2, "ddp", marks=pytest.mark.slow),
        pytest.param("mpp", 1, "fsdp", marks=pytest.mark.slow),
    ],
)
def test_losses_do_not_depend_on_the_ranks(name, count, strategy, photos, tmp_path):
    method, options = CASES[name]
    assert main(command(photos, tmp_path / "one", method, **options)) == 0
    words = command(photos, tmp_path / "many", method, "--strategy", strategy, **options)
    assert on_ranks(count, lambda: main(words)) == [0] * count
    assert_same(history(tmp_path / "one"), history(tmp_path / "many"))
    assert {path.name for path in (tmp_path / "one").iterdir()} == {path.name for path in (tmp_path / "many").iterdir()}


RESUMED = {"mae": MAE, "dino": {**DINO, "ibot": 1.0, "centering": "sinkhorn"}, "distill": {"teacher_views": 1}}


@pytest.mark.parametrize(
    ("method", "strategy"), mostly_slow([("mae", "ddp"), ("dino", "ddp"), ("dino", "fsdp"), ("distill", "ddp")], 3)
)
def test_a_stopped_run_resumes_to_the_bits_of_a_whole_one(method, strategy, photos, tmp_path, monkeypatch, capfd):
    options = {"strategy": strategy, **RESUMED[method]}
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    with monkeypatch.context() as patched:
        at_step(6, 1, lambda: os.kill(os.getpid(), signal.SIGTERM), patched)
        assert on_ranks(2, lambda: main(command(photos, cut, method, **options))) == [0, 0]
    assert capfd.readouterr().err.count("Stopped and saved") == 1
    assert not (cut / "result.json").exists()
    assert on_ranks(2, lambda: main(["pretrain", "--out", str(cut), "--resume", "--quiet"])) == [0, 0]
    assert on_ranks(2, lambda: main(command(photos, whole, method, **options))) == [0, 0]
    assert same_bits(weights_of(cut), weights_of(whole))
    assert_same(history(cut), history(whole), 0.0)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks_and_strategy(photos, tmp_path, monkeypatch):
    cut, whole, options = tmp_path / "cut", tmp_path / "whole", {**DINO, "ibot": 1.0}
    with monkeypatch.context() as patched:
        at_step(6, 1, lambda: os.kill(os.getpid(), signal.SIGTERM), patched)
        assert on_ranks(3, lambda: main(command(photos, cut, "dino", **options))) == [0] * 3
    again = ["pretrain", "--out", str(cut), "--resume", "--quiet"]
    assert on_ranks(2, lambda: main([*again, "--strategy", "fsdp"])) == [0, 0]
    assert main(command(photos, whole, "dino", **options)) == 0
    assert_same(history(whole), history(cut))


@pytest.mark.slow
def test_the_launcher_runs_one_command(photos, tmp_path, capfd):
    words = [word for word in command(photos, tmp_path / "run", "mae", **MAE) if word != "--quiet"]
    assert main([*words, "--nproc", "2", "--format", "json"]) == 0
    printed = capfd.readouterr()
    result = json.loads(printed.out)  # of one rank
    assert result == json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["method"] == "mae"
    assert "--nproc" not in result["command"]
    assert printed.err.count("epoch 2/2") == 1


@pytest.mark.parametrize(
    ("method", "options", "why"),
    [
        ("mae", {"compile": True}, "compiled steps of pretraining are not tested with several ranks"),
        ("dino", {"checkpointing": True, "drop_path": 0.1}, "recomputed blocks would use other dropout masks"),
        ("mpp", {"strategy": "offload"}, "on cpu, there is no other memory to move the network to"),
    ],
)
def test_what_ranks_cannot_share_is_refused(method, options, why, photos, tmp_path, capfd):
    assert on_ranks(2, lambda: main(command(photos, tmp_path / "run", method, **options))) == [2, 2]
    printed = capfd.readouterr().err
    assert printed.count("error: ") == 1, printed
    assert why in printed
    assert not (tmp_path / "run").exists()
