"""Train the network that `vitral train` starts from: `backbone`, in the package (docs/pretrained-model.md).

    python tools/train_backbone.py tiny-imagenet.tar teacher.safetensors --model C+Mini/16 --minutes 4.2 \
        --lr 4e-3 --drop-path 0.1
    python tools/train_backbone.py tiny-imagenet.tar backbone.safetensors --teacher teacher.safetensors --minutes 4.5 \
        --lr 6e-3 --weight-decay 0.02
    python tools/train_backbone.py tiny-imagenet.tar src/vitral/weights/backbone.safetensors --pack backbone.safetensors

A loop of its own, unlike `vitral train`: the images of 64 pixels stay on the device, where views of several sizes are
cut from them, tens of thousands of images a second on a GPU. The number of steps follows from the minutes; `--steps`
repeats a run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tools.pack_demo import in_16_bits
from torch import Tensor, nn

import vitral
from vitral.data.dataset import Split
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.sources import load
from vitral.device import Machine, choose, seed_everything, synchronize
from vitral.evaluation.intervals import wilson_interval
from vitral.training.loop import Averaged
from vitral.training.optimizer_set import OptimizerSet
from vitral.training.options import Run
from vitral.training.step import CapturedStep, NoMonitor, Step
from vitral.weights import class_names as names
from vitral.weights import native

SIZES = {64: 0.15, 96: 0.25, 128: 0.45, 160: 0.15}
"""Side of a step's views in pixels → its probability. Positions are resized from those of `SIDE`."""
SIDE = 128
MEASURED = (64, 96, 128, 160, 224)
"""Sides at which the validation images are measured."""
SMALL_SHARE = 0.15
"""Share of the steps whose images are first halved to 32 pixels."""
LICENSE = (
    "The weights are vitral's own work, under its license. They were trained on Tiny ImageNet (Le and Yang 2015), "
    "photographs of ImageNet for research and education."
)
TRIAL = 80, 140
"""Steps between which the time of a step is measured, after the graphs of all sizes are captured."""


@dataclass(frozen=True)
class Views:
    """Random views of a batch of images, mixed in pairs, and the loss on them: a `TwoPartObjective`."""

    classes: int
    draw: np.random.Generator
    teacher: nn.Module | None = None
    weight: float = 0.7
    """Share of the teacher in the loss."""
    temperature: float = 2.0

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return self.loss(model, *self.prepare(batch))

    @torch.no_grad()
    def prepare(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Views (B, 3, S, S) of uint8 images, shares of the labels (B, K), and the teacher's logits (B, K)."""
        with torch.autocast(batch[0].device.type, enabled=False):
            size = int(self.draw.choice(list(SIZES), p=list(SIZES.values())))
            images = batch[0].float() / 255
            if self.draw.random() < SMALL_SHARE:
                images = F.avg_pool2d(images, 2)
            images = standardized(random_colors(random_view(images, size)))
            images, shares = self.mixed(images, F.one_hot(batch[1], self.classes).float())
        return images, shares, None if self.teacher is None else self.teacher(images).float()

    def mixed(self, images: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        """CutMix in half of the steps, mixup in a quarter, each image with the one before it."""
        kind, kept = self.draw.random(), float(self.draw.beta(1, 1))
        if kind < 0.5:
            size = images.shape[-1]
            side = math.sqrt(1 - kept) * size
            (top, bottom), (left, right) = (
                (round(max(0, at - side / 2)), round(min(size, at + side / 2)))
                for at in self.draw.uniform(0, size, 2).tolist()
            )
            kept = 1 - (bottom - top) * (right - left) / size**2
            other = images.roll(1, 0)
            images[:, :, top:bottom, left:right] = other[:, :, top:bottom, left:right]
        elif kind < 0.75:
            images = images.lerp(images.roll(1, 0), 1 - kept)
        else:
            kept = 1.0
        return images, shares.lerp(shares.roll(1, 0), 1 - kept)

    def loss(
        self, model: nn.Module, images: Tensor, shares: Tensor, teacher_logits: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy, and with a teacher T² times the divergence from it at temperature T (arXiv 1503.02531)."""
        logits = model(images).float()
        if teacher_logits is None:
            return F.cross_entropy(logits, shares, label_smoothing=0.1), {}
        T = self.temperature
        student, teacher = (F.log_softmax(each / T, dim=1) for each in (logits, teacher_logits))
        divergence = F.kl_div(student, teacher, reduction="batchmean", log_target=True) * T**2
        return (1 - self.weight) * F.cross_entropy(logits, shares) + self.weight * divergence, {}


def random_view(images: Tensor, size: int) -> Tensor:
    """Cut a rectangle of 20 to 100 % of each image, turned by up to 8° and mirrored at random, at `size` pixels."""
    B, device = len(images), images.device
    area = torch.empty(B, device=device).uniform_(0.2, 1)
    ratio = torch.empty(B, device=device).uniform_(-0.29, 0.29).exp()  # 3/4 to 4/3
    height, width = (area * ratio).sqrt().clamp_max(1), (area / ratio).sqrt().clamp_max(1)
    angle = torch.empty(B, device=device).uniform_(-0.14, 0.14)
    mirror = torch.randint(2, (B,), device=device) * 2.0 - 1
    down, across = (torch.empty(B, device=device).uniform_(-1, 1) * (1 - side) for side in (height, width))
    rows = [
        torch.stack([angle.cos() * width * mirror, -angle.sin() * height, across]),
        torch.stack([angle.sin() * width * mirror, angle.cos() * height, down]),
    ]
    grid = F.affine_grid(torch.stack(rows).permute(2, 0, 1), [B, 3, size, size], align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def random_colors(images: Tensor) -> Tensor:
    """Change brightness, contrast and saturation by up to 40 %; make a tenth of the images gray."""
    B, device = len(images), images.device
    bright, contrast, color = torch.empty(3, B, 1, 1, 1, device=device).uniform_(0.6, 1.4)
    color = torch.where(torch.rand(B, 1, 1, 1, device=device) < 0.1, 0.0, color)
    luminance = torch.tensor([0.299, 0.587, 0.114], device=device)[:, None, None]
    gray = (images * luminance).sum(1, keepdim=True)
    images = gray + (images - gray) * color
    mean = gray.mean((2, 3), keepdim=True)
    return ((mean + (images - mean) * contrast) * bright).clamp_(0, 1)


def standardized(images: Tensor) -> Tensor:
    """Scale from 0..1 to the network's -1..1."""
    return images * 2 - 1


def decoded(split: Split) -> Tensor:
    """All images of a split of 64 × 64 pixels, uint8 (N, 3, 64, 64)."""
    out = torch.empty(len(split), 3, 64, 64, dtype=torch.uint8)

    def one(index: int) -> None:
        out[index] = torch.from_numpy(np.ascontiguousarray(split.image(index, 3).transpose(2, 0, 1)))

    with ThreadPoolExecutor() as threads:
        for _ in threads.map(one, range(len(split))):
            pass
    return out


class Steps:
    """The number of steps that fit into a time: estimated from `TRIAL`, unless it is stated."""

    def __init__(self, seconds: float, total: int | None, device: torch.device):
        self.seconds, self.total, self.device = seconds, total, device
        self.began = self.mark = time.perf_counter()

    def more(self, done: int) -> bool:
        """True if another step is to come."""
        if self.total is None and done in TRIAL:
            synchronize(self.device)
            now = time.perf_counter()
            if done == TRIAL[1]:
                step = (now - self.mark) / (TRIAL[1] - TRIAL[0])
                self.total = done + max(1, int((self.seconds - (now - self.began)) / step))
            self.mark = now
        return self.total is None or done < self.total

    def factor(self, done: int) -> float:
        """Factor on the learning rate: a linear ramp, then down to 0 in a line."""
        total = self.total or 10_000
        ramp = max(100, total // 30)
        return (done + 1) / ramp if done < ramp else 1 - done / total


def train(
    model: nn.Module,
    objective: Views,
    images: Tensor,
    wanted: Tensor,
    machine: Machine,
    run: Run,
    steps: Steps,
    report: Callable[[str], None],
) -> tuple[nn.Module, int]:
    """Return the averaged network and the number of steps."""
    averaged, optimizer = Averaged(model, run.ema or 0.999), OptimizerSet(model, run)
    kind = CapturedStep if machine.device.type == "cuda" else Step
    step = kind(model, optimizer, objective, machine, run)
    generator, done = np.random.default_rng(run.seed), 0
    order = torch.empty(0, dtype=torch.long, device=machine.device)
    while steps.more(done):
        if len(order) < run.batch_size:
            order = torch.from_numpy(generator.permutation(len(images))).to(machine.device)
        rows, order = order[: run.batch_size], order[run.batch_size :]
        batch: Any = images[rows], wanted[rows]
        loss, _ = step(batch, NoMonitor(), lr=run.lr * steps.factor(done))
        averaged.update_parameters(model)
        done += 1
        if done % 500 == 0:
            report(f"step {done} of {steps.total}, loss {float(loss):.3f}")
    return averaged.module, done


@torch.no_grad()
def accuracy(
    model: nn.Module, images: Tensor, wanted: Tensor, machine: Machine, side: int, gray: bool = False
) -> float:
    """Share of uint8 images named right at `side` pixels."""
    right = 0
    for pixels, labels in zip(images.split(500), wanted.split(500), strict=True):
        each = pixels.float().mean(1, keepdim=True).expand_as(pixels) if gray else pixels.float()
        each = F.interpolate(each, size=(side, side), mode="bilinear", antialias=True)
        with machine.autocast():
            right += int((model(standardized(each / 255)).argmax(1) == labels).sum())
    return right / len(images)


def measured(model: nn.Module, images: Tensor, wanted: Tensor, machine: Machine) -> dict[str, float]:
    """Accuracy at each of `MEASURED` sides, and of gray images at `SIDE`."""
    found = {str(side): accuracy(model, images, wanted, machine, side) for side in MEASURED}
    return {**found, "gray": accuracy(model, images, wanted, machine, SIDE, gray=True)}


def resizable(model: nn.Module) -> nn.Module:
    """Let a network resize its positions to each batch of images."""
    model.any_size = True  # type: ignore[assignment]
    return model


def pack(trained: Path, target: Path, images: Tensor, wanted: Tensor, machine: Machine) -> None:
    """Write trained weights as those of the package: in 16 bits, with English names, license and measured accuracy."""
    weights = native.read(trained)
    state = in_16_bits(weights.state)
    network = resizable(native.build(dataclasses.replace(weights, state=state)).to(machine.device))
    found = measured(network, images, wanted, machine)
    origin = {
        name: weights.trained[name] for name in ("model", "data", "parameters", "steps", "images_seen", "seconds")
    }
    right = round(found[str(SIDE)] * len(images))
    origin |= {
        "device": weights.trained["device"],
        "versions": weights.trained["versions"],
        "options": weights.trained["options"],
        "positions": "bilinear-antialias",
        "license": LICENSE,
        "val": {
            "images": len(images),
            "accuracy": found[str(SIDE)],
            "accuracy_interval": list(wilson_interval(right, len(images))),
            "by_size": found,
        },
    }
    english = dict(zip(names.SYNSETS, names.imagenet_names(), strict=True))
    classes = tuple(english[name] for name in weights.classes)
    native.save(target, dataclasses.replace(weights, state=state, classes=classes, trained=origin))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="Tiny ImageNet, as a folder or an archive with train and val")
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--model", default="C+Micro/16")
    parser.add_argument("--teacher", type=Path, help="weights by this program, to learn from as well")
    parser.add_argument("--pack", type=Path, help="train nothing: write these weights as those of the package")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--steps", type=int, help="instead of --minutes")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--drop-path", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    return parser.parse_args()


def main() -> None:
    given = parsed()

    def report(line: str) -> None:
        print(f"{given.out.stem}: {line}", flush=True)

    machine = choose(given.device, "auto", dim=128)
    seed_everything(given.seed)
    data = load(given.data)

    def on_device(name: str) -> tuple[Tensor, Tensor]:
        split = data[name]
        return decoded(split).to(machine.device), torch.from_numpy(np.asarray(split.labels)).to(machine.device)

    held = on_device("val")
    if given.pack:
        pack(given.pack, given.out, *held, machine)
        report(json.dumps(native.read(given.out).trained))
        return
    images, wanted = on_device("train")
    report(f"{len(images)} images on {machine.name}, {machine.precision}")
    model = vitral.create(
        given.model, classes=len(data.classes), image_size=SIDE, pool="mean", cls_token=False, drop_path=given.drop_path
    )
    model = resizable(model.to(machine.device)).train()
    teacher = None
    if given.teacher:
        teacher = native.build(native.read(given.teacher)).to(machine.device).requires_grad_(False)
        teacher = resizable(teacher)
    run = Run(
        optimizer="muon",
        lr=given.lr,
        weight_decay=given.weight_decay,
        momentum=0.9,
        beta2=0.99,
        clip=1.0,
        ema=0.999,
        batch_size=given.batch_size,
        seed=given.seed,
    )
    views = Views(len(data.classes), np.random.default_rng(given.seed), teacher)
    clock = Steps(60 * given.minutes, given.steps, machine.device)
    network, steps = train(model, views, images, wanted, machine, run, clock, report)
    synchronize(machine.device)
    seconds = time.perf_counter() - clock.began
    network = resizable(network.eval())
    trained = {
        "model": given.model,
        "data": "Tiny ImageNet",
        "parameters": sum(p.numel() for p in network.parameters()),
        "steps": steps,
        "images_seen": steps * given.batch_size,
        "seconds": seconds,
        "device": machine.name,
        "options": {name: value for name, value in vars(given).items() if not isinstance(value, (Path, type(None)))},
        "accuracy": measured(network, *held, machine),
        "versions": {"vitral": vitral.__version__, "torch": torch.__version__},
    }
    report(json.dumps(trained))
    state = {name: tensor.detach().float().cpu() for name, tensor in network.state_dict().items()}
    config = dataclasses.replace(network.config, drop_path=0.0)  # type: ignore[arg-type]
    native.save(given.out, native.Weights(config, state, Preprocessing((SIDE, SIDE)), data.classes, trained))


if __name__ == "__main__":
    main()
