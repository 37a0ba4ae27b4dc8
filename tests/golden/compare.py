"""Differences between a golden copy and what is made anew: text and structure exactly, results of arithmetic nearly."""

from __future__ import annotations

import difflib
import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

SHOWN = 40
"""Lines of differences that a failure shows."""

KNOWN = 1e-5
"""Share of a result by which it may differ on a kind of CPU that is in the table of hashes: nothing but rounding."""

ELSEWHERE = {
    # Only the structure: one image more or less in a bin, or a tie, changes them as far as they go.
    "calibration": math.inf,
    "most_confused_with": math.inf,
    "cuts": math.inf,
    # The same: votes of a few neighbors jump at a tie, and a class without votes costs the largest loss there is.
    "knn": math.inf,
    # Counts and shares of held-out images: a few answers near a tie may change.
    "confusion": 3,
    "times": 3,
    "precision": 0.1,
    "recall": 0.1,
    "f1": 0.1,
    "accuracy": 0.02,
    "accuracy_interval": 0.02,
    "balanced_accuracy": 0.02,
    "train_accuracy": 0.02,
    "val_accuracy": 0.02,
    "test_accuracy": 0.02,
    "top5": 0.02,
    "macro_f1": 0.02,
    "ece": 0.02,
    "raw_ece": 0.02,
    "temperature": 0.02,
    "scores": 0.02,
    "few_shot": 0.02,
    # Continuous in the weights. Losses of runs/planned are up to 1.5e-3 apart with one and two threads, on AVX-512 with
    # and without bf16 and AMX, and held to AVX2 and SSE4.
    "loss": 1e-3,
    "train_loss": 5e-3,
    "val_loss": 5e-3,
    "gradient_norm": 5e-3,
    "probability": 1e-3,
    "confidence": 1e-3,
    # Heat maps and what is measured of them divide by small sums.
    "values": 0.02,
    "checks": 0.02,
    # The sections of inspect: principal components, distances, norms.
    "filters": 0.02,
    "attention": 0.02,
    "norms": 0.02,
    "likeness": 0.02,
    "heads": 0.02,
    # Sentences, which may state a temperature.
    "notes": 0.02,
}
"""Field → how far its numbers, and those below it, may differ on another CPU: absolutely, and as a share of the larger.
The outermost field that is listed counts. Whatever is not listed must be equal. In a text, numbers are compared in the
same way, and the words between them must be equal.
"""

_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def differences(name: str, golden: str, made: str, *, known: bool) -> list[str]:
    """Differences between two texts of a copy, a line each.

    `known`: this kind of CPU is in the table of hashes, so that results of arithmetic must agree but for rounding.
    """
    if PurePath(name).suffix == ".txt":
        changed = difflib.unified_diff(golden.splitlines(), made.splitlines(), "golden", "made", n=1, lineterm="")
        return list(itertools.islice(changed, SHOWN))
    return list(itertools.islice(_differences((name,), _read(name, golden), _read(name, made), known), SHOWN))


def _read(name: str, text: str) -> Any:
    return [json.loads(line) for line in text.splitlines()] if name.endswith(".jsonl") else json.loads(text)


def _differences(path: tuple[str | int, ...], golden: Any, made: Any, known: bool) -> Iterator[str]:
    if isinstance(golden, dict) and isinstance(made, dict):
        if list(golden) != list(made):
            yield from _of_keys(path, list(golden), list(made))
        for key in golden.keys() & made.keys():
            yield from _differences((*path, key), golden[key], made[key], known)
    elif isinstance(golden, list) and isinstance(made, list):
        if len(golden) != len(made) and (known or _slack(path) != math.inf):
            yield f"{_shown(path)}: {len(golden)} items were golden, {len(made)} are made"
        for place, (one, other) in enumerate(zip(golden, made, strict=False)):
            yield from _differences((*path, place), one, other, known)
    elif not _agree(path, golden, made, known):
        yield f"{_shown(path)}: {golden!r} was golden, {made!r} is made"


def _of_keys(path: tuple[str | int, ...], golden: list[str], made: list[str]) -> Iterator[str]:
    for key in golden:
        if key not in made:
            yield f"{_shown(path)}: {key} is gone"
    for key in made:
        if key not in golden:
            yield f"{_shown(path)}: {key} is new"
    if sorted(golden) == sorted(made):
        yield f"{_shown(path)}: keys in another order: {made}"


def _slack(path: tuple[str | int, ...]) -> float:
    return next((ELSEWHERE[key] for key in path if isinstance(key, str) and key in ELSEWHERE), 0.0)


def _agree(path: tuple[str | int, ...], golden: Any, made: Any, known: bool) -> bool:
    slack = _slack(path)
    if slack == math.inf and not known:
        return True
    if type(golden) is not type(made):
        return False
    if isinstance(golden, str) and slack:
        return _NUMBER.split(golden) == _NUMBER.split(made) and all(
            _close(float(one), float(other), slack, known)
            for one, other in zip(_NUMBER.findall(golden), _NUMBER.findall(made), strict=True)
        )
    if isinstance(golden, bool) or not isinstance(golden, (int, float)) or not slack:
        return bool(golden == made)
    return _close(golden, made, slack, known)


def _close(golden: float, made: float, slack: float, known: bool) -> bool:
    allowed = KNOWN if known else slack
    return math.isclose(golden, made, rel_tol=allowed, abs_tol=0.1 * allowed if known else allowed)


def _shown(path: tuple[str | int, ...]) -> str:
    return path[0] + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path[1:])  # type: ignore[operator]
