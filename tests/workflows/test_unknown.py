"""Images of no known class: scores and metrics equal scikit-learn's, and a saved threshold makes predict say so."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.covariance import LedoitWolf
from sklearn.metrics import roc_auc_score

import vitral
from images import MakeImages
from running import as_json, printed
from vitral.cli.main import main
from vitral.evaluation.unknown import auroc_interval, separate, threshold_of
from vitral.inference.outputs import output_of
from vitral.inference.outputs.classes import Classes
from vitral.inference.unknown import SCORES, Detector, fit_statistics, mahalanobis, scored
from vitral.weights import load as loading
from vitral.weights import native
from vitral.workflows.tables.image_table import model_hash
from vitral.workflows.unknown import save


def test_scores_are_separated_as_scikit_learn_does() -> None:
    rng = np.random.default_rng(0)
    known, unknown = rng.normal(0, 1, 300).round(1), rng.normal(1, 1, 200).round(1)  # with ties
    found = separate(known, unknown, threshold_of(known, 0.9))
    assert found.auroc == roc_auc_score([0] * 300 + [1] * 200, [*known, *unknown])
    assert found.threshold == sorted(known)[269]
    assert found.known_kept == np.mean(known <= found.threshold) >= 0.9
    assert found.unknown_found == np.mean(unknown > found.threshold)
    assert separate(known, unknown).threshold is None


@pytest.mark.parametrize(("shift", "m", "n"), [(0.0, 40, 60), (1.5, 30, 200), (3.0, 50, 50)])
def test_intervals_hold_the_true_auroc(shift: float, m: int, n: int) -> None:
    """Of 300 drawn samples about 95 % have an interval with the true value, also near 1."""
    from scipy.stats import norm

    rng = np.random.default_rng(1)
    truth, held = float(norm.cdf(shift / np.sqrt(2))), 0
    for _ in range(300):
        auroc = (rng.normal(0, 1, (m, 1)) < rng.normal(shift, 1, n)).mean()
        low, high = auroc_interval(float(auroc), m, n)
        held += low <= truth <= high
    assert 0.91 <= held / 300 <= 0.995


def test_intervals_of_perfect_scores_are_not_points() -> None:
    low, high = auroc_interval(1.0, 20, 20)
    assert high == 1
    assert 0.7 < low < 0.95
    assert auroc_interval(0.0, 20, 20) == (0.0, pytest.approx(1 - low))
    assert auroc_interval(0.9, 1000, 1000)[0] > auroc_interval(0.9, 50, 50)[0]


def test_the_distance_is_scikit_learns() -> None:
    rng = np.random.default_rng(2)
    labels = rng.integers(0, 3, 90) * 2  # classes 1 and 3 have no images
    features = (rng.normal(0, 1, (90, 5)) @ rng.normal(0, 1, (5, 5)) + labels[:, None]).astype(np.float32)
    means = {one: features[labels == one].mean(0, dtype=np.float64) for one in (0, 2, 4)}
    centered = features - np.stack([means[one] for one in labels])
    reference = LedoitWolf(assume_centered=True).fit(centered)
    others = rng.normal(0, 3, (20, 5)).astype(np.float32)
    wanted = np.min([reference.mahalanobis(others - mean) for mean in means.values()], axis=0)
    found = mahalanobis(torch.from_numpy(others), fit_statistics(features, labels))
    assert np.allclose(found, wanted, rtol=1e-3)


def test_confidence_and_energy_are_of_logits() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    parts = (logits / 2).softmax(1), logits, lambda: pytest.fail("no features are needed"), {}
    assert torch.allclose(scored("confidence", *parts), 1 - (logits / 2).softmax(1).amax(1))
    assert torch.allclose(scored("energy", *parts), -torch.log(torch.exp(logits).sum(1)))


def test_a_threshold_survives_its_file_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    statistics = fit_statistics(np.random.default_rng(0).normal(size=(20, 4)), np.arange(20) % 2)
    output = Classes(("a", "b"), unknown=Detector("distance", 3.5, statistics))
    saved = json.loads(json.dumps(output.to_json()))
    again = output_of(output.names, saved, statistics)
    assert again.to_json() == saved
    assert (again.unknown.score, again.unknown.threshold) == ("distance", 3.5)
    other = {**statistics, "means": statistics["means"] + 1}
    for fields, tensors in (
        (saved, {}),
        (saved, other),
        ({"unknown": {"score": "feeling", "threshold": 1}}, {}),
        ({"unknown": {"score": "energy", "threshold": "nan"}}, {}),
        ({"unknown": {"score": "energy"}}, {}),
        ({"unknown": 3}, {}),
    ):
        with pytest.raises(vitral.VitralError, match="damaged header"):
            output_of(output.names, fields, tensors)


SKIP = ("--bad-images", "skip")


@pytest.fixture
def run(trained: vitral.TrainedRun, tmp_path: Path) -> str:
    """A copy of a run on light and dark images."""
    return shutil.copytree(trained.folder, tmp_path / "sky-run").as_posix()


@pytest.fixture
def strange(make_images: MakeImages, tmp_path: Path) -> str:
    """Images of no known class: stripes, a text that is no image, and a hidden file."""
    folder = make_images({"": 0}, name="strange")
    folder.mkdir(exist_ok=True)
    for number in range(6):
        stripes = np.tile(np.repeat([0, 255], [1 + number % 2, 2]).astype(np.uint8), (8, 5))[:, :10]
        Image.fromarray(stripes).save(folder / f"{number}.png")
    (folder / "text.png").write_text("no image")
    return str(folder)


def test_a_threshold_is_measured_saved_and_used(run: str, strange: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = vitral.load(run)
    reported = as_json(capsys, "evaluate", run, "--unknown", strange, *SKIP)["unknown"]
    assert list(reported["scores"]) == list(SCORES)
    assert (reported["images"], reported["known"], reported["saved"]) == (6, 12, True)
    assert [Path(one).name for one in reported["unreadable"]] == ["text.png"]
    assert reported["scores"][reported["best"]]["auroc"] == max(one["auroc"] for one in reported["scores"].values())
    assert any("validation images: the threshold is unreliable" in note for note in reported["notes"])
    assert not any("the known images set the threshold" in note for note in reported["notes"])
    own = as_json(capsys, "evaluate", run, "--split", "val", "--unknown", strange, *SKIP)["unknown"]
    assert any("the known images set the threshold" in note for note in own["notes"])
    predictor = vitral.load(run)
    assert model_hash(predictor) != model_hash(before)
    assert predictor.output.unknown.score == reported["best"]
    assert vitral.verify(run).damaged == ()
    values = reported["scores"][reported["best"]]
    images = sorted(str(path) for path in Path(strange).glob("[0-9].png"))
    answers = [one.unknown for one in predictor(images)]
    assert np.mean(answers) == values["unknown_found"]
    assert np.array_equal(predictor.probabilities(images), before.probabilities(images))


def test_an_unreadable_image_is_refused_or_named(run: str, strange: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", run, "--unknown", strange]) == 2
    message = capsys.readouterr().err
    assert "1 unreadable image" in message
    assert "text.png" in message
    assert "--bad-images skip" in message
    assert vitral.load(run).output.unknown is None
    assert main(["evaluate", run, "--unknown", strange, *SKIP]) == 0
    assert "left out 1 unreadable image: " in capsys.readouterr().err


@pytest.mark.parametrize("score", SCORES)
def test_predict_answers_unknown(
    score: str, run: str, strange: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Above the threshold in text, JSON, tables and Python; `--no-unknown` names a class."""
    predictor, images = vitral.load(run), [f"{strange}/{number}.png" for number in range(4)]
    pixels = torch.stack([predictor.prepare(image) for image in images])
    logits = predictor.logits(pixels)
    statistics = fit_statistics(np.random.default_rng(0).normal(size=(30, 8)), np.arange(30) % 2)
    parts = predictor.output.values(logits), logits, lambda: torch.from_numpy(predictor.embed(images)), statistics
    values = scored(score, *parts).tolist()
    threshold = float(np.mean(sorted(values)[1:3]))
    save(run, Detector(score, threshold, statistics if score == "distance" else {}))
    wanted = [value > threshold for value in values]
    assert sorted(wanted) == [False, False, True, True]

    found = vitral.load(run)(images)
    assert [one.unknown for one in found] == wanted
    assert [one.label == "unknown" for one in found] == wanted
    assert [vitral.load(run)(image).unknown for image in images] == wanted
    plain = as_json(capsys, "predict", run, *images)["predictions"]
    assert [(one["label"] == "unknown", one["unknown"]) for one in plain] == [(one, one) for one in wanted]
    assert [one["top"][0]["class"] in ("day", "night") for one in plain] == [True] * 4
    lines = printed(capsys, "predict", run, *images)[0].splitlines()
    assert ["\tunknown\t" in line for line in lines] == wanted
    table = tmp_path / "table.csv"
    printed(capsys, "predict", run, *images, "--out", str(table))
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [(row["class"] == "unknown", row["unknown"]) for row in rows] == [(one, str(int(one))) for one in wanted]

    plain = as_json(capsys, "predict", run, *images, "--no-unknown")["predictions"]
    assert all(one["label"] in ("day", "night") and "unknown" not in one for one in plain)
    printed(capsys, "predict", run, *images, "--no-unknown", "--out", str(table))
    assert set(csv.DictReader(table.read_text().splitlines()).fieldnames or ()) == {*rows[0]} - {"unknown"}


def test_unknown_without_a_threshold_is_an_error(run: str, strange: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = printed(capsys, "predict", run, f"{strange}/1.png", "--unknown", code=2)
    assert not out
    assert "--unknown needs a threshold" in err
    assert f"try: vitral evaluate {run} --unknown FOLDER" in err
    printed(capsys, "predict", run, f"{strange}/1.png", "--no-unknown")
    save(run, Detector("energy", -1e9))
    assert "unknown" in printed(capsys, "predict", run, f"{strange}/1.png", "--unknown")[0]


def test_tables_of_parquet_hold_the_answer(run: str, strange: str, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    save(run, Detector("energy", -1e9))
    from vitral.cli.main import main

    assert main(["predict", run, f"{strange}/1.png", "--out", str(tmp_path / "t.parquet")]) == 0
    (row,) = parquet.read_table(tmp_path / "t.parquet").to_pylist()
    assert (row["class"], row["unknown"]) == ("unknown", 1.0)


def test_weights_keep_their_tensors_apart(run: str, tmp_path: Path) -> None:
    """Statistics are in the file, never in the network; other sizes have no threshold."""
    statistics = fit_statistics(np.random.default_rng(0).normal(size=(30, 8)), np.arange(30) % 2)
    save(run, Detector("distance", 2.0, statistics))
    weights = native.read(Path(run) / "model.safetensors")
    assert set(weights.statistics) == {"means", "whitening"}
    assert not [name for name in weights.state if name.startswith("unknown")]
    assert torch.equal(weights.statistics["means"], statistics["means"])
    larger = loading.read(run, image_size=(16, 24))
    assert "unknown" not in larger.weights.output
    assert not larger.weights.statistics
    assert any("the threshold of unknown images" in note for note in larger.account.notes)
    vitral.convert(run, tmp_path / "copy.safetensors", to="native")
    assert vitral.load(tmp_path / "copy.safetensors").output.unknown.threshold == 2.0
    save(run, Detector("energy", 1.0))
    assert not native.read(Path(run) / "model.safetensors").statistics


def test_weights_without_a_run_save_nothing(run: str, strange: str, capsys: pytest.CaptureFixture[str]) -> None:
    sky = json.loads((Path(run) / "config.json").read_text())["run"]["data"]
    file = f"{run}/model.safetensors"
    before = Path(file).read_bytes()
    reported = as_json(capsys, "evaluate", file, sky, "--unknown", strange, *SKIP)["unknown"]
    assert list(reported["scores"]) == ["confidence", "energy"]
    assert not reported["saved"]
    assert reported["scores"]["energy"]["threshold"] is None
    out, err = printed(capsys, "evaluate", file, sky, "--unknown", strange, *SKIP)
    assert "AUROC" in out
    assert "known kept" not in out
    assert "no threshold is saved" in err
    assert Path(file).read_bytes() == before


def test_options_that_do_not_fit_are_refused_before_anything_is_computed(
    run: str, strange: str, tmp_path: Path, make_images: MakeImages, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    for words, why in (
        ([strange, "--known-share", "1.5"], "between 0 and 1"),
        ([strange, "--tta", "mirror"], "--tta"),
        ([strange, "--knn", "3"], "--unknown goes without"),
        ([str(tmp_path / "empty")], "no images"),
        ([str(tmp_path / "absent")], "no such"),
    ):
        out, err = printed(capsys, "evaluate", run, "--unknown", *words, code=2)
        assert why in err
        assert not out
