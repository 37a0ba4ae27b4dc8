"""Evaluate a network on corrupted images: `vitral evaluate RUN --corruptions`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from rich.console import Console
from torch import Tensor

from vitral.console import table
from vitral.data.images.corruptions import CORRUPTIONS, STRENGTHS, corrupted
from vitral.data.loader import Batches, Progress
from vitral.errors import UsageError
from vitral.workflows.evaluate import Evaluated


@dataclass(frozen=True)
class Corrupted:
    """Accuracy and calibration under each corruption."""

    clean: float
    """Accuracy on the same images as they are."""
    accuracy: dict[str, tuple[float, ...]]
    """Corruption → accuracy for strengths 1 to 5."""
    ece: dict[str, tuple[float, ...]]
    """Corruption → expected calibration error, likewise."""

    @property
    def mean(self) -> float:
        """Mean accuracy over corruptions and strengths."""
        return float(np.mean(list(self.accuracy.values())))

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        each = {name: {"accuracy": list(self.accuracy[name]), "ece": list(self.ece[name])} for name in self.accuracy}
        return {"clean": self.clean, "mean": self.mean, "corruptions": each}

    def print_table(self, console: Console) -> None:
        """Print one line for each corruption."""
        rows = table()
        rows.add_column("strength")
        for name in (*map(str, STRENGTHS), "mean", "ECE"):
            rows.add_column(name, justify="right")
        for name, values in self.accuracy.items():
            shares = (f"{value:.1%}" for value in (*values, float(np.mean(values)), float(np.mean(self.ece[name]))))
            rows.add_row(name, *shares)
        console.print(rows)
        console.print(f"mean accuracy {self.mean:.2%} under corruptions, {self.clean:.2%} without")


def evaluate_corruptions(evaluated: Evaluated, progress: Progress | None = None) -> Corrupted:
    """Evaluate the network of an evaluation on its images under every corruption, in five strengths.

    Images are corrupted at the network's size. `progress` receives the number of images of each batch, once for each
    corruption and strength. Raises `UsageError` for another task than one class per image.
    """
    predictor = evaluated.predictor
    if not predictor.output.one_class:
        why = f"the weights are of --task {predictor.output.task}"
        raise UsageError("--corruptions is for networks of one class per image", why=why, hint="leave it out")
    from vitral.evaluation.metrics import measure

    images, device = evaluated.images, predictor.machine.device
    batches = Batches(images, predictor.preprocessing, batch_size=64, device=device)
    cases = [(name, strength) for name in CORRUPTIONS for strength in STRENGTHS]
    found: dict[tuple[str, int], list[np.ndarray]] = {case: [] for case in cases}
    for batch in batches.epoch():
        pixels: Tensor = batch.images.cpu()
        for name, strength in cases:
            logits = predictor.logits(corrupted(pixels, name, strength, batch.indices))
            found[name, strength].append(predictor.output.values(logits).cpu().numpy())
            if progress:
                progress(len(batch.indices))
    measured = {case: measure(np.concatenate(parts), images.labels, predictor.classes) for case, parts in found.items()}
    accuracy = {name: tuple(measured[name, strength].accuracy for strength in STRENGTHS) for name in CORRUPTIONS}
    ece = {name: tuple(measured[name, strength].ece for strength in STRENGTHS) for name in CORRUPTIONS}
    return Corrupted(evaluated.evaluation.accuracy, accuracy, ece)
