"""Helpers of many tests: tiny runs, commands and their output, child processes."""

from __future__ import annotations

import faulthandler
import hashlib
import itertools
import json
import math
import os
import signal
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

import vitral
from vitral.cli.main import main
from vitral.data.images.preprocessing import Preprocessing
from vitral.device import seeded
from vitral.errors import Interrupted
from vitral.model import ViT, ViTConfig
from vitral.weights import native
from vitral.weights.files import read_tensors
from vitral.weights.native import Weights
from vitral.workflows.running import execute

T = TypeVar("T")

PATIENCE = 150.0
"""Seconds that a child may take."""

may_fork = False
"""True while a test with the mark `real` runs."""

TINY: dict[str, Any] = {
    "model": "mu/4",
    "dim": 8,
    "depth": 2,
    "heads": 2,
    "mlp_dim": 8,
    "image_size": 8,
    "epochs": 3,
    "batch_size": 4,
    "crop": "none",
    "augment": "none",
    "flip": False,
    "optimizer": "adamw",
    "lr": 5e-3,
    "warmup": 1.0,
    "ema": 0.0,
    "drop_path": 0.0,
    "device": "cpu",
    "precision": "fp32",
}
"""Options of a run that takes some milliseconds an epoch on a dozen images."""


def mostly_slow(values: Iterable[Any], every: int) -> list[Any]:
    """Values for `parametrize`: every n-th one is for `make test`, a third of the others for `make test-all`, the rest
    for a soak. A tuple has the values of several parameters.
    """
    rows = [one if isinstance(one, tuple) else (one,) for one in values]
    rest = itertools.cycle([pytest.mark.slow, pytest.mark.soak, pytest.mark.soak])
    return [pytest.param(*row, marks=[next(rest)] if i % every else []) for i, row in enumerate(rows)]


def sampled(values: Iterable[Any], every: int) -> list[Any]:
    """Values for `parametrize`: every n-th one is tested, all others in a soak."""
    rows = [one if isinstance(one, tuple) else (one,) for one in values]
    return [pytest.param(*row, marks=[pytest.mark.soak] * (i % every > 0)) for i, row in enumerate(rows)]


def write_teacher(folder: Path, **changes: Any) -> Path:
    """Write a tiny ViT with random weights and five classes, to teach others; return its file."""
    shape = {"image_size": 12, "patch_size": 4, "classes": 5, "dim": 16, "depth": 1, "heads": 2, "mlp_dim": 16}
    config = ViTConfig(**{**shape, **changes})
    with seeded(7):
        state = ViT(config).state_dict()
        state = {name: value + 0.3 * torch.randn(value.shape) for name, value in state.items()}
    preprocessing = Preprocessing(config.image, channels=config.channels, interpolation="bicubic")
    classes = tuple(map(str, range(config.classes)))
    native.save(folder / "teacher.safetensors", Weights(config, state, preprocessing, classes, {}))
    return folder / "teacher.safetensors"


def train(data: object, out: Path, **options: Any) -> vitral.TrainedRun:
    """Train a run with `TINY` and these options, and a fifth of its images for validation."""
    return vitral.train(str(data), out=str(out), quiet=True, **{**TINY, "val_fraction": 0.2, **options})


def as_words(options: dict[str, Any]) -> list[str]:
    """Format options as typed."""
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    """Run a command that ends with `code`; return its standard output and standard error."""
    capsys.readouterr()
    assert main(list(words)) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return captured.out, captured.err


def as_json(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    """Run a command with `--format json`; return what it printed."""
    out, _ = printed(capsys, *words, "--format", "json", code=code)
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def call_at_batch(
    monkeypatch: pytest.MonkeyPatch, number: int, what: Callable[[], None], *, across_runs: bool = False
) -> None:
    """Call `what` during the `number`-th batch (from 0) of each of the next runs, or of all of them together."""
    original, together = execute.objective_of, itertools.count()

    def objective_of(*args: Any, **more: Any) -> Any:
        objective, count = original(*args, **more), together if across_runs else itertools.count()

        def counted(model: Any, batch: Any) -> Any:
            if next(count) == number:
                what()
            return objective(model, batch)

        return counted

    monkeypatch.setattr(execute, "objective_of", objective_of)


def check_resumed(data: object, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Check that a run that Ctrl-C stops at its seventh batch, resumed, has the bits and metrics of a whole one."""
    whole = train(data, folder / "whole", **options)
    call_at_batch(monkeypatch, 6, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Interrupted):
        train(data, folder / "cut", **options)
    monkeypatch.undo()
    again = vitral.train(out=str(folder / "cut"), resume=True, quiet=True)
    assert same_bits(weights_of(whole.folder), weights_of(again.folder))
    assert recorded(whole.folder) == recorded(again.folder)


def recorded(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "images_per_second", "waited")} for line in lines]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Load the tensors of a run's model.safetensors."""
    return read_tensors(Path(folder) / "model.safetensors")[0]


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """True if two sets of tensors are equal, name by name and bit by bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def soak(full: T, short: T) -> T:
    """Return `full` if VITRAL_SOAK is set, for a machine that has an hour; else `short`, for every change."""
    return full if os.environ.get("VITRAL_SOAK") else short


MANY, PART = 6, 3
"""With VITRAL_ROTATE, one in `PART` of the variants of a test that has `MANY` or more runs."""


def rotated(items: Iterable[Any], commit: str) -> set[Any]:
    """Return the variants that do not run at this commit: two thirds of many, others at another one."""
    alike = defaultdict[str, list[Any]](list)
    for item in items:
        alike[item.nodeid.partition("[")[0]].append(item)
    left_out = set[Any]()
    for variants in alike.values():
        if len(variants) >= MANY:
            order = sorted(variants, key=lambda one: hashlib.sha256(f"{commit} {one.nodeid}".encode()).digest())
            left_out.update(order[-(-len(order) // PART) :])
    return left_out


def in_child(work: Callable[[], int]) -> int:
    """Run `work` in a new process and process group, and return its exit code (minus the signal that ended it).

    A child that hangs is asked where, and killed.
    """
    child, until = fork(work), time.monotonic() + PATIENCE
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > until:
            os.kill(child, signal.SIGUSR2)
            time.sleep(1)
            os.killpg(child, signal.SIGKILL)
            until = math.inf
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(ended[1])


def fork(work: Callable[[], int]) -> int:
    """Start `work` in a new process and process group, and return its number. A fork, so that torch is not imported
    again. Its exit code is what `work` returns, 99 after an exception.

    Trap: a fork has none of its parent's threads. If torch has computed on two threads here, `work` waits forever for
    them as soon as it computes on two. So tests that set the number of threads do so in a child. SIGUSR2 prints the
    stacks of a child.
    """
    assert may_fork, "a test that starts a process has the mark `real`"
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.setsid()
            faulthandler.register(signal.SIGUSR2, sys.__stderr__)  # capsys replaces sys.stderr by one without a file
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return child
