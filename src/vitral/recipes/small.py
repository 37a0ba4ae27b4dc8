"""Training from scratch on little data: the default of `vitral train DATA` where no trained network fits.

    vitral train photos/ --init none

Image size, patch size and epochs follow from the images and the machine. The experiments behind the values are in
docs/log/accuracy.md, accuracies and times in benchmarks/RESULTS.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from vitral.data.images.augmentation import Crop
from vitral.device import Machine
from vitral.recipes.finetune import AVERAGED, SMOOTHING, geometry
from vitral.recipes.stats import MIRRORED, NOT_MIRRORED, PASSES, DatasetStats, pixels_of, steps, warmup
from vitral.training.options import Run
from vitral.training.plan import Choice, Plan


def small(stats: DatasetStats, machine: Machine) -> Plan:
    """Choose a complete run for this data and this machine, with a reason for each choice."""
    gpu = machine.device.type == "cuda"
    shape = shape_of(stats, gpu)
    epochs, why_epochs = _epochs(stats, gpu)
    full = 512 if gpu and _deep(stats) else 256
    batch = stats.batch(16 if stats.images < 500 else 64 if stats.images < 5_000 else full)
    run = Run(
        recipe="small",
        model=shape.model,
        image_size=shape.image_size,
        channels=stats.channels,
        pool="mean",
        epochs=epochs,
        batch_size=batch,
        optimizer="muon",
        lr=6e-3,
        momentum=0.9,
        beta2=0.99,
        weight_decay=0.05,
        schedule="cosine",
        warmup=warmup(epochs),
        clip=1.0,
        label_smoothing=0.1,
        ema=0.998,
        crop=shape.crop,
        crop_area=0.3,
        flip=stats.channels == 3,
    )
    run = replace(run, **_adjustments(stats, gpu, shape.crop, epochs))
    return Plan(run, (*_input_choices(stats, shape), *_training_choices(stats, run, why_epochs)))


def _adjustments(stats: DatasetStats, gpu: bool, crop: Crop, epochs: int) -> dict[str, Any]:
    """Return changes for grayscale images, for small color images, and for long runs."""
    photographs = crop == "random-resized"
    if stats.channels == 1:
        return {"lr": 1e-2, "erase": 0.0 if photographs else 0.3}
    changes: dict[str, object] = {}
    if _deep(stats):
        changes = {"schedule": "linear", "label_smoothing": 0.2, "whiten": True, "shift": 1 / 16, "ema": 0.99}
        if gpu:  # a wider network, and a longer run
            changes |= {"lr": 3e-3, "label_smoothing": 0.1, "shift": 1 / 8}
    if epochs >= _LONG:
        return {**changes, "augment": "trivialaugment", "drop_path": 0.1}
    return {**changes, "erase": 0.0 if photographs else 0.5}


def _input_choices(stats: DatasetStats, shape: Shape) -> tuple[Choice, ...]:
    """Explain the choices about the network and its input."""
    same = stats.uniform and shape.image_size == stats.size
    why_size = "the size of your images" if same else f"your images ({pixels_of(stats)}) are resized"
    color = "your images have color" if stats.channels == 3 else "all sampled images are grayscale"
    return (
        Choice("image size", "×".join(map(str, shape.image_size)), why_size),
        Choice("channels", str(stats.channels), color),
        Choice("model", shape.model, shape.why),
        Choice(
            "pooling",
            "mean",
            "the head reads the mean of all patches, which learns faster from few images than a class token",
        ),
    )


def _training_choices(stats: DatasetStats, run: Run, why_epochs: str) -> tuple[Choice, ...]:
    """Explain the choices about training."""
    return (
        Choice("epochs", str(run.epochs), why_epochs),
        Choice("batch", str(run.batch_size), steps(stats, run.batch_size)),
        Choice("optimizer", f"muon, {run.lr:g}", "Muon, at this learning rate, needs fewer epochs than AdamW"),
        Choice("geometry", *geometry(run.crop, run.shift)),
        Choice("mirror", "yes" if run.flip else "no", MIRRORED if run.flip else NOT_MIRRORED),
        augmentation(run),
        replace(SMOOTHING, value=f"{run.label_smoothing:g}"),
        AVERAGED,
    )


_LONG = 20
"""Number of epochs from which strong augmentation helps."""


def augmentation(run: Run) -> Choice:
    """Explain the augmentation."""
    if run.augment != "none":
        return Choice("augmentation", run.augment, f"{run.epochs} epochs are enough to benefit from strong changes")
    if run.erase:
        why = "reduces overfitting to small images in a short run"
        return Choice("augmentation", f"random erasing, {run.erase:g}", why)
    why = "the run is too short to benefit from stronger changes" if run.flip else "strong changes could spoil text"
    return Choice("augmentation", "none", why)


def _deep(stats: DatasetStats) -> bool:
    """True if the stem is a deep one, which learns more from each image."""
    return max(stats.size) <= 40 and stats.channels == 3


class Shape(NamedTuple):
    """Image size, network and training geometry."""

    image_size: tuple[int, int]
    model: str
    crop: Crop
    why: str


def shape_of(stats: DatasetStats, gpu: bool) -> Shape:
    """Choose image size, network and training geometry: some 16 to 150 patches, or 196 of photographs on a GPU."""
    if gpu:
        size = "Mini" if _deep(stats) else "S" if stats.images >= 5_000 else "Ti"
    else:
        size = "Micro" if stats.channels == 3 else "Femto"
    machine = "a GPU" if gpu else "a CPU"
    convolutions = "C+ adds convolutions, which train faster than plain patches"
    largest = max(stats.size)
    for limit, patch in ((16, 2), (40, 4), (96, 8 if gpu else 16)):
        if largest <= limit:
            if patch == 4 and stats.channels == 3 and not gpu and all(n % 8 == 0 for n in stats.size):
                patch = 8  # one more halving in the deep stem
            image_size = tuple(max(patch, round(n / patch) * patch) for n in stats.size)
            why = f"size {size} suits {machine}, and patches of {patch} pixels suit small images; {convolutions}"
            return Shape(image_size, f"C+{size}/{patch}", "shift", why)  # type: ignore[arg-type]
    side = 224 if gpu else 128
    why = f"size {size} suits {machine}, and patches of 16 pixels suit photographs; {convolutions}"
    return Shape((side, side), f"C+{size}/16", "random-resized", why)


def _epochs(stats: DatasetStats, gpu: bool) -> tuple[int, str]:
    """Choose the number of epochs for a run of some minutes, within limits, and the reason."""
    deep = _deep(stats)
    images = 720_000 if stats.channels == 1 else 500_000 if deep else 900_000
    images *= (10 if deep else 20) if gpu else 1
    most = 200 if stats.channels == 3 else 25
    if stats.epochs is not None:
        return min(most, stats.epochs), ""  # the plan adds the reason
    epochs = max(5, min(most, round(images / stats.images)))
    return epochs, PASSES
