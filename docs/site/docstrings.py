"""Docstrings as Sphinx reads them: they are Markdown, where indented lines after a paragraph are code."""

from __future__ import annotations

import ast
from itertools import takewhile
from textwrap import dedent
from typing import Any


def setup(app: Any) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("autodoc-process-docstring", mark_code)
    return {"parallel_read_safe": True}


def mark_code(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Mark indented blocks as code."""
    marked: list[str] = []
    margin = ""  # of the last line that was not indented by four
    for number, line in enumerate(lines):
        indented = line.startswith("    ")
        if indented and not lines[number - 1].strip() and not margin.startswith(("- ", "    ")):
            marked += [f".. code-block:: {language(lines[number:])}", ""]
        if line.strip():
            margin = line
        marked.append(line)
    lines[:] = marked


def language(lines: list[str]) -> str:
    """Name the language of the indented lines that come first: Python, or text such as a drawn tree."""
    block = takewhile(lambda line: not line.strip() or line.startswith("    "), lines)
    try:
        ast.parse(dedent("\n".join(block)))
    except SyntaxError:
        return "text"
    return "python"
