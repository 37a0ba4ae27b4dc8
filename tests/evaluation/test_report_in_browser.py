"""Reports in a browser, with class names as people have them."""

from __future__ import annotations

import pytest

from browser import chromium, require_chromium
from running import printed, train
from vitral import device
from vitral.cli.main import main

pytestmark = [pytest.mark.real, pytest.mark.report]

NAMES = (
    "Donaudampfschifffahrtsgesellschaftskapitaene",
    "猫" * 12,
    "قطة منزلية قصيرة الشعر",
    "a cat rather than a dog",
    "x",
)


@pytest.fixture(scope="module")
def browser():
    require_chromium()
    with chromium() as running:
        yield running


@pytest.mark.slow
def test_no_report_is_wider_than_its_screen(make_images, tmp_path, capsys, browser, monkeypatch):
    monkeypatch.setattr(device, "cpu_name", lambda: "Intel(R) Xeon(R) Platinum 8259CL CPU @ 2.50GHz")
    photos = make_images(dict.fromkeys(NAMES, 6))
    run = train(photos, tmp_path / f"run-{NAMES[0]}", epochs=1, val_fraction=0.3)
    pages = {
        "report": run.folder / "report.html",
        "evaluate": tmp_path / "evaluate.html",
        "plan": tmp_path / "plans" / "photos.html",
    }
    other = train(photos, tmp_path / f"other-{NAMES[3]}", epochs=1, val_fraction=0.3, seed=1)
    pages["compare"] = tmp_path / "compare.html"
    others = make_images({NAMES[3]: 4}, name="others", size=(12, 14))
    words = ["compare", str(run.folder), str(other.folder), "--data", str(others)]
    assert main([*words, "--out", str(pages["compare"])]) == 0
    assert main(["evaluate", str(run.folder), str(photos), "--split", "train", "--report", str(pages["evaluate"])]) == 0
    monkeypatch.chdir(tmp_path)
    printed(capsys, "train", str(photos), "--plan-only", "--report")
    for width in (360, 1280):
        page = browser.new_page(viewport={"width": width, "height": 800})
        for name, path in pages.items():
            page.goto(path.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (name, width)
            wide = "(tables) => tables.filter((one) => one.offsetWidth > one.parentNode.offsetWidth).length"
            assert width > 390 or page.locator(".stacked").evaluate_all(wide) == 0, name
            page.screenshot(path=str(tmp_path / f"{name}-{width}.png"), full_page=True)
        page.close()
