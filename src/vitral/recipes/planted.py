"""A network for `planted`, the generated set whose telling patch is known, to try maps of attribution on.

    vitral train planted --recipe planted

Pictures are left where they are, so that the planted cell stays one token. Time and accuracy: docs/log.md.
"""

from vitral.device import Machine
from vitral.recipes.facts import Facts
from vitral.training.run import Choice, Plan, Run


def planted(facts: Facts, machine: Machine) -> Plan:
    """The run for the generated set: about a minute on two cores."""
    run = Run(
        recipe="planted", data="planted", model="Pico/4", image_size=32, channels=3, pool="cls", epochs=8,
        batch_size=128, optimizer="muon", lr=6e-3, momentum=0.9, beta2=0.99, schedule="cosine", warmup=1.0, clip=1.0,
    )  # fmt: skip
    return Plan(
        run,
        (
            Choice("model", "Pico/4", "one patch is one cell of the set"),
            Choice("pooling", "class token", "what it answers must come to it from the planted patch, by attention"),
            Choice("crop", "none", "shifts would divide the planted cell between patches"),
            Choice("augmentation", "none", "colours and shapes are the class; new pictures are many enough"),
            Choice("optimizer", "muon, 0.006", "as the default for colour"),
        ),
    )
