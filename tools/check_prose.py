"""Check the words of the repository: openings of docstrings, and American spelling. Prints what to mend, exits with 1.

python tools/check_prose.py
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = ("src", "tests", "benchmarks", "tools")
PROSE = ("*.md", "*.py", "*.jinja", "*.css", "*.cpp")

OPENING = re.compile(r"(What|Whether|Where|How|Who|Whose|Which|When)\b")
"""Words that begin a subordinate clause: a docstring begins with an imperative or a noun phrase."""

WORDS = {
    r"pictures?": "image",
    r"colou?r(?<=colour)\w*": "color",
    r"grey\w*": "gray",
    r"cent(re|red|res|ring)": "center",
    r"neighbour\w*": "neighbor",
    r"behaviour\w*": "behavior",
    r"\w*(normalis|standardis|initialis|optimis(?!t|m)|quantis|recognis|regularis|synchronis|randomis)\w*": "-iz-",
    r"licence\w*": "license",
    r"reckoned": "estimated",
    r"way back": "backward pass",
}
"""Pattern of a whole word → what to write instead."""

EXEMPT = {"CHANGELOG.md", "tools/check_prose.py", "docs/write-ups.md"}
"""Files that quote or list such words."""


def openings(path: Path) -> Iterator[str]:
    """Docstrings of a module that begin with a subordinate clause, those of constants and fields included."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str) and (found := OPENING.match(node.value.value.strip())):
            yield f"{path.relative_to(ROOT)}:{node.lineno}: a docstring begins with “{found[0]}”"


def spellings(path: Path) -> Iterator[str]:
    """Words that the house writes otherwise."""
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        for pattern, instead in WORDS.items():
            if found := re.search(rf"(?<![\w/.-]){pattern}(?![\w-])", line, re.IGNORECASE):
                yield f"{path.relative_to(ROOT)}:{number}: “{found[0]}”: write {instead}"


def main() -> int:
    """Print everything to mend; return the exit code."""
    modules = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]
    texts = {path for folder in (*CODE, "docs") for kind in PROSE for path in (ROOT / folder).rglob(kind)}
    texts |= set(ROOT.glob("*.md"))
    checked = sorted(path for path in texts if str(path.relative_to(ROOT)) not in EXEMPT)
    checked = [path for path in checked if "results" not in path.parts and "golden" not in path.parts]
    found = [line for path in modules for line in openings(path)]
    found += [line for path in checked for line in spellings(path)]
    print("\n".join(found) or "Prose: no docstring or word to mend")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
