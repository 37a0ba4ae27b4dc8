"""The folder that golden copies are made in: two seeded runs and a few images, reached by relative paths alone."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from PIL import Image

from vitral.cli.main import main

WIDTH = 100
"""Columns of the terminal that help is rendered for."""

_ENVIRONMENT = {"COLUMNS": str(WIDTH), "LINES": "40", "NO_COLOR": "1", "TERM": "dumb"}
_FORCED = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "PYTHON_COLORS")
"""Variables that would bring color and control characters into text."""

# A network of patches alone, so that other formats can hold its weights. AdamW at this rate amplifies rounding little:
# losses on other instruction sets agree to 4e-5; those of the default optimizer at its rate agree to 1.5e-3.
_SEEDED = "--model Femto/2 --optimizer adamw --lr 0.003 --warmup 0.5 --batch-size 32"
# The plan as it is: convolutional stem, Muon, averaged weights.
_PLANNED = "--train-share 0.5"
_BOTH = "train digits --epochs 2 --seed 0 --plain --precision fp32 --device cpu --quiet"
RUNS = {"runs/seeded": _SEEDED, "runs/planned": _PLANNED}
"""Run folder → its options beside those of both."""

IMAGES = 2
"""Images to predict and explain, 8 × 8 pixels: a ring, and a bar."""


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in `folder`, on one thread and with caches in it; everything is restored afterwards.

    One thread: the order of sums, and with it the last bits of weights, depends on the number of threads.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    changed = {**_ENVIRONMENT, "XDG_CACHE_HOME": str(folder / "cache")}
    try:
        with contextlib.chdir(folder), mock.patch.dict(os.environ, changed):
            for name in _FORCED:
                os.environ.pop(name, None)
            yield
    finally:
        torch.set_num_threads(threads)


def prepare() -> None:
    """Train the runs and draw the images in the working folder."""
    for folder, options in RUNS.items():
        command(f"{_BOTH} --out {folder} {options}")
    Path("images").mkdir()
    for number in range(IMAGES):
        Image.fromarray(_stroke(number)).save(f"images/{number}.png")


def _stroke(number: int) -> np.ndarray:
    """The pixels of a ring (0) or a bar (1): drawn here, so that no decoder or data set decides them."""
    pixels = np.zeros((8, 8), dtype=np.uint8)
    pixels[:, 2:6] = 240
    if number == 0:
        pixels[2:6, 3:5] = 0
    return pixels


def command(words: str) -> str:
    """Standard output of a command, which must succeed."""
    out, err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n"), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words.split())
    if code:
        raise RuntimeError(f"vitral {words} ended with {code}:\n{err.getvalue()}")
    out.flush()
    return out.buffer.getvalue().decode("utf-8")  # type: ignore[attr-defined]
