"""Programs that measure the library: `python -m benchmarks [NAME …]`, and `python -m benchmarks report`.

A program is a module with `run(options) -> list[Table]`; its docstring stands above its tables in RESULTS.md. To add
one, write the module and a line in `PROGRAMS`.
"""

from __future__ import annotations

PROGRAMS: dict[str, str] = {
    "write_up_loop": "MNIST by the write-up's own loop and by ours",
    "peers": "Vision Transformers beside timm, transformers, torchvision and vit-pytorch",
    "decode": "From JPEG to pixels of one size",
    "datapath": "From files to batches: decoding, the cache, cropping",
    "loading": "From a file of weights to a network",
    "attention": "Attention written out and fused",
    "merging": "Token merging: speed and accuracy",
    "precision": "Training in fp32 and in bf16, small networks",
    "explaining": "Maps of what an answer rests on: time, memory, a planted truth",
    "accuracy": "Whole runs, from one command to an accuracy",
    "photographs": "From scratch on few photographs, at equal time",
    "fewer": "Fewer operations for the same accuracy",
}
"""Name of the module → title in RESULTS.md, in the order of the report."""

USUAL = ("write_up_loop", "peers", "decode", "loading", "attention", "precision")
"""What `python -m benchmarks` alone runs."""

SEEDS = {"photographs": 3}
"""Program → how often whole runs are repeated where `--seeds` is not given; the others: once."""
