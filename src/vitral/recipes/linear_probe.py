"""Linear probe: one linear layer on the features of a frozen network.

    vitral train photos/ --recipe linear-probe --init WEIGHTS
    vitral train photos/ --recipe linear-probe --model S/16             (random weights: a baseline)

`vitral.workflows.running.linear_probe` fits the layer.
"""

from __future__ import annotations

from vitral.data import DataSet
from vitral.device import Machine
from vitral.errors import UsageError
from vitral.recipes.stats import DatasetStats
from vitral.training.options import Run
from vitral.training.plan import Choice, Plan

STRENGTHS = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0)
"""Values of C, scikit-learn's inverse regularization strength: C × the sum of the losses + ½ ‖weights‖²."""

FIRST_IMAGES = 5_000
"""Training images that `Run.probe` fits a head to before the training. More would take time from it."""

UNSUPPORTED = (
    "probe",
    "freeze",
    "crop",
    "crop_area",
    "scaled",
    "flip",
    "augment",
    "randaugment",
    "erase",
    "mixup",
    "cutmix",
    "label_smoothing",
    "sampling",
    "epochs",
    "batch_size",
    "accumulate",
    "optimizer",
    "lr",
    "lr_batch",
    "weight_decay",
    "momentum",
    "beta2",
    "schedule",
    "warmup",
    "min_lr",
    "clip",
    "layer_decay",
    "ema",
    "early_stop",
    "keep",
    "checkpointing",
    "compile",
    "graphs",
    "head_bias_init",
    "dropout",
    "drop_path",
    "patch_dropout",
    "teacher",
    "distill_weight",
    "distill_temperature",
    "pack",
    "pack_min_size",
    "pack_drop",
    "multiple",
    "patch_sizes",
)
"""Options without effect in this recipe; they are refused."""


def linear_probe(stats: DatasetStats, machine: Machine) -> Plan:
    """Fit a logistic regression on the features of a frozen network."""
    run = Run(recipe="linear-probe", model="S/16", image_size=224, channels=stats.channels)
    first, last = f"{STRENGTHS[0]:g}", f"{STRENGTHS[-1]:g}"
    return Plan(
        run,
        (
            Choice("init", "none", "random weights, as a baseline; --init WEIGHTS starts from a trained network"),
            Choice(
                "optimizer", "L-BFGS", "only the last layer, the head, is fitted; L-BFGS finds its best weights exactly"
            ),
            Choice(
                "weight decay",
                f"C {first} to {last}",
                f"{len(STRENGTHS)} strengths of regularization (C) are tried; validation images decide",
            ),
            Choice(
                "augmentation", "none", "the features of each image are computed only once, from the unchanged image"
            ),
        ),
    )


def check(dataset: DataSet, config: object, run: Run) -> None:
    """Raise `UsageError` for data and networks that do not support a linear probe."""
    if "val" not in dataset.splits:
        why = "the regularization strength is chosen on validation images"
        hint = "--val-fraction 0.1"
        raise UsageError("a linear probe needs validation images", where=dataset.source, why=why, hint=hint)
    if getattr(config, "logits_tanh", False):
        why = "its logits pass through a tanh, so its head is not a logistic regression"
        hint = "another --model, or --recipe small"
        raise UsageError("this network does not support a linear probe", why=why, hint=hint)
