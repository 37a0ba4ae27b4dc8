"""The page that shows predictions in a browser, for a server and for an export; one file an asset, no framework.

`page.js` draws the page and knows no server. It imports `source.js`, which answers two questions: `models()` and
`predict(image, name, options, tell)`; it may have `warm(tell)`, to be ready for the first. On a server that is
`server.js`; in an export it is `browser.js`, which computes in the browser, in a worker.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path

SHARED = {name: name for name in ("page.css", "page.js", "refusal.js", "overlay.js", "resize.js", "styles.js")}
SERVER: Mapping[str, str] = {**SHARED, "source.js": "server.js"}
BROWSER: Mapping[str, str] = {
    **SHARED,
    "source.js": "browser.js",
    **{name: name for name in ("worker.js", "runtime.js", "decode.js", "upright.js")},
}
"""File beside the page → its asset."""
TEACH: Mapping[str, str] = {
    **{name: name for name in ("page.css", "resize.js", "runtime.js", "decode.js", "upright.js")},
    **{name: f"teach/{name}" for name in ("teach.css", "main.js", "store.js", "classes.js", "camera.js", "answer.js")},
    **{name: f"teach/{name}" for name in ("measure.js", "project.js", "kept.js", "asking.js", "eyes.js", "tutor.js")},
    **{name: f"teach/{name}" for name in ("probe.js", "lbfgs.js", "figures.js", "near.js", "elements.js")},
}
"""File beside the page of `vitral label --export` → its asset."""

LABEL: Mapping[str, str] = {
    "/": "label/page.html",
    **{f"/{name}": f"label/{name}" for name in ("label.css", "main.js", "api.js", "store.js", "grid.js", "thumbs.js")},
    **{f"/{name}": f"label/{name}" for name in ("selection.js", "pointer.js", "classes.js", "large.js", "keys.js")},
    **{f"/{name}": f"label/{name}" for name in ("insight.js", "assist.js", "measure.js", "teach.js")},
    **{f"/{name}": f"label/{name}" for name in ("home.js", "trial.js", "camera.js", "dom.js")},
}
"""Path of the page of `vitral label` → its asset."""

EXAMPLE = "example.png"  # beside the page: an image to try, if one was given

_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' blob: data:",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
}


def serving_command(folder: Path) -> str:
    """Return the command that serves a folder with a page on this machine."""
    return f"python -m http.server --directory {shlex.quote(str(folder))}"


def policy(more: Mapping[str, str]) -> str:
    """The content security policy of the page: its own files and images in memory, and the directives of `more`."""
    return "; ".join(f"{name} {value}".strip() for name, value in {**_POLICY, **more}.items())


def text(name: str) -> str:
    """The text of an asset: `page.css`, `page.js`, `server.js`, `docs.html.jinja` …"""
    return files("vitral.web").joinpath(name).read_text("utf-8")


@cache
def page(*, title: str = "vitral", served: bool, csp: str = "", example: str = "") -> str:
    """The page as HTML. `served` by a server it can ask for a token and links the API; `csp` is its policy if no header
    has it; `example` is a file beside it to try.
    """
    return _rendered("page.html.jinja", title=title, served=served, csp=csp, example=example)


def teaching_page(csp: str, version: str) -> str:
    """The page of `vitral label --export` as HTML; `csp` is its policy, and `version` that of vitral."""
    return _rendered("teach/page.html.jinja", csp=csp, version=version)


def _rendered(name: str, **values: object) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    return environment.from_string(text(name)).render(**values)
