"""Test the report: conditional sections, self-contained, safe against malicious names, bounded, deterministic."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest

from vitral.errors import WriteError
from vitral.evaluation import measure
from vitral.evaluation.page_numbers import amount, compact, duration
from vitral.evaluation.report import Mistake, ReportContent, render, write_report
from vitral.wording import count

HOSTILE = "<script>alert('1')</script>\"onerror=\"x&amp;"
VOID = {"meta", "img", "br", "link", "input", "hr"}


@dataclass(frozen=True)
class Line:
    name: str
    value: str
    reason: str


class Page(HTMLParser):
    """A strict parser: every element is closed in order; keeps ids, attributes and text."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []
        ids = [attributes["id"] for _, attributes in self.tags if "id" in attributes]
        assert len(ids) == len(set(ids))
        self.ids = set(ids)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag
        if tag in {"td", "th", "dt", "dd", "li"}:
            self.text += " "

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data

    def of(self, tag: str) -> Iterator[dict[str, str | None]]:
        return (attributes for name, attributes in self.tags if name == tag)


def history(epochs: int) -> list[dict[str, Any]]:
    return [
        {
            "epoch": epoch,
            "train_loss": 2 / epoch,
            "val_loss": 2.2 / epoch,
            "val_accuracy": 1 - 1 / (epoch + 1),
            "lr": 1e-3 / epoch,
            "images_per_second": 900.0,
        }
        for epoch in range(1, epochs + 1)
    ]


def predictions(images: int, classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, images)
    probabilities = generator.random((images, classes)) ** 4
    probabilities[np.arange(images), labels] += 0.6
    return probabilities / probabilities.sum(axis=1, keepdims=True), labels


def mistakes(number: int, side: int = 8, label: str = "class 0", predicted: str = "class 1") -> list[Mistake]:
    generator = np.random.default_rng(1)
    return [
        Mistake(
            image=generator.integers(0, 256, (side, side, 3), dtype=np.uint8),
            name=f"photos/{i:03d}.jpg",
            label=label,
            predicted=predicted,
            confidence=1 - i / 1000,
        )
        for i in range(number)
    ]


@pytest.fixture
def content() -> ReportContent:
    names = [f"class {k}" for k in range(8)]
    return ReportContent(
        title="demo",
        command="vitral train digits --out runs/demo",
        result={
            "model": "S/2",
            "data": "digits",
            "parameters": 21_342_218,
            "val_accuracy": 0.9,
            "test_accuracy": 0.877,
            "best_epoch": 7,
            "epochs": 9,
            "seconds": 138.2,
            "images_per_second": 4112.3,
            "device": "cpu",
            "precision": "fp32",
            "seed": 3,
            "versions": {"vitral": "9.8.7", "torch": "2.99"},
        },
        plan=[Line("patch size", "2", "sixteen tokens")],
        history=history(9),
        evaluation=measure(*predictions(300, 8), names),
        mistakes=mistakes(30),
        layers=[
            {
                "name": "head",
                "type": "Linear",
                "output_shape": [1, 10],
                "parameters": 3850,
                "trainable": 0,
                "flops": None,
            }
        ],
        samples=[(np.zeros((8, 8, 1), dtype=np.uint8), "class 2")],
    )


def test_all_known_parts_are_shown(content: ReportContent):
    page = Page(render(content, run="runs/demo"))
    sections = {"result", "findings", "training", "confusion", "classes", "mistakes", "calibration", "plan", "layers"}
    assert sections | {"again", "next"} <= page.ids
    for words in (
        "demo",
        "S/2 trained on digits · 8 classes",
        "Validation accuracy",
        "87.7%",
        "21,342,218",
        "2\u202fmin 18\u202fs",
        "sixteen tokens",
        "Most frequent confusions",
        "photos/000.jpg",
        "1 × 10",
        "vitral train digits --out runs/demo",
        "vitral predict runs/demo IMAGE",
        "vitral evaluate runs/demo DATA",
        "9.8.7",
        "seed 3",
        "Epoch 7 was the best; the 2 epochs after it did not improve.",
    ):
        assert words in page.text, words
    low, high = content.evaluation.accuracy_interval
    assert f"interval {100 * low:.1f}% – {100 * high:.1f}%" in page.text


def test_every_link_in_the_page_has_its_target(content: ReportContent):
    for filled in (content, ReportContent("bare")):
        page = Page(render(filled, run="r"))
        assert {a["href"].removeprefix("#") for a in page.of("a")} <= page.ids
        assert {a["href"].removeprefix("#") for a in page.of("use")} <= page.ids


def test_no_network_access_and_no_scripts(content: ReportContent):
    html = render(content, run="r")
    page = Page(html)
    assert not re.search(r"https?:|[\"'(=]//|@import|url\((?!#)", html)
    assert {"script", "link", "iframe", "object", "embed"}.isdisjoint(tag for tag, _ in page.tags)
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert all(image["src"].startswith("data:image/") for image in page.of("img"))
    policy = next(meta["content"] for meta in page.of("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")


def test_images_and_figures_have_descriptions(content: ReportContent):
    page = Page(render(content, run="r"))
    assert all(image["alt"] for image in page.of("img"))
    labels = [attributes["aria-label"] for _, attributes in page.tags if attributes.get("role") == "img"]
    assert any(label.startswith("Loss over epochs 1 to 9") and "best epoch 7" in label for label in labels)
    assert any("expected calibration error" in label for label in labels)
    assert all(heading.get("scope") in {"row", "col"} for heading in page.of("th"))


def test_a_device_is_a_setting_and_not_a_tile(content: ReportContent):
    html = render(content, run="r")
    assert "<dt>training speed</dt>" in html
    assert "<dt>device</dt>" not in html
    assert "<bdi>device</bdi> <b><bdi>cpu</bdi></b>" in html


def test_the_metrics_that_decide_are_the_first_columns(content: ReportContent):
    table = re.search(r'<table class="history">.*?</table>', render(content, run="r"), re.DOTALL)
    assert table
    headings = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', table[0])
    assert headings[:3] == ["epoch", "validation accuracy", "validation loss"]


def test_terms_are_explained_at_the_end(content: ReportContent):
    text = Page(render(replace(content, title="ranks"), run="r")).text
    words = text.split("Words on this page")[1]
    assert "epoch" in words
    assert "one of several training processes" in words
    assert "Muon" not in words


def test_names_are_never_markup(content: ReportContent):
    names = [HOSTILE, *(f"class {k}" for k in range(1, 8))]
    hostile = replace(
        content,
        title=HOSTILE,
        command=HOSTILE,
        result=dict.fromkeys(("model", "data", "device", "precision", "seed"), HOSTILE)
        | {"versions": {HOSTILE: HOSTILE}},
        plan=[Line(HOSTILE, HOSTILE, HOSTILE)],
        evaluation=measure(*predictions(300, 8), names),
        mistakes=[replace(mistake, name=HOSTILE) for mistake in mistakes(3, label=HOSTILE, predicted=HOSTILE)],
        layers=[{"name": HOSTILE, "type": HOSTILE, "output_shape": HOSTILE}],
        samples=[(np.zeros((4, 4), dtype=np.uint8), HOSTILE)],
    )
    html = render(hostile, run=HOSTILE)
    page = Page(html)
    assert "<script" not in html
    assert "script" not in {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert page.text.count(HOSTILE) > 15


@pytest.mark.slow
def test_undecodable_names_do_not_stop_the_report(content: ReportContent, tmp_path: Path):
    odd = replace(content, mistakes=[replace(mistakes(1)[0], name="bad\udcff\x00\x1b[2J.jpg")])
    write_report(tmp_path / "report.html", odd)
    text = (tmp_path / "report.html").read_text("utf-8")
    assert "bad?��[2J.jpg" in text


@pytest.mark.slow
def test_figures_and_page_are_the_same_every_time(content: ReportContent):
    before = dict(mpl.rcParams)
    assert render(content, run="r") == render(content, run="r")
    assert dict(mpl.rcParams) == before


@pytest.mark.slow
def test_size_is_bounded(content: ReportContent, tmp_path: Path):
    many = replace(content, mistakes=mistakes(150, side=700), samples=[(m.image, "x") for m in mistakes(99, 700)])
    write_report(tmp_path / "report.html", many)
    assert (tmp_path / "report.html").stat().st_size < 4e6
    images = list(Page((tmp_path / "report.html").read_text("utf-8")).of("img"))
    assert len(images) <= 24 + 48 + 12
    assert all(int(image[side]) <= 224 for image in images for side in ("width", "height"))


def test_gallery_starts_with_the_most_confident(content: ReportContent):
    page = Page(render(replace(content, mistakes=mistakes(30)[::-1]), run="r"))
    shown = re.findall(r"photos/(\d+)\.jpg", page.text)
    assert shown == [f"{i:03d}" for i in range(24)]
    wrong = content.evaluation.images - int(np.trace(content.evaluation.confusion))
    assert f"The first 24 of {wrong}." in page.text


@pytest.mark.slow
def test_small_images_keep_their_pixels_and_large_ones_do_not(content: ReportContent):
    small = [*Page(render(replace(content, mistakes=mistakes(1, side=28)), run="r")).of("img")][-1]
    large = [*Page(render(replace(content, mistakes=mistakes(1, side=300)), run="r")).of("img")][-1]
    assert small["class"] == "pixelated"
    assert small["src"].startswith("data:image/png")
    assert large.get("class") is None


def test_bare():
    page = Page(render(ReportContent("bare"), run="runs/bare"))
    assert {"result", "next"} == page.ids - {i for i in page.ids if i.endswith("-title")}
    assert "vitral evaluate runs/bare" in page.text


def test_no_evaluation_shows_what_training_recorded(content: ReportContent):
    page = Page(render(replace(content, evaluation=None, mistakes=()), run="r"))
    assert {"confusion", "classes", "mistakes", "calibration"}.isdisjoint(page.ids)
    assert "Test accuracy" in page.text
    assert page.text.count("87.7%") == 2  # title and headline


def test_no_errors_is_reported_with_a_confidence_bound():
    evaluation = measure(np.eye(2)[[0, 1] * 20], np.array([0, 1] * 20), ["cat", "dog"])
    page = Page(render(ReportContent("x", evaluation=evaluation, evaluated_on="test"), run="r"))
    assert "None: all 40 test images are correct." in page.text
    assert "as low as 91.2%" in page.text


def test_one_image():
    page = Page(
        render(ReportContent("x", evaluation=measure(np.array([[0.4, 0.6]]), np.array([1]), ["a", "b"])), run="r")
    )
    assert "1 of 1 validation image correct" in page.text
    assert "not measured, no images" in page.text
    assert "Too few images to judge calibration" in page.text


def test_one_epoch_is_a_table_not_a_curve(content: ReportContent):
    page = Page(render(replace(content, history=history(1)), run="r"))
    assert "this run has only one epoch" in page.text
    assert "train loss" in page.text
    assert not any(label.startswith("Loss over") for _, a in page.tags if (label := a.get("aria-label") or ""))


def test_history_with_gaps(content: ReportContent):
    lines = history(9)
    for line in lines[::2]:
        line["val_loss"] = None
        del line["val_accuracy"]
    lines[3]["train_loss"] = float("nan")
    lines.append({"step": 5})
    page = Page(render(replace(content, history=lines), run="r"))
    labels = [attributes.get("aria-label") or "" for _, attributes in page.tags]
    assert any(label.startswith("Accuracy over epochs 2 to 8") for label in labels)
    assert "nan" not in page.text.lower()


def test_long_history_is_subsampled_but_keeps_the_best_and_the_last(content: ReportContent):
    result = dict(content.result) | {"best_epoch": 998}
    page = Page(render(replace(content, history=history(1000), result=result), run="r"))
    assert "The table shows evenly spaced epochs" in page.text
    assert {"998", "1000"} <= set(re.findall(r"\d+", page.text))
    assert sum(tag == "tr" for tag, _ in page.tags) < 250


def test_many_classes_become_a_heat_map():
    names = [f"thing {k}" for k in range(1000)]
    html = render(ReportContent("x", evaluation=measure(*predictions(3000, 1000), names)), run="r")
    page = Page(html)
    heat = next(image for image in page.of("img") if image.get("class") == "heat")
    assert (heat["width"], heat["height"]) == ("250", "250")
    assert "The other 970 classes" in page.text
    assert len(html) < 1.5e6


def test_run_is_quoted_for_the_shell(tmp_path: Path):
    folder = tmp_path / "my run"
    folder.mkdir()
    write_report(folder / "report.html", ReportContent("x"))
    assert f"vitral predict '{folder}' IMAGE" in Page((folder / "report.html").read_text("utf-8")).text


def test_writing_replaces_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "report.html"
    write_report(path, ReportContent("first"))
    write_report(path, ReportContent("second"))
    assert "second" in path.read_text("utf-8")
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(WriteError, match="cannot write"):
        write_report(path / "below-a-file" / "report.html", ReportContent("x"))


def test_values_are_formatted_for_people():
    assert [compact(n) for n in (3, 999, 21_342_218, 999_999, 4.2e9)] == [
        "3",
        "999",
        "21.3\u202fM",
        "1000\u202fk",
        "4.2\u202fG",
    ]
    assert [duration(s) for s in (3.14, 59, 60, 138.2, 8123, 200_000)] == [
        "3.1\u202fs",
        "59\u202fs",
        "1\u202fmin",
        "2\u202fmin 18\u202fs",
        "2\u202fh 15\u202fmin",
        "2\u202fd 7\u202fh",
    ]
    assert (count(1, "class", "classes"), count(1200, "image")) == ("1 class", "1,200 images")
    assert (amount(None), amount(0), amount(1920)) == ("", "", "1.92\u202fk")


def test_a_single_predicted_class_is_a_finding(content: ReportContent):
    found = measure(np.eye(2)[[1, 1, 1]], np.array([0, 1, 1]), ["cat", "owl"])
    text = Page(render(replace(content, evaluation=found, mistakes=()), run="r")).text
    assert "Every image is classified as “owl”." in text
    assert "Hardest class" not in text


def test_images_of_one_class_show_only_what_applies(content: ReportContent):
    pages = [
        Page(render(replace(content, evaluation=measure(np.eye(2)[[0, 1, 1]], labels, ["cat", "owl"])), run="r")).text
        for labels in (np.array([0, 0, 0]), np.array([0, 0, 1]))
    ]
    for word in ("Precision", "F1", "always predicting", "Sorted by", "Hardest class"):
        assert word not in pages[0]
        assert word in pages[1]
    assert "33.3" in pages[0], "recall"


def test_compile_time_and_few_images_are_reported(content: ReportContent):
    few = measure(np.eye(2)[[0, 1, 1]], np.array([0, 0, 1]), ["cat", "owl"])
    text = Page(render(replace(content, evaluation=few), run="r")).text
    assert (
        "mean difference between confidence and accuracy, over 15 bins of confidence; unreliable with only 3 images"
        in text
    )
    assert "compiling" not in text
    result = {**(content.result or {}), "compile_seconds": 80.9}
    text = Page(render(replace(content, result=result), run="r")).text
    assert "9 epochs, 1\u202fmin 21\u202fs of it compiling" in text
    assert "unreliable with only" not in text
