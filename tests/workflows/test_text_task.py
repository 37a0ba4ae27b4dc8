"""`--task text`: train, resume, evaluate and predict; commands that do not support it say so."""

from __future__ import annotations

import csv
import json

import pytest
import torch
import torch.nn.functional as F
from test_resume import interrupt

import vitral
from running import call_at_batch, recorded, same_bits, weights_of
from textlines import OPTIONS, write_lines
from vitral.cli.main import main
from vitral.data.loader import Batch
from vitral.errors import Interrupted, UsageError
from vitral.inference.generation import Search, generate
from vitral.inference.sources import find
from vitral.model import EncoderDecoder
from vitral.training.objectives.text import ReadingText
from vitral.training.options import Run
from vitral.workflows.predict import PredictionFile


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    return write_lines(tmp_path_factory.mktemp("data") / "lines")


@pytest.fixture(scope="module")
def run(lines, tmp_path_factory):
    return vitral.train(lines, out=tmp_path_factory.mktemp("runs") / "lines", quiet=True, **OPTIONS)


def test_the_loss_is_the_cross_entropy_of_each_token_given_those_before_it(run):
    model = vitral.load(run.folder, precision="fp32", device="cpu").model
    assert isinstance(model, EncoderDecoder)
    options = Run(**{**OPTIONS, "recipe": "text"}, channels=1)
    objective = ReadingText(options.preprocessing, options.augmentation, 1, 0)
    pixels = torch.randint(256, (3, 1, 8, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    texts = torch.tensor([[3, 2, 0, 0], [4, 3, 3, 2], [2, 0, 0, 0]])
    loss, metrics = objective(model, Batch(pixels, texts, torch.arange(3).numpy()))
    wanted, right = [], []
    for image, text in zip(pixels, texts, strict=True):
        text = text[text != 0]
        logits = model(options.preprocessing.standardize(image[None]), torch.cat([torch.tensor([1]), text[:-1]])[None])
        wanted.append(F.cross_entropy(logits[0], text))
        right.append((logits[0].argmax(1) == text).float().mean())
    torch.testing.assert_close(loss, torch.stack(wanted).mean())
    torch.testing.assert_close(metrics["train_characters"], torch.stack(right).mean())


def test_a_run_measures_lines_and_characters(run, lines):
    first, *_, last = recorded(run.folder)
    assert last["train_loss"] < first["train_loss"]
    assert {"val_accuracy", "val_cer", "train_characters"} <= set(last)
    assert run.result["val"]["images"] == 8
    assert run.result["val_cer"] == run.result["val"]["cer"] == vitral.evaluate(run.folder).cer
    assert (
        vitral.evaluate(run.folder, lines, split="val", precision="fp32", device="cpu").to_json() == run.result["val"]
    )
    page = (run.folder / "report.html").read_text()
    assert "Characters to correct" in page


def test_a_prediction_is_the_text_that_the_network_generates(run, lines, tmp_path, capsys):
    predictor = vitral.load(run.folder, precision="fp32", device="cpu")
    files = sorted((lines / "val").iterdir())
    read = predictor([str(file) for file in files])
    images = torch.stack([predictor.prepare(str(file)) for file in files])
    memory = predictor.model.encode(predictor.preprocessing.standardize(images))
    for text, wanted in zip(read, generate(predictor.model.decoder, memory), strict=True):
        assert text.text == "".join(predictor.classes[token] for token in wanted.tokens)
        assert text.confidence == pytest.approx(wanted.confidence, rel=1e-4)
        assert [one for one, _ in text.characters] == list(text.text)
    one = predictor(str(files[0]))
    assert main(["predict", str(run.folder), str(files[0]), "--precision", "fp32", "--format", "json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["predictions"]
    assert (answer["text"], answer["confidence"]) == (one.text, pytest.approx(one.confidence))
    assert main(["predict", str(run.folder), str(lines / "val"), "--out", str(tmp_path / "texts.csv")]) == 0
    with open(tmp_path / "texts.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    assert set(rows[0]) == {"path", "text", "confidence", "error"}


def test_beams_of_the_command_and_of_python_are_those_of_the_search(run, lines, tmp_path, capsys):
    options = {"precision": "fp32", "device": "cpu"}
    files = [str(file) for file in sorted((lines / "val").iterdir())]
    greedy, one, three = (vitral.load(run.folder, **options, **more) for more in ({}, {"beams": 1}, {"beams": 3}))
    assert [text.probabilities.tolist() for text in one(files)] == [t.probabilities.tolist() for t in greedy(files)]
    memory = one.model.encode(one.preprocessing.standardize(torch.stack([one.prepare(file) for file in files])))
    found = [
        ("".join(one.classes[token] for token in text.tokens), pytest.approx(text.confidence, rel=1e-4))
        for text in generate(one.model.decoder, memory, Search(beams=3))
    ]
    assert [(text.text, text.confidence) for text in three(files)] == found
    words = ["predict", str(run.folder), *files, "--precision", "fp32", "--device", "cpu", "--beams", "3"]
    assert main([*words, "--format", "json"]) == 0
    texts = json.loads(capsys.readouterr().out)["predictions"]
    assert [(text["text"], text["confidence"]) for text in texts] == found
    for name in ("texts.csv", "texts.jsonl", "texts.parquet"):
        assert main([*words, "--out", str(tmp_path / name)]) == 0
    with open(tmp_path / "texts.csv", newline="") as file:
        assert [(row["text"], float(row["confidence"])) for row in csv.DictReader(file)] == found
    with open(tmp_path / "texts.jsonl") as file:
        assert [(row["text"], row["confidence"]) for row in map(json.loads, file)] == found
    table = pytest.importorskip("pyarrow.parquet").read_table(tmp_path / "texts.parquet")
    assert list(zip(table["text"].to_pylist(), table["confidence"].to_pylist(), strict=True)) == found


def test_rows_of_other_beams_are_not_resumed(run, lines, tmp_path):
    predictors = [vitral.load(run.folder, device="cpu", beams=beams) for beams in (1, 3)]
    origins = [PredictionFile(one, find([str(lines / "val")]), tmp_path / "t.csv").origin() for one in predictors]
    assert "beams" not in origins[0]  # tables of earlier versions resume
    assert origins[1]["beams"] == 3


def test_beams_of_a_network_that_reads_no_text_are_refused(run):
    with pytest.raises(UsageError, match="--beams 3 is for networks that read text"):
        vitral.load("demo", beams=3)
    with pytest.raises(UsageError, match="beams must be 1 to 100"):
        vitral.load(run.folder, beams=0)


def test_stopped_and_resumed_is_the_same_to_the_bit(run, lines, tmp_path, monkeypatch):
    call_at_batch(monkeypatch, 5, interrupt)
    with pytest.raises(Interrupted):
        vitral.train(lines, out=tmp_path / "cut", quiet=True, **OPTIONS)
    monkeypatch.undo()
    again = vitral.train(out=tmp_path / "cut", resume=True, quiet=True)
    assert same_bits(weights_of(run.folder), weights_of(again.folder))
    assert again.result["val"] == run.result["val"]


@pytest.mark.parametrize(
    "words",
    [
        ("explain", "RUN", "IMAGE", "--compare"),
        ("inspect", "RUN"),
        ("embed", "RUN", "IMAGE", "--out", "e.npz"),
        ("export", "RUN", "--to", "torch"),
        ("quantize", "RUN"),
        ("evaluate", "RUN", "--knn", "3"),
        ("replay", "RUN", "--step", "1"),
        ("predict", "RUN", "IMAGE", "--tta", "mirror"),
        ("convert", "RUN", "target", "--to", "timm"),
    ],
    ids=" ".join,
)
def test_a_command_that_cannot_do_it_says_so(words, run, lines, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"DATA": str(lines), "RUN": str(run.folder), "IMAGE": str(next((lines / "val").iterdir()))}
    assert main([names.get(word, word) for word in words]) == 2
    err = capsys.readouterr().err
    assert "bug in vitral" not in err
    assert "text" in err or "int8" in err


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": "small"},
        {"teacher": "demo"},
        {"mixup": 0.2},
        {"mask": 0.5},
        {"flip": True},
        {"model": "BiT-R50x1"},
        {"compile": True},
    ],
    ids=lambda one: next(iter(one)),
)
def test_options_without_effect_on_text_are_refused(options, lines, tmp_path):
    given = {name: value for name, value in OPTIONS.items() if name not in options}
    if "model" in options:
        given = {"task": "text", "image_size": 32}
    with pytest.raises(UsageError):
        vitral.train(lines, out=tmp_path / "run", quiet=True, **given, **options)


def test_the_text_recipe_goes_with_the_task(lines, tmp_path):
    with pytest.raises(UsageError, match="--task text"):
        vitral.train(lines, out=tmp_path / "run", quiet=True, recipe="text")
