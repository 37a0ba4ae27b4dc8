"""Ranks of a run are killed at random times, and started again with `--resume`, until the run is finished. Beside it
the same run without kills: both end with the same bits, if nothing that was saved is lost. The others shall end soon
after a rank is killed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch._dynamo
from PIL import Image

from benchmarks.results import Options, Table
from vitral.cli.main import main
from vitral.distributed import ranks
from vitral.training.run_folder import RunFolder
from vitral.weights.files import read_tensors

RANKS = 2
HANGS = 60.0
"""Seconds after which a rank counts as hanging."""
OPTIONS: dict[str, object] = {
    "model": "mu/4",
    "dim": 8,
    "depth": 2,
    "heads": 2,
    "mlp-dim": 8,
    "image-size": 8,
    "batch-size": 4,
    "crop": "none",
    "augment": "none",
    "optimizer": "adamw",
    "lr": 0.005,
    "mixup": 0.2,
    "drop-path": 0.2,
    "ema": 0.9,
    "val-fraction": 0.2,
    "device": "cpu",
    "precision": "fp32",
}


@dataclass(frozen=True)
class Kill:
    """One killed rank."""

    rank: int
    after: float
    """Seconds since its start."""
    seconds: float
    """Until the others had ended, or `HANGS`."""
    codes: tuple[int, ...]
    """Exit codes of the others."""
    joined: bool
    """True if all ranks had joined. Before, a rank cannot know of another one: a launcher ends it."""


@dataclass(frozen=True)
class Finished:
    """A run that was finished in spite of kills."""

    kills: tuple[Kill, ...]
    equal: bool
    """True if it has the bits of the run without kills."""
    printed: str


def run(options: Options) -> list[Table]:
    """Make a table of the kills by rank, and one of the runs."""
    kills, epochs = (2, 3) if options.quick else (30, 60)
    runs = list(killed_runs(kills, epochs))
    kept = [kill for one in runs for kill in one.kills]
    rows = []
    for joined, rank in sorted({(kill.joined, kill.rank) for kill in kept}):
        of = [kill.seconds for kill in kept if (kill.joined, kill.rank) == (joined, rank)]
        hung = sum(seconds >= HANGS for seconds in of)
        row = {"when": "training" if joined else "before all had joined", "rank": rank, "kills": len(of)}
        rows.append({**row, "median": statistics.median(of), "longest": max(of), "hung": hung})
    columns = {
        "when": "while|s",
        "rank": "killed rank|d",
        "kills": "kills|d",
        "median": "others ended after, s|.1f",
        "longest": "longest, s|.1f",
        "hung": "hung|d",
    }
    equal, traces = sum(one.equal for one in runs), sum("Traceback" in one.printed for one in runs)
    ends = {"runs": len(runs), "equal": equal, "tracebacks": traces}
    named = {
        "runs": "finished runs|d",
        "equal": "with the bits of one without kills|d",
        "tracebacks": "tracebacks|d",
    }
    caption = f"{len(kept)} kills at random times, of one of {RANKS} ranks"
    return [Table(caption, columns, rows), Table("Ends of these runs", named, [ends])]


def killed_runs(kills: int, epochs: int, seed: int = 0, strategy: str = "ddp") -> Iterator[Finished]:
    """Yield finished runs with `kills` kills in all: run after run, of so many epochs."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        options = {**OPTIONS, "epochs": epochs, "strategy": strategy}
        words = [str(_photos(Path(folder))), "--quiet", *(f"--{name}={value}" for name, value in options.items())]
        whole, log = Path(folder) / "whole", Path(folder) / "log"
        started = time.monotonic()
        codes = _wait(_start(["train", *words, "--out", str(whole)], log), HANGS * 10)
        assert codes == [0] * RANKS, f"{codes}: {log.read_text()}"
        most = 0.7 * (time.monotonic() - started)
        while kills > 0:
            one = _killed_run(words, Path(folder) / "killed", whole, kills, most, chance)
            kills -= len(one.kills)
            yield one
            shutil.rmtree(Path(folder) / "killed")


def _killed_run(
    words: Sequence[str], out: Path, whole: Path, most_kills: int, most_seconds: float, chance: random.Random
) -> Finished:
    """Start ranks until the run is finished; kill one of them at most so often, each time within so many seconds."""
    kills: list[Kill] = []
    log = out.with_name("killed.log")
    log.write_text("")
    while True:
        if out.exists() and not RunFolder(out).is_run():  # killed before its first file
            shutil.rmtree(out)
        resume = ["--resume"] if out.exists() else []
        started = time.monotonic()
        started_ranks = _start(["train", *words, "--out", str(out), *resume], log)
        if len(kills) < most_kills:
            after = chance.uniform(0, most_seconds)
            while time.monotonic() - started < after and not (out / "result.json").exists():
                time.sleep(0.01)
        if len(kills) < most_kills and not (out / "result.json").exists():
            joined = len(list(out.parent.glob("joined-*"))) == RANKS
            kills.append(_kill(started_ranks, chance.randrange(RANKS), started, joined))
            continue
        codes = _wait(started_ranks, HANGS * 10)
        assert codes == [0] * RANKS, f"{codes}: {log.read_text()}"
        return Finished(tuple(kills), _weights(out) == _weights(whole), log.read_text())


def _kill(processes: list[int], number: int, started: float, joined: bool) -> Kill:
    now = time.monotonic()
    os.kill(processes[number], signal.SIGKILL)
    os.waitpid(processes[number], 0)
    others = [process for i, process in enumerate(processes) if i != number]
    if not joined:
        for process in others:
            os.kill(process, signal.SIGTERM)  # as a launcher
    codes = _wait(others, HANGS)
    return Kill(number, now - started, time.monotonic() - now, tuple(codes), joined)


def _start(words: list[str], log: Path) -> list[int]:
    """Fork ranks that run a command; return their process ids."""
    with socket.socket() as server:
        server.bind(("localhost", 0))
        port = server.getsockname()[1]
    for file in log.parent.glob("joined-*"):
        file.unlink()
    sys.stdout.flush()
    processes = []
    for number in range(RANKS):
        child = os.fork()
        if child == 0:
            _be(number, port, words, log)
        processes.append(child)
    return processes


def _be(number: int, port: int, words: list[str], log: Path) -> None:
    code = 99
    try:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ |= {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        torch.set_num_threads(1)
        connect = ranks.Group.connect

        def connected(self: ranks.Group, device: str) -> None:
            connect(self, device)
            log.with_name(f"joined-{number}").touch()

        ranks.Group.connect = connected  # type: ignore[method-assign]
        code = main(words)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _wait(processes: list[int], seconds: float) -> list[int]:
    """Return the exit codes; a process that lives for so long is killed."""
    codes: dict[int, int] = {}
    until = time.monotonic() + seconds
    while len(codes) < len(processes):
        for process in set(processes) - set(codes):
            if time.monotonic() > until:
                os.kill(process, signal.SIGKILL)
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                codes[process] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return [codes[process] for process in processes]


def _weights(folder: Path) -> dict[str, bytes]:
    tensors = read_tensors(folder / "model.safetensors")[0]
    return {name: value.numpy().tobytes() for name, value in tensors.items()}


def _photos(folder: Path) -> Path:
    """Write 30 images of noise in two classes."""
    generator = np.random.default_rng(0)
    for name in ("a", "b"):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(15):
            pixels = generator.integers(0, 256, (8, 10, 3), np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / name / f"{number}.png")
    return folder / "photos"
