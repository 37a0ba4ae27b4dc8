"""Every page and table with 5,000 classes, whose names are long, from right to left, or of wide letters.

Pages are opened in Chromium on a phone and on a desktop: nothing is wider than the screen.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitral
from browser import PATIENCE, chromium, hosted, require_chromium
from npmpackages import real
from running import TINY, as_json, printed
from serving.serverprocess import ServerProcess
from vitral.cli.main import main
from vitral.export.web import PACKAGE

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.report, pytest.mark.timeout(600)]

CLASSES = 5000
VALIDATED = 40
WIDTHS = (390, 1280)
SHORT = "lesser great crested spotted common northern meadow alpine river"


def name(number: int) -> str:
    """Name of a class: a tenth each are one long word, Chinese, Arabic, Hebrew and a sentence."""
    words = SHORT.split()
    return {
        0: f"قطة منزلية قصيرة الشعر صحراء {number}",
        1: f"חתול כלב נשר מדבר ירוק ({number})",
        2: "Donaudampfschifffahrtsgesellschaftskapitaene" * 4 + str(number),
        3: "猫" * 60 + str(number),
        4: f"{' '.join(words * 2)} {number}",
    }.get(number % 10, f"{words[number % 9]} {words[number % 7]} {number}")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `photos`, a training image of each class and a few for validation, and the runs `one` and `two`."""
    place = tmp_path_factory.mktemp("thousands")
    rng = np.random.default_rng(0)
    for number in range(CLASSES):
        for split in ("train", "val")[: 1 + (number < VALIDATED)]:
            folder = place / "photos" / split / name(number)
            folder.mkdir(parents=True)
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    for seed, run in enumerate(("one", "two")):
        options = {**TINY, "epochs": 1, "batch_size": 128, "seed": seed}
        vitral.train(str(place / "photos"), out=str(place / run), quiet=True, **options)
    return place


@contextmanager
def started(*words: str) -> Iterator[str]:
    server = ServerProcess(lambda: main(list(words)))
    try:
        yield server.url
    finally:
        server.client.close()
        server.kill()


@pytest.fixture(scope="module")
def pages(place: Path) -> Iterator[dict[str, str]]:
    """Address of each page. The servers are forks of this process, in which no browser runs yet."""
    run, photos = str(place / "one"), str(place / "photos")
    written = {"report": place / "one" / "report.html"}
    for page, words in {
        "evaluate": ["evaluate", run, photos, "--split", "val", "--report"],
        "compare": ["compare", run, str(place / "two"), "--out"],
    }.items():
        written[page] = place / f"{page}.html"
        assert main([*words, str(written[page])]) == 0
    image = next((place / "photos/val").glob("*/*.png"))
    assert main(["explain", run, str(image), "--out", str(place / "maps")]) == 0
    written |= {f"explain {path.name}": path for path in (place / "maps").glob("*.html")}
    runtime = ["--runtime", str(real(PACKAGE))]
    assert main(["export", run, "--to", "web", "--out", str(place / "site"), *runtime]) == 0
    with (
        started("serve", run, "--port", "0") as served,
        started("label", photos, "--port", "0", "--no-open", "--out", str(place / "labels.csv")) as labeling,
        hosted(place / "site") as site,
    ):
        yield {
            **{page: path.as_uri() for page, path in written.items()},
            "serve": served,
            "label": labeling,
            "export": site,
        }


@pytest.fixture(scope="module")
def browser(pages: dict[str, str]) -> Iterator[Any]:
    require_chromium()
    with chromium() as running:
        yield running


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_is_wider_than_its_screen(pages: dict[str, str], browser: Any, width: int) -> None:
    for page, url in pages.items():
        sheet = browser.new_page(viewport={"width": width, "height": 800})
        sheet.set_default_timeout(PATIENCE)
        complaints: list[str] = []
        sheet.on("pageerror", lambda error, found=complaints: found.append(str(error)))
        sheet.goto(url)
        if page in ("serve", "export"):
            sheet.wait_for_function("() => document.getElementById('about').textContent.startsWith('5000 classes')")
        elif page == "label":
            sheet.locator("#work").wait_for()
        assert sheet.evaluate("document.documentElement.scrollWidth") <= width, (page, width)
        assert complaints == [], page
        sheet.close()


@pytest.mark.parametrize("page", ["serve", "export"])
def test_an_image_is_answered(pages: dict[str, str], browser: Any, place: Path, page: str) -> None:
    image = place / "photos/val" / name(3) / "3.png"
    sheet = browser.new_page(viewport={"width": 390, "height": 800})
    sheet.set_default_timeout(PATIENCE)
    sheet.goto(pages[page])
    sheet.wait_for_function("() => document.getElementById('about').textContent.startsWith('5000 classes')")
    sheet.locator("#file").set_input_files(str(image))
    sheet.wait_for_function("() => document.getElementById('status').textContent.startsWith('3.png:')")
    wanted = vitral.load(place / "one", precision="fp32")(str(image)).label
    assert sheet.locator("#label").inner_text() == wanted
    assert sheet.evaluate("document.documentElement.scrollWidth") <= 390
    sheet.close()


def test_a_table_has_every_class_under_its_name(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = place / "all.csv"
    printed(capsys, "predict", str(place / "one"), str(place / "photos/val"), "--all", "--out", str(table))
    csv.field_size_limit(sys.maxsize)
    with open(table, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == VALIDATED
    for row in rows:
        given = {key.removeprefix("p_"): float(value) for key, value in row.items() if key.startswith("p_")}
        assert set(given) == {name(number) for number in range(CLASSES)}
        assert sum(given.values()) == pytest.approx(1, abs=1e-3)
        assert row["class"] == max(given, key=given.__getitem__)


def test_the_metrics_have_every_class(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", str(place / "one"), str(place / "photos"), "--split", "val"]
    found = as_json(capsys, *words)
    assert len(found["per_class"]) == CLASSES
    assert sum(one["images"] for one in found["per_class"]) == VALIDATED
    out, _ = printed(capsys, *words)
    assert f"Not measured: {CLASSES - VALIDATED:,} classes without images (" in " ".join(out.split())
