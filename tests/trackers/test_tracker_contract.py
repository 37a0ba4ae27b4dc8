"""Every tracker keeps the contract that packages test theirs by, and the contract refuses broken ones."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from vitral.testing import TrackerContract
from vitral.trackers import TRACKERS
from vitral.trackers.csv_file import Tracker
from vitral.training.callbacks import Callback, Epoch


class TestCsv(TrackerContract):
    tracker = Tracker
    name = "csv"

    def check_written(self, folder: Path, history: Sequence[Epoch]) -> None:
        (file,) = folder.glob("*.csv")
        rows = list(csv.DictReader(file.read_text("utf-8").splitlines()))
        assert [float(row["train_loss"]) for row in rows] == [line["train_loss"] for line in history]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(TRACKERS) - {"csv"}))
def test_other_trackers_keep_the_contract(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip({"tensorboard": "tensorboard"}.get(name, name))
    for key, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns",
    }.items():
        monkeypatch.setenv(key, value)
    tracker = importlib.import_module(TRACKERS[name]).Tracker
    contract = type("TestOther", (TrackerContract,), {"tracker": tracker, "name": name})()
    contract.test_it_follows_a_run_and_changes_nothing_of_it(tmp_path)
    contract.test_it_continues_a_run_and_ends_with_one_that_failed(tmp_path)


class Drawing(Callback):
    """A tracker that takes random numbers of the run."""

    def on_batch(self, loss: torch.Tensor) -> None:
        torch.rand(1)

    def on_epoch_end(self, line: Epoch, best: bool) -> None:
        line["epoch"] += 1


def test_the_contract_refuses_a_tracker_that_changes_the_run(tmp_path: Path) -> None:
    contract = type("TestX", (TrackerContract,), {"tracker": Drawing, "name": "x"})()
    with pytest.raises(AssertionError, match="were changed"):
        contract.test_it_continues_a_run_and_ends_with_one_that_failed(tmp_path)
    with pytest.raises(KeyError):
        contract.test_vitral_finds_it()
