"""Suggestions, near-duplicates, accuracy and likely wrong labels on the page, in Chromium."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser import chromium, require_chromium
from labeling.sheet import SCREENS, Sheet, color, draw, serve, table
from npmpackages import AXE, real
from serving.serverprocess import ServerProcess, eventually
from vitral.cli.main import main
from vitral.export import npm

require_chromium()
pytestmark = pytest.mark.real

COUNT = 90
MISTAKEN = (11, 20)
"""Images in the folder of the other color."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Images that nobody has sorted, of which the last is a copy of the first; and class folders with two mistakes."""
    flat, sorted_ = (tmp_path_factory.mktemp("assist") / name for name in ("photos", "sorted"))
    flat.mkdir()
    for number in range(COUNT):
        draw(number).save(flat / f"{number:02}.png")
        folder = color(number + 1) if number in MISTAKEN else color(number)
        (sorted_ / folder).mkdir(parents=True, exist_ok=True)
        draw(number).save(sorted_ / folder / f"{number:02}.png")
    (flat / "89.png").write_bytes((flat / "00.png").read_bytes())
    return flat, sorted_


@pytest.fixture(scope="module")
def servers(folders: tuple[Path, Path]) -> Iterator[list[ServerProcess]]:
    found = []
    for folder in folders:
        words = ["label", str(folder), "--no-open", *(["--classes", "blue", "red"] if folder.name == "photos" else [])]
        found.append(ServerProcess(partial(serve, folder.parent, words)))
    yield found
    for server in found:
        server.client.close()
        server.kill()


@pytest.fixture(scope="module")
def browser(servers: list[ServerProcess]) -> Iterator[Any]:
    with chromium() as found:
        yield found


def label(sheet: Sheet, photos: Path, first: int, last: int) -> None:
    """Label images by keys, one after the other: the page goes on to the next one."""
    for number in range(first, last + 1):
        sheet.press("1" if color(number) == "blue" else "2")
    assert eventually(lambda: table(photos).get(f"{last:02}.png") == (color(last), "yes"))


def accepted(photos: Path) -> dict[str, str]:
    return {file: label for file, (label, checked) in table(photos).items() if checked == "accepted"}


def test_suggestions_are_accepted_and_undone(browser: Any, servers: list[ServerProcess], folders: tuple[Path, Path]):
    sheet = Sheet(browser, servers[0].url)
    page = sheet.page
    assert "Label three images of two classes" in page.locator("#accept-note").inner_text()
    sheet.option("02.png").click()
    label(sheet, folders[0], 2, 13)  # some of them may be held out
    page.wait_for_function("() => document.querySelectorAll('.suggested').length > 10")
    one = page.locator(".suggested").first
    name = one.get_attribute("aria-label").split(",")[0]
    one.click()
    sheet.press("Enter")
    sheet.said("Accept 1 image")
    wanted = color(int(name[:2]))
    assert eventually(lambda: table(folders[0]).get(name) == (wanted, "accepted"))
    sheet.option("14.png").click()
    label(sheet, folders[0], 14, 47)  # few labels make no sure suggestions
    page.get_by_role("button", name=re.compile(r"^Accept \d+ above 95%")).click()
    page.wait_for_function("() => /^Accept [0-9]+ images?$/.test(document.getElementById('status').textContent)")
    assert eventually(lambda: len(accepted(folders[0])) > 10)
    assert np.mean([label == color(int(file[:2])) for file, label in accepted(folders[0]).items()]) > 0.94
    sheet.press("z")
    page.wait_for_function("() => document.getElementById('status').textContent.startsWith('Undone: accept')")
    assert eventually(lambda: len(accepted(folders[0])) <= 1)
    page.get_by_role("button", name="Held out").click()
    page.get_by_role("heading", name="Held out").wait_for()
    assert page.locator(".cell").count() > 3
    assert page.locator(".suggested").count() == 0, "a person who sees the answer agrees with it"
    page.get_by_role("button", name="All images").click()
    page.locator("#order").select_option("useful")
    page.wait_for_function(
        """() => [...document.querySelectorAll('.cell')]
        .sort((a, b) => a.dataset.position - b.dataset.position).slice(0, 3)
        .every((cell) => cell.classList.contains('suggested') || cell.querySelector('.suggested'))"""
    )
    assert sheet.complaints == []
    sheet.context.close()


def test_near_duplicates_are_labeled_together(browser: Any, servers: list[ServerProcess], folders: tuple[Path, Path]):
    sheet = Sheet(browser, servers[0].url)
    page = sheet.page
    page.wait_for_function("() => document.querySelector('.copies')?.textContent === '× 2'")
    names = page.locator(".cell").evaluate_all("(cells) => cells.slice(0, 2).map((cell) => cell.title)")
    assert names == ["00.png", "89.png"], "they stand together"
    sheet.option("00.png").click()
    sheet.press("1")
    sheet.said("Label 2 images blue")
    assert eventually(lambda: table(folders[0]).get("89.png") == table(folders[0]).get("00.png") == ("blue", "yes"))
    sheet.option("05.png").click()
    sheet.press("s")
    page.wait_for_function("() => document.getElementById('order').value === 'similar'")
    found = page.locator(".cell").evaluate_all("(cells) => cells.map((c) => [Number(c.dataset.position), c.title])")
    first = [name for _, name in sorted(found)][:10]
    assert first[0] == "05.png"
    assert sum(color(int(name[:2])) == "red" for name in first) >= 8
    assert sheet.complaints == []
    sheet.context.close()


def test_likely_wrong_labels_are_mended_beside_their_neighbors(
    browser: Any, servers: list[ServerProcess], folders: tuple[Path, Path]
):
    sheet = Sheet(browser, servers[1].url)
    page = sheet.page
    page.get_by_role("button", name="Likely wrong").click()
    page.get_by_role("heading", name="Likely wrong").wait_for()
    page.locator("#order").select_option("wrong")
    names = page.locator(".cell").evaluate_all("(cells) => cells.map((cell) => cell.title)")
    mistaken = ["blue/11.png", "red/20.png"]
    assert set(mistaken) <= set(names)
    assert len(names) < 8
    sheet.option("blue/11.png").dblclick()
    page.locator("#neighbors img").nth(5).wait_for()
    assert page.locator("#neighbors figcaption").all_inner_texts() == ["Nearest blue", "Nearest red"]
    sheet.press("a")
    sheet.said("Accept 1 image")
    sheet.press("Escape")
    assert eventually(lambda: table(folders[1]).get("blue/11.png") == ("red", "accepted"))
    sheet.option("red/20.png").click()
    sheet.press("Enter")
    sheet.said("Confirm 1 image")
    page.wait_for_function("() => !document.querySelector('[title=\"red/20.png\"]')")
    assert sheet.complaints == []
    sheet.context.close()


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_accuracy_on_screens(browser: Any, servers: list[ServerProcess], width: int, scheme: str, tmp_path: Path):
    """The figures, and a cell of the confusions that filters the grid; axe-core finds nothing."""
    size = {"width": width, "height": 800}
    sheet = Sheet(browser, servers[1].url, viewport=size, color_scheme=scheme, bypass_csp=True, has_touch=width < 400)
    page = sheet.page
    sheet.press("Control+a", "Enter")
    page.wait_for_function("() => document.getElementById('status').textContent.startsWith('Confirm')")
    page.wait_for_function("() => /Accuracy [0-9]+%/.test(document.getElementById('measure-open').textContent)")
    folder = Path(os.environ.get("VITRAL_SCREENSHOTS") or tmp_path)
    page.screenshot(path=str(folder / f"assist-{width}-{scheme}.png"))
    page.locator("#measure-open").click()
    assert "The accuracy on new images is probably from" in page.locator("#measure-text").inner_text()
    assert page.locator("#confusion tbody tr").count() == 2
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.evaluate(npm.members(real(AXE), ["package/axe.min.js"])["package/axe.min.js"].decode())
    found = page.evaluate("axe.run()")
    page.screenshot(path=str(folder / f"measure-{width}-{scheme}.png"))
    assert [(one["id"], one["nodes"][0]["html"]) for one in found["violations"]] == []
    page.locator("#confusion button.right").first.click()
    page.get_by_role("heading", name="blue, predicted as blue").wait_for()
    assert page.locator(".cell").count() > 4
    sheet.press("z")
    page.wait_for_function("() => document.getElementById('status').textContent.startsWith('Undone: confirm')")
    assert sheet.complaints == []
    sheet.context.close()


def test_a_run_is_trained_from_the_page_and_predicts(
    browser: Any, servers: list[ServerProcess], folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
):
    sheet = Sheet(browser, servers[1].url)
    page = sheet.page
    page.get_by_role("button", name="Train", exact=True).click()
    page.get_by_role("spinbutton", name="Minutes").fill("0.3")
    page.get_by_role("button", name="Plan").click()
    page.get_by_role("button", name="Start").wait_for()
    assert page.locator("#teach-text").inner_text() == "This is the plan for 0.3 minutes. Press Start to train with it."
    assert page.locator("#teach-choices tbody th").first.inner_text() == "model"
    page.get_by_role("spinbutton", name="Minutes").fill("0.4")
    assert not page.get_by_role("button", name="Start").is_visible(), "the plan is of other minutes"
    page.get_by_role("spinbutton", name="Minutes").fill("0.3")
    page.get_by_role("button", name="Plan").click()
    page.get_by_role("button", name="Start").click()
    page.wait_for_function("() => document.getElementById('teach-text').textContent.includes('is correct on')")
    run = folders[1].parent / "runs" / "sorted-1"
    assert page.locator("#home-run").inner_text() == str(run)
    assert main(["predict", str(run), str(folders[0] / "02.png"), str(folders[0] / "03.png")]) == 0
    printed = capsys.readouterr().out
    assert "02.png" in printed
    assert "03.png" in printed
    assert sheet.complaints == []
    sheet.context.close()
