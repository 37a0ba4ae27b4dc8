"""Token merging (arXiv 2210.09461) as in `vitral predict --merge`: images per second with 0, 4, 8 and 16 tokens fewer
after each block, in alternating rounds in one process, from uint8 images to probabilities in batches of 16.

`python -m benchmarks merging S/16 RUN …` measures networks by name (random weights, speed only), weights files, and
runs with their accuracy on their own held-out images; the default is S/16.
"""

from __future__ import annotations

import json
import os
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import torch

import vitral
from benchmarks.results import Options, Table
from vitral.bench.harness import alternate, ratio
from vitral.bench.models import model_under_test, of_config
from vitral.device import choose
from vitral.inference.predictor import Predictor
from vitral.inference.tome import tokens_left
from vitral.model import ViTConfig
from vitral.training.run_folder import RunFolder
from vitral.weights.read.references import is_weights

COUNTS = (0, 4, 8, 16)
QUICK = ViTConfig(image_size=32, patch_size=8, dim=64, depth=2, heads=1, mlp_dim=128)


def run(options: Options) -> list[Table]:
    """Make a table for each network."""
    return [_table(name, options) for name in options.names or ("S/16",)]


def _table(name: str, options: Options) -> Table:
    predictors = {count: _predictor(name, count, options) for count in COUNTS}
    first = predictors[0]
    size, channels = first.preprocessing.image_size, first.preprocessing.channels
    config: Any = first.model.config
    batch = 2 if options.quick else 16
    pixels = torch.randint(0, 256, (batch, channels, *size), dtype=torch.uint8)
    programs = {str(count): partial(predictor.rows, pixels) for count, predictor in predictors.items()}
    found = alternate(programs, rounds=1 if options.quick else 9, device=options.device)
    rows = [
        {
            "merged": count, "tokens": tokens_left(config, count, config.depth - 1), **found[str(count)].columns(1000),
            "rate": batch / found[str(count)].median, "faster": ratio(found["0"], found[str(count)]),
            "accuracy": _accuracy(name, count, options),
        }
        for count in COUNTS
    ]  # fmt: skip
    columns = {
        "merged": "merged in a block|d", "tokens": "tokens in the last|d", "n": "n|d", "median": "ms|.1f",
        "least": "least|.1f", "greatest": "greatest|.1f", "rate": "images/s|.1f", "faster": "× without|.2f",
        "accuracy": "accuracy|.2%",
    }  # fmt: skip
    what = _label(name) if is_weights(name) else f"{'A tiny network' if options.quick else name} with random weights"
    precision = first.machine.precision
    caption = f"{what}, {size[0]}×{size[1]} pixels, {first.engine}, {precision}, batch {batch}"
    return Table(caption, columns, rows)


def _label(name: str) -> str:
    """Describe weights by their name, a run by its command, with the last part of each path only."""
    if not RunFolder(name).is_run():
        return name
    words = shlex.split(json.loads(RunFolder(name).config.read_text("utf-8"))["command"])
    kept = [word for word, before in zip(words, ["", *words], strict=False) if not {word, before} & _PLACES]
    return f"`{shlex.join(Path(word).name if os.path.isabs(word) else word for word in kept)}`"


_PLACES = {"--data-root", "--out", "--device"}
"""Options that name locations or devices."""


def _predictor(name: str, count: int, options: Options) -> Predictor:
    if is_weights(name):
        return vitral.load(name, device=options.device, merge=count)
    network = of_config(name, QUICK) if options.quick else model_under_test(name)
    torch.manual_seed(0)
    machine = choose(options.device)
    return Predictor(network.build(), network.preprocessing, network.classes, machine=machine, merge=count)


def _accuracy(name: str, count: int, options: Options) -> float | None:
    """Evaluate a run on its own images; None for other weights."""
    if not RunFolder(name).is_run():
        return None
    return vitral.evaluate(name, device=options.device, merge=count).accuracy
