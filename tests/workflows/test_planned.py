"""The parts of a plan in a loop of one's own: they train as vitral does, and serve the habits of a loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import vitral
from running import TINY
from vitral.data.images.augmentation import Augmentation
from vitral.errors import DataError, UsageError

pytestmark = pytest.mark.python

OPTIONS: dict[str, Any] = {**TINY, "val_fraction": 0.25, "init": "none", "probe": False, "threads": 1, "clip": 0}


@pytest.fixture
def data(make_images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_images({"cat": 8, "dog": 8}, size=(8, 8))


def test_a_loop_of_the_parts_trains_as_vitral_does(data):
    plan = vitral.plan(data, **OPTIONS)
    model, batches = plan.model(), plan.loader("train")
    optimizer = plan.optimizer(model)
    schedule = plan.schedule(optimizer)
    losses = []
    for _ in range(plan.run.epochs):
        model.train()
        epoch = []
        for images, labels in batches:
            loss = plan.loss(model(images), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            epoch.append(loss.item())
        losses.append(float(np.mean(epoch)))
    run = vitral.train(data, **OPTIONS, out="run", quiet=True)
    assert losses == pytest.approx([line["train_loss"] for line in run.history], abs=1e-6)
    evaluation = vitral.evaluate(plan.predictor(model.eval()), plan.data, split="val")
    assert evaluation.accuracy == run.history[-1]["val_accuracy"]
    assert not list(Path("runs").glob("*"))


def test_a_plan_finds_a_learning_rate(data):
    found = vitral.plan(data, **OPTIONS).find_lr()
    assert len(found.rates) > 10
    assert found.planned == OPTIONS["lr"]
    assert not list(Path("runs").glob("*"))


def test_a_loss_that_needs_the_images_is_refused(data):
    plan = vitral.plan(data, **OPTIONS, patch_sizes=[2, 4])
    with pytest.raises(UsageError, match=r"(?s)not a function of logits and labels.*patch_sizes"):
        plan.loss(torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64))


def test_a_plan_shows_itself(data):
    plan = vitral.plan(data, **OPTIONS)
    assert repr(plan).startswith("Planned(mu/4")
    assert "<table>" in plan._repr_html_()
    assert {name: len(split) for name, split in plan.data.splits.items()} == {"train": 12, "val": 4}
    assert "epochs" in {choice.name for choice in plan.choices}
    with pytest.raises(UsageError, match="unknown option 'epoch'"):
        vitral.plan(data, epoch=3)


def test_the_schedule_warms_up_and_falls(data):
    plan = vitral.plan(data, **{**OPTIONS, "epochs": 4, "warmup": 1.0})
    optimizer = plan.optimizer(plan.model())
    schedule = plan.schedule(optimizer)
    rates = [schedule.lr]
    for _ in range(11):
        schedule.step()
        rates.append(max(group["lr"] for group in optimizer.param_groups))
    assert rates[:3] == pytest.approx([OPTIONS["lr"] * n / 3 for n in (1, 2, 3)])
    assert rates[2:] == sorted(rates[2:], reverse=True)


def test_a_loader_needs_no_plan(data):
    whole = vitral.load_data(data)
    split = whole.with_validation(0.25)
    assert len(split["val"]) == 4
    train = split.loader("train", image_size=8, batch_size=5)
    assert len(train) == 2
    first, second = [torch.cat([labels for _, labels in train]) for _ in range(2)]
    train.epoch = 0
    assert first.equal(torch.cat([labels for _, labels in train]))
    assert not first.equal(second)
    (images, labels), *_ = split.loader("val", image_size=(8, 8), batch_size=3)
    assert images.shape == (3, 3, 8, 8)
    expected = torch.from_numpy(split["val"].image(0, 3)).permute(2, 0, 1) / 255
    torch.testing.assert_close(images[0], (expected - 0.5) / 0.5)
    assert labels.tolist() == split["val"].labels[:3].tolist()
    with pytest.raises(DataError, match="no 'test' split"):
        split.loader("test")
    with pytest.raises(UsageError, match="augmentation needs shuffle=True"):
        split.loader("val", augmentation=Augmentation(flip=True))


def test_a_loader_augments_and_mixes_and_leaves_the_generator_alone(data):
    split = vitral.load_data(data)
    plain = split.loader("train", image_size=8, batch_size=8)
    mixed = split.loader("train", image_size=8, batch_size=8, augmentation=Augmentation(flip=True, mixup=0.5))
    torch.manual_seed(3)
    (images, labels), _ = mixed
    state = torch.get_rng_state()
    torch.manual_seed(3)
    assert state.equal(torch.get_rng_state())
    assert labels.shape == (8, 2)
    assert labels.sum(1).allclose(torch.ones(8))
    assert not images.equal(next(iter(plain))[0])


def test_a_module_trained_by_hand_is_evaluated_by_its_classes(data):
    whole = vitral.load_data(data).with_validation(0.25)
    model = vitral.create("mu/4", classes=2, image_size=8)
    model.blocks.requires_grad_(False)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    before = next(model.blocks.parameters()).clone()
    for images, labels in whole.loader("train", image_size=8, batch_size=4):
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert next(model.blocks.parameters()).equal(before)
    predictor = vitral.load(model.eval(), classes=whole.classes, device="cpu", precision="fp32")
    with torch.no_grad():
        right = [model(images).argmax(1) == labels for images, labels in whole.loader("val", image_size=8)]
    assert vitral.evaluate(predictor, whole, split="val").accuracy == torch.cat(right).double().mean()
