"""A real browser for tests of pages: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import base64
import functools
import http.server
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 120_000
"""Milliseconds that a busy machine may take to load and start a network."""
CHROMIUM = Path("/usr/bin/chromium")

SCREENS = [(360, "light"), (360, "dark"), (1440, "light"), (1440, "dark"), (3840, "light")]
"""Width and color scheme."""
HEIGHTS = {360: 780, 1440: 900, 3840: 2160}

DROP = """
([kind, names, contents]) => {
  const transfer = new DataTransfer();
  names.forEach((name, i) => {
    const bytes = Uint8Array.from(atob(contents[i]), (letter) => letter.charCodeAt(0));
    transfer.items.add(new File([bytes], name, { type: "image/png" }));
  });
  const options = { dataTransfer: transfer, clipboardData: transfer, bubbles: true, cancelable: true };
  const event = new (kind === "paste" ? ClipboardEvent : DragEvent)(kind, options);
  document.getElementById("drop").dispatchEvent(event);
}
"""
"""Give files to the page as a person does: the kind is drop or paste."""


def require_chromium() -> None:
    """Skip the module's tests without Playwright or Chromium."""
    pytest.importorskip("playwright", reason="needs the Python package playwright")
    if not CHROMIUM.exists():
        pytest.skip(f"needs {CHROMIUM}", allow_module_level=True)


@contextmanager
def chromium(*switches: str) -> Iterator[Any]:
    """A running browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox", *switches])
        yield browser
        browser.close()


@contextmanager
def another(browser: Any, *switches: str) -> Iterator[Any]:
    """A browser with other switches beside one that runs: a process has one Playwright."""
    other = browser.browser_type.launch(executable_path=str(CHROMIUM), args=["--no-sandbox", *switches])
    yield other
    other.close()


class Visit:
    """A page that is open, and what went wrong in it."""

    def __init__(self, browser: Any, url: str, **options: Any):
        self.url = url
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.requested: list[str] = []
        self.complaints: list[str] = []
        self.context.on("request", lambda request: self.requested.append(request.url))  # of workers, too
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda message: self._console(message))
        self.page.add_init_script(
            "document.addEventListener('securitypolicyviolation', "
            "(event) => console.error('CSP: ' + event.violatedDirective))"
        )
        self.page.goto(url)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning") and "401" not in message.text:
            self.complaints.append(message.text)

    def give(self, *images: tuple[str, bytes], kind: str = "drop") -> None:
        """Drop or paste images, and wait for the answer to the last one."""
        self.hand_over(*images, kind=kind)
        self.answered(images[-1][0])

    def hand_over(self, *images: tuple[str, bytes], kind: str = "drop") -> None:
        """Drop or paste images."""
        contents = [base64.b64encode(data).decode() for _, data in images]
        self.page.evaluate(DROP, [kind, [name for name, _ in images], contents])

    def answered(self, name: str) -> None:
        self.page.wait_for_function(
            "(name) => document.getElementById('status').textContent.startsWith(name + ':')", arg=name
        )

    def text(self, name: str) -> str:
        return str(self.page.locator(f"#{name}").inner_text())

    def check(self) -> None:
        """Nothing was reported on the console, and every request went to the page's own origin."""
        assert self.complaints == []
        own = ("blob:", "data:", self.url.rstrip("/") + "/")
        assert [url for url in self.requested if not url.startswith(own)] == []

    def fits(self, width: int) -> None:
        """Nothing is wider than the screen."""
        assert self.page.evaluate("document.documentElement.scrollWidth") <= width
        for name in ("label", "image", "classes", "gallery"):
            box = self.page.locator(f"#{name}").bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width

    def screenshot(self, name: str, folder: Path) -> None:
        """Write a screenshot into `folder`, or into that of the environment."""
        folder = Path(os.environ.get("VITRAL_SCREENSHOTS") or folder)
        self.page.wait_for_timeout(100)  # images are decoded
        self.page.screenshot(path=str(folder / f"{name}.png"), full_page=True)


def percent(share: float) -> str:
    """A share as the page shows it."""
    return f"{100 * share:.1f}%"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, and logs nothing."""

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def hosted(folder: Path, handler: type[Quiet] = Quiet) -> Iterator[str]:
    """The address of a folder on a plain web server, as any static host is."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()
