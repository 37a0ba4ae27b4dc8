"""Programs that measure the library: `python -m benchmarks [NAME …]`, and `python -m benchmarks report`.

A program is a module with `run(options) -> list[Table]`; its docstring is printed above its tables on the pages. To add
one, write the module and a line in `PROGRAMS`.
"""

from __future__ import annotations

PROGRAMS: dict[str, str] = {
    "write_up_loop": "MNIST by the write-up's own loop and by ours",
    "peers": "Vision Transformers beside timm, transformers, torchvision and vit-pytorch",
    "streaming": "Photographs decoded again in every epoch",
    "sharded_reading": "Images in shards beside images in files; opening an index",
    "predicting": "From files to a table of predictions",
    "serving": "Predictions over HTTP beside other servers",
    "duplicates": "Near-duplicates: planted copies found, time of the search",
    "intervals": "Intervals of images in groups: the share that holds the truth",
    "labels": "Wrong labels: flips found in a ranking",
    "labeling": "Labels that a person must give with suggestions",
    "mendings": "Mended folders: is the second run better?",
    "accuracy": "Whole runs, from one command to an accuracy",
    "photographs": "From scratch on few photographs, at equal time",
    "rivals": "Photographs: the default beside a network pretrained on ImageNet",
    "pretraining": "Images without labels, then few labels",
    "tasks": "Several labels, a number, networks of other libraries",
    "scaling": "Strategies of several ranks: overhead with one rank",
    "kills": "Ranks killed at random times",
    "gpu": "Figures that a GPU decides, in nine minutes",
    "trust": "Damage: fuzzed inputs, flipped bits, kills, full disks",
}
"""Name of the module → title in RESULTS.md, in the order of the report."""

USUAL = ("write_up_loop", "peers")
"""Default programs of `python -m benchmarks`."""

SEEDS = {"labeling": 10, "photographs": 3, "pretraining": 3}
"""Program → default of `--seeds`, the repetitions of whole runs; 1 for the others."""
