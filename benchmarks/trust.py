"""Four types of damage, with the number of wrong answers, crashes and broken files that followed.

- *Fuzzed*: inputs made by atheris, guided by the coverage of vitral's code, Pillow's, zipfile's and tarfile's. A
  finding is an exception other than vitral's refusal, or more than 20 s. `sandbox` starts a process for each pickle.
- *Flipped bits* in each file of a run folder: found if `vitral.verify` names the file.
- *Killed*: SIGKILL at a random moment of a training run, then the same command with `--resume`, or unchanged if nothing
  was written yet. Right if the weights have the bits of an undisturbed run.
- *Full disks*: a command whose files cannot grow beyond a limit in bytes, so that a write fails with `OSError`. Clean
  if it succeeds, or exits with 1 or 2 and one error without a traceback; either way every file left is whole.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks.machine import ROOT
from benchmarks.results import Options, Row, Table

INPUTS = {
    "safetensors": 150_000,
    "native": 20_000,
    "npz": 150_000,
    "pickle": 150_000,
    "sandbox": 500,
    "config": 150_000,
    "fields": 100_000,
    "table": 40_000,
    "idx": 40_000,
    "zip": 50_000,
    "tar": 50_000,
    "tar.gz": 50_000,
    "image": 40_000,
    "command": 9_500,
}
"""Target → number of inputs; a million in total."""

FLIPS, KILLS, LIMITS = 200, 24, 25  # flips of each file, killed runs, disk sizes for each command
TRAIN = ("train", "digits", "--epochs", "2", "--seed", "0", "--quiet")


def run(options: Options) -> list[Table]:
    """Measure the named parts (fuzz, flips, kills, disks), by default all of them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = folder / "whole"
        done = _vitral(*TRAIN, "--out", str(whole))
        if done.returncode:
            raise RuntimeError(done.stderr)
        parts = {
            "fuzz": lambda: fuzzed(folder, *((1000, 5) if options.quick else (1, 1))),
            "flips": lambda: flips(whole, 3 if options.quick else FLIPS),
            "kills": lambda: kills(whole, folder, 1 if options.quick else KILLS),
            "disks": lambda: full_disks(whole, folder, 1 if options.quick else LIMITS),
        }
        return [make() for part, make in parts.items() if part in (options.names or parts)]


def fuzzed(folder: Path, divisor: int, every: int) -> Table:
    """Fuzz every n-th target (`every`) in its own process, which atheris ends."""
    rows = []
    for target, runs in list(INPUTS.items())[::every]:
        words = [target, "--runs", str(max(runs // divisor, 3)), "--guided", "--out", str(folder)]
        program = [sys.executable, "-m", "benchmarks.fuzz", *words]
        done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{target} ended with exit code {done.returncode}: {done.stderr[-2000:]}")
        found = json.loads((folder / f"{target}.json").read_text())
        for place, about in found["places"].items():
            print(f"{target}: {place}: {about['why']}\n  input {about['input']}", flush=True)
        rows.append({**dict.fromkeys(("answered", "refused", "findings"), 0), **found})
        print(f"{target}: {found['runs']:,} inputs, {rows[-1]['findings']} findings", flush=True)
    total: dict[str, Any] = {key: sum(row[key] for row in rows) for key in ("runs", "answered", "refused", "findings")}
    total |= {"target": "all", "slowest": max(r["slowest"] for r in rows), "peak_mib": max(r["peak_mib"] for r in rows)}
    columns = {
        "target": "parser",
        "runs": "inputs|,d",
        "answered": "answered|,d",
        "refused": "refused|,d",
        "findings": "findings|d",
        "slowest": "slowest s|.2f",
        "peak_mib": "peak MiB|,d",
    }
    return Table("Fuzzed inputs", columns, [*rows, total], "fuzz")


def flips(whole: Path, count: int) -> Table:
    """Flip one bit of one file at a time and restore it."""
    import vitral

    rows, chance = [], random.Random(0)
    for file in sorted(path for path in whole.rglob("*") if path.is_file() and path.name != ".lock"):
        content, found = file.read_bytes(), 0
        for _ in range(count):
            bit = chance.randrange(8 * len(content))
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            file.write_bytes(damaged)
            found += any(file.name in one.file for one in vitral.verify(whole).damaged)
        file.write_bytes(content)
        rows.append({"file": str(file.relative_to(whole)), "flips": count, "found": found})
    if vitral.verify(whole).damaged:
        raise RuntimeError("the run folder is damaged after everything was put back")
    return Table("Flipped bits", {"file": "file", "flips": "flips|d", "found": "found|d"}, rows, "flips")


def kills(whole: Path, folder: Path, count: int) -> Table:
    """Kill runs at moments between the start of the process and shortly after its usual end."""
    truth, chance, rows = load_file(whole / "model.safetensors"), random.Random(0), []
    began_at = time.monotonic()
    _vitral(*TRAIN, "--out", str(folder / "timed"))
    usual = time.monotonic() - began_at
    for number in range(count):
        out, after = folder / f"killed-{number}", chance.uniform(0.1, 1.05) * usual
        process = subprocess.Popen([*_words(*TRAIN), "--out", str(out)], stdout=subprocess.DEVNULL)
        try:
            process.wait(after)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        began = (out / "config.json").exists()
        done = _vitral(*TRAIN, "--out", str(out), *(["--resume"] if began else []))
        weights = out / "model.safetensors"
        found = load_file(weights) if weights.exists() else {}
        equal = found.keys() == truth.keys() and all(found[key].equal(truth[key]) for key in truth)
        rows.append({"began": began, "killed": process.returncode == -9, "clean": done.returncode == 0, "equal": equal})
        shutil.rmtree(out, ignore_errors=True)
    counts = [
        {
            "when": "after the run began" if began else "before the run began",
            "runs": len(chosen),
            "killed": sum(row["killed"] for row in chosen),
            "clean": sum(row["clean"] for row in chosen),
            "equal": sum(row["equal"] for row in chosen),
        }
        for began in (False, True)
        for chosen in [[row for row in rows if row["began"] == began]]
    ]
    columns = {
        "when": "killed",
        "runs": "runs|d",
        "killed": "by the signal|d",
        "clean": "went on|d",
        "equal": "same bits|d",
    }
    return Table("Killed and resumed", columns, counts, "kills")


def full_disks(whole: Path, folder: Path, count: int) -> Table:
    """Run commands under limits from 0 bytes to the size of their largest file."""
    image = folder / "image.png"
    _image(image)
    commands = {
        "train": [*TRAIN, "--out", "{out}/run"],
        "train --resume": ["train", "--resume", "--out", "{out}/copy", "--quiet"],
        "convert": ["convert", str(whole), "{out}/model.safetensors", "--to", "timm"],
        "predict --report": ["predict", str(whole), str(image), "--report", "{out}/page.html"],
        "explain --report": ["explain", str(whole), str(image), "--report", "{out}/page.html"],
    }
    return Table(
        "Full disks",
        {"command": "command", "limits": "limits|d", "failed": "failed|d", "clean": "clean|d"},
        [_disk(name, words, whole, folder, count) for name, words in commands.items()],
        "disks",
    )


def _disk(name: str, words: Sequence[str], whole: Path, folder: Path, count: int) -> Row:
    chance, failed, clean = random.Random(name), 0, 0
    for number in range(count):
        out = folder / "disk"
        out.mkdir()
        if "--resume" in words:
            shutil.copytree(whole, out / "copy")
            (out / "copy" / "result.json").unlink()  # so that the run is not finished
        before = _contents(out)
        limit = 0 if number == 0 else int(2 ** chance.uniform(5, 21))
        done = _vitral(*[word.format(out=out) for word in words], limit=limit)
        failed += done.returncode != 0
        output = done.stdout + done.stderr
        refused = done.returncode in (1, 2) and "Traceback" not in output and "bug in vitral" not in output
        clean += (done.returncode == 0 or refused) and _is_whole(out, before)
        shutil.rmtree(out)
    return {"command": f"`vitral {name}`", "limits": count, "failed": failed, "clean": clean}


def _contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _is_whole(out: Path, before: dict[Path, bytes]) -> bool:
    """True if no file is truncated: the run verifies, weights load, pages end."""
    import vitral

    after = _contents(out)
    if before.keys() - after.keys():
        return False
    for path, content in after.items():
        if path.suffix == ".safetensors":
            load_file(path)
        elif path.suffix == ".html" and b"</html>" not in content[-200:]:  # a digest may follow
            return False
    folders = [path.parent for path in after if path.name == "config.json"]
    return not any(vitral.verify(one).damaged for one in folders)


def _image(path: Path) -> None:
    import numpy as np
    from PIL import Image

    Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)).save(path)


def _words(*words: str) -> list[str]:
    return [sys.executable, "-m", "vitral", *words]


def _vitral(*words: str, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in a process whose files are at most `limit` bytes long."""
    import resource

    def begin() -> None:
        if limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(_words(*words), preexec_fn=begin, env=environment, capture_output=True, text=True)
