"""Fine-tuning of trained weights: the default of `vitral train DATA --init WEIGHTS`, and the recipe of the paper.

    vitral train photos/ --init WEIGHTS                                       all layers, early ones more slowly
    vitral train photos/ --init WEIGHTS --freeze patch_embed 'blocks.[0-5].*'  partly frozen
    vitral train photos/ --init WEIGHTS --recipe linear-probe                  the head only
    vitral train photos/ --init WEIGHTS --recipe paper-finetune                Table 4

Size, channels and preprocessing are those of the weights; `--image-size` resizes positions. A head for other classes
starts at zero. The experiments behind the values of `finetune` are in docs/log/accuracy.md.
"""

from vitral.device import Machine
from vitral.recipes.stats import MIRRORED, NOT_MIRRORED, PROBE, DatasetStats, steps
from vitral.training.options import Run
from vitral.training.plan import Choice, Plan

SMOOTHING = Choice("label smoothing", "0.1", "reduces overfitting: the target keeps a tenth for the other classes")
AVERAGED = Choice("averaging", "on", "validates and saves a moving average of the weights, which reduces overfitting")
"""Lines of several recipes."""
FINETUNE_BATCH = 512
"""Batch size of Table 4."""


def finetune(stats: DatasetStats, machine: Machine) -> Plan:
    """Train all layers with AdamW, each block with a lower learning rate than the one above it (BEiT, MAE)."""
    images = 120_000 * (20 if machine.device.type == "cuda" else 1)
    epochs = max(3, min(50, round(images / max(stats.images, 1))))
    photographs, color = max(stats.size) > 96, stats.channels == 3
    run = Run(
        recipe="finetune",
        probe=True,
        channels=stats.channels,
        epochs=epochs,
        batch_size=stats.batch(32 if stats.images < 2_000 else 64),
        optimizer="adamw",
        lr=1e-3,
        layer_decay=0.75,
        weight_decay=0.05,
        schedule="cosine",
        warmup=epochs / 10,
        clip=1.0,
        label_smoothing=0.1,
        crop="random-resized" if photographs else "shift",
        crop_area=0.3,
        flip=color,
    )
    return Plan(
        run,
        (
            Choice("probe", "yes", PROBE),
            Choice(
                "epochs",
                str(epochs),
                "passes over the training images: about 120,000 images in all (2,400,000 on a GPU), at most 50 passes",
            ),
            Choice("batch", str(run.batch_size), steps(stats, run.batch_size)),
            Choice(
                "optimizer", "adamw, 0.001", "0.001 is the learning rate of the head; earlier layers have lower ones"
            ),
            Choice(
                "layer decay",
                "0.75",
                "factor on the learning rate from each block to the one before it: early layers need little change",
            ),
            Choice("geometry", *geometry(run.crop)),
            Choice("mirror", "yes" if color else "no", MIRRORED if color else NOT_MIRRORED),
            SMOOTHING,
        ),
    )


def geometry(crop: str, shift: float = 1 / 8) -> tuple[str, str]:
    """Return what random crops or shifts do to training images, and the reason."""
    if crop == "random-resized":
        return (
            "random crops of 30% to 100% of the area",
            "teach the network to recognize an object anywhere in a photograph",
        )
    return f"shifts by up to 1/{1 / shift:.0f}", "small shifts suit small images, which the object fills"


def paper_finetune(stats: DatasetStats, machine: Machine) -> Plan:
    """Fine-tune as in Table 4: SGD with momentum 0.9, batch 512, cosine, no decay, clip 1, 384 px, a zero head."""
    steps = 500 if stats.images < 20_000 else 10_000 if stats.images < 500_000 else 20_000
    epochs = max(1, round(steps * FINETUNE_BATCH / max(stats.images, 1)))
    run = Run(
        recipe="paper-finetune",
        model="B/16",
        image_size=384,
        epochs=epochs,
        batch_size=32,
        accumulate=16,
        lr=0.01,
        lr_batch=FINETUNE_BATCH,
        optimizer="sgd",
        weight_decay=0.0,
        schedule="cosine",
        clip=1.0,
        warmup=min(500, steps / 5) * FINETUNE_BATCH / max(stats.images, 1),
        crop="random-resized",
        crop_area=0.05,
        flip=True,
    )
    return Plan(
        run,
        (
            Choice("optimizer", "sgd", "Table 4; momentum 0.9, no decay"),
            Choice("lr", "0.01 for batches of 512", "Table 4; the paper searches 0.003, 0.01, 0.03 (and 0.06)"),
            Choice("epochs", str(epochs), f"{steps:,} steps of 512, from Table 4 by the size of the data set"),
            Choice("image size", "384×384", "Table 4: larger than in pretraining, with resized positions"),
        ),
    )
