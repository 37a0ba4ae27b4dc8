"""Pages: one template environment, shared parts and styles for every self-contained HTML file that vitral writes."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from vitral.atomic import write_text
from vitral.digest import with_digest
from vitral.evaluation.page_numbers import amount, percent, shape
from vitral.glossary import terms_in
from vitral.wording import count


def environment(package: str = __package__) -> Environment:
    """Templates of `package`, which may import `page_parts.html.jinja` and include `report.css`; text is escaped."""
    loader = FunctionLoader(lambda name: _template(name, package))
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters.update(percent=percent, count=count, amount=amount, shape=shape, svg=Markup)
    return made


def _template(name: str, package: str) -> str:
    own = resources.files(package).joinpath(name)
    return (own if own.is_file() else resources.files(__package__).joinpath(name)).read_text("utf-8")


def finished(page: str) -> str:
    """Explain the terms of a page at its end; replace the control characters of hostile names, which HTML forbids."""
    visible = re.sub(r"<(style|script|svg)\b.*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL)
    if terms := terms_in(visible):
        rows = "".join(f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in terms)
        words = f"<details><summary>Words on this page</summary><dl>{rows}</dl></details>"
        page = page.replace("</main>", f'<section class="words">{words}</section>\n</main>')
    return re.sub("[\x00-\x08\x0b-\x1f\x7f]", "�", page)


def write_page(path: Path, page: str) -> None:
    """Write a page atomically, with its digest. Undecodable bytes of file names (surrogates) are replaced."""
    write_text(path, with_digest(page.encode("utf-8", errors="replace"), "\n<!-- ", " -->\n").decode())
