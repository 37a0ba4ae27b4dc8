"""Pages: one template environment, shared parts and styles for every self-contained HTML file that vitral writes."""

from __future__ import annotations

import re
from importlib import resources

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from vitral.evaluation.page_numbers import amount, percent, shape
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


def without_control_characters(text: str) -> str:
    """Replace the characters that HTML forbids, which hostile names may hold; tab and newline stay."""
    return re.sub("[\x00-\x08\x0b-\x1f\x7f]", "�", text)
