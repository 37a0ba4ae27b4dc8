"""`vitral study options --trials` and `vitral tune`: trials redone never, chosen on validation, reported on test."""

from __future__ import annotations

import html
import os
import re
import shlex
import shutil
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from running import TINY, as_json, call_at_batch, in_child, printed, same_bits, weights_of
from vitral.errors import MissingExtraError, RunError, TrainingError, UsageError
from vitral.evaluation import report
from vitral.studies import running, tuning
from vitral.studies.conclusions import conclusions
from vitral.studies.page import write_study
from vitral.studies.results import Outcome, Results, read_results
from vitral.studies.running import run_study
from vitral.studies.sampling import Past, check_installed, is_hopeless, propose, step_of
from vitral.studies.spans import Span
from vitral.studies.study import Study, StudyFolder
from vitral.studies.tuning import tune_study
from vitral.training.run_folder import RunFolder
from vitral.workflows.running import execute

FIXED = {name: value for name, value in TINY.items() if name not in ("lr", "augment", "drop_path")}
FIXED |= {"val_fraction": 0.4, "epochs": 2}
RATES = Span(1e-5, 1e-2, log=True)


@pytest.fixture(autouse=True)
def _no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "write_report", lambda path, content: None)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes, with a test part."""
    root = tmp_path_factory.mktemp("searched") / "sky"
    for split, count in (("train", 12), ("test", 5)):
        for label, level in (("day", 200), ("night", 20)):
            (root / split / label).mkdir(parents=True)
            for number in range(count):
                rng = np.random.default_rng(number + 100 * (split == "test"))
                pixels = level + rng.integers(0, 30, (8, 8), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / label / f"{number}.png")
    return root


def searched(data: object, **choices: Any) -> Study:
    """A search of tiny runs."""
    given: dict[str, Any] = {"vary": {"lr": RATES, "augment": ("none", "affine")}, "trials": 4, **choices}
    return Study("search", str(data), options={**FIXED, **given.pop("options", {})}, **given)


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, StudyFolder]:
    place = StudyFolder(tmp_path_factory.mktemp("search") / "study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "write_report", lambda path, content: None)
        run_study(searched(data), place.path)
    return searched(data), place


def stamps(folder: Path) -> dict[str, int]:
    return {str(file): file.stat().st_mtime_ns for file in sorted(folder.rglob("*")) if file.is_file()}


def past_of(accuracy: Any, *rates: float) -> list[Past]:
    return [
        Past({"lr": one, "augment": "none"}, accuracy(one), {1: accuracy(one) / 2, 2: accuracy(one)}) for one in rates
    ]


# Drawing


def test_a_trial_is_a_function_of_the_results_before_it():
    study = searched("x", trials=20)
    past = past_of(lambda rate: 1 - abs(np.log10(rate) + 3) / 4, *np.geomspace(1.1e-5, 0.9e-2, 8))
    assert propose(study, past) == propose(study, past)
    assert propose(study, past) != propose(study, past[:-1])
    drawn = [propose(study, past[:count])["lr"] for count in range(8)]
    assert all(1e-5 <= one <= 1e-2 and float(f"{one:.4g}") == one for one in drawn)
    assert min(drawn) < 1e-4 < 1e-3 < max(drawn), "on a logarithmic scale"


def test_draws_go_where_results_are_best():
    study = searched("x", vary={"lr": RATES}, trials=30)

    def accuracy(rate: float) -> float:
        return 1 - abs(np.log10(rate) + 3) / 4

    past = list[Past]()
    for _ in range(24):
        factors = propose(study, past)
        past.append(Past(factors, accuracy(factors["lr"]), {}))
    off = [abs(np.log10(one.factors["lr"]) + 3) for one in past]
    assert statistics.median(off[14:]) < 0.5 * statistics.median(off[:10])


def test_the_first_trial_is_as_asked_and_none_is_repeated():
    first = {"flip": False, "augment": "affine"}
    study = Study("search", "x", vary={"flip": (False, True), "augment": ("none", "affine")}, first=first, trials=4)
    past = list[Past]()
    for _ in range(4):
        past.append(Past(propose(study, past), 0.5, {}))
    assert past[0].factors == first
    assert len({tuple(one.factors.values()) for one in past}) == 4


def test_the_median_rule():
    """Against its definition: the best value so far is below the median of the finished trials at this step."""
    rng, study = np.random.default_rng(0), searched("x")
    for _ in range(20):
        curves = rng.uniform(size=(6, 3)).round(2)
        past = [
            Past({"lr": 1e-3, "augment": "none"}, float(one[-1]), dict(enumerate(one.tolist(), 1))) for one in curves
        ]
        own = rng.uniform(size=2).round(2)
        median = float(np.median(curves[:, 1]))
        assert is_hopeless(study, past, dict(enumerate(own.tolist(), 1))) == (own.max() < median)
    assert not is_hopeless(study, past[:3], {1: 0.0}), "not before four trials have run to their end"


def test_trials_of_different_lengths_are_compared_at_tenths_of_training():
    assert [step_of(epoch, 5, by_epoch=True) for epoch in (1, 5)] == [1, 5]
    assert [step_of(epoch, 5, by_epoch=False) for epoch in (1, 2, 5)] == [2, 4, 10]
    assert step_of(30, 30, by_epoch=False) == 10


# Running


def test_trials_are_ordinary_runs_chosen_on_validation_images(finished):
    study, place = finished
    results = read_results(study, place)
    assert [one.cell.name for one in results.outcomes] == [f"trial-00{number}" for number in range(4)]
    assert results.finished
    best = results.best
    assert best is not None
    for one in results.outcomes:
        result, run = RunFolder(place.cell(one.cell)).read_result(), RunFolder(place.cell(one.cell)).read_plan().run
        assert one.accuracy == result["val_accuracy"]
        assert (run.lr, run.augment) == tuple(one.cell.factors.values())
        assert len(one.curve) == 2
        assert (best.accuracy or 0) >= (one.accuracy or 0)
    result = RunFolder(place.cell(best.cell)).read_result()
    assert results.to_json()["winner"]["test"]["accuracy"] == result["test_accuracy"]
    assert "On the 10 test images, which were not used for any choice" in " ".join(conclusions(results))


def test_a_finished_search_redoes_nothing_and_may_have_more_trials(finished, data, tmp_path):
    shutil.copytree(finished[1].path, tmp_path / "study")
    place = StudyFolder(tmp_path / "study")
    before = stamps(place.cells)
    run_study(finished[0], place.path)
    assert stamps(place.cells) == before
    extended = run_study(searched(data, trials=5), place.path)
    assert len(extended.outcomes) == 5
    assert before.items() <= stamps(place.cells).items()
    with pytest.raises(RunError, match="another study"):
        run_study(searched(data, vary={"lr": RATES}), place.path)
    place.trials.write_text(place.trials.read_text().replace("0.00", "0.01", 1))
    with pytest.raises(RunError, match="cannot read the trials"):
        read_results(finished[0], place)


@pytest.mark.real
def test_killed_and_resumed_it_has_the_same_trials_and_bits(finished, tmp_path, monkeypatch):
    study, whole = finished

    def work() -> int:
        # in the second epoch of the third trial: three batches each
        call_at_batch(monkeypatch, 2 * 6 + 4, lambda: os.kill(os.getpid(), signal.SIGKILL), across_runs=True)
        run_study(study, tmp_path / "killed")
        return 0

    assert in_child(work) == -signal.SIGKILL
    killed = StudyFolder(tmp_path / "killed")
    assert [one.status for one in read_results(study, killed).outcomes] == ["done", "done", "begun"]
    before = stamps(killed.cells / "trial-001")
    run_study(killed.read(), killed.path)
    assert stamps(killed.cells / "trial-001") == before
    assert killed.trials.read_text() == whole.trials.read_text()
    for one in read_results(study, killed).outcomes:
        assert same_bits(weights_of(whole.cell(one.cell)), weights_of(killed.cell(one.cell)))


@pytest.mark.slow
def test_a_hopeless_trial_is_stopped_and_recorded(data, tmp_path, monkeypatch):
    """With accuracies made up: 0.9 for rates above 2e-4, else 0.1."""
    seen = list[float]()

    def validate(model: Any, running: Any) -> dict[str, float]:
        seen.append(running.job.run.lr)
        return {"val_loss": 1.0, "val_accuracy": 0.9 if running.job.run.lr > 2e-4 else 0.1}

    monkeypatch.setattr(execute, "_validate", validate)
    rates = (1e-3, 2e-3, 3e-3, 4e-3, 1e-4)
    drawn = iter(rates)
    monkeypatch.setattr("vitral.studies.search.propose", lambda study, past: {"lr": next(drawn)})
    study = searched(data, vary={"lr": RATES}, trials=5, options={"epochs": 3, "augment": "none"})
    results = run_study(study, tmp_path / "study", tell=lambda line: None)
    assert [one.status for one in results.outcomes] == ["done"] * 4 + ["pruned"]
    assert seen.count(1e-4) == 1, "stopped after the first of three epochs"
    assert seen.count(1e-3) == 3
    stopped = results.outcomes[-1]
    assert (stopped.curve, stopped.planned_epochs, stopped.why) == (
        (0.1,),
        3,
        "10.00% by then, below the median of 90.00%",
    )
    assert results.finished
    assert "1 trial was stopped early, below the median of those that ran to their end." in conclusions(results)
    monkeypatch.setattr(running, "train", lambda **options: pytest.fail("nothing is left to train"))
    run_study(study, tmp_path / "study")
    place = StudyFolder(tmp_path / "study")
    write_study(place, results)
    page = place.page.read_text("utf-8")
    assert "1 of 3" in page
    assert "below the median" in page
    assert "vitral train" in page
    assert "#0a0a0" not in page


def test_a_trial_that_diverges_is_recorded_and_the_search_goes_on(data, tmp_path, monkeypatch):
    original = running.train

    def train(*args: Any, **options: Any) -> Any:
        if str(options["out"]).endswith("trial-001"):
            raise TrainingError("the loss is nan in epoch 1; stopped before the step")
        return original(*args, **options)

    monkeypatch.setattr(running, "train", train)
    results = run_study(searched(data, trials=3), tmp_path / "study")
    assert [one.status for one in results.outcomes] == ["done", "failed", "done"]
    assert any("1 run diverged" in one for one in conclusions(results))


def test_no_trial_begins_after_the_time_is_up():
    study = searched("x", trials=10, minutes=1.0)
    cells = [study.trial(number, {"lr": 1e-3 + number * 1e-4, "augment": "none"}) for number in range(10)]
    assert cells[0].options["epochs"] == 2
    assert "minutes" not in cells[0].options
    outcomes = tuple(Outcome(one, "done", accuracy=0.5, seconds=20.0) for one in cells[:3])
    assert Results(study, outcomes).finished
    assert not Results(study, outcomes[:2]).finished
    assert "The time was up after 3 trials of 10." in conclusions(Results(study, outcomes))
    timed = Study("search", "x", vary={"lr": RATES}, trials=10, minutes=1.0)
    assert timed.trial(0, {"lr": 1e-3}).options["minutes"] == 0.1


# Tuning


def test_tuning_begins_with_the_plans_own_values(data, tmp_path):
    study = tune_study(str(data), 12, None, FIXED, tmp_path / "study")
    assert list(study.vary) == ["lr", "augment", "drop_path"], "an option for every four trials"
    assert study.first == {"lr": 3.3e-3, "augment": "none", "drop_path": 0.0}
    assert study.vary["lr"] == Span(6.6e-4, 1.65e-2, log=True)
    assert study.options["epochs"] == 2
    assert list(tune_study(str(data), 3, None, {**FIXED, "lr": 1e-3}, tmp_path / "other").vary) == [
        "augment",
        "drop_path",
    ]


def test_minutes_are_planned_once_for_all_trials(data, tmp_path, monkeypatch):
    given = {name: value for name, value in FIXED.items() if name != "epochs"}
    asked = list[dict[str, Any]]()
    original = tuning.plan_run

    def plan_run(options: dict[str, Any]) -> Any:
        asked.append(options)
        return original({name: value for name, value in options.items() if name != "minutes"} | {"epochs": 7})

    monkeypatch.setattr(tuning, "plan_run", plan_run)
    study = tune_study(str(data), 4, 2.0, given, tmp_path / "study")
    assert asked[0]["minutes"] == 0.5
    assert (study.options["epochs"], study.minutes) == (7, 2.0)
    StudyFolder(tmp_path / "study").open(study)
    again = tune_study(str(data), 6, 3.0, given, tmp_path / "study")
    assert (again.trials, again.minutes, again.options["epochs"], again.vary) == (6, 3.0, 7, study.vary)
    assert len(asked) == 1, "the folder has the plan"
    with pytest.raises(RunError, match="another study"):
        tune_study(str(data), 6, 3.0, {**given, "flip": True}, tmp_path / "study")


def test_nothing_to_tune_is_refused(data, tmp_path):
    with pytest.raises(UsageError, match="nothing to tune"):
        tune_study(str(data), 6, None, {"recipe": "linear-probe", "init": "demo", "device": "cpu"}, tmp_path / "study")


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_search_is_not_continued_on_other_images(split, data, tmp_path):
    """Trials of other images, or measured on others, are no choice between options."""
    shutil.copytree(data, tmp_path / "sky")
    run_study(searched(tmp_path / "sky", trials=1), tmp_path / "study")
    (tmp_path / "sky" / split / "day" / "0.png").unlink()
    before = stamps(tmp_path / "study" / "cells")
    with pytest.raises(RunError, match="the images of the study have changed"):
        run_study(searched(tmp_path / "sky", trials=2), tmp_path / "study")
    assert stamps(tmp_path / "study" / "cells") == before
    with pytest.raises(RunError, match="the images of the study have changed"):
        run_study(StudyFolder(tmp_path / "study").read(), tmp_path / "study")


@pytest.mark.slow
def test_the_command_tunes_and_names_the_winner(data, tmp_path, capsys):
    words = [f"{name}={'off' if value is False else value}" for name, value in FIXED.items()]
    out = str(tmp_path / "study")
    text, err = printed(capsys, "tune", str(data), "--trials", "2", "--set", *words, "--out", out)
    assert "tuning lr: 0.00066..0.0165 (the plan: 0.0033)" in err
    assert re.search(r"^trial\s+lr\s+augment\s+validation accuracy", text, re.MULTILINE)
    assert "which were not used for any choice" in text
    command = re.search(r"^  vitral train .*$", err, re.MULTILINE)
    assert command
    assert "--lr " in command[0]
    repeat = re.search(r"Repeat</h2><pre><code>vitral (.*?)</code>", (tmp_path / "study/study.html").read_text("utf-8"))
    assert repeat
    _, err = printed(capsys, *shlex.split(html.unescape(repeat[1])))
    assert "2 of at most 2 trials are finished" in err
    found = as_json(capsys, "study", "resume", out)
    assert found["winner"]["command"].startswith("vitral train")
    assert all("test" not in run for run in found["runs"])


def test_without_a_test_part_it_is_stated(tmp_path):
    root = write_images(tmp_path)
    results = run_study(searched(root, trials=1), tmp_path / "study")
    assert "The data have no test part." in " ".join(conclusions(results))
    with pytest.raises(UsageError, match="nothing to choose by"):
        run_study(searched(root, trials=1, options={"val_fraction": 0.0}), tmp_path / "none")


def write_images(root: Path) -> Path:
    for label in ("a", "b"):
        (root / "plain" / label).mkdir(parents=True)
        for number in range(6):
            Image.fromarray(np.full((8, 8), 20 * number + 100 * (label == "b"), np.uint8)).save(
                root / "plain" / label / f"{number}.png"
            )
    return root / "plain"


# Mistakes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--vary lr=1e-2..1e-5 --trials 3", "goes from low to high"),
        ("--vary lr=0..1e-2 --trials 3", "begins above 0"),
        ("--vary augment=none..affine --trials 3", "augment has no range"),
        ("--vary lr=1e-5..1e-2", "a grid has no ranges"),
        ("--vary lr=1e-5..1e-2 --trials 0", "1 to 1,000 trials, not 0"),
        ("--vary lr=1e-5..1e-2 --trials 3 --seeds 2", "a search has one seed"),
        ("--vary augment=none,affine --trials 3", "the lists have 2 combinations"),
        ("--vary lr=1e-5..1e9 --trials 3", "--lr must be"),
        ("--trials 3", "vitral study options needs --vary"),
    ],
)
def test_mistakes_name_what_to_type(words, message, data, capsys):
    _, err = printed(capsys, "study", "options", str(data), *words.split(), code=2)
    assert message in err


def test_a_missing_optuna_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtraError, match=r"vitral\[tune\]"):
        check_installed()
