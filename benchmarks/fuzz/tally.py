"""Outcomes of a fuzzed parser, and reproducible mutations of its seeds."""

from __future__ import annotations

import hashlib
import resource
import signal
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fuzz.targets import TARGETS
from vitral.errors import VitralError

SLOWEST = 20  # seconds allowed for one input


class TooSlowError(Exception):
    """An input took longer than `SLOWEST`."""


class Tally:
    """Runs of one target; findings are kept by the location that raised them, with their smallest input."""

    def __init__(self, name: str):
        self.name, self.run = name, TARGETS[name].run
        self.began = time.monotonic()
        self.outcomes: Counter[str] = Counter()
        self.findings: dict[str, tuple[str, bytes]] = {}
        self.slowest = 0.0

    def __call__(self, data: bytes) -> None:
        began = time.perf_counter()
        signal.alarm(SLOWEST)
        try:
            self.run(data)
            self.outcomes["answered"] += 1
        except VitralError:
            self.outcomes["refused"] += 1
        except Exception as error:
            self.outcomes["findings"] += 1
            self._keep(error, data)
        finally:
            signal.alarm(0)
        self.slowest = max(self.slowest, time.perf_counter() - began)

    def _keep(self, error: Exception, data: bytes) -> None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
        if place not in self.findings or len(data) < len(self.findings[place][1]):
            self.findings[place] = str(error)[:200], data

    def result(self) -> dict[str, Any]:
        """Convert to plain data: counts, and each finding with its input in hexadecimal."""
        found = {place: {"why": why, "input": data.hex()[:4000]} for place, (why, data) in self.findings.items()}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        counts = {"runs": self.outcomes.total(), **self.outcomes, "seconds": round(time.monotonic() - self.began)}
        counts |= {"slowest": round(self.slowest, 3), "peak_mib": peak}
        return {"target": self.name, **counts, "places": found}


def mutated(seeds: list[bytes], rng: np.random.Generator) -> bytes:
    """Change, remove, repeat or replace a few bytes of a seed."""
    data = bytearray(seeds[rng.integers(len(seeds))])
    for _ in range(1 + rng.integers(6)):
        if not data:
            break
        at, length = int(rng.integers(len(data))), int(rng.integers(1, 9))
        kind = rng.integers(6)
        if kind == 0:
            data[at] = rng.integers(256)
        elif kind == 1:
            data[at] ^= 1 << int(rng.integers(8))
        elif kind == 2:
            del data[at : at + length]
        elif kind == 3:
            data[at:at] = data[at : at + length] * int(rng.integers(1, 4))
        elif kind == 4:
            data[at : at + length] = [b"\0", b"\xff", b"\x7f", b"9", b"-", b"[", b'"'][rng.integers(7)] * length
        else:
            other = seeds[rng.integers(len(seeds))]
            start = int(rng.integers(len(other)))
            data[at : at + length] = other[start : start + length]
    return bytes(data)


def fuzz(name: str, runs: int, seed: int, seconds: float = float("inf")) -> Tally:
    """Run the seeds, then mutations up to `runs` inputs; the same inputs for the same seed."""
    stream = int.from_bytes(hashlib.sha256(f"{name} {seed}".encode()).digest()[:8], "big")
    tally, rng, seeds = Tally(name), np.random.default_rng(stream), TARGETS[name].seeds()
    end = time.monotonic() + seconds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = signal.signal(signal.SIGALRM, too_slow)
        try:
            for number in range(runs):
                tally(seeds[number] if number < len(seeds) else mutated(seeds, rng))
                if time.monotonic() > end:
                    break
        finally:
            signal.signal(signal.SIGALRM, before)
    return tally


def too_slow(*_: object) -> None:
    """Handle SIGALRM."""
    raise TooSlowError(f"longer than {SLOWEST} s")
