"""Ranges of the numbers among the options of a run, and examples of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vitral.model.config_base import MAX_SIDE


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, inclusive; `above` excludes `low`, `below` excludes `high`."""

    low: float
    high: float
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        at_least = self.low < value if self.above else self.low <= value
        return at_least and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        if self.above:
            return f"above {self.low:,} and at most {self.high:,}"
        return f"from {self.low:,} to {'below ' * self.below}{self.high:,}"


LIMITS: Mapping[Range, tuple[str, ...]] = {
    Range(1, MAX_SIDE): ("image_size", "resize_size", "pack_min_size", "multiple", "patch_sizes"),
    Range(1, 1_000_000): ("epochs", "early_stop", "batch_size", "accumulate", "lr_batch", "mlp_dim"),
    Range(1, 100_000): ("dim", "heads", "decoder_dim"),
    Range(1, 1_000): ("depth", "decoder_depth", "threads"),
    Range(0, 1_000_000): ("warmup", "clip"),
    Range(0, 1_000): ("lr", "workers", "registers", "teacher_views"),
    Range(0, 100): ("local_crops", "ibot", "koleo", "weight_decay", "mixup", "cutmix", "layer_scale"),
    Range(0, 30): ("randaugment",),
    Range(-1_000, 1_000): ("head_bias_init",),
    Range(0, 2**63 - 1): ("seed", "split_seed"),
    Range(0, 10**12): ("max_bad",),
    Range(0, 1): (
        "erase",
        "label_smoothing",
        "val_share",
        "min_lr",
        "distill_weight",
        "layer_decay",
        "mean",
    ),
    Range(0, 1, above=True): ("train_share", "crop_area", "crop_fraction", "shift", "std"),
    Range(0, 1, below=True): (
        "momentum",
        "beta2",
        "val_fraction",
        "ema",
        "teacher_momentum",
        "dropout",
        "drop_path",
        "patch_dropout",
        "pack_drop",
    ),
    Range(0.01, 0.99): ("mask",),
    Range(2, 1_000_000): ("prototypes",),
    Range(0, 1_000, above=True): ("teacher_temperature", "logit_scale", "distill_temperature"),
    Range(0, 1_000_000, above=True): ("minutes",),
}
"""Range → fields whose numbers must be in it. Upper bounds exceed any real run: they catch typos that would overflow or
never finish.
"""

EXAMPLES = {
    "minutes": 30,
    "resize_size": (256, 256),
    "lr_batch": 256,
    "val_fraction": 0.1,
    "ema": 0.999,
    "layer_decay": 0.75,
    "early_stop": 20,
    "workers": 2,
    "threads": 2,
    "dim": 192,
    "depth": 12,
    "heads": 3,
    "mlp_dim": 768,
    "split_seed": 0,
    "registers": 4,
    "layer_scale": 0.1,
    "head_bias_init": -10,
    "logit_scale": 10,
    "dropout": 0.1,
    "drop_path": 0.1,
    "patch_dropout": 0.5,
    "decoder_dim": 64,
    "pack_min_size": 64,
    "pack_drop": (0.5, 0.0),
    "patch_sizes": (8, 16, 32),
    "max_bad": 100,
}
"""Example values for fields without a default."""
