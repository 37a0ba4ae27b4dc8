"""Trackers: what they write is read back by the tool's own reader and compared with metrics.jsonl."""

from __future__ import annotations

import csv
import json
import os
import signal
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import vitral
from images import MakeImages
from running import TINY, in_child, same_bits, train, weights_of
from vitral.errors import Interrupted, MissingExtraError, UsageError
from vitral.trackers import TRACKERS, csv_file, scalars
from vitral.training.callbacks import Callback, Epoch, RunStart
from vitral.workflows import train as workflow


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No network, and MLflow's store in a folder."""
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def photos(make_images: MakeImages) -> Path:
    return make_images({"cat": 12, "dog": 8})


class Stop(Callback):
    """Ctrl-C after an epoch, or while it is computed."""

    def __init__(self, after: int = 0, within: int = 0, kill: bool = False):
        self.after, self.within, self.kill = after, within, kill
        self.epoch = 0

    def on_epoch_start(self, epoch: int, batches: int, done: int) -> None:
        self.epoch = epoch + 1

    def on_batch(self, loss: Tensor) -> None:
        if self.epoch == self.within:
            self._stop()

    def on_epoch_end(self, line: Epoch, best: bool) -> None:
        if line["epoch"] == self.after:
            self._stop()

    def _stop(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL if self.kill else signal.SIGINT)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


def csv_of(folder: Path) -> list[dict[str, float]]:
    with open(folder / "metrics.csv", newline="", encoding="utf-8") as file:
        return [{name: float(value) for name, value in line.items()} for line in csv.DictReader(file)]


def tensorboard_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def wandb_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every number of every history record of every session, in order of the sessions."""
    from wandb.proto import wandb_internal_pb2 as pb

    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted((folder / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for data in _records(file.read_bytes()):
            record = pb.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
                for name, value in items.items():
                    if isinstance(value, int | float) and not name.startswith("_"):
                        found.setdefault(name, []).append((int(items["_step"]), float(value)))
    return found


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format (blocks of 32 KiB; crc, length and type before each piece)."""
    position, pieces = 7, b""  # behind the file's own header
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        if not kind:
            return
        pieces += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield pieces
            pieces = b""


def mlflow_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from mlflow.tracking import MlflowClient

    run = json.loads((folder / "mlflow.json").read_text("utf-8"))["run"]
    client = MlflowClient()
    names = client.get_run(run).data.metrics
    return {name: [(one.step, one.value) for one in client.get_metric_history(run, name)] for name in names}


pytestmark = pytest.mark.real
"""Weights & Biases starts a process of its own."""


READERS = {"tensorboard": tensorboard_of, "wandb": wandb_of, "mlflow": mlflow_of}


def assert_same(found: Mapping[str, list[tuple[int, float]]], lines: list[dict[str, Any]]) -> None:
    """Every number of metrics.jsonl once, in order, at its epoch."""
    for name in scalars(lines[0]):
        wanted = [(line["epoch"], scalars(line)[name]) for line in lines]
        assert [step for step, _ in found[name]] == [step for step, _ in wanted], name
        assert np.allclose([value for _, value in found[name]], [value for _, value in wanted], rtol=1e-6), name


def test_every_tracker_has_a_reader_here():
    assert {"csv", *READERS} == TRACKERS.keys()


def test_names_are_grouped_by_split():
    line = {"epoch": 1, "step": 5, "train_loss": 2, "val_accuracy": 0.5, "lr": 0.1, "image_size": [8, 8], "waited": 0.0}
    assert scalars(line) == {"train/loss": 2.0, "val/accuracy": 0.5, "lr": 0.1, "waited": 0.0}


def test_all_of_a_run_is_read_back(photos, tmp_path):
    run = train(photos, tmp_path / "run", log=tuple(TRACKERS))
    lines = metrics(run.folder)
    assert len(lines) == 3
    assert csv_of(run.folder) == [{name: float(value) for name, value in line.items()} for line in lines]
    for read in READERS.values():
        found = read(run.folder)
        assert_same(found, lines)
    assert tensorboard_of(run.folder)["result/val/accuracy"] == [
        (run.result["best_epoch"], pytest.approx(run.result["val_accuracy"]))
    ]


def test_options_and_sample_images_are_read_back(photos, tmp_path):
    from mlflow.tracking import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(photos, tmp_path / "run", log=tuple(TRACKERS))
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    (image,) = events.Images("training images")
    assert (image.width, image.height) == (4 * 8, 8), "four images, a batch, of 8 × 8"
    assert '"lr": 0.005' in events.Tensors("options/text_summary")[0].tensor_proto.string_val[0].decode()
    of_mlflow = MlflowClient().get_run(json.loads((run.folder / "mlflow.json").read_text())["run"])
    assert of_mlflow.data.params["lr"] == "0.005"
    assert of_mlflow.info.status == "FINISHED"
    assert of_mlflow.info.run_name == "run"
    assert len(list(run.folder.glob("wandb/offline-run-*/files/media/images/*.png"))) == 4


@pytest.mark.parametrize(
    "stop",
    [{"within": 2}, pytest.param({"after": 2}, marks=pytest.mark.slow)],
    ids=["within an epoch", "after an epoch"],
)
def test_a_stopped_run_continues_without_a_gap(photos, tmp_path, stop):
    out, log = tmp_path / "run", tuple(TRACKERS)
    with pytest.raises(Interrupted):
        train(photos, out, log=log, epochs=4, callbacks=[Stop(**stop)])
    run = vitral.train(out=str(out), resume=True, quiet=True)
    lines = metrics(run.folder)
    assert [line["epoch"] for line in lines] == [1, 2, 3, 4]
    assert [line["epoch"] for line in csv_of(out)] == [1, 2, 3, 4]
    for name, read in READERS.items():
        if name != "wandb" or "within" not in stop:
            assert_same(read(out), lines)


def test_a_killed_run_continues_without_a_gap(photos, tmp_path):
    out, log = tmp_path / "run", ("csv", "tensorboard", "mlflow")

    def killed() -> int:
        train(photos, out, log=log, epochs=4, callbacks=[Stop(after=3, kill=True)])
        return 0

    assert in_child(killed) == -signal.SIGKILL
    run = vitral.train(out=str(out), resume=True, quiet=True)
    lines = metrics(run.folder)
    assert csv_of(out) == [{name: float(value) for name, value in line.items()} for line in lines]
    assert_same(tensorboard_of(out), lines)
    steps = [step for step, _ in mlflow_of(out)["train/loss"]]
    assert steps == [1, 2, 3, 4]


def test_a_tracker_added_later_has_the_epochs_before(photos, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(photos, out, callbacks=[Stop(after=2)])
    vitral.train(out=str(out), resume=True, quiet=True, log=("tensorboard",))
    assert_same(tensorboard_of(out), metrics(out))


def test_trackers_do_not_change_the_run(photos, tmp_path):
    plain = train(photos, tmp_path / "plain", augment="trivialaugment", erase=0.5)
    logged = train(photos, tmp_path / "logged", augment="trivialaugment", erase=0.5, log=("tensorboard",))
    assert same_bits(weights_of(plain.folder), weights_of(logged.folder))


def test_an_unknown_tracker_is_refused_before_anything_else(tmp_path):
    with pytest.raises(UsageError, match=r"tensorbord.*\n.*nearest: tensorboard"):
        vitral.train(str(tmp_path / "nowhere"), log=("tensorbord",), out=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_says_what_to_install(photos, tmp_path, monkeypatch, name):
    for module in [
        one for one in sys.modules if one.split(".")[0] == name or one.startswith("torch.utils.tensorboard")
    ]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(sys.modules, TRACKERS[name], raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'vitral\[{name}\]'"):
        train(photos, tmp_path / "run", log=(name,))
    assert not (tmp_path / "run").exists()
    monkeypatch.delitem(sys.modules, TRACKERS[name], raising=False)


def test_a_tracker_that_fails_does_not_end_the_run(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = vitral.train(str(photos), out=str(tmp_path / "run"), log=("mlflow", "csv"), val_fraction=0.2, **TINY)
    assert len(csv_of(run.folder)) == 3
    told = capsys.readouterr().err
    assert told.count("--log mlflow failed, and the run continues without it") == 1


@pytest.mark.parametrize("method", [name for name in vars(Callback) if name.startswith("on_")])
def test_a_tracker_may_fail_in_any_method(photos, tmp_path, monkeypatch, capsys, method):
    def broken(*given: Any) -> None:
        raise ZeroDivisionError("its own")

    monkeypatch.setattr(csv_file.Tracker, method, broken)
    callbacks = [Stop(after=1)] if method == "on_stop" else []
    with pytest.raises(Interrupted) if callbacks else nullcontext():
        vitral.train(str(photos), out=str(tmp_path / "run"), log=("csv",), callbacks=callbacks, **TINY)
    assert "--log csv failed, and the run continues without it: ZeroDivisionError: its own" in capsys.readouterr().err
    assert callbacks or (tmp_path / "run/result.json").is_file()


class Recorder(Callback):
    """The calls, in order."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_run_start(self, run: RunStart) -> None:
        self.calls.append(("start", run.folder.name, len(run.history), run.options["lr"]))

    def on_epoch_start(self, epoch: int, batches: int, done: int) -> None:
        self.calls.append(("epoch", epoch, batches, done))

    def on_batch(self, loss: Tensor) -> None:
        assert loss.shape == ()
        self.calls.append("batch")

    def on_epoch_end(self, line: Epoch, best: bool) -> None:
        self.calls.append(("end of epoch", line["epoch"], type(best)))

    def on_run_end(self, result: Mapping[str, Any] | None) -> None:
        self.calls.append(("end", result and result["epochs"]))


def test_callbacks_are_called_in_this_order(photos, tmp_path):
    recorder = Recorder()
    train(photos, tmp_path / "run", epochs=2, callbacks=[recorder])
    epochs = [[("epoch", n, 4, 0), *["batch"] * 4, ("end of epoch", n + 1, bool)] for n in range(2)]
    assert recorder.calls == [("start", "run", 0, 5e-3), *epochs[0], *epochs[1], ("end", 2)]


def test_a_stopped_run_ends_for_callbacks_too(photos, tmp_path):
    recorder = Recorder()
    with pytest.raises(Interrupted):
        train(photos, tmp_path / "run", epochs=4, callbacks=[recorder, Stop(after=2)])
    assert recorder.calls[-1] == ("end", None)
    again = Recorder()
    vitral.train(out=str(tmp_path / "run"), resume=True, quiet=True, callbacks=[again])
    assert again.calls[0][:3] == ("start", "run", 2)
    assert again.calls[-1] == ("end", 4)


def test_an_exception_of_a_callback_is_the_callers(photos, tmp_path):
    class Broken(Callback):
        def on_epoch_end(self, line: Epoch, best: bool) -> None:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        train(photos, tmp_path / "run", callbacks=[Broken()])
    assert vitral.train(out=str(tmp_path / "run"), resume=True, quiet=True).result["epochs"] == 3


def test_samples_are_augmented_training_images_with_their_classes(photos, tmp_path):
    found: list[tuple[np.ndarray, str]] = []

    class Look(Callback):
        def on_run_start(self, run: RunStart) -> None:
            found.extend(run.samples(3))

    train(photos, tmp_path / "run", callbacks=[Look()])
    assert [image.shape for image, _ in found] == [(8, 8, 3)] * 3
    assert all(image.dtype == np.uint8 and image.std() > 10 for image, _ in found)
    assert {label for _, label in found} <= {"cat", "dog"}


def test_a_name_alone_is_a_tracker_too(photos, tmp_path):
    assert workflow._trackers("csv", None)[0].name == "csv"  # type: ignore[arg-type, attr-defined]
