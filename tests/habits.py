"""Habits of people who come from other libraries, tried with vitral: `python -m tests.habits` prints which work.

Each habit comes from the documentation of a library, in our own words. It works as written, with one word changed, or
not at all. The code finds `photos` (a folder), `image` (a file), `run` (a finished run), `X` and `y` (arrays), `pairs`
(a torch Dataset), `hf` (the interface of a Hugging Face data set), `rows` (paths and labels by column), and `small`,
options of a tiny run.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

import vitral


@dataclass(frozen=True)
class Habit:
    """A few lines that a person types, and the one word that may be changed."""

    library: str
    title: str
    code: str
    changed: tuple[str, str] | None = None
    """A word of the code, and the word of vitral."""


TIMM, TRANSFORMERS, FASTAI = "timm", "transformers", "fastai"
LIGHTNING, ULTRALYTICS, SCIKIT_LEARN = "Lightning", "Ultralytics", "scikit-learn"

HABITS = (
    Habit(
        TIMM,
        "a network by name with a number of classes",
        "vitral.create('Ti/16', num_classes=3)",
        ("num_classes", "classes"),
    ),
    Habit(TIMM, "the width of the features", "assert vitral.create('mu/4', classes=3).num_features > 0"),
    Habit(
        TIMM,
        "another classifier",
        """
model = vitral.create('mu/4', classes=3, image_size=8)
model.reset_classifier(5)
assert model(torch.zeros(1, 3, 8, 8)).shape == (1, 5)""",
    ),
    Habit(
        TIMM,
        "tokens before the head",
        "vitral.create('mu/4', image_size=8).forward_features(torch.zeros(1, 3, 8, 8))",
        ("forward_features", "encode"),
    ),
    Habit(
        TIMM,
        "maps after inner layers",
        """
maps = vitral.create('mu/4', image_size=8).forward_intermediates(torch.zeros(1, 3, 8, 8), [0, -1])
assert [tuple(one.shape[2:]) for one in maps] == [(2, 2), (2, 2)]""",
        ("forward_intermediates", "features"),
    ),
    Habit(
        TIMM,
        "freeze blocks, and train one's own module",
        """
model = vitral.create('mu/4', classes=2, image_size=8)
for parameter in model.blocks.parameters():
    parameter.requires_grad = False
before = {name: value.clone() for name, value in model.blocks.state_dict().items()}
vitral.train(photos, model=model, **without_shape)
assert all(model.blocks.state_dict()[name].equal(value) for name, value in before.items())""",
    ),
    Habit(
        TIMM,
        "start from weights",
        "vitral.train(photos, pretrained=run.folder, **without_init)",
        ("pretrained", "init"),
    ),
    Habit(
        TIMM,
        "a state dict to a file and back",
        """
model = vitral.create('mu/4', classes=2, image_size=8)
torch.save(model.state_dict(), 'model.pt')
vitral.create('mu/4', classes=2, image_size=8).load_state_dict(torch.load('model.pt'))""",
    ),
    Habit(
        TIMM,
        "mixup, CutMix and smoothing",
        "vitral.train(photos, mixup=0.8, cutmix=1.0, smoothing=0.1, **small)",
        ("smoothing", "label_smoothing"),
    ),
    Habit(TIMM, "layer decay and drop path", "vitral.train(photos, layer_decay=0.75, drop_path=0.1, **small)"),
    Habit(
        TRANSFORMERS,
        "metrics of one's own",
        """
def hits(logits, labels):
    return (logits.argmax(1) == labels).sum()
vitral.train(photos, compute_metrics={'hits': hits}, **small)""",
        ("compute_metrics", "metrics"),
    ),
    Habit(
        TRANSFORMERS, "a Hugging Face data set", "assert vitral.train(hf, **small).predictor.classes == ('cat', 'dog')"
    ),
    Habit(
        TRANSFORMERS,
        "an optimizer of torch",
        "vitral.train(photos, optimizer=torch.optim.SGD, **small)",
    ),
    Habit(
        TRANSFORMERS, "the learning rate", "vitral.train(photos, learning_rate=1e-3, **small)", ("learning_rate", "lr")
    ),
    Habit(
        TRANSFORMERS,
        "accumulate gradients",
        "vitral.train(photos, gradient_accumulation_steps=2, **small)",
        ("gradient_accumulation_steps", "accumulate"),
    ),
    Habit(TRANSFORMERS, "a folder that transformers opens", "vitral.convert(run.folder, 'hf-folder', 'hf')"),
    Habit(TRANSFORMERS, "a prediction of one image", "assert len(vitral.load(run.folder)(image).top(2)) == 2"),
    Habit(
        TRANSFORMERS,
        "go on after a crash",
        """
class Crash(Callback):
    def on_epoch_end(self, line, best):
        raise RuntimeError
try:
    vitral.train(photos, callbacks=[Crash()], **{**small, 'epochs': 2})
except RuntimeError:
    pass
assert vitral.train(out=small['out'], resume_from_checkpoint=True, quiet=True).result['epochs'] == 2""",
        ("resume_from_checkpoint", "resume"),
    ),
    Habit(FASTAI, "a DataFrame of paths and labels", "vitral.train(pandas.DataFrame(rows), **small)"),
    Habit(
        FASTAI,
        "a list of metrics",
        """
def hits(logits, labels):
    return (logits.argmax(1) == labels).sum()
assert 'val_hits' in vitral.train(photos, metrics=[hits], **small).history[0]""",
    ),
    Habit(
        FASTAI,
        "an optimizer with its options",
        "vitral.train(photos, opt_func=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), **small)",
        ("opt_func", "optimizer"),
    ),
    Habit(
        FASTAI,
        "a loss of torch",
        "vitral.train(photos, loss_func=nn.CrossEntropyLoss(), **small)",
        ("loss_func", "loss"),
    ),
    Habit(
        FASTAI,
        "unfreeze after an epoch",
        """
class Unfreeze(Callback):
    def on_run_start(self, run):
        self.blocks = run.model.blocks.requires_grad_(False)
    def on_epoch_end(self, line, best):
        self.blocks.requires_grad_(True)
vitral.train(photos, callbacks=[Unfreeze()], **small)""",
    ),
    Habit(FASTAI, "look for a learning rate", "vitral.plan(photos, **without_quiet).lr_find()", ("lr_find", "find_lr")),
    Habit(FASTAI, "the results of each epoch as a table", "pandas.DataFrame(run.history)"),
    Habit(LIGHTNING, "a data set per split", "vitral.train({'train': pairs, 'val': pairs}, **small)"),
    Habit(
        LIGHTNING,
        "the number of epochs",
        "vitral.train(photos, max_epochs=1, **without_epochs)",
        ("max_epochs", "epochs"),
    ),
    Habit(
        LIGHTNING, "the device", "vitral.train(photos, accelerator='cpu', **without_device)", ("accelerator", "device")
    ),
    Habit(LIGHTNING, "a logger", "vitral.train(photos, logger=['csv'], **small)", ("logger", "log")),
    Habit(
        LIGHTNING,
        "batch and outputs in a callback",
        """
seen = []
class Watch(Callback):
    def on_train_batch_end(self, batch, logits):
        seen.append(logits.shape)
vitral.train(photos, callbacks=[Watch()], **small)
assert seen""",
        ("on_train_batch_end", "on_logits"),
    ),
    Habit(
        LIGHTNING,
        "a loop of one's own with the library's parts",
        """
plan = vitral.plan(photos, **without_quiet)
model, batches = plan.model(), plan.loader('train')
optimizer = plan.optimizer(model)
schedule = plan.schedule(optimizer)
for images, labels in batches:
    loss = plan.loss(model(images), labels)
    loss.backward()
    optimizer.step()
    schedule.step()
vitral.evaluate(plan.predictor(model), plan.data, split='val')""",
    ),
    Habit(ULTRALYTICS, "the image size", "vitral.train(photos, imgsz=8, **without_size)", ("imgsz", "image_size")),
    Habit(ULTRALYTICS, "the accuracy of a run", "assert 0 <= vitral.evaluate(run.folder).accuracy <= 1"),
    Habit(ULTRALYTICS, "an export", "vitral.export(run.folder, 'onnx')"),
    Habit(ULTRALYTICS, "a folder of images as a table", "vitral.load(run.folder)(photos).to_frame()"),
    Habit(SCIKIT_LEARN, "arrays", "assert vitral.train((X, y), **small).predictor.classes == ('cat', 'dog')"),
    Habit(SCIKIT_LEARN, "score arrays", "assert vitral.evaluate(run.folder, (X, y)).images == len(X)"),
    Habit(
        SCIKIT_LEARN,
        "balanced classes",
        "vitral.train(photos, class_weight='balanced', **small)",
        ("class_weight", "class_weights"),
    ),
    Habit(
        "torch",
        "a sampler of torch",
        "vitral.train(photos, sampler=lambda labels: WeightedRandomSampler(labels + 1.0, 8), **small)",
    ),
    Habit("torch", "a transform of torchvision", "vitral.train(photos, transform=v2.RandomHorizontalFlip(), **small)"),
)

WORKS, ONE_WORD = "as written", "one word changed"


def tried(habit: Habit, number: int, names: dict[str, Any]) -> str:
    """Return how a habit works, or the first line of the error."""
    versions = [(habit.code, WORKS)]
    if habit.changed is not None:
        versions.append((habit.code.replace(*habit.changed), ONE_WORD))
    error: BaseException | None = None
    for code, works in versions:
        small = {**names["small"], "out": f"runs/{number}-{works.split()[0]}"}
        without = {
            f"without_{name}": {key: value for key, value in small.items() if key not in keys}
            for name, keys in _LEFT_OUT.items()
        }
        try:
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                exec(code, {**names, "small": small, **without})  # noqa: S102 - the habits above
        except Exception as raised:
            error = raised
        else:
            return works
    line = traceback.format_exception_only(error)[0].splitlines()[0]
    return f"no: {line[:100]}"


_LEFT_OUT = {
    "epochs": ("epochs",),
    "device": ("device",),
    "size": ("image_size",),
    "init": ("init",),
    "quiet": ("quiet",),
    "shape": ("model", "dim", "depth", "heads", "mlp_dim"),
}


@contextlib.contextmanager
def place(folder: Path) -> Iterator[dict[str, Any]]:
    """Change to a folder with two classes of images and a run, and yield the names that habits use."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield _names()
    finally:
        os.chdir(before)


def _names() -> dict[str, Any]:
    import functools

    import pandas
    from torch.utils.data import WeightedRandomSampler
    from torchvision.transforms import v2

    from vitral.training.callbacks import Callback

    draw = np.random.default_rng(0)
    X = draw.integers(0, 256, (16, 8, 8, 3), dtype=np.uint8)
    y = np.array(["cat", "dog"] * 8)
    files = [f"photos/{label}/{number}.png" for number, label in enumerate(y)]
    for file, pixels in zip(files, X, strict=True):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)
    shape: dict[str, Any] = {"model": "mu/4", "dim": 8, "depth": 2, "heads": 2, "mlp_dim": 8, "image_size": 8}
    small = {**shape, "epochs": 1, "device": "cpu", "val_fraction": 0.5, "batch_size": 4, "init": "none", "quiet": True}
    small |= {"probe": False, "threads": 1, "warmup": 0.0, "crop": "none"}
    with contextlib.redirect_stderr(io.StringIO()):
        run = vitral.train("photos", **small, out="runs/first")
    own = {"X": X, "y": y, "photos": "photos", "image": files[0], "run": run, "small": small}
    own |= {"rows": {"path": files, "label": y.tolist()}, "pairs": _Pairs(X, y), "hf": _HuggingFace(X, y)}
    return own | {
        "vitral": vitral,
        "torch": torch,
        "nn": nn,
        "F": F,
        "pandas": pandas,
        "functools": functools,
        "v2": v2,
        "Callback": Callback,
        "WeightedRandomSampler": WeightedRandomSampler,
    }


class _Pairs(Dataset[Any]):
    """A torch data set of images and class numbers."""

    classes = ("cat", "dog")

    def __init__(self, images: np.ndarray, labels: np.ndarray):
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images[i]), self.classes.index(self.labels[i])


class _HuggingFace(_Pairs):
    """Columns with features, and rows as dictionaries."""

    features: ClassVar[dict[str, Any]] = {
        "image": type("Image", (), {})(),
        "label": type("ClassLabel", (), {"names": ["cat", "dog"]})(),
    }
    column_names = ("image", "label")

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return [self[i][key] for i in range(len(self))]
        image, label = super().__getitem__(key)
        return {"image": image, "label": label}


def main() -> None:
    """Print a row of a table for each habit."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, place(Path(folder)) as names:
        found = [tried(habit, number, names) for number, habit in enumerate(HABITS)]
    for habit, how in zip(HABITS, found, strict=True):
        print(f"| {habit.library} | {habit.title} | {how} |")
    print(f"{found.count(WORKS)} as written, {found.count(ONE_WORD)} with one word changed, of {len(HABITS)}")


if __name__ == "__main__":
    main()
