"""Time programs in alternating rounds (A B A B …), so that a slow spell of the machine affects all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from vitral.device import synchronize
from vitral.kernels.dense import linear


@dataclass(frozen=True)
class Sample:
    """Seconds of one program, round by round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def n(self) -> int:
        return len(self.seconds)

    def columns(self, scale: float = 1.0) -> dict[str, float]:
        """Return n, median, least and greatest, multiplied by `scale`: 1000 for milliseconds."""
        return {
            "n": self.n,
            "median": self.median * scale,
            "least": min(self.seconds) * scale,
            "greatest": max(self.seconds) * scale,
        }


def ratio(slower: Sample, faster: Sample) -> float:
    """Ratio of the medians: how many times as long `slower` takes."""
    return slower.median / faster.median


def alternate(
    programs: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warm_up: int = 1,
    device: str = "cpu",
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Sample]:
    """Time all programs once per round; every round begins with another one, so that none always runs first.

    `warm_up` rounds are not counted. On a GPU the clock stops when the device is done. `progress` is called with 1
    after each program.
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
    """Time one call in seconds, on a GPU until the device is done."""
    synchronize(device)
    started = time.perf_counter()
    program()
    synchronize(device)
    return time.perf_counter() - started


def repeated(program: Callable[[], object], times: int) -> Callable[[], None]:
    """Repeat a program `times` times, if one call is too short for the clock."""

    def several() -> None:
        for _ in range(times):
            program()

    return several


def matrix_product(size: int, dtype: torch.dtype, device: str) -> Callable[[], object]:
    """Make a square dense layer of this `size`, 2 size³ operations, to measure the machine's matrix-product rate. It is
    computed by vitral's kernel: in fp32 torch's does not reach the rate of every CPU.
    """
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))

    def multiply() -> torch.Tensor:
        with torch.inference_mode():
            return linear(a, b, None)

    return multiply


def best(samples: Sequence[Sample]) -> Sample:
    """Return the sample with the least median."""
    return min(samples, key=lambda sample: sample.median)
