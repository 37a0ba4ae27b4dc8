"""Pages of the site in reading order, and their tables of contents."""

from __future__ import annotations

from typing import Any

START = "docs/index"

NAVIGATION = {
    "Start": {
        "README": "All at a glance",
        "docs/getting-started": "",
        "docs/troubleshooting": "",
        "docs/coming-from": "",
        "docs/demo": "",
        "docs/pretrained-model": "",
        "docs/training": "",
        "docs/recipes": "",
        "docs/speed": "",
        "docs/run-folder": "",
        "docs/multi-label-and-regression": "",
        "docs/text": "",
        "docs/pretrain": "",
        "docs/data": "",
        "docs/label": "",
        "docs/check-data": "",
    },
    "Use": {
        "docs/use": "",
        "docs/python": "",
        "docs/inference": "",
        "docs/compare": "",
        "docs/weights": "",
        "docs/resizing": "",
    },
    "Understand": {
        "docs/explain": "",
        "docs/explain-methods": "",
        "docs/explain-evidence": "",
        "docs/inspect": "",
        "docs/reliability": "",
        "docs/study": "",
        "docs/trust": "",
        "docs/write-ups": "",
    },
    "Ship": {"docs/serve": "", "docs/export": ""},
    "Grow": {
        "docs/distributed": "",
        "docs/shards": "",
        "docs/variable-sizes": "",
        "docs/tracking": "",
        "examples/plugin/README": "A package of your own",
    },
    "Reference": {
        "docs/site/commands": "",
        "docs/site/python": "",
        "docs/examples": "",
        "docs/glossary": "",
        "docs/tour": "",
        "docs/bench": "",
        "benchmarks/RESULTS": "",
        "CONTRIBUTING": "",
        "CHANGELOG": "",
        "SECURITY": "",
        "docs/index.ko": "한국어",
        "docs/index.ja": "日本語",
    },
    "Reasons": {"docs/decisions/README": "", "docs/log/README": ""},
}
"""Heading → page → its name in the sidebar, where that is not the title."""

CHILDREN = {
    "docs/demo": "src/vitral/demo/README",
    "docs/decisions/README": "docs/decisions/0*",
    "docs/log/README": "docs/log/[a-z]*",
    "benchmarks/RESULTS": "benchmarks/results/*/README",
}
"""Page → the pages below it."""

PATTERNS = ["docs/**.md", "docs/site/*.rst", "benchmarks/**.md", "examples/**.md", "src/**.md", "*.md"]
"""Files that are pages; one that no table of contents has fails the build."""


def setup(app: Any) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("source-read", append_contents)
    app.connect("html-page-context", name_language)
    return {"parallel_read_safe": True}


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
