"""Check the words of the repository: docstrings, spelling, idioms that stop a reader. Print what to mend, exit with 1.

python tools/check_prose.py
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import plain_english

ROOT = Path(__file__).resolve().parents[1]
CODE = ("src", "tests", "benchmarks", "tools")
PROSE = ("*.md", "*.py", "*.jinja", "*.css", "*.cpp")

OPENING = re.compile(r"(What|Whether|Where|How|Who|Whose|Which|When)\b")
"""Words that begin a subordinate clause: a docstring begins with an imperative or a noun phrase."""

SUBJECT = re.compile(r"(?:^|[.;:\n]\s+)`(\w+)` (?:is|are|returns|receives|has|have|may|names|states|turns)\b")
"""A sentence about an argument."""

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

EXEMPT = {"docs/log/changes.md", "tools/check_prose.py"}
"""Files that quote or list such words."""

NOT_READ_ONCE = {
    "docs/index.ko.md": "Korean",
    "docs/index.ja.md": "Japanese",
}
"""Pages that the rules of `plain_english` do not apply to, and why. Logs and decisions below docs are left out, too."""

REMAINING = {
    "strings of src": 129,
    "docstrings of src": 528,
}
"""Page or part of the code → findings of `plain_english` left to mend. More fail; lower a number as they go."""


def openings(path: Path) -> Iterator[str]:
    """Docstrings of a module that begin with a subordinate clause, those of constants and fields included."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str) and (found := OPENING.match(node.value.value.strip())):
            yield f"{path.relative_to(ROOT)}:{node.lineno}: a docstring begins with “{found[0]}”"


def arguments(path: Path) -> Iterator[str]:
    """Sentences of docstrings about an argument that the function does not have, nor its module any such name.

    A function with further keywords (`**options`) may describe them.
    """
    tree = ast.parse(path.read_text("utf-8"))
    nodes = list(ast.walk(tree))
    known = {part for node in nodes for part in _names(node)}
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.args.kwarg is None:
            text = ast.get_docstring(node) or ""
            for found in SUBJECT.finditer(text):
                if found[1] not in known:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}: `{found[1]}` is no argument of {node.name}"


def _names(node: ast.AST) -> Iterator[str]:
    for field in ("id", "attr", "arg", "name", "asname"):
        if isinstance(name := getattr(node, field, None), str):
            yield name
    if isinstance(node, ast.Constant) and isinstance(node.value, str | bool):
        yield str(node.value)


def idioms(path: Path) -> Iterator[str]:
    """Texts and lists that are multiplied by a truth value."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
            continue
        if _is_text(node.left) and _is_truth(node.right):
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:60]}: write a conditional expression"


def _is_text(node: ast.expr) -> bool:
    text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return text or isinstance(node, ast.JoinedStr | ast.List)


def _is_truth(node: ast.expr) -> bool:
    inverted = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return inverted or isinstance(node, ast.Compare | ast.BoolOp) or ast.unparse(node).startswith("bool(")


def spellings(path: Path) -> Iterator[str]:
    """Words that the house writes otherwise."""
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        for pattern, instead in WORDS.items():
            if found := re.search(rf"(?<![\w/.-]){pattern}(?![\w-])", line, re.IGNORECASE):
                yield f"{path.relative_to(ROOT)}:{number}: “{found[0]}”: write {instead}"


def sentences() -> Iterator[str]:
    """Findings of `plain_english` on a page or a part of the code with more of them than `REMAINING` allows."""
    modules = sorted((ROOT / "src").rglob("*.py"))
    pages = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
    parts = {str(path.relative_to(ROOT)): [path] for path in pages} | {
        "strings of src": modules,
        "docstrings of src": modules,
    }
    for part, paths in parts.items():
        if part in NOT_READ_ONCE:
            continue
        found = [
            f"{path.relative_to(ROOT)}:{line}: {wrong}"
            for path in paths
            for line, wrong in plain_english.of_file(path, part.startswith("docstrings"), part.startswith("strings"))
        ]
        if len(found) > REMAINING.get(part, 0):
            yield from found
            yield f"{part}: {len(found)} findings, at most {REMAINING.get(part, 0)}"


def main() -> int:
    """Print everything to mend; return the exit code."""
    modules = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]
    texts = {path for folder in (*CODE, "docs") for kind in PROSE for path in (ROOT / folder).rglob(kind)}
    texts |= set(ROOT.glob("*.md"))
    checked = sorted(path for path in texts if str(path.relative_to(ROOT)) not in EXEMPT)
    checked = [path for path in checked if "results" not in path.parts and "golden" not in path.parts]
    found = [line for path in modules for check in (openings, arguments) for line in check(path)]
    found += [line for path in modules if "tests" not in path.parts for line in idioms(path)]
    found += [line for path in checked for line in spellings(path)]
    found += sentences()
    print("\n".join(found) or "Prose: no docstring or word to mend")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
