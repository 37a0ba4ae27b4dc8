"""Tiny runs for tests, and what is compared of them."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import vitral
from vitral.weights.files import read_tensors

TINY: dict[str, Any] = {
    "model": "mu/4", "dim": 8, "depth": 2, "heads": 2, "mlp_dim": 8, "image_size": 8, "epochs": 3, "batch_size": 4,
    "crop": "none", "augment": "none", "flip": False, "optimizer": "adamw", "lr": 5e-3, "warmup": 1.0, "ema": 0.0,
    "drop_path": 0.0, "device": "cpu", "precision": "fp32",
}  # fmt: skip
"""Options of a run that takes some milliseconds an epoch on a dozen pictures."""


def train(data: object, out: Path, **options: Any) -> vitral.TrainedRun:
    """A run of `TINY` and these options, a fifth of its pictures for validation."""
    return vitral.train(str(data), out=str(out), quiet=True, **{**TINY, "val_fraction": 0.2, **options})


def as_words(options: dict[str, Any]) -> list[str]:
    """The options as they are typed."""
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a run's model.safetensors."""
    return read_tensors(Path(folder) / "model.safetensors")[0]


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of tensors are equal, name by name and bit by bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def in_child(work: Callable[[], int]) -> int:
    """Run `work` in a process of its own, in a group of its own, and return its exit code (minus the signal that ended
    it). A fork: no time is lost to importing torch again.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.setsid()
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
