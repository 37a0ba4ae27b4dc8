"""Test the linear probe: its head equals scikit-learn's regression, its run folder is an ordinary one."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

import vitral
from images import noise
from running import same_bits, weights_of
from vitral.cli.main import main
from vitral.data import load as load_data
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batches
from vitral.device import choose
from vitral.errors import DataError, UsageError
from vitral.model import ViT, ViTConfig
from vitral.recipes.linear_probe import STRENGTHS, UNSUPPORTED
from vitral.training.options import Run
from vitral.weights import native
from vitral.workflows.running.linear_probe import fit_probe
from vitral.workflows.tables.features import features_of

NETWORK: dict[str, Any] = {"model": "mu/4", "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 32, "image_size": 8}
OPTIONS: dict[str, Any] = {**NETWORK, "recipe": "linear-probe", "device": "cpu", "precision": "fp32", "quiet": True}
MACHINE = choose("cpu", "fp32")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a temporary folder as the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home/vitral/features"


@pytest.fixture
def colors(tmp_path: Path) -> Path:
    """Noise that is redder, greener or bluer, with 30 training and 10 test images of each."""
    for channel, label in enumerate(("red", "green", "blue")):
        for split, count in (("train", 30), ("test", 10)):
            folder = tmp_path / "colors" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = noise(1000 * channel + number + 500 * (split == "test"), (8, 8)) // 2 + 20
                pixels[..., channel] += 35
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "colors"


def network(classes: int, **changes: Any) -> ViT:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        shape = {"image_size": 8, "patch_size": 4, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 32}
        return ViT(ViTConfig(**{**shape, "classes": classes, **changes})).eval()


def batches(data: Path, split: str) -> Batches:
    return Batches(load_data(str(data))[split], Preprocessing((8, 8)), batch_size=32, device=MACHINE.device)


# ---------------------------------------------------------------- the head


def test_the_head_is_the_regression_on_standardized_features(colors):
    """The network with the folded head gives the probabilities of scikit-learn's pipeline."""
    model, train, test = network(3), batches(colors, "train"), batches(colors, "test")
    probe = fit_probe(model, train, test, 3, MACHINE)
    assert [line["C"] for line in probe.history] == list(STRENGTHS)
    assert probe.best == max(probe.history, key=lambda line: (line["val_accuracy"], -line["val_loss"]))
    probe.write_into(model)
    scaling = Preprocessing((8, 8))
    x, y = features_of(model, train.split, scaling, MACHINE).double().numpy(), train.split.labels
    scaler = StandardScaler().fit(x)
    own = LogisticRegression(C=probe.best["C"], max_iter=5000, tol=1e-7).fit(scaler.transform(x), y)
    asked = features_of(model, test.split, scaling, MACHINE).double().numpy()
    wanted = own.predict_proba(scaler.transform(asked))
    with torch.no_grad():
        pixels = torch.stack([scaling.geometry(test.split.image(i, 3)) for i in range(len(test.split))])
        found = model(scaling.standardize(pixels)).softmax(1).numpy()
    assert np.abs(found - wanted).max() < 5e-3  # both stop short of the optimum
    assert probe.best["val_accuracy"] == (found.argmax(1) == test.split.labels).mean()
    assert probe.best["val_accuracy"] > 0.8  # chance is a third


def test_two_classes_and_a_distillation_token(colors):
    """One row of coefficients becomes two; of the two heads one gets all weights."""
    shutil.rmtree(colors / "train/blue")
    shutil.rmtree(colors / "test/blue")
    train, test = batches(colors, "train"), batches(colors, "test")
    model = network(2, dist_token=True)
    torch.nn.init.normal_(model.head_dist.weight)
    probe = fit_probe(model, train, test, 2, MACHINE)
    features = features_of(model, test.split, Preprocessing((8, 8)), MACHINE)
    probe.write_into(model)
    with torch.no_grad():
        images = next(iter(test.epoch())).images
        found = model(Preprocessing((8, 8)).standardize(images))
    assert torch.allclose(found, features @ probe.weight.T + probe.bias, atol=1e-4)
    assert torch.allclose(probe.weight[0], -probe.weight[1], atol=1e-6)
    assert probe.best["val_accuracy"] > 0.7


def test_constant_features_and_absent_classes(colors):
    train, test = batches(colors, "train"), batches(colors, "test")
    model = network(5)
    with torch.no_grad():
        model.norm.weight[3] = 0.0  # this feature is its bias for every image
        model.norm.bias[3] = 7.0
    probe = fit_probe(model, train, test, 5, MACHINE)  # of five classes three have images
    assert probe.weight.isfinite().all()
    features = features_of(model, test.split, Preprocessing((8, 8)), MACHINE)
    assert int((features @ probe.weight.T + probe.bias).argmax(1).max()) < 3
    train.split = dataclasses.replace(train.split, labels=np.zeros_like(train.split.labels))
    with pytest.raises(DataError, match="all of one class"):
        fit_probe(model, train, test, 5, MACHINE)


def test_rare_classes_can_count_more(colors):
    for number in range(4, 30):
        (colors / f"train/red/{number}.png").unlink()
    train, test = batches(colors, "train"), batches(colors, "test")
    rare = [fit_probe(network(3), train, test, 3, MACHINE, balanced=balanced).bias[2] for balanced in (False, True)]
    assert rare[1] != rare[0]


# ---------------------------------------------------------------- the run


@pytest.mark.report
def test_the_run_is_an_ordinary_one(colors, tmp_path, home, capsys):
    run = vitral.train(str(colors), out=str(tmp_path / "run"), **OPTIONS)
    names = {path.name for path in run.folder.iterdir()}
    texts = {"config.json", "held-out.jsonl", "manifest.json", "metrics.jsonl", "result.json"}
    assert names == {*texts, "model.safetensors", "report.html"}
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["C"] for line in lines] == list(STRENGTHS)
    best = max(line["val_accuracy"] for line in lines)
    assert run.result["val_accuracy"] == best
    assert run.result["test_accuracy"] > 0.8
    assert (run.result["epochs"], run.result["best_epoch"], run.result["images_per_second"]) == (None, None, None)
    assert json.loads((run.folder / "result.json").read_text()) == run.result
    assert "the best on validation" in (run.folder / "report.html").read_text()
    assert native.read(run.folder / "model.safetensors").trained["val_accuracy"] == best
    assert len(list(home.iterdir())) == 2
    assert vitral.evaluate(run.folder, device="cpu", precision="fp32").accuracy == run.result["test_accuracy"]
    assert vitral.load(run.folder)(colors / "test/red/0.png").label in ("red", "green", "blue")
    assert vitral.train(out=str(run.folder), resume=True).result == run.result
    assert "already finished" in " ".join(capsys.readouterr().err.split())
    again = vitral.train(str(colors), out=str(tmp_path / "again"), **OPTIONS)
    assert same_bits(weights_of(run.folder), weights_of(again.folder))


def test_only_the_head_changes(trained, tmp_path):
    data = trained.result["data"]
    run = vitral.train(data, init=str(trained.folder), recipe="linear-probe", out=str(tmp_path / "run"), quiet=True)
    before, after = weights_of(trained.folder), weights_of(run.folder)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"head.weight", "head.bias"}
    assert run.result["test_accuracy"] == 1.0
    plan = {line["name"]: line for line in json.loads((run.folder / "config.json").read_text())["plan"]}
    assert plan["init"]["value"] == str(trained.folder)
    assert plan["optimizer"]["value"] == "L-BFGS"


def test_a_stopped_run_starts_again(colors, tmp_path, monkeypatch, capsys):
    from vitral.evaluation.probe import LinearFits

    original, seen = LinearFits.__call__, []

    def stop(fits: Any, strength: float) -> Any:
        seen.append(strength)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return original(fits, strength)

    monkeypatch.setattr(LinearFits, "__call__", stop)
    words = ["train", str(colors), "--recipe", "linear-probe", "--out", str(tmp_path / "run"), "--quiet"]
    for name, value in NETWORK.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    assert main(words) == 130
    assert "--resume" in capsys.readouterr().err
    assert main(["train", "--out", str(tmp_path / "run"), "--resume"]) == 0
    assert "read from" in capsys.readouterr().err
    assert (tmp_path / "run/result.json").is_file()


def test_invalid_options_are_refused(colors, tmp_path):
    assert set(UNSUPPORTED) <= {field.name for field in dataclasses.fields(Run)}
    with pytest.raises(UsageError, match="--recipe linear-probe does not support --epochs"):
        vitral.train(str(colors), epochs=3, **OPTIONS)
    shutil.rmtree(colors / "test")
    with pytest.raises(UsageError, match="needs validation"):
        vitral.train(str(colors), val_fraction=0.0, out=str(tmp_path / "run"), **OPTIONS)
    tanh = {**OPTIONS, "model": "mnist-7562"}
    for name in set(NETWORK) - {"model"}:
        del tanh[name]
    with pytest.raises(UsageError, match="does not support a linear probe"):
        vitral.train(str(colors), out=str(tmp_path / "run"), **tanh)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_ants_and_bees_from_random_weights(shared_data, tmp_path):
    """244 small photographs and three random blocks: better than always predicting the larger class."""
    options = {**OPTIONS, "model": "S/16", "depth": 3, "dim": 96, "heads": 3, "mlp_dim": 192, "image_size": 64}
    run = vitral.train(str(shared_data / "hymenoptera.tar"), out=str(tmp_path / "run"), pool="mean", **options)
    labels = load_data(str(shared_data / "hymenoptera.tar"))["val"].labels
    assert run.result["val_accuracy"] > np.bincount(labels).max() / len(labels)
