"""Recognize an edited `vit.py`: engines and explanations with code of their own compute it as it was, so step aside."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import io
import re
import textwrap
import tokenize

from vitral.model import vit

DIGESTS = {
    "PatchEmbed": "1cd6af97",
    "Attention": "f62dd8b0",
    "linear_activation": "61d1973b",
    "MLP": "436e7d47",
    "LayerScale": "0ea511b7",
    "Block": "ad7ffd26",
    "AttentionPool": "c739e122",
    "ViT": "063dd581",
    "ViT.forward": "c37682d3",
    "ViT.answer": "e832c0ac",
    "ViT.embed": "48228331",
    "ViT.transform": "097f1b2d",
}
"""Parts of `vit.py` that `inference.engines` and `explanation.capture` repeat, or that `model.packing` does otherwise →
digests of their code. If you change that code, change them, too, and then the digest.
"""


@functools.cache
def edited(*names: str) -> str:
    """Name the first of these parts (default: all) whose code was edited; "" if none was, or there is no source."""
    found = digests()
    changed = [name for name in names or DIGESTS if found and found.get(name) != DIGESTS[name]]
    return f"{changed[0]} was edited in vit.py" if changed else ""


@functools.cache
def digests() -> dict[str, str]:
    """Return the digest of each class, method and function of `vit.py`; nothing if there is no source."""
    try:
        lines = inspect.getsource(vit).splitlines(keepends=True)
    except OSError:
        return {}
    found = dict[str, str]()
    for node in ast.parse("".join(lines)).body:
        for part in (node, *getattr(node, "body", ())):
            if isinstance(part, ast.ClassDef | ast.FunctionDef):
                name = part.name if part is node else f"{getattr(node, 'name', '')}.{part.name}"
                found[name] = digest_of(textwrap.dedent("".join(lines[part.lineno - 1 : part.end_lineno])))
    return found


def digest_of(source: str) -> str:
    """Return a digest of code that comments, docstrings and formatting do not change."""
    found, before = [], tokenize.NEWLINE
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type not in _IGNORED]
    for token, after in zip(tokens, [*tokens[1:], None], strict=True):
        alone = before in _BREAKS and (after is None or after.type == tokenize.NEWLINE)
        if token.type not in _BREAKS and not (token.type == tokenize.STRING and alone):
            found.append(token.string)
        before = token.type
    # Python 3.12 and later cut f-strings into several tokens
    text = re.sub(r"\s+|,(?=[)\]}])", "", "".join(found))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


_IGNORED = {tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER}
_BREAKS = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
