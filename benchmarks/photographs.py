"""Training from scratch on few photographs, at equal time: vitral with its defaults, and the recipes of two other
libraries with as many epochs as fit into vitral's seconds. `python -m benchmarks photographs cifar10` takes the first
50 training images of each class of CIFAR-10, in a folder that it makes, and tests on the first 100 test images of each;
a path takes other data.

vitral is `vitral train DATA`; its seconds are training and validation, without reading the data and the report. The
others:

- timm: the defaults of its training script (`train.py` of pytorch-image-models at aa4b585), rebuilt from the package's
  own parts: SGD with Nesterov momentum 0.9, weight decay 2e-5, learning rate 0.1 × batch / 256, batches of 128 without
  the incomplete one, 5 epochs of warm-up from 1e-5, then a cosine, stepped once an epoch; crops of 8 to 100 %, mirror,
  color jitter 0.4, label smoothing 0.1. The network is vit_tiny_patch16_224; the script's own default is a ResNet.
- vit-pytorch: its ViT for small data sets (`vit_for_small_dataset`) in the sizes of its README, with the training of
  its example `cats_and_dogs.ipynb`: Adam, learning rate 3e-5, batches of 64, torchvision's RandomResizedCrop and
  mirror. The example makes a StepLR of 0.7 and never steps it, so the rate is constant; it evaluates with dropout on,
  here it is off.

Their patches are 16 pixels wide, 4 for images below 64 pixels. They get the same conditions: image size, precision by
`torch.autocast`, images decoded once and kept in memory, as many threads and as many loader processes, and on a CPU a
process that keeps freed memory. Two epochs of a discarded network start the loader and measure how many epochs fit;
they are not counted, nor is validation. If the time is over earlier, training ends with the current epoch.

Accuracy is that after the last epoch, for all: no training selects by the test images. But the batch size of 16 in our
recipe was once compared with 64 on these very ants and bees, and our defaults for small images were chosen on CIFAR-10,
of which these are a part (docs/log/accuracy.md); nothing of the others' was. The interval is 95 % (Wilson) of seed 0:
all seeds are tested on the same images, so that pooled they would not be independent. With `--keep FOLDER` finished
parts are reused when the same command is repeated on the same machine with nothing changed.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import random
import re
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

import vitral
from benchmarks.accuracy import History, course, read_history
from benchmarks.results import Options, Table
from vitral.atomic import write_text
from vitral.bench.harness import timed
from vitral.bench.peers import PEERS
from vitral.containers import cores
from vitral.data import Split
from vitral.device import Machine, synchronize
from vitral.evaluation.intervals import wilson_interval
from vitral.training.run_folder import RunFolder
from vitral.workflows.planning.job import Job
from vitral.workflows.planning.plan import plan_run

SET, SMALL = "hymenoptera.tar", "cifar10"
KEPT = {"train": ("train", 50), "val": ("test", 100)}
"""Split of the small set → its source split, and the number of images of each class."""
OURS = "vitral"

Transform = Callable[[Image.Image], Tensor]


@dataclass(frozen=True)
class Setting:
    """Settings of the other libraries."""

    side: int  # of the images, in pixels
    classes: int
    epochs: int
    quick: bool

    @property
    def patch(self) -> int:
        """Side of a patch in pixels."""
        return 16 if self.side >= 64 else 4


@dataclass(frozen=True)
class Script:
    """A training as its authors run it."""

    name: str  # of the network
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: nn.Module
    after_epoch: Callable[[int], object]  # called with the number of epochs done
    batch_size: int
    drop_last: bool
    training: Transform
    judging: Transform


@dataclass(frozen=True)
class Trained:
    """A finished training."""

    model: str
    parameters: int
    accuracy: float  # after the last epoch
    seconds: float
    epochs: int
    planned: int


def run(options: Options) -> list[Table]:
    """Make two tables for each data set: the comparison, and the learning curve of vitral."""
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            return _measure(_noise(Path(folder) / "noise"), "", options)
    tables = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.names or ("",):
            data = _found(name, options.keep or Path(folder), options)
            if data:
                tables += _measure(data, data.stem if name else "", options)
    return tables


def _found(name: str, folder: Path, options: Options) -> Path | None:
    """Find the data of a name; None if absent."""
    if not name:
        return options.data(SET)
    return _small(folder, options) if name == SMALL else Path(name)


def _small(folder: Path, options: Options) -> Path | None:
    """Extract the small set into `folder` unless it is there."""
    source, target = options.data(f"{SMALL}.tar"), folder / f"{SMALL}-500"
    if source is None:
        return None
    if target.exists():
        return target
    part = target.with_suffix(".part")
    with tarfile.open(source) as tar:
        for member in tar:
            found = re.fullmatch(r".*/(\w+)/(\w+)/(\d+)\.jpg", member.name)
            for split, (there, most) in KEPT.items():
                if found and found[1] == there and int(found[3]) < most:
                    path = part / split / found[2] / f"{found[3]}.jpg"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(tar.extractfile(member).read())  # type: ignore[union-attr]
    return part.rename(target)


def _measure(data: Path, name: str, options: Options) -> list[Table]:
    runs: dict[str, list[Trained]] = {}
    histories = []
    for seed in range(options.seeds):
        given = {"data": str(data), "seed": seed, "device": options.device, **({"epochs": 1} if options.quick else {})}
        with _folder(options, data, seed) as folder:
            ours, history = _ours(given, folder / OURS, options)
            histories.append(history)
            _add(runs, OURS, seed, ours)
            job = plan_run(given)
            contest = Contest.of(job, ours.seconds, options)
            for other in _installed(say=seed == 0):
                _add(runs, other, seed, _kept(folder / f"{other}.json", partial(contest.train, OTHERS[other], seed)))
    by_seconds = "vitral by seconds, seed 0"
    return [_table(data.name, job, runs, name, options), course(name, histories[0], by_seconds)]


def _add(runs: dict[str, list[Trained]], who: str, seed: int, found: Trained) -> None:
    runs.setdefault(who, []).append(found)
    print(
        f"seed {seed}, {who}: {found.accuracy:.2%}, {found.seconds:.0f} s, {found.epochs} of {found.planned} epochs",
        flush=True,
    )


def _installed(*, say: bool) -> list[str]:
    """List the installed libraries, and print a line for each missing one."""
    for name in OTHERS:
        if say and not PEERS[name].is_installed:
            print(f"not installed, left out: {name} (pip install {PEERS[name].install})")
    return [name for name in OTHERS if PEERS[name].is_installed]


@contextlib.contextmanager
def _folder(options: Options, data: Path, seed: int) -> Iterator[Path]:
    """Open the folder for the results of a seed: under `--keep`, or temporary."""
    if options.keep and not options.quick:
        folder = options.keep / f"photographs-{data.stem}-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)


def _kept(path: Path, train: Callable[[], Trained]) -> Trained:
    """Run a training, or read its result if the file exists."""
    if not path.exists():
        write_text(path, json.dumps(asdict(train())))
    return Trained(**json.loads(path.read_text("utf-8")))


def _ours(given: Mapping[str, Any], out: Path, options: Options) -> tuple[Trained, History]:
    result = vitral.train(**given, out=str(out), quiet=options.quick, resume=RunFolder(out).exists()).result
    history = read_history(out / "metrics.jsonl")
    epochs = result["epochs"]
    accuracy = history[-1]["val_accuracy"]
    return Trained(result["model"], result["parameters"], accuracy, result["seconds"], epochs, epochs), history


def _timm(setting: Setting) -> Script:
    import timm
    from timm.data import create_transform, resolve_model_data_config
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2

    batch = 128
    sizes = {"img_size": setting.side, "patch_size": setting.patch}
    model = timm.create_model("vit_tiny_patch16_224", **sizes, num_classes=setting.classes)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.1 * batch / 256, weight_decay=2e-5, momentum=0.9)
    scheduler, _ = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=setting.epochs, warmup_epochs=5, warmup_lr=1e-5, min_lr=0.0
    )
    own = resolve_model_data_config(model)
    size = {"input_size": (3, setting.side, setting.side), "mean": own["mean"], "std": own["std"]}
    return Script(
        f"vit_tiny, patch {setting.patch}",
        model,
        optimizer,
        LabelSmoothingCrossEntropy(0.1),
        scheduler.step,
        batch,
        drop_last=True,
        training=create_transform(
            **size, is_training=True, scale=(0.08, 1.0), hflip=0.5, color_jitter=0.4, interpolation="random"
        ),
        judging=create_transform(**size, interpolation=own["interpolation"], crop_pct=own["crop_pct"]),
    )


def _vit_pytorch(setting: Setting) -> Script:
    from vit_pytorch.vit_for_small_dataset import ViT

    side = setting.side
    sizes = {"dim": 1024, "depth": 6, "heads": 16, "mlp_dim": 2048}
    if setting.quick:
        sizes = {"dim": 64, "depth": 1, "heads": 1, "mlp_dim": 128}
    model = ViT(
        image_size=side, patch_size=setting.patch, num_classes=setting.classes, dropout=0.1, emb_dropout=0.1, **sizes
    )
    return Script(
        "vit_for_small_dataset",
        model,
        torch.optim.Adam(model.parameters(), lr=3e-5),
        nn.CrossEntropyLoss(),
        lambda done: None,
        64,
        drop_last=False,
        training=transforms.Compose(
            [
                transforms.Resize((side, side)),
                transforms.RandomResizedCrop(side),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
            ]
        ),
        judging=transforms.Compose(
            [
                transforms.Resize(round(side * 256 / 224)),
                transforms.CenterCrop(side),
                transforms.ToTensor(),
            ]
        ),
    )


OTHERS: dict[str, Callable[[Setting], Script]] = {"timm": _timm, "vit-pytorch": _vit_pytorch}
"""Name in `PEERS` → its training; every call makes a new one."""


class Photographs(Dataset[tuple[Tensor, int]]):
    """A split, decoded once and kept in memory."""

    def __init__(self, split: Split):
        self.images = [Image.fromarray(split.image(i, channels=3)) for i in range(len(split))]
        self.labels = [int(label) for label in split.labels]
        self.transform: Transform = transforms.ToTensor()

    def through(self, transform: Transform) -> Photographs:
        """Share the images with another transform."""
        other = copy.copy(self)
        other.transform = transform
        return other

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.images[index]), self.labels[index]


@dataclass(frozen=True)
class Contest:
    """Conditions of the other libraries: images, machine and time."""

    training: Photographs
    judging: Photographs
    classes: int
    side: int
    machine: Machine
    workers: int
    seconds: float
    quick: bool

    @classmethod
    def of(cls, job: Job, seconds: float, options: Options) -> Contest:
        """Take the conditions of our run, and its seconds."""
        height, width = job.run.image_size
        patch = Setting(height, 2, 1, options.quick).patch
        if height != width or height % patch:
            raise SystemExit(f"the others take squares of whole patches of {patch} pixels, not {height}×{width}")
        return cls(
            Photographs(job.dataset["train"]),
            Photographs(job.dataset["val"]),
            len(job.dataset.classes),
            height,
            job.machine,
            _workers(options),
            seconds,
            options.quick,
        )

    def train(self, build: Callable[[Setting], Script], seed: int) -> Trained:
        """Train once within the time."""
        script = self._begin(build, 1, seed)
        loader = self._loader(script)
        planned = 1 if self.quick else self._fitting(script, loader)
        script = self._begin(build, planned, seed)
        epochs, seconds = self._fit(script, loader, planned)
        parameters = sum(p.numel() for p in script.model.parameters())
        return Trained(script.name, parameters, self._accuracy(script), seconds, epochs, planned)

    def _begin(self, build: Callable[[Setting], Script], epochs: int, seed: int) -> Script:
        random.seed(seed)  # timm's crops draw from it, torchvision's from torch
        torch.manual_seed(seed)
        script = build(Setting(self.side, self.classes, epochs, self.quick))
        script.model.to(self.machine.device)
        return script

    def _loader(self, script: Script) -> DataLoader[tuple[Tensor, int]]:
        return DataLoader(
            self.training.through(script.training),
            script.batch_size,
            shuffle=True,
            num_workers=self.workers,
            drop_last=script.drop_last and len(self.training) >= script.batch_size,
            persistent_workers=self.workers > 0,
            pin_memory=self.machine.device.type == "cuda",
        )

    def _fitting(self, script: Script, loader: DataLoader[tuple[Tensor, int]]) -> int:
        """Estimate the epochs that fit into the time from the second of two: the first starts the workers."""
        self._epoch(script, loader)
        return max(1, int(self.seconds / timed(lambda: self._epoch(script, loader), self.machine.device.type)))

    def _fit(self, script: Script, loader: DataLoader[tuple[Tensor, int]], planned: int) -> tuple[int, float]:
        """Train, and return the epochs done and their seconds; no epoch begins when the time is over."""
        device, started, seconds, epoch = self.machine.device.type, time.perf_counter(), 0.0, 0
        while epoch < planned and (seconds < self.seconds or not epoch):
            self._epoch(script, loader)
            epoch += 1
            script.after_epoch(epoch)
            synchronize(device)
            seconds = time.perf_counter() - started
        return epoch, seconds

    def _epoch(self, script: Script, loader: DataLoader[tuple[Tensor, int]]) -> None:
        device = self.machine.device
        script.model.train()
        for images, labels in loader:
            with self.machine.autocast():
                logits = script.model(images.to(device, non_blocking=True))
            script.loss(logits.float(), labels.to(device, non_blocking=True)).backward()
            script.optimizer.step()
            script.optimizer.zero_grad()

    @torch.inference_mode()
    def _accuracy(self, script: Script) -> float:
        script.model.eval()
        right = 0
        for images, labels in DataLoader(self.judging.through(script.judging), 64):
            with self.machine.autocast():
                logits = script.model(images.to(self.machine.device))
            right += int((logits.argmax(1).cpu() == labels).sum())
        return right / len(self.judging)


def _workers(options: Options) -> int:
    """Number of loader processes, as in our run."""
    return 0 if options.quick else max(1, min(cores() - 1, 16))


def _table(data: str, job: Job, runs: Mapping[str, Sequence[Trained]], name: str, options: Options) -> Table:
    train, val = len(job.dataset["train"]), len(job.dataset["val"])
    size = "×".join(map(str, job.run.image_size))
    caption = (
        f"`vitral train {data}`, and the others in its seconds: {train:,} images to learn from, {val:,} to judge by; "
        f"for all {size} pixels, {job.machine.precision}, threads: {torch.get_num_threads()}, loader processes: "
        f"{_workers(options)}, images decoded once and kept in memory"
    )
    columns = {
        "who": "",
        "model": "network",
        "parameters": "parameters|,d",
        "n": "seeds|d",
        "seconds": "seconds|.0f",
        "epochs": "epochs|d",
        "planned": "planned|d",
        "mean": "accuracy, mean|.2%",
        "least": "least|.2%",
        "greatest": "greatest|.2%",
        "interval": "95 % interval, seed 0",
    }
    return Table(caption, columns, [_row(who, found, val) for who, found in runs.items()], name)


def _row(who: str, found: Sequence[Trained], images: int) -> dict[str, Any]:
    accuracies = [one.accuracy for one in found]
    low, high = wilson_interval(round(accuracies[0] * images), images)
    return {
        "who": who,
        "model": found[0].model,
        "parameters": found[0].parameters,
        "n": len(found),
        "seconds": statistics.mean(one.seconds for one in found),
        "epochs": _span([one.epochs for one in found]),
        "planned": _span([one.planned for one in found]),
        "mean": statistics.mean(accuracies),
        "least": min(accuracies),
        "greatest": max(accuracies),
        "interval": f"{low:.2%} – {high:.2%}",
    }


def _span(counts: Sequence[int]) -> int | str:
    """Return 12, or "11 – 13" if seeds differ."""
    return counts[0] if len(set(counts)) == 1 else f"{min(counts)} – {max(counts)}"


def _noise(folder: Path) -> Path:
    """Make two classes of random images as large as photographs, for a smoke test."""
    generator = np.random.default_rng(0)
    for split, label, number in itertools.product(("train", "val"), ("a", "b"), range(4)):
        pixels = generator.integers(0, 256, (100, 120, 3), dtype=np.uint8)
        path = folder / split / label / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return folder
