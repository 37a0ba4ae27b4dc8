"""The commands on a simulated Windows (`windows.py`): what works there, and what says that it does not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from running import as_words
from vitral.atomic import is_temporary

SCRIPT = Path(__file__).with_name("windows.py")
OPTIONS = {
    "model": "mu/4",
    "dim": 8,
    "depth": 2,
    "heads": 2,
    "mlp_dim": 8,
    "image_size": 8,
    "epochs": 2,
    "batch_size": 4,
    "device": "cpu",
    "precision": "fp32",
    "init": "none",
    "threads": 1,
}
TINY = as_words(OPTIONS)
SETTINGS = [f"{name}={value}" for name, value in OPTIONS.items()]
ONE = "photos/röse/0.png"
COMMANDS: dict[str, list[str]] = {
    "data check": ["data", "check", "photos"],
    "train": ["train", "photos", *TINY, "--out", "run"],
    "train again": ["train", "photos", *TINY, "--out", "run", "--overwrite"],
    "train on": ["train", "--out", "run", "--resume"],
    "train on an archive": ["train", "photos.zip", *TINY, "--out", "zipped"],
    "train by workers": ["train", "many", *TINY, "--out", "worked", "--workers", "1"],
    "train in another folder": ["train", "photos", *TINY, "--out", "elsewhere/deep/run"],
    "pretrain": ["pretrain", "photos", *TINY, "--out", "pretrained"],
    "predict": ["predict", "run", ONE],
    "predict to csv": ["predict", "run", "photos", "--out", "p.csv"],
    "predict to jsonl": ["predict", "run", "photos", "--out", "p.jsonl"],
    "predict to parquet": ["predict", "run", "photos", "--out", "p.parquet"],
    "predict an archive": ["predict", "run", "photos.zip", "--out", "z.csv"],
    "evaluate": ["evaluate", "run"],
    "embed": ["embed", "run", "photos", "--out", "e.npz"],
    "explain": ["explain", "run", ONE, "--out", "map.png"],
    "inspect": ["inspect", "run", "--out", "inspected"],
    "export": ["export", "run", "--to", "torch", "--out", "net"],
    "export again": ["export", "run", "--to", "torch", "--out", "net", "--overwrite"],
    "convert": ["convert", "run", "converted", "--to", "timm"],
    "data shard": ["data", "shard", "photos", "--out", "shards"],
    "train on shards": ["train", "shards", *TINY, "--out", "sharded"],
    "verify": ["verify", "run"],
    "replay": ["replay", "run", "--step", "1"],
    "compare": ["compare", "run", "elsewhere/deep/run"],
    "summary": ["summary", "run"],
    "models": ["models"],
    "data cache": ["data", "cache"],
    "quantize": ["quantize", "run", "photos"],
    "similar": ["similar", "run", ONE, "photos", "--top", "2"],
    "study": [
        "study",
        "options",
        "photos",
        "--vary",
        "lr=0.001,0.01",
        "--seeds",
        "1",
        "--out",
        "study",
        "--set",
        *SETTINGS,
    ],
    "serve": ["serve", "run", "--port", "48713"],
}
REFUSED: dict[str, list[str]] = {"a pickle": ["predict", "weights.pth", ONE]}


def photos(folder: Path, images: int) -> None:
    for name in ("lys", "röse"):
        (folder / name).mkdir(parents=True)
        for i in range(images):
            pixels = np.random.default_rng((i, len(name))).integers(0, 255, (12, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windows")
    photos(folder / "photos", 10)
    photos(folder / "many", 40)
    shutil.make_archive(str(folder / "photos"), "zip", folder / "photos")
    torch.save({"weight": torch.ones(3)}, folder / "weights.pth")
    return folder


@pytest.fixture(scope="module")
def done(place: Path) -> dict[str, Any]:
    """Results of all commands by name, one after the other in one process."""
    every = {**COMMANDS, **REFUSED}
    changed = {"XDG_CACHE_HOME": str(place / "cache"), "PYTHONWARNDEFAULTENCODING": "1", "COLUMNS": "100"}
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), str(place)],
        input=json.dumps(list(every.values())),
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
        env={**os.environ, **changed},
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return dict(zip(every, json.loads(ended.stdout), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_works(done, name):
    result = done[name]
    assert result["code"] == (130 if name == "serve" else 0), result["stderr"]
    assert "bug in vitral" not in result["stderr"]
    assert "cannot be written" not in result["stderr"], "of the cache"


@pytest.mark.slow
def test_files_are_those_of_other_systems(done, place):
    written = (place / "run/config.json").read_bytes()
    assert b"\r" not in written
    assert json.loads(written)["paths"]["data"] == "../photos"
    rows = (place / "p.csv").read_bytes().decode().splitlines()
    assert len(rows) == 21
    assert any("röse" in row for row in rows)
    assert b"\r" not in (place / "p.csv").read_bytes()
    assert done["serve"]["answers"] == [200]
    assert {"lys", "röse"} <= set(done["predict"]["stdout"].split())


@pytest.mark.slow
def test_nothing_temporary_is_left(done, place):
    left = [
        str(one.relative_to(place))
        for one in place.rglob("*")
        if one.suffix in (".tmp", ".partial", ".part") or is_temporary(one.name)
    ]
    assert not left


@pytest.mark.slow
def test_what_needs_a_sandbox_says_the_way_out(done):
    result = done["a pickle"]
    assert result["code"] == 2
    assert "no sandbox on Windows" in result["stderr"]
    assert "weights_only=True" in result["stderr"]
    assert "safetensors" in result["stderr"]
