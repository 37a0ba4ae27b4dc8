"""Going on from weights that have learned: the default of `vitral train DATA --init WEIGHTS`, and the paper's own way.

    vitral train photos/ --init WEIGHTS                                       all layers, the early ones slower
    vitral train photos/ --init WEIGHTS --freeze patch_embed 'blocks.[0-5].*'  partly frozen
    vitral train photos/ --init WEIGHTS --recipe linear-probe                  the head only
    vitral train photos/ --init WEIGHTS --recipe paper-finetune                Table 4

Size, channels and preprocessing are the weights' own; `--image-size` resizes positions. A head for other classes starts
at zero. The experiments behind the numbers of `finetune` are in docs/log.md.
"""

from vitral.device import Machine
from vitral.recipes.facts import Facts
from vitral.training.run import Choice, Plan, Run

FINETUNE_BATCH = 512
"""Of Table 4."""


def finetune(facts: Facts, machine: Machine) -> Plan:
    """All layers, with AdamW, each block slower than the one above it (BEiT, MAE)."""
    pictures = 120_000 * (20 if machine.device.type == "cuda" else 1)
    epochs = max(3, min(50, round(pictures / max(facts.images, 1))))
    photographs, colour = max(facts.size) > 96, facts.channels == 3
    run = Run(
        recipe="finetune", channels=facts.channels, epochs=epochs,
        batch_size=facts.batch(32 if facts.images < 2_000 else 64), optimizer="adamw", lr=1e-3, layer_decay=0.75,
        weight_decay=0.05, schedule="cosine", warmup=epochs / 10, clip=1.0, label_smoothing=0.1,
        crop="random-resized" if photographs else "shift", crop_area=0.3, flip=colour,
    )  # fmt: skip
    return Plan(
        run,
        (
            Choice("epochs", str(epochs), "about 120,000 pictures seen, at most 50 times each" + " × 20 on a GPU"),
            Choice("batch", str(run.batch_size), "small, as the set is" if run.batch_size <= 32 else "usual"),
            Choice("optimizer", "adamw, 0.001", "of the head; blocks below it learn more slowly"),
            Choice("layer decay", "0.75", "early layers are general and change least (BEiT, MAE)"),
            Choice("geometry", _geometry(run.crop), "where the object is does not matter"),
            Choice("mirror", "yes" if colour else "no", "photographs stay true" if colour else "grey may be writing"),
            Choice("smoothing", "0.1", "steadies a network that sees each picture often"),
        ),
    )


def _geometry(crop: str) -> str:
    return "crops of 30 to 100 %" if crop == "random-resized" else "shifts by up to 1/8"


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
            Choice("image size", "384×384", "Table 4: higher than at pre-training, positions are resized"),
        ),
    )
