"""Parse the words of a command line into values.

Options are `--name value …`, `--name=value`, `--switch` and `--no-switch`, with `-` or `_` between the words of a name.
Positional arguments may be anywhere between them; after `--` every word is one. Each error is a `UsageError` that names
the option. docs/decisions/0019-the-parser.md explains why no library is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import get_args

from vitral.cli.examples import EXAMPLES
from vitral.cli.help import HELP_ALL
from vitral.cli.options import Option
from vitral.errors import UsageError, unknown
from vitral.kinds import NAMES_ELSEWHERE
from vitral.wording import flag


def parse(command: str, options: Iterable[Option], words: Sequence[str]) -> dict[str, object]:
    """Return the given values by parameter name, in the order of `options`. Of a repeated option the last counts."""
    options, hint = list(options), f"vitral {command} --help"
    named = {option.title: option for option in options if not option.is_positional}
    named |= {option.negation: option for option in named.values() if option.is_switch}
    typed: dict[str, object] = {}
    free: list[int] = []  # indices of the words that belong to no option
    refused: dict[int, Option] = {}  # index of a word → the option before it, which could not take it
    at = 0
    while at < len(words):
        word, at = words[at], at + 1
        if word == "--":
            free += range(at, len(words))
            break
        if not _is_option(word):
            free.append(at - 1)
            continue
        name, equals, value = word.partition("=")
        option = named.get(name.replace("_", "-"))
        if option is None:
            raise _unknown_option(name, command, options)
        if option.is_switch:
            if equals:
                raise UsageError(_no_value(option), hint=hint)
            typed[option.name] = name.replace("_", "-") == option.title
            refused[at] = option
            continue
        values = [value] if equals else []
        while at < len(words) and _continues(option, values, words[at]):
            values.append(words[at])
            at += 1
        if len(values) < option.values.most:
            refused[at] = option
        typed[option.name] = _convert(option, values, hint)
    typed |= _positional(command, options, words, free, refused)
    if missing := [option for option in options if option.required and option.name not in typed]:
        what = f"vitral {command} needs {' and '.join(option.title for option in missing)}"
        why = "; ".join(f"{option.title}: {option.help}" for option in missing)
        raise UsageError(what, why=why, hint=EXAMPLES.get(command, hint))
    return {option.name: typed[option.name] for option in options if option.name in typed}


def _no_value(switch: Option) -> str:
    return f"{switch.title} and {switch.negation} take no value"


def _is_option(word: str) -> bool:
    """True for `-x` and `--name`; False for `-` alone and for negative numbers."""
    return len(word) > 1 and word.startswith("-") and not _is_number(word, float)


def _is_number(word: str, kind: type[int] | type[float]) -> bool:
    try:
        kind(word)
    except ValueError:
        return False
    return True


def _continues(option: Option, values: Sequence[str], word: str) -> bool:
    """True if the option takes this word after `values`.

    A list of numbers ends at the first word that is not a number: `--image-size 64 S/16` leaves S/16 as positional.
    """
    kind = option.values.element
    if len(values) >= option.values.most or _is_option(word):
        return False
    return len(values) < max(option.values.least, 1) or kind not in (int, float) or _is_number(word, kind)


def _positional(
    command: str, options: Iterable[Option], words: Sequence[str], free: Sequence[int], refused: dict[int, Option]
) -> dict[str, object]:
    """Assign the words that belong to no option to the positional arguments, in order."""
    hint, left = f"vitral {command} --help", list(free)
    typed: dict[str, object] = {}
    for option in options:
        if option.is_positional:
            count = min(option.values.most, len(left))
            taken, left = left[:count], left[count:]
            if taken:
                typed[option.name] = _convert(option, [words[index] for index in taken], hint)
    if left:
        raise _unexpected([words[index] for index in left], refused.get(left[0]), hint)
    return typed


def _unexpected(words: Sequence[str], before: Option | None, hint: str) -> UsageError:
    """Return the error for unexpected words; `before` is the option before the first, which could not take it."""
    if before and not before.is_switch:  # only an option with numbers leaves a word that it has room for
        return _not_a_number(before, words[0], hint)
    what = f"unexpected {'argument' if len(words) == 1 else 'arguments'}: {', '.join(words)}"
    return UsageError(what, why=_no_value(before) if before else None, hint=hint)


def _convert(option: Option, words: Sequence[str], hint: str) -> object:
    values = option.values
    if len(words) < values.least:
        needed = "a value" if values.least == 1 else f"{values.least} values"
        raise UsageError(f"{option.title} needs {needed}", hint=hint)
    converted = tuple(_convert_one(option, word, hint) for word in words)
    return converted[0] if values.scalar and len(converted) == 1 else converted


_OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def _convert_one(option: Option, word: str, hint: str) -> object:
    kind = option.values.element
    if choices := get_args(kind):
        if word not in choices and not (option.own and _OWN.fullmatch(word)):
            raise unknown(f"value of {option.title}:", word, choices, hint=hint)
        return word
    try:
        return kind(word)
    except ValueError:
        raise _not_a_number(option, word, hint) from None


def _not_a_number(option: Option, word: str, hint: str) -> UsageError:
    number = "an integer" if option.values.element is int else "a number"
    return UsageError(f"{option.title} takes {number}, not '{word}'", hint=hint)


def _unknown_option(word: str, command: str, options: Iterable[Option]) -> UsageError:
    """Return the error for an unknown option, with the nearest options of the command."""
    name = word.removeprefix("--").replace("-", "_")
    before: list[str] = []
    for option in options:
        if option.is_positional:
            before.append(option.title)
            if name == option.name or {name, option.name} == {"run", "model"}:  # two words for one thing
                hint = f"vitral {command} {' '.join(before)}"
                return UsageError(f"{option.title} is positional: leave out {word}", hint=hint)
    if word.startswith("--no-"):
        known, others = [option.negation for option in options if option.is_switch], {}
    else:
        known = [*(option.title for option in options if not option.is_positional), "--help", HELP_ALL]
        others = {flag(other): flag(own) for other, own in NAMES_ELSEWHERE.items() if flag(own) in known}
    return unknown("option", word, known, hint=f"vitral {command} --help", elsewhere=others)
