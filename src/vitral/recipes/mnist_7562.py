"""The network of write-up 001 on MNIST: trained as described there, and as well as possible within a minute.

    vitral train mnist --recipe mnist-7562
    vitral train mnist --recipe mnist-7562-minute

The write-up uses cross-entropy, Adam and 15 epochs. It states neither batch size nor learning rate; the values here
reach its 96% in half the time of its own loop. Times and accuracies: benchmarks/RESULTS.md; experiments:
docs/log/accuracy.md.
"""

from vitral.device import Machine
from vitral.recipes.stats import DatasetStats
from vitral.training.options import Run
from vitral.training.plan import Choice, Plan

_MODEL = "16 patches of 7×7, width 16, depth 2, tanh on the logits, as in the write-up"


def mnist_7562(stats: DatasetStats, machine: Machine) -> Plan:
    """Train as in write-up 001."""
    run = Run(
        recipe="mnist-7562",
        data="mnist",
        model="mnist-7562",
        image_size=28,
        channels=1,
        epochs=15,
        optimizer="adam",
        batch_size=1024,
        lr=2e-2,
        weight_decay=0.0,
        schedule="cosine",
        warmup=0.5,
        clip=None,
        val_fraction=0.0,
    )
    return Plan(
        run,
        (
            Choice("model", "mnist-7562", _MODEL),
            Choice("optimizer", "adam", "as in the write-up"),
            Choice("lr", "0.02", "not stated in the write-up; decays to 0"),
            Choice("batch size", "1024", "not stated in the write-up; small networks need large batches for speed"),
            Choice("val fraction", "0: validates on test", "the write-up validates on MNIST's 10,000 test digits"),
        ),
    )


def mnist_7562_minute(stats: DatasetStats, machine: Machine) -> Plan:
    """Train 7,850 parameters as well as possible in a minute on two cores; test digits are used once, at the end."""
    run = Run(
        recipe="mnist-7562-minute",
        data="mnist",
        model="mnist-7562",
        image_size=28,
        channels=1,
        logit_scale=10.0,
        epochs=31,
        batch_size=1024,
        optimizer="muon",
        lr=3e-2,
        momentum=0.9,
        beta2=0.99,
        weight_decay=0.05,
        schedule="cosine",
        warmup=1.5,
        clip=1.0,
        crop="shift",
        ema=0.998,
    )
    return Plan(
        run,
        (
            Choice("model", "mnist-7562", _MODEL),
            Choice(
                "logit scale", "10", "the network's tanh bounds logits to ±1, too close together to separate classes"
            ),
            Choice("optimizer", "muon, 0.03", "needs fewer epochs than Adam"),
            Choice("batch", "1024", "small networks need large batches for speed"),
            Choice("geometry", "shifts by up to 1/8", "over 31 epochs they help even a network this small"),
            Choice("label smoothing", "0", "bounded logits need no label smoothing"),
        ),
    )
