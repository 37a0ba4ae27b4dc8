"""Options in the language of the reader: `--lr-batch 256` in a shell, `lr_batch=256` in Python.

Messages are written for the shell. `spoken` translates them unless the command line runs. Options that no function of
Python has, such as `--plan-only`, stay as they are, and so do commands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

Choices = frozenset[str] | None
"""The texts that an argument may be, if they are few; None for a switch."""

_to_learn: list[Callable[[], Mapping[str, Choices]]] = []
_arguments: dict[str, Choices] = {}

_shell = False


@contextmanager
def shell() -> Iterator[None]:
    """Speak the language of the shell, as commands do."""
    global _shell
    before, _shell = _shell, True
    try:
        yield
    finally:
        _shell = before


def learn(arguments: Callable[[], Mapping[str, Choices]]) -> None:
    """Add the arguments of a public function, once a message needs them."""
    _to_learn.append(arguments)


def known_arguments() -> Mapping[str, Choices]:
    """Return all arguments. An argument of several functions has the choices of all of them."""
    while _to_learn:
        for name, choices in _to_learn.pop()().items():
            known = _arguments.get(name, frozenset())
            _arguments[name] = None if choices is None or known is None else choices | known
    return _arguments


def spoken(text: str, *, hint: bool = False) -> str:
    """Translate the options in a message. In a `hint`, a switch becomes `resume=True`, otherwise its name."""
    return text if _shell or "--" not in text else in_python(text, hint=hint)


def in_python(text: str, *, hint: bool = False) -> str:
    """Translate as `spoken`, in a shell, too."""
    parts, at = [], 0
    for command in _COMMAND.finditer(text):
        parts += [_translated(text[at : command.start()], hint), command[0]]
        at = command.end()
    return "".join([*parts, _translated(text[at:], hint)])


_COMMAND = re.compile(r"(?<![\w.])(vitral|python|pip|npx|torchrun|tensorboard) (?=[a-z-])[^;,`)\n]*")
_OPTION = re.compile(
    r"(?P<before>(?<!\S)(?!--)\S+ )?(?<![\w-])--(?P<no>no-)?(?P<name>[a-z][a-z0-9-]*)"
    r"(?P<values>(?: [^\s,;)]*[^\s,;):.])*)"
)
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?(,-?\d+(\.\d+)?)*")
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*|…|\.\.\.")
_NAME = re.compile(r"'[^']*'|[\w*-]*[/:\d*][\w/:.*+-]*|\S+\.(csv|html|json|safetensors|png)")
_NOT_A_REQUEST = ("out ", "without ", "another ", "a ", "of ", "and ", "other ", "no ")
"""Words before a switch that is meant by its name: "leave out --resume"."""


def _translated(text: str, hint: bool) -> str:
    known = known_arguments()

    def replaced(found: re.Match[str]) -> str:
        before, name = found["before"] or "", found["name"].replace("-", "_")
        if found["no"] and name in known:
            return f"{before}{name}=False{_translated(found['values'], hint)}"
        if name not in known:
            return before + found[0].removeprefix(before).partition(" ")[0] + _translated(found["values"], hint)
        choices = known[name]
        if choices is None:
            request = hint and not before.endswith(_NOT_A_REQUEST)
            return f"{before}{name}{'=True' if request else ''}{_translated(found['values'], hint)}"
        words = found["values"].split()
        if hint and len(words) == 1 and words[0].isalpha():  # nothing follows that it could be the verb of
            choices |= {words[0]}
        values, rest = _values(words, choices)
        comma = "," if rest and rest[0].startswith("--") else ""
        return f"{before}{name}{_assigned(values)}{comma}{_translated(''.join(f' {word}' for word in rest), hint)}"

    return _OPTION.sub(replaced, text)


def _values(words: list[str], choices: frozenset[str]) -> tuple[list[str], list[str]]:
    """Split the words after an option into its values, as source code, and the rest."""
    values: list[str] = []
    for at, word in enumerate(words):
        if word.startswith("--"):
            return values, words[at:]
        if _NUMBER.fullmatch(word):
            values += word.split(",")
        elif _PLACEHOLDER.fullmatch(word):
            values.append(word)
        elif (word in choices or _NAME.fullmatch(word)) and not values:
            return [f'"{word.strip(chr(39))}"'], words[at + 1 :]
        else:
            return values, words[at:]
    return values, []


def _assigned(values: list[str]) -> str:
    if len(values) > 1:
        return f"=({', '.join(values)})"
    return f"={values[0]}" if values else ""
