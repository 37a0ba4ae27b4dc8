"""Fine-tuning of the built-in model: the default of `vitral train DATA`, except for drawings and small gray images.

    vitral train photos/

All layers learn at one rate: a network of two blocks behind a stem is changed as a whole. The experiments behind the
values are in docs/log/start.md.
"""

from __future__ import annotations

from vitral.device import Machine
from vitral.recipes.finetune import AVERAGED, SMOOTHING, geometry
from vitral.recipes.small import augmentation
from vitral.recipes.stats import MIRRORED, NOT_MIRRORED, PASSES, PROBE, DatasetStats, pixels_of, steps, warmup
from vitral.training.options import Run
from vitral.training.plan import Choice, Plan

_LONG = 10
"""Epochs from which strong augmentation helps."""
_MANY = 10_000
"""Training images from which batches are large and the learning rate is doubled."""


def backbone(stats: DatasetStats, machine: Machine) -> Plan:
    """Train all layers with Muon, at a lower rate than from scratch and at a size of the built-in model's training."""
    gpu = machine.device.type == "cuda"
    photographs, many = max(stats.size) > 96, stats.images >= _MANY
    mirrored = stats.channels == 3
    side = 96 if max(stats.size) <= 48 else 160 if gpu else 128  # the network has tokens of 16 pixels
    images = 240_000 * (128 / side) ** 2 * (10 if gpu else 1)  # of small sides in the same time
    epochs = max(4, min(30, round(images / max(stats.images, 1)))) if stats.epochs is None else min(200, stats.epochs)
    run = Run(
        recipe="backbone",
        probe=True,
        model="C+Micro/16",
        image_size=side,
        channels=3,
        pool="mean",
        epochs=epochs,
        batch_size=stats.batch(32 if stats.images < 2_000 else 128 if many else 64),
        optimizer="muon",
        lr=4e-3 if many else 2e-3,
        momentum=0.9,
        beta2=0.99,
        weight_decay=0.05,
        schedule="cosine",
        warmup=warmup(epochs),
        clip=1.0,
        label_smoothing=0.1,
        ema=0.998 if many else 0.99,
        crop="random-resized" if photographs else "shift",
        crop_area=0.3,
        flip=mirrored,
        augment="trivialaugment" if epochs >= _LONG else "none",
    )
    small = f"your images ({pixels_of(stats)}) are resized; the built-in model was trained at 64 to 160 pixels"
    return Plan(
        run,
        (
            Choice("image size", f"{side}×{side}", small),
            Choice("probe", "yes", PROBE),
            Choice("epochs", str(epochs), PASSES),
            Choice("batch", str(run.batch_size), steps(stats, run.batch_size)),
            Choice("optimizer", f"muon, {run.lr:g}", "the learning rate is lower than for random weights"),
            Choice("geometry", *geometry(run.crop)),
            Choice("mirror", "yes", MIRRORED) if mirrored else Choice("mirror", "no", NOT_MIRRORED),
            augmentation(run),
            SMOOTHING,
            AVERAGED,
        ),
    )
