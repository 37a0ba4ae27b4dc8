"""Key maps as two-way data: which tensors of another library are which parameter of ours, and how to turn them.

A rule says it for one parameter, or, with `{i}` for the block's number, for one parameter of every block. Where theirs
count from one the place is `{i+1}`, with two digits `{i+1:02}`; a second number has another letter, `{s}`. Reading and
writing both follow the same rules, so a format that can be read can be written, and a round trip is exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Form:
    """How tensors of theirs become one of ours, and back; `heads` is what some layouts need to be written."""

    told: str
    """What the account says of it; empty where nothing changes."""
    read: Callable[[Sequence[Tensor]], Tensor]
    write: Callable[[Tensor, int], Sequence[Tensor | None]]
    """One for each of theirs; None where another rule writes it, or where it need not be there."""


SAME = Form("", lambda theirs: theirs[0], lambda ours, heads: [ours])
STACKED = Form("q, k, v stacked", lambda theirs: torch.cat(list(theirs)), lambda ours, heads: ours.chunk(3))
PAIR = Form("two matrices stacked", lambda theirs: torch.cat(list(theirs)), lambda ours, heads: ours.chunk(2))


def _without_key_bias(ours: Tensor, heads: int) -> Sequence[Tensor]:
    q, k, v = ours.chunk(3)
    if k.any():
        raise ValueError("the keys have a bias, which this format has no place for")
    return q, v


QUERY_VALUE_BIAS = Form(
    "q and v biases; keys have none", lambda qv: torch.cat([qv[0], torch.zeros_like(qv[0]), qv[1]]), _without_key_bias
)


@dataclass(frozen=True)
class Rule:
    """One parameter of ours and the tensors of theirs that it is made of. Names may hold `{i}` and its like."""

    ours: str
    theirs: tuple[str, ...]
    form: Form = SAME
    when: tuple[str, Any] | None = None
    """A field of the configuration and its value: only such networks are written by this rule."""


def same(pairs: Mapping[str, str]) -> tuple[Rule, ...]:
    """Rules for tensors that only have another name; `.*` stands for `.weight` and `.bias`."""
    return tuple(
        Rule(ours.replace(".*", end), (theirs.replace(".*", end),))
        for ours, theirs in pairs.items()
        for end in ((".weight", ".bias") if ".*" in ours else ("",))
    )


def both(ours: str, theirs: Sequence[str], form: Form, when: tuple[str, Any] | None = None) -> tuple[Rule, ...]:
    """The same form for `.weight` and `.bias`."""
    return tuple(Rule(ours + end, tuple(name + end for name in theirs), form, when) for end in (".weight", ".bias"))


@dataclass(frozen=True)
class Match:
    """A rule at one block."""

    ours: str
    theirs: tuple[str, ...]
    form: Form


@dataclass(frozen=True)
class KeyMap:
    """All rules of a format."""

    rules: tuple[Rule, ...]

    def reading(self, names: Iterable[str]) -> list[Match]:
        """What can be made of tensors with these names; a rule needs all of its tensors."""
        have = dict.fromkeys(names)
        found: dict[str, Match] = {}
        for name in have:
            for rule in self._by_first.get(_shape(name), ()):
                if (numbers := _numbers(rule.theirs[0], name)) is None:
                    continue
                match = _at(rule, numbers)
                if all(part in have for part in match.theirs):
                    found.setdefault(match.ours, match)
        return list(found.values())

    def writing(self, ours: str, config: object = None) -> Match | None:
        """How our parameter of such a network is written; None where the format has no place for it. The first rule
        that speaks of it does.
        """
        for rule in self.rules:
            if rule.when and getattr(config, rule.when[0], None) != rule.when[1]:
                continue
            if (numbers := _numbers(rule.ours, ours)) is not None:
                return _at(rule, numbers)
        return None

    def knows(self, name: str) -> bool:
        """Whether any rule speaks of a tensor of theirs with this name."""
        return any(_numbers(part, name) is not None for part in self._parts.get(_shape(name), ()))

    @cached_property
    def _by_first(self) -> dict[str, list[Rule]]:
        found: dict[str, list[Rule]] = {}
        for rule in self.rules:
            found.setdefault(_shape(_PLACE.sub("0", rule.theirs[0])), []).append(rule)
        return found

    @cached_property
    def _parts(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for rule in self.rules:
            for part in rule.theirs:
                found.setdefault(_shape(_PLACE.sub("0", part)), []).append(part)
        return found


def _shape(name: str) -> str:
    """The name with every number as 0: rules are looked up by it, so that a thousand names need no thousand rules."""
    return re.sub(r"\d+", "0", name)


_PLACE = re.compile(r"\{([a-z])(\+1)?(:02)?\}")
"""A number in a template: its letter, whether it counts from one, whether it has two digits."""


@cache
def _pattern(template: str) -> tuple[re.Pattern[str], tuple[tuple[str, int], ...]]:
    """What names of the template look like, and for each number in them its letter and where it counts from."""
    places = list(_PLACE.finditer(template))
    between = _PLACE.sub("\0", template).split("\0")
    digits = "([0-9]{1,4})"  # no network has more blocks
    pattern = "".join(re.escape(text) + digits for text in between[:-1]) + re.escape(between[-1])
    return re.compile(pattern), tuple((place[1], int(place[2] or 0)) for place in places)


def _numbers(template: str, name: str) -> dict[str, int] | None:
    """The numbers by letter where `name` fits the template (none where it has none); None where it does not fit."""
    pattern, places = _pattern(template)
    if not (found := pattern.fullmatch(name)):
        return None
    numbers: dict[str, int] = {}
    for (letter, first), digits in zip(places, found.groups(), strict=True):
        if numbers.setdefault(letter, int(digits) - first) != int(digits) - first:
            return None
    return numbers if min(numbers.values(), default=0) >= 0 and _filled(template, numbers) == name else None


def _filled(template: str, numbers: Mapping[str, int]) -> str:
    def number(place: re.Match[str]) -> str:
        return f"{numbers[place[1]] + int(place[2] or 0):{'02' if place[3] else ''}}"

    return _PLACE.sub(number, template)


def _at(rule: Rule, numbers: Mapping[str, int]) -> Match:
    theirs = tuple(_filled(part, numbers) for part in rule.theirs)
    return Match(_filled(rule.ours, numbers), theirs, rule.form)


def rename(rules: Iterable[Rule], change: Callable[[str], str]) -> tuple[Rule, ...]:
    """The same rules with other names of theirs: a family's variants differ by that alone."""
    return tuple(Rule(rule.ours, tuple(map(change, rule.theirs)), rule.form, rule.when) for rule in rules)


def fits(patterns: Iterable[str], name: str) -> str | None:
    """The first of these templates (`{i}` a number, `*` anything) that the name fits."""
    return next((pattern for pattern in patterns if _loose(pattern).fullmatch(name)), None)


@cache
def _loose(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\{i\}", r"\d+").replace(r"\*", ".*"))


def numbered(names: Iterable[str], before: str) -> Iterator[int]:
    """The numbers that follow `before` in names: `numbered(names, "blocks.")`."""
    for name in names:
        if found := re.match(re.escape(before) + r"(\d+)\.", name):
            yield int(found[1])


Facts = dict[str, Any]
"""Fields of a configuration that a file tells beside its tensors."""
