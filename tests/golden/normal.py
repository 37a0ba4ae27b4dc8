"""Golden text and JSON in the form that is kept: volatile values replaced, one value a line where lines are short."""

from __future__ import annotations

import json
import os
import re
from typing import Any

VOLATILE = {
    "seconds": "wall-clock time",
    "compile_seconds": "the same",
    "images_per_second": "the same",
    "waited": "the same",
    "versions": "those of the libraries that are installed, and of vitral itself",
    "vitral_digest": "of weights, whose last bits depend on the CPU; the table of hashes holds them",
}
"""Fields that differ between two runs of the same code, and why."""

# The name of a CPU with its threads ("device" of a result), and alone after a precision ("fp32 on …" of a plan).
_MACHINE = re.compile(r"^.+, \d+ threads?$|(?<=^[a-z]{2}\d\d on ).+$|(?<=^int8 on ).+$")

LINE = 118
"""Characters of a line of JSON, as long as a value fits."""


def normal(value: Any, field: str = "") -> Any:
    """The value with a placeholder for everything that differs between machines, moments and folders.

    A placeholder names the field, so that its presence is still compared. None stays: it stands for no value.
    """
    if isinstance(value, dict):
        return {key: normal(inner, field if field in VOLATILE else key) for key, inner in value.items()}
    if isinstance(value, list):
        return [normal(inner, field) for inner in value]
    if field in VOLATILE and value is not None:
        return f"<{field}>"
    if isinstance(value, str):
        return _MACHINE.sub("<machine>", value).replace(os.getcwd(), "<folder>")
    return value


def as_json(value: Any) -> str:
    """Normal JSON, with everything that fits a line on one."""
    return _dumped(normal(value), "") + "\n"


def as_text(text: str) -> str:
    """Normal text, without spaces at the ends of lines."""
    return "\n".join(normal(line.rstrip()) for line in text.splitlines()) + "\n"


def _dumped(value: Any, indent: str) -> str:
    short = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, (dict, list)) or len(indent) + len(short) <= LINE:
        return short
    inner = indent + " "
    if isinstance(value, dict):
        lines = [f"{json.dumps(key, ensure_ascii=False)}: {_dumped(one, inner)}" for key, one in value.items()]
    else:
        lines = [_dumped(one, inner) for one in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{inner}" + f",\n{inner}".join(lines) + f"\n{indent}{closing}"
