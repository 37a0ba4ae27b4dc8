"""Networks of other libraries: trained, resumed, loaded again and explained as vitral's own are."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from torch import nn

import vitral
from images import noise
from running import TINY, as_json, in_child, printed, same_bits, weights_of
from vitral.errors import UsageError, VitralError, WeightsError
from vitral.explanation.methods.input_gradient import INPUT_GRADIENT
from vitral.model import Foreign
from vitral.model.own import TRUST
from vitral.model.variants import config
from vitral.training.callbacks import Callback
from vitral.weights import native
from vitral.weights.load import read

OPTIONS = {name: TINY[name] for name in ("epochs", "crop", "flip", "augment", "lr", "device", "precision", "ema")}
OPTIONS |= {"image_size": 32, "batch_size": 4, "val_fraction": 0.2, "erase": 0.5, "mixup": 0.3, "quiet": True}

CODE = """
from torch import nn

def build(classes, channels):
    features = nn.Sequential(nn.Conv2d(channels, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1))
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes))

def features(): return nn.Flatten()
def pooled(classes): return nn.Sequential(nn.Conv2d(3, classes, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
def number(): return 3
def failing(classes):
    raise RuntimeError("my own bug")
class Later(nn.Module):
    def forward(self, x):
        raise ValueError("of the forward")
def later(): return Later()
"""


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of the user, in which the test runs, and an empty cache folder."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "own_nets.py").write_text(CODE)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "own_nets", raising=False)
    return folder


def of_timm() -> nn.Module:
    return timm.create_model("test_vit", num_classes=2, img_size=32)


def of_torchvision() -> nn.Module:
    return torchvision.models.shufflenet_v2_x0_5(num_classes=2)


def of_function() -> nn.Module:
    scope: dict[str, Any] = {}
    exec(CODE, scope)  # noqa: S102 - the text above
    return scope["build"](2, 3)


SOURCES = {
    "timm:test_vit": of_timm,
    "torchvision:shufflenet_v2_x0_5": of_torchvision,
    "own_nets:build": of_function,
}


class StopAfter(Callback):
    """Stop the run as Ctrl-C does, after some batches."""

    def __init__(self, batches: int):
        self.left = batches

    def on_batch(self, loss: torch.Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("source", SOURCES)
def test_a_run_folder_predicts_as_the_library_itself(source, photos, tmp_path):
    vitral.train(str(photos), model=source, out=tmp_path / "run", **OPTIONS)
    predictor = vitral.load(tmp_path / "run", precision="fp32", device="cpu")
    theirs = SOURCES[source]()
    theirs.load_state_dict({name.removeprefix("body."): one for name, one in weights_of(tmp_path / "run").items()})
    images = torch.stack([predictor.prepare(noise(n, (32, 32))) for n in range(3)])
    with torch.no_grad():
        expected = theirs.eval()(predictor.preprocessing.standardize(images))
    torch.testing.assert_close(predictor.logits(images), expected)
    assert vitral.evaluate(tmp_path / "run").images == 4
    assert source in repr(predictor)


def test_a_network_that_no_longer_fits_is_refused_with_the_version_that_built_it(photos, tmp_path, functions, capsys):
    vitral.train(str(photos), model="timm:test_vit", out=tmp_path / "of timm", **OPTIONS)
    weights = read(tmp_path / "of timm").weights
    assert weights.config.version == f"timm {timm.__version__}"
    older = dataclasses.replace(weights.config, version="timm 0.9.1", source="timm:test_vit2")
    with pytest.raises(WeightsError, match=r"timm:test_vit2 was built by timm 0\.9\.1, and timm .* builds") as found:
        native.build(dataclasses.replace(weights, config=older))
    assert "pip install timm==0.9.1" in str(found.value)
    vitral.train(str(photos), model="own_nets:build", out=tmp_path / "own run", **OPTIONS)
    changed = CODE.replace("channels, 4, 3", "channels, 6, 3").replace("(4", "(6")
    (functions / "own_nets.py").write_text(changed + "\n")  # of another size: else bytecode of this second may be used
    sys.modules.pop("own_nets")
    importlib.invalidate_caches()
    _, err = printed(capsys, "evaluate", str(tmp_path / "own run"), code=2)
    assert "own_nets:build was built by other code" in err
    assert "body.0.0.weight is (4, 3, 3, 3), not (6, 3, 3, 3)" in err


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_stopped_and_resumed_it_has_the_same_bits(source, photos, tmp_path):
    vitral.train(str(photos), model=source, out=tmp_path / "whole", **OPTIONS)
    with pytest.raises(vitral.errors.Interrupted):
        vitral.train(str(photos), model=source, out=tmp_path / "parts", callbacks=[StopAfter(6)], **OPTIONS)
    vitral.train(out=tmp_path / "parts", resume=True, quiet=True)
    assert same_bits(weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts"))


class KillAfter(StopAfter):
    """Kill the process after some batches."""

    def on_batch(self, loss: torch.Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("source", ["timm:efficientnet_b0", "torchvision:resnet18", "own_nets:build"])
def test_killed_and_resumed_it_has_the_same_bits(source, photos, tmp_path):
    options = {**OPTIONS, "model": source}

    def killed() -> int:
        vitral.train(str(photos), out=tmp_path / "parts", callbacks=[KillAfter(6)], **options)
        return 0

    vitral.train(str(photos), out=tmp_path / "whole", **options)
    assert in_child(killed) == -signal.SIGKILL
    vitral.train(out=tmp_path / "parts", resume=True, quiet=True)
    assert same_bits(weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts"))


def test_counters_of_batch_norms_stay_integers(photos, tmp_path):
    vitral.train(str(photos), model="own_nets:build", out=tmp_path / "run", **OPTIONS)
    state = vitral.load(tmp_path / "run").model.state_dict()
    assert state["body.0.1.num_batches_tracked"].dtype == torch.int64
    assert state["body.0.1.num_batches_tracked"] > 0


def test_a_file_alone_runs_no_code(photos, tmp_path, monkeypatch, capsys):
    vitral.train(str(photos), model="own_nets:build", out=tmp_path / "run", **OPTIONS)
    monkeypatch.chdir(tmp_path)
    assert vitral.load(tmp_path / "run").classes == ("cat", "dog"), "it was named on this machine"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    del sys.modules["own_nets"]
    _, err = printed(capsys, "predict", str(tmp_path / "run"), str(photos / "cat"), code=2)
    assert "own_nets:build, which was never named here" in err
    assert "own_nets" not in sys.modules
    monkeypatch.setenv(TRUST, "os:system,own_nets:build")
    monkeypatch.chdir(tmp_path / "own")
    assert vitral.load(tmp_path / "run").classes == ("cat", "dog")


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("timm:resnet99", {}, "unknown model of timm 'resnet99'"),
        ("torchvision:resnet81", {}, "resnet18"),
        ("own_nets:nothing", {}, "unknown function of own_nets 'nothing'"),
        ("own_nets:biuld", {}, "nearest: build"),
        ("own_nets:failing", {}, "where: own_nets.py, line 12\n  why: RuntimeError: my own bug"),
        ("own_nets:later", {}, "where: own_nets.py, line 15\n"),
        ("timm/resnet18", {}, "try: --model timm:resnet18"),
        ("no_such_module:build", {}, "cannot import 'no_such_module'"),
        ("own_nets:number", {}, "it returns an int"),
        ("own_nets:features", {}, "it returns (1, 3072), not logits (1, 2)"),
        ("timm:test_vit", {"image_size": 30}, "timm:test_vit"),
        ("torchvision:resnet18", {"channels": 1}, "resnet18 takes 3 channels, the images have 1\n"),
        ("torchvision:resnet18", {"channels": 1}, "try: --channels 3"),
        ("own_nets:build", {"dim": 8}, "own_nets:build has no dim"),
        ("own_nets:build", {"checkpointing": True}, "--checkpointing is for vitral's own networks"),
        ("own_nets:build", {"layer_decay": 0.8}, "--layer-decay is for vitral's own networks"),
        ("own_nets:build", {"batch_size": 5}, "cannot normalize a batch of one image"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(source, options, message, photos, tmp_path):
    with pytest.raises(VitralError) as raised:
        vitral.train(str(photos), model=source, out=tmp_path / "run", **{**OPTIONS, **options})
    assert message in str(raised.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("source", [*SOURCES, "timm:resnet18", "torchvision:resnet18"])
def test_pretraining_is_refused_by_name(source, photos, tmp_path):
    with pytest.raises(UsageError, match=f"{source} cannot be pretrained") as found:
        vitral.pretrain(str(photos), model=source, out=tmp_path / "run", quiet=True)
    assert found.value.why
    assert "--model Nano/4" in str(found.value.hint)


def test_pretraining_from_weights_of_another_library_is_refused(photos, tmp_path):
    vitral.train(str(photos), model="own_nets:build", out=tmp_path / "run", **{**OPTIONS, "epochs": 1})
    with pytest.raises(UsageError, match="own_nets:build cannot be pretrained"):
        vitral.pretrain(str(photos), init=str(tmp_path / "run"), out=tmp_path / "again", quiet=True)


def test_a_linear_probe_of_a_network_of_another_library(photos, tmp_path):
    options = {"recipe": "linear-probe", "val_fraction": 0.2, "quiet": True, "image_size": 32, "device": "cpu"}
    run = vitral.train(str(photos), model="timm:test_efficientnet", out=str(tmp_path / "probe"), **options)
    again = vitral.train(str(photos), init=str(run.folder), out=str(tmp_path / "again"), **options)
    first, second = (native.read(one.folder / "model.safetensors").state for one in (run, again))
    assert all(torch.equal(first[name], second[name]) for name in first if "classifier" not in name), "it was trained"
    assert first["body.classifier.weight"].abs().sum() > 0
    assert again.result["val"] == run.result["val"]
    predictor = vitral.load(str(run.folder), device="cpu")
    assert predictor.model.head.weight.equal(first["body.classifier.weight"])


def test_attention_is_refused_and_gradients_are_the_librarys(photos, tmp_path, capsys):
    run = tmp_path / "run"
    vitral.train(str(photos), model="own_nets:build", out=run, **OPTIONS)
    predictor, image = vitral.load(run, precision="fp32", device="cpu"), str(next(photos.glob("cat/*")))
    for method in ("rollout", "fullgrad+"):
        with pytest.raises(UsageError, match=f"'{method.replace('+', '.')}' cannot explain"):
            vitral.explain(predictor, image, method=method)
    _, err = printed(capsys, "explain", str(run), image, "--method", "rollout", code=2)
    assert "own_nets:build is used as it is" in err
    (found,) = vitral.explain(predictor, image, "dog")
    assert found.method == "input-gradient"
    network: Any = predictor.model
    images = predictor.preprocessing.standardize(predictor.prepare(image)[None])
    of_body = vitral.explain(network.body, images, 1, method="input-gradient")
    np.testing.assert_allclose(found.values, of_body[0].values, rtol=1e-5)
    assert INPUT_GRADIENT.any_network
    (named,) = vitral.explain(predictor, image, method="grad-cam", layer="0.0")
    assert named.values.shape == (16, 16)
    printed(capsys, "explain", str(run), image, "--compare", "--out", str(tmp_path / "maps.png"))
    _, err = printed(capsys, "inspect", str(run), code=2)
    assert "cannot inspect a network of another library" in err


def test_features_are_the_input_of_the_head(photos, tmp_path):
    vitral.train(str(photos), model="own_nets:build", out=tmp_path / "run", **OPTIONS)
    predictor = vitral.load(tmp_path / "run", precision="fp32", device="cpu")
    image, network = noise(1, (32, 32)), predictor.model
    assert isinstance(network, Foreign)
    features = predictor.embed([image])
    logits = predictor.logits(predictor.prepare(image)[None])
    torch.testing.assert_close(network.body[-1](torch.from_numpy(features)), logits)  # type: ignore[index]
    with pytest.raises(UsageError, match="no patches"):
        predictor.embed([image], tokens=True)
    headless = Foreign(config("torchvision:squeezenet1_1", classes=2, image_size=32))
    assert headless.head is None
    with pytest.raises(UsageError, match="no features"):
        vitral.Predictor(headless, predictor.preprocessing, ("cat", "dog"), machine=predictor.machine).embed([image])


def test_other_classes_get_a_zero_head_on_the_same_body(photos, make_images, tmp_path):
    vitral.train(str(photos), model="own_nets:build", out=tmp_path / "run", **OPTIONS)
    more = make_images({"cat": 4, "dog": 4, "hen": 4})
    vitral.train(
        str(more), init=tmp_path / "run", out=tmp_path / "more", **{**OPTIONS, "epochs": 1, "lr": 0.0, "probe": False}
    )
    before, after = weights_of(tmp_path / "run"), weights_of(tmp_path / "more")
    assert torch.equal(before["body.0.0.weight"], after["body.0.0.weight"])
    assert after["body.3.weight"].shape == (3, 4)
    assert not after["body.3.weight"].any()
    with pytest.raises(UsageError, match="cannot adapt the weights"):
        read(tmp_path / "run", channels=1)


@pytest.mark.slow
def test_the_commands_take_the_run(photos, tmp_path, capsys):
    run = str(tmp_path / "run")
    vitral.train(str(photos), model="own_nets:build", out=run, **OPTIONS)
    table = as_json(capsys, "bench", run, "--what", "inference", "--batch", "1", "--rounds", "1")
    assert "vitral" in json.dumps(table)
    made = as_json(capsys, "export", run, "--to", "onnx", "--out", str(tmp_path / "onnx"))
    assert made["proof"]["agreement"] == 1.0
    assert [one["image"] for one in as_json(capsys, "predict", run, str(photos))["predictions"]]
    assert as_json(capsys, "evaluate", run)["images"] == 4


def test_other_layouts_are_refused(photos, tmp_path):
    vitral.train(str(photos), model="own_nets:build", out=tmp_path / "run", **OPTIONS)
    with pytest.raises(WeightsError, match="cannot be written for timm"):
        vitral.convert(tmp_path / "run", tmp_path / "timm", to="timm")


def test_batch_norms_never_get_one_image(make_images, tmp_path):
    photos = make_images({"cat": 13, "dog": 8})
    options = {name: value for name, value in OPTIONS.items() if name != "batch_size"}
    run = vitral.train(str(photos), model="own_nets:build", out=tmp_path / "run", **{**options, "val_fraction": 0.0})
    plan = {line["name"]: line for line in vitral.training.run_folder.RunFolder(run.folder).read_config()["plan"]}
    assert "batch norms" in plan["batch"]["reason"]


def test_positions_of_the_library_do_not_decay():
    network = Foreign(config("timm:test_vit", classes=2, image_size=32))
    assert "body.pos_embed" in network.no_decay
    from vitral.training.optimizer_set import parameter_groups
    from vitral.training.options import Run

    groups = parameter_groups(network, Run(weight_decay=0.1))
    decayed = {name for one in groups if one["weight_decay"] for name in one["names"]}
    assert "body.pos_embed" not in decayed
    assert "body.head.weight" in decayed


def test_the_table_of_layers_counts_as_the_library():
    summary = vitral.summarize("torchvision:resnet18")
    assert summary.parameters == sum(p.numel() for p in torchvision.models.resnet18().parameters())
    assert summary.flops == pytest.approx(2 * 1.814e9, rel=0.01)  # 1.81 GMACs
