"""Tables 3 and 4 of the paper: training from scratch on an ImageNet-like set, and fine-tuning.

    vitral train imagenet --recipe paper --model B/16                  (Table 3, row "ImageNet")
    vitral train photos/ --recipe paper --init WEIGHTS                 (Table 4)

Table 3's ImageNet row took the authors a TPUv3 pod; the batch is theirs (4096), reached by accumulation, and the
learning rate scales with yours.
"""

from vitral.device import Machine
from vitral.recipes.facts import Facts
from vitral.training.run import Choice, Plan, Run

SCRATCH_BATCH, FINETUNE_BATCH = 4096, 512


def paper(facts: Facts, machine: Machine) -> Plan:
    """Training from scratch as Table 3's row "ViT-*, ImageNet": 300 epochs, Adam, cosine, decay 0.3, dropout 0.1."""
    warmup = 10_000 * SCRATCH_BATCH / max(facts.images, 1)
    run = Run(
        recipe="paper", model="B/16", image_size=224, channels=3, pre_logits=True, dropout=0.1, epochs=300,
        batch_size=64, accumulate=SCRATCH_BATCH // 64, lr=3e-3, lr_batch=SCRATCH_BATCH, optimizer="adamw",
        weight_decay=0.3, schedule="cosine", warmup=min(warmup, 30.0), clip=1.0, crop="random-resized", crop_area=0.05,
        flip=True,
    )  # fmt: skip
    return Plan(
        run,
        (
            Choice("optimizer", "adamw", "Table 3 says Adam; the authors' code decouples the decay"),
            Choice("lr", "0.003 for batches of 4096", "Table 3, ImageNet row"),
            Choice("weight decay", "0.3", "Table 3, ImageNet row"),
            Choice("batch size", "64", "what fits; Table 3 has 4096"),
            Choice("accumulate", "64", "gradients of 64 batches are added up before a step of 4096"),
            Choice("warmup", f"{run.warmup:.0f} epochs", "10,000 steps of 4096 (Table 3), at most a tenth of the run"),
            Choice("pre logits", "True", "a tanh layer before the head, as at the paper's pre-training (§3.2)"),
            Choice("crop", "area 0.05 to 1, mirrored", "Inception crop and flip, as the authors' code"),
        ),
    )


def paper_finetune(facts: Facts, machine: Machine) -> Plan:
    """Fine-tuning as Table 4: SGD with momentum 0.9, batch 512, cosine, no decay, clip 1, 384 px, a zero head."""
    steps = 500 if facts.images < 20_000 else 10_000 if facts.images < 500_000 else 20_000
    epochs = max(1, round(steps * FINETUNE_BATCH / max(facts.images, 1)))
    run = Run(
        recipe="paper-finetune", model="B/16", image_size=384, epochs=epochs, batch_size=32, accumulate=16, lr=0.01,
        lr_batch=FINETUNE_BATCH, optimizer="sgd", weight_decay=0.0, schedule="cosine", clip=1.0,
        warmup=min(500, steps / 5) * FINETUNE_BATCH / max(facts.images, 1), crop="random-resized", crop_area=0.05,
        flip=True,
    )  # fmt: skip
    return Plan(
        run,
        (
            Choice("optimizer", "sgd", "Table 4; momentum 0.9, no decay"),
            Choice("lr", "0.01 for batches of 512", "Table 4; the paper searches 0.003, 0.01, 0.03 (and 0.06)"),
            Choice("epochs", str(epochs), f"{steps:,} steps of 512: Table 4 by the size of the data"),
        ),
    )
