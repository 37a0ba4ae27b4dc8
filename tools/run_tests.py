"""Run the tests in stages, print the time of each, and fail for what they leave behind.

python tools/run_tests.py quick|all|STAGE ... [-- arguments of pytest]

`quick` is the stage of `make test`, `all` are those of `make test-all`. A failing test of the stages `slow` and `real`
has a second try, alone, since its processes, servers, browsers and ranks share the machine with others; it is then
listed as flaky.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".pytest_cache" / "stage"
MOST = 10
"""Failures that end a stage. Ten are enough to see; a hundred that wait for their timeout would take hours."""


class Stage(NamedTuple):
    """A part of the tests: marks, further arguments of pytest, and variables."""

    marks: str
    select: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}
    second_try: bool = False
    processes: str = "auto"
    words: str = ""
    """Pattern that the path or the text of a file with such tests matches. Other files are not read."""


LESSER_CPU = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
LEAST_CPU = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
"""Rounds unlike every CPU that the golden copies are made on: they must hold on machines that nobody tried."""
NUMERIC = ("tests/kernels", "tests/model", "tests/training", "tests/inference")
STAGES = {
    "quick": Stage("not slow and not real", ("--timeout", "120")),
    "avx2": Stage("not slow and not real", NUMERIC, LESSER_CPU),
    "least": Stage("not real", ("tests/golden",), LEAST_CPU),
    "slow": Stage("slow and not real", second_try=True, words="slow"),
    "real": Stage(
        "real",
        second_try=True,
        processes="3",  # they wait more than they compute
        words="real|browser|distributed|serving",
    ),
}


def main(words: list[str]) -> int:
    """Run the stages that are named; return the exit code."""
    names, more = (words, []) if "--" not in words else (words[: words.index("--")], words[words.index("--") + 1 :])
    names = list(STAGES) if names == ["all"] else names
    if not names or not {*names} <= {*STAGES}:
        print(f"usage: run_tests.py all | {' '.join(STAGES)} [-- arguments of pytest]", file=sys.stderr)
        return 2
    run, before = uuid.uuid4().hex, places()
    # A short path: sockets of Unix may have 107 letters.
    temporary = Path(tempfile.mkdtemp(prefix="vt-"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), "VITRAL_TESTS_RUN": run}
    lines, failed = [], False
    try:
        for name in names:
            began = time.monotonic()
            code, flaky = run_stage(STAGES[name], {**environment, **STAGES[name].environment}, more)
            lines.append(f"stage {name}: {'failed' if code else 'passed'} in {time.monotonic() - began:.0f} s")
            lines += [f"flaky, passed at the second try: {test}" for test in flaky]
            failed = failed or bool(code)
            if failed:
                break
        left = [*left_processes(run), *left_files(before)]
        lines += [f"left by the tests: {each}" for each in left]
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print("\n".join(lines))
    return int(failed or bool(left))


def run_stage(stage: Stage, environment: Mapping[str, str], more: list[str]) -> tuple[int, list[str]]:
    """Return the exit code of a stage, and the tests that passed at their second try only."""
    shutil.rmtree(CACHE, ignore_errors=True)
    marks = stage.marks if os.environ.get("VITRAL_SOAK") else f"({stage.marks}) and not soak"
    base = [sys.executable, "-m", "pytest", "-o", f"cache_dir={CACHE}", "-m", marks, *stage.select, *files_of(stage)]
    shown = ["--durations", "25", "--durations-min", "5", "--maxfail", str(MOST)]
    code = call([*base, "-n", stage.processes, "--dist", "worksteal", *shown, *more], environment)
    failures = last_failed()
    if code == 0 or not stage.second_try or not 0 < len(failures) < MOST:
        return code, []
    print(f"Second try of {len(failures)} tests, alone", flush=True)
    again = call([*base, "-n", "0", "--last-failed", "--last-failed-no-failures", "none"], environment)
    return again, sorted(set(failures) - set(last_failed()))


def files_of(stage: Stage) -> list[str]:
    """Return the files that a stage reads; none for all. Reading all of them takes each process twenty seconds."""
    if not stage.words:
        return []
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    pattern = re.compile(stage.words)
    return [str(path) for path in paths if pattern.search(f"{path.relative_to(ROOT)} {path.read_text('utf-8')}")]


def call(command: list[str], environment: Mapping[str, str]) -> int:
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def last_failed() -> list[str]:
    file = CACHE / "v/cache/lastfailed"
    return list(json.loads(file.read_text("utf-8"))) if file.is_file() else []


def left_processes(run: str) -> list[str]:
    """Return the processes that inherited this run's variable and still exist, after some seconds to end (Linux)."""
    found: list[str] = []
    for _ in range(20):
        found = []
        for process in Path("/proc").glob("[0-9]*") if Path("/proc/self/environ").is_file() else ():
            try:
                if run.encode() in (process / "environ").read_bytes() and process.name != str(os.getpid()):
                    words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    found.append(f"process {process.name}: {words[:120]}")
            except OSError:  # it has ended
                continue
        if not found:
            break
        time.sleep(0.5)
    return found


def places() -> dict[str, set[str]]:
    """Return the names in folders where tests must leave nothing: the checkout, and home but for hidden folders, where
    libraries keep settings. Other programs write into the system's folder of temporary files, too.
    """
    home = Path.home()
    found = {str(home): {each.name for each in home.iterdir() if not each.name.startswith(".")}}
    status = subprocess.run(
        ["git", "status", "--porcelain", "--ignored", "--untracked-files=normal"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    return {**found, str(ROOT): {line[3:] for line in status if not any(part in line for part in KEPT)}}


KEPT = (".venv", "__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache")
"""Files of tools in the checkout."""


def left_files(before: Mapping[str, set[str]]) -> list[str]:
    """Return the files that are new since `before`."""
    return [
        f"file {folder}/{name}"
        for folder, names in places().items()
        for name in sorted(names - before.get(folder, set()))
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
