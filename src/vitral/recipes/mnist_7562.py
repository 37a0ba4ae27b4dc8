"""The network of write-up 001 on MNIST: trained as it says, and as well as a minute allows.

    vitral train mnist --recipe mnist-7562
    vitral train mnist --recipe mnist-7562-minute

The write-up has cross-entropy, Adam and 15 epochs. It names neither batch nor learning rate; these two reach its 96 %
in half the time of its own loop. Times and accuracies: benchmarks/RESULTS.md, experiments: docs/log.md.
"""

from vitral.device import Machine
from vitral.recipes.facts import Facts
from vitral.training.run import Choice, Plan, Run


def mnist_7562(facts: Facts, machine: Machine) -> Plan:
    """The run of write-up 001."""
    run = Run(
        recipe="mnist-7562", data="mnist", model="mnist-7562", image_size=28, channels=1, epochs=15, optimizer="adam",
        batch_size=1024, lr=2e-2, weight_decay=0.0, schedule="cosine", warmup=0.5, clip=None, val_fraction=0.0,
    )  # fmt: skip
    return Plan(
        run,
        (
            Choice("model", "mnist-7562", "16 patches of 7×7, width 16, depth 2, tanh on the logits, as the write-up"),
            Choice("optimizer", "adam", "as the write-up"),
            Choice("lr", "0.02", "the write-up names none; it falls to 0"),
            Choice("batch size", "1024", "the write-up names none; large batches keep a network this small busy"),
            Choice("val fraction", "0: test validates", "the write-up validates on MNIST's 10,000 test digits"),
        ),
    )


def mnist_7562_minute(facts: Facts, machine: Machine) -> Plan:
    """7,850 parameters as good as they get in a minute on two cores; the test digits are looked at once, at the end."""
    run = Run(
        recipe="mnist-7562-minute", data="mnist", model="mnist-7562", image_size=28, channels=1, logit_scale=10.0,
        epochs=31, batch_size=1024, optimizer="muon", lr=3e-2, momentum=0.9, beta2=0.99, weight_decay=0.05,
        schedule="cosine", warmup=1.5, clip=1.0, crop="shift", ema=0.998,
    )  # fmt: skip
    return Plan(
        run,
        (
            Choice("model", "mnist-7562", "16 patches of 7×7, width 16, depth 2, tanh on the logits, as the write-up"),
            Choice(
                "logit scale", "10", "within ±1, where the network's tanh keeps them, logits hardly tell classes apart"
            ),
            Choice("optimizer", "muon, 0.03", "learns in fewer passes than Adam"),
            Choice("batch", "1024", "keeps a network this small busy"),
            Choice("geometry", "shifts by up to 1/8", "in 31 passes they do even so small a network good"),
            Choice("smoothing", "weights averaged", "bounded logits are smooth enough"),
        ),
    )
