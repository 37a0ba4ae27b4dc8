"""Test that invalid requests are refused in at most five lines, without writing anything."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from PIL import Image

from images import noise
from running import TINY, as_words, printed
from vitral.cli.main import main

WORDS = as_words({**TINY, "epochs": 1})


@dataclass(frozen=True)
class Bad:
    """An invalid request: the words, parts of the message, and a function that prepares the folder."""

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
            path.write_bytes(b"this is no image")

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
    "no readable image": Bad("train d", ("12 unreadable images", "d/cat/0.png"), ruin(all_of=True)),
    "none readable, skipped": Bad(
        "train d --bad-images skip", ("no readable image in the train split",), ruin(all_of=True), hinted=False
    ),
    "a file that is no image": Bad(
        "train d",
        ("2 unreadable images", "d/cat/1.png", "d/dog/3.png", "--bad-images skip"),
        ruin("d/cat/1.png", "d/dog/3.png"),
    ),
    "many that are none": Bad(
        "train d",
        ("4 unreadable images", "d/cat/1.png", "and 1 more"),
        ruin(*(f"d/cat/{i}.png" for i in range(1, 5))),
    ),
    "table of texts": Bad("train t.csv", ("no label column", "--task text"), table("file,text\nd/cat/0.png,cat\n")),
    "table without labels": Bad("train t.csv", ("no label column", "t.csv"), table("file,color\nd/cat/0.png,red\n")),
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
    "images of nothing": Bad("predict RUN d ''", ("IMAGE is empty", "vitral predict RUN"), folder("cat", "dog")),
    "weights of nothing": Bad("predict '' d", ("RUN or WEIGHTS is empty",), folder("cat", "dog")),
    # options
    "image size and patch": Bad("train d --model S/16 --image-size 20", ("20×20", "16×16"), folder("cat", "dog")),
    "width and heads": Bad("train d --dim 30 --heads 4", ("width 30", "4 heads"), folder("cat", "dog")),
    "unknown model": Bad("train d --model T/16", ("T/16", "Ti/16"), folder("cat", "dog")),
    "model without patch": Bad("train d --model S", ("'S'", "--model S/16"), folder("cat", "dog")),
    "unknown option": Bad("train d --epoch 3", ("--epoch", "--epochs"), folder("cat", "dog")),
    "unknown option of another command": Bad("predict x y --topp 3", ("--topp", "--top")),
    "no class shown": Bad("predict demo d --top 0", ("--top must be at least 1, not 0", "--top 3")),
    "no image in a batch": Bad("embed demo d --batch-size 0", ("--batch-size must be at least 1, not 0",)),
    "no image to measure on": Bad("inspect S/16 --images -1", ("--images must be at least 1, not -1",)),
    "nothing in a shard": Bad("data shard d --out s --shard-mb 0", ("--shard-mb must be at least 1, not 0",)),
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
    "below its limit": Bad(
        "train d --epochs 0", ("--epochs must be from 1 to 1,000,000",), folder("cat", "dog"), hinted=False
    ),
    "two data sets": Bad("train d e", ("e",), folder("cat", "dog")),
    "fp16": Bad("train d --precision fp16", ("fp16", "--precision bf16"), folder("cat", "dog")),
    "no such device": Bad("train d --device cuda:9", ("cuda:9", "torch", "--device auto"), folder("cat", "dog")),
    "a network of timm": Bad(
        "train d --model resnet50", ("another library", "--model timm:resnet50"), folder("cat", "dog")
    ),
    "nothing is frozen": Bad(
        f"train d --freeze bloks {' '.join(WORDS)}", ("--freeze bloks", "blocks.0"), folder("cat", "dog"), hinted=False
    ),
    "all is frozen": Bad(f"train d --freeze * {' '.join(WORDS)}", ("nothing to train",), folder("cat", "dog")),
    "missing argument": Bad("evaluate", ("vitral evaluate runs/photos",)),
    "top of nothing": Bad("predict RUN d --top 0", ("--top",), folder("cat", "dog"), hinted=False),
    "unknown summary": Bad("summary S/16x", ("S/16x",)),
    "summary of nothing": Bad("summary S/16 --batch 0", ("0",), hinted=False),
    # runs and weights
    "a run that exists": Bad(
        "train d --out taken", ("taken", "--resume", "taken-2"), write("taken/config.json", b"{}")
    ),
    "a folder that is no run": Bad(
        "train d --out taken --overwrite", ("taken", "not a run folder"), write("taken/thesis.txt", b"x")
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
    "evaluate weights alone": Bad("evaluate RUN/model.safetensors", ("weights without a run", "DATA")),
    "other classes": Bad("evaluate RUN d", ("cat, dog", "day, night"), folder("cat", "dog")),
    "no such split": Bad("evaluate RUN --split dev", ("'dev'", "test")),
    "no such image": Bad("predict RUN gone.png", ("gone.png",), hinted=False),
    "no image named": Bad("predict cat.jpg", ("no images to predict", "no image follows it", "RUN IMAGE")),
    "no images": Bad("predict RUN d", ("no images to predict", "d"), lambda: Path("d").mkdir()),
    "init and another model": Bad("train d --init RUN --model S/4", ("--model S/4", "mu/4"), folder("cat", "dog")),
}


def contents() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", BAD)
def test_invalid_requests(name, capsys, trained):
    bad = BAD[name]
    bad.prepare()
    weights = (trained.folder / "model.safetensors").read_bytes()
    Path("cut.safetensors").write_bytes(weights[:-50])
    before = contents()
    words = [word.replace("RUN", str(trained.folder)).replace("''", "") for word in bad.words.split()]
    out, err = printed(capsys, *words, code=2)
    assert out == ""
    plan, found, error = err.rpartition("error: ")  # the plan may be printed before
    assert found
    assert plan == "" or plan.startswith("Plan")
    assert len(error.splitlines()) <= 5
    for part in bad.named:
        assert part in error
    assert "bug in vitral" not in error
    assert not bad.hinted or "  try: " in error
    assert contents() == before


def test_a_report_that_cannot_be_written(capsys, trained):
    Path("file").write_text("x")
    _, err = printed(capsys, "evaluate", str(trained.folder), "--report", "file/x.html", code=2)
    assert "cannot write" in err
    assert "file/x.html" in err
    assert len(err[err.index("error: ") :].splitlines()) <= 5


def test_a_folder_that_cannot_be_written(capsys, photos):
    Path("file").write_text("x")
    _, err = printed(capsys, "train", photos, *WORDS, "--quiet", "--out", "file/run", code=2)
    assert "file/run" in err
    assert "bug in vitral" not in err


def test_a_misspelled_run_suggests_the_nearest_one(tmp_path, capsys):
    (tmp_path / "photos").mkdir()
    image = tmp_path / "x.png"
    image.touch()
    for words in (["predict", str(tmp_path / "phots"), str(image)], ["summary", str(tmp_path / "phots")]):
        assert main(words) == 2
        assert f"nearest: {tmp_path / 'photos'}" in capsys.readouterr().err
