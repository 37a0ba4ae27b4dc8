"""Test reproducibility: repeated, stopped and resumed, killed and resumed runs are bit-identical."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import vitral
from running import TINY, as_words, call_at_batch, in_child, mostly_slow, recorded, same_bits, train, weights_of
from vitral.cli.main import main
from vitral.errors import Interrupted, RunError, UsageError
from vitral.training.optimizers import OPTIMIZERS
from vitral.weights.files import read_tensors, write_tensors
from vitral.workflows.running import execute, saving

VARIANTS: dict[str, dict[str, Any]] = {
    "mixed": {"mixup": 0.5, "cutmix": 0.5, "label_smoothing": 0.1},
    "averaged": {"ema": 0.9},
    "dropout": {"dropout": 0.2, "drop_path": 0.3, "checkpointing": True},
    "fewer patches": {"patch_dropout": 0.5, "position": "rotary", "dim": 16},
    "stem": {"model": "C+mu/4", "optimizer": "muon", "ema": 0.8},
    "accumulated": {"accumulate": 2, "clip": 0.1},
    "balanced": {"sampling": "balanced", "class_weights": "balanced"},
    "augmented": {"augment": "trivialaugment", "flip": True, "crop": "shift", "erase": 0.5},
    "streamed": {"residency": "stream", "workers": 2, "crop": "random-resized"},
    "bf16": {"precision": "bf16"},
    "layers": {"layer_decay": 0.7, "freeze": ("patch_embed",)},
    "unvalidated": {"val_fraction": 0.0},
    **{name: {"optimizer": name, "ema": 0.8} for name in OPTIMIZERS},
}


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_same_seed_same_bits_another_seed_others(photos, tmp_path):
    options = {"dropout": 0.1, "crop": "random-resized", "mixup": 0.3}
    a, b, c = (train(photos, tmp_path / out, seed=s, **options) for out, s in (("a", 1), ("b", 1), ("c", 2)))
    assert same_bits(weights_of(a.folder), weights_of(b.folder))
    assert not same_bits(weights_of(a.folder), weights_of(c.folder))
    assert recorded(a.folder) == recorded(b.folder) != recorded(c.folder)


@pytest.mark.parametrize("name", mostly_slow(VARIANTS, 4))
def test_stopped_in_mid_epoch_and_resumed(photos, tmp_path, monkeypatch, name):
    whole = train(photos, tmp_path / "whole", **VARIANTS[name])
    call_at_batch(monkeypatch, 5, interrupt)
    with pytest.raises(Interrupted) as stopped:
        train(photos, tmp_path / "cut", **VARIANTS[name])
    words = shlex.split(stopped.value.command)
    assert words == ["vitral", "train", "--out", str(tmp_path / "cut"), "--resume"]
    header = read_tensors(tmp_path / "cut/checkpoints/last.safetensors")[1]
    assert 0 < header["batch"] < (5 if name == "unvalidated" else 4)
    assert header["epoch"] == 1
    monkeypatch.undo()
    again = vitral.train(out=str(tmp_path / "cut"), resume=True, quiet=True)
    assert same_bits(weights_of(whole.folder), weights_of(again.folder))
    last = [read_tensors(folder / "checkpoints/last.safetensors") for folder in (whole.folder, again.folder)]
    assert same_bits(last[0][0], last[1][0])  # also the optimizer's state and the averaged weights
    assert recorded(whole.folder) == recorded(again.folder)
    for key in ("val_accuracy", "best_epoch", "epochs", "command"):
        got, wanted = again.result.get(key), whole.result.get(key)
        assert got == (wanted.replace("whole", "cut") if key == "command" else wanted)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_loop_over_runs_ends_at_a_stop(photos, tmp_path, monkeypatch, number):
    """A sweep notes failed runs by `except Exception` and goes on; Ctrl-C and SIGTERM are no failed run."""
    call_at_batch(monkeypatch, 5, lambda: os.kill(os.getpid(), number))

    def sweep() -> None:
        for name in ("first", "second"):
            with suppress(Exception):
                train(photos, tmp_path / name)

    with pytest.raises(KeyboardInterrupt, match=r"vitral train --out .*first --resume"):
        sweep()
    assert not (tmp_path / "second").exists()


@pytest.mark.report
@pytest.mark.slow
@pytest.mark.parametrize("batch", [0, 3, 4, 11])
def test_stopped_at_any_batch(photos, tmp_path, monkeypatch, batch):
    """Including the first batch, the last one of an epoch, and the last one of the run."""
    whole = train(photos, tmp_path / "whole", residency="stream", workers=0, crop="random-resized")
    call_at_batch(monkeypatch, batch, interrupt)
    with pytest.raises(Interrupted):
        train(photos, tmp_path / "cut", residency="stream", workers=0, crop="random-resized")
    monkeypatch.undo()
    again = vitral.train(out=str(tmp_path / "cut"), resume=True, quiet=True)
    assert same_bits(weights_of(whole.folder), weights_of(again.folder))
    assert (again.folder / "report.html").is_file()


@pytest.mark.real
@pytest.mark.parametrize("batch", [2, 6])
def test_killed_and_resumed(photos, tmp_path, monkeypatch, batch):
    """In the first epoch nothing is saved yet, and the run starts again."""
    whole = train(photos, tmp_path / "whole", dropout=0.1)
    call_at_batch(monkeypatch, batch, lambda: os.kill(os.getpid(), signal.SIGKILL))
    out = tmp_path / "cut"
    assert in_child(lambda: train(photos, out, dropout=0.1) and 0) == -signal.SIGKILL
    monkeypatch.undo()
    again = vitral.train(out=str(out), resume=True, quiet=True)
    assert same_bits(weights_of(whole.folder), weights_of(again.folder))
    assert again.result["command"] == whole.result["command"].replace("whole", "cut")


@pytest.mark.real
def test_killed_between_weights_and_state(photos, tmp_path, monkeypatch):
    """The weights are newer than the state, which is that of the previous epoch."""
    whole = train(photos, tmp_path / "whole", lr=0.05)

    def killed(self: Any, path: Path, identity: Any, tensors: Any) -> None:
        if self.epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, path, identity, tensors)

    original = execute.State.save
    monkeypatch.setattr(saving, "SAVING_SHARE", 1e9)  # after every epoch, however quick
    monkeypatch.setattr(execute.State, "save", killed)
    assert in_child(lambda: train(photos, tmp_path / "cut", lr=0.05) and 0) == -signal.SIGKILL
    monkeypatch.undo()
    again = vitral.train(out=str(tmp_path / "cut"), resume=True, quiet=True)
    assert same_bits(weights_of(whole.folder), weights_of(again.folder))
    assert (again.folder / "metrics.jsonl").read_text().count("\n") == 3


@pytest.mark.real
@pytest.mark.slow
def test_ctrl_c_reaches_the_workers_too(photos, tmp_path, monkeypatch, capfd):
    """A terminal sends the signal to the whole process group."""
    options = {"residency": "stream", "workers": 2}
    call_at_batch(monkeypatch, 5, lambda: os.killpg(0, signal.SIGINT))
    words = as_words({**TINY, "val_fraction": 0.2, **options, "out": tmp_path / "cut"})
    assert in_child(lambda: main(["train", str(photos), *words])) == 130
    reported = capfd.readouterr().err
    assert "Traceback" not in reported
    command = shlex.split(reported.strip().splitlines()[-1])
    monkeypatch.undo()
    assert main([*command[1:], "--quiet"]) == 0
    assert same_bits(weights_of(train(photos, tmp_path / "whole", **options).folder), weights_of(tmp_path / "cut"))


@pytest.mark.slow
def test_a_real_process_and_a_real_ctrl_c(photos, tmp_path):
    """End to end: exit code 130, the command to resume, and bit-identical results."""
    options = {**TINY, "val_fraction": 0.2, "epochs": 60, "ema": 0.9}
    out = tmp_path / "cut"
    words = ["train", str(photos), *as_words({**options, "out": out})]
    process = subprocess.Popen(
        [sys.executable, "-m", "vitral", *words], stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    deadline = time.monotonic() + 180
    while not (out / "metrics.jsonl").is_file() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    reported = process.communicate(timeout=180)[1]
    assert process.returncode == 130
    assert "Traceback" not in reported
    assert "Stopped and saved" in reported
    assert "stopping after this step and saving the run" in reported
    command = shlex.split(reported.strip().splitlines()[-1])
    assert not (out / "result.json").exists()
    assert command[0] == "vitral"
    assert main([*command[1:], "--quiet"]) == 0
    assert same_bits(weights_of(train(photos, tmp_path / "whole", **options).folder), weights_of(out))


def test_a_run_stopped_before_saving_reports_it(photos, tmp_path, monkeypatch, capsys):
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "run"
    words = ["train", str(photos), *as_words({**TINY, "out": out})]
    with monkeypatch.context() as patch:
        patch.setattr("vitral.workflows.running.execute.fit", stopped)
        assert main(words) == 130
    reported = capsys.readouterr().err
    assert "Stopped before anything was saved. To restart:" in reported
    command = shlex.split(reported.strip().splitlines()[-1])
    assert main([*command[1:], "--quiet"]) == 0
    assert (out / "result.json").is_file()


def test_fine_tuning_resumes_bit_identically(trained, tmp_path, monkeypatch):
    options = {"init": str(trained.folder), "freeze": ("patch_embed",), "drop_path": 0.2, "epochs": 2, "batch_size": 4}
    whole = vitral.train(trained.result["data"], out=str(tmp_path / "whole"), quiet=True, device="cpu", **options)
    call_at_batch(monkeypatch, 8, interrupt)
    with pytest.raises(Interrupted):
        vitral.train(trained.result["data"], out=str(tmp_path / "cut"), quiet=True, device="cpu", **options)
    monkeypatch.undo()
    again = vitral.train(out=str(tmp_path / "cut"), resume=True, quiet=True)
    assert same_bits(weights_of(whole.folder), weights_of(again.folder))
    assert not same_bits(weights_of(whole.folder), weights_of(trained.folder))


def test_resume_is_for_the_same_run(photos, make_images, tmp_path):
    run = train(photos, tmp_path / "run")
    assert train(photos, tmp_path / "run", resume=True).result == run.result  # finished: nothing to do
    with pytest.raises(UsageError, match="--epochs differs") as caught:
        train(photos, tmp_path / "run", resume=True, epochs=9)
    assert "it was 3" in str(caught.value)
    with pytest.raises(UsageError, match="--data differs"):
        train(make_images({"cat": 2, "dog": 2}, name="others"), tmp_path / "run", resume=True)
    with pytest.raises(UsageError, match="unknown option 'epoch'"):
        train(photos, tmp_path / "run", resume=True, epoch=9)
    with pytest.raises(RunError, match="there is no run to resume"):
        train(photos, tmp_path / "nothing", resume=True)
    first = {"init": str(tmp_path / "run"), "mean": 0.4}
    begun = train(photos, tmp_path / "two words", **first)
    assert train(photos, tmp_path / "two words", resume=True, **first).result == begun.result
    with pytest.raises(UsageError, match="--mean differs"):
        train(photos, tmp_path / "two words", resume=True, mean=0.5)
    with pytest.raises(RunError, match=r"--out '.*two words-2' for another folder, or --overwrite to replace it"):
        train(photos, tmp_path / "two words")


def test_resume_finds_the_folder_that_training_chose(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call_at_batch(monkeypatch, 5, interrupt)
    with pytest.raises(Interrupted):
        vitral.train("photos/", quiet=True, **TINY)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert vitral.train("photos", resume=True, quiet=True).folder == Path("runs/photos")


def test_overwrite_also_replaces_a_stopped_run(photos, tmp_path, monkeypatch):
    call_at_batch(monkeypatch, 5, interrupt)
    with pytest.raises(Interrupted):
        train(photos, tmp_path / "run", seed=7)
    monkeypatch.undo()
    again = train(photos, tmp_path / "run", overwrite=True)
    fresh = train(photos, tmp_path / "fresh")
    assert same_bits(weights_of(again.folder), weights_of(fresh.folder))
    assert again.result["seed"] == 0


def test_a_checkpoint_that_does_not_fit_is_reported(photos, tmp_path, monkeypatch):
    call_at_batch(monkeypatch, 5, interrupt)
    with pytest.raises(Interrupted):
        train(photos, tmp_path / "run")
    monkeypatch.undo()
    last = tmp_path / "run/checkpoints/last.safetensors"
    tensors, header = read_tensors(last)
    del tensors["model.head.bias"]
    write_tensors(last, tensors, header)
    with pytest.raises(RunError, match="does not fit the run") as caught:
        vitral.train(out=str(tmp_path / "run"), resume=True, quiet=True)
    assert len(str(caught.value).splitlines()) <= 5
    last.write_bytes(last.read_bytes()[:-5])
    with pytest.raises(vitral.VitralError, match="damaged") as caught:
        vitral.train(out=str(tmp_path / "run"), resume=True, quiet=True)
    assert str(last) in str(caught.value)
    assert f"begin again: vitral train {photos}" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 5


def test_missing_weights_are_detected_before_resuming(photos, tmp_path, monkeypatch):
    """No other file contains the best weights, so a finished or resumed run must not continue without them."""
    whole = train(photos, tmp_path / "whole")
    call_at_batch(monkeypatch, 9, interrupt)
    with pytest.raises(Interrupted):
        train(photos, tmp_path / "cut")
    monkeypatch.undo()
    monkeypatch.setattr(execute, "fit", lambda *about, **more: pytest.fail("it went on"))
    for folder, expected in ((whole.folder, "the run's weights are missing"), (tmp_path / "cut", "no such file")):
        weights = folder / "model.safetensors"
        weights.rename(folder / "elsewhere")
        with pytest.raises(RunError, match=expected) as caught:
            vitral.train(out=str(folder), resume=True, quiet=True)
        assert f"where: {weights}" in str(caught.value)
        assert "--overwrite" in str(caught.value)
        (folder / "elsewhere").rename(weights)
    monkeypatch.undo()
    again = vitral.train(out=str(tmp_path / "cut"), resume=True, quiet=True)
    assert same_bits(weights_of(whole.folder), weights_of(again.folder))


def test_a_missing_checkpoint_is_detected(photos, tmp_path, monkeypatch):
    """Silently restarting would replace better weights with those of the first epoch."""
    call_at_batch(monkeypatch, 9, interrupt)
    with pytest.raises(Interrupted):
        train(photos, tmp_path / "run")
    monkeypatch.undo()
    weights = (tmp_path / "run/model.safetensors").read_bytes()
    (tmp_path / "run/checkpoints/last.safetensors").unlink()
    with pytest.raises(RunError, match="the checkpoint is missing") as caught:
        vitral.train(out=str(tmp_path / "run"), resume=True, quiet=True)
    assert f"begin again: vitral train {photos}" in str(caught.value)
    assert (tmp_path / "run/model.safetensors").read_bytes() == weights


def test_a_damaged_result_is_not_a_bug(photos, tmp_path):
    run = train(photos, tmp_path / "run")
    (run.folder / "result.json").write_text("{")
    with pytest.raises(RunError, match="cannot read the run's result") as caught:
        vitral.train(out=str(run.folder), resume=True, quiet=True)
    assert f"vitral evaluate {run.folder}" in str(caught.value)
    (run.folder / "result.json").unlink()
    assert (
        vitral.train(out=str(run.folder), resume=True, quiet=True).result["val_accuracy"] == run.result["val_accuracy"]
    )


def test_resume_and_overwrite_are_mutually_exclusive(photos, tmp_path):
    run = train(photos, tmp_path / "run")
    with pytest.raises(UsageError, match="--resume and --overwrite are mutually exclusive"):
        train(photos, tmp_path / "run", resume=True, overwrite=True)
    assert (run.folder / "result.json").is_file()


def test_two_processes_do_not_train_one_run(photos, tmp_path, monkeypatch, capsys):
    whole = train(photos, tmp_path / "whole")
    call_at_batch(monkeypatch, 4, interrupt)
    with pytest.raises(Interrupted):
        train(photos, tmp_path / "run")
    monkeypatch.undo()
    lock = tmp_path / "run" / ".lock"
    holding = "import sys; from filelock import FileLock; lock = FileLock(sys.argv[1]).acquire(); print(flush=True); "
    holding += "sys.stdin.read()"
    command = [sys.executable, "-c", holding, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
        words = as_words({**TINY, "val_fraction": 0.2, "out": str(tmp_path / "run")})
        for how in (["--resume"], ["--overwrite"], []):
            assert main(["train", str(photos), *words, *how]) == 2
            assert "another process is training this run" in capsys.readouterr().err
        assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
        other.kill()
    assert same_bits(weights_of(train(photos, tmp_path / "run", resume=True).folder), weights_of(whole.folder))
    assert not lock.exists()


def test_a_run_that_another_process_finished_is_kept(photos, tmp_path, monkeypatch):
    """A whole run may pass between checking the folder and locking it."""
    set_up, out = execute._set_up, tmp_path / "run"

    def late(*given: Any) -> Any:
        running = set_up(*given)
        monkeypatch.undo()
        train(photos, out, seed=5, **({"resume": True} if out.exists() else {}))
        return running

    monkeypatch.setattr(execute, "_set_up", late)
    with pytest.raises(RunError, match="already exists"):
        train(photos, out)
    kept = weights_of(out)
    assert same_bits(kept, weights_of(train(photos, tmp_path / "alone", seed=5).folder))

    call_at_batch(monkeypatch, 4, interrupt)
    with pytest.raises(Interrupted):
        train(photos, out, seed=5, overwrite=True)
    monkeypatch.undo()
    monkeypatch.setattr(execute, "_set_up", late)
    assert train(photos, out, seed=5, resume=True).result
    assert same_bits(kept, weights_of(out))


def test_stopped_in_its_first_epoch_it_has_no_weights_yet(photos, tmp_path, monkeypatch):
    call_at_batch(monkeypatch, 1, interrupt)
    with pytest.raises(Interrupted):
        train(photos, tmp_path / "run")
    with pytest.raises(RunError, match=r"no weights yet(.|\n)*--resume"):
        vitral.load(tmp_path / "run")


def test_nothing_to_resume(photos, tmp_path):
    with pytest.raises(RunError, match=r"no run to resume(.|\n)*leave out --resume to start"):
        train(photos, tmp_path / "run", resume=True)
