"""`vitral study`: the same held-out images for all runs, nothing done twice, words that the figures bear out."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from images import MakeImages
from running import TINY, as_json, call_at_batch, in_child, printed, same_bits, train, weights_of
from vitral.errors import RunError, TrainingError, UsageError
from vitral.evaluation import report
from vitral.studies import running
from vitral.studies.conclusions import conclusions
from vitral.studies.page import write_study
from vitral.studies.results import Outcome, Results, _at_chance, read_results
from vitral.studies.running import run_study
from vitral.studies.seeds import mean_of, paired_difference
from vitral.studies.study import Study, StudyFolder
from vitral.training.run_folder import RunFolder
from vitral.workflows.planning.run_data import load_run_data

SMALL = {name: value for name, value in TINY.items() if name not in ("model", "epochs")} | {"val_fraction": 0.2}


@pytest.fixture(autouse=True)
def _no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "write_report", lambda path, content: None)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes that a tiny network distinguishes."""
    root = tmp_path_factory.mktemp("asked") / "sky"
    for label, level in (("day", 200), ("night", 20)):
        (root / label).mkdir(parents=True)
        for number in range(20):
            pixels = level + np.random.default_rng(number).integers(0, 30, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(root / label / f"{number}.png")
    return root


def asked(data: Path, **choices: Any) -> Study:
    """A study of tiny runs of an epoch."""
    kind = choices.pop("kind", "data")
    defaults: dict[str, Any] = {"data": {"models": ("mu/4", "mu/2"), "fractions": (0.5, 1.0)}}.get(kind, {})
    epochs = {} if kind == "compute" else {"epochs": 1}
    options = {**SMALL, **epochs, **choices.pop("options", {})}
    options = {name: value for name, value in options.items() if value is not None}
    return Study(kind, str(data), **{**defaults, "seeds": 2, "options": options, **choices})


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, StudyFolder]:
    folder = tmp_path_factory.mktemp("study") / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "write_report", lambda path, content: None)
        run_study(asked(data), folder)
    return asked(data), StudyFolder(folder)


def stamps(folder: Path) -> dict[str, int]:
    return {str(file): file.stat().st_mtime_ns for file in sorted(folder.rglob("*")) if file.is_file()}


# The grid


def test_cells_are_ordinary_runs_with_the_same_held_out_images(finished):
    study, place = finished
    assert [cell.name for cell in study.cells][:4] == [
        "mu-4_0.5_seed0",
        "mu-4_1_seed0",
        "mu-2_0.5_seed0",
        "mu-2_1_seed0",
    ]
    names: dict[str, dict[str, set[str]]] = {}
    for cell in study.cells:
        dataset = load_run_data(RunFolder(place.cell(cell)).read_plan()).dataset
        names[cell.name] = {split: set(one.names) for split, one in dataset.splits.items()}
        counts = np.bincount(dataset["train"].labels)
        assert counts.tolist() == [int(16 * cell.factors["fraction"])] * 2, "stratified"
    assert len({frozenset(one["val"]) for one in names.values()}) == 1
    assert names["mu-4_0.5_seed0"]["train"] < names["mu-4_1_seed0"]["train"], "nested"
    assert names["mu-4_0.5_seed0"]["train"] == names["mu-2_0.5_seed0"]["train"], "paired by seed"
    assert names["mu-4_0.5_seed0"]["train"] != names["mu-4_0.5_seed1"]["train"], "another seed draws others"


def test_minutes_are_shared_out(data):
    study = Study("data", str(data), models=("mu/4", "mu/2"), fractions=(0.5, 1.0), seeds=2, minutes=4.0)
    assert {cell.options["minutes"] for cell in study.cells} == {0.5}


@pytest.mark.parametrize(
    ("choices", "starts"),
    [
        ({"models": ("C+Micro/16", "S/16"), "fractions": (1.0,)}, {"none"}),
        ({"models": ("C+Micro/16",), "fractions": (1.0,), "options": {"init": "auto"}}, {"auto"}),
        ({"kind": "options", "vary": {"pool": ("mean", "cls")}}, {"none"}),
        ({"kind": "options", "vary": {"init": ("auto", "none")}}, {"auto", "none"}),
        ({"kind": "options", "vary": {"lr": (0.1, 0.2)}}, {None}),
        ({"kind": "search", "vary": {"pool": ("mean", "cls")}, "trials": 2}, {"none"}),
    ],
)
def test_networks_are_compared_from_the_same_start(choices, starts):
    study = Study(**{"kind": "data", "data": "photos", **choices})
    cells = study.cells or (study.trial(0, {"pool": "mean"}),)
    assert {cell.options.get("init") for cell in cells} == starts


def test_the_page_names_the_start_of_networks(finished):
    study, place = finished
    sentence = "Every run starts from random weights"
    assert any(sentence in one for one in conclusions(read_results(study, place)))
    stated = dataclasses.replace(study, options={**study.options, "init": "none"})
    assert not any(sentence in one for one in conclusions(read_results(stated, place)))


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"kind": "daat"}, "unknown kind of study"),
        ({"seeds": 0}, "at least one seed"),
        ({"models": ("mu/4", "mu/4")}, "names mu/4 twice"),
        ({"fractions": (0.5, 1.5)}, "at most 1, not 1.5"),
        ({"options": {"seed": 3}}, "--seed cannot be set"),
        ({"options": {"model": "mu/4"}}, "--model cannot be set"),
        ({"options": {"lr": -1.0}}, "--lr must be"),
        ({"options": {"lrr": 1.0}}, "unknown option 'lrr'"),
        ({"minutes": 3.0}, "mutually exclusive"),
        ({"minutes": -1.0, "options": {}}, "above 0"),
        ({"kind": "options", "vary": {"lr": (1e-3, 1e-3)}, "options": {"lr": None}}, "the value 0.001 twice"),
        ({"kind": "options", "vary": {"epochs": (1, 2)}}, "both varied and set"),
        ({"seeds": 300}, "are too many"),
    ],
)
def test_grids_that_ask_nothing_are_refused(data, choices, message):
    if choices.get("kind") == "daat":
        with pytest.raises(UsageError, match=message):
            Study("daat", str(data))  # type: ignore[arg-type]
        return
    with pytest.raises(UsageError, match=re.escape(message)):
        asked(data, **choices)


def test_nothing_held_out_is_refused(data, tmp_path):
    with pytest.raises(UsageError, match="nothing is held out"):
        run_study(asked(data, seeds=1, models=("mu/4",), options={"val_fraction": 0.0}), tmp_path / "study")


# Running


def test_the_table_has_the_figures_of_the_runs(finished):
    study, place = finished
    results = read_results(study, place)
    rows = list(csv.DictReader(io.StringIO(place.results.read_text("utf-8"))))
    assert len(rows) == len(study.cells) == 8
    for row, cell in zip(rows, study.cells, strict=True):
        result = RunFolder(place.path / row["folder"]).read_result()
        assert float(row["accuracy"]) == result["val_accuracy"]
        assert (row["model"], float(row["fraction"]), int(row["seed"])) == (*cell.factors.values(), cell.seed)
        assert row["status"] == "done"
        assert row["batch_size"] == str(SMALL["batch_size"])
    assert results.finished
    group = results.groups[0]
    assert group.accuracy is not None
    assert group.accuracy.value == np.mean([one.accuracy for one in group.outcomes])


def test_flops_are_three_forward_passes_of_every_image(finished):
    import vitral

    study, place = finished
    outcome = next(one for one in read_results(study, place).outcomes if one.cell.name == "mu-4_1_seed0")
    forward = vitral.summarize(vitral.load(place.cell(outcome.cell), device="cpu", precision="fp32").model).flops
    assert outcome.flops == 3 * forward * 32


def test_a_finished_study_redoes_nothing_and_may_be_extended(finished, data, tmp_path):
    shutil.copytree(finished[1].path, tmp_path / "study")
    place = StudyFolder(tmp_path / "study")
    before, reports = stamps(place.cells), list[str]()
    run_study(asked(data), place.path, tell=reports.append)
    assert stamps(place.cells) == before
    assert reports == ["8 of 8 runs are finished"]
    extended = run_study(asked(data, seeds=3), place.path)
    assert len(extended.outcomes) == 12
    assert before.items() <= stamps(place.cells).items()
    with pytest.raises(RunError, match="another study"):
        run_study(asked(data, seeds=1), place.path)
    changed = {"lr": 1e-4, "flip": None, "mixup": 0.2}
    with pytest.raises(RunError, match="trains otherwise: ") as refused:
        run_study(asked(data, seeds=3, options=changed), place.path)
    differing = "flip off there, not set now; lr 0.005 there, 0.0001 now; mixup not set there, 0.2 now"
    assert str(refused.value.why).endswith(differing)


def test_a_study_is_not_extended_on_other_images(finished, data, tmp_path):
    """Half of its table would be of one data set, half of another."""
    shutil.copytree(data, tmp_path / "sky")
    own = asked(tmp_path / "sky", models=("mu/4",), fractions=(1.0,), seeds=1)
    run_study(own, tmp_path / "study")
    for number in range(5):
        (tmp_path / "sky" / "day" / f"{number}.png").unlink()
    before = stamps(tmp_path / "study" / "cells")
    with pytest.raises(RunError, match="the images of the study have changed") as caught:
        run_study(asked(tmp_path / "sky", models=("mu/4",), fractions=(1.0,), seeds=2), tmp_path / "study")
    assert "of 'day' fewer" in caught.value.why
    assert stamps(tmp_path / "study" / "cells") == before
    assert StudyFolder(tmp_path / "study").read() == own


def test_a_study_is_not_extended_from_other_initial_weights(data, tmp_path):
    """A path to the same data may be typed in another way."""

    def first(seed: int) -> Path:
        return train(data, tmp_path / "first", seed=seed, epochs=1, overwrite=True).folder

    study = asked(data, kind="options", vary={"weight_decay": (0.0, 0.05)}, options={"init": str(first(0))})
    study = dataclasses.replace(study, seeds=1)
    run_study(study, tmp_path / "study")
    (tmp_path / "link").symlink_to(data)
    run_study(dataclasses.replace(study, data=str(tmp_path / "link"), seeds=2), tmp_path / "study")
    first(1)
    with pytest.raises(RunError, match=r"(?s)the initial weights have changed.*runs of the study began with others"):
        run_study(dataclasses.replace(study, seeds=3), tmp_path / "study")


def test_a_folder_of_other_things_is_refused(data, tmp_path):
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(RunError, match="not a study"):
        run_study(asked(data), tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "all of it"
    with pytest.raises(RunError, match="not a study"):
        StudyFolder(tmp_path / "absent").read()


def test_a_changed_study_file_is_detected(finished, tmp_path):
    shutil.copytree(finished[1].path, tmp_path / "study")
    place = StudyFolder(tmp_path / "study")
    place.study.write_text(place.study.read_text().replace('"seeds": 2', '"seeds": 3'))
    with pytest.raises(RunError, match="cannot read the study"):
        place.read()


@pytest.mark.real
@pytest.mark.slow
def test_killed_and_resumed_it_has_the_same_bits(data, tmp_path, monkeypatch):
    study = asked(data, kind="compute", models=("mu/4",), epochs=(1, 4), seeds=1)
    whole = StudyFolder(tmp_path / "whole")
    run_study(study, whole.path)

    def work() -> int:
        # eight batches of the first run, and in the third epoch of the second
        call_at_batch(monkeypatch, 8 + 18, lambda: os.kill(os.getpid(), signal.SIGKILL), across_runs=True)
        run_study(study, tmp_path / "killed")
        return 0

    assert in_child(work) == -signal.SIGKILL
    killed = StudyFolder(tmp_path / "killed")
    assert [one.status for one in read_results(study, killed).outcomes] == ["done", "begun"]
    before = stamps(killed.cell(study.cells[0]))
    run_study(killed.read(), killed.path)
    assert stamps(killed.cell(study.cells[0])) == before
    for cell in study.cells:
        assert same_bits(weights_of(whole.cell(cell)), weights_of(killed.cell(cell)))
    assert len((killed.cell(study.cells[1]) / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_run_that_diverges_is_recorded_and_left(data, tmp_path, monkeypatch):
    study = asked(data, kind="options", vary={"lr": (1e-3, 900.0)}, options={"lr": None}, seeds=1)
    original = running.train

    def train(*args: Any, **options: Any) -> Any:
        if options.get("lr") == 900.0:
            raise TrainingError("the loss is nan in epoch 1; stopped before the step")
        return original(*args, **options)

    monkeypatch.setattr(running, "train", train)
    results = run_study(study, tmp_path / "study")
    assert [one.status for one in results.outcomes] == ["done", "failed"]
    assert results.finished
    assert "1 run diverged and is left out: 900_seed0." in conclusions(results)
    monkeypatch.setattr(running, "train", lambda **options: pytest.fail("nothing is left to train"))
    assert [one.status for one in run_study(study, tmp_path / "study").outcomes] == ["done", "failed"]


def test_runs_of_another_process_are_left_to_it(data, tmp_path, monkeypatch):
    study = asked(data, kind="options", vary={"flip": (False, True)}, options={"flip": None}, seeds=1)
    original = running.train

    def train(*args: Any, **options: Any) -> Any:
        if options.get("flip"):
            raise RunError("another process is training this run")
        return original(*args, **options)

    monkeypatch.setattr(running, "train", train)
    reports = list[str]()
    results = run_study(study, tmp_path / "study", tell=reports.append)
    assert [one.status for one in results.outcomes] == ["done", "open"]
    assert not results.finished
    assert reports[-1] == "2/2 on_seed0  left to the process that trains it"
    assert "1 run of 2 is not finished." in conclusions(results)


def test_the_last_process_reports_the_runs_of_all(data, tmp_path, monkeypatch):
    study = asked(data, kind="options", vary={"flip": (False, True)}, options={"flip": None}, seeds=1)
    original, elsewhere = running.train, list[dict[str, Any]]()

    def train(**options: Any) -> Any:
        if not options["flip"]:
            elsewhere.append(options)
            raise RunError("another process is training this run")
        original(**elsewhere.pop())  # it ends while this one trains
        return original(**options)

    monkeypatch.setattr(running, "train", train)
    results = run_study(study, tmp_path / "study")
    assert [one.status for one in results.outcomes] == ["done", "done"]
    assert results.finished


# Statistics


def test_intervals_and_tests_are_those_of_scipy():
    a, b = [0.81, 0.84, 0.79, 0.86], [0.78, 0.83, 0.77, 0.80]
    mean = mean_of(a)
    expected = stats.t.interval(0.95, 3, np.mean(a), stats.sem(a))
    assert mean.interval == pytest.approx(expected)
    found = paired_difference("", "a", "b", a, b, 10**9)
    test = stats.ttest_rel(a, b)
    assert found.p_value == pytest.approx(test.pvalue)
    assert found.interval == pytest.approx(tuple(test.confidence_interval(0.95)))


def test_chance_agreement_of_few_seeds_claims_nothing():
    """Three seeds that all differ by one image of 20 have no deviation, and would be infinitely significant."""
    one = paired_difference("", "a", "b", [0.90, 0.85, 0.95], [0.85, 0.80, 0.90], 20)
    assert one.p_value > 0.05
    assert paired_difference("", "a", "b", [0.9], [0.1], 1000).p_value == 1


# Words and page


def supposed(study: Study, accuracy: Any, noise: float = 0.004) -> Results:
    """Results with made-up accuracies."""
    rng, outcomes = np.random.default_rng(2), list[Outcome]()
    for cell in study.cells:
        value = accuracy(cell.factors) + rng.normal(0, noise)
        cost = 1e9 * cell.factors.get("epochs", 1) * (2 if cell.factors.get("model") == "B" else 1)
        outcomes.append(
            Outcome(
                cell,
                "done",
                split="test",
                images=1000,
                train_images=int(1000 * cell.factors.get("fraction", 1)),
                accuracy=value,
                loss=1.0,
                ece=0.1,
                macro_f1=value,
                epochs=1,
                best_epoch=1,
                parameters=7,
                flops=cost,
                seconds=cost,
                images_per_second=1.0,
                held_out="same",
            )
        )
    return Results(study, tuple(outcomes))


def test_a_crossing_is_claimed_only_where_both_orders_are():
    study = Study("data", "x", models=("A", "B"), fractions=(0.1, 1.0), seeds=4)
    crossing = supposed(
        study, lambda f: 0.6 + (0.3 if f["model"] == "A" else 0.2) * f["fraction"] - 0.05 * (f["model"] == "A")
    )
    words = "\n".join(conclusions(crossing))
    assert "With all images A is more accurate than B by +" in words
    parallel = supposed(study, lambda f: 0.6 + 0.2 * f["fraction"])
    message = conclusions(parallel)
    assert "With 10% of the images no difference can be claimed between A and B." in message or (
        "With 10% of the images no difference can be claimed between B and A." in message
    )
    assert not any("order changes" in one for one in message)
    both = supposed(study, lambda f: 0.6 + (0.2 if (f["model"] == "A") == (f["fraction"] == 1) else 0.0))
    assert "The order changes: B is ahead of A with 10% of the images, and behind it with all images." in conclusions(
        both
    )


@pytest.mark.parametrize(("gain", "claimed"), [(0.3, True), (0.0, False)])
def test_a_gain_is_claimed_only_if_its_interval_excludes_zero(gain, claimed):
    study = Study("data", "x", models=("A",), fractions=(0.1, 1.0), seeds=3)
    results = supposed(study, lambda f: 0.6 + gain * f["fraction"])
    sentence = next(one for one in conclusions(results) if one.startswith("From 10% of the images to all images A"))
    assert sentence.endswith("; no difference can be claimed.") is not claimed


def test_nothing_is_claimed_of_runs_at_chance():
    study = Study("compute", "x", models=("A", "B"), epochs=(1, 9), seeds=3)
    results = supposed(study, lambda f: 0.5 + 0.04 * (f["model"] == "A") * f["epochs"])
    assert {one.where for one in results.differences if one.claimed} == {"1 epoch", "9 epochs"}
    weak = [dataclasses.replace(one, at_chance=one.cell.factors["epochs"] == 1) for one in results.outcomes]
    results = Results(study, tuple(weak))
    assert {one.where for one in results.differences} == {"9 epochs"}
    (sentence,) = [one for one in conclusions(results) if "not above chance" in one]
    assert sentence.startswith("6 runs are not above chance")
    assert sentence.endswith("A_1_seed0, B_1_seed0, A_1_seed1, B_1_seed1 and 2 more.")


def test_a_run_is_at_chance_if_its_interval_has_the_share_of_the_largest_class():
    half = [{"images": 50}, {"images": 50}]
    for low, weak in ((0.45, True), (0.55, False)):
        assert _at_chance({"per_class": half, "images": 100, "accuracy_interval": [low, 0.7]}) is weak
    assert _at_chance({"per_class": [{"images": 90}, {"images": 10}], "images": 100, "accuracy_interval": [0.85, 0.95]})


def test_a_single_seed_claims_nothing():
    study = Study("data", "x", models=("A", "B"), fractions=(0.1, 1.0), seeds=1)
    results = supposed(study, lambda f: 0.9 if f["model"] == "A" else 0.2)
    assert not any(one.claimed for one in results.differences)
    words = " ".join(conclusions(results))
    assert "no difference is claimed" in words
    assert "more accurate" not in words


def test_batch_sizes_that_differ_are_named():
    study = Study("data", "x", models=("A",), fractions=(0.1, 1.0), seeds=2)
    results = supposed(study, lambda f: 0.6)

    def planned(study: Study, small: int, large: int) -> str:
        sized = [
            dataclasses.replace(one, batch_size=small if k % 2 else large) for k, one in enumerate(results.outcomes)
        ]
        return " ".join(conclusions(Results(study, tuple(sized))))

    assert "The batch size is not the same in all runs: 16 and 64 images" in planned(study, 16, 64)
    assert "--set batch_size=16 keeps it equal" in planned(study, 16, 64)
    assert "batch size" not in planned(study, 64, 64)
    results = supposed(Study("options", "x", vary={"batch_size": (64, 16)}, seeds=2), lambda f: 0.6)
    assert "batch size" not in planned(results.study, 16, 64)


def test_options_are_compared_over_all_values_of_the_others():
    study = Study("options", "x", vary={"lr": (1e-3, 3e-4), "augment": ("none", "affine")}, seeds=3)
    results = supposed(study, lambda f: 0.7 + 0.05 * (f["augment"] == "affine"))
    pairs = {(one.first, one.second): one for one in results.differences}
    assert pairs[("augment affine", "augment none")].claimed
    assert pairs[("augment affine", "augment none")].pairs == 6
    assert sum(one.claimed for one in results.differences) == 1
    words = conclusions(results)
    assert any(
        re.match(r"augment affine is more accurate than augment none by \+[45]\.\d points .*values of lr", one)
        for one in words
    )
    alone = Study("options", "x", vary={"lr": (1e-3, 3e-4), "augment": ("none", "affine")}, seeds=1)
    assert not any(one.claimed for one in supposed(alone, lambda f: 0.9 * (f["lr"] == 1e-3)).differences)


def test_nothing_cheaper_than_the_front_is_as_accurate():
    study = Study("compute", "x", models=("A", "B"), epochs=(1, 3, 10), seeds=2)
    table = {("A", 1): 0.5, ("A", 3): 0.4, ("A", 10): 0.7, ("B", 1): 0.6, ("B", 3): 0.65, ("B", 10): 0.69}
    results = supposed(study, lambda f: table[f["model"], f["epochs"]], noise=0.0)
    front = [(one.factors["model"], one.factors["epochs"]) for one in results.front("flops")]
    assert front == [("A", 1), ("B", 1), ("B", 3), ("A", 10)]


def test_the_page_and_the_figure_for_a_paper(tmp_path):
    study = Study("data", "x <y>", models=("A&B", "<i>"), fractions=(0.1, 1.0), seeds=3, claim="More <b> is better.")
    place = StudyFolder(tmp_path)
    results = supposed(study, lambda f: 0.5 + 0.3 * f["fraction"])
    write_study(place, results)
    page = place.page.read_text("utf-8")
    assert "<i>" not in page.replace("<i style", "")
    assert "x &lt;y&gt;" in page
    assert "More &lt;b&gt; is better." in page
    assert page.count("var(--series-1)") > 1
    assert "#0a0a0" not in page, "every placeholder of a color is replaced"
    assert "vitral study data" in page
    with Image.open(place.png) as image:
        assert min(image.size) > 800
    svg = place.svg.read_text("utf-8")
    assert "#0072b2" in svg
    assert "#0a0a0" not in svg
    write_study(place, Results(study, tuple(Outcome(cell, "open") for cell in study.cells)))
    assert "No run is finished." in place.page.read_text("utf-8")


# The command


def words_of(options: dict[str, Any]) -> list[str]:
    return [f"{name}={'off' if value is False else value}" for name, value in options.items()]


def test_the_command_runs_prints_and_continues(data, tmp_path, capsys):
    fixed = words_of({**SMALL, "epochs": 1, "model": "mu/4"})
    out = str(tmp_path / "study")
    varied = ["--vary", "cls-token=on,off", "pool=mean", "--seeds", "2"]
    text, err = printed(capsys, "study", "options", str(data), *varied, "--set", *fixed, "--out", out)
    assert re.search(r"^cls_token\s+pool\s+accuracy", text, re.MULTILINE)
    assert "1/4 on_mean_seed0  accuracy" in err
    assert "Report" in err
    found = as_json(capsys, "study", "resume", out)
    assert [run["factors"] for run in found["runs"][:2]] == [
        {"cls_token": True, "pool": "mean"},
        {"cls_token": False, "pool": "mean"},
    ]
    assert found["finished"]
    _, err = printed(capsys, "study", "resume", str(tmp_path), code=2)
    assert "not a study" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("options DATA --vary lr", "--vary takes NAME=VALUE, not 'lr'"),
        ("options DATA --vary lr=a,b", "--lr takes a number, not 'a'"),
        ("options DATA --vary flip=yes", "flip is on or off, not 'yes'"),
        ("options DATA --vary augment=none,strong", "unknown value of --augment: 'strong'"),
        ("options DATA --vary lrr=1", "unknown option of vitral train 'lrr'"),
        ("options DATA --vary lr=1 lr=2", "names lr twice"),
        ("data DATA", "needs"),
        ("data DATA --models mu/4 --set seed=1", "--seed cannot be set"),
        ("nonsense", "unknown command"),
    ],
)
def test_mistakes_name_what_to_type(words, message, data, capsys):
    _, err = printed(capsys, "study", *words.replace("DATA", str(data)).split(), code=2)
    assert message in err


def test_photographs_of_the_reader(make_images: MakeImages, tmp_path, capsys):
    """A study of the recipe's own network, without any option but the length."""
    photos = make_images({"cat": 12, "dog": 12})
    words = ["--models", "mu/4", "--epochs", "1", "--seeds", "1", "--out", str(tmp_path / "study")]
    text, _ = printed(capsys, "study", "compute", str(photos), *words)
    assert "Each recipe was trained with one seed." in text
    assert "the Pareto front over FLOPs of training is mu/4 for 1 epoch." in text


@pytest.mark.slow
def test_networks_of_other_kinds_stand_in_one_table(data, tmp_path, capsys):
    """A ViT, a ResNet and a network of timm: the same images, one line a run, and a comparison of two runs."""
    models = ("mu/4", "BiT-R50x1", "timm:test_efficientnet")
    own = dict.fromkeys(("dim", "depth", "heads", "mlp_dim", "drop_path"))
    study = asked(data, models=models, fractions=(1.0,), options={**own, "image_size": 32, "batch_size": 8})
    folder = tmp_path / "study"
    run_study(study, folder)
    with open(folder / "results.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["model"] for row in rows} == set(models)
    assert len(rows) == 6
    assert all(0 <= float(row["accuracy"]) <= 1 and float(row["flops"]) > 0 for row in rows)
    cells = [str(folder / row["folder"]) for row in rows if row["model"] != "mu/4"]
    found = as_json(capsys, "compare", *cells[:2])
    assert set(found["only_right"]) == {Path(cell).name for cell in cells[:2]}
