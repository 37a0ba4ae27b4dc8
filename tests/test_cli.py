"""The command line: JSON on standard output, everything else on standard error, and one kind of refusal."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitral
from pictures import MakePictures, noise
from running import TINY, as_words
from vitral.cli import COMMANDS, _first_paragraph, _print_result, main
from vitral.training.run import Run
from vitral.weights import files

WORDS = as_words({**TINY, "epochs": 1})


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def photos(make_pictures: MakePictures) -> str:
    make_pictures({"cat": 6, "dog": 6})
    return "photos"


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    """What the command says on standard output and on standard error."""
    capsys.readouterr()
    assert main(list(words)) == code
    told = capsys.readouterr()
    assert "Traceback" not in told.out + told.err
    return told.out, told.err


def as_json(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    out, _ = printed(capsys, *words, "--format", "json", code=code)
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


# ---------------------------------------------------------------- every command does its work


def test_train(capsys, photos):
    out, err = printed(capsys, "train", photos, *WORDS)
    assert out == ""
    for part in ("Plan", "you asked", "epoch 1/1", "Accuracy", "Report   runs/photos/report.html", "vitral predict"):
        assert part in err
    result = as_json(capsys, "train", photos, *WORDS, "--overwrite", "--quiet")
    assert result == json.loads(Path("runs/photos/result.json").read_text("utf-8"))
    assert result["command"].startswith("vitral train photos ")


def test_what_to_type_next_works(capsys, photos):
    Path("photos/.hidden").mkdir()
    Path("photos/.hidden/0.png").write_bytes(b"no picture")
    _, err = printed(capsys, "train", photos, *WORDS)
    commands = [line.split()[1:] for line in err.partition("Next:\n")[2].splitlines()]
    assert [words[0] for words in commands] == ["predict", "explain", "evaluate", "summary"]
    for words in commands:
        printed(capsys, *words)


@pytest.mark.parametrize(
    ("best", "epochs", "said"), [(12, 200, True), (12, 31, False), (60, 100, False), (None, None, False)]
)
def test_a_run_that_was_long_in_vain_is_told_of_early_stop(capsys, tmp_path, best, epochs, said):
    result = {"best_epoch": best, "epochs": epochs, "data": "photos"}
    _print_result(tmp_path, result)
    assert (f"Epoch {best} of {epochs} was the best; --early-stop 20" in capsys.readouterr().err) == said


def test_quiet_says_only_the_result(capsys, photos):
    _, err = printed(capsys, "train", photos, *WORDS, "--quiet")
    assert err.strip().startswith("Accuracy")
    assert "Next:" not in err


def test_help_beside_other_words_is_the_whole_help(capsys):
    helps = []
    for words in (["--help"], ["runs/photos", "--help"], ["runs/photos", "--tta", "both", "-h"]):
        with pytest.raises(SystemExit):
            main(["evaluate", *words])
        helps.append(capsys.readouterr().out)
    assert helps[0] == helps[1] == helps[2]
    assert "RUN" in helps[0]


def test_options_reach_the_run(capsys, photos):
    options = ["--mean", "0.1", "0.2", "0.3", "--freeze", "patch_embed", "blocks.0.*", "--image-size", "8", "12"]
    printed(capsys, "train", photos, *WORDS, *options, "--flip", "--no-cls-token", "--pool", "mean", "--ema", "0.5")
    run = json.loads(Path("runs/photos/config.json").read_text("utf-8"))["run"]
    assert (run["mean"], run["freeze"]) == ([0.1, 0.2, 0.3], ["patch_embed", "blocks.0.*"])
    assert (run["image_size"], run["flip"], run["cls_token"], run["ema"]) == ([8, 12], True, False, 0.5)


def test_evaluating_on_what_it_learned_from_is_said(capsys, trained):
    data = str(Path(trained.folder).parents[1] / "sky")
    learned, chosen = (
        "note: The network learned from these pictures",
        "note: What was kept of training was chosen on these",
    )
    for words, said in (
        ([data], None), (["--split", "train"], learned), ([data, "--split", "train"], learned),
        (["--split", "val"], chosen), ([], None),
    ):  # fmt: skip
        assert main(["evaluate", str(trained.folder), *words, "--report", "page.html"]) == 0
        notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note")]
        assert [line.startswith(str(said)) for line in notes] == [True] * bool(said)
        page = Path("page.html").read_text("utf-8")
        assert all(line.removeprefix("note: ").split(" On others")[0] in page for line in notes)


def test_other_data_in_no_splits_are_nobodys_train_pictures(capsys, trained):
    sky = Path(trained.folder).parents[1] / "sky"
    out, err = printed(capsys, "evaluate", str(trained.folder), str(sky / "test"), "--report", "page.html")
    assert f"on all pictures of {sky / 'test'}" in out
    assert "note" not in err
    result = Path("page.html").read_text("utf-8").split('id="result"')[1].split("</section>")[0]
    assert ">Accuracy</h2>" in result
    assert "12 of 12 pictures recognised" in result
    assert f"vitral predict {trained.folder} IMAGE" in Path("page.html").read_text("utf-8")
    for split in ("all", "train"):
        found = as_json(capsys, "evaluate", str(trained.folder), str(sky / "test"), "--split", split)
        assert (found["split"], found["images"]) == ("all", 12)
    with pytest.raises(vitral.errors.DataError, match="no 'all' split"):
        vitral.evaluate(trained.folder, sky, split="all")


def test_evaluate(capsys, trained):
    found = as_json(capsys, "evaluate", str(trained.folder))
    assert (found["split"], found["images"], found["accuracy"]) == ("test", 12, trained.result["test_accuracy"])
    out, _ = printed(capsys, "evaluate", str(trained.folder), "--split", "val", "--report", "page.html")
    assert "day" in out
    assert "too few to tell" in out
    assert Path("page.html").stat().st_size > 1000


def test_predict(capsys, trained, photos):
    found = as_json(capsys, "predict", str(trained.folder), photos, "--top", "1")
    assert found["errors"] == []
    assert [one["image"] for one in found["predictions"]][:2] == ["photos/cat/0.png", "photos/cat/1.png"]
    assert all(len(one["top"]) == 1 for one in found["predictions"])
    out, err = printed(capsys, "predict", str(trained.folder), "photos/cat/0.png", "--batch-size", "1")
    assert re.fullmatch(r"photos/cat/0\.png\t(day|night) \d+\.\d%\t(day|night) \d+\.\d%\n", out)
    assert err == ""


def test_predict_with_some_bad_pictures(capsys, trained, photos):
    Path("photos/cat/2.png").write_bytes(b"no picture")
    Path("photos/dog/2.png").write_bytes(b"")
    out, err = printed(capsys, "predict", str(trained.folder), photos, code=1)
    assert len(out.splitlines()) == 10
    assert "photos/cat/2.png" in err
    assert "photos/dog/2.png" in err
    assert "2 of 12 could not be read" in err
    found = as_json(capsys, "predict", str(trained.folder), photos, code=1)
    assert [one["image"] for one in found["errors"]] == ["photos/cat/2.png", "photos/dog/2.png"]
    assert all(one["why"] for one in found["errors"])


def test_predict_a_name_that_is_no_text(capsys, trained, photos):
    Path("odd").mkdir()
    shutil.copy("photos/cat/0.png", b"odd/\xff\n.png")
    out, _ = printed(capsys, "predict", str(trained.folder), "odd")
    assert out.startswith("odd/\\udcff\\n.png\t")
    assert len(as_json(capsys, "predict", str(trained.folder), "odd")["predictions"]) == 1


def test_summary(capsys, trained):
    found = as_json(capsys, "summary", "mnist-7562")
    assert found["parameters"] == 7850
    assert as_json(capsys, "summary", str(trained.folder))["parameters"] == trained.result["parameters"]
    weights = str(trained.folder / "model.safetensors")
    assert as_json(capsys, "summary", weights)["parameters"] == trained.result["parameters"]
    out, _ = printed(capsys, "summary", "S/16", "--image-size", "64", "32", "--classes", "3", "--full")
    assert "S/16" in out


def test_models(capsys):
    names = [entry["name"] for entry in as_json(capsys, "models")]
    assert {"S/16", "mnist-7562"} <= set(names)
    out, err = printed(capsys, "models")
    assert all(name in out for name in names)
    assert "vitral summary" in err


def test_data_check(capsys, photos):
    found = as_json(capsys, "data", "check", photos)
    assert (found["images"], found["sound"]) == (12, True)
    shutil.copy("photos/cat/0.png", "photos/dog/copy.png")
    found = as_json(capsys, "data", "check", photos, code=1)
    assert len(found["conflicts"]) == 1
    out, _ = printed(capsys, "data", "check", photos, code=1)
    assert "photos/cat/0.png" in out.replace("\n", "")


# ---------------------------------------------------------------- help


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_the_overview_names_every_command(capsys, words):
    out, err = printed(capsys, *words)
    assert all(re.search(rf"^  {name} +\S", out, re.MULTILINE) for name in COMMANDS)
    assert err == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command(capsys, name):
    with pytest.raises(SystemExit) as stop:
        main([*name.split(), "--help"])
    told = capsys.readouterr()
    assert stop.value.code == 0
    assert told.err == ""
    assert f"vitral {name}" in told.out
    assert "None" not in told.out
    if name == "train":
        for item in vars(Run)["__dataclass_fields__"]:
            assert item == "data" or f"--{item.replace('_', '-')}" in told.out


def test_version(capsys):
    assert printed(capsys, "--version")[0] == f"vitral {vitral.__version__}\n"


# ---------------------------------------------------------------- what cannot be done


@dataclass(frozen=True)
class Bad:
    """A request that cannot be done: the words, what the message names, and what makes it bad."""

    words: str
    named: tuple[str, ...]
    prepare: Callable[[], object] = field(default=lambda: None)
    hinted: bool = True


def folder(*names: str, count: int = 6, root: str = "d") -> Callable[[], None]:
    def make() -> None:
        for name in names:
            Path(root, name).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                Image.fromarray(noise(zlib.crc32(f"{name}/{number}".encode()))).save(Path(root, name, f"{number}.png"))

    return make


def ruin(*paths: str, all_of: bool = False) -> Callable[[], None]:
    def make() -> None:
        folder("cat", "dog")()
        for path in Path("d").rglob("*.png") if all_of else map(Path, paths):
            path.write_bytes(b"this is no picture")

    return make


def table(text: str) -> Callable[[], None]:
    def make() -> None:
        folder("cat", "dog")()
        Path("t.csv").write_text(text)

    return make


def write(path: str, data: bytes) -> Callable[[], None]:
    def make() -> None:
        folder("cat", "dog")()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(data)

    return make


BAD: dict[str, Bad] = {
    # data
    "no such folder": Bad("train no/such", ("no/such",)),
    "no such set": Bad("train digts", ("digts", "digits")),
    "empty folder": Bad("train d", ("d",), lambda: Path("d").mkdir()),
    "one class only": Bad("train d", ("only one class: cat",), folder("cat")),
    "no classes": Bad("train d", ("without class folders",), folder("")),
    "no readable picture": Bad("train d", ("12 unreadable pictures", "d/cat/0.png"), ruin(all_of=True)),
    "none readable, skipped": Bad(
        "train d --bad-images skip", ("no readable picture in the train split",), ruin(all_of=True), hinted=False
    ),
    "a file that is no picture": Bad(
        "train d",
        ("2 unreadable pictures", "d/cat/1.png", "d/dog/3.png", "--bad-images skip"),
        ruin("d/cat/1.png", "d/dog/3.png"),
    ),
    "many that are none": Bad(
        "train d",
        ("4 unreadable pictures", "d/cat/1.png", "and 1 more"),
        ruin(*(f"d/cat/{i}.png" for i in range(1, 5))),
    ),
    "table without labels": Bad("train t.csv", ("no label column", "t.csv"), table("file,colour\nd/cat/0.png,red\n")),
    "table without files": Bad("train t.csv", ("no file column", "t.csv"), table("name,label\nd/cat/0.png,cat\n")),
    "labels missing": Bad("train t.csv", ("label", "t.csv"), table("file,label\nd/cat/0.png,cat\nd/dog/0.png,\n")),
    "files missing": Bad("train t.csv", ("gone.png", "t.csv"), table("file,label\ngone.png,cat\nd/dog/0.png,dog\n")),
    "damaged archive": Bad("train x.zip", ("x.zip",), write("x.zip", b"PK\x03\x04 nothing")),
    "no kind of data": Bad("train x.pdf", ("x.pdf",), write("x.pdf", b"%PDF")),
    "checked: no such folder": Bad("data check no/such", ("no/such",)),
    "trained on nothing": Bad("train ''", ("DATA is empty", "vitral train photos/")),
    "resumed on nothing": Bad("train '' --resume", ("DATA is empty",)),
    "checked: nothing": Bad("data check ''", ("DATA is empty",)),
    "evaluated on nothing": Bad("evaluate RUN ''", ("DATA is empty",)),
    "pictures of nothing": Bad("predict RUN d ''", ("IMAGE is empty", "vitral predict RUN"), folder("cat", "dog")),
    "weights of nothing": Bad("predict '' d", ("RUN or WEIGHTS is empty",), folder("cat", "dog")),
    # options
    "image size and patch": Bad("train d --model S/16 --image-size 20", ("20×20", "16×16"), folder("cat", "dog")),
    "width and heads": Bad("train d --dim 30 --heads 4", ("width 30", "4 heads"), folder("cat", "dog")),
    "unknown model": Bad("train d --model T/16", ("T/16", "Ti/16"), folder("cat", "dog")),
    "model without patch": Bad("train d --model S", ("'S'", "--model S/16"), folder("cat", "dog")),
    "unknown option": Bad("train d --epoch 3", ("--epoch", "--epochs"), folder("cat", "dog")),
    "unknown option of another command": Bad("predict x y --topp 3", ("--topp", "--top")),
    "unknown recipe": Bad("train d --recipe smal", ("smal", "small"), folder("cat", "dog"), hinted=False),
    "unknown optimizer": Bad("train d --optimizer adamv", ("adamv", "adamw"), folder("cat", "dog"), hinted=False),
    "begins from nothing": Bad("train d --init ''", ("--init is empty",), folder("cat", "dog")),
    "out to nothing": Bad("train d --out ''", ("--out is empty",), folder("cat", "dog")),
    "on and anew": Bad("train d --resume --overwrite", ("--resume and --overwrite",), folder("cat", "dog")),
    "unknown choice": Bad("train d --schedule cosin", ("--schedule", "cosine"), folder("cat", "dog")),
    "unknown command": Bad("trian d", ("trian", "train")),
    "half a command": Bad("data", ("data check",)),
    "no number": Bad("train d --epochs many", ("--epochs",), folder("cat", "dog")),
    "no value": Bad("train d --epochs", ("--epochs",), folder("cat", "dog")),
    "below its limit": Bad("train d --epochs 0", ("--epochs must be at least 1",), folder("cat", "dog"), hinted=False),
    "two data sets": Bad("train d e", ("e",), folder("cat", "dog")),
    "fp16": Bad("train d --precision fp16", ("fp16", "--precision bf16"), folder("cat", "dog")),
    "no such device": Bad("train d --device cuda:9", ("cuda:9", "--device auto"), folder("cat", "dog")),
    "nothing is frozen": Bad(
        f"train d --freeze bloks {' '.join(WORDS)}", ("--freeze bloks", "blocks.0"), folder("cat", "dog"), hinted=False
    ),
    "all is frozen": Bad(f"train d --freeze * {' '.join(WORDS)}", ("nothing to train",), folder("cat", "dog")),
    "missing argument": Bad("evaluate", ("vitral evaluate --help",)),
    "top of nothing": Bad("predict RUN d --top 0", ("--top",), folder("cat", "dog"), hinted=False),
    "unknown summary": Bad("summary S/16x", ("S/16x",)),
    "summary of nothing": Bad("summary S/16 --batch 0", ("0",), hinted=False),
    # runs and weights
    "a run that exists": Bad(
        "train d --out taken", ("taken", "--resume", "taken-2"), write("taken/config.json", b"{}")
    ),
    "a folder that is no run": Bad(
        "train d --out taken --overwrite", ("taken", "not ours"), write("taken/thesis.txt", b"x")
    ),
    "resume without a run": Bad("train d --out nothing --resume", ("nothing",), folder("cat", "dog")),
    "resume a folder that is no run": Bad("train d --out d --resume", ("not a run folder",), folder("cat", "dog")),
    "evaluate a folder that is no run": Bad("evaluate d", ("not a run folder", "d"), folder("cat", "dog")),
    "predict with no run": Bad("predict nothing d", ("nothing",), folder("cat", "dog")),
    "a file that is no weights": Bad(
        "predict w.safetensors d", ("w.safetensors", "14 bytes"), write("w.safetensors", b"no safetensors")
    ),
    "truncated weights": Bad(
        "predict cut.safetensors d", ("damaged safetensors file", "cut.safetensors"), folder("cat", "dog")
    ),
    "truncated weights, init": Bad("train d --init cut.safetensors", ("cut.safetensors",), folder("cat", "dog")),
    "truncated weights, summary": Bad("summary cut.safetensors", ("cut.safetensors",)),
    "evaluate weights alone": Bad("evaluate RUN/model.safetensors", ("do not say which pictures to read", "DATA")),
    "other classes": Bad("evaluate RUN d", ("cat, dog", "day, night"), folder("cat", "dog")),
    "no such split": Bad("evaluate RUN --split dev", ("'dev'", "test")),
    "no such picture": Bad("predict RUN gone.png", ("gone.png",), hinted=False),
    "no picture named": Bad("predict cat.jpg", ("no pictures to predict", "nothing follows it", "RUN IMAGE")),
    "no pictures": Bad("predict RUN d", ("no pictures to predict", "d"), lambda: Path("d").mkdir()),
    "init and another model": Bad("train d --init RUN --model S/4", ("--model S/4", "mu/4"), folder("cat", "dog")),
}


def contents() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_done(name, capsys, trained):
    bad = BAD[name]
    bad.prepare()
    weights = (trained.folder / "model.safetensors").read_bytes()
    Path("cut.safetensors").write_bytes(weights[:-50])
    before = contents()
    words = [word.replace("RUN", str(trained.folder)).replace("''", "") for word in bad.words.split()]
    out, err = printed(capsys, *words, code=2)
    assert out == ""
    plan, found, error = err.rpartition("error: ")  # the plan may be told before
    assert found
    assert plan == "" or plan.startswith("Plan")
    assert len(error.splitlines()) <= 5
    for part in bad.named:
        assert part in error
    assert "mistake of vitral's" not in error
    assert not bad.hinted or "  try: " in error
    assert contents() == before


def test_a_report_that_cannot_be_written(capsys, trained):
    Path("file").write_text("x")
    _, err = printed(capsys, "evaluate", str(trained.folder), "--report", "file/x.html", code=2)
    assert "cannot write" in err
    assert "file/x.html" in err
    assert len(err[err.index("error: ") :].splitlines()) <= 5


@pytest.mark.parametrize("border", [True, False])
def test_the_parsers_complaint_becomes_one_line(border):
    lines = ["Error parsing --epochs: invalid", "literal", "-" * 30, "For full helptext, see --help"]
    panel = "\n".join(["Value error", "-" * 30, *(f" {line} " for line in lines)])
    if border:
        inner = [f"│ {line.replace('-' * 30, '─' * 30)} │" for line in lines]
        panel = "\n".join(["╭─ Value error ──╮", *inner, "╰───╯"])
    assert _first_paragraph(panel) == "Error parsing --epochs: invalid literal"


def test_bad_pictures_are_left_out_where_asked(capsys):
    ruin("d/cat/1.png", "d/dog/3.png")()
    shutil.copy("d/cat/1.png", "d/cat/0.png")
    _, err = printed(capsys, "train", "d", *WORDS, "--bad-images", "skip")
    assert "left out 3 unreadable pictures: d/cat/0.png, d/cat/1.png, d/dog/3.png" in err
    assert "explain runs/d d/cat/2.png" in err, "a picture that can be read is proposed"
    images = json.loads(Path("runs/d/result.json").read_text("utf-8"))["images"]
    assert sum(images.values()) == 9
    page = Path("runs/d/report.html").read_text("utf-8")
    assert "left out 3 unreadable pictures: d/cat/0.png, d/cat/1.png, d/dog/3.png" in page


def test_disk_full_while_saving(capsys, monkeypatch, photos):
    def full(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "save_file", full)
    _, err = printed(capsys, "train", photos, *WORDS, "--quiet", code=2)
    assert len(err.splitlines()) <= 5
    for part in ("No space left on device", "runs/photos/model.safetensors", "try: "):
        assert part in err
    assert not list(Path("runs").rglob("*.tmp"))
    assert not Path("runs/photos/model.safetensors").exists()


def test_a_folder_that_cannot_be_written(capsys, photos):
    Path("file").write_text("x")
    _, err = printed(capsys, "train", photos, *WORDS, "--quiet", "--out", "file/run", code=2)
    assert "file/run" in err
    assert "mistake of vitral's" not in err


def test_debug_shows_the_traceback(photos):
    with pytest.raises(vitral.VitralError):
        main(["train", "no/such", "--debug"])


def test_our_own_mistakes_are_told_apart(capsys, monkeypatch):
    def broken(**options: Any) -> int:
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setitem(COMMANDS, "models", broken)
    _, err = printed(capsys, "models", code=2)
    assert err.startswith("error: ZeroDivisionError: division by zero\n")
    assert "--debug" in err


def test_ctrl_c_before_anything_is_saved(capsys, monkeypatch, photos):
    from vitral.recipes import execute

    def stopped(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(execute, "_readable_batches", stopped)
    _, err = printed(capsys, "train", photos, *WORDS, code=130)
    assert "Stopped" in err
    assert not Path("runs").exists()


def test_ctrl_c_while_the_report_is_written(capsys, monkeypatch, photos):
    """All is trained; the command that goes on writes the rest."""
    from vitral.evaluation import report

    original = report.write_report
    monkeypatch.setattr(report, "write_report", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    _, err = printed(capsys, "train", photos, *WORDS, code=130)
    assert err.strip().splitlines()[-1].strip() == "vitral train --out runs/photos --resume"
    monkeypatch.setattr(report, "write_report", original)
    printed(capsys, "train", "--out", "runs/photos", "--resume")
    assert Path("runs/photos/result.json").is_file()


def test_a_reader_that_leaves(tmp_path, capfd):
    """`vitral models | head -1`."""
    from running import in_child

    read, write_end = os.pipe()
    os.close(read)

    def work() -> int:
        os.dup2(write_end, 1)
        import sys

        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        code = main(["models", "--format", "json"])
        sys.stdout.flush()
        return code

    assert in_child(work) in (0, -signal.SIGPIPE)
    assert "Traceback" not in capfd.readouterr().err


def test_numbers_of_predict_are_those_of_python(capsys, trained, photos):
    found = as_json(capsys, "predict", str(trained.folder), photos)["predictions"]
    mine = vitral.load(trained.folder)([one["image"] for one in found])
    assert np.allclose([one["confidence"] for one in found], [one.confidence for one in mine], atol=0.02)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "digits", "--minutes", "two"], "--minutes takes a number, not 'two'"),
        (["train", "digits", "--epochs", "1.5"], "--epochs takes a whole number, not '1.5'"),
        (["predict", "demo", "x.jpg", "--top", "x"], "--top takes a whole number, not 'x'"),
        (["evaluate", "demo", "--data", "digits"], "DATA is typed without --data"),
        (["train", "--data", "digits"], "DATA is typed without --data"),
        (["summary", "--model=S/16"], "MODEL is typed without --model"),
        (
            ["train", "digits", "--augment", "affines"],
            "unknown value of --augment: 'affines'\n"
            "  why: nearest: affine; known: affine, none, randaugment, trivialaugment",
        ),
        (["train", "digits", "--lerning-rate", "1"], "unknown option '--lerning-rate'\n  why: nearest: --lr"),
        (["train", "digits", "--img_size=32"], "unknown option '--img_size'\n  why: nearest: --image-size"),
        (["train", "digits", "--no-graph"], "unknown option '--no-graph'\n  why: nearest: --no-graphs"),
        (["--verson"], "unknown option '--verson'\n  why: nearest: --version; known: --help, --version"),
        (["train", "digits", "--image-size", "0"], "--image-size must be at least 1, not 0"),
        (["train", "digits", "mnist"], "more words than it reads: mnist"),
        (
            ["train", "digits", "--compile", "false"],
            "more words than it reads: false\n  why: --compile takes no value: it is typed or left out",
        ),
        (["evaluate", "demo", "--report"], "--report needs a value"),
        (["data", "chek"], "unknown command 'data chek'\n  why: nearest: data check, data cache"),
        (["data"], "unknown command 'data'\n  why: known: data cache, data check"),
        (["evaluate"], "Missing from vitral evaluate: RUN run folder or weights file (required)"),
    ],
)
def test_mistakes_are_told_in_words_of_the_command_line(words, said, capsys):
    assert main(words) == 2
    assert f"error: {said}\n" in capsys.readouterr().err


def test_a_misspelt_run_has_a_nearest_one(tmp_path, capsys):
    (tmp_path / "photos").mkdir()
    picture = tmp_path / "x.png"
    picture.touch()
    for words in (["predict", str(tmp_path / "phots"), str(picture)], ["summary", str(tmp_path / "phots")]):
        assert main(words) == 2
        assert f"nearest: {tmp_path / 'photos'}" in capsys.readouterr().err
