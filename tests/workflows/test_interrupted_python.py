"""Ctrl-C at each stage of a Python session or notebook: one KeyboardInterrupt, and the session goes on as before."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import vitral
from running import TINY, same_bits, train, weights_of
from vitral.errors import Interrupted
from vitral.workflows import train as entry
from vitral.workflows.running import execute

STAGES = ("plan_run", "_set_up", "write_config", "_finish", "_report")


@pytest.mark.report
@pytest.mark.parametrize("stage", STAGES)
def test_the_same_cell_again_finishes_the_run(stage: str, make_images, tmp_path: Path, monkeypatch) -> None:
    photos = make_images({"a": 10, "b": 10})
    whole = train(photos, tmp_path / "whole")
    home = entry if stage == "plan_run" else execute
    original = getattr(home, stage)
    handler, threads = signal.getsignal(signal.SIGINT), threading.active_count()

    def pressed(*given: object, **more: object) -> object:
        signal.raise_signal(signal.SIGINT)
        return original(*given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(home, stage, pressed)
        with pytest.raises(KeyboardInterrupt):
            train(photos, tmp_path / "run")
    assert signal.getsignal(signal.SIGINT) is handler
    assert threading.active_count() <= threads
    started = (tmp_path / "run/config.json").exists()
    again = {**TINY, "val_fraction": 0.2, "out": str(tmp_path / "run"), "quiet": True}
    done = (
        vitral.train(out=str(tmp_path / "run"), resume=True, quiet=True) if started else vitral.train(photos, **again)
    )
    assert same_bits(weights_of(done.folder), weights_of(whole.folder))
    assert (done.folder / "report.html").is_file()


def test_predictions_go_on_after_an_interrupt(trained: vitral.TrainedRun, monkeypatch) -> None:
    predictor = vitral.load(trained.folder, precision="fp32", device="cpu")
    images = list(np.random.default_rng(0).integers(0, 256, (12, 8, 12, 1), dtype=np.uint8))
    wanted, threads = predictor.probabilities(images), threading.active_count()
    prepare, calls = predictor.prepare, iter(range(100))

    def pressed(*given: object, **more: object) -> object:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return prepare(*given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(predictor, "prepare", pressed)
        with pytest.raises(KeyboardInterrupt):
            predictor(images)
    assert np.array_equal(predictor.probabilities(images), wanted)
    late = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < late:
        time.sleep(0.01)  # a pool waits for its tasks, and its threads end just after
    assert threading.active_count() <= threads


@pytest.mark.parametrize("method", ["default", "rollout", "integrated-gradients"])
def test_an_interrupted_map_leaves_the_network_as_it_was(trained: vitral.TrainedRun, method: str) -> None:
    predictor = vitral.load(trained.folder, precision="fp32", device="cpu")
    image = np.random.default_rng(0).integers(0, 256, (8, 12, 1), dtype=np.uint8)
    before = predictor.probabilities(image)
    options = {} if method == "default" else {"method": method}

    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    handle = predictor.model.head.register_forward_hook(pressed)
    with pytest.raises(KeyboardInterrupt):
        vitral.explain(predictor, image, **options)
    handle.remove()
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in predictor.model.modules())
    assert not any(one.requires_grad and one.grad is not None for one in predictor.model.parameters())
    assert np.array_equal(predictor.probabilities(image), before)


def test_an_interrupt_is_no_error_that_a_loop_swallows() -> None:
    assert issubclass(Interrupted, KeyboardInterrupt)
    assert not issubclass(Interrupted, Exception)
