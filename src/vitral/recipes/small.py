"""From scratch on little data, on the machine at hand: the default of `vitral train DATA`.

Size, patch and length follow from the pictures; docs/log.md has the experiments behind the numbers.
"""

from __future__ import annotations

from vitral.recipes.facts import Facts
from vitral.training.run import Choice, Plan, Run


def small(facts: Facts) -> Plan:
    """A complete run for this data, with a reason for each choice."""
    image_size, model, why_model = _network(facts)
    epochs, batch = _length(facts)
    photographs = facts.channels == 3
    run = Run(
        recipe="small", model=model, image_size=image_size, channels=facts.channels, pool="mean", position="learned",
        drop_path=0.1 if photographs else 0.0, epochs=epochs, batch_size=batch, optimizer="muon", lr=1e-2, momentum=0.9,
        beta2=0.99, weight_decay=0.05, warmup=max(1.0, epochs / 20), clip=1.0, label_smoothing=0.1,
        crop="shift" if max(facts.size) <= 64 else "random-resized", crop_area=0.3, flip=photographs,
        augment="trivialaugment" if photographs else "none", ema=0.998,
    )  # fmt: skip
    height, width = facts.size
    grey = "every picture looked at is grey" if facts.channels == 1 else "pictures have colour"
    return Plan(
        run,
        (
            Choice("image size", "×".join(map(str, image_size)), f"pictures are {height}×{width} (median)"),
            Choice("channels", str(facts.channels), grey),
            Choice("model", model, why_model),
            Choice("epochs", str(epochs), f"{facts.images:,} pictures to learn from"),
        ),
    )


def _network(facts: Facts) -> tuple[tuple[int, int], str, str]:
    largest = max(facts.size)
    if largest <= 16:
        size = _rounded(facts.size, 2)
        return size, "Pico/2", "pictures are tiny: patches of 2 pixels"
    if largest <= 40:
        size = _rounded(facts.size, 4)
        return size, "Pico/4" if facts.channels == 1 else "Nano/4", "small pictures: patches of 4 pixels"
    if largest <= 96:
        return _rounded(facts.size, 8), "Nano/8", "patches of 8 pixels"
    return (128, 128), "Nano/16", "photographs"


def _rounded(size: tuple[int, int], patch: int) -> tuple[int, int]:
    height, width = (max(patch, round(n / patch) * patch) for n in size)
    return height, width


def _length(facts: Facts) -> tuple[int, int]:
    epochs = int(min(100, max(10, 900_000 / facts.images)))
    batch = 64 if facts.images < 5_000 else 256
    return epochs, batch
