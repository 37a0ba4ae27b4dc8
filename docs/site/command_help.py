"""The directive `command-help`: a section for each command with what `vitral COMMAND --help` prints."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any
from unittest import mock

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from vitral.cli.main import COMMANDS, main


def setup(app: Any) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True}


class CommandHelp(SphinxDirective):
    """The overview, then every command."""

    def run(self) -> list[nodes.Node]:
        """Return the blocks and sections."""
        return [printed("--help"), *(self._section(name) for name in COMMANDS)]

    def _section(self, name: str) -> nodes.section:
        title = f"vitral {name}"
        section = nodes.section("", nodes.title("", title), names=[title])
        self.state.document.note_implicit_target(section, section)
        section += printed(name, "--help-all")
        return section


def printed(*words: str) -> nodes.literal_block:
    """Run a command and return what it prints."""
    text = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS="90"), contextlib.redirect_stdout(text):
        code = main(" ".join(words).split())
    if code:
        raise RuntimeError(f"vitral {' '.join(words)} ended with {code}")
    return nodes.literal_block("", text.getvalue().rstrip(), language="text")
