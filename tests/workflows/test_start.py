"""`--init auto`: from which weights a run starts, and that it pays."""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import sys
import tarfile
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from huggingface_hub import HfApi, constants
from PIL import Image
from safetensors.torch import load_file, save, save_file
from tools import train_backbone

import vitral
from hub_server import FIRST, serving
from images import MakeImages
from vitral.device import Machine
from vitral.errors import UsageError, VitralError, WeightsError
from vitral.model.position import resize_matrix
from vitral.recipes.stats import DatasetStats
from vitral.recipes.table import RECIPES
from vitral.training.options import Run
from vitral.training.plan import Plan
from vitral.weights import native
from vitral.weights.load import locate, read
from vitral.weights.read import hub, published
from vitral.weights.read.published import SMALL, TINY, Published
from vitral.weights.read.references import BUILT_IN, BuiltIn, is_included
from vitral.workflows.planning.plan import find_recipe, plan_run
from vitral.workflows.planning.start import LIMIT, choose_start

STATS = DatasetStats(images=5_000, classes=5, size=(240, 320), uniform=False, channels=3, imbalance=1.0)
BACKBONE = BUILT_IN["backbone"].file
MOST_ON_GPU = BUILT_IN["backbone"].most_on_gpu or 0


def machine(kind: str = "cpu") -> Machine:
    return Machine(torch.device(kind), "fp32", "")


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache, and a hub that is not asked: published weights are taken where a test puts them."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def start(given: dict[str, Any], stats: DatasetStats = STATS, task: str = "class", kind: str = "cpu") -> str:
    """The weights of `choose_start`, or "none"."""
    return choose_start(given, task, stats, machine(kind))[0].get("init", "none")


def of(**changes: Any) -> DatasetStats:
    return DatasetStats(**{**vars(STATS), **changes})


@pytest.mark.parametrize(
    ("given", "weights"),
    [
        ({}, "backbone"),
        ({"init": "auto"}, "backbone"),
        ({"init": "none"}, "none"),
        ({"init": "runs/other"}, "runs/other"),
        ({"epochs": 3, "lr": 1e-3, "image_size": 64, "drop_path": 0.1, "flip": False}, "backbone"),
        ({"model": "C+Micro/16"}, "backbone"),
        ({"recipe": "finetune"}, "backbone"),
        ({"recipe": "linear-probe"}, "backbone"),
        ({"pack": False, "whiten": False}, "backbone"),
        ({"model": "S/16"}, "none"),
        ({"model": "mnist-7562"}, "none"),
        ({"recipe": "small"}, "none"),
        ({"recipe": "mae"}, "none"),
        ({"depth": 4}, "none"),
        ({"mean": 0.4}, "none"),
        ({"pack": True}, "none"),
        ({"patch_sizes": (8, 16)}, "none"),
    ],
)
def test_the_weights_of_a_run(given: dict[str, Any], weights: str) -> None:
    assert start(given) == weights


def test_other_images_tasks_and_machines_start_from_random_weights() -> None:
    assert start({}, of(channels=1)) == "backbone", "gray photographs and scans"
    assert start({}, of(channels=1, size=(63, 28))) == "none", "digits"
    assert start({}, of(channels=1, plain=0.5)) == "backbone"
    assert start({}, of(channels=1, plain=0.51)) == "none", "drawings"
    assert start({}, of(channels=1, size=(28, 64))) == "backbone"
    assert not RECIPES["backbone"](of(channels=1), machine()).run.flip, "there may be text"
    assert RECIPES["backbone"](STATS, machine()).run.flip
    assert start({}, task="text") == "none"
    assert start({}, task="numbers") == start({}, task="labels") == "backbone"
    assert start({}, of(images=MOST_ON_GPU), kind="cuda") == "none"
    assert start({}, of(images=MOST_ON_GPU - 1), kind="cuda") == "backbone"
    assert start({}, of(images=10 * MOST_ON_GPU)) == "backbone"


def test_another_built_in_model_is_one_entry(monkeypatch: pytest.MonkeyPatch, make_images: Any) -> None:
    scans = BuiltIn(BUILT_IN["demo"].file, "trained on scans", recipe="scans")
    monkeypatch.setitem(BUILT_IN, "scans", scans)
    monkeypatch.setitem(RECIPES, "scans", lambda stats, machine: finetuning_of_scans(stats, machine))
    gray = of(channels=1, size=(28, 28))
    init, choice = choose_start({}, "class", gray, machine())
    assert init == {"init": "scans"}
    assert choose_start({}, "class", gray, machine("cuda"))[0] == {"init": "scans"}
    assert choice is not None
    assert choice.reason.startswith("the built-in model, trained on scans; ")
    assert find_recipe(init)(gray, machine()).run.model == "C+Nano/4"
    assert start({}) == "backbone", "the first that suits color images"
    assert start({"model": "C+Nano/4"}) == "scans", "the one of that network"
    assert start({"recipe": "scans"}) == "scans"
    assert locate("scans")[0] == scans.file
    photos = make_images({"train/a": 4, "train/b": 4, "val/a": 2, "val/b": 2}, size=(20, 20))
    assert plan_run({"data": str(photos), "init": "scans", "device": "cpu"}).run.recipe == "scans"


def finetuning_of_scans(stats: DatasetStats, machine: Machine) -> Plan:
    plan = RECIPES["backbone"](stats, machine)
    return dataclasses.replace(plan, run=dataclasses.replace(plan.run, recipe="scans", model="C+Nano/4"))


def test_the_recipes_of_built_in_models_have_their_networks_and_the_help_names_them() -> None:
    help_text = str(Run.__dataclass_fields__["init"].metadata)
    for name, own in BUILT_IN.items():
        if own.recipe:
            model = RECIPES[own.recipe](STATS, machine()).run.model
            assert native.read(own.file).trained["model"] == model
            assert name in help_text


def test_every_reason_is_in_the_plan() -> None:
    def reason(given: dict[str, Any], stats: DatasetStats = STATS) -> str:
        choice = choose_start(given, "class", stats, machine())[1]
        return choice.reason if choice else ""

    assert "built-in model" in reason({})
    assert "--init timm:" in reason({})
    assert "gray and below 64 pixels" in reason({}, of(channels=1, size=(28, 28)))
    assert "gray drawings or writing" in reason({}, of(channels=1, plain=0.9))
    assert "--model S/16 is not the built-in model" in reason({"model": "S/16", "init": "auto"})
    assert reason({"model": "S/16"}) == "", "nothing was to choose"
    assert "pretrained weights usually help" in reason({"model": "S/16"}, of(images=100))
    assert reason({"init": "none"}) == "random weights, as requested"
    assert reason({"init": "runs/other"}) == "requested"
    few = of(images=100, finished_runs=("runs/other",))
    assert "--init runs/other" in reason({}, few)


def test_a_plan_starts_from_the_network_in_the_package(make_images: MakeImages) -> None:
    photos = make_images({"cat": 12, "dog": 12}, size=(160, 200))
    job = plan_run({"data": str(photos), "device": "cpu", "threads": 1})
    assert (job.run.init, job.run.recipe, job.run.model) == ("backbone", "backbone", "C+Micro/16")
    assert job.run.size == job.config.image_size == (128, 128)
    assert job.init is not None
    assert job.init.weights.state["head.weight"].eq(0).all()
    choices = {choice.name: choice for choice in job.plan.choices}
    assert choices["init"].value == "backbone"
    assert "160×200" in choices["image size"].reason
    tiny = make_images({"cat": 8, "dog": 8}, "tiny", size=(32, 32))
    small = plan_run({"data": str(tiny), "device": "cpu", "threads": 1})
    assert small.run.size == (96, 96), "a token has 16 pixels"
    stated = plan_run({"data": str(photos), "device": "cpu", "threads": 1, "image_size": (64, 96)})
    assert stated.config.image_size == (64, 96)


def files_of_small_network() -> dict[str, bytes]:
    """The files of a small network in timm's layout, by name."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=48, depth=1, num_heads=3, num_classes=5)
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": 5, "pretrained_cfg": {"input_size": [3, 32, 32]}}
    return {"config.json": json.dumps(config).encode(), "model.safetensors": save(model.state_dict())}


def cached_copy(folder: Path, reference: str) -> str:
    """Put a small network into huggingface_hub's cache under the name of published weights; its pinned reference."""
    commit = "3" * 40
    place = folder / f"models--timm--{reference.removeprefix('timm:')}"
    (place / "snapshots" / commit).mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    for name, data in files_of_small_network().items():
        (place / "snapshots" / commit / name).write_bytes(data)
    return f"{reference}@{commit}"


def test_published_weights_are_taken_if_they_are_in_the_cache(
    make_images: MakeImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "resolve", lambda reference: pytest.fail("the hub is not asked"))
    assert choose_start({}, "class", STATS, machine())[0] == {"init": "backbone"}
    pinned = cached_copy(tmp_path / "hub", TINY.reference)
    init, choice = choose_start({}, "class", STATS, machine())
    assert init == {"init": pinned, "recipe": "linear-probe"}
    assert choice is not None
    assert "in the cache already (Apache-2.0), trained on 14 million photographs" in choice.reason
    assert choose_start({}, "class", STATS, machine("cuda"))[0] == {"init": pinned, "recipe": "finetune"}
    for given, stats in (
        ({"epochs": 2}, STATS),
        ({"model": "C+Micro/16"}, STATS),
        ({"recipe": "backbone"}, STATS),
        ({"recipe": "finetune"}, STATS),
        ({"val_fraction": 0.0}, STATS),
    ):
        assert choose_start(given, "class", stats, machine())[0] == {"init": "backbone"}
    monkeypatch.undo()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    photos = make_images({"train/cat": 12, "train/dog": 12, "val/cat": 4, "val/dog": 4}, size=(40, 40))
    run = vitral.train(str(photos), out=str(tmp_path / "run"), quiet=True, device="cpu")
    about = json.loads((run.folder / "config.json").read_text())
    assert (about["run"]["init"], about["run"]["recipe"]) == (pinned, "linear-probe")


def test_a_run_on_a_cpu_takes_them_from_a_real_hub_and_again_without_it(
    make_images: MakeImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    photos = make_images({"train/cat": 12, "train/dog": 12, "val/cat": 4, "val/dog": 4}, size=(40, 40))
    options: dict[str, Any] = {"device": "cpu", "minutes": 1.0, "precision": "fp32"}

    def trained(name: str) -> tuple[Any, str]:
        run = vitral.train(str(photos), out=str(tmp_path / name), **options)
        about = json.loads((run.folder / "config.json").read_text())
        assert about["run"]["init"] == f"{SMALL.reference}@{FIRST}"
        assert about["run"]["recipe"] == "linear-probe"
        return run.result["val"], " ".join(capsys.readouterr().err.split())

    with serving(monkeypatch) as server:
        server.commits[f"timm/{SMALL.reference.removeprefix('timm:')}"] = {FIRST: files_of_small_network()}
        online, plan = trained("online")
    assert "88 MB from the hub (Apache-2.0)" in plan
    assert "computing the features of 32 images takes about" in plan
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    offline, plan = trained("offline")
    assert "in the cache already (Apache-2.0)" in plan
    assert online == offline


DAMAGE: dict[str, Any] = {
    "cut": lambda folder: _change(folder / "model.safetensors", lambda data: data[: len(data) // 2]),
    "empty": lambda folder: _change(folder / "model.safetensors", lambda data: b""),
    "pointer": lambda folder: _change(
        folder / "model.safetensors",
        lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 22883288\n",
    ),
    "page": lambda folder: _change(folder / "model.safetensors", lambda data: b"<html>log in</html>"),
    "missing tensors": lambda folder: save_file(
        {"blocks.0.norm1.weight": torch.ones(48)}, folder / "model.safetensors"
    ),
    "not finite": lambda folder: save_file(
        {name: one * torch.nan for name, one in load_file(folder / "model.safetensors").items()},
        folder / "model.safetensors",
    ),
    "config": lambda folder: _change(folder / "config.json", lambda data: b"{"),
    "config of another network": lambda folder: _change(
        folder / "config.json", lambda data: data.replace(b"vit_tiny_patch16_224", b"resnet18")
    ),
}
"""Damage in huggingface_hub's cache."""


def _change(file: Path, change: Callable[[bytes], bytes]) -> None:
    file.write_bytes(change(file.read_bytes()))


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_weights_that_nobody_asked_for_do_not_stop_a_run(make_images, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    pinned = cached_copy(tmp_path / "hub", TINY.reference)
    folder = tmp_path / "hub" / f"models--timm--{TINY.reference.removeprefix('timm:')}"
    DAMAGE[kind](folder / "snapshots" / pinned.rpartition("@")[2])
    photos = make_images({"train/cat": 12, "train/dog": 12, "val/cat": 4, "val/dog": 4}, size=(40, 40))
    job = plan_run({"data": str(photos), "device": "cpu"})
    (init,) = [choice for choice in job.plan.choices if choice.name == "init"]
    assert job.run.init == "backbone"
    assert f"{TINY.reference} in the cache cannot be read (" in init.reason
    assert init.reason.endswith(f"delete {folder}")
    with pytest.raises(VitralError):  # what is asked for is an error
        plan_run({"data": str(photos), "device": "cpu", "init": pinned})


def test_a_damaged_copy_does_not_hide_another_one(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    cached_copy(tmp_path / "hub", SMALL.reference)
    DAMAGE["cut"](next((tmp_path / "hub").glob("*/snapshots/*")))
    tiny = cached_copy(tmp_path / "hub", TINY.reference)
    init, choice = choose_start({}, "class", STATS, machine())
    assert init["init"] == tiny
    assert choice is not None
    assert "cannot be read" in choice.reason


def test_a_damaged_network_of_the_package_leaves_random_weights(tmp_path, monkeypatch):
    broken = tmp_path / "backbone.safetensors"
    broken.write_bytes(BACKBONE.read_bytes()[:5000])
    monkeypatch.setitem(BUILT_IN, "backbone", dataclasses.replace(BUILT_IN["backbone"], file=broken))
    init, choice = choose_start({}, "class", STATS, machine())
    assert init == {}
    assert choice is not None
    assert "the built-in model cannot be read" in choice.reason


def test_a_hub_that_does_not_answer_costs_its_seconds_and_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts a connection and says nothing, none at all, and HF_HUB_OFFLINE."""
    monkeypatch.setattr(published, "SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for endpoint in (f"http://127.0.0.1:{silent.getsockname()[1]}", "http://127.0.0.1:9"):
            monkeypatch.setattr(constants, "ENDPOINT", endpoint)
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
            for kind in ("cuda", "cpu"):
                began = time.monotonic()
                init, choice = choose_start({}, "class", STATS, machine(kind))
                assert init == {"init": "backbone"}
                assert time.monotonic() - began < 2
                assert choice is not None
                assert "the Hugging Face hub did not answer; to start from a larger model" in choice.reason
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked: list[str] = []
    monkeypatch.setattr(HfApi, "model_info", lambda self, name, **more: asked.append(name))
    init, choice = choose_start({}, "class", STATS, machine("cuda"))
    assert init == {"init": "backbone"}
    assert choice is not None
    assert "hub" not in choice.reason
    assert not asked


def hub_at(monkeypatch: pytest.MonkeyPatch, rate: float, size: int = 88_000_000) -> list[str]:
    """Pretend that a hub answers, with bytes at this rate; return the references that are fetched from now on."""
    asked: list[str] = []

    def fetch(reference: str) -> hub.Fetched:
        asked.append(reference)
        return hub.Fetched(Path(), f"{reference}@{'4' * 40}", "4" * 40)

    monkeypatch.setattr(hub, "offered", lambda reference, seconds: hub.Offer(size, rate))
    monkeypatch.setattr(hub, "resolve", fetch)
    monkeypatch.setattr(published, "unreadable", lambda path: "")
    return asked


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_they_are_fetched_from_a_hub_that_answers(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    hub_at(monkeypatch, rate=5e6)
    monkeypatch.setattr(published, "unreadable", lambda path: "cut short" if path == Path() else "")
    init, choice = choose_start({}, "class", STATS, machine(kind))
    assert init == {"init": "backbone"}, "what came is damaged"
    assert choice is not None
    assert f"the download of {SMALL.reference} failed" in choice.reason
    asked = hub_at(monkeypatch, rate=5e6)
    init, choice = choose_start({}, "class", STATS, machine(kind))
    recipe = "finetune" if kind == "cuda" else "linear-probe"
    assert init == {"init": f"{SMALL.reference}@{'4' * 40}", "recipe": recipe}
    assert asked == [SMALL.reference]
    assert choice is not None
    assert choice.reason.startswith("88 MB from the hub (Apache-2.0), trained on 14 million photographs")
    assert choice.reason.endswith("--init backbone is the built-in model")

    def cut(reference: str) -> None:
        raise WeightsError("the connection was cut")

    monkeypatch.setattr(hub, "resolve", cut)
    assert choose_start({}, "class", STATS, machine(kind))[0] == {"init": "backbone"}


@pytest.mark.parametrize(
    ("minutes", "rate", "small", "tiny", "taken"),
    [
        (None, 5e6, 60, 20, SMALL),
        (None, 5e6, LIMIT, 20, TINY),
        (None, 5e6, LIMIT, LIMIT, None),
        (None, 1e5, 60, 20, TINY),
        (None, 2e4, 60, 20, None),
        (1.0, 5e6, 60, 20, TINY),
        (1.0, 5e6, 25, 20, SMALL),
        (0.3, 5e6, 25, 20, None),
    ],
)
def test_download_and_features_fit_the_minutes(monkeypatch, minutes, rate, small, tiny, taken) -> None:
    asked = hub_at(monkeypatch, rate)
    seconds = {SMALL: small, TINY: tiny}
    given = {} if minutes is None else {"minutes": minutes}
    init, choice = choose_start(given, "class", STATS, machine(), seconds.__getitem__)
    assert asked == ([] if taken is None else [taken.reference])
    assert choice is not None
    if taken is None:
        assert init == {"init": "backbone"}
        assert f"{TINY.reference} would take" in choice.reason
    else:
        assert init["init"].startswith(taken.reference)


@pytest.mark.parametrize(
    ("minutes", "rate", "features", "images", "recipe"),
    [
        (8.0, 5e6, 27, 1000, "finetune"),  # 18 s of download, then 13 times the features, in 384 s
        (8.0, 5e6, 29, 1000, "linear-probe"),
        (8.0, 5e5, 27, 1000, "linear-probe"),
        (8.0, 5e6, 27, 999, "linear-probe"),
        (None, 5e6, 1, 1000, "linear-probe"),
    ],
)
def test_a_cpu_trains_all_layers_if_its_minutes_allow_three_epochs(
    monkeypatch, minutes, rate, features, images, recipe
) -> None:
    hub_at(monkeypatch, rate)
    given = {} if minutes is None else {"minutes": minutes}
    stats = dataclasses.replace(STATS, images=images)
    init, choice = choose_start(given, "class", stats, machine(), lambda one: features)
    assert choice is not None
    assert init["recipe"] == recipe
    assert ("all layers are trained" in choice.reason) == (recipe == "finetune")
    given = {**given, "recipe": "linear-probe"}
    assert choose_start(given, "class", stats, machine(), lambda one: features)[0]["recipe"] == "linear-probe"


def test_copies_in_the_cache_that_take_too_long_are_left_out(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    cached_copy(tmp_path / "hub", TINY.reference)

    def seconds_of(one: Published) -> float:
        return 40.0

    assert choose_start({"minutes": 1.0}, "class", STATS, machine(), seconds_of)[0]["recipe"] == "linear-probe"
    init, choice = choose_start({"minutes": 0.5}, "class", STATS, machine(), seconds_of)
    assert init == {"init": "backbone"}
    assert choice is not None
    assert f"{TINY.reference} would take 40 s here, more than 24 s" in choice.reason


def test_a_download_that_becomes_slow_is_given_up(monkeypatch) -> None:
    hub_at(monkeypatch, rate=1e9)
    monkeypatch.setattr(hub, "resolve", lambda reference: time.sleep(5))
    monkeypatch.setattr(published, "_LEAST", 0.2)
    began = time.monotonic()
    init, choice = choose_start({}, "class", STATS, machine())
    assert init == {"init": "backbone"}
    assert time.monotonic() - began < 3
    assert choice is not None
    assert "failed" in choice.reason


def test_a_run_of_the_same_name_is_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "backbone").mkdir()
    (tmp_path / "backbone" / "model.safetensors").write_bytes(BACKBONE.read_bytes())
    init, choice = choose_start({}, "class", STATS, machine())
    assert init == {}
    assert choice is not None
    assert "called backbone in this folder hide" in choice.reason
    assert choose_start({"init": "backbone"}, "class", STATS, machine())[0] == {"init": "backbone"}


def test_a_run_keeps_where_it_started_and_resumes(make_images: MakeImages, tmp_path: Path) -> None:
    photos, out = make_images({"cat": 8, "dog": 8}, size=(64, 64)), tmp_path / "run"
    options: dict[str, Any] = {"image_size": 32, "epochs": 1, "batch_size": 4, "threads": 1, "device": "cpu"}
    vitral.train(photos, out=out, quiet=True, **options)
    config = json.loads((out / "config.json").read_text())
    assert config["run"]["init"] == "backbone"
    assert config["init"]["source"] == "backbone"
    assert re.fullmatch(r"xxh3-128:[0-9a-f]{32}", config["init"]["digest"])
    assert "init" not in config.get("paths", {})
    again = vitral.train(photos, out=out, quiet=True, resume=True, init="auto", **options)
    assert again.result["model"] == "C+Micro/16"
    with pytest.raises(UsageError, match="--init differs"):
        vitral.train(photos, out=out, quiet=True, resume=True, init="none", **options)


@pytest.mark.slow
def test_few_photographs_are_learned_from_its_features(shared_data: Path, tmp_path: Path) -> None:
    """A linear probe on 245 ants and bees, where guessing gives 54 %."""
    probe: dict[str, Any] = {"recipe": "linear-probe", "device": "cpu", "threads": 1, "quiet": True}
    run = vitral.train(shared_data / "hymenoptera.tar", out=tmp_path / "run", **probe)
    assert run.result["val_accuracy"] > 0.82
    random = vitral.train(
        shared_data / "hymenoptera.tar",
        out=tmp_path / "random",
        init="none",
        model="C+Micro/16",
        image_size=128,
        **probe,
    )
    assert random.result["val_accuracy"] < run.result["val_accuracy"] - 0.1


def test_the_file_states_its_origin() -> None:
    weights = native.read(BACKBONE)
    assert BACKBONE.stat().st_size < 3.5e6
    assert sum(tensor.numel() for name, tensor in weights.state.items() if "norm" not in name) < 2e6
    assert {"data", "license", "options", "val", "versions", "device"} <= set(weights.trained)
    assert weights.trained["val"]["accuracy"] >= 0.58
    assert len(weights.classes) == 200
    assert "goldfish" in weights.classes
    assert is_included("backbone")


def test_positions_are_resized_as_in_training() -> None:
    loaded, larger = read("backbone"), read("backbone", image_size=(96, 160))
    table = loaded.weights.state["pos_embed"].float()
    expected = resize_matrix((8, 8), (6, 10)).float() @ table
    torch.testing.assert_close(larger.weights.state["pos_embed"].float(), expected, atol=1e-3, rtol=0)


@pytest.mark.slow
def test_the_program_trains_a_teacher_a_network_and_the_file_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "tiny.tar"
    generator = np.random.default_rng(0)
    with tarfile.open(data, "w") as tar:
        for split, count in (("train", 6), ("val", 2)):
            for synset in ("n01440764", "n01443537"):
                for number in range(count):
                    content = BytesIO()
                    pixels = generator.integers(0, 256, (64, 64, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(content, "JPEG")
                    info = tarfile.TarInfo(f"tiny/{split}/{synset}/{number}.JPEG")
                    info.size = content.tell()
                    content.seek(0)
                    tar.addfile(info, content)

    def run(*words: object) -> None:
        monkeypatch.setattr(sys, "argv", ["train_backbone.py", str(data), *map(str, words)])
        train_backbone.main()

    teacher, trained, packed = (tmp_path / f"{name}.safetensors" for name in ("teacher", "trained", "packed"))
    short = ("--steps", 2, "--batch-size", 4, "--device", "cpu")
    monkeypatch.setattr(train_backbone, "MEASURED", (64, 128))
    run(teacher, *short, "--drop-path", 0.1)
    run(trained, *short, "--teacher", teacher)
    run(packed, "--pack", trained, "--device", "cpu")
    weights = native.read(packed)
    assert weights.classes == ("tench", "goldfish")
    assert weights.state["head.weight"].dtype in (torch.float16, torch.bfloat16)
    assert weights.trained["steps"] == 2
    assert read(packed, image_size=64).scheme == "bilinear-antialias"
    assert "accuracy" in capsys.readouterr().out
