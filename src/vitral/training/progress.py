"""What a person sees while a run goes on: a bar where there is a terminal, a line an epoch everywhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from torch import Tensor

from vitral.console import table
from vitral.training.loop import Epoch, Listener
from vitral.training.run import Plan

_EVERY = 0.25  # seconds between two readings of the loss: each makes a GPU wait


def progress_bar(console: Console) -> Progress:
    """A bar on standard error that vanishes when it is done; silent where standard error is no terminal."""
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"), console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip


@contextmanager
def counting(console: Console, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar for work of `total` pictures, None where nobody knows; yields the function to call with the number that
    were just done.
    """
    with progress_bar(console) as bar:
        task = bar.add_task(what, total=total, note="")
        yield lambda done: bar.advance(task, done)


class ConsoleListener(Listener):
    """A bar for the epoch at hand, and a line for each that is done."""

    def __init__(self, console: Console, epochs: int):
        self.console, self.epochs = console, epochs
        self.bar = progress_bar(console)
        self.task = self.bar.add_task("", total=1, note="")
        self.read = 0.0
        self.took: list[float] = []  # seconds of each epoch in this process
        self.warned = False

    def __enter__(self) -> ConsoleListener:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def on_epoch_start(self, epoch: int, batches: int, done: int) -> None:
        self.bar.reset(
            self.task, total=batches, completed=done, description=f"epoch {epoch + 1}/{self.epochs}", note=""
        )

    def on_batch(self, loss: Tensor) -> None:
        if self.bar.disable:
            return
        self.bar.advance(self.task)
        if time.monotonic() - self.read > _EVERY:
            self.read = time.monotonic()
            self.bar.update(self.task, note=f"loss {float(loss):.3f}")

    def on_stop(self) -> None:
        told = "stopping: this step is finished and the run saved; Ctrl-C once more stops at once"
        self.console.print(told, style="yellow", highlight=False, soft_wrap=True)

    def on_epoch_end(self, line: Epoch, best: bool) -> None:
        parts = [
            f"epoch {line['epoch']:>{len(str(self.epochs))}}/{self.epochs}",
            f"train loss {line['train_loss']:.4f}",
        ]
        if "val_loss" in line:
            parts += [f"val loss {line['val_loss']:.4f}", f"val accuracy {line['val_accuracy']:.2%}"]
        if "image_size" in line:
            parts.append(f"at {'×'.join(map(str, line['image_size']))}")
        parts += [f"{line['images_per_second']:,.0f} images/s", f"{line['seconds']:.1f} s"]
        if line.get("waited", 0.0) > _NOTICED:
            parts.append(f"waited {line['waited']:.0%} for pictures")
        compiling = line.get("compile_seconds", 0.0)
        if compiling:
            parts.append(f"compiled in {_duration(compiling)}")
        self.took.append(line["seconds"] - compiling)
        if left := self.epochs - line["epoch"]:
            parts.append(f"{_duration(left * median(self.took[-5:]))} left")
        self.console.print("  ".join(parts) + ("  best" if best else ""), highlight=False, soft_wrap=True)
        if line.get("waited", 0.0) > _NOTICED and line["seconds"] - compiling > _WORTH_A_WORD and not self.warned:
            self.warned = True
            self.console.print(SLOW_PICTURES, style="dim", highlight=False, soft_wrap=True)


_NOTICED = 0.1
"""Share of an epoch's training from which on waiting for pictures is told."""
_WORTH_A_WORD = 5.0
"""Seconds of an epoch below which waiting is no matter."""
KEEP_THEM = "--residency memory or cache keeps them decoded"
SLOW_PICTURES = (
    f"  pictures come more slowly than this network learns from them. Where they are streamed, {KEEP_THEM}; where they "
    "are cropped at random, --crop none or more cores are what helps"
)


def _duration(seconds: float) -> str:
    """Seconds as a person says them: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def print_plan(console: Console, plan: Plan) -> None:
    """Each choice with its reason."""
    rows = table("Plan")
    names = max((len(choice.name) for choice in plan.choices), default=0)
    words = max((len(word) for choice in plan.choices for word in choice.reason.split()), default=0)
    room = console.width - names - words - 4  # two spaces between columns
    for column in ("choice", "value", "why"):  # a name that is to be typed stays whole, where there is room
        narrow = room if column == "value" and room >= _NARROWEST else None
        rows.add_column(column, overflow="fold", max_width=narrow)
    for choice in plan.choices:
        rows.add_row(choice.name, choice.value, choice.reason)
    console.print(rows)


_NARROWEST = 12
"""Characters; a column of fewer is too narrow to read."""
