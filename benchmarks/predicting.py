"""JPEG photographs as files, predicted by `Predictor.stream` alone and by `vitral predict --out`, which writes a row
for each. A pass is a list that names each photograph several times; passes alternate, on all cores. "table : stream"
compares the rates. "The same, CPU" compares the least seconds of all cores together, which other programs change less.
"""

from __future__ import annotations

import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

import vitral
from benchmarks.results import Options, Table
from vitral.bench.harness import alternate, ratio
from vitral.inference.inputs import Items
from vitral.inference.predictor import Predictor
from vitral.inference.sources import Source, find
from vitral.workflows.predict import PredictionFile

SETS = ("imagenet-samples.tar", "hymenoptera.tar")
IMAGES = 4_000
ENDS = (".csv", ".jsonl", ".parquet")


def run(options: Options) -> list[Table]:
    """A row for the stream, and one for each kind of file."""
    with tempfile.TemporaryDirectory() as home:
        photographs = _noise(Path(home)) if options.quick else _photographs(options, Path(home))
        if not photographs:
            return []
        count, rounds = (8, 1) if options.quick else (IMAGES, options.rounds or 3)
        names = Path(home) / "list.txt"
        names.write_text("\n".join((photographs * -(-count // len(photographs)))[:count]) + "\n")
        predictor, sources = vitral.load("demo", device=options.device), find([names])
        passes: dict[str, Callable[[], object]] = {"stream": lambda: _stream(predictor, sources)}
        passes |= {f"--out t{end}": _table(predictor, sources, f"{home}/t{end}") for end in ENDS}
        seconds: dict[str, list[float]] = {name: [] for name in passes}
        found = alternate({name: _counted(one, seconds[name]) for name, one in passes.items()}, rounds=rounds)
    rows = [
        {
            "way": name,
            "images": count,
            "n": sample.n,
            "median": count / sample.median,
            "least": count / max(sample.seconds),
            "greatest": count / min(sample.seconds),
            "ratio": ratio(found["stream"], sample),
            "cpu": min(seconds["stream"]) / min(seconds[name]),
        }
        for name, sample in found.items()
    ]
    columns = {
        "way": "by",
        "images": "images|d",
        "n": "n|d",
        "median": "images/s|.0f",
        "least": "least|.0f",
        "greatest": "greatest|.0f",
        "ratio": "table : stream|.3f",
        "cpu": "the same, CPU|.3f",
    }
    return [Table(f"Predicting {count:,} JPEG files with the network of `demo`", columns, rows)]


def _stream(predictor: Predictor, sources: list[Source]) -> None:
    for _ in predictor.stream(Items(sources)):
        pass


def _table(predictor: Predictor, sources: list[Source], out: str) -> Callable[[], object]:
    return lambda: PredictionFile(predictor, sources, out).write()


def _counted(one: Callable[[], object], seconds: list[float]) -> Callable[[], None]:
    """The same, with its seconds of CPU noted."""

    def call() -> None:
        before = time.process_time()
        one()
        seconds.append(time.process_time() - before)

    return call


def _photographs(options: Options, home: Path) -> list[str]:
    for path in filter(None, map(options.data, SETS)):
        with tarfile.open(path) as archive:
            archive.extractall(home, filter="data")
    return sorted(str(path) for path in home.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))


def _noise(home: Path) -> list[str]:
    paths = [home / f"{seed}.jpg" for seed in range(3)]
    for seed, path in enumerate(paths):
        pixels = np.random.default_rng(seed).integers(0, 256, (60, 80, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return [str(path) for path in paths]
