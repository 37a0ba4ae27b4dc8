"""A loss, an augmentation and a network of the user in vitral's loop; what a file can name is kept and resumed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

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
    assert "only this Python process has it" in str(why)


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
