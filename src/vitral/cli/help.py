"""Lay out the text of `vitral --help` and `vitral COMMAND --help`."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import get_args

from rich.text import Text

from vitral.cli.examples import EXAMPLES
from vitral.cli.options import Option
from vitral.cli.placeholders import placeholder
from vitral.cli.terms import terms_of
from vitral.glossary import terms_in

HELP_ALL = "--help-all"
"""Flag that lists the options of all groups."""
_COLUMN = 24
"""Column at which the descriptions begin."""
_WIDTH = 100


def help_page(name: str, command: Callable[..., object], options: Sequence[Option], whole: bool = False) -> Text:
    """Return the usage with what is required, the docstring, each argument and option, terms, and an example.

    Options of a group are left out, with a line that says how to list them, unless the page is to be `whole`.
    """
    positional = [option for option in options if option.is_positional]
    needed = [_syntax(option) for option in options if option.required and not option.is_positional]
    usage = " ".join(["usage: vitral", name, *(str(option.usage) for option in positional), *needed, "[OPTIONS]"])
    lines = [Text(usage), Text(), *map(Text, inspect.cleandoc(command.__doc__ or "").splitlines())]
    if positional:
        lines += [Text(), Text("arguments:", "bold"), *_rows((str(one.usage), _description(one)) for one in positional)]
    groups: dict[str, list[tuple[str, str]]] = {"": [("-h, --help", "show this help and exit")]}
    for option in options:
        if not option.is_positional:
            groups.setdefault(option.group, []).append((_syntax(option), _description(option)))
    further = sum(len(rows) for group, rows in groups.items() if group)
    if further:
        groups[""].insert(1, (HELP_ALL, f"list all options, {further} more"))
    for group, rows in groups.items():
        if whole or not group:
            lines += [Text(), Text(f"{group.lower() or 'options'}:", "bold"), *_rows(rows)]
    used = {term for term, _ in terms_in("\n".join(map(str, lines)))}
    if terms := [(term, meaning) for term, meaning in terms_of(name) if term in used]:
        lines += [Text(), Text("words:", "bold"), *_rows(terms)]
    lines += [Text(), Text("example:", "bold"), Text(f"  {EXAMPLES[name]}")]
    return Text("\n").join(lines)


def _rows(rows: Iterable[tuple[str, str]]) -> Iterator[Text]:
    """Lay out two columns; a left part that is too long for its column gets a separate line."""
    width = min(shutil.get_terminal_size().columns, _WIDTH)
    for left, right in rows:
        # Before a word that is longer than a line, textwrap leaves a space at the end.
        lines = [line.rstrip() for line in textwrap.wrap(right, max(width - _COLUMN, 20), break_on_hyphens=False)]
        if len(left) + 4 > _COLUMN:
            lines.insert(0, "")
        yield Text.assemble((f"  {left}".ljust(_COLUMN if lines[0] else 0), "bold"), lines[0])
        yield from (Text(" " * _COLUMN + line) for line in lines[1:])


def _syntax(option: Option) -> str:
    """Return the syntax of an option: `--lr RATE`, `--image-size PIXELS [PIXELS]`, `--flip, --no-flip`."""
    values = option.values
    if option.is_switch:  # the negation of a switch that is off by default is not shown
        return option.title if option.default is False else f"{option.title}, {option.negation}"
    choices = get_args(values.element)
    kind = f"{{{','.join(choices)}}}" if choices else placeholder(option)
    if values.most > 2:
        values_shown = f"{kind} [{kind} …]" if values.least else f"[{kind} …]"
    else:
        values_shown = " ".join([kind] * values.least + [f"[{kind}]"] * (values.most - values.least))
    return f"{option.title} {values_shown}"


def _description(option: Option) -> str:
    default = option.default
    if default in (None, (), "") or isinstance(default, bool):
        return option.help
    text = " ".join(map(str, default)) if isinstance(default, tuple) else default
    return f"{option.help} (default: {text})"


def first_line(command: Callable[..., object]) -> str:
    """Return the summary of a command: the first line of its docstring."""
    return (command.__doc__ or "").strip().partition("\n")[0]


def overview(commands: Mapping[str, Callable[..., object]]) -> str:
    """Return the text of `vitral --help`: every command with the first line of its docstring."""
    lines = ["Vision Transformers: train, measure, understand and ship them.", "", "usage: vitral COMMAND …", ""]
    width = max(map(len, commands))
    lines += [f"  {name:<{width}}  {first_line(command)}" for name, command in commands.items()]
    start = "Run `vitral COMMAND --help` for details, and `vitral demo` to get started."
    return "\n".join([*lines, "", start, "`--debug` after any command prints the traceback of an error."])
