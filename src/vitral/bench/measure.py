"""What is timed of each library, all in turn, and the rows that come of it."""

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

from vitral.bench import peers as theirs
from vitral.bench.engines import ENGINES, Engine, predictor_by
from vitral.bench.files import AUGMENTATION, Ours, Theirs, some_pictures
from vitral.bench.memory import growth
from vitral.bench.peers import Peer
from vitral.bench.report import OURS, Row
from vitral.bench.subject import Subject
from vitral.bench.timing import Sample, alternate, matrix_product, repeated, timed
from vitral.compiler import keep_code
from vitral.data import DataSet
from vitral.data.loader import Batch
from vitral.data.transforms import Augmentation
from vitral.device import Machine, choose, cores, memory_bytes, out_of_memory
from vitral.errors import UsageError
from vitral.model import summarize
from vitral.model.quantized import observe
from vitral.predict import Predictor
from vitral.training import compiling
from vitral.training.objective import Classification, Halves
from vitral.training.optimizers import OptimizerSet
from vitral.training.run import Run
from vitral.training.step import WARM_UP, Unwatched, recordable, step_of

MATRIX = {"cuda": 8192}
"""Side of the matrices that the machine's own rate is measured with, by device; elsewhere `SMALL_MATRIX`."""
SMALL_MATRIX = 2048
_LEAST = 0.02  # seconds that one measurement takes at least: what is shorter is repeated
_MOST = 50  # times, though
_TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

Step = Callable[[Batch], object]


@dataclass(frozen=True)
class Case:
    """Everything that takes its turn together: one network, one thing to do, one batch size."""

    subject: Subject
    what: str
    batch: int
    device: str  # cpu, cuda or mps
    precisions: Sequence[str]  # bf16, fp32
    peers: Mapping[str, Peer]
    compile: bool = False
    dataset: DataSet | None = None  # for what trains from files
    engines: Sequence[str] = ()  # of ours, in inference, beside the one that is chosen by itself

    @property
    def title(self) -> str:
        return f"{self.subject.name}, {self.what}, batch {self.batch}"

    @property
    def usual(self) -> str:
        """The precision that ours takes by itself, or the first where that is not measured: what integers replace."""
        by_itself = choose(self.device, dim=self.subject.config.dim).precision
        return by_itself if by_itself in self.precisions else self.precisions[0]


@dataclass(frozen=True)
class Way:
    """One library's way of doing it."""

    who: str
    precision: str  # bf16, fp32, int8
    compiled: bool
    program: Callable[[], object]
    pictures: int  # of one call
    via: str = ""  # how a precision is reached, where there are several ways: cast, autocast
    engine: Engine | None = None  # of ours, where it is not the one that is taken by itself

    @property
    def key(self) -> str:
        return f"{self.who}/{self.precision}/{self.compiled}/{self.via}"


# ---------------------------------------------------------------- the ways


def inference(case: Case) -> Iterator[Way]:
    """Ours is `Predictor`, from uint8 pictures to probabilities; theirs from standardised pictures to logits.

    What is compiled of ours is the network, called as theirs are: what computes within a predictor is its own affair.
    """
    subject, device = case.subject, torch.device(case.device)
    pixels, _ = _pictures(case)
    floats = subject.preprocessing.standardise(pixels)
    for precision in case.precisions:
        network: Any = subject.build()
        machine = choose(case.device, precision)
        predictor = Predictor(network, subject.preprocessing, subject.classes, machine=machine)
        yield Way(OURS, precision, False, partial(predictor._forward, pixels), case.batch)
        yield from _engines(case, predictor, pixels)
    for who, compiled, build in _networks(case):
        if who == OURS and not compiled:
            continue
        for precision, via in _ways_to(case.precisions, compiled):
            model, images = _built(build, device, compiled).eval(), floats
            if via == "cast":
                model, images = model.bfloat16(), floats.bfloat16()
            program = partial(theirs.logits, model, images, "bf16" if via == "autocast" else "fp32")
            yield Way(who, precision, compiled, program, case.batch, via)


def _engines(case: Case, ours: Predictor, pixels: Tensor) -> Iterator[Way]:
    """Our other engines at the precision of `ours`, whose network they share; integers once, at the usual one."""
    precision, network = ours.machine.precision, ours.model
    named = {name: ENGINES[name] for name in case.engines}
    if precision != case.usual:
        named = {name: engine for name, engine in named.items() if not engine.integers}
    ranges = None
    if any(engine.integers for engine in named.values()):
        images = ours.preprocessing.standardise(pixels).to(next(network.parameters()).dtype)
        ranges = observe(network, [images])  # type: ignore[arg-type]  # it is a ViT: others are refused
    for name, engine in named.items():
        program = _prepared(partial(predictor_by, engine, ours, ranges), pixels)
        label = "int8" if engine.integers else precision
        yield Way(f"{OURS} ({name})", label, False, program, case.batch, engine=engine)


def _prepared(make: Callable[[], Predictor], pixels: Tensor) -> Callable[[], object]:
    """Predict; the first call makes the predictor."""
    made = cache(make)
    return lambda: made()._forward(pixels)


def _networks(case: Case) -> Iterator[tuple[str, bool, Callable[[], nn.Module]]]:
    """Who, whether compiled, and what builds the network; ours comes first."""
    config: Any = case.subject.config  # where there are peers it is a plain ViT's
    for compiled in (False, True) if case.compile else (False,):
        yield OURS, compiled, case.subject.build
        for name, peer in case.peers.items():
            yield name, compiled, partial(theirs.network, peer, config, case.device)


def _ways_to(precisions: Iterable[str], compiled: bool) -> Iterator[tuple[str, str]]:
    for precision in precisions:
        if precision == "fp32":
            yield precision, ""
            continue
        yield precision, "cast"
        if not compiled:  # what is compiled is slow to come by, and autocast's result has the same matrix products
            yield precision, "autocast"


def training(case: Case) -> Iterator[Way]:
    """One step: forward, cross-entropy, backward, AdamW. Ours takes uint8 pictures, theirs standardised ones."""
    pixels, labels = _pictures(case)
    indices = np.arange(case.batch)
    ours = Batch(pixels, labels, indices)
    others = Batch(case.subject.preprocessing.standardise(pixels), labels, indices)
    for who, precision, compiled, step in _steps(case, Augmentation()):
        yield Way(who, precision, compiled, partial(step, ours if who == OURS else others), case.batch)


def jpeg(case: Case) -> Iterator[Way]:
    """A pass of training over picture files. Ours reads every file in every pass, as theirs do; "kept" is what it does
    where the decoded set fits a quarter of the memory, and "synthetic" trains on one batch again and again: no
    pictures come faster.
    """
    assert case.dataset is not None
    split = some_pictures(case.dataset, case.subject, case.batch, case.device)
    workers = max(1, cores() - 1)
    about = (split, case.subject.preprocessing, case.batch, torch.device(case.device), workers)
    loader = Theirs(*about)
    ready = Batch(*_pictures(case), np.arange(case.batch))
    for who, precision, compiled, step in _steps(case, AUGMENTATION):
        found: dict[str, Iterable[Batch]] = {who: loader}
        if who == OURS:
            found = {OURS: Ours(*about, kept="stream"), f"{OURS}, kept": Ours(*about, kept="memory")}
            found[f"{OURS}, synthetic"] = [ready] * (len(split) // case.batch)
        for name, batches in found.items():
            yield Way(name, precision, compiled, partial(_pass, step, batches), len(split))


def _pass(step: Step, batches: Iterable[Batch]) -> None:
    for batch in batches:
        step(batch)


WHAT: dict[str, tuple[Callable[[Case], Iterator[Way]], int]] = {
    "inference": (inference, 1),
    "training": (training, 3),
    "jpeg": (jpeg, 3),
}
"""What can be measured → its ways, and how many forward passes its operations are."""


def _steps(case: Case, augmentation: Augmentation) -> Iterator[tuple[str, str, bool, Step]]:
    """Everyone's training step: who, precision, whether compiled, step. One network serves all precisions."""
    subject, device = case.subject, torch.device(case.device)
    objective = Classification(subject.preprocessing, augmentation, subject.config.classes)
    for who, compiled, build in _networks(case):
        model = _built(build, device, compiled and who != OURS).train()
        if who == OURS:
            whole = compiling.CompiledObjective(objective, model) if compiled else objective
            of_ours = partial(_ours, model, OptimizerSet(model, Run(optimizer="adamw", lr=1e-4)), whole)
            steps = {precision: of_ours(choose(case.device, precision)) for precision in case.precisions}
        else:
            of_theirs = partial(theirs.step, model, theirs.optimizer(model))
            steps = {precision: partial(of_theirs, precision) for precision in case.precisions}
        for precision, step in steps.items():
            yield who, precision, compiled, step


def _ours(model: nn.Module, optimizer: OptimizerSet, objective: Halves, machine: Machine) -> Step:
    """Our step, as `vitral.training.loop` takes it."""
    run = Run(optimizer="adamw", lr=1e-4, clip=None)
    run = dataclasses.replace(run, graphs=recordable(run, machine.device)[0])
    step = step_of(model, optimizer, objective, machine, run)
    return lambda batch: step(batch, Unwatched(), lr=1e-4)


def _built(build: Callable[[], nn.Module], device: torch.device, compiled: bool) -> nn.Module:
    try:
        model = build().to(device)
    except Exception as error:  # another version of a library, with other names
        return _Unbuilt(error)
    if compiled:
        model.compile(dynamic=False)
    return model


class _Unbuilt(nn.Module):
    """Stands for a network that could not be built: fails when it is called, as others do."""

    def __init__(self, error: Exception):
        super().__init__()
        self.error = error
        self.nothing = nn.Parameter(torch.zeros(()))  # an optimizer wants one

    def forward(self, images: Tensor) -> Tensor:
        raise self.error


def _pictures(case: Case) -> tuple[Tensor, Tensor]:
    """Random uint8 images (B, C, H, W) and labels (B,), on the device; the same for all."""
    generator = torch.Generator().manual_seed(0)
    shape = (case.batch, case.subject.config.channels, *case.subject.size)
    pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    labels = torch.randint(case.subject.config.classes, (case.batch,), generator=generator)
    return pixels.to(case.device), labels.to(case.device)


# ---------------------------------------------------------------- measuring


def measure(
    case: Case, rounds: int, progress: Callable[[str, int, int], None] = lambda what, done, total: None
) -> tuple[list[Row], list[str]]:
    """A row for each library, precision and state of compilation, and notes on what was left out.

    `progress` is called with what is being done, how much of it is, and how much there is. Raises `UsageError` where
    the memory does not suffice for the batch.
    """
    make, passes = WHAT[case.what]
    with _memory_told(case), _compiler_at_its_best(case), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the peers, about themselves
        case, notes = _fitting(case, training=passes > 1)
        first, memory, times = {}, {}, {}
        ways = list(make(case))
        for number, way in enumerate(ways):
            progress(f"{case.title}: {way.who}", number, len(ways))
            try:
                first[way] = timed(way.program, case.device)
            except Exception as error:
                if out_of_memory(error) or (way.who.startswith(OURS) and not way.compiled):
                    raise
                notes.append(_left_out(way, error))
                continue
            memory[way], times[way] = _warm(way, case)
        samples, rates = _alternate(case, times, rounds, progress)
    if case.compile:
        torch.compiler.reset()  # its cache is one for all networks of a class, and has room for a few shapes alone
    flops = passes * case.subject.flops
    kept = _best_ways(samples)
    reference = {way.precision: sample for way, sample in kept.items() if way.who == OURS and not way.compiled}
    reference["int8"] = reference[case.usual]
    rows = [
        Row(
            model=case.subject.name, image_size=case.subject.size, what=case.what, who=way.who, compiled=way.compiled,
            precision=way.precision, via=way.via, batch=case.batch, pictures=way.pictures, seconds=sample.seconds,
            ours=reference[way.precision].median, flops=flops * way.pictures, matrix_rate=rates.get(way.precision),
            memory=memory[way], first=first[way] if way.compiled or way.engine or case.what == "jpeg" else None,
        )
        for way, sample in kept.items()
    ]  # fmt: skip
    return rows, notes


@contextlib.contextmanager
def _compiler_at_its_best(case: Case) -> Iterator[None]:
    """torch's setting for inference on a CPU: weights become constants, laid out once. It is read when a network is
    compiled, at its first call, and means nothing where gradients are wanted. What is compiled block by block, because
    it cannot be as a whole, gets as many pieces as it needs. Code is kept where training keeps it.
    """
    if not case.compile:
        yield
        return
    keep_code()
    import torch._dynamo
    from torch._inductor import config

    freezing = case.what == "inference" and case.device == "cpu"
    with config.patch(freezing=freezing), torch._dynamo.config.patch(recompile_limit=compiling.AT_MOST):
        yield


def _warm(way: Way, case: Case) -> tuple[int | None, int]:
    """Calls for its memory, until it is as it will be, and for how often it must be repeated to be read off a clock.

    Memory comes first: what is recorded on a GPU, some calls later, holds its own from then on.
    """
    if way.compiled:
        way.program()  # what is compiled loads the last of its code in the second call
    taken: list[float] = []
    memory = growth(lambda: taken.append(timed(way.program, case.device)), case.device)
    if case.device == "cuda":
        taken = [timed(way.program, case.device) for _ in range(WARM_UP + 1)]
    elsewhere = case.what == "jpeg" and case.device != "cuda"  # on a CPU the workers' memory is not this process's
    held = way.engine is not None and way.engine.name == "openvino"  # it keeps its workspace from call to call
    return None if elsewhere or held else memory, _repeats(taken[-1])


def _repeats(seconds: float) -> int:
    return min(_MOST, max(1, round(_LEAST / max(seconds, 1e-9))))


def _alternate(
    case: Case, times: Mapping[Way, int], rounds: int, progress: Callable[[str, int, int], None]
) -> tuple[dict[Way, Sample], dict[str, float]]:
    """Seconds of one call of each way, and the machine's matrix-product rate, FLOP/s, at each precision."""
    size = MATRIX.get(case.device, SMALL_MATRIX)
    programs: dict[str, Callable[[], object]] = {
        way.key: repeated(way.program, number) for way, number in times.items()
    }
    for precision in case.precisions:
        programs[precision] = matrix_product(size, _TYPES[precision], case.device)
    total, done = len(programs) * (rounds + 1), 0

    def advance(number: int) -> None:
        nonlocal done
        done += number
        progress(case.title, done, total)

    found = alternate(programs, rounds=rounds, device=case.device, progress=advance)
    samples = {way: Sample(tuple(s / number for s in found[way.key].seconds)) for way, number in times.items()}
    return samples, {precision: 2 * size**3 / min(found[precision].seconds) for precision in case.precisions}


def _best_ways(samples: Mapping[Way, Sample]) -> dict[Way, Sample]:
    """Of the ways to one precision, each library's fastest."""
    best: dict[tuple[str, str, bool], Way] = {}
    for way, sample in samples.items():
        same = (way.who, way.precision, way.compiled)
        if same not in best or sample.median < samples[best[same]].median:
            best[same] = way
    return {way: samples[way] for way in best.values()}


def _left_out(way: Way, error: Exception) -> str:
    why = " ".join(str(error).split())[:160]
    return f"left out: {way.who}{' compiled' if way.compiled else ''}, {way.precision}: {type(error).__name__}: {why}"


# ---------------------------------------------------------------- memory that does not suffice


_USABLE = 0.9
"""Share of the memory that may be planned with."""
_OTHERS = 3.5
"""What a call of another library may take of what is reckoned for ours: S/16 at 384 pixels, a training step, was
reckoned with 2.0 GiB, and vit-pytorch, which writes attention's weights out, took 6.5.
"""


def _fitting(case: Case, *, training: bool) -> tuple[Case, list[str]]:
    """The case with as many peers as fit into the memory beside ours, and a note on the others: all networks are there
    at once. On a CPU the system ends a process that takes too much, without a word. `UsageError` where ours alone does
    not fit.
    """
    if case.device != "cpu":
        return case, []
    found, there = summarize(case.subject.config), memory_bytes()
    weights, kept = found.parameter_bytes, found.activation_bytes if training else found.input_bytes
    ours, theirs = (int(held * weights) for held in _held(case, training))
    ours += weights * training  # gradients
    call = kept * case.batch  # a step keeps what its way back reads
    if ours + call > there:
        why = f"it takes {(ours + call) / 2**30:,.0f} GiB and more, of {there / 2**30:,.0f}"
        raise _too_large(case, why, max(0, there - ours) // kept)
    room = max(0, int((_USABLE * there - ours - _OTHERS * call) // theirs))
    some = dict(list(case.peers.items())[:room])
    notes = []
    for who in case.peers:
        if who not in some:
            why = f"beside {', '.join((OURS, *some))} it does not fit into {there / 2**30:,.0f} GiB"
            notes.append(f"left out: {who}, {case.title}: {why}" + f"; --peers {who} measures it" * bool(some))
    return dataclasses.replace(case, peers=some), notes


def _held(case: Case, training: bool) -> tuple[float, float]:
    """What is held of ours, and of each peer, as a multiple of the weights in fp32. AdamW has two moments; ours in
    inference may have its weights once more, laid out, and so have its engines but for the plain one.
    """
    states = (False, True) if case.compile else (False,)
    if training:
        return 3 * len(states), 3 * len(states)
    copies = 2 + case.compile + sum(name != "plain" for name in case.engines)
    ours = sum(copies * (0.5 if precision == "bf16" else 1) for precision in case.precisions)
    ways = [via for compiled in states for _, via in _ways_to(case.precisions, compiled)]
    return ours, sum(0.5 if via == "cast" else 1 for via in ways)


@contextlib.contextmanager
def _memory_told(case: Case) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise _too_large(case, "the device has no more", case.batch // 2) from None


def _too_large(case: Case, why: str, batch: int) -> UsageError:
    hint = f"--batch {batch}" if batch else "fewer --peers, or a smaller network"
    return UsageError(f"not enough memory for {case.title}", why=why, hint=hint)
