"""Estimate a run on GPUs that are not here: memory, traffic and time of the real step, with tensors without storage."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.data import DataSet, Split
from vitral.data.dataset import Numbered, spread
from vitral.data.decode import read_image
from vitral.device import Machine
from vitral.distributed.simulated import Collective, Recorder, simulated, simulated_strategy, without_storage
from vitral.distributed.strategies import blocks_of
from vitral.distributed.tensors import local
from vitral.errors import UsageError, unknown
from vitral.kernels import reference_ops
from vitral.model import ForeignConfig, network, summarize
from vitral.pretraining.methods import METHODS
from vitral.training.loop import Averaged
from vitral.training.optimizers import OptimizerSet
from vitral.training.options import Run
from vitral.training.step import NoMonitor, Step
from vitral.workflows.hardware import GPUS, LINK_SHARE, REACHED, REACHED_SOURCE, Gpu
from vitral.workflows.job import Job
from vitral.workflows.memory import training_bytes
from vitral.workflows.plan import check_given, check_images, draft_run, load_given, resolve


@dataclass(frozen=True)
class Cluster:
    """Machines of equal GPUs."""

    gpu: Gpu
    world: int
    """GPUs in all, a rank on each."""
    per_machine: int = 8
    price: float | None = None
    """Of a GPU for an hour, in any currency."""

    @classmethod
    def of(cls, name: str, world: int, per_machine: int = 8, price: float | None = None) -> Cluster:
        """Return the cluster of these options. Raises `UsageError` for one that cannot be."""
        if name not in GPUS:
            raise unknown("GPU", name, GPUS)
        if world < 1 or per_machine < 1 or (price is not None and not 0 <= price < math.inf):
            raise UsageError("--world and --per-machine must be at least 1, --price at least 0", hint="--world 8")
        per_machine = min(per_machine, world)
        if world % per_machine:
            why = f"{world} GPUs are not whole machines of {per_machine}"
            raise UsageError("machines must have equally many GPUs", why=why, hint="another --world or --per-machine")
        return cls(GPUS[name], world, per_machine, price)


@dataclass(frozen=True)
class _Planned(Machine):
    """A GPU that is not here."""

    gpu: str = ""

    @property
    def hardware(self) -> str:
        return self.gpu

    def with_precision(self, precision: str, dim: int | None = None) -> Machine:
        chosen: Literal["fp32", "bf16"] = "fp32" if precision == "fp32" else "bf16"
        return dataclasses.replace(self, precision=chosen, reason="requested" if precision != "auto" else self.reason)


@dataclass(frozen=True)
class Memory:
    """Memory of a rank's GPU, in bytes."""

    parameters: int
    gradients: int
    optimizer: int
    averaged: int
    gathered: int
    """Whole blocks that are gathered from all ranks at a time."""
    activations: int
    """Estimated from the layers, as the plan does."""

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True)
class Seconds:
    """Parts of a step. Those of communication and input that computation hides are not in `step`."""

    compute: float
    communication: float
    exposed: float
    """Communication that nothing hides: the rest beyond computation, and at least that of one block."""
    input: float

    @property
    def step(self) -> float:
        return max(self.compute + self.exposed, self.input)


@dataclass(frozen=True)
class Estimate:
    """An estimated run. Nothing in it was measured on the cluster."""

    cluster: Cluster
    run: Run
    images: int
    validated: int
    parameters: int
    memory: Memory
    collectives: tuple[Collective, ...]
    """Of a step, with all of its micro-batches."""
    seconds: Seconds
    forward_flops: int
    """Of an image."""
    decoded: float
    """Images that one core of this machine decodes a second."""

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        return self.run.epochs * max(1, math.ceil(self.images // self.run.batch_size / self.run.accumulate))

    @property
    def traffic(self) -> tuple[float, float]:
        """Bytes that a rank sends in a step: within its machine, and between machines."""
        sums = [one.on_links(self.cluster.per_machine) for one in self.collectives]
        return sum(inside for inside, _ in sums), sum(between for _, between in sums)

    @property
    def hours(self) -> float:
        """Training and validation."""
        each = self.seconds.compute / (self.run.step_batch * _backward(self.run))
        return (self.steps * self.seconds.step + self.run.epochs * self.validated * each) / 3600

    @property
    def efficiency(self) -> float:
        """Share of the step in which a GPU computes."""
        return self.seconds.compute / self.seconds.step

    @property
    def cost(self) -> float | None:
        price = self.cluster.price
        return None if price is None else price * self.cluster.world * self.hours

    @property
    def images_per_second(self) -> float:
        return self.run.step_batch / self.seconds.step

    @property
    def fits(self) -> bool:
        """True if the memory of a GPU suffices, a tenth of which is left for the libraries."""
        return self.memory.total <= 0.9 * self.cluster.gpu.memory

    @property
    def assumptions(self) -> tuple[tuple[str, str, str], ...]:
        """Name, value and source of each rate."""
        gpu, precision = self.cluster.gpu, self.run.precision
        peak = gpu.fp32 if precision == "fp32" else gpu.bf16
        return (
            ("peak", f"{peak / 1e12:,.4g} TFLOP/s in {precision}", gpu.source),
            ("share of it", f"{REACHED[bool(self.run.compile)]:.0%}", REACHED_SOURCE),
            ("within a machine", f"{gpu.inside / 1e9:,.0f} GB/s a GPU and direction", gpu.source),
            ("between machines", f"{gpu.between / 1e9:,.0f} GB/s a GPU and direction", gpu.source),
            ("share of both", f"{LINK_SHARE:.0%}", "assumed, not measured; rings, without latency"),
            ("overlap", "all communication but one block's", "assumed, not measured"),
            (
                "activations",
                f"{_activation_factor(self):.2g} × the layers' outputs in fp32",
                "docs/log/training-speed.md",
            ),
            (
                "decoding",
                f"{self.decoded:,.0f} images/s a core, {gpu.cores} cores a GPU",
                f"measured here; {gpu.source}",
            ),
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data: bytes, seconds, operations."""
        inside, between = self.traffic
        run = self.run
        return {
            "estimated": True, "model": run.model, "gpu": self.cluster.gpu.name, "world": self.cluster.world,
            "per_machine": self.cluster.per_machine, "strategy": run.strategy, "precision": run.precision,
            "parameters": self.parameters, "batch": run.step_batch, "accumulate": run.accumulate,
            "memory": {**dataclasses.asdict(self.memory), "total": self.memory.total, "fits": self.fits},
            "traffic": {"within_machine": inside, "between_machines": between, "collectives": len(self.collectives)},
            "seconds": {**dataclasses.asdict(self.seconds), "step": self.seconds.step},
            "efficiency": self.efficiency, "images_per_second": self.images_per_second, "steps": self.steps,
            "epochs": run.epochs, "images": self.images, "hours": self.hours, "cost": self.cost,
            "assumptions": [dict(zip(("name", "value", "source"), row, strict=True)) for row in self.assumptions],
        }  # fmt: skip


def estimate(cluster: Cluster, options: Mapping[str, Any], assumed: tuple[int, int] | None = None) -> Estimate:
    """Estimate the run of these `options` (fields of `Run`) on a cluster.

    `assumed` are numbers of images and classes instead of data. Raises the errors of planning, and `UsageError` for
    runs whose steps cannot be simulated.
    """
    given = check_given(dict(options))
    if given.get("minutes") is not None or given.get("recipe") in METHODS:
        raise UsageError("a dry run needs epochs and labels", why="nothing is timed here", hint="--epochs 300")
    if given.get("task") == "text":
        raise UsageError("a dry run is for networks of one class an image", why="--task text", hint="leave it out")
    compiled = bool(given.pop("compile", False))  # the compiler of this machine does not matter
    machine = _Planned(
        torch.device("cuda"), "bf16", f"the {cluster.gpu.name} has bf16 instructions", gpu=cluster.gpu.name,
        planned_bytes=cluster.gpu.memory,
    )  # fmt: skip
    if assumed:
        dataset = _assumed(*assumed)
    else:
        dataset, _ = check_images(load_given(given, machine), given.get("bad_images") == "skip")
    with simulated(cluster.world, cluster.per_machine) as ranks:
        job = resolve(draft_run(given, dataset, machine))
        if isinstance(job.config, ForeignConfig):
            why = "networks of other libraries are not trained by several ranks"
            raise UsageError("this network cannot be simulated", why=why, hint="--model B/16")
        if compiled and job.run.strategy != "ddp":
            raise UsageError(f"--compile does not go with --strategy {job.run.strategy}", hint="leave it out")
        memory, collectives, parameters = _simulate(job, ranks)
    flops = summarize(job.config).flops
    run = dataclasses.replace(job.run, precision=job.machine.precision, compile=compiled)
    decoded = _decoding_rate(job.dataset["train"], run.channels)
    seconds = _seconds(cluster, run, flops, collectives, decoded, max(1, getattr(job.config, "depth", 1)), job)
    validated = len(job.dataset.splits["val"]) if "val" in job.dataset.splits else 0
    return Estimate(
        cluster, run, len(job.dataset["train"]), validated, parameters, memory, collectives, seconds, flops, decoded
    )


def _simulate(job: Job, ranks: Any) -> tuple[Memory, tuple[Collective, ...], int]:
    """Take a step of the first rank; return its memory, its collectives, and the parameters of the network."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    run, images = job.run, max(1, job.run.batch_size // ranks.count)
    with torch.device("meta"):
        model = network(job.config)
    reference_ops(model)
    model.checkpointing = run.checkpointing
    parameters = sum(p.numel() for p in model.parameters())
    averaged = Averaged(model, run.ema) if run.ema else None
    with FakeTensorMode(allow_non_fake_inputs=True):
        without_storage(model)
        gathered = _largest(model) if run.strategy != "ddp" else 0
        strategy = simulated_strategy(run.strategy, model, ranks)
        if averaged is not None:
            strategy.shard(without_storage(averaged.module))
        optimizer = OptimizerSet(model, run)
        machine = Machine(torch.device("cpu"), job.machine.precision, "")
        step: Any = Step(model, optimizer, _objective(run, len(job.dataset.classes)), machine, run, strategy=strategy)
        batch = torch.empty(images, run.channels, *run.size), torch.zeros(images, dtype=torch.long)
        with Recorder() as recorder:
            for part in range(run.accumulate):
                step(batch, NoMonitor(), parts=run.accumulate, lr=run.lr if part == run.accumulate - 1 else None)
        held = _held(model.parameters())
        gradients = _held(p for p in model.parameters() if p.requires_grad)  # dropped after the step
        moments = _held(optimizer.state().values())
        copies = _held(averaged.module.parameters()) if averaged is not None else 0
    if run.strategy == "offload":  # in the CPU's memory
        held = gradients = moments = copies = 0
    activations = images * training_bytes(run, job.config, job.machine)[1]
    memory = Memory(held, gradients, moments, copies, gathered, activations)
    return memory, tuple(recorder.collectives), parameters


def _objective(run: Run, classes: int) -> Any:
    """Return the loss of a batch (images, labels) that is prepared already."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return F.cross_entropy(model(batch[0]).float(), batch[1], label_smoothing=run.label_smoothing), {}

    return loss


def _held(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of this rank's parts."""
    return sum(part.numel() * part.element_size() for part in map(local, tensors))


def _largest(model: nn.Module) -> int:
    """Return the bytes of the two largest groups that are gathered together: one computes while the next arrives."""
    blocks = [_held(block.parameters()) for block in blocks_of(model)]
    rest = _held(model.parameters()) - sum(blocks)
    return sum(sorted((*blocks, rest))[-2:])


def _backward(run: Run) -> int:
    """Return the operations of a training step, as a multiple of its forward pass: backward is two, and recomputed
    blocks are one more.
    """
    return 4 if run.checkpointing else 3


def _seconds(
    cluster: Cluster, run: Run, flops: int, collectives: Iterable[Collective], decoded: float, depth: int, job: Job
) -> Seconds:  # fmt: skip
    gpu, images = cluster.gpu, run.step_batch / cluster.world
    peak = gpu.fp32 if run.precision == "fp32" else gpu.bf16
    compute = images * _backward(run) * flops / (peak * REACHED[bool(run.compile)])
    communication = sum(link_seconds(one, cluster) for one in collectives)
    exposed = max(communication - compute, communication / depth)
    return Seconds(compute, communication, exposed, images / (decoded * gpu.cores))


def link_seconds(collective: Collective, cluster: Cluster) -> float:
    """Return the seconds of a collective: those of its slowest link."""
    inside, between = collective.on_links(cluster.per_machine)
    return max(inside / cluster.gpu.inside, between / cluster.gpu.between) / LINK_SHARE


def _activation_factor(estimated: Estimate) -> float:
    from vitral.workflows.memory import STEP_FACTORS

    return STEP_FACTORS.get(("cuda", estimated.run.precision), 1.5)


def _decoding_rate(images: Split, channels: int) -> float:
    """Return the images a second that one core decodes: the median of some images."""
    taken = []
    for index in spread(len(images), _DECODED).tolist():
        raw = images.raw(index)
        started = time.perf_counter()
        read_image(raw, name=images.names[index], channels=channels)
        taken.append(time.perf_counter() - started)
    return 1 / statistics.median(taken)


_DECODED = 16


def _assumed(images: int, classes: int) -> DataSet:
    """Return a data set of so many images, which are all one: the mean size of ImageNet's, as a JPEG."""
    if images < 2 * classes or classes < 2:
        raise UsageError(
            "--assume takes images and classes", why=f"got {images} {classes}", hint="--assume 1281167 1000"
        )
    labels = np.arange(images) % classes
    split = Split(Numbered("image", images), labels, _Same())
    held_out = split.select(np.arange(max(2 * classes, images // 25) % images))  # beside them, as for ImageNet
    return DataSet("assumed", tuple(map(str, range(classes))), {"train": split, "val": held_out}, "assumed")


class _Same:
    """Fetches the same JPEG for each image."""

    def __init__(self) -> None:
        import io

        from PIL import Image

        pixels = np.random.default_rng(0).integers(0, 256, (25, 32, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).resize((500, 400), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        self.file = file.getvalue()

    def __call__(self, index: int) -> bytes:
        return self.file
