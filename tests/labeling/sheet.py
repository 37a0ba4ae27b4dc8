"""The page of `vitral label` in a browser, and the server behind it."""

from __future__ import annotations

import csv
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from browser import PATIENCE
from images import noise
from vitral.cli.main import main

SCREENS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]


def color(number: int) -> str:
    return ("blue", "red")[number % 2]


def draw(number: int) -> Image.Image:
    """An image that is rather red or rather blue, by turns."""
    pixels = noise(number, (64, 64)).astype(float) * 0.5
    pixels[..., 0 if number % 2 else 2] += 120
    return Image.fromarray(pixels.astype(np.uint8))


def serve(where: Path, words: list[str]) -> int:
    """Run the command in a folder, which gets the runs."""
    os.chdir(where)
    return main(words)


class Sheet:
    """An open page."""

    def __init__(self, browser: Any, url: str, **options: Any):
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.complaints: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda message: self._console(message))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"a dialog: {dialog.message}"))
        self.page.goto(url)
        self.page.locator("#work").wait_for()

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning") and "422" not in message.text:  # of the broken image
            self.complaints.append(message.text)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def said(self, text: str) -> None:
        self.page.wait_for_function("(text) => document.getElementById('status').textContent === text", arg=text)

    def option(self, name: str) -> Any:
        return self.page.get_by_role("option", name=re.compile("^" + re.escape(name).replace("/", r"\/")))


def table(photos: Path) -> dict[str, tuple[str, str]]:
    """Rows of the table, which is there soon after the first action."""
    if not (photos / "labels.csv").exists():
        return {}
    with open(photos / "labels.csv", newline="", encoding="utf-8") as file:
        return {row["file"]: (row["label"], row["checked"]) for row in csv.DictReader(file)}
