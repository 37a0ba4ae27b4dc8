"""Fit a linear probe: a logistic regression on the features of a frozen network (`vitral.workflows.tables.features`).

Features are computed once, without augmentation, and cached. L-BFGS fits standardized features for each of `STRENGTHS`,
and validation chooses the best. Mean and deviation are folded into the head, so the result is an ordinary network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.data.loader import Batches, Progress
from vitral.device import Machine
from vitral.evaluation.probe import LinearFits, Scale
from vitral.recipes.linear_probe import STRENGTHS
from vitral.workflows.tables.features import FeatureCache, features_of


@dataclass(frozen=True, eq=False)
class Probe:
    """A fitted head."""

    weight: Tensor
    """(K, D) fp32, for unstandardized features."""
    bias: Tensor
    """(K,) fp32."""
    history: list[dict[str, float]]
    """One line per C: `C, train_loss, train_accuracy, val_loss, val_accuracy, iterations, seconds`."""
    best: dict[str, float]
    """The line of this head: the highest validation accuracy, then the lowest loss, then the smallest C."""
    seconds: float
    """Total time, mostly for computing features unless they were cached."""

    def write_into(self, model: nn.Module) -> None:
        """Copy the weights into the head of the network that computed the features."""
        write_head(model, self.weight, self.bias)


def write_head(model: nn.Module, weight: Tensor, bias: Tensor) -> None:
    """Copy weights (K, D) and bias (K,) into the head of a network.

    With a distillation token the logits are the mean of two heads, and the features are those of the class token. Its
    head then gets twice the weights and the other one zeros, which is the same function.
    """
    head: Any = model.head  # of a network of another library, wherever it is
    double = hasattr(model, "head_dist")
    with torch.no_grad():
        for name, value in (("weight", weight), ("bias", bias)):
            own = head.get_parameter(name)
            own.copy_((2 * value if double else value).reshape(own.shape))
        if double:
            for parameter in model.get_submodule("head_dist").parameters():
                parameter.zero_()


def fit_probe(
    model: nn.Module,
    train: Batches,
    val: Batches,
    classes: int,
    machine: Machine,
    *,
    balanced: bool = False,
    cache: FeatureCache | None = None,
    progress: Progress | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Probe:
    """Fit a head to the features of `model` for each of `STRENGTHS`, and return the best.

    Batches must be in evaluation mode; `balanced` weights classes by their inverse frequency. Accuracies and losses are
    those of the folded head in the machine's precision, and thus those of the resulting network. Raises `DataError` if
    all training images are of one class.
    """
    started = time.perf_counter()
    sides = [
        features_of(model, side.split, side.preprocessing, machine, cache=cache, batches=side, progress=progress)
        for side in (train, val)
    ]
    features, labels = sides[0], np.asarray(train.split.labels)
    seconds = time.perf_counter() - started
    origin = f"read from {cache.folder}" if cache and cache.hits == len(sides) else f"computed in {seconds:.1f} s"
    tell(f"features of {len(sides[0]):,} + {len(sides[1]):,} images, {features.shape[1]} each: {origin}")
    if cache and cache.failure:
        tell(cache.failure)
    rows = features.double().numpy()
    scale = Scale.of(rows)
    fits = LinearFits(scale(rows), labels, classes, balanced)
    truths = [torch.from_numpy(np.asarray(side.split.labels)) for side in (train, val)]
    history, best = [], None
    for strength in STRENGTHS:
        fit_started = time.perf_counter()
        *linear, iterations = fits(strength)
        weight, bias = (torch.from_numpy(part).float() for part in scale.folded(*linear))
        line: dict[str, float] = {"C": strength}
        for name, side, truth in zip(("train", "val"), sides, truths, strict=True):
            line |= {f"{name}_{k}": v for k, v in _scores(side, truth, (weight, bias), machine).items()}
        line |= {"iterations": iterations, "seconds": time.perf_counter() - fit_started}
        history.append(line)
        better = best is None or _rank(line) > _rank(best[0])
        best = (line, weight, bias) if best is None or better else best
        tell(_format_line(line) + ("  best" if better else ""))
    assert best is not None  # STRENGTHS is not empty
    return Probe(best[1], best[2], history, best[0], time.perf_counter() - started)


def _scores(features: Tensor, truth: Tensor, head: tuple[Tensor, Tensor], machine: Machine) -> dict[str, float]:
    """Return loss and accuracy of a head."""
    with machine.autocast():
        weight, bias = (part.to(machine.device) for part in head)
        parts = [F.linear(rows.to(machine.device), weight, bias).float().cpu() for rows in features.split(4096)]
    logits = torch.cat(parts)
    accuracy = (logits.argmax(1) == truth).double().mean()
    return {"loss": float(F.cross_entropy(logits, truth)), "accuracy": float(accuracy)}


def _rank(line: Mapping[str, float]) -> tuple[float, float]:
    return line["val_accuracy"], -line["val_loss"]


def _format_line(line: Mapping[str, float]) -> str:
    return (
        f"C {line['C']:<6g}  train loss {line['train_loss']:.4f}  val loss {line['val_loss']:.4f}"
        f"  val accuracy {line['val_accuracy']:.2%}  {line['iterations']} steps  {line['seconds']:.1f} s"
    )
