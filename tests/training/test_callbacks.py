"""Callbacks get copies: what one of them edits is neither saved nor seen by others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from vitral.training.callbacks import Callback, Callbacks, RunStart


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
