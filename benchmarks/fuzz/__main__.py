"""`python -m benchmarks.fuzz TARGET … --runs N --seed N [--guided] [--out FOLDER]`; without a target, all of them."""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

MEMORY = 8 << 30  # bytes of address space beyond which an allocation fails
INSTRUMENTED = ["vitral", "PIL", "json", "zipfile", "tarfile", "gzip", "csv", "pickletools"]


def main() -> None:
    """Fuzz the named targets. atheris ends its process, so `--guided` takes one target."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--guided", action="store_true", help="mutations led by coverage; one target")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    if args.guided:
        (name,) = args.targets
        _guided(name, args.runs, args.seed, args.out)
    from benchmarks.fuzz.tally import fuzz
    from benchmarks.fuzz.targets import TARGETS

    for name in args.targets or TARGETS:
        _report(fuzz(name, args.runs, args.seed).result(), args.out)


def _report(result: dict[str, Any], out: Path | None) -> None:
    print(json.dumps(result), flush=True)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{result['target']}.json").write_text(json.dumps(result, indent=1) + "\n")


def _guided(name: str, runs: int, seed: int, out: Path | None) -> None:
    """Fuzz guided by coverage. Modules are instrumented on import, so nothing of vitral may be imported before."""
    import atheris
    import torch  # noqa: F401  # large, and not under test

    with atheris.instrument_imports(include=INSTRUMENTED):
        from benchmarks.fuzz.tally import Tally, too_slow
        from benchmarks.fuzz.targets import TARGETS

    tally = Tally(name)

    def one(data: bytes) -> None:
        tally(data)
        if tally.outcomes.total() >= runs:
            _report(tally.result(), out)
            os._exit(0)

    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, too_slow)
    with tempfile.TemporaryDirectory() as corpus, tempfile.TemporaryDirectory() as seeds:
        for number, data in enumerate(TARGETS[name].seeds()):
            (Path(seeds) / str(number)).write_bytes(data)
        limits = ["-rss_limit_mb=0", "-max_len=8192"]
        atheris.Setup([sys.argv[0], *limits, f"-seed={seed + 1}", corpus, seeds], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
