"""Docstrings as Sphinx reads them: they are Markdown, where indented lines after a paragraph are code, with sections.

The sections are `Args:`, `Returns:`, `Raises:` and `Example:`, each with indented lines.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from itertools import takewhile
from textwrap import dedent
from typing import Any


def setup(app: Any) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True}


def process(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Write sections as lists of fields, and mark indented blocks as code."""
    found: list[str] = []
    prose: list[str] = []
    rest = lines.copy()
    while rest:
        line = rest.pop(0)
        if line not in SECTIONS or not (rest and rest[0].startswith("    ")):
            prose.append(line)
            continue
        block = list(takewhile(lambda one: not one.strip() or one.startswith("    "), rest))
        del rest[: len(block)]
        found += [*marked_code(prose), "", *SECTIONS[line](dedent("\n".join(block)).splitlines()), ""]
        prose = []
    lines[:] = [*found, *marked_code(prose)]


def fields(kind: str) -> Callable[[list[str]], list[str]]:
    """Return a function that writes entries `name: text` as fields of this kind."""

    def write(block: list[str]) -> list[str]:
        return [re.sub(r"^(\w+): ", rf":{kind} \1: ", line) for line in block]

    return write


def returned(block: list[str]) -> list[str]:
    """Write the text on the result as a field."""
    return [f":returns: {block[0]}", *(f"    {line}" for line in block[1:])]


def example(block: list[str]) -> list[str]:
    """Write an example as code with a title."""
    return [".. rubric:: Example", "", ".. code-block:: python", "", *(f"    {line}" for line in block)]


SECTIONS = {"Args:": fields("param"), "Returns:": returned, "Raises:": fields("raises"), "Example:": example}
"""First line of a section → function that writes its lines for Sphinx."""


def marked_code(lines: list[str]) -> list[str]:
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
    return marked


def language(lines: list[str]) -> str:
    """Name the language of the indented lines that come first: Python, or text such as a drawn tree."""
    block = takewhile(lambda line: not line.strip() or line.startswith("    "), lines)
    try:
        ast.parse(dedent("\n".join(block)))
    except SyntaxError:
        return "text"
    return "python"
