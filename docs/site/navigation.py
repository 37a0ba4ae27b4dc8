"""Pages of the site in reading order, and their tables of contents."""

from __future__ import annotations

import posixpath
from pathlib import Path
from typing import Any

START = "docs/index"

NAVIGATION = {
    "Start": {
        "README": "All at a glance",
        "docs/getting-started": "",
        "docs/troubleshooting": "",
        "docs/coming-from": "",
        "docs/demo": "",
    },
    "Data": {
        "docs/data": "",
        "docs/label": "",
        "docs/check-data": "",
        "docs/shards": "",
    },
    "Train": {
        "docs/pretrained-model": "",
        "docs/training": "",
        "docs/recipes": "",
        "docs/speed": "",
        "docs/run-folder": "",
        "docs/tracking": "",
        "docs/multi-label-and-regression": "",
        "docs/text": "",
        "docs/pretrain": "",
        "docs/variable-sizes": "",
        "docs/distributed": "",
    },
    "Use": {
        "docs/predict": "",
        "docs/python": "",
        "docs/weights": "",
        "docs/serve": "",
        "docs/export": "",
    },
    "Measure and understand": {
        "docs/compare": "",
        "docs/reliability": "",
        "docs/study": "",
        "docs/explain": "",
        "docs/explain-methods": "",
        "docs/explain-evidence": "",
        "docs/inspect": "",
    },
    "Reference": {
        "docs/site/commands": "",
        "docs/site/python": "",
        "docs/examples": "",
        "examples/plugin/README": "A package of your own",
        "docs/glossary": "",
    },
    "Project": {
        "docs/trust": "",
        "docs/bench": "",
        "benchmarks/RESULTS": "",
        "docs/write-ups": "",
        "docs/tour": "",
        "docs/decisions/README": "",
        "docs/log/README": "",
        "CONTRIBUTING": "",
        "CHANGELOG": "",
        "SECURITY": "",
        "docs/index.ko": "한국어",
        "docs/index.ja": "日本語",
    },
}
"""Heading → page → its name in the sidebar, where that is not the title."""

CHILDREN = {
    "docs/demo": "src/vitral/demo/README",
    "docs/decisions/README": "docs/decisions/0*",
    "docs/log/README": "docs/log/[a-z]*",
    "benchmarks/RESULTS": "benchmarks/results/*/README",
}
"""Page → the pages below it."""

MOVED = {
    "docs/use": "docs/predict",
    "docs/inference": "docs/predict",
    "docs/resizing": "docs/weights",
    "docs/elsewhere": "docs/reliability",
    "docs/labels": "docs/multi-label-and-regression",
    "docs/scale": "docs/distributed",
    "docs/pack": "docs/variable-sizes",
    "docs/backbone": "docs/pretrained-model",
    "docs/check": "docs/check-data",
    "docs/words": "docs/glossary",
}
"""Former address of a page → the page that a browser is led to."""

PATTERNS = ["docs/**.md", "docs/site/*.rst", "benchmarks/**.md", "examples/**.md", "src/**.md", "*.md"]
"""Files that are pages; one that no table of contents has fails the build."""


REDIRECTION = """<!doctype html>
<html lang="en">
  <meta charset="utf-8">
  <title>Moved</title>
  <link rel="canonical" href="{target}">
  <script>location.replace("{target}" + location.hash)</script>
  <meta http-equiv="refresh" content="1; url={target}">
  <a href="{target}">This page has moved.</a>
</html>
"""


def setup(app: Any) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("source-read", append_contents)
    app.connect("html-page-context", name_language)
    app.connect("build-finished", redirect)
    return {"parallel_read_safe": True}


def redirect(app: Any, error: Exception | None) -> None:
    """Write a page at each former address that leads to the new one, with the same anchor."""
    if error is not None or not (Path(app.outdir) / f"{START}.html").exists():
        return
    for old, new in MOVED.items():
        target = posixpath.relpath(f"{new}.html", posixpath.dirname(old))
        (Path(app.outdir) / f"{old}.html").write_text(REDIRECTION.format(target=target), "utf-8")


def name_language(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Set the language of a translated page, by which browsers choose fonts, line breaks and voices."""
    if page.startswith(f"{START}."):
        context["language"] = page.rpartition(".")[2]


def append_contents(app: Any, page: str, source: list[str]) -> None:
    """Append the tables of contents of a page, which a code host would show as code."""
    if page == START:
        source[0] += "".join(toctree(pages, f":caption: {heading}") for heading, pages in NAVIGATION.items())
    elif page in CHILDREN:
        source[0] += toctree({CHILDREN[page]: ""}, ":glob:")


def toctree(pages: dict[str, str], option: str) -> str:
    """Write a hidden table of contents in Markdown."""
    entries = [f"{title} </{page}>" if title else f"/{page}" for page, title in pages.items()]
    return "\n".join(["", "", "```{toctree}", ":hidden:", option, "", *entries, "```", ""])
