"""Pretraining on images without labels.

    vitral pretrain photos/                                    masked autoencoder
    vitral pretrain photos/ --method mpp                       masked patch prediction of the ViT paper
    vitral pretrain photos/ --method dino                      self-distillation
    vitral pretrain photos/ --method distill --teacher NAME    features of another network

Where patches are masked, the networks are ViTs with plain patches: behind a convolutional stem a patch would see its
masked neighbors.
"""

from __future__ import annotations

from typing import Any

from vitral.data import DataSet
from vitral.device import Machine
from vitral.errors import UsageError
from vitral.recipes.small import Shape, shape_of
from vitral.recipes.stats import MIRRORED, NOT_MIRRORED, DatasetStats
from vitral.training.options import Run
from vitral.training.plan import Choice, Plan

UNSUPPORTED = (
    "probe",
    "pre_logits",
    "logit_scale",
    "head_bias_init",
    "whiten",
    "erase",
    "mixup",
    "cutmix",
    "label_smoothing",
    "class_weights",
    "sampling",
    "metrics",
    "layer_decay",
    "early_stop",
    "keep",
    "patch_dropout",
    "pack",
    "pack_min_size",
    "pack_drop",
    "multiple",
    "patch_sizes",
)
"""Options without effect in pretraining; they are refused."""

_MASKED, _DECODER = ("mask",), ("decoder_dim", "decoder_depth")
_TAUGHT = ("teacher", "distill_weight", "distill_temperature", "teacher_views")
_DISTILLED = ("prototypes", "local_crops", "teacher_momentum", "teacher_temperature", "centering", "ibot", "koleo")
UNSUPPORTED_BY = {
    "mae": (*UNSUPPORTED, *_DISTILLED, *_TAUGHT),
    "mpp": (*UNSUPPORTED, *_DISTILLED, *_DECODER, *_TAUGHT),
    "dino": (*UNSUPPORTED, *_MASKED, *_DECODER, *_TAUGHT, "crop", "shift", "ema", "compile", "graphs"),
    "distill": (
        *UNSUPPORTED,
        *_DISTILLED,
        *_MASKED,
        *_DECODER,
        "crop",
        "shift",
        "augment",
        "randaugment",
        "ema",
        "compile",
        "graphs",
    ),
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
        "dino",
        stats,
        machine,
        pool="cls",
        crop="none",
        crop_area=0.3,
        teacher_momentum=momentum,
        prototypes=prototypes,
        beta2=0.999,
        lr=5e-4,
    )
    why = "agree with a teacher, the student's average, about crops of an image (arXiv 2104.14294)"
    crops = "two of 30 to 100% of the image; the student sees 4 smaller ones, too"
    return _with(
        plan,
        Choice("method", "dino", why),
        Choice("pooling", "class token", "it has to gather the image, as in the paper"),
        Choice("crops", "2 + 4", crops),
        Choice("teacher momentum", f"{momentum:g}", "rises to 1" if gpu else "lower for a short run; rises to 1"),
        Choice("prototypes", str(prototypes), "fewer for a small network" if not gpu else "enough for most data"),
    )


def distill(stats: DatasetStats, machine: Machine) -> Plan:
    """Distillation: the features of another network (arXiv 2203.14001, 2407.20179)."""
    gpu = machine.device.type == "cuda"
    shape, views = shape_of(stats, gpu)._replace(crop="random-resized"), 0 if gpu else 8
    plan = _plan(
        "distill",
        stats,
        machine,
        shape,
        pool="mean",
        crop=shape.crop,
        crop_area=0.25,
        optimizer="muon",
        lr=4e-3,
        distill_weight=0.5,
        distill_temperature=2.0,
        teacher_views=views,
    )
    why = "learn the teacher's features of the same crops, through a linear layer (arXiv 2407.20179)"
    colors = "of 25 to 100%; colors of the network's own are random, those that the teacher sees are not"
    changed = (
        Choice("method", "distill", why),
        Choice("geometry", "crops", colors),
        Choice("teacher views", str(views), "of each image; the teacher sees each once" if views else "all are new"),
    )
    kept = [choice for choice in plan.choices if choice.name != "geometry"]
    return _with(Plan(plan.run, tuple(kept)), *changed)


def check(dataset: DataSet, config: Any, run: Run) -> None:
    """Raise `UsageError` for networks that cannot be pretrained."""
    stem = getattr(config, "hybrid", None)
    taught = run.recipe == "distill"
    if stem is None or config.dist_token:
        why = "the methods need a ViT without a distillation token"
        raise UsageError("this network cannot be pretrained", why=why, hint="--model Nano/4")
    if stem and not taught and (run.recipe != "dino" or run.ibot):
        why = "patches must not see each other before the first block, so it has to be a ViT without a stem"
        other = f"--model Nano/4{' without --init' if run.init else ''}"
        hint = f"--method dino without --ibot, or distill, hides no patches; or {other}"
        method = "iBOT" if run.ibot else run.recipe
        raise UsageError(f"this network cannot be pretrained by {method}", why=why, hint=hint)
    if config.pool == "map" and not taught:
        why = "attention pooling would stay random: only distill trains it"
        raise UsageError("this network cannot be pretrained", why=why, hint="--pool mean")
    if not taught and config.grid[0] * config.grid[1] < _FEWEST_PATCHES:
        why = f"{config.image[0]}×{config.image[1]} pixels are {config.grid[0] * config.grid[1]} patches"
        raise UsageError("too few patches to mask some and see others", why=why, hint="use a larger --image-size")


_FEWEST_PATCHES = 4


def _with(plan: Plan, *choices: Choice) -> Plan:
    return Plan(plan.run, (*choices, *plan.choices))


_PLAIN = "plain patches: behind a stem, a patch would see its masked neighbors"


def _shape(stats: DatasetStats, gpu: bool) -> Shape:
    """Image size, network and geometry: 16 to 64 patches, or 196 on a GPU."""
    name = "S" if gpu else "Nano" if stats.channels == 3 else "Pico"
    for limit, patch in ((16, 2), (40, 4), (96, 8 if gpu else 16)):
        if max(stats.size) <= limit:
            height, width = (max(2 * patch, round(n / patch) * patch) for n in stats.size)
            return Shape((height, width), f"{name}/{patch}", "shift", _PLAIN)
    side = 224 if gpu else 128
    return Shape((side, side), f"{name}/16", "random-resized", _PLAIN)


def _plan(method: str, stats: DatasetStats, machine: Machine, shape: Shape | None = None, **options: object) -> Plan:
    """The run that all methods share, with a method's `options`, by default of a ViT with plain patches."""
    gpu = machine.device.type == "cuda"
    shape = shape or _shape(stats, gpu)
    images = 2_000_000 * (20 if gpu else 1)
    epochs = max(1, stats.epochs or min(400, round(images / max(stats.images, 1))))
    batch = stats.batch(64 if stats.images < 5_000 else 512 if gpu else 256)
    usual: dict[str, Any] = {"optimizer": "adamw", "lr": 1e-3, "beta2": 0.95, "crop": shape.crop, "crop_area": 0.2}
    run = Run(
        recipe=method,
        model=shape.model,
        image_size=shape.image_size,
        channels=stats.channels,
        epochs=epochs,
        batch_size=batch,
        momentum=0.9,
        weight_decay=0.05,
        schedule="cosine",
        warmup=min(epochs / 10, 40.0),
        clip=1.0,
        flip=stats.channels == 3,
        val_fraction=None if stats.classes > 1 else 0.0,
        **{**usual, **options},
    )
    why_epochs = "about 2 million images (× 20 on a GPU), at most 400 epochs; --minutes limits the time instead"
    muon = "for the blocks: better than AdamW in the same time (docs/log/accuracy.md)"
    why_optimizer = muon if run.optimizer == "muon" else f"β2 {run.beta2:g}, as in the method's paper"
    crops = "shifts by up to 1/8" if run.crop == "shift" else "crops of 20 to 100%"
    geometry = [Choice("geometry", crops, "no other augmentation: masking varies the images enough")]
    return Plan(
        run,
        (
            Choice("image size", "×".join(map(str, shape.image_size)), f"images are {'×'.join(map(str, stats.size))}"),
            Choice("channels", str(stats.channels), "of the images"),
            Choice("model", shape.model, shape.why),
            Choice("epochs", str(epochs), "" if stats.epochs else why_epochs),
            Choice("batch", str(batch), "uses the hardware well" if batch > 64 else "small, for few images"),
            Choice("optimizer", f"{run.optimizer}, {run.lr:g}", why_optimizer),
            *(geometry if run.crop != "none" else ()),
            Choice("mirror", "yes" if run.flip else "no", MIRRORED if run.flip else NOT_MIRRORED),
        ),
    )
