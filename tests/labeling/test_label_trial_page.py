"""Plan, train, try and take home on the page, in Chromium with a simulated camera."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from browser import chromium, require_chromium
from labeling.sheet import SCREENS, Sheet, color, draw, serve
from npmpackages import AXE, real
from serving.serverprocess import ServerProcess
from vitral.export import npm

require_chromium()
pytestmark = pytest.mark.real

COUNT, LABELED = 40, 36


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images with a table of labels, of which the last ones have none."""
    folder = tmp_path_factory.mktemp("trial") / "photos"
    folder.mkdir()
    lines = ["file,label,given,checked"]
    for number in range(COUNT):
        draw(number).save(folder / f"{number:02}.png")
        lines.append(f"{number:02}.png,{color(number)},,yes" if number < LABELED else f"{number:02}.png,,,no")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def server(photos: Path) -> Iterator[ServerProcess]:
    found = ServerProcess(partial(serve, photos.parent, ["label", str(photos), "--no-open"]))
    yield found
    found.client.close()
    found.kill()


@pytest.fixture(scope="module")
def browser(server: ServerProcess) -> Iterator[Any]:
    with chromium("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream") as found:
        yield found


def answered(page: Any, name: str) -> str:
    """The answer to an image of this name, once it is there."""
    page.wait_for_function(
        "(name) => document.getElementById('trial-text').textContent.startsWith(name + ':')", arg=name
    )
    return str(page.locator("#trial-text").inner_text())


def open_trial(sheet: Sheet) -> Any:
    """Open the dialog once there are suggestions."""
    sheet.page.wait_for_function("() => !document.getElementById('accept').hidden")
    sheet.page.get_by_role("button", name="Try it").click()
    return sheet.page


def axe(page: Any) -> list[tuple[str, str]]:
    page.evaluate(npm.members(real(AXE), ["package/axe.min.js"])["package/axe.min.js"].decode())
    return [(one["id"], one["nodes"][0]["html"]) for one in page.evaluate("axe.run()")["violations"]]


def test_a_file_and_a_photo_are_answered(browser: Any, server: ServerProcess, tmp_path: Path):
    sheet = Sheet(browser, server.url)
    page = open_trial(sheet)
    assert not page.locator("#trial-by-choice").is_visible(), "no run is done yet"
    draw(101).save(tmp_path / "new.png")
    page.get_by_label("Image", exact=True).set_input_files(str(tmp_path / "new.png"))
    assert re.fullmatch(r"new\.png: red, \d+\.\d%", answered(page, "new.png"))
    assert page.locator("#trial-classes li").count() == 2
    page.wait_for_function("() => document.getElementById('trial-overlay').naturalWidth === 448")
    assert page.get_by_alt_text("Map of the evidence for red").is_visible()
    page.wait_for_function(
        "() => [...document.querySelectorAll('#trial-neighbors img')].filter((one) => one.naturalWidth).length === 6"
    )
    assert page.locator("#trial-neighbors figcaption").all_inner_texts() == ["red"] * 6
    page.get_by_role("button", name="Use the camera").click()
    page.get_by_role("button", name="Take a photo").click()
    answered(page, "the photo")
    page.get_by_role("button", name="Close").click()
    page.wait_for_function("() => document.getElementById('trial-view').srcObject === null")  # the camera is off
    (tmp_path / "notes.png").write_text("no image")
    page.get_by_role("button", name="Try it").click()
    page.get_by_label("Image", exact=True).set_input_files(str(tmp_path / "notes.png"))
    page.wait_for_function("() => document.getElementById('trial-text').textContent.includes('cannot be read')")
    assert not page.locator("#trial-answer").is_visible()
    assert sheet.complaints == []
    sheet.context.close()


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_the_dialogs_on_screens(browser: Any, server: ServerProcess, width: int, scheme: str, tmp_path: Path):
    """They fit, and axe-core finds nothing: an answer, the camera, and a plan."""
    size = {"width": width, "height": 800}
    sheet = Sheet(browser, server.url, viewport=size, color_scheme=scheme, bypass_csp=True)
    page = open_trial(sheet)
    folder = Path(os.environ.get("VITRAL_SCREENSHOTS") or tmp_path)
    draw(101).save(tmp_path / "new.png")
    page.get_by_label("Image", exact=True).set_input_files(str(tmp_path / "new.png"))
    answered(page, "new.png")
    page.wait_for_timeout(300)
    page.screenshot(path=str(folder / f"trial-{width}-{scheme}.png"))
    assert axe(page) == []
    assert page.evaluate("document.getElementById('trial').scrollWidth <= document.getElementById('trial').clientWidth")
    page.get_by_role("button", name="Use the camera").click()
    page.wait_for_function("() => !document.getElementById('trial-take').disabled")
    page.screenshot(path=str(folder / f"camera-{width}-{scheme}.png"))
    assert axe(page) == []
    page.get_by_role("button", name="Close").click()
    page.get_by_role("button", name=re.compile("^Train")).click()
    minutes = f"{width / 100 + (scheme == 'dark'):g}"  # another plan on each screen
    page.get_by_role("spinbutton", name="Minutes").fill(minutes)
    page.get_by_role("button", name="Plan").click()
    page.get_by_text(f"The plan for {minutes} minutes").wait_for()
    assert page.get_by_role("button", name="Start").is_visible()
    page.screenshot(path=str(folder / f"plan-{width}-{scheme}.png"))
    assert axe(page) == []
    assert page.evaluate("document.getElementById('teach').scrollWidth <= document.getElementById('teach').clientWidth")
    assert sheet.complaints == []
    sheet.context.close()


def test_a_run_is_tried_and_taken_home(browser: Any, server: ServerProcess, photos: Path, tmp_path: Path):
    sheet = Sheet(browser, server.url, bypass_csp=True)
    page = sheet.page
    page.get_by_role("button", name="Train", exact=True).click()
    page.get_by_role("spinbutton", name="Minutes").fill("0.3")
    page.get_by_role("button", name="Plan").click()
    page.get_by_role("button", name="Start").click()
    assert page.get_by_role("heading", name="Take it home").is_visible()
    assert page.locator("#home-list button").all_inner_texts() == ["Teaching page"]
    page.locator("#home-trained").wait_for()
    run = photos.parent / "runs" / "photos-1"
    assert page.locator("#home-run").inner_text() == str(run)
    page.get_by_role("button", name="Table of predictions").click()
    page.wait_for_function("() => document.getElementById('home-list').textContent.includes('It is in')")
    rows = (run / "predictions.csv").read_text().splitlines()
    assert len(rows) == 1 + COUNT - LABELED
    folder = Path(os.environ.get("VITRAL_SCREENSHOTS") or tmp_path)
    page.screenshot(path=str(folder / "home-1280-light.png"))
    assert axe(page) == []
    page.get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Try it").click()
    page.get_by_label("Ask").select_option("run")
    draw(102).save(tmp_path / "other.png")
    page.get_by_label("Image", exact=True).set_input_files(str(tmp_path / "other.png"))
    assert "blue" in answered(page, "other.png")
    page.get_by_label("Ask").select_option("suggestions")
    answered(page, "other.png")
    assert sheet.complaints == []
    sheet.context.close()
