"""Draw the images of the documentation that show pages, in a browser. Needs Chromium and Playwright's core library.

python -m tools.screenshots RUN     docs/images/report.png: RUN/report.html; docs/images/page.png: `vitral serve demo`
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from vitral.demo import IMAGES

CHROMIUM = "/usr/bin/chromium"
TARGET = Path(__file__).resolve().parents[1] / "docs" / "images"
SIZE: Any = {"width": 1280, "height": 800}


def main(run: str) -> None:
    """Draw both pages."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto((Path(run).resolve() / "report.html").as_uri())
        page.screenshot(path=TARGET / "report.png")
        with subprocess.Popen(["vitral", "serve", "demo", "--port", "0"], stderr=subprocess.PIPE, text=True) as server:
            try:
                page.goto(next(found[0] for line in server.stderr or () if (found := re.search(r"http://\S+", line))))
                page.wait_for_function("() => document.getElementById('title').textContent === 'demo'")
                page.locator("#file").set_input_files(str(IMAGES / "ship.png"))
                page.wait_for_function("() => document.getElementById('overlay').src")
                page.wait_for_timeout(500)  # until the image and its map are painted
                page.screenshot(path=TARGET / "page.png")
            finally:
                server.terminate()
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
