"""Settings of the documentation's site. `make docs` builds it; docs/decisions/0022 has the reasons for Sphinx.

The source folder is the repository, so a link that works on a code host works in the site.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from navigation import PATTERNS, START  # noqa: E402

from vitral import __version__  # noqa: E402

project, author = "vitral", "The vitral authors"
copyright = author
version = release = __version__
root_doc = START
include_patterns = PATTERNS
exclude_patterns = [".*", "src/vitral/words.md", "tests", "build", "dist", "runs", "shared"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "navigation",
    "linked_files",
    "docstrings",
    "command_help",
    "accessibility",
]

myst_heading_anchors = 4
default_role = "literal"  # docstrings write code as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = False  # it reads defaults from the source, and our signatures have more options
python_maximum_signature_line_length = 90
add_module_names = False

html_theme = "furo"
html_title = f"vitral {release}"
html_favicon = "static/icon.svg"
html_static_path = ["static"]
html_search_scorer = str(HERE / "scorer.js")
html_extra_path = ["root"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
