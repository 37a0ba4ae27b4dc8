"""Write-up 003: a post-norm ViT-B/16 trained on a random tenth of the 36,500 validation images of Places365.

    vitral train places365 --recipe places365

A GPU is recommended: 3,650 images at 224 px, 86 million parameters, 5 epochs.
"""

from vitral.device import Machine
from vitral.recipes.stats import DatasetStats
from vitral.training.options import Run
from vitral.training.plan import Choice, Plan


def places365(stats: DatasetStats, machine: Machine) -> Plan:
    """Train as in write-up 003."""
    run = Run(
        recipe="places365",
        data="places365",
        train_share=0.1,
        val_share=0.05,
        model="places365-postnorm",
        image_size=224,
        epochs=5,
        batch_size=16,
        optimizer="adam",
        lr=1e-3,
        weight_decay=0.0,
        schedule="constant",
        warmup=0.0,
        clip=1.0,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    )
    return Plan(
        run,
        (
            Choice(
                "train share",
                "10% (5% for validation)",
                "random and disjoint, from the small validation split",
            ),
            Choice("model", "places365-postnorm", "BERT-like post-norm ViT-B/16 with 8 heads, as in the write-up"),
            Choice("lr", "0.001", "the write-up sets 1e-4 first, but creates Adam with 1e-3"),
            Choice("clip", "1.0", "norm of the gradient, as in the write-up"),
        ),
    )
