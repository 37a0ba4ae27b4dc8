"""Progress output of a run: a bar on a terminal, and a line per epoch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from torch import Tensor

from vitral.console import draws, table
from vitral.epoch_metrics import TaskMetric, printed
from vitral.training.callbacks import Callback, Epoch
from vitral.training.plan import Plan
from vitral.wording import duration

_EVERY = 0.25  # seconds between two reads of the loss, each of which synchronizes with a GPU


def progress_bar(console: Console) -> Progress:
    """A transient progress bar; disabled if the console is no terminal."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        transient=True,
        disable=not draws(console),
    )


class ConsoleListener(Callback):
    """A bar for the current epoch, and a line for each completed one."""

    def __init__(self, console: Console, epochs: int, measured: Sequence[TaskMetric] = ()):
        """`measured`: metrics of validation besides the loss: key without `val_`, title, format."""
        self.console, self.epochs, self.measured = console, epochs, measured
        self.bar = progress_bar(console)
        self.task = self.bar.add_task("", total=1, note="")
        self.last_read = 0.0
        self.epoch_seconds: list[float] = []  # of epochs in this process, without compiling
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
        if time.monotonic() - self.last_read > _EVERY:
            self.last_read = time.monotonic()
            self.bar.update(self.task, note=f"loss {float(loss):.3f}")

    def on_stop(self) -> None:
        message = "stopping after this step and saving the run; press Ctrl-C again to stop immediately"
        self.console.print(message, style="yellow", highlight=False, soft_wrap=True)

    def on_epoch_end(self, line: Epoch, best: bool) -> None:
        self.epochs = line.get("epochs", self.epochs)
        train_loss = f"train loss {line['train_loss']:.4f}"
        parts = [f"epoch {line['epoch']:>{len(str(self.epochs))}}/{self.epochs}", train_loss]
        if "val_loss" in line:
            parts.append(f"val loss {line['val_loss']:.4f}")
        shown = ((title, form, line.get(f"val_{key}")) for key, title, form in self.measured)
        parts += [f"val {title} {form.format(value)}" for title, form, value in shown if value is not None]
        parts += printed(line)
        if "image_size" in line:
            parts.append(f"at {'×'.join(map(str, line['image_size']))}")
        rate, seconds = f"{line['images_per_second']:,.0f} images/s", f"{line['seconds']:.1f} s"
        parts += [rate, seconds]
        if draws(self.console):  # a line that would be wrapped is hard to read; metrics.jsonl has all
            for part in [rate, seconds, *([train_loss] if "val_loss" in line else [])]:
                if len("  ".join(parts)) > self.console.width - _REST:
                    parts.remove(part)
        compiling = line.get("compile_seconds", 0.0)
        slow = line.get("waited", 0.0) > _NOTICED and line["seconds"] - compiling > _NEGLIGIBLE
        if slow:
            parts.append(f"waited {line['waited']:.0%} for images")
        if compiling:
            parts.append(f"compiled in {duration(compiling)}")
        self.epoch_seconds.append(line["seconds"] - compiling)
        if left := self.epochs - line["epoch"]:
            parts.append(f"{duration(left * median(self.epoch_seconds[-5:]))} left")
        if best and any(name.startswith("val_") for name in line):  # without validation the last epoch is kept
            parts.append("best")
        self.console.print("  ".join(parts), highlight=False, soft_wrap=True)
        if "residency" in line:
            self.console.print(f"training images: {line['residency']}", highlight=False, soft_wrap=True)
        elif slow and not self.warned:
            self.warned = True
            self.console.print(SLOW_IMAGES, style="dim", highlight=False, soft_wrap=True)


class WidgetBar(Callback):
    """The bar of the current epoch as a widget of a notebook."""

    def __init__(self, widgets: Any, show: Callable[[Any], object], epochs: int):
        """`widgets`: the module ipywidgets; `show` displays a widget."""
        self.bar = widgets.IntProgress(value=0, max=1)
        self.label = widgets.Label()
        self.box = widgets.HBox([self.label, self.bar])
        self.epochs, self.done, self.last_drawn = epochs, 0, 0.0
        show(self.box)

    def __enter__(self) -> WidgetBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.box.close()

    def on_epoch_start(self, epoch: int, batches: int, done: int) -> None:
        self.done, self.bar.max = done, batches
        self.label.value = f"epoch {epoch + 1}/{self.epochs}"
        self._draw()

    def on_batch(self, loss: Tensor) -> None:
        self.done += 1
        if self.done == self.bar.max or time.monotonic() - self.last_drawn > _EVERY:
            self._draw()

    def on_epoch_end(self, line: Epoch, best: bool) -> None:
        self.epochs = line.get("epochs", self.epochs)

    def _draw(self) -> None:
        self.bar.value, self.last_drawn = self.done, time.monotonic()


def widget_bar(console: Console, epochs: int) -> WidgetBar | None:
    """Return a bar in a notebook where ipywidgets is installed; None elsewhere."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if console.quiet or not hasattr(shell, "kernel") or importlib.util.find_spec("ipywidgets") is None:
        return None
    from IPython.display import display

    return WidgetBar(importlib.import_module("ipywidgets"), display, epochs)


_REST = len("  10 min 59 s left  best")
_NOTICED = 0.1
"""Share of an epoch's training time above which waiting for images is reported."""
_NEGLIGIBLE = 5.0
"""Seconds of an epoch up to which waiting is not worth a word."""
RESIDENCY_HINT = "--residency memory or cache keeps them decoded"
SLOW_IMAGES = (
    f"  training is input-bound: decoding images takes longer than the steps. For streamed images, {RESIDENCY_HINT}; "
    "for random crops, try --crop none or more cores"
)


def print_plan(console: Console, plan: Plan, *, whole: bool = False) -> None:
    """Print each choice with its reason; unless `whole`, those that depend on the user's images, and warnings."""
    choices = sorted(plan.choices, key=lambda one: place(one.name))
    if not whole:
        choices = [one for one in choices if one.name not in DETAILS or one.value.startswith("WARNING")]
        choices = [one for one in choices if one.name in _FIRST or one.reason != "requested"]
    rows = table("Plan")
    names = max((len(choice.name) for choice in choices), default=0)
    words = max((len(word) for choice in choices for word in choice.reason.split()), default=0)
    room = console.width - names - words - 4  # two spaces between columns
    for column in ("choice", "value", "why"):  # names to type stay on one line, if there is room
        narrow = room if column == "value" and room >= _NARROWEST else None
        rows.add_column(column, overflow="fold", max_width=narrow)
    for choice in choices:
        rows.add_row(choice.name, choice.value, choice.reason)
    console.print(rows)
    if left := len(plan.choices) - len(choices):
        console.print(
            f"{left} more {'setting' if left == 1 else 'settings'}: --plan-only", style="dim", highlight=False
        )


def place(name: str) -> int:
    """Return the place of a choice in a printed plan; those of the same place stay in order."""
    return _FIRST.index(name) if name in _FIRST else len(_FIRST)


_FIRST = ("model", "init", "epochs", "minutes")
"""Choices that a user wants to know first: the network, its start, the time."""
DETAILS = frozenset(
    {
        "accumulate",
        "augmentation",
        "averaging",
        "batch",
        "batch size",
        "channels",
        "clip",
        "compile",
        "crop",
        "crops",
        "decoder",
        "first layer",
        "geometry",
        "graphs",
        "layer decay",
        "learning rate",
        "logit scale",
        "loss",
        "lr",
        "mask",
        "mirror",
        "optimizer",
        "patch dropout",
        "pooling",
        "pre logits",
        "precision",
        "prototypes",
        "label smoothing",
        "teacher momentum",
        "teacher views",
        "threads",
        "warmup",
        "weight decay",
    }
)
"""Choices that follow from the recipe and the machine."""
_NARROWEST = 12
"""Smallest width of a readable column, in characters."""
