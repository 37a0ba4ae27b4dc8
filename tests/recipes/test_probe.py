"""The linear probe: its head is scikit-learn's regression, its run folder is an ordinary one."""

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
from pictures import noise
from running import same_bits, weights_of
from vitral.cli import main
from vitral.data import load as load_data
from vitral.data.loader import Batches
from vitral.data.transforms import Preprocessing
from vitral.device import choose
from vitral.errors import DataError, UsageError
from vitral.model import ViT, ViTConfig
from vitral.recipes.features import features_of
from vitral.recipes.probe import STRENGTHS, UNREAD, fit_probe
from vitral.training.run import Run
from vitral.weights import native

NETWORK: dict[str, Any] = {"model": "mu/4", "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 32, "image_size": 8}
OPTIONS: dict[str, Any] = {**NETWORK, "recipe": "linear-probe", "device": "cpu", "precision": "fp32", "quiet": True}
MACHINE = choose("cpu", "fp32")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache is the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home/vitral/features"


@pytest.fixture
def colours(tmp_path: Path) -> Path:
    """Pictures of noise that is redder, greener or bluer: 30 for training, 10 for test, of each."""
    for channel, label in enumerate(("red", "green", "blue")):
        for split, count in (("train", 30), ("test", 10)):
            folder = tmp_path / "colours" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = noise(1000 * channel + number + 500 * (split == "test"), (8, 8)) // 2 + 20
                pixels[..., channel] += 35
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "colours"


def network(classes: int, **changes: Any) -> ViT:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        shape = {"image_size": 8, "patch_size": 4, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 32}
        return ViT(ViTConfig(**{**shape, "classes": classes, **changes})).eval()


def batches(data: Path, split: str) -> Batches:
    return Batches(load_data(str(data))[split], Preprocessing((8, 8)), batch_size=32, device=MACHINE.device)


# ---------------------------------------------------------------- the head


def test_the_head_is_the_regression_on_standardised_features(colours):
    """The network with the folded head gives the probabilities of scikit-learn's own pipeline."""
    model, train, test = network(3), batches(colours, "train"), batches(colours, "test")
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
        found = model(scaling.standardise(pixels)).softmax(1).numpy()
    assert np.abs(found - wanted).max() < 5e-3  # both stop short of the optimum
    assert probe.best["val_accuracy"] == (found.argmax(1) == test.split.labels).mean()
    assert probe.best["val_accuracy"] > 0.8  # chance is a third


def test_two_classes_and_a_distillation_token(colours):
    """One row of coefficients becomes two; of two heads one has it all."""
    shutil.rmtree(colours / "train/blue")
    shutil.rmtree(colours / "test/blue")
    train, test = batches(colours, "train"), batches(colours, "test")
    model = network(2, dist_token=True)
    torch.nn.init.normal_(model.head_dist.weight)
    probe = fit_probe(model, train, test, 2, MACHINE)
    features = features_of(model, test.split, Preprocessing((8, 8)), MACHINE)
    probe.write_into(model)
    with torch.no_grad():
        images = next(iter(test.epoch())).images
        found = model(Preprocessing((8, 8)).standardise(images))
    assert torch.allclose(found, features @ probe.weight.T + probe.bias, atol=1e-4)
    assert torch.allclose(probe.weight[0], -probe.weight[1], atol=1e-6)
    assert probe.best["val_accuracy"] > 0.7


def test_constant_features_and_absent_classes(colours):
    train, test = batches(colours, "train"), batches(colours, "test")
    model = network(5)
    with torch.no_grad():
        model.norm.weight[3] = 0.0  # this feature is its bias for every picture
        model.norm.bias[3] = 7.0
    probe = fit_probe(model, train, test, 5, MACHINE)  # of five classes three have pictures
    assert probe.weight.isfinite().all()
    features = features_of(model, test.split, Preprocessing((8, 8)), MACHINE)
    assert int((features @ probe.weight.T + probe.bias).argmax(1).max()) < 3
    train.split = dataclasses.replace(train.split, labels=np.zeros_like(train.split.labels))
    with pytest.raises(DataError, match="all of one class"):
        fit_probe(model, train, test, 5, MACHINE)


def test_rare_classes_can_count_more(colours):
    for number in range(4, 30):
        (colours / f"train/red/{number}.png").unlink()
    train, test = batches(colours, "train"), batches(colours, "test")
    rare = [fit_probe(network(3), train, test, 3, MACHINE, balanced=balanced).bias[2] for balanced in (False, True)]
    assert rare[1] != rare[0]


# ---------------------------------------------------------------- the run


def test_the_run_is_an_ordinary_one(colours, tmp_path, home, capsys):
    run = vitral.train(str(colours), out=str(tmp_path / "run"), **OPTIONS)
    names = {path.name for path in run.folder.iterdir()}
    assert names == {"config.json", "metrics.jsonl", "model.safetensors", "report.html", "result.json"}
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
    assert vitral.load(run.folder)(colours / "test/red/0.png").label in ("red", "green", "blue")
    assert vitral.train(out=str(run.folder), resume=True).result == run.result
    assert "finished already" in " ".join(capsys.readouterr().err.split())
    again = vitral.train(str(colours), out=str(tmp_path / "again"), **OPTIONS)
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


def test_a_run_that_was_stopped_begins_again(colours, tmp_path, monkeypatch, capsys):
    from vitral.recipes import probe

    original, seen = probe._Fits.__call__, []

    def stop(fits: Any, strength: float) -> Any:
        seen.append(strength)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return original(fits, strength)

    monkeypatch.setattr(probe._Fits, "__call__", stop)
    words = ["train", str(colours), "--recipe", "linear-probe", "--out", str(tmp_path / "run"), "--quiet"]
    for name, value in NETWORK.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    assert main(words) == 130
    assert "--resume" in capsys.readouterr().err
    assert main(["train", "--out", str(tmp_path / "run"), "--resume"]) == 0
    assert "taken from" in capsys.readouterr().err
    assert (tmp_path / "run/result.json").is_file()


def test_what_makes_no_sense_is_refused(colours, tmp_path):
    assert set(UNREAD) <= {field.name for field in dataclasses.fields(Run)}
    with pytest.raises(UsageError, match="--epochs means nothing to --recipe linear-probe"):
        vitral.train(str(colours), epochs=3, **OPTIONS)
    shutil.rmtree(colours / "test")
    with pytest.raises(UsageError, match="needs validation"):
        vitral.train(str(colours), val_fraction=0.0, out=str(tmp_path / "run"), **OPTIONS)
    tanh = {**OPTIONS, "model": "mnist-7562"}
    for name in set(NETWORK) - {"model"}:
        del tanh[name]
    with pytest.raises(UsageError, match="cannot be probed"):
        vitral.train(str(colours), out=str(tmp_path / "run"), **tanh)
    assert not (tmp_path / "run").exists()


def test_ants_and_bees_from_random_weights(shared_data, tmp_path):
    """244 photographs, small and through three random blocks: better than always naming the larger class."""
    options = {**OPTIONS, "model": "S/16", "depth": 3, "dim": 96, "heads": 3, "mlp_dim": 192, "image_size": 64}
    run = vitral.train(str(shared_data / "hymenoptera.tar"), out=str(tmp_path / "run"), pool="mean", **options)
    labels = load_data(str(shared_data / "hymenoptera.tar"))["val"].labels
    assert run.result["val_accuracy"] > np.bincount(labels).max() / len(labels)
