"""Reading text from images of lines: the default of `vitral train LINES --task text`.

    vitral train lines/ --task text

A line is wide and low. It is resized to a height of a few tokens, and its width follows from the median of the images;
images of other proportions are fitted inside, so that no character is stretched.
"""

from __future__ import annotations

from vitral.device import Machine
from vitral.recipes.stats import DatasetStats, warmup
from vitral.training.options import Run
from vitral.training.plan import Choice, Plan

UNSUPPORTED = (
    "teacher",
    "distill_weight",
    "distill_temperature",
    "mixup",
    "cutmix",
    "class_weights",
    "sampling",
    "metrics",
    "whiten",
    "layer_decay",
    "compile",
    "graphs",
    "flip",
    "checkpointing",
    "pool",
    "pack",
    "patch_sizes",
)
"""Options without effect on text, or not yet supported."""
_HEIGHT, _PATCH, _WIDEST = 32, 8, 1024  # pixels
_MIRRORED = "text must not be mirrored"


def text(stats: DatasetStats, machine: Machine) -> Plan:
    """Choose a complete run for these lines and this machine, with a reason for each choice."""
    height, width = stats.size
    wide = min(_WIDEST, max(_PATCH, -(-round(width * _HEIGHT / height) // _PATCH) * _PATCH))
    size, gpu = (_HEIGHT, wide), machine.device.type == "cuda"
    size_name = "Micro" if stats.channels == 3 or gpu else "Femto"
    images = 600_000 * (10 if gpu else 1)
    epochs = max(5, min(100, round(images / stats.images))) if stats.epochs is None else stats.epochs
    run = Run(
        recipe="text",
        model=f"C+{size_name}/{_PATCH}",
        image_size=size,
        channels=stats.channels,
        pool="mean",
        resize="letterbox",
        epochs=epochs,
        batch_size=stats.batch(64 if gpu else 16),
        optimizer="muon",
        lr=3e-3,
        momentum=0.9,
        beta2=0.99,
        weight_decay=0.05,
        schedule="cosine",
        warmup=warmup(epochs),
        clip=1.0,
        label_smoothing=0.0,
        ema=0.998,
        crop="none",
        flip=False,
        decoder_depth=2,
    )
    same = "" if stats.uniform else f" (median of {stats.sampled} samples)"
    tokens = _HEIGHT // _PATCH * (wide // _PATCH)
    return Plan(
        run,
        (
            Choice("image size", f"{_HEIGHT}×{wide}", f"lines are {height}×{width}{same}; {tokens} tokens"),
            Choice("channels", str(stats.channels), "as in the sampled images"),
            Choice("model", run.model, "convolutions before the tokens train faster than patches"),
            Choice("decoder", f"{run.decoder_depth} blocks", "as wide as the encoder; --decoder-depth, --decoder-dim"),
            Choice("epochs", str(run.epochs), "--minutes sets a time limit instead"),
            Choice(
                "batch",
                str(run.batch_size),
                "lines per step" if gpu else "a small batch: more steps in as much time",
            ),
            Choice("optimizer", f"muon, {run.lr:g}", "for the blocks of both networks, AdamW for the rest"),
            Choice("mirror", "no", _MIRRORED),
        ),
    )
