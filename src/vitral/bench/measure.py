"""Measure each library in turn: build the contenders of a case, time them, make rows."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitral.bench import peers
from vitral.bench.engines import ENGINES, Engine, predictor_by
from vitral.bench.files import AUGMENTATION, TorchvisionLoader, VitralLoader, some_images
from vitral.bench.harness import Sample, alternate, matrix_product, repeated, timed
from vitral.bench.memory import growth
from vitral.bench.models import ModelUnderTest
from vitral.bench.peers import Peer
from vitral.bench.report import VITRAL, Row
from vitral.containers import cores
from vitral.data import DataSet
from vitral.data.images.augmentation import Augmentation
from vitral.data.loader import Batch
from vitral.device import Machine, choose, out_of_memory
from vitral.errors import UsageError
from vitral.inference.engines.compiled import keep_code
from vitral.inference.engines.int8 import observe
from vitral.inference.predictor import Predictor
from vitral.model import summarize
from vitral.system import memory_bytes
from vitral.training import compiling
from vitral.training.objectives.classification import Classification
from vitral.training.optimizer_set import OptimizerSet
from vitral.training.options import Run
from vitral.training.step import WARM_UP, NoMonitor, can_capture, step_of

MATRIX = {"cuda": 8192}
"""Side of the matrices that measure the machine's matrix-product rate, by device; elsewhere `SMALL_MATRIX`."""
SMALL_MATRIX = 2048
_MIN_SECONDS, _MAX_REPEATS = 0.02, 50  # of one measurement: shorter calls are repeated
_TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

Step = Callable[[Batch], object]


@dataclass(frozen=True)
class Case:
    """One comparison: one network, one task, one batch size."""

    subject: ModelUnderTest
    what: str
    batch: int
    device: str  # cpu, cuda or mps
    precisions: Sequence[str]  # bf16, fp32
    peers: Mapping[str, Peer]
    compile: bool = False
    dataset: DataSet | None = None  # to train from files
    engines: Sequence[str] = ()  # of vitral in inference, in addition to the default

    @property
    def title(self) -> str:
        return f"{self.subject.name}, {self.what}, batch {self.batch}"

    @property
    def usual(self) -> str:
        """Default precision of vitral, or the first if that is not measured: the reference for integers."""
        default = choose(self.device, dim=self.subject.config.dim).precision
        return default if default in self.precisions else self.precisions[0]


@dataclass(frozen=True)
class Contender:
    """One library in one configuration."""

    who: str
    precision: str  # bf16, fp32, int8
    compiled: bool
    program: Callable[[], object]
    images: int  # of one call
    via: str = ""  # route to the precision, if there are several: cast, autocast
    engine: Engine | None = None  # of vitral, if not the default

    @property
    def key(self) -> str:
        return f"{self.who}/{self.precision}/{self.compiled}/{self.via}"


# ---------------------------------------------------------------- contenders


def inference(case: Case) -> Iterator[Contender]:
    """Make contenders in inference: `Predictor` from uint8 images to probabilities, peers from standardized images to
    logits.

    Compiled, vitral is the bare network, called like the peers.
    """
    subject, device = case.subject, torch.device(case.device)
    pixels, _ = _images(case)
    floats = subject.preprocessing.standardize(pixels)
    for precision in case.precisions:
        network: Any = subject.build()
        machine = choose(case.device, precision)
        predictor = Predictor(network, subject.preprocessing, subject.classes, machine=machine)
        yield Contender(VITRAL, precision, False, partial(predictor.rows, pixels), case.batch)
        yield from _engines(case, predictor, pixels)
    for who, compiled, build in _networks(case):
        if who == VITRAL and not compiled:
            continue
        for precision, via in _routes(case.precisions, compiled):
            model, images = _built(build, device, compiled).eval(), floats
            if via == "cast":
                model, images = model.bfloat16(), floats.bfloat16()
            program = partial(peers.logits, model, images, "bf16" if via == "autocast" else "fp32")
            yield Contender(who, precision, compiled, program, case.batch, via)


def _engines(case: Case, default: Predictor, pixels: Tensor) -> Iterator[Contender]:
    """Make contenders of vitral's other engines, at the precision and on the network of `default`."""
    precision, network = default.machine.precision, default.model
    named = {name: ENGINES[name] for name in case.engines}
    if precision != case.usual:
        named = {name: engine for name, engine in named.items() if not engine.integers}
    ranges = None
    if any(engine.integers for engine in named.values()):
        images = default.preprocessing.standardize(pixels).to(next(network.parameters()).dtype)
        ranges = observe(network, [images])  # type: ignore[arg-type]  # it is a ViT: others are refused
    for name, engine in named.items():
        program = _prepared(partial(predictor_by, engine, default, ranges), pixels)
        label = "int8" if engine.integers else precision
        yield Contender(f"{VITRAL} ({name})", label, False, program, case.batch, engine=engine)


def _prepared(make: Callable[[], Predictor], pixels: Tensor) -> Callable[[], object]:
    """Return a function that predicts; its first call makes the predictor."""
    made = cache(make)
    return lambda: made().rows(pixels)


def _networks(case: Case) -> Iterator[tuple[str, bool, Callable[[], nn.Module]]]:
    """Iterate over library, compiled or not, and the function that builds the network; vitral comes first."""
    config: Any = case.subject.config  # of a plain ViT if there are peers
    for compiled in (False, True) if case.compile else (False,):
        yield VITRAL, compiled, case.subject.build
        for name, peer in case.peers.items():
            yield name, compiled, partial(peers.network, peer, config, case.device)


def _routes(precisions: Iterable[str], compiled: bool) -> Iterator[tuple[str, str]]:
    for precision in precisions:
        if precision == "fp32":
            yield precision, ""
            continue
        yield precision, "cast"
        if not compiled:  # compiling is slow, and autocast gives the same matrix products
            yield precision, "autocast"


def training(case: Case) -> Iterator[Contender]:
    """Make contenders in training: forward, cross-entropy, backward, AdamW. vitral takes uint8 images, peers
    standardized ones.
    """
    pixels, labels = _images(case)
    indices = np.arange(case.batch)
    raw = Batch(pixels, labels, indices)
    floats = Batch(case.subject.preprocessing.standardize(pixels), labels, indices)
    for who, precision, compiled, step in _steps(case, Augmentation()):
        yield Contender(who, precision, compiled, partial(step, raw if who == VITRAL else floats), case.batch)


def jpeg(case: Case) -> Iterator[Contender]:
    """Make contenders for a training pass over image files. vitral reads every file in every pass, like the peers;
    "kept" is its behavior if the decoded set fits a quarter of the memory, and "synthetic" repeats one batch, the upper
    bound.
    """
    assert case.dataset is not None
    split = some_images(case.dataset, case.subject, case.batch, case.device)
    workers = max(1, cores() - 1)
    about = (split, case.subject.preprocessing, case.batch, torch.device(case.device), workers)
    loader = TorchvisionLoader(*about)
    ready = Batch(*_images(case), np.arange(case.batch))
    for who, precision, compiled, step in _steps(case, AUGMENTATION):
        found: dict[str, Iterable[Batch]] = {who: loader}
        if who == VITRAL:
            found = {who: VitralLoader(*about, "stream"), f"{who}, kept": VitralLoader(*about, "memory")}
            found[f"{who}, synthetic"] = [ready] * (len(split) // case.batch)
        for name, batches in found.items():
            yield Contender(name, precision, compiled, partial(_pass, step, batches), len(split))


def _pass(step: Step, batches: Iterable[Batch]) -> None:
    for batch in batches:
        step(batch)


WHAT: dict[str, tuple[Callable[[Case], Iterator[Contender]], int]] = {
    "inference": (inference, 1),
    "training": (training, 3),
    "jpeg": (jpeg, 3),
}
"""Task → function that makes its contenders, and its operations in forward passes."""


def _steps(case: Case, augmentation: Augmentation) -> Iterator[tuple[str, str, bool, Step]]:
    """Make all training steps: library, precision, compiled or not, step. One network is used for all precisions."""
    subject, device = case.subject, torch.device(case.device)
    objective = Classification(subject.preprocessing, augmentation, subject.config.classes)
    for who, compiled, build in _networks(case):
        model = _built(build, device, compiled and who != VITRAL).train()
        if who == VITRAL:
            whole = compiling.CompiledObjective(objective, model) if compiled else objective
            step_in = partial(_step, model, OptimizerSet(model, Run(optimizer="adamw", lr=1e-4)), whole)
            steps = {precision: step_in(choose(case.device, precision)) for precision in case.precisions}
        else:
            peer_step = partial(peers.step, model, peers.optimizer(model))
            steps = {precision: partial(peer_step, precision) for precision in case.precisions}
        for precision, step in steps.items():
            yield who, precision, compiled, step


def _step(model: nn.Module, optimizer: OptimizerSet, objective: Any, machine: Machine) -> Step:
    """Make vitral's training step, as in `vitral.training.loop`."""
    run = Run(optimizer="adamw", lr=1e-4, clip=None)
    run = dataclasses.replace(run, graphs=can_capture(run, machine.device)[0])
    step = step_of(model, optimizer, objective, machine, run)
    return lambda batch: step(batch, NoMonitor(), lr=1e-4)


def _built(build: Callable[[], nn.Module], device: torch.device, compiled: bool) -> nn.Module:
    try:
        model = build().to(device)
    except Exception as error:  # an incompatible version of a library
        return _Unbuilt(error)
    if compiled:
        model.compile(dynamic=False)
    return model


class _Unbuilt(nn.Module):
    """Placeholder for a network that could not be built: raises the error when called."""

    def __init__(self, error: Exception):
        super().__init__()
        self.error = error
        self.nothing = nn.Parameter(torch.zeros(()))  # an optimizer needs one

    def forward(self, images: Tensor) -> Tensor:
        raise self.error


def _images(case: Case) -> tuple[Tensor, Tensor]:
    """Make random uint8 images (B, C, H, W) and labels (B,) on the device, the same for all."""
    generator = torch.Generator().manual_seed(0)
    shape = (case.batch, case.subject.config.channels, *case.subject.size)
    pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    labels = torch.randint(case.subject.config.classes, (case.batch,), generator=generator)
    return pixels.to(case.device), labels.to(case.device)


# ---------------------------------------------------------------- measuring


def measure(
    case: Case, rounds: int, progress: Callable[[str, int, int], None] = lambda what, done, total: None
) -> tuple[list[Row], list[str]]:
    """Measure a case: a row for each library, precision and state of compilation, and notes on omissions.

    `progress` is called with the current step, the steps done and their total. Raises `UsageError` if the batch does
    not fit into memory.
    """
    make, passes = WHAT[case.what]
    with _memory_errors(case), _compiler_settings(case), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peers' own warnings
        case, notes = _fitting(case, training=passes > 1)
        first, memory, times = {}, {}, {}
        contenders = list(make(case))
        for number, contender in enumerate(contenders):
            progress(f"{case.title}: {contender.who}", number, len(contenders))
            try:
                first[contender] = timed(contender.program, case.device)
            except Exception as error:
                if out_of_memory(error) or (contender.who.startswith(VITRAL) and not contender.compiled):
                    raise
                notes.append(_left_out(contender, error))
                continue
            memory[contender], times[contender] = _warm(contender, case)
        samples, rates = _alternate(case, times, rounds, progress)
    if case.compile:
        torch.compiler.reset()  # its cache is shared by all networks of a class, and limited to a few shapes
    flops = passes * case.subject.flops
    kept = _best_routes(samples)
    references = {
        contender.precision: sample
        for contender, sample in kept.items()
        if contender.who == VITRAL and not contender.compiled
    }
    references["int8"] = references[case.usual]
    rows = [
        Row(
            model=case.subject.name,
            image_size=case.subject.size,
            what=case.what,
            who=one.who,
            compiled=one.compiled,
            precision=one.precision,
            via=one.via,
            batch=case.batch,
            images=one.images,
            seconds=sample.seconds,
            reference=references[one.precision].median,
            flops=flops * one.images,
            matrix_rate=rates.get(one.precision),
            memory=memory[one],
            first=first[one] if one.compiled or one.engine or case.what == "jpeg" else None,
        )
        for one, sample in kept.items()
    ]
    return rows, notes


@contextlib.contextmanager
def _compiler_settings(case: Case) -> Iterator[None]:
    """Apply torch's settings for inference on a CPU: weights become constants, packed once. They are read when a
    network is compiled, at its first call, and have no effect with gradients. A network that can only be compiled block
    by block gets as many graphs as it needs. Compiled code goes to the cache of training.
    """
    if not case.compile:
        yield
        return
    keep_code()
    import torch._dynamo
    from torch._inductor import config

    freezing = case.what == "inference" and case.device == "cpu"
    with config.patch(freezing=freezing), torch._dynamo.config.patch(recompile_limit=compiling.RECOMPILE_LIMIT):
        yield


def _warm(contender: Contender, case: Case) -> tuple[int | None, int]:
    """Warm up; measure memory, and the repetitions needed for the clock.

    Memory comes first: a CUDA graph, captured some calls later, holds its own memory from then on.
    """
    if contender.compiled:
        contender.program()  # compiled code is fully loaded only in the second call
    taken: list[float] = []
    memory = growth(lambda: taken.append(timed(contender.program, case.device)), case.device)
    if case.device == "cuda":
        taken = [timed(contender.program, case.device) for _ in range(WARM_UP + 1)]
    in_workers = case.what == "jpeg" and case.device != "cuda"  # on a CPU the workers' memory is not this process's
    held = (
        contender.engine is not None and contender.engine.name == "openvino"
    )  # it keeps its workspace from call to call
    return None if in_workers or held else memory, _repeats(taken[-1])


def _repeats(seconds: float) -> int:
    return min(_MAX_REPEATS, max(1, round(_MIN_SECONDS / max(seconds, 1e-9))))


def _alternate(
    case: Case, times: Mapping[Contender, int], rounds: int, progress: Callable[[str, int, int], None]
) -> tuple[dict[Contender, Sample], dict[str, float]]:
    """Time one call of each contender, and the machine's matrix-product rate, FLOP/s, at each precision."""
    size = MATRIX.get(case.device, SMALL_MATRIX)
    programs: dict[str, Callable[[], object]] = {
        contender.key: repeated(contender.program, number) for contender, number in times.items()
    }
    for precision in case.precisions:
        programs[precision] = matrix_product(size, _TYPES[precision], case.device)
    total, done = len(programs) * (rounds + 1), 0

    def advance(number: int) -> None:
        nonlocal done
        done += number
        progress(case.title, done, total)

    found = alternate(programs, rounds=rounds, device=case.device, progress=advance)
    samples = {
        contender: Sample(tuple(s / number for s in found[contender.key].seconds))
        for contender, number in times.items()
    }
    return samples, {precision: 2 * size**3 / min(found[precision].seconds) for precision in case.precisions}


def _best_routes(samples: Mapping[Contender, Sample]) -> dict[Contender, Sample]:
    """Keep each library's fastest route to a precision."""
    best: dict[tuple[str, str, bool], Contender] = {}
    for contender, sample in samples.items():
        same = (contender.who, contender.precision, contender.compiled)
        if same not in best or sample.median < samples[best[same]].median:
            best[same] = contender
    return {contender: samples[contender] for contender in best.values()}


def _left_out(one: Contender, error: Exception) -> str:
    why = " ".join(str(error).split())[:160]
    return f"left out: {one.who}{' compiled' if one.compiled else ''}, {one.precision}: {type(error).__name__}: {why}"


# ---------------------------------------------------------------- memory


_USABLE = 0.9
"""Share of the memory to plan with."""
_OTHERS = 3.5
"""Memory of a peer's call by our estimate. S/16 at 384 pixels: estimated 2.0 GiB, vit-pytorch took 6.5."""


def _fitting(case: Case, *, training: bool) -> tuple[Case, list[str]]:
    """Keep as many peers as fit into memory together with vitral's network; return notes on the others.

    On a CPU the system kills a process that uses too much. Raises `UsageError` if vitral's alone does not fit.
    """
    if case.device != "cpu":
        return case, []
    found, there = summarize(case.subject.config), memory_bytes()
    weights, kept = found.parameter_bytes, found.activation_bytes if training else found.input_bytes
    own, of_peer = (int(held * weights) for held in _held(case, training))
    own += weights * training  # gradients
    call = kept * case.batch  # a step keeps the activations for the backward pass
    if own + call > there:
        why = f"it needs at least {(own + call) / 2**30:,.0f} GiB of {there / 2**30:,.0f}"
        raise _too_large(case, why, max(0, there - own) // kept)
    room = max(0, int((_USABLE * there - own - _OTHERS * call) // of_peer))
    some = dict(list(case.peers.items())[:room])
    why = f"with {', '.join((VITRAL, *some))} it does not fit into {there / 2**30:,.0f} GiB"
    alone = "; --peers {} measures it" if some else ""
    notes = [f"left out: {who}, {case.title}: {why}{alone.format(who)}" for who in case.peers if who not in some]
    return dataclasses.replace(case, peers=some), notes


def _held(case: Case, training: bool) -> tuple[float, float]:
    """Memory of vitral and of each peer in fp32 weights. AdamW holds two moments, engines may hold packed copies."""
    states = (False, True) if case.compile else (False,)
    if training:
        return 3 * len(states), 3 * len(states)
    copies = 2 + case.compile + sum(name != "plain" for name in case.engines)
    own = sum(copies * (0.5 if precision == "bf16" else 1) for precision in case.precisions)
    contenders = [via for compiled in states for _, via in _routes(case.precisions, compiled)]
    return own, sum(0.5 if via == "cast" else 1 for via in contenders)


@contextlib.contextmanager
def _memory_errors(case: Case) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise _too_large(case, "the device is out of memory", case.batch // 2) from None


def _too_large(case: Case, why: str, batch: int) -> UsageError:
    hint = f"--batch {batch}" if batch else "fewer --peers, or a smaller network"
    return UsageError(f"not enough memory for {case.title}", why=why, hint=hint)
