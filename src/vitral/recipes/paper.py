"""Table 3 of the paper: training from scratch on a data set like ImageNet. Table 4 is `paper-finetune` in finetune.py.

    vitral train imagenet --recipe paper --model B/16                  (row "ImageNet")

The authors trained Table 3's ImageNet row on a TPUv3 pod. The batch of 4096 is reached by gradient accumulation, and
the learning rate scales with the batch.
"""

from vitral.device import Machine
from vitral.recipes.stats import DatasetStats
from vitral.training.options import Run
from vitral.training.plan import Choice, Plan

SCRATCH_BATCH = 4096


def paper(stats: DatasetStats, machine: Machine) -> Plan:
    """Train from scratch as in Table 3, row "ViT-*, ImageNet": 300 epochs, Adam, cosine, decay 0.3, dropout 0.1."""
    warmup = 10_000 * SCRATCH_BATCH / max(stats.images, 1)
    run = Run(
        recipe="paper",
        model="B/16",
        image_size=224,
        channels=3,
        pre_logits=True,
        dropout=0.1,
        epochs=300,
        batch_size=64,
        accumulate=SCRATCH_BATCH // 64,
        lr=3e-3,
        lr_batch=SCRATCH_BATCH,
        optimizer="adamw",
        weight_decay=0.3,
        schedule="cosine",
        warmup=min(warmup, 30.0),
        clip=1.0,
        crop="random-resized",
        crop_area=0.05,
        flip=True,
    )
    return Plan(
        run,
        (
            Choice("optimizer", "adamw", "Table 3 says Adam; the authors' code uses decoupled weight decay"),
            Choice("lr", "0.003 for batches of 4096", "Table 3, ImageNet row"),
            Choice("weight decay", "0.3", "Table 3, ImageNet row"),
            Choice("batch size", "64", "fits into memory; Table 3 has 4096"),
            Choice("accumulate", "64", "gradients of 64 batches are accumulated for a step of 4096"),
            Choice("warmup", f"{run.warmup:.0f} epochs", "10,000 steps of 4096 (Table 3), at most a tenth of the run"),
            Choice("pre logits", "True", "a tanh layer before the head, as in the paper's pre-training (§3.2)"),
            Choice("crop", "area 0.05 to 1, mirrored", "Inception crop and flip, as in the authors' code"),
        ),
    )
