"""Measuring side by side: A B A B …, so that what slows the machine for a while slows everyone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from vitral.device import synchronise
from vitral.model.linear import linear


@dataclass(frozen=True)
class Sample:
    """Seconds that one thing took, round by round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def n(self) -> int:
        return len(self.seconds)

    def columns(self, scale: float = 1.0) -> dict[str, float]:
        """n, median and spread (least and greatest), times `scale`: 1000 for milliseconds."""
        return {
            "n": self.n,
            "median": self.median * scale,
            "least": min(self.seconds) * scale,
            "greatest": max(self.seconds) * scale,
        }


def ratio(slower: Sample, faster: Sample) -> float:
    """How many times as long `slower` takes: the ratio of the medians."""
    return slower.median / faster.median


def alternate(
    programs: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warm_up: int = 1,
    device: str = "cpu",
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Sample]:
    """Run all programs once a round and time each; every round begins with another one, so none always goes first.

    `warm_up` rounds are not counted. On a GPU the clock stops when the device is done. `progress` is called with 1 for
    each program that has run.
    """
    names = list(programs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            taken = timed(programs[name], device)
            if number >= 0:
                seconds[name].append(taken)
            progress(1)
    return {name: Sample(tuple(taken)) for name, taken in seconds.items()}


def timed(program: Callable[[], object], device: str = "cpu") -> float:
    """Seconds that one call takes, on a GPU until the device is done."""
    synchronise(device)
    started = time.perf_counter()
    program()
    synchronise(device)
    return time.perf_counter() - started


def repeated(program: Callable[[], object], times: int) -> Callable[[], None]:
    """The program `times` times: for what is too short for a clock."""

    def several() -> None:
        for _ in range(times):
            program()

    return several


def matrix_product(size: int, dtype: torch.dtype, device: str) -> Callable[[], object]:
    """A dense layer on a square of this `size`: 2 size³ operations, the machine's own rate, by the library that ours
    takes for it: in fp32 torch's does not reach that of every processor.
    """
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))

    def multiply() -> torch.Tensor:
        with torch.inference_mode():
            return linear(a, b, None)

    return multiply


def best(samples: Sequence[Sample]) -> Sample:
    """The one with the least median."""
    return min(samples, key=lambda sample: sample.median)
