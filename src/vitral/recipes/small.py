"""From scratch on little data, on the machine at hand: the default of `vitral train DATA`.

    vitral train photos/

Size, patch and length follow from the pictures and the machine. The experiments behind the numbers are in docs/log.md,
accuracies and times in benchmarks/RESULTS.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from vitral.data.transforms import Crop
from vitral.device import Machine
from vitral.recipes.facts import Facts
from vitral.training.run import Choice, Plan, Run


def small(facts: Facts, machine: Machine) -> Plan:
    """A complete run for this data on this machine, with a reason for each choice."""
    gpu = machine.device.type == "cuda"
    shape = _shape(facts, gpu)
    epochs, why_epochs = _epochs(facts, gpu)
    full = 512 if gpu and _deep(facts) else 256
    batch = facts.batch(16 if facts.images < 500 else 64 if facts.images < 5_000 else full)
    run = Run(
        recipe="small", model=shape.model, image_size=shape.image_size, channels=facts.channels, pool="mean",
        epochs=epochs, batch_size=batch, optimizer="muon", lr=6e-3, momentum=0.9, beta2=0.99, weight_decay=0.05,
        schedule="cosine", warmup=max(1.0, epochs / 20), clip=1.0, label_smoothing=0.1, ema=0.998, crop=shape.crop,
        crop_area=0.3, flip=facts.channels == 3,
    )  # fmt: skip
    run = replace(run, **_of_kind(facts, gpu, shape.crop, epochs))
    return Plan(run, (*_seen(facts, shape), *_learned(run, why_epochs), *_advice(facts, gpu)))


def _of_kind(facts: Facts, gpu: bool, crop: Crop, epochs: int) -> dict[str, Any]:
    """What pictures of a kind want otherwise: grey ones, small ones with colour, and a run that is long."""
    photographs = crop == "random-resized"
    if facts.channels == 1:
        return {"lr": 1e-2, "erase": 0.0 if photographs else 0.3}
    changes: dict[str, Any] = {}
    if _deep(facts):
        changes = {"schedule": "linear", "label_smoothing": 0.2, "whiten": True, "shift": 1 / 16, "ema": 0.99}
        if gpu:  # a wider network, and a longer run
            changes |= {"lr": 3e-3, "label_smoothing": 0.1, "shift": 1 / 8}
    if epochs >= _LONG:
        return {**changes, "augment": "trivialaugment", "drop_path": 0.1}
    return {**changes, "erase": 0.0 if photographs else 0.5}


def _seen(facts: Facts, shape: _Shape) -> tuple[Choice, ...]:
    """What the network is, and how it sees pictures."""
    height, width = facts.size
    same = "" if facts.uniform else f" (median of {facts.sampled} looked at)"
    colour = "pictures have colour" if facts.channels == 3 else "every picture looked at is grey"
    return (
        Choice("image size", "×".join(map(str, shape.image_size)), f"pictures are {height}×{width}{same}"),
        Choice("channels", str(facts.channels), colour),
        Choice("model", shape.model, shape.why),
        Choice(
            "pooling", "mean", "of the patches: faster to learn on little data than a class token (arXiv 2205.01580)"
        ),
    )


def _learned(run: Run, why_epochs: str) -> tuple[Choice, ...]:
    """How it learns, and what from."""
    few = run.batch_size <= 64
    often = run.epochs >= 5
    if run.crop == "random-resized":
        geometry = "crops of 30 to 100 %", "the object may be anywhere in a photograph"
    else:
        geometry = f"shifts by up to 1/{1 / run.shift:.0f}", "the object fills a small picture"
    smoothing = f"{run.label_smoothing:g}, weights averaged"
    return (
        Choice("epochs", str(run.epochs), why_epochs),
        Choice("batch", str(run.batch_size), "small, as the set is" if few else "keeps the processor busy"),
        Choice("optimizer", f"muon, {run.lr:g}", "learns in fewer passes than AdamW (docs/log.md)"),
        Choice("geometry", *geometry),
        Choice("mirror", "yes" if run.flip else "no", "photographs stay true" if run.flip else "grey may be writing"),
        _augmentation(run),
        Choice("smoothing", smoothing, "both steady a network" + " that sees each picture often" * often),
    )


def _advice(facts: Facts, gpu: bool) -> tuple[Choice, ...]:
    """What would help more than any of this."""
    if facts.images >= _FEW:
        return ()
    name = f"timm:vit_{'small' if gpu else 'tiny'}_patch16_224.augreg_in21k_ft_in1k"
    why = f"{facts.images:,} pictures are few; weights that have learned would help most: try --init {name}"
    return (Choice("init", "none", why),)


_LONG = 20
"""Epochs from which on strong augmentation pays: there is time to learn from it."""


def _augmentation(run: Run) -> Choice:
    if run.augment != "none":
        return Choice("augmentation", run.augment, f"{run.epochs} epochs are enough to learn from it")
    if run.erase:
        why = "keeps a short run from learning small pictures by heart"
        return Choice("augmentation", f"random erasing, {run.erase:g}", why)
    return Choice("augmentation", "none", "too short a run to learn from more" if run.flip else "grey may be writing")


_FEW = 1_000
"""Training pictures, below which starting from published weights is recommended."""


def _deep(facts: Facts) -> bool:
    """Whether the stem is a deep one, which learns more of each picture."""
    return max(facts.size) <= 40 and facts.channels == 3


class _Shape(NamedTuple):
    image_size: tuple[int, int]
    model: str
    crop: Crop
    why: str


def _shape(facts: Facts, gpu: bool) -> _Shape:
    """Image size, network and training geometry: 16 to 64 patches, or 196 where there is a GPU."""
    if gpu:
        size = "Mini" if _deep(facts) else "S" if facts.images >= 5_000 else "Ti"
    else:
        size = "Micro" if facts.channels == 3 else "Femto"
    machine = "on a GPU" if gpu else "for a processor"
    convolutions = "convolutions before them learn faster than patches"
    largest = max(facts.size)
    for limit, patch in ((16, 2), (40, 4), (96, 8 if gpu else 16)):
        if largest <= limit:
            if patch == 4 and facts.channels == 3 and not gpu and all(n % 8 == 0 for n in facts.size):
                patch = 8  # one more halving makes a deep stem deeper
            image_size = tuple(max(patch, round(n / patch) * patch) for n in facts.size)
            why = f"tokens of {patch} pixels for small pictures, {convolutions}; width and depth {machine}"
            return _Shape(image_size, f"C+{size}/{patch}", "shift", why)  # type: ignore[arg-type]
    side = 224 if gpu else 128
    why = f"tokens of 16 pixels for photographs, {convolutions}; width and depth {machine}"
    return _Shape((side, side), f"C+{size}/16", "random-resized", why)


def _epochs(facts: Facts, gpu: bool) -> tuple[int, str]:
    """As many passes as make about the number of pictures that some minutes allow, within bounds."""
    deep = _deep(facts)
    pictures = 720_000 if facts.channels == 1 else 500_000 if deep else 900_000
    pictures *= (10 if deep else 20) if gpu else 1
    most = 200 if facts.channels == 3 else 25
    if facts.epochs is not None:
        return min(most, facts.epochs), ""  # the plan says why
    epochs = max(5, min(most, round(pictures / facts.images)))
    why = (
        f"{facts.images:,} pictures, seen often and never twice alike"
        if epochs == most
        else f"about {epochs * facts.images / 1e6:.1f} million pictures seen; --minutes takes what fits into a time"
    )
    return epochs, why
