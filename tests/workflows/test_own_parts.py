"""A loss, an augmentation and a network of the user in vitral's loop; what a file can name is kept and resumed."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler
from torchvision.transforms import v2

import vitral
from running import TINY
from vitral.cli.main import main
from vitral.errors import UsageError
from vitral.model import own
from vitral.training.callbacks import Callback, RunStart

pytestmark = pytest.mark.python

OPTIONS = {name: TINY[name] for name in ("epochs", "lr", "device", "precision", "ema")} | {
    "image_size": 16,
    "batch_size": 8,
    "val_fraction": 0.25,
    "quiet": True,
    "init": "none",
    "model": "mu/4",
    "label_smoothing": 0.0,
    "mixup": 0.0,
    "crop": "none",
    "probe": False,
    "threads": 1,
}

CODE = """
import torch.nn.functional as F
calls = []

def focal(logits, labels):
    each = F.cross_entropy(logits, labels, reduction="none")
    calls.append(len(labels))
    return (1 - (-each).exp()) ** 2 * each

def dark(image):
    return image // 2
"""


@pytest.fixture
def data(make_images, tmp_path, monkeypatch) -> Path:
    """A folder of two classes, beside a module of the user, in which the test runs."""
    (tmp_path / "own_parts_of_a_user.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_parts_of_a_user", raising=False)
    monkeypatch.setattr(own, "_here", {})
    own._made.cache_clear()
    return make_images({"cat": 8, "dog": 8}, size=(16, 16))


def train(data: Path, **options: Any) -> vitral.TrainedRun:
    return vitral.train(data, **{**OPTIONS, "out": "run", **options})


def config(run: vitral.TrainedRun) -> dict[str, Any]:
    return json.loads((run.folder / "config.json").read_text())


def test_a_loss_is_called_with_logits_and_labels(data):
    shapes = set()

    def loss(logits, labels):
        shapes.add((logits.shape[1], labels.dtype, labels.ndim))
        return F.cross_entropy(logits, labels)

    own_run, plain = train(data, loss=loss), train(data, out="plain")
    assert shapes == {(2, torch.int64, 1)}
    assert own_run.result["val"]["accuracy"] == plain.result["val"]["accuracy"]
    assert config(own_run)["run"]["loss"] == "here:loss_loss"
    why = next(one for one in config(own_run)["plan"] if "your loss" in str(one))
    assert "it exists only in this Python process" in str(why)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss])
def test_a_loss_of_torch_is_taken(data, loss):
    assert train(data, loss=loss, epochs=1).result["epochs"] == 1


def test_an_importable_loss_is_kept_by_its_name(data):
    import own_parts_of_a_user as parts

    run = train(data, loss=parts.focal, epochs=1)
    assert config(run)["run"]["loss"] == "own_parts_of_a_user:focal"
    assert sum(parts.calls) == 8
    words = ["train", str(data), "--loss", "own_parts_of_a_user:focal", "--augment", "own_parts_of_a_user:dark"]
    words += ["--model", "mu/4", "--image-size", "16", "--epochs", "1", "--init", "none", "--out", "shell", "--quiet"]
    assert main([*words, "--threads", "1"]) == 0
    assert sum(parts.calls) > 8


class Stop(Callback):
    def on_epoch_end(self, line, best):
        raise RuntimeError("stopped here")


def test_a_run_with_a_loss_of_this_process_asks_for_it_to_resume(data, monkeypatch):
    def loss(logits, labels):
        return F.cross_entropy(logits, labels)

    with pytest.raises(RuntimeError, match="stopped here"):
        train(data, loss=loss, callbacks=[Stop()])
    monkeypatch.setattr(own, "_here", {})  # another process
    with pytest.raises(UsageError, match=r"(?s)needs your loss again.*resume=True, loss=…"):
        vitral.train(out="run", resume=True, quiet=True)
    assert vitral.train(out="run", resume=True, quiet=True, loss=loss).result["epochs"] == OPTIONS["epochs"]


def test_a_loss_that_cannot_be_used_says_why(data):
    with pytest.raises(UsageError, match=r"(?s)your loss makes no loss of outputs \(.*it returned a float"):
        train(data, loss=lambda logits, labels: 1.0)
    with pytest.raises(UsageError, match=r"(?s)your loss cannot compute outputs .*has no attribute|missing|takes"):
        train(data, loss=lambda logits: logits.sum(), out="other")
    with pytest.raises(UsageError, match="label_smoothing has no effect with a loss of your own"):
        train(data, loss=F.cross_entropy, label_smoothing=0.1, out="third")


class Scaled(nn.Module):
    """Cross-entropy at a temperature that is a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, logits, labels):
        return F.cross_entropy(logits * self.scale, labels)


def test_a_loss_with_parameters_to_train_is_refused(data):
    with pytest.raises(UsageError, match=r"(?s)your loss has parameters to train: scale.*requires_grad_\(False\)"):
        train(data, loss=Scaled())
    fixed = Scaled().requires_grad_(False)
    assert train(data, loss=fixed, epochs=1).result["epochs"] == 1


class Sharp:
    def __init__(self, power):
        self.power = power

    def __call__(self, logits, labels):
        return F.cross_entropy(logits * self.power, labels)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": nn.BCEWithLogitsLoss()}, r"(?s)your loss cannot compute outputs.*F.one_hot\(targets, 2\)"),
        ({"loss": Sharp}, r"(?s)class that needs arguments.*power.*loss=Sharp\(…\)"),
        ({"loss": "focal"}, r"(?s)unknown choice.*pass a function of yours"),
        ({"augment": [v2.RandomHorizontalFlip()]}, r"(?s)augment cannot be a list of functions.*v2.Compose"),
        ({"augment": v2.RandomResizedCrop(8)}, r"(?s)it made uint8 \(3, 8, 8\).*crop to 16 × 16 pixels"),
        ({"augment": lambda image: None}, r"(?s)it made a NoneType of an image.*return the changed image"),
        ({"augment": v2.ToDtype(torch.float32)}, r"(?s)it made float32.*leave out the conversion"),
        ({"metrics": [lambda o, t: 1.0, lambda o, t: 2.0]}, r"(?s)two metrics are called lambda.*metrics=\{"),
        (
            {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])},
            r"(?s)must be a class or a function.*lambda groups",
        ),
        ({"sampling": np.ones(8)}, r"(?s)unknown choice.*pass a function of yours"),
        ({"sampling": BatchSampler(range(4), 2, False)}, r"(?s)the number of an image at a time.*a list"),
    ],
)
def test_parts_that_do_not_fit_say_what_to_pass(data, options, message):
    with pytest.raises(UsageError, match=message):
        train(data, **options)


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(()).item()])
def test_random_numbers_of_an_augmentation_repeat_with_the_seed(data, draw):
    found = []

    def augment(image):
        found.append(draw())
        return image

    before = random.getstate(), np.random.get_state()[1].tolist()
    train(data, augment=augment, epochs=1)
    first = found[:]
    found.clear()
    train(data, augment=augment, epochs=1, out="again")
    assert found == first
    assert len(set(found)) == len(found) > 4
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_an_augmentation_gets_each_image(data):
    seen = []

    def augment(image):
        seen.append((tuple(image.shape), image.dtype))
        return image.flip(-1)

    train(data, augment=augment, epochs=1)
    assert len(seen) == 8  # the rest does not fill a batch
    assert set(seen) == {((3, 16, 16), torch.uint8)}
    with pytest.raises(UsageError, match=r"(?s)your augment must keep .*float32.*leave out the conversion"):
        train(data, augment=lambda image: image / 255, out="floats")


def test_a_transform_of_torchvision_is_taken(data):
    from torchvision.transforms import v2

    run = train(data, augment=v2.Compose([v2.RandomHorizontalFlip(), v2.ColorJitter(0.2)]), epochs=1)
    assert config(run)["run"]["augment"] == "here:augment_Compose"


def test_a_module_is_trained_from_its_own_weights(data):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    run = train(data, model=module, lr=0.0, weight_decay=0.0, ema=0.0, epochs=1)
    after = run.predictor.model.body.state_dict()
    assert all(after[name].equal(value) for name, value in before.items())
    assert vitral.evaluate(run.predictor, data).images == 16


def test_a_callback_has_the_network_and_thaws_it(data):
    class Thaw(Callback):
        def on_run_start(self, run: RunStart) -> None:
            self.blocks = run.model.blocks.requires_grad_(False)
            self.first = next(self.blocks.parameters())
            self.values = [self.first.detach().clone()]

        def on_epoch_end(self, line, best):
            self.values.append(self.first.detach().clone())
            self.blocks.requires_grad_(True)

    thaw = Thaw()
    train(data, callbacks=[thaw], epochs=2)
    start, frozen, trained = thaw.values
    assert start.equal(frozen)
    assert not frozen.equal(trained)


def test_two_lambdas_of_one_module_have_two_names(data):
    first = train(data, loss=lambda logits, labels: F.cross_entropy(logits, labels), epochs=1)
    second = train(data, loss=lambda logits, labels: 2 * F.cross_entropy(logits, labels), epochs=1, out="second")
    names = [config(run)["run"]["loss"] for run in (first, second)]
    assert names[1] == f"{names[0]}.2"
    one, two = (own.own_part("loss", name) for name in names)
    logits, labels = torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)
    assert 2 * one(logits, labels) == two(logits, labels)


def test_the_second_of_two_lambdas_resumes_in_another_process(data, monkeypatch):
    train(data, loss=lambda logits, labels: F.cross_entropy(logits, labels), epochs=1, out="first")
    calls = []

    def resumed(logits, labels):
        calls.append(len(labels))
        return F.cross_entropy(logits, labels)

    resumed.__qualname__ = "<lambda>"
    with pytest.raises(RuntimeError, match="stopped here"):
        train(data, loss=lambda logits, labels: F.cross_entropy(logits, labels), callbacks=[Stop()])
    monkeypatch.setattr(own, "_here", {})  # another process
    vitral.train(out="run", resume=True, quiet=True, loss=resumed)
    assert calls


def weights(run: vitral.TrainedRun) -> dict[str, torch.Tensor]:
    return run.predictor.model.state_dict()


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.SGD, lambda groups: torch.optim.SGD([p for group in groups for p in group["params"]], lr=5e-3)],
)
def test_an_optimizer_of_torch_trains_as_vitrals_own(data, optimizer):
    """The lambda puts all parameters into one group; without momentum and weight decay nothing else differs."""
    own_run = train(data, optimizer=optimizer, weight_decay=0.0, clip=0)
    plain = train(data, optimizer="sgd", weight_decay=0.0, clip=0, out="plain", momentum=0.0)
    assert config(own_run)["run"]["lr"] == OPTIONS["lr"] == 5e-3
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(own_run)[name], value, rtol=0, atol=1e-6)


def test_the_rates_of_an_optimizer_are_its_own_unless_stated(data):
    groups_seen = []

    def optimizer(groups):
        groups_seen.append(groups)
        return torch.optim.SGD(groups, lr=0.25, momentum=0.9, weight_decay=0.125)

    options = {name: value for name, value in OPTIONS.items() if name != "lr"}
    run = vitral.train(data, **options, out="run", optimizer=optimizer, schedule="constant", warmup=0)
    assert {name: config(run)["run"][name] for name in ("lr", "weight_decay", "lr_batch")} == {
        "lr": 0.25,
        "weight_decay": 0.125,
        "lr_batch": None,
    }
    assert run.history[-1]["lr"] == 0.25
    assert {group["weight_decay"] for group in groups_seen[-1]} == {0.0, 0.125}
    stated = train(data, optimizer=optimizer, lr=0.01, schedule="constant", warmup=0, out="stated")
    assert stated.history[-1]["lr"] == 0.01
    why = [one["reason"] for one in config(run)["plan"] if one["name"] == "lr"]
    assert why == ["of your optimizer; the schedule scales it"]


def test_a_run_with_an_optimizer_resumes_with_its_state(data, monkeypatch):
    def optimizer(groups):
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)

    whole = train(data, optimizer=optimizer, out="whole")
    with pytest.raises(RuntimeError, match="stopped here"):
        train(data, optimizer=optimizer, callbacks=[Stop()])
    monkeypatch.setattr(own, "_here", {})
    with pytest.raises(UsageError, match="needs your optimizer again"):
        vitral.train(out="run", resume=True, quiet=True)
    again = vitral.train(out="run", resume=True, quiet=True, optimizer=optimizer)
    assert all(weights(again)[name].equal(value) for name, value in weights(whole).items())


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda groups: 3, "not a torch.optim.Optimizer"),
        (lambda groups: torch.optim.SGD(groups[:1], lr=0.1), r"(?s)leaves parameters out.*freeze keeps"),
        (lambda params, rate: None, "cannot be made of parameter groups"),
        (lambda groups: torch.optim.LBFGS([p for g in groups for p in g["params"]]), "cannot take a step"),
    ],
)
def test_an_optimizer_that_cannot_be_used_says_why(data, optimizer, said):
    with pytest.raises(UsageError, match=said):
        train(data, optimizer=optimizer)


def test_an_option_that_an_optimizer_would_not_follow_is_an_error(data):
    with pytest.raises(UsageError, match="beta2 has no effect with an optimizer of your own"):
        train(data, optimizer=torch.optim.SGD, beta2=0.9)
    with pytest.raises(UsageError, match="unknown optimizer 'sdg'"):
        train(data, optimizer="sdg")


@pytest.mark.report
def test_metrics_are_measured_on_validation_images(data):
    def correct(logits, targets):
        return (logits.argmax(1) == targets).sum()

    run = train(data, metrics={"correct": correct, "nothing": lambda logits, targets: float("nan")})
    images = run.result["images"]["val"]
    for line in run.history:
        assert line["val_correct"] == line["val_accuracy"] * images
        assert "val_nothing" not in line
    assert run.result["val_correct"] == run.result["val_accuracy"] * images
    assert "validation correct" in run.report().path.read_text()
    assert [one["name"] for one in config(run)["plan"] if one["name"].startswith("your")] == [
        "your metric correct",
        "your metric nothing",
    ]


def test_metrics_are_resumed_and_refused_by_name(data, monkeypatch):
    def wrong(logits, targets):
        return (logits.argmax(1) != targets).double().mean()

    with pytest.raises(RuntimeError, match="stopped here"):
        train(data, metrics=[wrong], callbacks=[Stop()])
    monkeypatch.setattr(own, "_here", {})
    with pytest.raises(UsageError, match="needs your metrics again"):
        vitral.train(out="run", resume=True, quiet=True)
    run = vitral.train(out="run", resume=True, quiet=True, metrics=[wrong])
    assert all("val_wrong" in line for line in run.history)
    with pytest.raises(UsageError, match="a metric is called accuracy already"):
        train(data, metrics={"accuracy": wrong}, out="second")
    with pytest.raises(UsageError, match=r"your metric bad makes no number of outputs \(4, 2\) and targets \(4,\)"):
        train(data, metrics={"bad": lambda logits, targets: logits}, out="third")
    with pytest.raises(UsageError, match="the metric f1 is a str, not a function"):
        train(data, metrics={"f1": "macro"}, out="fourth")


def test_the_shell_has_metrics_and_sampling_and_optimizers(data):
    more = """
import torch

def hits(logits, targets):
    return float((logits.argmax(1) == targets).sum())

def cats(labels):
    return (labels == 0).astype(float)

def sgd(groups):
    return torch.optim.SGD(groups, lr=0.05)
"""
    Path("more_parts_of_a_user.py").write_text(more)
    words = [
        "train",
        str(data),
        "--metrics",
        "hits=more_parts_of_a_user:hits",
        "--optimizer",
        "more_parts_of_a_user:sgd",
    ]
    words += ["--sampling", "more_parts_of_a_user:cats", "--model", "mu/4", "--image-size", "16", "--epochs", "1"]
    assert main([*words, "--init", "none", "--out", "shell", "--quiet", "--threads", "1"]) == 0
    assert "val_hits" in vitral.TrainedRun.read("shell").history[0]


class Labels(Callback):
    """Collect the labels of each batch of training."""

    def on_run_start(self, run: RunStart) -> None:
        self.seen: list[int] = []

    def on_logits(self, batch: Any, logits: torch.Tensor) -> None:
        self.seen += batch.labels.tolist()


def test_sampling_by_weights_of_the_labels(data):
    labels = Labels()
    train(data, sampling=lambda labels: labels == 1, callbacks=[labels], epochs=2, batch_size=4)
    assert len(labels.seen) == 24
    assert set(labels.seen) == {1}


def test_a_sampler_of_torch_sets_the_length_of_an_epoch(data):
    from torch.utils.data import WeightedRandomSampler

    labels = Labels()
    sampler = lambda labels: WeightedRandomSampler((labels == 0).astype(float), 20)  # noqa: E731
    run = train(data, sampler=sampler, callbacks=[labels], epochs=1, batch_size=4)
    assert labels.seen == [0] * 20
    assert run.history[0]["images_seen"] == 20
    with pytest.raises(UsageError, match=r"(?s)your sampler draws image \d+.*there are 12 training images"):
        train(data, sampler=torch.utils.data.RandomSampler(range(16)), out="second")
    with pytest.raises(UsageError, match="your sampling makes no weights"):
        train(data, sampling=lambda labels: -labels, out="third")


def test_a_sampler_draws_the_same_images_again(data):
    from torch.utils.data import RandomSampler

    first, again = Labels(), Labels()
    for out, seen in (("one", first), ("two", again)):
        train(data, sampler=lambda labels: RandomSampler(labels), callbacks=[seen], out=out, batch_size=4)
    assert first.seen == again.seen
    assert first.seen[:12] != first.seen[12:24]


def test_transform_is_another_word_for_augment(data):
    from torchvision.transforms import v2

    run = train(data, transform=v2.RandomHorizontalFlip(), epochs=1)
    assert config(run)["run"]["augment"] == "here:augment_RandomHorizontalFlip"
    with pytest.raises(UsageError, match="transform= and augment= are the same option"):
        train(data, transform=v2.RandomHorizontalFlip(), augment="none", out="second")
    with pytest.raises(
        UsageError, match=r"(?s)your augment fails for an image uint8 \(3, 16, 16\).*torchvision.transforms.v2"
    ):
        train(data, transform=lambda image: image.convert("L"), out="third")


class Albumentation:
    """The interface of a transform of albumentations: arrays (H, W, C) by keyword, and a generator of its own."""

    def __init__(self, change):
        self.change, self.draw = change, random.Random()

    def set_random_seed(self, seed):
        self.draw.seed(seed)

    def __call__(self, *, image):
        assert image.shape == (16, 16, 3)
        return {"image": self.change(image, self.draw.random())}


Albumentation.__module__ = "albumentations.of.a.test"


@pytest.mark.parametrize(
    "change",
    [
        lambda image, drawn: (image * drawn).astype(np.uint8),
        lambda image, drawn: torch.from_numpy((image * drawn).astype(np.uint8)).permute(2, 0, 1),
    ],
    ids=["array", "tensor"],
)
def test_a_transform_of_albumentations_repeats_with_the_seed(data, change):
    first, again = (train(data, augment=Albumentation(change), out=out).history[-1] for out in ("run", "again"))
    assert first["train_loss"] == again["train_loss"]
    assert first["train_loss"] != train(data, augment="none", out="plain").history[-1]["train_loss"]
