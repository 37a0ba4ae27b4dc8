"""A rank that is killed, hangs, stops or fails ends all ranks, is named once, and costs nothing that was saved."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import OPTIONS, assert_same, at_step, command, history
from together import codes, on_ranks, start, wait_for

from running import same_bits, sampled, train, weights_of
from vitral.cli.main import main
from vitral.distributed import heartbeat
from vitral.distributed.ranks import current
from vitral.distributed.tensors import whole
from vitral.training.loop import State
from vitral.weights import files
from vitral.weights.files import read_tensors


@pytest.fixture
def photos(make_images) -> Path:
    return make_images({"a": 15, "b": 15})


@pytest.fixture(autouse=True)
def no_report(monkeypatch) -> None:
    monkeypatch.setattr("vitral.workflows.running.execute._report", lambda *_: None)  # drawing is slow


WIDE: dict[str, Any] = {"dim": 192, "mlp_dim": 768}
"""Gradients that are exchanged in several pieces, whose order shows in the bits of a sum over three ranks."""


def ended(
    photos: Path, out: Path, count: int, capfd: pytest.CaptureFixture[str], **options: object
) -> tuple[list[int], str]:
    """Run ranks that a fault ends; return their exit codes and their messages."""
    found = on_ranks(count, lambda: main(command(photos, out, **options)))
    printed = capfd.readouterr().err
    assert printed.count("error: ") == 1, printed
    assert "Traceback" not in printed
    return found, printed


@pytest.mark.slow
@pytest.mark.parametrize("rank", sampled([2, 1], 2))
def test_a_killed_rank_is_named_and_the_run_goes_on(rank, photos, tmp_path, monkeypatch, capfd):
    out = tmp_path / "cut"
    with monkeypatch.context() as patched:
        killed = tmp_path / "killed"

        def kill() -> None:
            group: Any = current()
            while "epoch 2, step 7" not in group.store.get(f"vitral/beat/{rank}").decode():
                time.sleep(0.05)  # a dead rank's position is that of its last beat
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

        at_step(7, rank, kill, patched)
        found, printed = ended(photos, out, 3, capfd, **WIDE)
        seconds = time.time() - killed.stat().st_mtime
    assert found[rank] == -signal.SIGKILL
    assert set(found) == {-signal.SIGKILL, 2}
    assert f"error: lost rank {rank} on " in printed
    assert "epoch 2, step 7" in printed
    assert "--resume" in printed
    assert seconds < 30
    assert on_ranks(3, lambda: main(command(photos, out, "--resume", **WIDE))) == [0] * 3
    assert on_ranks(3, lambda: main(command(photos, tmp_path / "whole", **WIDE))) == [0] * 3
    assert same_bits(weights_of(out), weights_of(tmp_path / "whole"))


@pytest.mark.slow
def test_a_rank_that_is_only_slow_is_not_lost(monkeypatch):
    """Two ranks are silent for as long after a collective has failed; one of them beats again."""
    began = time.monotonic()
    monkeypatch.setattr(heartbeat, "DIAGNOSIS", 0.4)
    monkeypatch.setattr(heartbeat, "BEAT", 0.1)
    watcher: Any = object.__new__(heartbeat.Heartbeat)
    watcher.everyone = [1, 2]
    watcher._beats = lambda _: {1: f"{time.monotonic() - began > 0.7}|rank 1", 2: "0|rank 2"}
    assert watcher.missing() == "rank 2"
    watcher._beats = lambda _: {1: "0|rank 1", 2: "0|rank 2"}
    assert watcher.missing() == "rank 1; rank 2"
    watcher._beats = lambda _: {1: heartbeat.ENDED, 2: f"{time.monotonic()}|rank 2"}
    assert watcher.missing() == ""


def test_rank_0_keeps_the_store_until_another_rank_has_named_the_lost_one(monkeypatch):
    """Rank 2 is dead; rank 1 notices it a little later than rank 0 does, and asks the store that rank 0 has."""
    began = time.monotonic()
    monkeypatch.setattr(heartbeat, "DIAGNOSIS", 0.2)
    monkeypatch.setattr(heartbeat, "BEAT", 0.05)
    watcher: Any = object.__new__(heartbeat.Heartbeat)
    watcher.everyone = [1, 2]

    def beats(_: object) -> dict[int, str]:
        now = time.monotonic()
        return {1: f"{now}|rank 1" if now < began + 0.6 else heartbeat.ENDED, 2: "0|rank 2"}

    watcher._beats = beats
    watcher.wait_for_others()
    assert 0.6 <= time.monotonic() - began < 3 * heartbeat.DIAGNOSIS + heartbeat.GRACE


@pytest.mark.slow
def test_the_first_rank_is_killed(photos, tmp_path, monkeypatch, capfd):
    """With it goes torch's store: nobody can tell who prints the error."""
    at_step(7, 0, lambda: os.kill(os.getpid(), signal.SIGKILL), monkeypatch)
    assert on_ranks(2, lambda: main(command(photos, tmp_path / "run"))) == [-signal.SIGKILL, 2]
    printed = capfd.readouterr().err
    assert "error: lost rank 0" in printed
    assert "Traceback" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("rank", sampled([1, 0], 2))
def test_a_rank_that_hangs_is_named(rank, photos, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(heartbeat, "LOST", 8.0)
    at_step(7, rank, lambda: os.kill(os.getpid(), signal.SIGSTOP), monkeypatch)
    processes = start(3, lambda: main(command(photos, tmp_path / "run")))
    others = [process for number, process in enumerate(processes) if number != rank]
    try:
        assert codes(others, 60) == [heartbeat.LOST_CODE] * 2
    finally:
        os.kill(processes[rank], signal.SIGKILL)
        os.waitpid(processes[rank], 0)
    printed = capfd.readouterr().err
    assert "Traceback" not in printed
    assert f"error: lost rank {rank}" in printed
    if rank:  # rank 0 has the store
        assert printed.count("error: ") == 1, printed


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGUSR1", marks=pytest.mark.slow)])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(name, photos, tmp_path, monkeypatch, capfd):
    out = tmp_path / "cut"
    with monkeypatch.context() as patched:
        at_step(7, 1, lambda: os.kill(os.getpid(), getattr(signal, name)), patched)
        assert on_ranks(2, lambda: main(command(photos, out))) == [0, 0]
    printed = capfd.readouterr().err
    assert printed.count("Stopped and saved") == 1
    assert not (out / "result.json").exists()
    tensors, header = read_tensors(out / "checkpoints" / "last.safetensors")
    assert header["step"] in (8, 9)
    assert tensors["sums.count"] == 5 * header["batch"]  # of all ranks
    assert on_ranks(2, lambda: main(command(photos, out, "--resume"))) == [0, 0]
    assert on_ranks(2, lambda: main(command(photos, tmp_path / "whole"))) == [0, 0]
    assert same_bits(weights_of(out), weights_of(tmp_path / "whole"))
    assert (out / "held-out.jsonl").read_bytes() == (tmp_path / "whole/held-out.jsonl").read_bytes()


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(photos, tmp_path, monkeypatch):
    """2 ranks, ddp → 3 ranks, fsdp → one process: the state that is loaded has the bits that were saved."""
    out = tmp_path / "cut"
    uncut = train(photos, tmp_path / "uncut", **OPTIONS)
    with monkeypatch.context() as patched:
        at_step(7, 1, lambda: os.kill(os.getpid(), signal.SIGTERM), patched)
        assert on_ranks(2, lambda: main(command(photos, out))) == [0, 0]
    saved, restore = read_tensors(out / "checkpoints" / "last.safetensors")[0], State.restore

    def restored(self: State, tensors: Any, header: Any) -> Any:
        identity = restore(self, tensors, header)
        wanted, found = {k: v for k, v in saved.items() if not k.startswith("sums.")}, contents(self)
        assert wanted.keys() == found.keys()
        assert not [name for name in wanted if not torch.equal(wanted[name], found[name])]
        return identity

    with monkeypatch.context() as patched:
        patched.setattr(State, "restore", restored)
        at_step(11, 2, lambda: os.kill(os.getpid(), signal.SIGTERM), patched)
        assert on_ranks(3, lambda: main(command(photos, out, "--resume", "--strategy", "fsdp"))) == [0, 0, 0]
    assert not (out / "result.json").exists()
    assert main(command(photos, out, "--resume", "--quiet")) == 0
    assert_same(history(uncut.folder), history(out))


@pytest.mark.slow
def test_a_run_does_not_go_on_with_a_strategy_that_its_plan_would_refuse(photos, tmp_path, monkeypatch, capfd):
    out = tmp_path / "cut"
    with monkeypatch.context() as patched:
        at_step(7, 1, lambda: os.kill(os.getpid(), signal.SIGTERM), patched)
        assert on_ranks(2, lambda: main(command(photos, out, optimizer="muon"))) == [0, 0]
    capfd.readouterr()
    again = command(photos, out, "--resume", "--strategy", "offload", optimizer="muon")
    assert on_ranks(2, lambda: main(again)) == [2, 2]
    printed = capfd.readouterr().err
    assert printed.count("error: --strategy offload does not go with this run") == 1
    assert "on cpu, there is no other memory to move the network to" in printed
    assert on_ranks(2, lambda: main(command(photos, out, "--resume", optimizer="muon"))) == [0, 0]


def contents(state: State) -> dict[str, Any]:
    found = {f"model.{k}": v for k, v in state.model.state_dict().items()}
    found |= {f"optimizer.{k}": v for k, v in state.optimizer.state().items()}
    assert state.averaged is not None
    found |= {f"averaged.{k}": v for k, v in state.averaged.state_dict().items()}
    return {name: whole(value) for name, value in found.items()}


@pytest.mark.slow
def test_a_launcher_that_starts_ranks_again_resumes(photos, tmp_path, monkeypatch):
    """torchrun --max-restarts: the same words again, --overwrite among them."""
    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        at_step(7, 1, lambda: os.kill(os.getpid(), signal.SIGTERM), patched)
        assert on_ranks(2, lambda: main(command(photos, out, "--overwrite"))) == [0, 0]
    again = {"TORCHELASTIC_RESTART_COUNT": "1"}
    at_step(1, 0, lambda: pytest.fail("it began again"), monkeypatch)
    assert on_ranks(2, lambda: main(command(photos, out, "--overwrite")), again) == [0, 0]
    assert (out / "result.json").is_file()
    fresh = tmp_path / "killed before its first file"
    monkeypatch.undo()
    assert on_ranks(2, lambda: main(command(photos, fresh, "--quiet", epochs=1)), again) == [0, 0]


@pytest.mark.slow
def test_a_loss_that_is_not_finite_names_its_rank(photos, tmp_path, monkeypatch, capfd):
    from vitral.training.objectives import classification as objective

    cross_entropy = objective.F.cross_entropy

    def broken(*args: Any, **options: Any) -> Any:
        loss = cross_entropy(*args, **options)
        return loss * float("nan") if os.environ.get("RANK") == "1" else loss

    monkeypatch.setattr(objective.F, "cross_entropy", broken)
    found, printed = ended(photos, tmp_path / "run", 2, capfd)
    assert found == [2, 2]
    assert "error: rank 1 on " in printed
    assert "the loss is nan" in printed


@pytest.mark.slow
def test_a_full_disk_ends_all_ranks_and_keeps_the_last_checkpoint(photos, tmp_path, monkeypatch, capfd):
    save, out = files.save_file, tmp_path / "run"

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        if (out / "checkpoints" / "last.safetensors").is_file():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(tensors, path, metadata)

    monkeypatch.setattr(files, "save_file", full)
    found, printed = ended(photos, out, 2, capfd)
    assert found == [2, 2]
    assert "No space left on device" in printed
    monkeypatch.setattr(files, "save_file", save)
    assert read_tensors(out / "checkpoints" / "last.safetensors")[1]["epoch"] == 1
    wait_for(out / "model.safetensors")
    assert on_ranks(2, lambda: main(command(photos, out, "--resume", "--quiet"))) == [0, 0]
