"""The training loop: steps, saving, stopping."""

from __future__ import annotations

import dataclasses
import io
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from images import noise
from vitral.data import Split
from vitral.data.images.augmentation import Augmentation
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batch, Batches
from vitral.device import choose, seed_everything
from vitral.distributed.ranks import ALONE
from vitral.errors import TrainingError
from vitral.model import ViT, ViTConfig
from vitral.stopping import STOPS, stop_requested
from vitral.training import loop
from vitral.training.callbacks import Callback
from vitral.training.loop import Averaged, EpochEnd, State, fit
from vitral.training.objectives.classification import Classification
from vitral.training.optimizer_set import OptimizerSet
from vitral.training.options import Run
from vitral.training.progress import ConsoleListener
from vitral.training.step import Step
from vitral.workflows.tasks import TASKS, task_of

CONFIG = ViTConfig(image_size=8, patch_size=4, classes=3, dim=8, depth=2, heads=2, mlp_dim=8)
PREPROCESSING = Preprocessing((8, 8))


def batches(run: Run, count: int = 24) -> Batches:
    images = Split([f"p{i}.png" for i in range(count)], np.arange(count) % 3, lambda i: noise(i, (8, 8)))
    return Batches(
        images,
        PREPROCESSING,
        batch_size=run.batch_size,
        device=torch.device("cpu"),
        augmentation=Augmentation(),
        seed=run.seed,
    )


def state_of(run: Run, config: ViTConfig = CONFIG) -> State:
    seed_everything(run.seed)
    model = ViT(config)
    with torch.no_grad():
        model.head.weight.normal_(std=0.1)  # a head of zeros gives the rest no gradient at first
    model.checkpointing = run.checkpointing
    state = State(model, OptimizerSet(model, run))
    if run.ema:
        state.averaged = Averaged(model, run.ema)
    return state


def run_of(**options: Any) -> Run:
    given = {"epochs": 1, "batch_size": 8, "warmup": 0.0, "schedule": "constant", "weight_decay": 0.0, "lr": 0.01}
    return Run(**{**given, **options})


def trained(run: Run, state: State | None = None, **parts: Any) -> State:
    """`fit` with silent defaults for all parts not given."""
    state = state or state_of(run)
    given: dict[str, Any] = {
        "train": batches(run),
        "objective": Classification(PREPROCESSING, run.augmentation, 3),
        "listener": Callback(),
        "ranks": ALONE,
        **parts,
    }
    step = Step(state.model, state.optimizer, given.pop("objective"), choose("cpu", "fp32"), run)
    images, listener, ranks = (given.pop(name) for name in ("train", "listener", "ranks"))
    fit(state, run, images, step, EpochEnd(**given), listener=listener, ranks=ranks)
    return state


def close(a: nn.Module, b: nn.Module, tolerance: float = 1e-6) -> bool:
    return all(torch.allclose(x, y, atol=tolerance) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("weights", [None, (0.5, 4.0, 1.0)])
@pytest.mark.parametrize(("batch_size", "accumulate"), [(8, 3), (4, 6), (12, 2)])
def test_accumulated_batches_equal_a_large_one(batch_size, accumulate, weights):
    options = {"optimizer": "sgd", "lr": 0.1, "epochs": 2, "clip": 0.5}
    of_classes = None if weights is None else torch.tensor(weights)
    objective = Classification(PREPROCESSING, Augmentation(), 3, label_smoothing=0.1, class_weights=of_classes)
    large = trained(run_of(batch_size=24, **options), objective=objective)
    small = trained(run_of(batch_size=batch_size, accumulate=accumulate, **options), objective=objective)
    assert small.step == large.step == 2
    assert close(small.model, large.model)
    assert not close(small.model, state_of(run_of()).model, 1e-4)


def test_gradients_of_a_step_accumulate_in_place():
    """No copy per micro-batch: all of a step use the same memory."""
    run = run_of(batch_size=4, accumulate=3, optimizer="sgd", lr=0.1)
    state, plain = state_of(run), Classification(PREPROCESSING, Augmentation(), 3)
    seen: list[list[int]] = []

    def objective(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        seen.append([p.grad.data_ptr() for p in model.parameters() if p.grad is not None])
        return plain(model, batch)

    trained(run, state=state, objective=objective)
    assert [bool(pointers) for pointers in seen] == [False, True, True] * 2, "none are left after a step"
    assert seen[1] == seen[2]
    assert seen[4] == seen[5]


def test_the_last_step_of_an_epoch_may_have_fewer_batches():
    """Five batches in steps of two: the fifth alone, at its full weight."""
    run = run_of(batch_size=8, accumulate=2, optimizer="sgd", momentum=0.0, clip=None, lr=0.1)
    images = batches(run, count=40)
    found = trained(run, train=images)
    assert found.step == 3
    by_hand = state_of(run)
    objective = Classification(PREPROCESSING, Augmentation(), 3)
    groups = [[0, 1], [2, 3], [4]]
    parts = list(images.epoch(0))
    for group in groups:
        (sum(objective(by_hand.model, parts[i])[0] for i in group) / len(group)).backward()
        by_hand.optimizer.set_lr(0.1)
        by_hand.optimizer.step()
    assert close(found.model, by_hand.model)


def test_clip_bounds_the_step():
    before = state_of(run_of())
    for clip in (0.01, 0.001):
        run = run_of(optimizer="sgd", momentum=0.0, lr=1.0, clip=clip, batch_size=24)
        moved = [a - b for a, b in zip(trained(run).model.parameters(), before.model.parameters(), strict=True)]
        assert torch.cat([m.detach().flatten() for m in moved]).norm().item() == pytest.approx(clip, rel=1e-3)
    assert close(trained(run_of(clip=0.0)).model, trained(run_of(clip=None)).model, 0)


def test_checkpointing_changes_nothing_but_memory():
    config = dataclasses.replace(CONFIG, dropout=0.2, drop_path=0.3)
    plain, saving = (run_of(checkpointing=on, epochs=2) for on in (False, True))
    a, b = (trained(run, state_of(run, config)) for run in (plain, saving))
    assert a.history[-1]["train_loss"] == pytest.approx(b.history[-1]["train_loss"], rel=1e-6)
    assert close(a.model, b.model)


STEMMED = dataclasses.replace(CONFIG, conv_stem=((4, 2), (6, 2)))


def numbers(model: torch.nn.Module) -> list[torch.Tensor]:
    """Weights and running statistics of norms."""
    return [value for value in model.state_dict().values() if value.is_floating_point()]


@pytest.mark.parametrize("config", [CONFIG, STEMMED], ids=["plain", "with batch norms"])
def test_the_average_follows_the_formula_and_is_validated(config):
    run = run_of(ema=0.95, epochs=2)
    state = state_of(run, config)
    steps: list[list[torch.Tensor]] = []
    original = state.optimizer.step

    def step() -> None:
        original()
        steps.append([value.clone() for value in numbers(state.model)])

    state.optimizer.step = step  # type: ignore[method-assign]
    seen = []
    trained(run, state, validate=lambda model: seen.append(model) or {"val_loss": 1.0, "val_accuracy": 0.5})
    mean = steps[0]
    for number, weights in enumerate(steps[1:], start=2):
        decay = min(0.95, (1 + number) / (10 + number))
        mean = [decay * m + (1 - decay) * w for m, w in zip(mean, weights, strict=True)]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(mean, numbers(state.evaluated), strict=True))
    assert seen == [state.averaged.module] * 2
    assert not close(state.evaluated, state.model, 1e-5)


def test_best_is_the_highest_accuracy_then_the_lowest_loss():
    scores = [(0.5, 1.0), (0.7, 0.9), (0.7, 0.8), (0.7, 0.85), (0.6, 0.1), (0.7, 0.8)]
    results = iter([{"val_accuracy": a, "val_loss": loss} for a, loss in scores])
    saved = []
    run = run_of(epochs=6, batch_size=24)
    state = trained(run, validate=lambda model: next(results), save=lambda state, best, must: saved.append(best))
    assert saved == [True, True, True, False, False, True]
    assert state.best["epoch"] == 6


def test_the_last_epoch_is_kept_if_the_run_says_so():
    """Early stopping goes on comparing, and no epoch is called the best."""
    accuracies = iter([0.3, 0.5, 0.4, 0.4, 0.4, 0.9])
    saved = []
    state = trained(
        run_of(epochs=6, batch_size=24, early_stop=2, keep="last"),
        validate=lambda model: {"val_accuracy": next(accuracies), "val_loss": 1.0},
        save=lambda state, best, must: saved.append(best),
    )
    assert saved == [True] * 4
    assert (state.epoch, state.best["epoch"]) == (4, 4)


def test_without_validation_the_last_epoch_is_kept():
    saved = []
    trained(run_of(epochs=3, batch_size=24), save=lambda state, best, must: saved.append(best))
    assert saved == [True, True, True]


def test_early_stopping_waits_for_its_patience():
    accuracies = iter([0.3, 0.5, 0.4, 0.4, 0.4, 0.9])
    run = run_of(epochs=6, batch_size=24, early_stop=2)
    state = trained(run, validate=lambda model: {"val_accuracy": next(accuracies), "val_loss": 1.0})
    assert (state.epoch, state.best["epoch"]) == (4, 2)


def test_early_stopping_stops_at_ties():
    """A lower loss keeps later weights, but is no better accuracy."""
    losses = iter([0.5, 0.4, 0.3, 0.2, 0.1, 0.05])
    run = run_of(epochs=6, batch_size=24, early_stop=3)
    state = trained(run, validate=lambda model: {"val_accuracy": 1.0, "val_loss": next(losses)})
    assert (state.epoch, state.best["epoch"]) == (4, 4)


def test_early_stopping_needs_validation():
    assert trained(run_of(epochs=4, batch_size=24, early_stop=1)).epoch == 4


def test_the_line_of_an_epoch():
    run = run_of(epochs=2, accumulate=2, schedule="cosine", lr=0.02)
    state = trained(run, validate=lambda model: {"val_loss": 0.25, "val_accuracy": 0.75})
    line = state.history[1]
    learned = ["epoch", "step", "images_seen", "train_loss", "train_accuracy", "gradient_norm", "lr"]
    assert set(line) == {*learned, "val_loss", "val_accuracy", "images_per_second", "waited", "seconds"}
    assert (line["epoch"], line["step"], line["images_seen"]) == (2, 4, 48)
    assert (line["val_loss"], line["val_accuracy"]) == (0.25, 0.75)
    assert 0 < line["lr"] < state.history[0]["lr"] < 0.02
    assert line["seconds"] > 0
    assert state.seconds == pytest.approx(sum(one["seconds"] for one in state.history))


def test_train_loss_is_the_mean_over_images():
    losses = iter([1.0, 2.0, 6.0])

    def objective(model, batch):
        loss = next(iter(model.parameters())).sum() * 0 + next(losses)
        return loss, {"odd": loss.detach() + 1}

    line = trained(run_of(), objective=objective).history[0]
    assert line["train_loss"] == pytest.approx(3.0)
    assert line["odd"] == pytest.approx(4.0)


def failing_at(number: int, loss: Any) -> Any:
    real, count = Classification(PREPROCESSING, Augmentation(), 3), iter(range(99))

    def objective(model, batch):
        value, metrics = real(model, batch)
        return (loss(value) if next(count) == number else value), metrics

    return objective


@pytest.mark.parametrize(
    ("what", "options"),
    [(lambda v: v * float("nan"), {}), (lambda v: v * float("inf"), {}), (lambda v: (v * 1e30) ** 2, {"clip": 0.0})],
)
def test_a_loss_that_is_not_finite_stops_before_the_step(what, options):
    run = run_of(**options)
    state = state_of(run)
    with pytest.raises(TrainingError, match=r"the loss is (nan|inf) in epoch 1; stopped before the step") as caught:
        trained(run, state, objective=failing_at(1, what))
    assert state.step == 1
    assert all(p.isfinite().all() for p in state.model.parameters())
    order = batches(run).order(0)[8:16]
    assert ", ".join(f"p{i}.png" for i in order[:5]) + " and 3 more" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 5


def test_a_gradient_that_is_not_finite_stops_before_the_step():
    state = state_of(run_of())
    with pytest.raises(TrainingError, match="the gradient is nan"):
        trained(run_of(), state, objective=failing_at(1, lambda v: v + 0 * (v - v.detach()).sqrt()))
    assert state.step == 1
    assert all(p.isfinite().all() for p in state.model.parameters())


def test_weights_broken_by_the_last_step_are_not_saved():
    """The loss is finite at every step, so only the weights reveal it."""
    saved = []
    with pytest.raises(TrainingError, match="no longer finite in epoch 2") as caught:
        trained(
            run_of(epochs=2, clip=None),
            save=lambda state, best, must: saved.append(state.epoch),
            objective=failing_at(5, lambda v: v + 0 * (v - v.detach()).sqrt()),
        )
    assert saved == [1]
    assert len(str(caught.value).splitlines()) <= 5


def test_the_listener_is_called():
    calls: list[Any] = []

    class Recorder(Callback):
        def on_epoch_start(self, epoch, batches, done):
            calls.append(("start", epoch, batches, done))

        def on_batch(self, loss):
            calls.append(loss.ndim)

        def on_epoch_end(self, line, best):
            calls.append(("end", line["epoch"], best))

    trained(run_of(epochs=2), listener=Recorder())
    assert calls == [("start", 0, 3, 0), 0, 0, 0, ("end", 1, True), ("start", 1, 3, 0), 0, 0, 0, ("end", 2, True)]


@pytest.mark.parametrize(
    ("seconds", "share", "hints"),
    [((3.0, 1.0), 0.75, 1), ((0.0, 4.0), 0.0, 0), ((0.3, 3.7), 0.075, 0), ((0.75, 0.25), 0.75, 0)],
)
def test_waiting_for_images_is_measured_and_reported_once(monkeypatch: pytest.MonkeyPatch, seconds, share, hints):
    """By a fake clock, on which reading a batch and computing a step take `seconds`: three batches per epoch.

    An epoch of less than five seconds is not worth a word.
    """
    reading, computing = seconds
    now = [0.0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    run = run_of(epochs=2)
    images, objective = batches(run), Classification(PREPROCESSING, run.augmentation, 3)
    whole = images.epoch

    def read(*arguments: Any, **options: Any) -> Iterator[Batch]:
        for batch in whole(*arguments, **options):
            now[0] += reading
            yield batch

    def compute(model: nn.Module, batch: Batch) -> Any:
        now[0] += computing
        return objective(model, batch)

    monkeypatch.setattr(images, "epoch", read)
    screen = Console(file=io.StringIO(), width=200)
    with ConsoleListener(screen, 2) as listener:
        state = trained(run, train=images, objective=compute, listener=listener)
    assert [line["waited"] for line in state.history] == pytest.approx([share, share])
    assert [line["seconds"] for line in state.history] == pytest.approx([3 * sum(seconds)] * 2)
    text = screen.file.getvalue()
    assert len(re.findall(r"waited \d+% for images", text)) == 2 * hints
    assert text.count("training is input-bound") == hints


def test_a_state_round_trips(tmp_path):
    run = run_of(epochs=2, ema=0.9, optimizer="adamw")
    state = trained(run)
    state.save(tmp_path / "x.safetensors", {"seed": 0})
    other = state_of(dataclasses.replace(run, seed=1))
    other.load(tmp_path / "x.safetensors")
    assert close(state.model, other.model, 0)
    assert close(state.evaluated, other.evaluated, 0)
    assert (other.epoch, other.step, other.batch, other.history, other.best, other.seconds) == (
        state.epoch,
        state.step,
        state.batch,
        state.history,
        state.best,
        state.seconds,
    )


@pytest.mark.parametrize("number", STOPS)
def test_a_first_signal_waits_for_the_step_and_a_second_does_not(number):
    before, calls = signal.getsignal(number), list[str]()
    with stop_requested(lambda: calls.append("stopping")) as stopped:
        assert not stopped.is_set()
        signal.raise_signal(number)
        assert stopped.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert calls == ["stopping"]
    assert signal.getsignal(number) is before


def test_training_works_outside_the_main_thread():
    with ThreadPoolExecutor(1) as pool:
        state = pool.submit(lambda: trained(run_of())).result()
    assert close(state.model, trained(run_of()).model, 0)


def test_validation_leaves_dropout_on_for_the_next_epoch():
    run = run_of(epochs=2)
    state = state_of(run, dataclasses.replace(CONFIG, dropout=0.5))
    modes = []

    def objective(model, batch):
        modes.append(model.training)
        return Classification(PREPROCESSING, Augmentation(), 3)(model, batch)

    trained(run, state, objective=objective, validate=lambda model: model.eval() and {})
    assert modes == [True] * 6


@pytest.mark.parametrize("task", TASKS)
def test_an_epoch_shows_each_metric_of_its_task_once(task):
    figures = task_of(task).figures
    line = {"epoch": 1, "train_loss": 1.0, "images_per_second": 10.0, "seconds": 1.0}
    line |= {f"val_{key}": 0.25 + 0.125 * number for number, (key, _, _) in enumerate(figures)}
    screen = Console(file=io.StringIO(), width=200)
    with ConsoleListener(screen, 2, figures) as listener:
        listener.on_epoch_end(line, best=True)
    shown = screen.file.getvalue()
    for number, (_, title, form) in enumerate(figures):
        assert shown.count(title) == 1 == shown.count(f"val {title} {form.format(0.25 + 0.125 * number)}")
    assert shown.count(" val ") == len(figures)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


EPOCH = ["train loss 1.0000", "val loss 1.0000", "74 images/s", "2.0 s"]


@pytest.mark.parametrize(
    ("columns", "parts"),
    [
        (112, EPOCH),
        (111, [*EPOCH[:2], "2.0 s"]),
        (98, EPOCH[:2]),
        (91, EPOCH[1:2]),
        (80, EPOCH[1:2]),
        (40, EPOCH[1:2]),
    ],
)
@pytest.mark.parametrize("epoch", [1, 30])
def test_an_epochs_line_fits_the_terminal_if_it_can(epoch, columns, parts):
    """The same parts in each epoch; in a log, which is no terminal, all of them."""
    line = {"epoch": epoch, "train_loss": 1.0, "val_loss": 1.0, "val_accuracy": 0.5, "images_per_second": 74}
    for file, wanted in ((_Terminal(), parts), (io.StringIO(), EPOCH)):
        screen = Console(file=file, width=columns, force_terminal=file.isatty())
        listener = ConsoleListener(screen, 30, [("accuracy", "accuracy", "{:.2%}")])
        listener.on_epoch_end({**line, "seconds": 2}, best=True)
        shown = file.getvalue().replace("\n", "")
        assert [part for part in EPOCH if part in shown] == wanted
        assert shown.startswith(f"epoch {epoch:>2}/30  ")
        assert "val accuracy 50.00%" in shown
        assert shown.endswith(" left  best" if epoch < 30 else "  best")
