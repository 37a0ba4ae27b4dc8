"""Test planning: given options override the recipe, consequences are reported, nothing is ignored."""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any

import pytest

from images import MakeImages
from running import TINY, train
from vitral.cli.main import main
from vitral.device import Machine, choose
from vitral.errors import UsageError
from vitral.kernels import REFERENCE
from vitral.recipes.small import small
from vitral.recipes.stats import DatasetStats
from vitral.recipes.table import RECIPES
from vitral.training.options import Run
from vitral.training.plan import Plan
from vitral.training.run_folder import RunFolder
from vitral.workflows.planning.job import Job
from vitral.workflows.planning.plan import plan_run, reopen
from vitral.workflows.running.build import initial_model


def reasons(job: Job) -> dict[str, tuple[str, str]]:
    names = [choice.name for choice in job.plan.choices]
    assert len(set(names)) == len(names), "a plan says each thing once"
    return {choice.name: (choice.value, choice.reason) for choice in job.plan.choices}


def test_every_choice_has_a_reason():
    job = plan_run({"data": "digits", "epochs": 7, "batch_size": 32, "device": "cpu"})
    reported = reasons(job)
    assert reported["epochs"] == ("7", "requested")
    assert reported["batch size"] == ("32", "requested")
    assert "batch" not in reported
    assert all(reason for _, reason in reported.values())
    assert reported["image size"] == ("8×8", reported["image size"][1])
    assert job.run.epochs == 7
    assert job.run.out == "runs/digits"
    assert "precision" in reported


def test_given_options_replace_the_recipes_choices():
    reported = reasons(plan_run({"data": "digits", "lr": 0.5, "flip": True, "label_smoothing": 0.0, "pool": "cls"}))
    for value, _ in reported.values():
        assert "0.01" not in value
    assert reported["flip"] == ("on", "requested")
    assert "pooling" not in reported


def test_a_scaled_learning_rate_is_reported():
    job = plan_run({"data": "digits", "recipe": "paper-finetune", "batch_size": 64, "accumulate": 2, "model": "mu/4"})
    value, reason = reasons(job)["learning rate"]
    assert float(value) == pytest.approx(0.01 * 128 / 512)
    assert "batches of 512, scaled linearly to batches of 128" in reason
    assert "learning rate" not in reasons(plan_run({"data": "digits"}))


@pytest.mark.parametrize(
    ("options", "peak", "why"),
    [
        ({"optimizer": "adamw"}, 0.0033, "0.01 is for muon, scaled to adamw"),
        ({"optimizer": "sgd"}, 0.1, "0.01 is for muon, scaled to sgd"),
        ({"optimizer": "adamw", "recipe": "mae"}, 0.0013, "0.004 is for muon, scaled to adamw"),
        ({"optimizer": "sgd", "model": "BiT-R50x1"}, 0.03, "0.001 is for adamw, scaled to sgd"),
        ({"optimizer": "adamw", "recipe": "paper-finetune", "model": "mu/4"}, 3.3e-4, "for sgd, scaled to adamw"),
        ({"optimizer": "adamw", "model": "BiT-R50x1"}, 1e-3, None),
        ({"optimizer": "muon"}, 1e-2, None),
        ({"optimizer": "adam", "recipe": "dino"}, 5e-4, None),
        ({"optimizer": "adamw", "lr": 0.02}, 0.02, "requested"),
    ],
)
def test_another_optimizer_has_a_rate_of_its_own(options, peak, why):
    job = plan_run({"data": "digits", "device": "cpu", **options})
    assert job.run.optimizer == options["optimizer"]
    assert job.run.peak_lr == pytest.approx(peak)
    assert (why or "None") in str(reasons(job).get("lr", ("", None))[1])


@pytest.mark.parametrize(
    ("options", "decay"),
    [
        ({}, 0.05),
        ({"optimizer": "adamw"}, 0.05),
        ({"optimizer": "sgd"}, 5e-4),  # 0.01 · 0.05 · (1 - 0.9) / 0.1
        ({"optimizer": "sgd", "lr": 0.01}, 5e-3),
        ({"optimizer": "sgd", "lr": 0.0}, 5e-3),
        ({"optimizer": "sgd", "weight_decay": 0.02}, 0.02),
        ({"optimizer": "sgd", "recipe": "paper", "model": "mu/4"}, 1e-3),
        ({"optimizer": "adam"}, 0.0),
    ],
)
def test_weights_shrink_as_much_by_another_optimizer(options, decay):
    job = plan_run({"data": "digits", "device": "cpu", **options})
    assert job.run.weight_decay == pytest.approx(decay)
    assert (options.get("optimizer") in ("sgd", "adam")) == ("weight decay" in reasons(job))


def test_the_image_size_is_rounded_to_patches_of_the_model():
    job = plan_run({"data": "digits", "model": "mu/3"})
    assert job.config.image == (9, 9)
    assert "patches of mu/3" in reasons(job)["image size"][1]


def test_a_write_up_by_name_keeps_its_own_shape():
    job = plan_run({"data": "digits", "model": "mnist-7562"})
    assert (job.config.image, job.config.dim, job.config.pool) == ((28, 28), 16, "cls")
    assert job.config.classes == 10


def test_initial_weights_of_the_same_data_are_a_possible_leak(make_images: MakeImages, tmp_path):
    photos, others = make_images({"cat": 12, "dog": 12}), make_images({"cat": 12, "dog": 13}, "others")
    first = train(photos, tmp_path / "first", epochs=1)
    given = {"init": str(first.folder), "epochs": 1, "device": "cpu"}

    def leak(data: Any = photos, **options: Any) -> str:
        found = reasons(plan_run({"data": str(data), **given, **options}))
        return found.get("leak", ("", ""))[1]

    assert leak(seed=1, val_fraction=0.2).endswith(f"--val-fraction 0.2 holds out the same images as {first.folder}")
    assert leak(seed=0, val_fraction=0.3)
    assert not leak(seed=1, split_seed=0, val_fraction=0.2)
    strangers = make_images({"cat": 12, "dog": 13}, "strangers", size=(9, 10))
    assert not leak(strangers, seed=1, val_fraction=0.2)
    assert "was trained on images that are held out here" in leak(others, seed=1, val_fraction=0.2), "equal files"
    (first.folder / "config.json").write_text('{"run": {}}')
    assert not leak(seed=1, val_fraction=0.2), "weights load without the configuration of their run"


def test_validation_of_numbers_is_cut_by_their_values(make_images: MakeImages):
    folder = make_images({"a": 20}) / "a"
    table = folder / "ages.csv"
    table.write_text(
        "file,age\n" + "".join(f"{one.name},{n}.5\n" for n, one in enumerate(sorted(folder.glob("*.png"))))
    )
    _, why = reasons(plan_run({"data": str(table), **TINY}))["validation"]
    assert why.startswith("set aside to measure accuracy, about the same fraction of low and high values")


def test_validation_is_reported(make_images: MakeImages):
    plain = make_images({"a": 10, "b": 10}, name="plain")
    own = make_images({"train/a": 3, "train/b": 3, "val/a": 2, "val/b": 2}, name="own")
    tested = make_images({"train/a": 10, "train/b": 10, "test/a": 2, "test/b": 2}, name="tested")
    job = plan_run({"data": str(plain), **TINY})
    count, why = reasons(job)["validation"]
    assert (count, why.partition(";")[0]) == (
        "2 images",
        "set aside to measure accuracy, about the same fraction of each class",
    )
    assert "--val-fraction 0.3" in why, "two images tell nothing"
    wider = plan_run({"data": str(plain), "val_fraction": 0.3, **TINY})
    assert reasons(wider)["validation"] == (
        "6 images",
        "set aside to measure accuracy, about the same fraction of each class",
    )
    assert "the images of the val split" in reasons(plan_run({"data": str(own), **TINY}))["validation"]
    assert (
        "the test images are used once, at the end" in reasons(plan_run({"data": str(tested), **TINY}))["validation"][1]
    )
    job = plan_run({"data": str(tested), "val_fraction": 0.0, **TINY})
    assert "the test split" in reasons(job)["validation"][1]
    assert {name: len(split) for name, split in job.dataset.splits.items()} == {"train": 20, "val": 4}
    job = plan_run({"data": str(plain), "val_fraction": 0.0, **TINY})
    assert list(job.dataset.splits) == ["train"]


def test_shares(make_images: MakeImages):
    folder = make_images({"a": 20, "b": 20})
    job = plan_run({"data": str(folder), "train_share": 0.5, "val_share": 0.25, **TINY})
    assert {name: len(split) for name, split in job.dataset.splits.items()} == {"train": 20, "val": 10}
    train, val = (set(job.dataset[name].names) for name in ("train", "val"))
    assert not train & val
    job = plan_run({"data": str(folder), "train_share": 0.5, "val_fraction": 0.2, **TINY})
    assert {name: len(split) for name, split in job.dataset.splits.items()} == {"train": 16, "val": 8}


def test_seeds_may_share_the_held_out_images(make_images: MakeImages):
    data = {"data": str(make_images({"a": 20, "b": 20})), "stratified": True, **TINY}
    jobs = [
        plan_run({**data, "split_seed": 7, "seed": seed, "train_share": share})
        for seed, share in ((1, 0.5), (2, 0.5), (1, 1.0))
    ]
    assert len({tuple(job.dataset["val"].names) for job in jobs}) == 1
    assert len({tuple(job.dataset["train"].names) for job in jobs}) == 3
    assert set(jobs[0].dataset["train"].names) < set(jobs[2].dataset["train"].names)


@pytest.mark.parametrize(
    ("each", "options", "kept", "batch"),
    [
        (15, {}, 27, 13),  # two steps, where 16 would make one and leave out 11
        (20, {"train_share": 0.5}, 18, 9),
        (15, {"val_fraction": 0.0}, 30, 15),
        (8, {}, 14, 14),
        (15, {"batch_size": 16}, 27, 16),
    ],
)
def test_few_images_make_even_batches(each, options, kept, batch, make_images: MakeImages):
    job = plan_run({"data": str(make_images({"a": each, "b": each})), "model": "mu/4", **options})
    assert (len(job.dataset["train"]), job.run.batch_size) == (kept, batch)


def test_many_images_make_the_batches_of_the_recipe():
    assert [of_cifar(images=n).batch(16) for n in (160, 161, 499)] == [16, 16, 16]
    assert [of_cifar(images=n).batch(64) for n in (500, 640, 641)] == [62, 64, 64]


def test_a_recipe_that_cuts_nothing_needs_nothing_to_cut(make_images: MakeImages):
    job = plan_run({"data": str(make_images({"a": 1, "b": 1})), "recipe": "mnist-7562"})
    assert len(job.dataset["train"]) == 2


def test_class_imbalance_is_reported(make_images: MakeImages):
    folder = make_images({"a": 40, "b": 4})
    reported = reasons(plan_run({"data": str(folder), **TINY}))
    assert "--sampling balanced" in reported["class balance"][1]
    assert "class balance" not in reasons(plan_run({"data": str(folder), **TINY, "sampling": "balanced"}))


def test_a_reopened_plan_is_the_same_job(make_images: MakeImages):
    job = plan_run({"data": str(make_images({"a": 10, "b": 10})), **TINY, "seed": 3})
    again = reopen(job.plan)
    assert (again.run, again.config, again.machine, again.plan) == (job.run, job.config, job.machine, job.plan)
    assert list(again.dataset["val"].names) == list(job.dataset["val"].names)
    assert Run.from_json(job.run.to_json()) == job.run


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"recipe": "smal"}, "nearest: small"),
        ({"epoch": 3}, "nearest: epochs"),
        ({"model": "S/16x"}, "unknown model|needs a patch"),
        ({"model": "T/16"}, "nearest: .*Ti/16"),
        ({"model": "S/16", "image_size": 20}, "not divisible by patch size 16×16"),
        ({"model": "S/8", "heads": 5}, "width 384 is not divisible by 5 heads"),
        ({"epochs": "3"}, "--epochs cannot be '3', a str"),
        ({"mean": (0.1, 0.2)}, "mean and std need"),
    ],
)
def test_refusals_come_before_any_work(options, expected):
    with pytest.raises(UsageError, match=expected):
        plan_run({"data": "digits", **options})


def test_invalid_options_are_refused_before_data_are_read():
    with pytest.raises(UsageError, match="--lr"):
        plan_run({"data": "no/such/folder", "lr": -1.0})


def test_weights_determine_the_network(trained):
    data = trained.result["data"]
    job = plan_run({"data": data, "init": str(trained.folder), "epochs": 1, "drop_path": 0.2, "image_size": (8, 12)})
    assert job.config.dim == 8
    assert job.config.drop_path == 0.2
    reported = reasons(job)
    assert reported["model"][0] == "mu/4"
    assert reported["image size"][0] == "8×12"
    for name, value in (("model", "S/4"), ("dim", 32), ("pool", "cls")):
        with pytest.raises(UsageError, match="contradicts --init") as caught:
            plan_run({"data": data, "init": str(trained.folder), name: value})
        assert len(str(caught.value).splitlines()) <= 5


def test_weights_are_resized_and_reported(trained):
    job = plan_run({"data": trained.result["data"], "init": str(trained.folder), "image_size": 16})
    assert job.config.image == (16, 16)
    assert job.run.preprocessing.image_size == (16, 16)
    assert job.init.weights.state["pos_embed"].shape[1] == 1 + 16
    assert "2×3 to 4×4 positions" in reasons(job)["weights"][1]


def test_different_preprocessing_is_a_warning(trained):
    job = plan_run({"data": trained.result["data"], "init": str(trained.folder), "mean": 0.3})
    assert job.run.preprocessing.mean == (0.3,)
    assert "mean" in reasons(job)["WARNING"][1]
    assert "WARNING" not in reasons(plan_run({"data": trained.result["data"], "init": str(trained.folder)}))


def test_a_very_small_network_gets_no_shifts():
    job = plan_run({"data": "digits", "model": "mnist-7562"})
    assert job.run.crop == "none"
    assert "7,850 parameters" in reasons(job)["geometry"][1]
    assert plan_run({"data": "digits", "model": "mnist-7562", "crop": "shift"}).run.crop == "shift"


def test_bounded_logits_get_a_scale_in_the_loss_unless_one_is_given():
    job = plan_run({"data": "digits", "model": "mnist-7562"})
    assert (job.config.logit_scale, job.run.label_smoothing) == (8.0, 0.0)
    reported = reasons(job)
    assert "tanh" in reported["logit scale"][1]
    assert reported["label smoothing"][0] == "0"
    assert plan_run({"data": "digits", "model": "mnist-7562", "logit_scale": 1.0}).run.logit_scale == 1.0
    assert plan_run({"data": "digits", "model": "mnist-7562", "label_smoothing": 0.2}).run.label_smoothing == 0.2
    assert plan_run({"data": "digits"}).run.logit_scale is None
    assert plan_run({"data": "digits", "recipe": "mnist-7562"}).config.logit_scale == 1.0  # the write-up's own network
    assert plan_run({"data": "digits"}).run.crop == "shift"


def of_cifar(**changes: Any) -> DatasetStats:
    shape = {"images": 50_000, "classes": 10, "size": (32, 32), "uniform": True, "channels": 3, "imbalance": 1.0}
    return DatasetStats(**{**shape, **changes})


@pytest.mark.parametrize(
    ("changes", "epochs", "augment", "erase", "value"),
    [
        ({}, 10, "none", 0.5, "random erasing, 0.5"),
        ({"epochs": 19}, 19, "none", 0.5, "random erasing, 0.5"),
        ({"epochs": 20}, 20, "trivialaugment", 0.0, "trivialaugment"),
        ({"images": 60_000, "channels": 1, "size": (28, 28)}, 12, "none", 0.3, "random erasing, 0.3"),
        ({"images": 60_000, "channels": 1, "size": (28, 28), "epochs": 25}, 25, "none", 0.3, "random erasing, 0.3"),
        ({"images": 300, "size": (400, 300)}, 200, "trivialaugment", 0.0, "trivialaugment"),
        ({"images": 300, "size": (400, 300), "epochs": 9}, 9, "none", 0.0, "none"),
    ],
)
def test_augmentation_depends_on_the_epochs(changes, epochs, augment, erase, value):
    plan = small(of_cifar(**changes), choose("cpu"))
    assert (plan.run.epochs, plan.run.augment, plan.run.erase) == (epochs, augment, erase)
    assert {choice.name: choice.value for choice in plan.choices}["augmentation"] == value


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ({}, "trivialaugment"),
        ({"epochs": 5}, "random erasing, 0.5"),
        ({"epochs": 5, "erase": 0.0}, None),
        ({"augment": "none"}, None),
    ],
)
def test_the_plan_reports_the_actual_augmentation(make_images, typed, value):
    photos = make_images({"cat": 12, "dog": 8}, size=(32, 32))
    job = plan_run({"data": str(photos), "device": "cpu", "init": "none", **typed})
    assert reasons(job).get("augmentation", (None,))[0] == value


@pytest.mark.parametrize(
    ("changes", "model", "whiten", "shift"),
    [
        ({}, "C+Micro/8", True, 1 / 16),
        ({"size": (28, 28)}, "C+Micro/4", True, 1 / 16),
        ({"size": (12, 12)}, "C+Micro/2", True, 1 / 16),
        ({"size": (64, 64)}, "C+Micro/16", False, 1 / 8),
        ({"channels": 1}, "C+Femto/4", False, 1 / 8),
    ],
)
def test_small_color_images_get_a_whitened_deep_stem(changes, model, whiten, shift):
    run = small(of_cifar(**changes), choose("cpu")).run
    assert (run.model, run.whiten, run.shift) == (model, whiten, shift)
    assert run.schedule == ("linear" if whiten else "cosine")


def test_a_first_layer_is_whitened_if_there_is_one(make_images):
    photos = make_images({"cat": 6, "dog": 6}, size=(32, 32))
    job = plan_run({"data": str(photos), "device": "cpu", "init": "none"})
    assert job.run.whiten
    assert reasons(job)["first layer"][0] == "whitened"
    model = initial_model(job)
    layer = model.patch_embed.backbone.layers[0].conv.weight
    assert not layer.requires_grad
    assert layer[16:].equal(-layer[:16])
    again = initial_model(job, measured=False).patch_embed.backbone.layers[0].conv.weight
    assert not again.requires_grad
    assert not again[16:].equal(-again[:16])
    patches = plan_run({"data": str(photos), "device": "cpu", "model": "Nano/4"})
    assert not patches.run.whiten
    assert "first layer" not in reasons(patches)
    with pytest.raises(UsageError, match="no convolutional stem"):
        plan_run({"data": str(photos), "device": "cpu", "model": "Nano/4", "whiten": True})


def test_a_stem_with_one_token_needs_more_than_one_image(make_images: MakeImages):
    photos = make_images({"cat": 8, "dog": 9}, size=(2, 2))
    with pytest.raises(UsageError, match="cannot normalize a batch") as caught:
        plan_run({"data": str(photos), "device": "cpu", "model": "C+Micro/2", "image_size": 2, "batch_size": 1})
    assert "--image-size" in str(caught.value)
    job = plan_run({"data": str(photos), "device": "cpu", "model": "C+Micro/2", "image_size": 4, "batch_size": 1})
    assert job.run.batch_size == 1


def test_a_run_with_plain_torch():
    job = plan_run({"data": "digits", "plain": True, "device": "cpu"})
    assert "vitral's kernels" not in reasons(job)["precision"][1]
    backends = [layer.backend for layer in initial_model(job).modules() if hasattr(layer, "backend")]
    assert len(backends) > 4
    assert not REFERENCE.keys() & set(backends)
    job = plan_run({"data": "digits", "device": "cpu"})
    backends = {layer.backend for layer in initial_model(job).modules() if hasattr(layer, "backend")}
    assert REFERENCE.keys() <= backends


def test_a_recipe_gets_the_number_of_training_images(make_images: MakeImages, monkeypatch):
    """Half of a data set gets as many epochs as a data set of half the size."""
    shown: list[DatasetStats] = []

    def watched(stats: DatasetStats, machine: Machine) -> Plan:
        shown.append(stats)
        return small(stats, machine)

    monkeypatch.setitem(RECIPES, "small", watched)
    folder = str(make_images({"a": 40, "b": 40}))
    for options in ({}, {"train_share": 0.5}):
        plan_run({"data": folder, "device": "cpu", "init": "none", **options})
    asked = [(stats.images, stats.train_images) for stats in shown if stats.sampled]
    assert [images for images, kept in asked if kept is None] == [80, 40], "which decides the split"
    assert [images for images, kept in asked if kept is not None] == [80, 40]


def test_missing_validation_is_reported(make_images: MakeImages):
    job = plan_run({"data": str(make_images({"a": 4, "b": 4})), "val_fraction": 0.0, **TINY})
    assert reasons(job)["validation"][0] == "none"


def test_a_tiny_share_is_refused(make_images: MakeImages):
    with pytest.raises(UsageError, match="leaves no images"):
        plan_run({"data": str(make_images({"a": 8, "b": 8})), "train_share": 0.001, **TINY})


def test_unreadable_images_are_named_before_the_plan_and_the_trial(make_images, tmp_path, capsys):
    photos = make_images({"cat": 30, "dog": 30})
    (photos / "dog" / "7.png").write_bytes((photos / "dog" / "7.png").read_bytes()[:60])  # its header is whole
    (photos / "cat" / "empty.png").touch()
    assert main(["train", str(photos), "--out", str(tmp_path / "run"), "--minutes", "0.2"]) == 2
    reported = capsys.readouterr().err
    assert "Plan" not in reported
    assert "2 unreadable" in reported
    assert "7.png" in reported
    assert "empty.png" in reported
    assert "--bad-images skip" in reported


def test_very_few_images_suggest_available_weights(make_images, tmp_path, monkeypatch, trained, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained.folder, tmp_path / "runs" / "the sky")
    photos = make_images({"cat": 8, "dog": 8})
    kept = RunFolder(tmp_path / "runs" / "the sky").read_plan()

    def reason(**changes: Any) -> str:
        run = dataclasses.replace(kept.run, **{"channels": 3, **changes})
        monkeypatch.setattr(RunFolder, "read_plan", lambda _: dataclasses.replace(kept, run=run, paths={}))
        job = plan_run({"data": str(photos), "device": "cpu"})
        return next(choice.reason for choice in job.plan.choices if choice.name == "init")

    assert "--init 'runs/the sky'" in reason()
    for changes in ({"channels": 1}, {"data": str(photos)}, {"task": "text"}):
        assert "the sky" not in reason(**changes)
    assert "the sky" in reason(), "it is offered again, and only the number of images is another now"
    many = plan_run({"data": str(make_images({"cat": 110, "dog": 110}, "more")), "device": "cpu"})
    assert "the sky" not in next(choice.reason for choice in many.plan.choices if choice.name == "init")
