"""`vitral pretrain --method distill` from images to weights: kept features, resuming, teachers, refusals."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

import vitral
from images import noise
from running import TINY, call_at_batch, mostly_slow, printed, recorded, same_bits, weights_of, write_teacher
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.pixel_cache import PixelCache
from vitral.errors import Interrupted, RunError, UsageError, WeightsError
from vitral.model import ForeignConfig, network
from vitral.pretraining import monitor
from vitral.pretraining.distill import FeatureTeacher
from vitral.weights import native
from vitral.weights.native import Weights
from vitral.workflows.planning import teacher as planning
from vitral.workflows.planning import throughput
from vitral.workflows.running import pretraining_page

OPTIONS: dict[str, Any] = {k: v for k, v in TINY.items() if k not in ("ema", "crop", "augment")}
OPTIONS |= {"val_fraction": 0.2, "teacher_views": 2, "lr": 2e-2}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Random images have few features to learn, a report takes longer than a run, and each test has its own cache."""
    monkeypatch.setattr(monitor, "LEAST_SPREAD", 0.0)
    monkeypatch.setattr(monitor, "LEAST_RANK", 0.0)
    monkeypatch.setattr(pretraining_page, "write_report", lambda running, result, cells: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def teacher(tmp_path: Path) -> str:
    return str(write_teacher(tmp_path))


def distill(photos: Path, out: Path, teacher: str, **options: Any) -> vitral.TrainedRun:
    return vitral.pretrain(str(photos), "distill", teacher=teacher, out=str(out), quiet=True, **{**OPTIONS, **options})


def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the images that a teacher computes from now on, in trials and in runs."""
    computed, original = [], FeatureTeacher.__call__

    def counted(self: FeatureTeacher, pixels: torch.Tensor) -> torch.Tensor:
        computed.append(len(pixels))
        return original(self, pixels)

    monkeypatch.setattr(FeatureTeacher, "__call__", counted)
    return computed


def test_kept_features_are_those_of_every_step(photos, tmp_path, teacher, monkeypatch):
    """With as many views as epochs both see the same crops; losses differ by fp16 alone."""
    kept = distill(photos, tmp_path / "kept", teacher, teacher_views=3)
    computed = calls(monkeypatch)
    own = distill(photos, tmp_path / "own", teacher, teacher_views=0)
    assert sum(computed) > 3 * 16
    for a, b in zip(recorded(kept.folder), recorded(own.folder), strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=2e-3)
        assert a["feature_loss"] != b["feature_loss"], "nothing was rounded"


def test_each_crop_is_computed_once(photos, tmp_path, teacher, monkeypatch):
    distill(photos, tmp_path / "first", teacher, epochs=6)
    assert len(PixelCache().entries()) == 2
    computed = calls(monkeypatch)
    monkeypatch.setattr(planning, "seconds_of_teacher", lambda job: 0.0)
    distill(photos, tmp_path / "again", teacher, epochs=6, lr=1e-2)
    measured = 16 + 16  # deviations, on all images: when the network is built for trial steps, nothing is measured
    assert sum(computed) <= measured + 8, "the kept features were not used"
    other = write_teacher(tmp_path, dim=8)
    distill(photos, tmp_path / "other", str(other), epochs=6)
    assert len(PixelCache().entries()) == 4


@pytest.mark.parametrize("views", mostly_slow([2, 0], 2))
@pytest.mark.parametrize("cleared", [True, False])
def test_resumed_exactly_with_and_without_the_cache(photos, tmp_path, teacher, monkeypatch, views, cleared):
    options = {"drop_path": 0.2, "flip": True, "teacher_views": views, "model": "C+mu/4"}
    whole = distill(photos, tmp_path / "whole", teacher, **options)
    with monkeypatch.context() as patched:
        call_at_batch(patched, 6, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(Interrupted):
            distill(photos, tmp_path / "cut", teacher, **options)
    if cleared:
        PixelCache().clear()
    again = vitral.pretrain(out=str(tmp_path / "cut"), resume=True, quiet=True)
    assert same_bits(weights_of(whole.folder), weights_of(again.folder))
    assert recorded(whole.folder) == recorded(again.folder)


def test_stopped_while_the_teacher_computes(photos, tmp_path, teacher, monkeypatch):
    whole = distill(photos, tmp_path / "whole", teacher)
    PixelCache().clear()
    with monkeypatch.context() as patched:
        original = PixelCache.build

        def interrupted(self: PixelCache, *given: Any) -> Any:
            if self.entries():  # the first view is whole
                os.kill(os.getpid(), signal.SIGINT)
            return original(self, *given)

        patched.setattr(PixelCache, "build", interrupted)
        with pytest.raises(Interrupted):
            distill(photos, tmp_path / "cut", teacher)
    assert len(PixelCache().entries()) == 1
    again = vitral.pretrain(out=str(tmp_path / "cut"), resume=True, quiet=True)
    assert same_bits(weights_of(whole.folder), weights_of(again.folder))


def test_another_teacher_is_refused_when_a_run_resumes(photos, tmp_path, teacher, monkeypatch):
    call_at_batch(monkeypatch, 6, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Interrupted):
        distill(photos, tmp_path / "run", teacher)
    weights = native.read(Path(teacher))
    changed = {name: value + 0.01 for name, value in weights.state.items()}
    native.save(Path(teacher), dataclasses.replace(weights, state=changed))
    with pytest.raises(RunError, match="the teacher has changed"):
        vitral.pretrain(out=str(tmp_path / "run"), resume=True, quiet=True)


def test_a_network_of_another_library_teaches_and_the_run_starts_another(photos, tmp_path):
    config = ForeignConfig(source="timm:test_efficientnet", image_size=16, classes=4)
    weights = Weights(config, network(config).state_dict(), Preprocessing((16, 16)), ("a", "b", "c", "d"), {})
    native.save(tmp_path / "lite.safetensors", weights)
    run = distill(photos, tmp_path / "run", str(tmp_path / "lite.safetensors"), epochs=4)
    history = recorded(run.folder)
    assert history[-1]["feature_loss"] < history[0]["feature_loss"]
    record = json.loads((run.folder / "config.json").read_text())
    assert record["teacher"]["digest"] == native.digest(native.read(tmp_path / "lite.safetensors").state)
    tuned = {k: v for k, v in TINY.items() if k not in ("model", "dim", "depth", "heads", "mlp_dim")}
    tuned |= {"val_fraction": 0.2, "quiet": True}
    fine = vitral.train(str(photos), init=str(run.folder), out=str(tmp_path / "tuned"), **tuned)
    assert fine.result["classes"] == 2
    assert native.read(fine.folder / "model.safetensors").config.classes == 2


@pytest.mark.slow
def test_neighbors_are_found_by_what_the_teacher_knows(tmp_path):
    """A classifier of digits teaches a smaller network without labels."""
    taught = {k: v for k, v in TINY.items() if k not in ("model", "dim", "depth", "heads", "mlp_dim", "crop")}
    taught |= {"channels": 3, "batch_size": 64, "quiet": True, "lr": 1e-2}
    teacher = vitral.train("digits", model="C+Femto/2", init="none", out=str(tmp_path / "t"), **{**taught, "epochs": 6})
    assert teacher.result["val"]["accuracy"] > 0.9
    given = {k: v for k, v in taught.items() if k not in ("ema", "augment")}
    given |= {"model": "C+mu/2", "teacher": str(teacher.folder), "teacher_views": 4, "flip": False, "crop_area": 0.6}
    runs = [
        vitral.pretrain("digits", "distill", out=str(tmp_path / f"{lr}"), **{**given, "lr": lr, "epochs": epochs})
        for lr, epochs in ((0.0, 1), (1e-2, 8))
    ]
    random, learned = (run.result for run in runs)
    assert learned["train_loss"] < 0.7 * random["train_loss"]
    assert learned["knn_accuracy"] > random["knn_accuracy"] + 0.05


def timm_folder(path: Path, name: str, **config: Any) -> torch.nn.Module:
    """Write a network of timm with random weights in the layout of its hub; return it."""
    network = timm.create_model(name, num_classes=4).eval()
    path.mkdir()
    save_file(network.state_dict(), path / "model.safetensors")
    described = {"input_size": [3, 48, 48], "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.2], "crop_pct": 1.0}
    stated = {"architecture": name, "num_classes": 4, "pretrained_cfg": described, **config}
    (path / "config.json").write_text(json.dumps(stated))
    return network


def test_a_folder_of_timm_teaches_with_its_own_preprocessing(photos, tmp_path):
    """Of a network that vitral does not compute itself: timm builds it."""
    theirs = timm_folder(tmp_path / "lite", "test_efficientnet")
    predictor = vitral.load(str(tmp_path / "lite"), device="cpu")
    assert predictor.preprocessing.image_size == (48, 48)
    assert predictor.preprocessing.mean == (0.5, 0.4, 0.3)
    images = torch.stack([predictor.prepare(noise(n, (48, 48))) for n in range(2)])
    with torch.no_grad():
        expected = theirs(predictor.preprocessing.standardize(images))
    torch.testing.assert_close(predictor.logits(images), expected)
    run = distill(photos, tmp_path / "run", str(tmp_path / "lite"), epochs=1)
    assert json.loads((run.folder / "config.json").read_text())["teacher"]["reference"] == str(tmp_path / "lite")


def test_tensors_of_another_network_of_timm_are_refused(tmp_path):
    timm_folder(tmp_path / "lite", "test_efficientnet", architecture="test_resnet")
    with pytest.raises(WeightsError, match="these are not weights of timm:test_resnet"):
        vitral.load(str(tmp_path / "lite"))


@pytest.mark.parametrize("model", mostly_slow(["C+mu/4", "mu/4"], 2))
@pytest.mark.parametrize("pool", mostly_slow(["cls", "map", "mean"], 2))
def test_every_kind_of_student(photos, tmp_path, teacher, model, pool):
    run = distill(photos, tmp_path / "run", teacher, model=model, pool=pool, epochs=1)
    assert run.result["method"] == "distill"


def test_the_plan_says_what_is_kept(photos, tmp_path, teacher, capsys, monkeypatch):
    words = ["pretrain", str(photos), "--method", "distill", "--teacher", teacher, "--epochs", "9", "--device", "cpu"]
    monkeypatch.setenv("COLUMNS", "400")

    def planned(*more: str) -> str:
        return " ".join(" ".join(printed(capsys, *words, *more, "--plan-only")).split())

    out = planned()
    assert re.search(
        r"16, kept computed once for 8 crops of each image: [45] KiB in .*pixels; about .* before the first step", out
    )
    out = planned("--teacher-views", "0")
    assert "16 per image, computed in every step" in out
    assert "ms per image" in out
    monkeypatch.setattr(PixelCache, "free_bytes", property(lambda self: 100))
    assert re.search(
        r"16 per image, computed in every step [45] KiB needed, 0 KiB free in .*; .* ms per image", planned()
    )
    _, err = printed(capsys, *words, "--teacher-views", "8", "--plan-only", code=2)
    assert "the teacher's features cannot be kept" in err
    assert "try: --teacher-views 0" in err


def test_minutes_count_the_teacher():
    """Seconds, those of an epoch, those of the teacher for a view, and the views."""
    assert throughput._epochs(100.0, 1.0, 0.0, 0) == 100
    assert throughput._epochs(100.0, 1.0, 20.0, 2) == 60
    assert throughput._epochs(40.0, 1.0, 22.4, 2) == 1, "two views would take 47 s"


def test_no_room_for_the_features_stops_the_run(photos, tmp_path, teacher, monkeypatch):
    monkeypatch.setattr(PixelCache, "build", refusing(PixelCache.build))
    with pytest.raises(RunError, match="features cannot be kept") as refused:
        distill(photos, tmp_path / "run", teacher)
    assert "--teacher-views 0" in str(refused.value.hint)


def refusing(build: Any) -> Any:
    """Make a cache whose disk is full."""

    def built(self: PixelCache, *given: Any) -> Any:
        builder = build(self, *given)
        builder.failure = "the cache cannot be written: No space left on device"
        return builder

    return built


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop": "shift"}, "--method distill does not support --crop"),
        ({"prototypes": 8}, "--method distill does not support --prototypes"),
        ({"compile": True}, "--method distill does not support --compile"),
        ({"model": "timm:test_vit"}, "timm:test_vit cannot be pretrained"),
        ({"teacher": "no-such-run"}, "no such run or weights"),
    ],
)
def test_refusals(photos, tmp_path, teacher, options, message):
    given = {"teacher": teacher, **options}
    with pytest.raises(vitral.errors.VitralError, match=message):
        distill(photos, tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_logits_need_classes(photos, tmp_path, monkeypatch):
    weights = native.read(write_teacher(tmp_path))
    state = {name: value for name, value in weights.state.items() if not name.startswith("head")}
    config = dataclasses.replace(weights.config, classes=0)
    native.save(tmp_path / "plain.safetensors", dataclasses.replace(weights, config=config, state=state, classes=()))
    run = distill(photos, tmp_path / "run", str(tmp_path / "plain.safetensors"), epochs=1)
    assert "logit_loss" not in recorded(run.folder)[0]
    with pytest.raises(UsageError, match="--distill-weight has no effect"):
        distill(photos, tmp_path / "b", str(tmp_path / "plain.safetensors"), distill_weight=0.5)


def test_a_network_that_reads_text_cannot_teach(photos, tmp_path, monkeypatch):
    from vitral.workflows.planning import network as planned

    original = planned.read

    def read(*given: Any, **more: Any) -> Any:
        loaded = original(*given, **more)
        monkeypatch.setattr(planned, "EncoderDecoderConfig", type(loaded.weights.config))
        return loaded

    monkeypatch.setattr(planned, "read", read)
    with pytest.raises(UsageError, match="this network cannot teach"):
        distill(photos, tmp_path / "run", str(write_teacher(tmp_path)))
