"""`vitral embed` and `vitral similar`: files of features, and similar images."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitral
from images import noise
from running import as_json, fork, printed
from vitral.errors import UsageError
from vitral.inference.sources import find
from vitral.workflows.embed import FeatureFile, Features, most_similar
from vitral.workflows.tables.image_table import model_hash
from vitral.workflows.tables.row_file import RowFile

SHARED = ("--device", "cpu", "--precision", "fp32")


@pytest.fixture
def run(trained: vitral.TrainedRun) -> str:
    return str(trained.folder)


@pytest.fixture
def predictor(run):
    return vitral.load(run, device="cpu", precision="fp32")


def paths() -> list[str]:
    return sorted(str(path) for path in Path("photos").rglob("*.png"))


def test_embed_as_npz(capsys, run, photos, predictor):
    found = as_json(capsys, "embed", run, photos, "--out", "f.npz", *SHARED)
    with np.load("f.npz", allow_pickle=False) as file:
        assert list(file["paths"]) == paths()
        assert file["features"].dtype == np.float32
        assert np.allclose(file["features"], predictor.embed(paths()), atol=1e-5)
        assert str(file["model_hash"]) == found["model_hash"] == model_hash(predictor)
        assert (str(file["model"]), str(file["precision"])) == (run, "fp32")
    assert (found["images"], found["errors"], found["resumed_at"]) == (12, 0, 0)
    first = Path("f.npz").read_bytes()
    printed(capsys, "embed", run, photos, "--out", "f.npz", *SHARED)
    assert Path("f.npz").read_bytes() == first


def test_embed_as_parquet(capsys, run, photos, predictor, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("vitral.workflows.tables.feature_formats._GROUP", 5)
    shutil.copy(paths()[0], b"photos/cat/\xff.png")
    printed(capsys, "embed", run, photos, "--out", "f.parquet", *SHARED)
    table = parquet.read_table("f.parquet")
    kind = table.schema.field("features").type
    assert str(kind).startswith("list<"), "of any size: pyarrow 21 reads no null in others"
    assert table.column("path").to_pylist() == [*paths()[:6], r"photos/cat/\xff.png", *paths()[7:]]
    values = np.array(table.column("features").to_pylist(), np.float32)
    assert np.allclose(values, predictor.embed("photos"), atol=1e-5)
    metadata = json.loads(table.schema.metadata[b"vitral"])
    assert metadata == {"model": run, "model_hash": model_hash(predictor), "precision": "fp32"}
    assert parquet.ParquetFile("f.parquet").num_row_groups == 3


def test_hashes_identify_models(predictor, run):
    assert model_hash(vitral.load(run, device="cpu", precision="fp32")) == model_hash(predictor)
    others = [
        vitral.load(run, device="cpu", precision="bf16"),
        vitral.load(run, device="cpu", precision="fp32", image_size=16),
        vitral.inference.predictor.Predictor(
            predictor.model, predictor.preprocessing, ("b", "a"), machine=predictor.machine
        ),
    ]
    assert len({model_hash(one) for one in [predictor, *others]}) == 4


def test_unreadable_images_are_named(capsys, run, photos):
    Path("photos/cat/2.png").write_bytes(b"no image")
    _, err = printed(capsys, "embed", run, photos, "--out", "f.npz", *SHARED, code=1)
    assert "1 of 12 could not be read: f.npz has the reasons" in err
    with np.load("f.npz") as file:
        assert file["features"].shape == (11, 8)
        assert list(file["paths"]) == [path for path in paths() if path != "photos/cat/2.png"]
        assert list(file["unreadable"]) == ["photos/cat/2.png"]
        assert "it is a text" in file["reasons"][0]
    printed(capsys, "embed", run, photos, "--out", "f.parquet", *SHARED, code=1)
    rows = pytest.importorskip("pyarrow.parquet").read_table("f.parquet").to_pylist()
    assert [row["path"] for row in rows] == paths()
    (bad,) = [row for row in rows if row["error"]]
    assert (bad["path"], bad["features"]) == ("photos/cat/2.png", None)
    assert all(len(row["features"]) == 8 for row in rows if not row["error"])
    found = as_json(capsys, "similar", run, "photos/cat/0.png", photos, *SHARED, code=1)
    assert [one["image"] for one in found["errors"]] == ["photos/cat/2.png"]
    for path in paths():
        Path(path).write_bytes(b"no image")
    assert "no readable image" in printed(capsys, "embed", run, photos, *SHARED, code=2)[1]
    assert not list(Path().glob("features*")), "nothing to go on with"


def test_similar(capsys, run, photos, predictor):
    shutil.copy("photos/cat/3.png", "photos/dog/again.png")
    shutil.copy("photos/cat/3.png", "query.png")
    found = as_json(capsys, "similar", run, "query.png", photos, "--top", "4", *SHARED)["similar"]
    features = predictor.embed("photos")
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    query = predictor.embed("query.png")[0]
    cosines = dict(
        zip([one.name for one in predictor("photos")], features @ query / np.linalg.norm(query), strict=True)
    )
    wanted = sorted(cosines, key=lambda name: -cosines[name])[:4]
    assert {found[0]["image"], found[1]["image"]} == {"photos/cat/3.png", "photos/dog/again.png"} == set(wanted[:2])
    assert found[0]["cosine"] == pytest.approx(1, abs=1e-5)
    assert [one["image"] for one in found[2:]] == wanted[2:]
    assert np.allclose([one["cosine"] for one in found], [cosines[one["image"]] for one in found], atol=1e-5)
    out, err = printed(capsys, "similar", run, "photos/cat/3.png", photos, *SHARED)
    lines = [line.split("\t") for line in out.splitlines()]
    assert len(lines) == 10
    assert lines[0] == ["1.0000", "photos/dog/again.png"], "the image itself is left out"
    assert all(name != "photos/cat/3.png" for _, name in lines)
    assert err == ""


def test_similar_in_an_archive_with_a_sheet(capsys, run, photos):
    shutil.make_archive("all", "zip", photos)
    out, err = printed(capsys, "similar", run, "photos/cat/3.png", "all.zip", "--out", "s.png", "--top", "7", *SHARED)
    assert out.splitlines()[0] == "1.0000\tall.zip:cat/3.png"
    assert "Sheet    s.png" in err
    with Image.open("s.png") as sheet:
        assert sheet.width > 6 * 200
        pixels = np.asarray(sheet.convert("RGB"))
    assert pixels.shape[0] > 2 * 200, "two rows"
    query, first = pixels[12:212, 12:212], pixels[12:212, 224:424]
    assert np.array_equal(query, first), "the query, and the same image next to it"
    assert query.std() > 20


def test_refusals(capsys, run, photos):
    for words, why in (
        (["embed", run, photos, "--out", "f.csv"], "written as .npz or .parquet"),
        (["embed", run, photos, "--out", "f"], "has no extension"),
        (["embed", run], "no images to embed"),
        (["embed", run, photos, "--precision", "int8"], "not computed in int8"),
        (["similar", run, "gone.png", photos], "gone.png"),
        (["similar", run, "photos", photos], "not a file"),
        (["similar", run, "photos/cat/0.png"], "no images to search"),
        (["similar", run, "photos/cat/0.png", photos, "--out", "s.jpg"], "written as .png"),
        (["similar", run, "photos/cat/0.png", photos, "--top", "0"], "--top must be"),
    ):
        _, err = printed(capsys, *words, code=2)
        assert why in err
        assert len(err.splitlines()) <= 5


def test_missing_pyarrow_is_reported(capsys, monkeypatch, run, photos):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "vitral[parquet]" in printed(capsys, "embed", run, photos, "--out", "f.parquet", code=2)[1]


def test_equal_and_empty_features():
    values = np.float32([[0, 0], [2, 0], [0, 3], [1, 0]])
    features = Features(["a", "b", "c", "d"], values, [])
    found = most_similar(np.float32([4, 0]), features, 9)
    assert [(one.name, one.cosine) for one in found] == [("b", 1.0), ("d", 1.0), ("a", 0.0), ("c", 0.0)]
    assert [one.name for one in most_similar(np.zeros(2, np.float32), features, 2)] == ["a", "b"]


def test_a_sheet_with_odd_names(capsys, run, photos):
    shutil.copy("photos/cat/0.png", "photos/cat/" + "x" * 200 + "\x1b[2J\n.png")
    Image.fromarray(noise(0, (3, 400))).save("photos/flat.png")
    out, _ = printed(capsys, "similar", run, "photos/cat/0.png", photos, "--out", "s.png", "--top", "14", *SHARED)
    assert "\x1b" not in out
    assert len(out.splitlines()) == 13
    assert "\\x1b[2J\\n.png" in out
    with Image.open("s.png") as sheet:
        assert sheet.height > 2 * 200


SUFFIXES = (".npz", ".parquet")


def write(predictor: Any, out: str, *, resume: bool = False, stop: int = -1) -> Any:
    """Write the features of `photos`, in batches of 2; stop after so many batches."""
    batches = itertools.count()

    def progress(done: int) -> None:
        if next(batches) == stop:
            raise KeyboardInterrupt

    return FeatureFile(predictor, find(("photos",)), out, 2).write(resume=resume, progress=progress)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_stopped_and_resumed(predictor, photos, suffix):
    Path("photos/cat/2.png").write_bytes(b"no image")
    assert write(predictor, f"whole{suffix}").failed == 1
    for stop in range(1, 7):
        with pytest.raises(KeyboardInterrupt):
            write(predictor, f"cut{suffix}", stop=stop)
        with pytest.raises(UsageError, match="--resume"):
            write(predictor, f"cut{suffix}")
        done = write(predictor, f"cut{suffix}", resume=True)
        assert (done.kept, done.failed) == (2 * stop, 1)
        assert Path(f"cut{suffix}").read_bytes() == Path(f"whole{suffix}").read_bytes()
        assert not list(Path().glob("*.partial*"))


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_killed_at_twenty_moments(predictor, photos, suffix):
    """Of 600 images, and of writing the file: the last bytes are those of a command that nobody killed."""
    names = "\n".join(paths() * 50)
    Path("list.txt").write_text(f"{names}\n")

    def file(out: str) -> FeatureFile:
        return FeatureFile(predictor, find(("list.txt",)), out, 8)

    began = time.monotonic()
    file(f"whole{suffix}").write()
    took, moments, kills, code = time.monotonic() - began, random.Random(suffix), 0, -1
    while code or kills < 20:
        assert kills < 200
        child = fork(lambda: file(f"cut{suffix}").write(resume=True) and 0)
        time.sleep(moments.uniform(0, 0.2 * took) if kills < 20 else 3 * took)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        kills += code != 0
    assert kills >= 20
    assert Path(f"cut{suffix}").read_bytes() == Path(f"whole{suffix}").read_bytes()


def test_ctrl_c_prints_the_command_to_resume(capsys, monkeypatch, run, photos):
    appended, calls = RowFile.append, itertools.count()

    def stop(self: RowFile, lines: Any) -> None:
        appended(self, lines)
        if not next(calls):
            os.kill(os.getpid(), signal.SIGINT)

    words = ("embed", run, photos, "--out", "f.npz", "--batch-size", "4", *SHARED)
    with monkeypatch.context() as patched:
        patched.setattr(RowFile, "append", stop)
        _, err = printed(capsys, *words, code=130)
    command = next(line for line in err.splitlines() if "vitral embed" in line)
    assert "--resume" in command
    assert "--batch-size 4" in command
    printed(capsys, *words, "--resume")
    with np.load("f.npz") as file:
        assert list(file["paths"]) == paths()


FINISH = """
import json, resource, sys
from pathlib import Path
import numpy as np
from vitral.workflows.tables import feature_formats
from vitral.workflows.tables.formats import pyarrow

suffix, count, width = sys.argv[1], 100_000, 384
form = feature_formats.FORMATS[suffix](["path", "features", "error"])
partial, target = Path(f"many{suffix}.partial"), Path(f"many{suffix}")
Path(f"{partial}.json").write_text(json.dumps({"model": "m", "model_hash": "h", "precision": "fp32"}))
row = np.random.default_rng(0).normal(size=width).astype(np.float32)
with open(partial, "wb") as file:
    for number in range(count):
        bad = number % 1000 == 3
        features = None if bad else feature_formats.encoded(row + number)
        file.write(form.line([f"photos/{number}.jpg", features, "bad" if bad else None]))
if suffix == ".parquet":
    pyarrow()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
form.finish(partial, target)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_hundred_thousand_rows_take_flat_memory(tmp_path, suffix):
    words = [sys.executable, "-c", FINISH, suffix]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert float(done.stdout) < 50, "MiB"
    if suffix == ".npz":
        with np.load(tmp_path / "many.npz", mmap_mode="r") as file:
            assert file["features"].shape == (99_900, 384)
            assert len(file["unreadable"]) == 100
            assert file["paths"][-1] == "photos/99999.jpg"
            assert np.allclose(file["features"][-1] - file["features"][0], 99_999, rtol=1e-3)
