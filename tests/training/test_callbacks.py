"""Callbacks get copies: what one of them edits is neither saved nor seen by others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from running import train
from vitral.errors import UsageError
from vitral.training.callbacks import Callback, Callbacks, RunStart, asks_for_logits, check_callbacks


class Edits(Callback):
    def on_run_start(self, run: RunStart) -> None:
        run.history[0]["val_accuracy"] = 100.0
        run.options["lr"] = 0.0  # type: ignore[index]  # what users do all the same

    def on_epoch_end(self, line: dict[str, Any], best: bool) -> None:
        line["val_accuracy"] *= 100

    def on_run_end(self, result: Any) -> None:
        result["test"]["accuracy"] = 100.0


class Sees(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_run_start(self, run: RunStart) -> None:
        self.seen += [run.history[0]["val_accuracy"], run.options["lr"]]

    def on_epoch_end(self, line: dict[str, Any], best: bool) -> None:
        self.seen.append(line["val_accuracy"])

    def on_run_end(self, result: Any) -> None:
        self.seen.append(result["test"]["accuracy"])


def test_an_edit_stays_with_the_callback_that_made_it(tmp_path: Path) -> None:
    sees = Sees()
    callbacks = Callbacks([Edits(), sees])
    line, options, result = {"val_accuracy": 0.5}, {"lr": 0.1}, {"test": {"accuracy": 0.6}}
    callbacks.on_run_start(RunStart(tmp_path, options, (line,), lambda count: [], nn.Identity()))
    callbacks.on_epoch_end(line, True)
    callbacks.on_run_end(result)
    assert sees.seen == [0.5, 0.1, 0.5, 0.6]
    assert (line, options, result) == ({"val_accuracy": 0.5}, {"lr": 0.1}, {"test": {"accuracy": 0.6}})


class Watch(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[Any, torch.Tensor]] = []

    def on_logits(self, batch: Any, logits: torch.Tensor) -> None:
        self.seen.append((batch, logits))


@pytest.mark.parametrize("crop", ["none", "random-resized"])
def test_a_callback_that_asks_gets_the_batch_and_the_logits(make_images, tmp_path: Path, crop: str) -> None:
    data = make_images({"cat": 8, "dog": 8}, size=(8, 8))
    options = {"epochs": 2, "crop": crop, "label_smoothing": 0.0, "mixup": 0.0}
    watch = Watch()
    run = train(data, tmp_path / "watched", callbacks=[watch], **options)
    plain = train(data, tmp_path / "plain", **options)
    assert [one["train_loss"] for one in run.history] == [one["train_loss"] for one in plain.history]
    losses = [float(F.cross_entropy(logits, batch.labels)) for batch, logits in watch.seen]
    assert len(losses) == 6
    assert abs(sum(losses[:3]) / 3 - run.history[0]["train_loss"]) < 1e-6
    batch, logits = watch.seen[0]
    assert batch.images.shape == (4, 3, 8, 8)
    assert batch.images.dtype == torch.float32
    assert not logits.requires_grad
    assert len(set(batch.indices.tolist())) == 4


def test_accumulated_batches_are_told_one_by_one(make_images, tmp_path: Path) -> None:
    watch = Watch()
    data = make_images({"cat": 8, "dog": 8}, size=(8, 8))
    train(data, tmp_path / "run", callbacks=[watch], epochs=1, accumulate=2, batch_size=2)
    assert [len(batch.labels) for batch, _ in watch.seen] == [2] * 6


def test_no_hook_is_there_unless_a_callback_asks() -> None:
    plain, watch = Callback(), Watch()
    assert not asks_for_logits(Callbacks([plain, Callbacks([])]))
    assert asks_for_logits(Callbacks([plain, Callbacks([watch])]))

    class Duck:
        on_run_start = on_epoch_start = on_batch = on_epoch_end = on_stop = on_run_end = lambda *_: None

    check_callbacks([Duck()])
    assert not asks_for_logits(Duck())


def test_the_hook_is_gone_after_training(make_images, tmp_path: Path) -> None:
    class Model(Watch):
        def on_run_start(self, run: RunStart) -> None:
            self.model = run.model

    watch = Model()
    train(make_images({"cat": 8, "dog": 8}, size=(8, 8)), tmp_path / "run", callbacks=[watch], epochs=1)
    assert not watch.model._forward_hooks


def test_steps_without_logits_say_so(make_images, tmp_path: Path) -> None:
    data = make_images({"cat": 8, "dog": 8}, size=(8, 8))
    with pytest.raises(UsageError, match="--patch-sizes does not support callbacks with on_logits"):
        train(data, tmp_path / "run", callbacks=[Watch()], patch_sizes=[2, 4])
