"""The page of `vitral label` in a real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from browser import chromium, require_chromium
from images import scene
from labeling.sheet import SCREENS, Sheet, table
from npmpackages import AXE, real
from serving.serverprocess import ServerProcess, eventually
from vitral.cli.main import main
from vitral.export import npm

require_chromium()
pytestmark = pytest.mark.real

MARKUP = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty images, of which the first is broken, and a name with markup."""
    folder = tmp_path_factory.mktemp("label") / "photos"
    folder.mkdir()
    for number in range(40):
        scene(number, (120, 160)).save(folder / f"image {number:02}.jpg")
    (folder / "image 00.jpg").write_bytes(b"no image")
    Image.new("RGB", (60, 90), "teal").save(folder / "image 39 <b>bold<b>.png")
    return folder


def words(photos: Path) -> list[str]:
    return ["label", str(photos), "--classes", "rose", "tulip", MARKUP, "--no-open"]


@pytest.fixture(scope="module")
def server(photos: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(lambda: main(words(photos)))
    yield server
    server.client.close()
    server.kill()


@pytest.fixture(scope="module")
def browser(server: ServerProcess) -> Iterator[Any]:
    """The server first: it is a fork of this process, in which the browser's event loop does not run yet."""
    with chromium() as found:
        yield found


@pytest.fixture
def sheet(browser: Any, server: ServerProcess) -> Iterator[Sheet]:
    sheet = Sheet(browser, server.url)
    yield sheet
    sheet.page.evaluate("document.activeElement.blur()")
    while sheet.page.locator("#undo").is_enabled():
        before = sheet.page.locator("#undo").get_attribute("title")
        sheet.page.locator("#undo").click()
        sheet.page.wait_for_function("(t) => document.getElementById('undo').title !== t", arg=before)
    assert sheet.complaints == []
    sheet.context.close()


def test_labels_by_keyboard_are_in_the_table(sheet: Sheet, photos: Path):
    sheet.press("ArrowRight", "1")
    sheet.said("Label 1 image rose")
    sheet.press("2")
    sheet.said("Label 1 image tulip")
    sheet.press("u")
    sheet.said("Mark 1 image unsure")
    sheet.press("x")
    sheet.said("Exclude 1 image")
    sheet.press("Shift+ArrowRight", "Shift+ArrowRight", "3")
    sheet.said(f"Label 3 images {MARKUP}")
    wanted = {
        "image 00.jpg": ("", "no"),
        "image 01.jpg": ("rose", "yes"),
        "image 02.jpg": ("tulip", "yes"),
        "image 03.jpg": ("", "unsure"),
        "image 04.jpg": ("", "excluded"),
        **{f"image {n:02}.jpg": (MARKUP, "yes") for n in (5, 6, 7)},
    }
    assert eventually(lambda: wanted.items() <= table(photos).items())
    sheet.press("z")
    sheet.said(f"Undone: label 3 images {MARKUP}")
    assert eventually(lambda: table(photos)["image 05.jpg"] == ("", "no"))
    sheet.press("Shift+Z")
    sheet.said(f"Redone: label 3 images {MARKUP}")
    assert sheet.option("image 05.jpg").get_attribute("aria-label") == f"image 05.jpg, {MARKUP}, checked"


def test_a_filter_and_the_counts(sheet: Sheet):
    sheet.press("ArrowRight", "1")
    sheet.said("Label 1 image rose")
    page = sheet.page
    page.get_by_role("button", name="Unlabeled").click()
    page.get_by_role("heading", name="Unlabeled").wait_for()
    assert page.get_by_role("button", name="Unlabeled").inner_text().split() == ["Unlabeled", "40"]
    assert sheet.option("image 01.jpg").count() == 0
    page.get_by_role("button", name="Show rose, 1").click()
    page.wait_for_function("() => document.querySelectorAll('[role=option]').length === 1")
    page.get_by_role("button", name="All images").click()


def test_images_are_dragged_onto_a_class_and_framed(sheet: Sheet):
    page = sheet.page
    sheet.option("image 02.jpg").click()
    sheet.option("image 03.jpg").click(modifiers=["Control"])
    sheet.option("image 03.jpg").drag_to(page.locator("[data-label=tulip]"))
    sheet.said("Label 2 images tulip")
    first, last = (sheet.option(f"image 0{n}.jpg").bounding_box() for n in (1, 4))
    page.keyboard.down("Shift")
    page.mouse.move(first["x"] + 20, first["y"] + 20)
    page.mouse.down()
    page.mouse.move(last["x"] + 30, last["y"] + 30, steps=4)
    page.mouse.up()
    page.keyboard.up("Shift")
    assert page.locator("#selected").inner_text() == "4 selected"
    sheet.press("Escape")
    sheet.option("image 01.jpg").click()
    sheet.option("image 06.jpg").click(modifiers=["Shift"])
    assert page.locator("#selected").inner_text() == "6 selected"


def test_a_class_is_found_added_renamed_and_removed(sheet: Sheet):
    page = sheet.page
    sheet.option("image 01.jpg").click()
    sheet.press("c")
    page.keyboard.type("tul")
    sheet.press("Enter")
    sheet.said("Label 1 image tulip")
    sheet.press("c")
    page.keyboard.type("iris")
    sheet.press("Enter")
    sheet.said("Add the class iris")
    page.get_by_role("button", name="Rename or remove iris").click()
    page.get_by_role("textbox", name="Name").fill("Iris germanica")
    sheet.press("Enter")
    sheet.said("Rename the class iris to Iris germanica")
    page.get_by_role("button", name="Rename or remove Iris germanica").click()
    page.get_by_role("button", name="Remove the class").click()
    sheet.said("Remove the class Iris germanica")


def test_a_large_image_takes_the_same_keys(sheet: Sheet):
    page = sheet.page
    sheet.option("image 01.jpg").dblclick()
    page.wait_for_function("() => document.getElementById('large-image').naturalWidth === 160")
    sheet.press("2")
    sheet.said("Label 1 image tulip")
    page.wait_for_function("() => document.getElementById('large-name').textContent === 'image 02.jpg'")
    sheet.press("ArrowLeft")
    assert page.locator("#large-label").inner_text() == "tulip, checked"
    sheet.press("ArrowLeft")
    page.locator("#large-problem").wait_for()
    sheet.press("Escape")
    assert not page.locator("#large").is_visible()


def test_two_tabs_see_each_other(sheet: Sheet, browser: Any, server: ServerProcess):
    other = Sheet(browser, server.url)
    other.press("ArrowRight", "1")
    other.said("Label 1 image rose")
    sheet.page.wait_for_function("() => document.querySelector('#image-1').ariaLabel.includes('rose')")
    other.context.close()


def test_the_address_keeps_no_token_and_another_token_is_refused(sheet: Sheet, browser: Any, server: ServerProcess):
    assert sheet.page.evaluate("location.href") == server.url.partition("#")[0]
    context = browser.new_context()
    page = context.new_page()
    page.goto(server.url.partition("#")[0] + "#another-token-of-some-length")
    page.get_by_role("alert").wait_for()
    assert "Open the address that vitral label printed" in page.get_by_role("alert").inner_text()
    assert page.get_by_role("option").count() == 0
    context.close()


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_screens(browser: Any, server: ServerProcess, width: int, scheme: str, tmp_path: Path):
    """Nothing is wider than the screen, everything has a name, and axe-core finds nothing."""
    size = {"width": width, "height": 800}
    sheet = Sheet(browser, server.url, viewport=size, color_scheme=scheme, bypass_csp=True, has_touch=width < 400)
    page = sheet.page
    sheet.press("ArrowRight", "1", "2", "Shift+ArrowRight")
    page.wait_for_function("() => document.querySelectorAll('.labeled').length === 2")
    page.wait_for_function("() => [...document.images].filter((one) => one.naturalWidth).length > 8")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    folder = Path(os.environ.get("VITRAL_SCREENSHOTS") or tmp_path)
    page.screenshot(path=str(folder / f"label-{width}-{scheme}.png"))
    page.evaluate(npm.members(real(AXE), ["package/axe.min.js"])["package/axe.min.js"].decode())
    found = [page.evaluate("axe.run()")]
    sheet.press("?")
    found.append(page.evaluate("axe.run()"))
    page.screenshot(path=str(folder / f"label-help-{width}-{scheme}.png"))
    sheet.press("Escape", " ")
    page.wait_for_function("() => document.getElementById('large-image').naturalWidth")
    found.append(page.evaluate("axe.run()"))
    page.screenshot(path=str(folder / f"label-large-{width}-{scheme}.png"))
    assert [[(one["id"], one["nodes"][0]["html"]) for one in each["violations"]] for each in found] == [[], [], []]
    sheet.press("Escape", "z")
    page.wait_for_function("() => document.querySelectorAll('.labeled').length === 1")
    sheet.press("z")
    page.wait_for_function("() => document.querySelectorAll('.labeled').length === 0")
    sheet.context.close()


@contextmanager
def started(*typed: str) -> Iterator[tuple[Any, str]]:
    """A process of its own, and the address that it prints: the browser runs here, so that nothing can fork."""
    command = [sys.executable, "-m", "vitral", *typed]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            yield process, next(found[0] for line in process.stderr if (found := re.search(r"http://\S+", line)))
        finally:
            process.kill()


def test_it_ends_by_the_button_or_by_ctrl_c(browser: Any, tmp_path: Path):
    scene(1).save(tmp_path / "1.jpg")
    for way in ("the button", "Ctrl-C"):
        with started("label", str(tmp_path), "--classes", "rose", "--no-open") as (process, url):
            sheet = Sheet(browser, url)
            sheet.press("1" if way == "the button" else "x")
            sheet.said("Label 1 image rose" if way == "the button" else "Exclude 1 image")
            if way == "the button":
                sheet.page.get_by_role("button", name="Finish").click()
                assert "Saved in" in sheet.page.get_by_role("alert").inner_text()
            else:
                process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
            text = process.stderr.read()
            assert f"vitral train {tmp_path / 'labels.csv'}" in text
            sheet.context.close()
    assert table(tmp_path) == {"1.jpg": ("rose", "excluded")}
