"""Pages for files and folders of the repository that a page links to: sources with colors, folders as lists."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform


def setup(app: Any) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.add_transform(LinkFiles)
    app.connect("html-collect-pages", file_pages)
    app.connect("html-page-context", share_navigation, priority=400)  # before the theme asks for it
    return {"parallel_read_safe": False}


class LinkFiles(SphinxTransform):
    """Point a link to a file that is no page, or to a folder, at a page made for it."""

    default_priority = 5  # before MyST looks for what it does not know

    def apply(self, **_: Any) -> None:
        kinds = (addnodes.download_reference, addnodes.pending_xref)
        for link in list(self.document.findall(lambda node: isinstance(node, kinds))):
            if link["reftype"] == "myst" and (target := self._target(link)):
                link.replace_self(nodes.reference("", "", *link.children, internal=True, refuri=target))

    def _target(self, link: nodes.Element) -> str | None:
        path = Path(self.env.relfn2path(link["reftarget"].partition("#")[0], self.env.docname)[1]).resolve()
        downloads = isinstance(link, addnodes.download_reference) and is_text(path)
        if not (path.is_dir() or downloads):
            return None
        if (path / "README.md").exists():
            page = (path / "README").relative_to(self.env.srcdir).as_posix()
        else:
            page = needed(self.env, path)
            if path.is_dir() and not page.startswith("src/"):  # where files are many, and pages link to the main ones
                for file in path.rglob("*"):
                    if is_text(file):
                        needed(self.env, file)
        return self.app.builder.get_relative_uri(self.env.docname, page)


def is_text(path: Path) -> bool:
    """True if `path` is a file of text."""
    try:
        return path.is_file() and bool(path.read_text("utf-8"))
    except UnicodeDecodeError:
        return False


def linked(env: BuildEnvironment) -> dict[str, Path]:
    """Page → the file or folder that it is made for."""
    if not hasattr(env, "vitral_linked"):
        env.vitral_linked = {}  # type: ignore[attr-defined]
    return env.vitral_linked  # type: ignore[attr-defined,no-any-return]


def needed(env: BuildEnvironment, path: Path) -> str:
    """Note that a file or folder needs a page, and return that."""
    page = path.relative_to(env.srcdir).as_posix().lstrip(".")  # hosts of pages leave out hidden folders
    linked(env)[page] = path
    return page


def file_pages(app: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Name, contents and template of each such page."""
    for page, path in sorted(linked(app.env).items()):
        title = path.relative_to(app.srcdir).as_posix()
        body = listing(app, page, path) if path.is_dir() else source(app, path)
        heading = re.sub(r"(?<=[/_.-])\b", "<wbr>", escape(title))  # lines break between words of a path
        yield page, {"title": title, "body": f'<h1 class="path">{heading}</h1>\n{body}'}, "page.html"


def share_navigation(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Compute the navigation once for the file pages of a folder: it takes longer than the rest of such a page."""
    compute, folder = context.get("toctree"), posixpath.dirname(page)

    def shared(**options: Any) -> str:
        if folder not in _NAVIGATION:
            _NAVIGATION[folder] = compute(**options)
        return _NAVIGATION[folder]

    if page in linked(app.env):
        context["toctree"] = shared


_NAVIGATION: dict[str, str] = {}
"""Folder → navigation as HTML, with links relative to the folder."""


def source(app: Any, path: Path) -> str:
    """Text of a file with the colors of its language."""
    try:
        language = get_lexer_for_filename(path.name).aliases[0]
    except ClassNotFound:
        language = "text"
    return str(app.builder.highlighter.highlight_block(path.read_text("utf-8"), language))


def listing(app: Any, page: str, folder: Path) -> str:
    """Names in a folder, with links to those that have a page."""
    rows = []
    for path in sorted(folder.iterdir()):
        name = escape(path.name)
        inside = f"{page}/{path.name}"
        if path.name.startswith((".", "__pycache__")):
            continue
        if inside in linked(app.env):
            name = f'<a href="{app.builder.get_relative_uri(page, inside)}">{name}</a>'
        rows.append(f"<li><code>{name}{'/' if path.is_dir() else ''}</code></li>")
    return f"<ul>{''.join(rows)}</ul>"
