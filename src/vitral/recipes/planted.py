"""A network for `planted`, the generated data set with a known decisive patch, to evaluate attribution methods.

    vitral train planted --recipe planted

Images are not shifted, so that the planted cell stays one token. Time and accuracy: docs/log/explanation.md.
"""

from vitral.device import Machine
from vitral.recipes.stats import DatasetStats
from vitral.training.options import Run
from vitral.training.plan import Choice, Plan


def planted(stats: DatasetStats, machine: Machine) -> Plan:
    """Train on the generated data set, in about a minute on two cores."""
    run = Run(
        recipe="planted",
        data="planted",
        model="Pico/4",
        image_size=32,
        channels=3,
        pool="cls",
        epochs=8,
        batch_size=128,
        optimizer="muon",
        lr=6e-3,
        momentum=0.9,
        beta2=0.99,
        schedule="cosine",
        warmup=1.0,
        clip=1.0,
    )
    return Plan(
        run,
        (
            Choice("model", "Pico/4", "one patch is one cell of the images"),
            Choice("pooling", "class token", "it can get the class only from the planted patch, by attention"),
            Choice("crop", "none", "shifts would split the planted cell between patches"),
            Choice("augmentation", "none", "colors and shapes define the class, and there are enough images"),
            Choice("optimizer", "muon, 0.006", "as the default for color images"),
        ),
    )
