"""The network of write-up 001 on MNIST, trained as it says: cross-entropy, Adam, 15 epochs.

    vitral train mnist --recipe mnist-7562

The write-up names neither batch nor learning rate; these two reach its 96 % in half the time of its own loop.
Time and accuracy: benchmarks/RESULTS.md.
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
