"""Token merging (arXiv 2210.09461) as `vitral predict --merge` does it: pictures per second with 0, 4, 8 and 16 tokens
fewer after each block, in turn in one process, from uint8 pictures to probabilities in batches of 16.

`python -m benchmarks merging RUN …` measures runs and weights files, and of runs the accuracy on their own held-out
pictures; without a name it is S/16 at 224 pixels with random weights, of which speed alone can be told.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import vitral
from benchmarks.results import Options, Table
from vitral.bench.subject import of_config
from vitral.bench.timing import alternate, ratio
from vitral.device import choose
from vitral.model import ViTConfig
from vitral.model.merging import tokens_left
from vitral.predict import Predictor
from vitral.training.run import RunFolder

COUNTS = (0, 4, 8, 16)
QUICK = ViTConfig(image_size=32, patch_size=8, dim=64, depth=2, heads=1, mlp_dim=128)


def run(options: Options) -> list[Table]:
    """A table for each network."""
    return [_table(name, options) for name in options.names or ("",)]


def _table(name: str, options: Options) -> Table:
    predictors = {count: _predictor(name, count, options) for count in COUNTS}
    first = predictors[0]
    size, channels = first.preprocessing.image_size, first.preprocessing.channels
    config: Any = first.model.config
    batch = 2 if options.quick else 16
    pixels = torch.randint(0, 256, (batch, channels, *size), dtype=torch.uint8)
    programs = {str(count): partial(predictor._forward, pixels) for count, predictor in predictors.items()}
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
        "least": "least|.1f", "greatest": "greatest|.1f", "rate": "pictures/s|.1f", "faster": "× without|.2f",
        "accuracy": "accuracy|.2%",
    }  # fmt: skip
    what = name or f"{'A tiny network' if options.quick else 'S/16'} with random weights"
    precision = first.machine.precision
    caption = f"{what}, {size[0]}×{size[1]} pixels, {first.engine}, {precision}, batch {batch}"
    return Table(caption, columns, rows)


def _predictor(name: str, count: int, options: Options) -> Predictor:
    if name:
        return vitral.load(name, device=options.device, merge=count)
    network = of_config("S/16", QUICK if options.quick else vitral.create("S/16").config)
    torch.manual_seed(0)
    machine = choose(options.device)
    return Predictor(network.build(), network.preprocessing, network.classes, machine=machine, merge=count)


def _accuracy(name: str, count: int, options: Options) -> float | None:
    """Of a run, on its own pictures."""
    if not name or not RunFolder(name).is_run():
        return None
    return vitral.evaluate(name, device=options.device, merge=count).accuracy
