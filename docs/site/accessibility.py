"""Small amends of the theme's HTML, for readers with a keyboard or a screen reader."""

from __future__ import annotations

import re
from typing import Any

SIGNATURE = re.compile(r"<dl>\n((?:<dd>.*</dd>\n)+)</dl>")
"""Parameters of a function, one a line: a list of definitions without terms."""


def setup(app: Any) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("html-page-context", amend, priority=600)  # after the theme
    return {"parallel_read_safe": True}


def amend(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Give headings in the sidebar a level, and let the keyboard scroll wide code and tables."""
    tree = "furo_navigation_tree"
    context[tree] = context[tree].replace('role="heading"', 'role="heading" aria-level="2"')
    body = context.get("body", "").replace("<pre>", '<pre tabindex="0">')
    body = body.replace('<div class="table-wrapper', '<div tabindex="0" class="table-wrapper')
    context["body"] = SIGNATURE.sub(lambda found: found[0].replace("dl>", "div>").replace("dd>", "div>"), body)
