"""A linear probe: how far one linear layer gets on the features of a network that stays as it is.

    vitral train photos/ --recipe linear-probe --init WEIGHTS
    vitral train photos/ --recipe linear-probe --model S/16             (random weights: the baseline)

Features are computed once, without augmentation, and kept (`vitral.recipes.features`). The head is a logistic
regression on standardised features, fitted by L-BFGS for each of `STRENGTHS`; validation chooses among them. Mean and
deviation are folded into the head, so that what is saved is an ordinary network.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.data import DataSet
from vitral.data.loader import Batches, Progress
from vitral.device import Machine
from vitral.errors import DataError, UsageError
from vitral.recipes.facts import Facts
from vitral.recipes.features import FeatureCache, features_of
from vitral.training.run import Choice, Plan, Run

STRENGTHS = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0)
"""C, scikit-learn's inverse regularisation: C × the sum of the losses + ½ ‖weights‖²."""

UNREAD = (
    "freeze", "crop", "crop_area", "scaled", "flip", "augment", "randaugment", "erase", "mixup", "cutmix",
    "label_smoothing", "sampling", "epochs", "minutes", "batch_size", "accumulate", "optimizer", "lr", "lr_batch",
    "weight_decay", "momentum", "beta2", "schedule", "warmup", "min_lr", "clip", "layer_decay", "ema", "early_stop",
    "checkpointing", "compile", "graphs", "head_bias_init", "dropout", "drop_path", "patch_dropout", "start_size",
    "teacher", "distill_weight", "distill_temperature",
)  # fmt: skip
"""Options of a run that have no meaning here, and are refused rather than left without effect."""

_MOST_STEPS = 1000
_LEAST_DEVIATION = 1e-5  # of a feature; one that hardly varies tells nothing, and must not be blown up


def linear_probe(facts: Facts, machine: Machine) -> Plan:
    """Logistic regression on the features of a frozen network."""
    run = Run(recipe="linear-probe", model="S/16", image_size=224, channels=facts.channels)
    first, last = f"{STRENGTHS[0]:g}", f"{STRENGTHS[-1]:g}"
    return Plan(
        run,
        (
            Choice("init", "none", "random weights: a baseline; --init WEIGHTS takes a network that has learned"),
            Choice("optimizer", "L-BFGS", "only the head learns: a convex problem, solved and not approached"),
            Choice("weight decay", f"C {first} to {last}", f"{len(STRENGTHS)} fits; validation chooses"),
            Choice("augmentation", "none", "each picture's features are computed once, and kept for the next time"),
        ),
    )


def check(dataset: DataSet, config: Any) -> None:
    """Refuse, before any work, what cannot be probed."""
    if "val" not in dataset.splits:
        why = "validation pictures choose the strength of the regularisation"
        raise UsageError("a linear probe needs validation", where=dataset.source, why=why, hint="--val-fraction 0.1")
    if getattr(config, "logits_tanh", False):
        why = "its logits pass through a tanh, so its head is no logistic regression"
        raise UsageError("this network cannot be probed", why=why, hint="another --model, or --recipe small")


@dataclass(frozen=True, eq=False)
class Probe:
    """A fitted head."""

    weight: Tensor
    """(K, D) fp32, for features as the network gives them."""
    bias: Tensor
    """(K,) fp32."""
    history: list[dict[str, Any]]
    """A line for each C: `C, train_loss, train_accuracy, val_loss, val_accuracy, iterations, seconds`."""
    best: dict[str, Any]
    """The line of this head: the best accuracy on validation, then the lowest loss, then the smallest C."""
    seconds: float
    """In all; most of them are the network's, unless the features were kept."""

    def write_into(self, model: nn.Module) -> None:
        """Make this the head of the network that gave the features.

        With a distillation token the logits are the mean of two heads, and the features are the class token's: its head
        gets twice the weights and the other one zeros, which is the same function.
        """
        head = model.get_submodule("head")
        double = hasattr(model, "head_dist")
        with torch.no_grad():
            for name, value in (("weight", self.weight), ("bias", self.bias)):
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
    """The best head for the features of `model` among those of `STRENGTHS`.

    Batches are in evaluation mode; `balanced` weighs classes by their inverse frequency. Accuracies and losses are
    those of the folded head in the machine's precision, as the network itself will have them. `DataError` where the
    training pictures are all of one class.
    """
    started = time.perf_counter()
    sides = [
        features_of(model, side.split, side.preprocessing, machine, cache=cache, batches=side, progress=progress)
        for side in (train, val)
    ]
    features, labels = sides[0], np.asarray(train.split.labels)
    taken = "taken from" if cache and cache.found == len(sides) else "computed"
    where = f" {cache.folder}" if cache and cache.found == len(sides) else f" in {time.perf_counter() - started:.1f} s"
    tell(f"features of {len(sides[0]):,} + {len(sides[1]):,} pictures, {features.shape[1]} each: {taken}{where}")
    if cache and cache.failure:
        tell(cache.failure)
    mean, std = features.double().mean(0), features.double().std(0, correction=0)
    std = torch.where(std < _LEAST_DEVIATION, 1.0, std)
    fits = _Fits(((features.double() - mean) / std).numpy(), labels, classes, balanced)
    truths = [torch.from_numpy(np.asarray(side.split.labels)) for side in (train, val)]
    history, best = [], None
    for strength in STRENGTHS:
        begun = time.perf_counter()
        weight, bias, iterations = fits(strength)
        folded = (weight / std).float(), (bias - (weight / std) @ mean).float()
        line: dict[str, Any] = {"C": strength}
        for name, side, truth in zip(("train", "val"), sides, truths, strict=True):
            line |= {f"{name}_{k}": v for k, v in _scores(side, truth, folded, machine).items()}
        line |= {"iterations": iterations, "seconds": time.perf_counter() - begun}
        history.append(line)
        better = best is None or _rank(line) > _rank(best[0])
        best = (line, *folded) if best is None or better else best
        tell(_shown(line) + ("  best" if better else ""))
    assert best is not None  # there is more than one strength
    return Probe(best[1], best[2], history, best[0], time.perf_counter() - started)


class _Fits:
    """Logistic regressions on standardised features (n, D), each from where the one before ended."""

    def __init__(self, x: np.ndarray, labels: np.ndarray, classes: int, balanced: bool):
        from sklearn.linear_model import LogisticRegression  # takes a second to import

        self.x, self.labels, self.classes = x, labels, classes
        self.present = np.unique(labels)
        if len(self.present) < 2:
            raise DataError("the training pictures are all of one class", hint="a larger --train-share")
        weights = "balanced" if balanced else None
        self.model = LogisticRegression(max_iter=_MOST_STEPS, warm_start=True, class_weight=weights)

    def __call__(self, strength: float) -> tuple[Tensor, Tensor, int]:
        """Weights (K, D), bias (K,), both fp64, and the steps that they took."""
        from sklearn.exceptions import ConvergenceWarning

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the steps are in the metrics
            self.model.set_params(C=strength).fit(self.x, self.labels)
        coefficients, intercepts = self.model.coef_, self.model.intercept_
        if len(self.present) == 2:  # one row, the second class against the first
            coefficients = np.concatenate([-coefficients, coefficients]) / 2
            intercepts = np.concatenate([-intercepts, intercepts]) / 2
        weight = np.zeros((self.classes, self.x.shape[1]))
        bias = np.full(self.classes, intercepts.min() - 20.0)  # a class without training pictures is never the answer
        weight[self.present], bias[self.present] = coefficients, intercepts
        return torch.from_numpy(weight), torch.from_numpy(bias), int(self.model.n_iter_.max())


def _scores(features: Tensor, truth: Tensor, head: tuple[Tensor, Tensor], machine: Machine) -> dict[str, float]:
    """Loss and accuracy of a head."""
    parts = []
    with machine.autocast():
        weight, bias = (part.to(machine.device) for part in head)
        parts = [F.linear(rows.to(machine.device), weight, bias).float().cpu() for rows in features.split(4096)]
    logits = torch.cat(parts)
    accuracy = (logits.argmax(1) == truth).double().mean()
    return {"loss": float(F.cross_entropy(logits, truth)), "accuracy": float(accuracy)}


def _rank(line: dict[str, Any]) -> tuple[float, float]:
    return line["val_accuracy"], -line["val_loss"]


def _shown(line: dict[str, Any]) -> str:
    return (
        f"C {line['C']:<6g}  train loss {line['train_loss']:.4f}  val loss {line['val_loss']:.4f}"
        f"  val accuracy {line['val_accuracy']:.2%}  {line['iterations']} steps  {line['seconds']:.1f} s"
    )
