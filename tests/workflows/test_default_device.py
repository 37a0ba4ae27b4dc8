"""A default device of the host has no effect: vitral names the device of each tensor, or computes on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from images import noise
from vitral.device import choose
from vitral.export.exporting import export_model
from vitral.inference.engines.int8 import observe, unsupported_reason

IMAGE = noise(0, (32, 32), 3)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for number, name in enumerate("ab"):
        (folder / name).mkdir()
        for i in range(10):
            Image.fromarray(noise(10 * number + i, (32, 32), 3)).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(photos, tmp_path_factory.mktemp("runs") / "run")


def trained(photos: Path, out: Path) -> Path:
    vitral.train(
        data=photos, model="mu/16", init="none", image_size=32, epochs=1, quiet=True, device="cpu", ema=0.5, out=out
    )
    return out


@pytest.fixture
def on_meta() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("on_meta")
def test_training_and_evaluation(photos, run, tmp_path):
    again = trained(photos, tmp_path / "again")
    assert vitral.evaluate(again, device="cpu").accuracy == vitral.evaluate(run, device="cpu").accuracy
    assert vitral.evaluate(run, device="cpu", engine="packed", tta="mirror").images > 0
    assert torch.get_default_device().type == "meta"


CALLS: dict[str, Callable[[Path, Path], Any]] = {
    "image": lambda run, _: vitral.load(run, device="cpu")(IMAGE),
    "folder": lambda run, photos: vitral.load(run, device="cpu")(photos),
    "plain": lambda run, _: vitral.load(run, device="cpu", engine="plain", precision="fp32")(IMAGE),
    "packed": lambda run, _: vitral.load(run, device="cpu", engine="packed", precision="bf16")(IMAGE),
    "packed-fp32": lambda run, _: vitral.load(run, device="cpu", engine="packed", precision="fp32")(IMAGE),
    "views": lambda run, _: vitral.load(run, device="cpu", tta="both")(IMAGE),
    "embed": lambda run, photos: vitral.load(run, device="cpu").embed(photos, tokens=True),
    "resized": lambda run, _: vitral.load(run, device="cpu", image_size=64, channels=1)(IMAGE),
    "backbone": lambda run, _: vitral.load("backbone", device="cpu")(IMAGE),
    "explain": lambda run, _: vitral.explain(vitral.load(run, device="cpu"), IMAGE, method="rollout"),
    "occlusion": lambda run, _: vitral.explain(vitral.load(run, device="cpu"), IMAGE, method="occlusion"),
    "inspect": lambda run, photos: vitral.inspect(run, photos, device="cpu"),
    "export": lambda run, _: export_model(run, "torch", out=run.parent / "exported", overwrite=True),
    "summarize": lambda run, _: vitral.summarize("mu/16"),
    "verify": lambda run, _: vitral.verify(run),
    "check": lambda run, photos: vitral.check_data(vitral.load_data(str(photos))),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("on_meta")
def test_every_call(name, run, photos):
    assert CALLS[name](run, photos) is not None


@pytest.mark.usefixtures("on_meta")
def test_conversion(run, tmp_path):
    for to in ("native", "timm", "hf"):
        vitral.convert(run, tmp_path / to, to=to)
        vitral.load(tmp_path / to, device="cpu")(IMAGE)


@pytest.mark.usefixtures("on_meta")
def test_integers(run):
    network = vitral.load(run, device="cpu", engine="plain", precision="fp32").model
    if why := unsupported_reason(network):
        pytest.skip(why)
    ranges = observe(network, [torch.zeros(2, 3, 32, 32, device="cpu") + 0.5])
    recipe = vitral.Preprocessing((32, 32))
    found = vitral.Predictor(network, recipe, ["a", "b"], machine=choose("cpu"), engine="packed", ranges=ranges)(IMAGE)
    assert np.isclose(found.probabilities.sum(), 1)
