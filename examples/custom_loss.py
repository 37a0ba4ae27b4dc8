"""A loss of one's own: the focal loss (Lin et al. 2017) in vitral's loop, and weights that every command reads.

python examples/custom_loss.py digits focal.safetensors
vitral predict focal.safetensors digit.png
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitral
from vitral.data.images.augmentation import Augmentation
from vitral.data.loader import Batch, Batches
from vitral.data.splits import with_validation
from vitral.device import choose, seed_everything
from vitral.inference.logits import logits_of
from vitral.training.callbacks import Callback
from vitral.training.loop import EpochEnd, State, fit
from vitral.training.objectives.objective import augmented
from vitral.training.optimizer_set import OptimizerSet
from vitral.training.step import Step
from vitral.weights import native


class FocalLoss:
    """An objective is a function (model, batch) → (loss, metrics): here images that are predicted well count less."""

    def __init__(self, preprocessing: vitral.Preprocessing, classes: int, gamma: float = 2.0):
        self.preprocessing, self.classes, self.gamma = preprocessing, classes, gamma
        self.augmentation = Augmentation(shift=1 / 8)

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        images, labels = augmented(batch, self.preprocessing, self.augmentation, self.classes)
        logits = model(images).float()
        each = F.cross_entropy(logits, labels, reduction="none")
        loss = ((1 - (-each).exp()) ** self.gamma * each).mean()
        return loss, {"train_accuracy": (logits.argmax(1) == labels).float().mean()}


class Report(Callback):
    """Print each epoch; a tracker would follow the loop in the same way."""

    def on_epoch_end(self, line: dict[str, float], best: bool) -> None:
        print(f"epoch {line['epoch']}: loss {line['train_loss']:.4f}, validation {line['val_accuracy']:.1%}")


def main(data: str = "digits", out: str = "focal.safetensors", epochs: int = 10) -> float:
    """Train on `data`, write the weights to `out`, and return the accuracy on the validation images."""
    seed_everything(0)
    dataset, machine = with_validation(vitral.load_data(data)), choose("auto")
    channels = dataset["train"].image(0).shape[2]
    half = (0.5,) * channels
    preprocessing = vitral.Preprocessing((16, 16), channels=channels, mean=half, std=half)
    model = vitral.create("mu/4", image_size=16, channels=channels, classes=len(dataset.classes)).to(machine.device)
    run = vitral.Run(epochs=epochs, batch_size=64, optimizer="adamw", lr=3e-3, warmup=1.0)
    objective = FocalLoss(preprocessing, len(dataset.classes))
    place = {"device": machine.device, "batch_size": run.batch_size}
    train = Batches(dataset["train"], preprocessing, augmentation=objective.augmentation, **place)
    held_out = Batches(dataset["val"], preprocessing, **place)
    labels = torch.from_numpy(dataset["val"].labels)

    def validate(network: nn.Module) -> dict[str, float]:
        right = logits_of(network, held_out, machine).argmax(1) == labels
        return {"val_loss": float((~right).float().mean()), "val_accuracy": float(right.float().mean())}

    state = State(model, OptimizerSet(model, run))
    step = Step(model, state.optimizer, objective, machine, run)
    fit(state, run, train, step, EpochEnd(validate=validate), listener=Report())
    weights = native.Weights(model.config, model.state_dict(), preprocessing, dataset.classes, {"loss": "focal"})
    native.save(Path(out), weights)
    return float(state.history[-1]["val_accuracy"])


if __name__ == "__main__":
    main(*sys.argv[1:])
