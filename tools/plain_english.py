"""Find sentences that a reader must read twice: too long, chained, without "you", in words that are not the field's.

`of_page` and `of_module` yield sentences, headings and cells; `findings` applies the rules to each.
`of_file` does both, and `check_prose.py` runs it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LONGEST = {"page": 25, "module": 35}
"""Words of a sentence, by where it is."""
CELL = 80
"""Characters of a table's cell, without the addresses of its links."""
LINE = 100
"""Characters of a line of prose in a page's source."""

NOT_CHAINED = re.compile(r"\(default: [^)]*\)|^(note|WARNING[^:]*): ")
"""Parts of a sentence whose colon belongs to their form: the default of an option, and the kind of a message."""

CODE = "CODE"
"""Replaces inline code, a link's address, and an expression within a string."""

RULES = {
    r"^Of (?!course)": "a sentence opens with “Of”: begin with its subject",
    r"\b[Tt](hat|hose) of\b(?! (us|you|them)\b)": "“that of”, “those of”: repeat the noun",
    r"^(Who|Whoever) \w+ [^?]*$": "say “you”: write “Set it if you share the machine”",
    r"\b(a|one|two|three|\d+) (?!(if|with|by|in|of|to|for|as|is|and|or|on|at|from|like) )[\w-]+ an? "
    r"(epoch|step|image|line|class|second|minute|hour|batch|row|process|layer|head|file|run|token|side|GPU"
    r"|core)\b": "“a line an epoch”: write “one line per epoch”",
    r"\b(network|model|recipe|run|program|server|page|vitral)s? knows?\b": "networks are trained and predict; "
    "people know",
    r"\b(is|are) refused\b": "write “vitral stops with an error” or “is not supported”",
    r"\b(is|are) (named|noted|stated|told)\b": "write “vitral prints” or “the plan lists”",
    r"(?<![Tt]here )\bis no (?!longer|more)\w": "“is no X”: write “is not a X”",
    r"\bto the same bits\b": "write “bit-identical”",
    r"\b(network|weights|model) in the package\b": "write “built-in model”",
    r"\bfront of (the )?best\b": "write “Pareto front”",
    r"\blikeness\b": "write “similarity”",
    r"\b[Pp]roofs? of\b|\bthe proof\b": "write “parity check”",
    r"\bsets? of classes\b": "write “prediction sets”",
    r"\baddress(es)? of the server\b": "write “endpoint”",
    r"\b(known|train|val|drop|same) share\b|\bthe share of\b|\ba share of\b": "write “fraction”",
    r"\bcut off a\b": "write “split off”",
    r"\bwrite-ups?\b": "write “reproductions”",
    r"\b(page|table|report|file|folder|column|plan|log|line|section|cell|CODE) (has|have) (a|an|the|its|no|one|two|all"
    r"|more|every|each|\d+)\b": "a page, file or table “contains”, “lists” or “shows”",
    r"\d %|CODE %": "write “71%”",
    r"(?<=\s)alone\b(?! (is|are|in|with|on)\b)": "write “only”",
    r", else\b": "write “otherwise”",
    r"\bof ours\b|\bof vitral's\b": "write “our” or “vitral's”",
}
"""Pattern within a sentence → what is wrong with it."""

MEANT = {
    "SRG": "relevance gain",
    "ECE": "calibration error",
    "CKA": "kernel alignment",
    "Muon": "optimizer",
    "nats": "−ln|-ln|1.44|log|information",
    "FSDP": "shard",
}
"""Term → words of its explanation, one of which is on each page that uses the term, as is a link to the glossary."""

GLOSSARY = ("glossary.md",)


@dataclass(frozen=True)
class Text:
    """A sentence, a heading or a table's cell."""

    line: int
    words: str
    kind: str = "sentence"
    place: str = "page"


def findings(text: Text) -> Iterator[str]:
    """Yield what is wrong with a text."""
    if text.kind == "cell":
        if len(text.words) > CELL:
            yield f"a cell of {len(text.words)} characters: at most {CELL}"
    elif len(text.words.split()) > LONGEST[text.place]:
        yield f"a sentence of {len(text.words.split())} words: at most {LONGEST[text.place]}"
    elif len(re.findall(r"(?<=\S)[;:](?=\s)", NOT_CHAINED.sub("", text.words))) > 1:
        yield "a sentence with two semicolons or colons: at most one"
    for pattern, wrong in RULES.items():
        if found := re.search(pattern, text.words):
            yield f"“{found[0]}”: {wrong}"


def of_page(page: str) -> Iterator[Text]:
    """Yield the sentences, headings and cells of a page in Markdown; code blocks are left out."""
    paragraph: list[str] = []
    began, fenced = 1, False
    for number, line in enumerate([*page.splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        ends = fenced or re.match(r"\s*(```|$|\||#|[-*] |\d+\. |<)", line)
        if ends and paragraph:
            yield from _sentences(" ".join(paragraph), began)
            paragraph = []
        if fenced or line.lstrip().startswith(("```", "<")):
            continue
        if line.startswith("|"):
            if not re.fullmatch(r"[|:\- ]+", line):
                yield from (Text(number, plain(cell), "cell") for cell in re.split(r"(?<!\\)\|", line.strip("|")))
        elif line.startswith("#"):
            yield Text(number, plain(line.lstrip("# ")), "heading")
        elif line.strip():
            began = began if paragraph else number
            paragraph.append(line.strip())


def of_module(source: str, docstrings: bool, strings: bool) -> Iterator[Text]:
    """Yield the sentences of a module's docstrings, constants' docstrings included, and of its other strings."""
    tree = ast.parse(source)
    documented = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    if docstrings:
        for value in documented:
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield from of_docstring(value.value, value.lineno)
    if strings:
        for node in ast.walk(tree):
            if node in documented or (id(node) in inner and not isinstance(node, ast.JoinedStr)):
                continue
            text = _shown(node)
            if text.count(" ") > 2 and not re.search(r"[{}<>=\\^]|\s{2}", text):
                yield from _sentences(text, getattr(node, "lineno", 1), "module")


def of_docstring(text: str, line: int) -> Iterator[Text]:
    """Yield the sentences of a docstring; tables, examples and indented blocks are left out."""
    paragraph: list[str] = []
    for part in [*text.splitlines(), ""]:
        if part.strip() and not re.match(r"\s*(>>>|[-*] |\w+:$|Args:|Returns:|Raises:|\.\.)| {8}|.*\S {2,}\S", part):
            paragraph.append(part.strip())
        elif paragraph:
            yield from _sentences(" ".join(paragraph), line, "module")
            paragraph = []


def _shown(node: ast.AST) -> str:
    """Return the text of a string, with a word in place of each expression in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else CODE for part in node.values)
    return ""


def plain(text: str) -> str:
    """Return the words of Markdown: no addresses, marks or code."""
    text = re.sub(r"`[^`]*`", CODE, text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\*\*|(?<!\w)[*_]|[*_](?!\w)", "", text).strip()


def _sentences(paragraph: str, line: int, place: str = "page") -> Iterator[Text]:
    text = re.sub(r"^([-*]|\d+\.) ", "", plain(paragraph))
    text = re.sub(r"\b(et al|e\.g|i\.e|vs|cf|Sec|Fig)\.", r"\1", text)
    for sentence in re.split(
        r"(?<=[.!?])[)”\"]?\s+(?=[^a-z]|[a-z](?:_\w+)? |(?:vitral|timm|transformers|int8|bf16|fp32)\b)"
        r"|(?<=[.!?:])\s+(?=- )",
        text,
    ):
        if sentence:
            yield Text(line, sentence, place=place)


def long_lines(page: str) -> Iterator[tuple[int, str]]:
    """Yield lines of prose that are too long in the source; tables and code blocks may be as long as they need."""
    fenced = False
    for number, line in enumerate(page.splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        if not fenced and len(line) > LINE and not re.match(r"\s*(\||```|!?\[.*\]\(|<)", line):
            yield number, f"a line of {len(line)} characters: at most {LINE}"


def unexplained(page: str) -> Iterator[tuple[int, str]]:
    """Yield terms that a page uses without words on what they mean or a link to the glossary."""
    if any(glossary in page for glossary in GLOSSARY):
        return
    for term, meaning in MEANT.items():
        prose = re.sub(r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), page, flags=re.DOTALL | re.MULTILINE)
        if (found := re.search(rf"\b{term}\b", prose)) and not re.search(meaning, prose):
            yield prose[: found.start()].count("\n") + 1, f"“{term}” is not explained: link to the glossary"


def of_file(path: Path, docstrings: bool = True, strings: bool = True) -> Iterator[tuple[int, str]]:
    """Yield line and finding for a page or a module."""
    source = path.read_text("utf-8")
    page = path.suffix == ".md"
    texts = of_page(source) if page else of_module(source, docstrings, strings)
    yield from ((text.line, wrong) for text in texts for wrong in findings(text))
    if page:
        yield from long_lines(source)
        yield from unexplained(source)
