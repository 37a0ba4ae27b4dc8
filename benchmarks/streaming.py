"""Photographs that are decoded again in every epoch, as a set that fits no memory is: JPEGs of 500 × 375, made here.

- Loading alone: an epoch of `vitral`'s loader with `--residency stream`, mirror and standardization included, beside
  torch's DataLoader over torchvision's ImageFolder with the same augmentation (crops of 8 to 100 %, mirror), by Pillow
  as its references do, and by torchvision's own decoder. All have as many worker processes beside one thread, are warm
  (one epoch before), and take turns.
- Training: `vitral train --residency stream`, where a GPU may decode the JPEGs, and `--residency memory`, two epochs
  each, beside a loop of torchvision and timm with as many loader processes, compiled and in the same precision. Each
  has its rate in the first epoch, compiling included, and in the second. `waiting` is the share of an epoch in which
  the step waits for images.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import io as decoders
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import vitral
from benchmarks.accuracy import read_history
from benchmarks.results import Options, Table
from vitral.bench.harness import alternate, ratio
from vitral.bench.peers import PEERS
from vitral.containers import cores
from vitral.data.images.augmentation import Augmentation
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batches
from vitral.device import choose, cpu_threads, synchronize
from vitral.system import keep_freed_memory

WIDTH, HEIGHT, SIDE, BATCH = 500, 375, 224, 64
IMAGES = {"cpu": 600, "cuda": 24_000}
DISTINCT = 600
"""Photographs that are drawn; the others are copies of them, which take as long to decode."""
ROUNDS = {"cpu": 5, "cuda": 2}
STEP = {"cpu": ("Ti/16", "vit_tiny_patch16_224", 32), "cuda": ("S/16", "vit_small_patch16_224", 256)}
"""Device → network, its name in timm, and batch, of training."""
QUICK = 16

Opened = Callable[[Path], Any]


def run(options: Options) -> list[Table]:
    """Make a table of loading, and one of training; `python -m benchmarks streaming loading` makes the first alone."""
    keep_freed_memory()  # as a run does
    with tempfile.TemporaryDirectory() as folder:
        data = _photographs(Path(folder) / "photographs", QUICK if options.quick else IMAGES[options.device])
        tables = [_loading(data, options)] if not options.names or "loading" in options.names else []
        if not options.quick and (not options.names or "training" in options.names):
            tables.append(_training(data, Path(folder), options))
        return tables


def _photographs(folder: Path, count: int) -> Path:
    """Write JPEGs of two classes, smooth with some grain: about 60 kB each, as photographs of this size have. Those
    after the first `DISTINCT` are copies.
    """
    generator = np.random.default_rng(0)
    small = generator.integers(0, 256, (32, 12, 16, 3), np.uint8)
    grain = generator.integers(-12, 13, (HEIGHT, WIDTH, 3), np.int16)

    def write(number: int) -> None:
        drawn = np.roll(small[number % len(small)], number, axis=1)
        smooth = np.asarray(Image.fromarray(drawn).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.int16)
        pixels = (smooth + np.roll(grain, number, axis=0)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(path(number), quality=90)

    def path(number: int) -> Path:
        return folder / "ab"[number % 2] / f"{number}.jpg"

    for name in "ab":
        (folder / name).mkdir(parents=True)
    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(write, range(min(count, DISTINCT))))
    for number in range(DISTINCT, count):
        shutil.copyfile(path(number % DISTINCT), path(number))
    return folder


def _workers() -> int:
    return min(cores(), 16)


def _loading(data: Path, options: Options) -> Table:
    split = vitral.data.load(str(data))["train"]
    preprocessing, augmentation = Preprocessing(image_size=(SIDE, SIDE)), Augmentation("random-resized", flip=True)
    batches = Batches(
        split,
        preprocessing,
        batch_size=min(BATCH, len(split)),
        device=torch.device("cpu"),
        augmentation=augmentation,
        residency="stream",
        workers=_workers(),
        check=False,
    )
    epochs = iter(range(10**6))

    def ours() -> Iterator[Tensor]:
        for batch in batches.epoch(next(epochs)):
            yield preprocessing.standardize(augmentation.pixels(batch.images))

    contenders: dict[str, Callable[[], Iterable[Any]]] = {"vitral": ours}
    for name, opened in (("torchvision, Pillow", _by_pillow), ("torchvision, its decoder", decoders.decode_image)):
        loader = _loader(data, opened, len(split))
        contenders[name] = lambda loader=loader: loader
    programs = {name: lambda epoch=epoch: _consume(epoch()) for name, epoch in contenders.items()}
    with cpu_threads(1):  # the other processes need the cores
        found = alternate(
            programs, rounds=1 if options.quick else options.rounds or ROUNDS[options.device], warm_up=1, device="cpu"
        )
    batches.close()
    rows = [
        {
            "name": name,
            "rate": len(split) * 1000 / one.columns(1000)["median"],
            "n": one.n,
            "share": ratio(one, found["vitral"]),
        }
        for name, one in found.items()
    ]
    columns = {"name": "", "rate": "images a second|,.0f", "n": "n|d", "share": "time : vitral|.3f"}
    caption = f"Loading {len(split):,} photographs at {SIDE} pixels by {_workers()} processes"
    return Table(caption, columns, rows, name="cuda" if options.device == "cuda" else "")


def _consume(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


def _by_pillow(path: Any) -> Image.Image:
    return Image.open(path).convert("RGB")


def _loader(data: Path, opened: Opened, count: int, batch: int = BATCH) -> DataLoader[Any]:
    changed = v2.Compose(
        [
            v2.RandomResizedCrop(SIDE, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.5] * 3),
        ]
    )
    return DataLoader(
        ImageFolder(str(data), changed, loader=opened),
        min(batch, count),
        shuffle=True,
        num_workers=_workers(),
        persistent_workers=True,
        drop_last=True,
        pin_memory=torch.cuda.is_available(),
    )


def _training(data: Path, folder: Path, options: Options) -> Table:
    model, theirs, batch = STEP[options.device]
    rows = []
    for residency in ("stream", "memory"):
        out = folder / residency
        vitral.train(
            str(data),
            model=model,
            image_size=SIDE,
            epochs=2,
            batch_size=batch,
            residency=residency,
            out=str(out),
            val_fraction=0.01,
            device=options.device,
            quiet=True,
            crop="random-resized",
            flip=True,
            augment="none",
            optimizer="adamw",
            init="none",
        )
        first, second = read_history(out / "metrics.jsonl")
        seconds = first["images_seen"] / first["images_per_second"] + first.get("compile_seconds", 0.0)
        rows.append(
            {
                "name": f"vitral, {residency}",
                "first": first["images_seen"] / seconds,
                "second": second["images_per_second"],
                "waited": first["waited"],
                "later": second["waited"],
            }
        )
    if PEERS["timm"].is_installed:
        rows.append(_plain(data, theirs, batch, options.device))
    columns = {
        "name": "",
        "first": "first epoch, images a second|,.0f",
        "second": "second|,.0f",
        "waited": "waiting, first|.0%",
        "later": "second|.0%",
    }
    caption = f"Training {model} on {IMAGES[options.device]:,} photographs, batches of {batch}, {_workers()} processes"
    return Table(caption, columns, rows, name=f"training{'-cuda' if options.device == 'cuda' else ''}")


def _plain(data: Path, name: str, batch: int, device: str) -> dict[str, Any]:
    """Train two epochs by a plain loop: timm's network, compiled on a GPU, AdamW, autocast."""
    import timm

    machine = choose(device)
    model = timm.create_model(name, num_classes=2).to(machine.device)
    network = torch.compile(model) if device == "cuda" else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    loader, rates = _loader(data, _by_pillow, IMAGES[device], batch), []
    for _ in range(2):
        started, count = time.perf_counter(), 0
        for images, labels in loader:
            with machine.autocast():
                logits = network(images.to(machine.device, non_blocking=True))
            loss = torch.nn.functional.cross_entropy(logits.float(), labels.to(machine.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            count += len(labels)
        synchronize(device)
        rates.append(count / (time.perf_counter() - started))
    return {"name": "torchvision and timm", "first": rates[0], "second": rates[1], "waited": None, "later": None}
