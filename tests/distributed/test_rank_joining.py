"""A rank that is killed, fails or never comes before all have joined: the others end soon, and name it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from rank_runs import at_step, command
from together import codes, on_ranks, start, wait_for

from running import same_bits, sampled, weights_of
from vitral.cli.main import main
from vitral.distributed import heartbeat, joining
from vitral.distributed.ranks import Group


@pytest.fixture
def photos(make_images) -> Path:
    return make_images({"a": 15, "b": 15})


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitral.workflows.running.execute._report", lambda *_: None)  # drawing is slow


def in_rank(number: int, act: Callable[[], object], owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `act` in one rank in the place of a method."""
    before = getattr(owner, name)

    def instead(*args: Any, **options: Any) -> Any:
        return act() if os.environ["RANK"] == str(number) else before(*args, **options)

    monkeypatch.setattr(owner, name, instead)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_ranks_that_never_come_are_named(photos, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(joining, "JOINING", timedelta(seconds=1))
    assert on_ranks(2, lambda: main(command(photos, tmp_path / "run")), {"WORLD_SIZE": "4"}) == [2, 2]
    printed = capfd.readouterr().err
    assert printed.count("error: ") == 1, printed
    assert "error: ranks 2, 3 have not joined\n  where: noticed by rank " in printed
    assert "waited for 1 s" in printed


def test_without_rank_0_there_is_no_store(photos, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(joining, "JOINING", timedelta(seconds=0.5))
    alone = {"RANK": "1", "WORLD_SIZE": "2"}
    assert on_ranks(1, lambda: main(command(photos, tmp_path / "run")), alone) == [2]
    printed = capfd.readouterr().err
    assert "error: rank 0 has not joined\n  where: no answer from localhost:" in printed
    assert "Connection refused" in printed


@pytest.mark.slow
def test_a_launcher_that_ends_the_others_gets_the_missing_rank(photos, tmp_path, monkeypatch, capfd):
    """Rank 1 is killed on its way; the launcher sends SIGTERM to those that wait."""
    waits = tmp_path / "waits"
    in_rank(1, die, Group, "__init__", monkeypatch)
    before = joining._Arrival.check_given_up

    def noted(self: Any) -> None:
        before(self)
        (waits.with_name(f"waits-{self.place.number}")).touch()

    monkeypatch.setattr(joining._Arrival, "check_given_up", noted)
    processes = start(3, lambda: main(command(photos, tmp_path / "run")))
    try:
        for number in (0, 2):
            wait_for(waits.with_name(f"waits-{number}"), 20)
    except AssertionError:
        codes(processes, 0)  # ends them
    began = time.monotonic()
    for number in (0, 2):
        os.kill(processes[number], signal.SIGTERM)
    assert codes(processes, 30) == [2, -signal.SIGKILL, 2]
    assert time.monotonic() - began < 15
    printed = capfd.readouterr().err
    assert printed.count("error: ") == 1, printed
    assert "error: rank 1 has not joined\n  where: noticed by rank " in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "run").exists()


def test_rank_0_that_is_killed_while_another_connects_to_its_store(photos, tmp_path, monkeypatch, capfd):
    """No signal interrupts that connection, either."""
    before, process = Group._heartbeat, tmp_path / "process"

    def connect(self: Any, store: Any) -> Any:
        if self.number == 0:
            process.write_text(str(os.getpid()))
        else:
            os.kill(int(process.read_text()), signal.SIGKILL)
        return before(self, store)

    monkeypatch.setattr(Group, "_heartbeat", connect)
    began = time.monotonic()
    assert on_ranks(2, lambda: main(command(photos, tmp_path / "run"))) == [-signal.SIGKILL, 2]
    assert time.monotonic() - began < 30
    printed = capfd.readouterr().err
    assert "error: lost rank 0's machine\n  why: torch's store does not answer" in printed
    assert "Traceback" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("rank", sampled([1, 0], 2))
def test_a_rank_that_is_killed_while_torch_connects(rank, photos, tmp_path, monkeypatch, capfd):
    """No signal interrupts torch's wait for it; the heartbeats of the others do."""
    monkeypatch.setattr(heartbeat, "LOST", 8.0)
    in_rank(rank, die, dist, "init_process_group", monkeypatch)
    found = on_ranks(3, lambda: main(command(photos, tmp_path / "run")))
    assert found[rank] == -signal.SIGKILL
    assert set(found) == {-signal.SIGKILL, 2}
    printed = capfd.readouterr().err
    assert f"error: lost rank {rank}" in printed
    if rank:  # rank 0 has the store
        assert printed.count("error: ") == 1, printed


@pytest.mark.slow
@pytest.mark.parametrize("rank", sampled([1, 0], 2))
def test_ranks_that_are_started_again_meet_at_the_same_store(rank, photos, tmp_path, monkeypatch, capfd):
    """torchrun keeps its store, with the keys of the ranks that have ended."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    hosted = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        at_step(7, rank, die, patched)
        assert sorted(on_ranks(2, lambda: main(command(photos, out)), hosted)) == [-signal.SIGKILL, 2]
    again = {**hosted, "TORCHELASTIC_RESTART_COUNT": "1"}
    capfd.readouterr()
    assert on_ranks(2, lambda: main(command(photos, out)), again) == [0, 0]
    assert "error" not in capfd.readouterr().err
    assert on_ranks(2, lambda: main(command(photos, tmp_path / "whole"))) == [0, 0]
    assert same_bits(weights_of(out), weights_of(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks in /proc")
@pytest.mark.parametrize(
    ("launcher", "after"), sampled([("nproc", 2.5), ("torchrun", 2.5), ("torchrun", 0.0), ("nproc", 0.0)], 2)
)
def test_a_real_launcher_ends_within_30_seconds_of_an_early_death(launcher, after, photos, tmp_path):
    words = command(photos, tmp_path / "run", epochs=1)
    start_words = {
        "nproc": ["-m", "vitral", *words, "--nproc", "2"],
        "torchrun": [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--local-addr",
            "localhost",
            "-m",
            "vitral",
            *words,
        ],
    }[launcher]
    process = subprocess.Popen(
        [sys.executable, *start_words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    victim = rank_of(process.pid, 1)
    time.sleep(after)
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    printed = process.communicate(timeout=60)[1]
    assert time.monotonic() - killed < 30
    assert process.returncode != 0
    named = {"nproc": "error: rank 1 ended\n  why: it was ended by SIGKILL", "torchrun": "Signal 9 (SIGKILL)"}
    assert named[launcher] in printed, printed


def rank_of(launcher: int, rank: int) -> int:
    """Return the process of a rank, once its launcher has started it."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        for process in children(launcher):
            if f"\0RANK={rank}\0" in environment(process):
                return process
        time.sleep(0.02)
    pytest.fail(f"the launcher started no rank {rank}")


def children(process: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process)], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


def environment(process: int) -> str:
    try:
        return f"\0{Path(f'/proc/{process}/environ').read_text()}"
    except OSError:
        return ""
