"""Pretraining on images without labels.

    vitral pretrain photos/                                    masked autoencoder
    vitral pretrain photos/ --method mpp                       masked patch prediction of the ViT paper
    vitral pretrain photos/ --method dino                      self-distillation

Where patches are masked, the networks are ViTs with plain patches: behind a convolutional stem a patch would see its
masked neighbors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from vitral.data import DataSet
from vitral.data.images.augmentation import Crop
from vitral.device import Machine
from vitral.errors import UsageError
from vitral.recipes.stats import MIRRORED, NOT_MIRRORED, DatasetStats
from vitral.training.options import Run
from vitral.training.plan import Choice, Plan

UNSUPPORTED = (
    "pre_logits", "logit_scale", "head_bias_init", "whiten", "erase", "mixup", "cutmix", "label_smoothing",
    "class_weights", "sampling",  "layer_decay", "teacher", "distill_weight", "distill_temperature",
    "early_stop", "patch_dropout", "pack", "pack_min_size", "pack_drop", "multiple", "patch_sizes",
)  # fmt: skip
"""Options without effect in pretraining; they are refused."""

_MASKED, _DECODER = ("mask",), ("decoder_dim", "decoder_depth")
_DISTILLED = ("prototypes", "local_crops", "teacher_momentum", "teacher_temperature", "centering", "ibot", "koleo")
UNSUPPORTED_BY = {
    "mae": (*UNSUPPORTED, *_DISTILLED),
    "mpp": (*UNSUPPORTED, *_DISTILLED, *_DECODER),
    "dino": (*UNSUPPORTED, *_MASKED, *_DECODER, "crop", "shift", "ema", "compile", "graphs"),
}
"""Method → all of its options without effect."""


def mae(stats: DatasetStats, machine: Machine) -> Plan:
    """Masked autoencoder: reconstruct three quarters of the patches (arXiv 2111.06377)."""
    plan = _plan("mae", stats, machine, mask=0.75, pool="mean", optimizer="muon", lr=4e-3)
    why = "reconstruct masked patches, which the encoder does not compute (arXiv 2111.06377)"
    return _with(plan, Choice("method", "mae", why), Choice("mask", "0.75", "of the patches, as in the paper"))


def mpp(stats: DatasetStats, machine: Machine) -> Plan:
    """Masked patch prediction of the ViT paper, appendix B.1.2."""
    plan = _plan("mpp", stats, machine, mask=0.5, pool="mean", optimizer="muon", lr=4e-3)
    why = "predict the mean color of corrupted patches (arXiv 2010.11929, B.1.2)"
    return _with(plan, Choice("method", "mpp", why), Choice("mask", "0.5", "of the patches, as in the paper"))


def dino(stats: DatasetStats, machine: Machine) -> Plan:
    """Self-distillation: the same prototypes for all crops of an image (arXiv 2104.14294)."""
    gpu = machine.device.type == "cuda"
    momentum, prototypes = (0.996, 8192) if gpu else (0.99, 1024)
    plan = _plan(
        "dino", stats, machine, pool="cls", crop="none", crop_area=0.3, teacher_momentum=momentum,
        prototypes=prototypes, beta2=0.999, lr=5e-4,
    )  # fmt: skip
    why = "agree with a teacher, the student's average, about crops of an image (arXiv 2104.14294)"
    crops = "two of 30 to 100 % of the image; the student sees 4 smaller ones, too"
    return _with(
        plan,
        Choice("method", "dino", why),
        Choice("pooling", "class token", "it has to gather the image, as in the paper"),
        Choice("crops", "2 + 4", crops),
        Choice("teacher momentum", f"{momentum:g}", "rises to 1" if gpu else "lower for a short run; rises to 1"),
        Choice("prototypes", str(prototypes), "fewer for a small network" if not gpu else "enough for most data"),
    )


def check(dataset: DataSet, config: Any, run: Run) -> None:
    """Raise `UsageError` for networks that cannot be pretrained."""
    stem = getattr(config, "hybrid", None)
    if stem is None or config.dist_token:
        why = "the methods need a ViT without a distillation token"
        raise UsageError("this network cannot be pretrained", why=why, hint="--model Nano/4")
    if stem and (run.recipe != "dino" or run.ibot):
        why = "patches must not see each other before the first block, so it has to be a ViT without a stem"
        hint = (
            f"--method dino without --ibot hides no patches; or --model Nano/4{' without --init' if run.init else ''}"
        )
        method = "iBOT" if run.ibot else run.recipe
        raise UsageError(f"this network cannot be pretrained by {method}", why=why, hint=hint)
    if config.pool == "map":
        why = "attention pooling would stay random: no method trains it"
        raise UsageError("this network cannot be pretrained", why=why, hint="--pool mean")
    if config.grid[0] * config.grid[1] < _FEWEST_PATCHES:
        why = f"{config.image[0]}×{config.image[1]} pixels are {config.grid[0] * config.grid[1]} patches"
        raise UsageError("too few patches to mask some and see others", why=why, hint="a larger --image-size")


_FEWEST_PATCHES = 4


def _with(plan: Plan, *choices: Choice) -> Plan:
    return Plan(plan.run, (*choices, *plan.choices))


class _Shape(NamedTuple):
    size: tuple[int, int]
    model: str
    crop: Crop


def _shape(stats: DatasetStats, gpu: bool) -> _Shape:
    """Image size, network and geometry: 16 to 64 patches, or 196 on a GPU."""
    name = "S" if gpu else "Nano" if stats.channels == 3 else "Pico"
    for limit, patch in ((16, 2), (40, 4), (96, 8 if gpu else 16)):
        if max(stats.size) <= limit:
            height, width = (max(2 * patch, round(n / patch) * patch) for n in stats.size)
            return _Shape((height, width), f"{name}/{patch}", "shift")
    side = 224 if gpu else 128
    return _Shape((side, side), f"{name}/16", "random-resized")


def _plan(method: str, stats: DatasetStats, machine: Machine, **options: Any) -> Plan:
    """The run that all methods share, with a method's `options`."""
    gpu = machine.device.type == "cuda"
    shape = _shape(stats, gpu)
    images = 2_000_000 * (20 if gpu else 1)
    epochs = max(1, stats.epochs or min(400, round(images / max(stats.images, 1))))
    batch = stats.batch(64 if stats.images < 5_000 else 512 if gpu else 256)
    usual: dict[str, Any] = {"optimizer": "adamw", "lr": 1e-3, "beta2": 0.95, "crop": shape.crop, "crop_area": 0.2}
    run = Run(
        recipe=method, model=shape.model, image_size=shape.size, channels=stats.channels, epochs=epochs,
        batch_size=batch, momentum=0.9, weight_decay=0.05, schedule="cosine",
        warmup=min(epochs / 10, 40.0), clip=1.0, flip=stats.channels == 3,
        val_fraction=None if stats.classes > 1 else 0.0, **{**usual, **options},
    )  # fmt: skip
    height, width = stats.size
    why_epochs = "about 2 million images (× 20 on a GPU), at most 400 epochs; --minutes limits the time instead"
    muon = "for the blocks: better than AdamW in the same time (docs/log/accuracy.md)"
    why_optimizer = muon if run.optimizer == "muon" else f"β2 {run.beta2:g}, as in the method's paper"
    geometry = "shifts by up to 1/8" if run.crop == "shift" else "crops of 20 to 100 %"
    return Plan(
        run,
        (
            Choice("image size", "×".join(map(str, shape.size)), f"images are {height}×{width}"),
            Choice("channels", str(stats.channels), "of the images"),
            Choice("model", shape.model, "plain patches: behind a stem, a patch would see its masked neighbors"),
            Choice("epochs", str(epochs), "" if stats.epochs else why_epochs),
            Choice("batch", str(batch), "uses the hardware well" if batch > 64 else "small, for few images"),
            Choice("optimizer", f"{run.optimizer}, {run.lr:g}", why_optimizer),
            *(
                []
                if run.crop == "none"
                else [Choice("geometry", geometry, "no other augmentation: masking varies the images enough")]
            ),
            Choice("mirror", "yes" if run.flip else "no", MIRRORED if run.flip else NOT_MIRRORED),
        ),
    )
