"""Tables of predictions: every row, byte for byte, also after kills, full disks and malicious names."""

from __future__ import annotations

import csv
import errno
import json
import os
import random
import resource
import shlex
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitral
from images import noise
from running import in_child, mostly_slow, printed
from vitral.atomic import is_temporary
from vitral.cli.main import main
from vitral.errors import RunError, UsageError, WriteError
from vitral.inference.predictor import Predictor
from vitral.inference.sources import find
from vitral.workflows.predict import PredictionFile
from vitral.workflows.tables import row_file
from vitral.workflows.tables.formats import FORMATS, Csv, format_of
from vitral.workflows.tables.image_table import Written

SUFFIXES = (".csv", ".jsonl", ".parquet")


@pytest.fixture(scope="module")
def predictor(trained: vitral.TrainedRun) -> Predictor:
    return vitral.load(trained.folder, device="cpu", precision="fp32")


@pytest.fixture(autouse=True)
def _photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_images) -> None:
    """Create 23 images in `photos`, two of them unreadable, and a list that names all of them six times."""
    monkeypatch.chdir(tmp_path)
    make_images({"a": 11, "b": 12})
    Path("photos/a/3.png").write_bytes(b"no image")
    Path("photos/b/7.png").write_bytes(b"")
    names = sorted(str(path) for path in Path("photos").rglob("*.png"))
    Path("list.txt").write_text("\n".join(names * 6) + "\n")


def write(predictor: Predictor, out: str, *sources: str, resume: bool = False, **options: Any) -> Written:
    table = PredictionFile(predictor, find(sources or ("photos",)), out, **{"batch_size": 4, **options})
    return table.write(resume=resume)


def rows(path: str) -> list[dict[str, Any]]:
    """Read the rows of a table of any format, as strings and floats; empty cells are None."""
    if path.endswith(".csv"):
        with open(path, encoding="utf-8", newline="") as file:
            return [{k: v or None for k, v in row.items()} for row in csv.DictReader(file)]
    if path.endswith(".jsonl"):
        return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]
    return pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()


def left_over() -> list[str]:
    """Return partial files. A killed process may leave temporary files for an hour, which do not count."""
    return sorted(path.name for path in Path().iterdir() if "partial" in path.name and not is_temporary(path.name))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_each_row(predictor, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    done = write(predictor, f"t{suffix}", top=2, all=True)
    assert (done.images, done.failed, done.kept) == (23, 2, 0)
    found = rows(f"t{suffix}")
    assert list(found[0]) == [
        "path",
        "class",
        "probability",
        "label_1",
        "probability_1",
        "label_2",
        "probability_2",
        "p_day",
        "p_night",
        "error",
    ]
    wanted = list(predictor.stream("photos", 4))
    assert [row["path"] for row in found] == [one.name for one in wanted]
    for row, one in zip(found, wanted, strict=True):
        if isinstance(one, vitral.Prediction):
            assert (row["class"], row["label_1"], row["error"]) == (one.label, one.label, None)
            assert np.float32(row["probability"]) == np.float32(row["probability_1"]) == np.float32(one.confidence)
            assert row["label_2"] == one.top(2)[1][0]
            both = np.array([np.float32(row["p_day"]), np.float32(row["p_night"])])
            assert np.array_equal(both, one.probabilities), "every digit of fp32"
        else:
            assert {row[name] for name in list(row)[1:-1]} == {None}
            assert row["error"] == one.why
    assert left_over() == []


def test_columns_follow_top(predictor):
    write(predictor, "t.csv", top=1)
    assert Path("t.csv").read_text().splitlines()[0] == "path,class,probability,error"
    write(predictor, "t.csv", top=99)
    assert Path("t.csv").read_text().splitlines()[0].count("label_") == 2


def test_exit_code_and_summary(capsys, trained):
    run = str(trained.folder)
    out, err = printed(capsys, "predict", run, "photos", "--out", "t.csv", code=1)
    assert out == ""
    for part in ("t.csv: 23 rows", "2 of 23 could not be read", "column 'error'"):
        assert part in err
    out, _ = printed(capsys, "predict", run, "photos/b/0.png", "--out", "t.csv", "--format", "json")
    text = json.loads(out)
    assert (text["out"], text["images"], text["errors"], len(text["model_hash"])) == ("t.csv", 1, 0, 64)
    for words, why in (
        (["--resume"], "--resume goes with --out"),
        (["--all"], "--all goes with --out"),
        (["--out", "t.xlsx"], "are written as .csv"),
        (["--out", "photos/t"], "has no extension"),
    ):
        assert why in printed(capsys, "predict", run, "photos", *words, code=2)[1]
    Path("folder.csv").mkdir()
    assert "written to a file" in printed(capsys, "predict", run, "photos", "--out", "folder.csv", code=2)[1]


def test_lists_and_archives_are_printed_too(capsys, trained):
    shutil.make_archive("all", "zip", "photos")
    out, _ = printed(capsys, "predict", str(trained.folder), "all.zip", code=1)
    assert len(out.splitlines()) == 21
    assert out.startswith("all.zip:a/0.png\t")
    Path("list.txt").write_text("photos/a/1.png\ngone.png\n")
    out, err = printed(capsys, "predict", str(trained.folder), "list.txt", code=1)
    assert out.startswith("photos/a/1.png\t")
    assert "where: list.txt, line 2\n  why: gone.png: no such file\n  try: " in err


def test_a_complete_table_has_nothing_to_resume(capsys, trained):
    for command, out in (("predict", "t.csv"), ("embed", "f.npz")):
        words = [command, str(trained.folder), "photos/a", "--out", out, "--resume"]
        assert "nothing to resume" not in printed(capsys, *words, code=1)[1]
        assert (
            f"note: {out} is not an unfinished file: there is nothing to resume" in printed(capsys, *words, code=1)[1]
        )


MALICIOUS = {
    "=cmd|'C calc'!A0.png": "./=cmd|'C calc'!A0.png",
    "+1.png": "./+1.png",
    "-1.png": "./-1.png",
    "@SUM(1).png": "./@SUM(1).png",
    "\t=1.png": "\\t=1.png",
    "a\x1b[2J\n\r\x07.png": "a\\x1b[2J\\n\\r\\x07.png",
    'a,"b";\'c.png': 'a,"b";\'c.png',
    "\u202egnp.png": "\\u202egnp.png",
    "ünï 猫.png": "ünï 猫.png",
    "\udcff.png": "\\xff.png",
}


def test_malicious_names(predictor, monkeypatch):
    Path("odd").mkdir()
    for number, name in enumerate(MALICIOUS):
        Image.fromarray(noise(number)).save("image.png")
        shutil.move("image.png", os.fsencode(f"odd/{name}"))
    monkeypatch.chdir("odd")
    write(predictor, "../t.csv", ".")
    found = rows("../t.csv")
    assert {row["path"] for row in found} == set(MALICIOUS.values())
    assert all(row["error"] is None for row in found)
    text = Path("../t.csv").read_bytes()
    assert text.count(b"\n") == len(MALICIOUS) + 1
    assert not set(text) & {*range(10), *range(11, 32)}
    for row in found:
        if not {"\\"} & set(row["path"]):
            assert Path(row["path"]).is_file(), "the path in the table names the image"
    write(predictor, "../t.jsonl", ".")
    exact = {*MALICIOUS, r"\xff.png"} - {"\udcff.png"}
    assert {row["path"] for row in rows("../t.jsonl")} == exact
    pytest.importorskip("pyarrow")
    write(predictor, "../t.parquet", ".")
    assert {row["path"] for row in rows("../t.parquet")} == exact


def test_malicious_classes_and_messages():
    table = Csv(["path", "class", "error"])
    line = table.line(["a.png", "=1+1", None]) + table.line(["a.png", "-1.5", "@why\n"]) + table.line(["", "-x", "+"])
    assert line == b"a.png,'=1+1,\na.png,-1.5,'@why\\n\n,'-x,'+\n"
    assert Csv(["path", "p_=1", "error"]).head() == b"path,p_=1,error\n"


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_killed_at_random_moments(predictor, suffix):
    """Send SIGKILL repeatedly until the command completes."""
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    start = time.perf_counter()
    whole = write(predictor, f"whole{suffix}", "list.txt")
    took = time.perf_counter() - start
    moments, kills, code = random.Random(suffix), 0, -1
    while code or not kills:  # on a busy machine the first may complete before it is killed
        assert kills < 100
        child = os.fork()
        if child == 0:
            try:
                done = write(predictor, f"cut{suffix}", "list.txt", resume=True)
                os._exit(0 if done.failed == whole.failed else 9)
            finally:
                os._exit(99)
        # later ones have time to complete
        time.sleep(moments.uniform(0, 0.6 * took) if kills < 12 else 2 * took)
        os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGKILL)
        kills += code != 0
    assert Path(f"cut{suffix}").read_bytes() == Path(f"whole{suffix}").read_bytes()
    assert left_over() == []


def killed_in(function: str, count: int, *, before: bool) -> Any:
    """Return `os.FUNCTION` with a `count`-th call that kills the process; `write` writes half of its bytes first."""
    original, calls = getattr(os, function), iter(range(1, 10**6))

    def call(*given: Any, **more: Any) -> Any:
        if next(calls) < count:
            return original(*given, **more)
        if function == "write":
            original(given[0], bytes(given[1])[: len(given[1]) // 2])
        elif not before:
            original(*given, **more)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    return call


@pytest.mark.real
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    ("function", "count", "before"),
    mostly_slow(
        [
            ("write", 1, True),
            ("write", 2, True),
            ("write", 5, True),
            ("write", 6, True),
            ("ftruncate", 1, True),
            ("ftruncate", 1, False),
            ("fsync", 2, True),
            ("replace", 1, True),
            ("replace", 1, False),
            ("replace", 2, True),
            ("replace", 2, False),
        ],
        4,
    ),
)
def test_killed_in_mid_call(predictor, monkeypatch, suffix, function, count, before):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    write(predictor, f"whole{suffix}")

    def cut() -> int:
        monkeypatch.setattr(row_file.os, function, killed_in(function, count, before=before))
        write(predictor, f"cut{suffix}")
        return 0

    assert in_child(cut) == -signal.SIGKILL
    assert not Path(f"cut{suffix}").exists() or (function, count, before) == ("replace", 2, False)
    done = write(predictor, f"cut{suffix}", resume=True)
    assert (done.images, done.failed) == (23, 2)
    assert Path(f"cut{suffix}").read_bytes() == Path(f"whole{suffix}").read_bytes()
    assert left_over() == []


def stopped(predictor: Predictor, out: str, *sources: str, after: int = 2, **options: Any) -> None:
    """Leave an unfinished table with `after` batches."""
    table = PredictionFile(predictor, find(sources or ("photos",)), out, **{"batch_size": 4, **options})
    batches = iter(range(100))

    def stop(done: int) -> None:
        if next(batches) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        table.write(progress=stop)


def test_kept_rows_are_not_computed_again(predictor, monkeypatch):
    write(predictor, "whole.csv")
    stopped(predictor, "cut.csv")
    computed = []
    forward = Predictor.rows
    monkeypatch.setattr(Predictor, "rows", lambda self, images: computed.append(len(images)) or forward(self, images))
    done = write(predictor, "cut.csv", resume=True)
    assert done.kept == 8
    assert sum(computed) == 23 - 8 - 1  # one of the first eight is unreadable
    assert Path("cut.csv").read_bytes() == Path("whole.csv").read_bytes()


def test_damaged_lines_are_computed_again(predictor):
    write(predictor, "whole.csv")
    for damage in (
        lambda text: text.replace(b"photos/a/5.png", b"photos/a/x.png"),
        lambda text: text[:-1],
        lambda text: text + b"photos/a/8.png,day\n",
        lambda text: text.replace(b"path,", b"name,", 1),
        lambda text: text + b"\0" * 4096,
        lambda text: text + b'"unclosed\n',
        lambda text: text + b"\xff\n",
    ):
        stopped(predictor, "cut.csv")
        partial = Path("cut.csv.partial")
        partial.write_bytes(damage(partial.read_bytes()))
        write(predictor, "cut.csv", resume=True)
        assert Path("cut.csv").read_bytes() == Path("whole.csv").read_bytes()
        Path("cut.csv").unlink()


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "batch": ({"batch_size": 5}, "batch_size 4 then, 5 now"),
    "columns": ({"all": True}, "columns"),
    "top": ({"top": 1}, "columns"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_options_are_refused(predictor, name):
    options, why = OTHERS[name]
    stopped(predictor, "cut.csv")
    before = Path("cut.csv.partial").read_bytes()
    with pytest.raises(UsageError, match="cannot resume") as caught:
        write(predictor, "cut.csv", resume=True, **options)
    assert why in str(caught.value)
    assert "rm 'cut.csv.partial'" in str(caught.value).replace(f"{Path.cwd()}/", "")
    assert Path("cut.csv.partial").read_bytes() == before


def test_another_model_and_other_images_are_refused(predictor, tmp_path, monkeypatch):
    stopped(predictor, "cut.csv")
    other = Predictor(predictor.model, predictor.preprocessing, ("x", "y"), machine=predictor.machine)
    views = Predictor(
        predictor.model, predictor.preprocessing, predictor.classes, machine=predictor.machine, tta="mirror"
    )
    for who, why in ((other, "model_hash"), (views, "tta none then, mirror now")):
        with pytest.raises(UsageError, match=why):
            write(who, "cut.csv", resume=True)
    with pytest.raises(UsageError, match="images 23 then, 11 now"):
        write(predictor, "cut.csv", "photos/a", resume=True)
    os.rename("photos/a/0.png", "photos/a/00.png")
    with pytest.raises(UsageError, match="names"):
        write(predictor, "cut.csv", resume=True)
    os.rename("photos/a/00.png", "photos/a/0.png")
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree("photos", "elsewhere/photos")
    monkeypatch.chdir("elsewhere")
    with pytest.raises(UsageError, match="folder"):
        write(predictor, "../cut.csv", resume=True)
    monkeypatch.chdir(tmp_path)
    assert write(predictor, "cut.csv", resume=True).kept == 8


def test_rows_of_unknown_origin_are_refused(predictor):
    stopped(predictor, "cut.csv")
    origin = Path("cut.csv.partial.json")
    for text in ("", "[]", '{"images": 23}'):
        origin.write_text(text)
        with pytest.raises(UsageError, match="cannot resume"):
            write(predictor, "cut.csv", resume=True)
    origin.unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        write(predictor, "cut.csv", resume=True)


def test_without_resume_nothing_is_lost(predictor, capsys, trained):
    Path("cut.csv").write_text("an older table")
    stopped(predictor, "cut.csv")
    before = Path("cut.csv.partial").read_bytes()
    with pytest.raises(UsageError, match="--resume, or rm"):
        write(predictor, "cut.csv")
    assert Path("cut.csv.partial").read_bytes() == before
    assert Path("cut.csv").read_text() == "an older table"
    write(predictor, "cut.csv", resume=True)
    assert Path("cut.csv").read_text().startswith("path,")
    assert write(predictor, "cut.csv", resume=True).kept == 0, "nothing to resume: it starts at the first image"


def test_two_at_a_time_are_refused(predictor):
    table = PredictionFile(predictor, find(["photos"]), "t.csv", batch_size=4)

    def other(_: int) -> None:
        with pytest.raises(RunError, match="another process writes"):
            write(predictor, "t.csv", resume=True)

    table.write(progress=other)
    assert len(rows("t.csv")) == 23


def test_links_are_followed_except_at_the_partial_file(predictor):
    Path("kept.txt").write_text("mine")
    Path("t.csv.partial").symlink_to("kept.txt")
    with pytest.raises(WriteError):
        write(predictor, "t.csv")
    assert Path("kept.txt").read_text() == "mine"
    Path("t.csv.partial").unlink()
    Path("other").mkdir()
    Path("t.csv").symlink_to("other/real.csv")
    write(predictor, "t.csv")
    assert Path("t.csv").is_symlink()
    assert len(rows("other/real.csv")) == 23


@pytest.mark.real
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_full_disk(predictor, suffix, capsys, trained):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    run = str(trained.folder)
    words = ["predict", run, "list.txt", "--out", f"t{suffix}", "--batch-size", "4", "--device", "cpu"]
    assert main([*words[:4], f"whole{suffix}", *words[5:]]) == 1
    capsys.readouterr()

    def full() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
        return main(words)

    Path(f"t{suffix}").write_text("an older table")
    assert in_child(full) == 2
    assert Path(f"t{suffix}").read_text() == "an older table"
    partial = Path(f"t{suffix}.partial")
    assert 1500 < partial.stat().st_size <= 3000
    assert main([*words, "--resume"]) == 1
    assert "of them from before" in capsys.readouterr().err
    assert Path(f"t{suffix}").read_bytes() == Path(f"whole{suffix}").read_bytes()
    assert left_over() == []


def test_the_message_for_a_full_disk(predictor, monkeypatch):
    write_, calls = os.write, iter(range(100))

    def full(descriptor: int, data: bytes) -> int:
        if next(calls) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(row_file.os, "write", full)
        with pytest.raises(WriteError, match="No space left on device") as caught:
            write(predictor, "t.csv")
    text = str(caught.value)
    assert "--resume" in text
    assert "t.csv" in text
    assert len(text.splitlines()) <= 5
    assert write(predictor, "t.csv", resume=True).kept == 8


def test_ctrl_c_prints_the_command_to_resume(capsys, monkeypatch, trained):
    calls = iter(range(100))
    line = Csv.line

    def interrupted(self: Csv, row: Any) -> bytes:
        if next(calls) == 9:
            os.kill(os.getpid(), signal.SIGINT)
        return line(self, row)

    words = ["predict", str(trained.folder), "photos", "--out", "my t.csv", "--batch-size", "4", "--all"]
    with monkeypatch.context() as patch:
        patch.setattr(Csv, "line", interrupted)
        _, err = printed(capsys, *words, code=130)
    command = err.strip().splitlines()[-1].strip()
    assert command == f"vitral predict {trained.folder} photos --out 'my t.csv' --all --batch-size 4 --resume"
    printed(capsys, *shlex.split(command)[1:], code=1)
    assert len(rows("my t.csv")) == 23


def test_missing_pyarrow_is_reported(capsys, monkeypatch, trained):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    _, err = printed(capsys, "predict", str(trained.folder), "photos", "--out", "t.parquet", code=2)
    assert "pip install 'vitral[parquet]'" in err
    assert left_over() == []


def test_headless_networks_are_refused(trained):
    network = vitral.create("mu/4", image_size=8, classes=0)
    with pytest.raises(UsageError, match="no classes to predict"):
        PredictionFile(Predictor(network, classes=()), find(["photos"]), "t.csv")


def test_every_format_has_a_test():
    assert set(SUFFIXES) == set(FORMATS)
    assert format_of("A.CSV") is Csv


def test_names_that_are_no_utf_8_are_lines_that_strict_readers_take(predictor):
    os.rename("photos/a/0.png", b"photos/a/caf\xe9.png")
    write(predictor, "t.jsonl")
    text = Path("t.jsonl").read_text("utf-8")
    assert r"\ud" not in text
    assert [row["path"] for row in rows("t.jsonl") if "caf" in row["path"]] == [r"photos/a/caf\xe9.png"]
    stopped(predictor, "cut.jsonl")
    assert write(predictor, "cut.jsonl", resume=True).kept
    assert Path("cut.jsonl").read_bytes() == Path("t.jsonl").read_bytes()
