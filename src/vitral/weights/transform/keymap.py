"""Key maps as two-way data: names and layouts of another library's tensors, and of vitral's parameters.

A rule maps a parameter of vitral, or, with `{i}` for the block number, one of every block, to the tensors that it is
made of. Numbers that count from one are `{i+1}`, with two digits `{i+1:02}`; a second number has another letter, `{s}`.
Reading and writing follow the same rules, so every readable format can be written, and a round trip is exact.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Form:
    """A two-way conversion of tensors to a parameter; some layouts need the number of heads to write."""

    note: str
    """Description in the load report; empty if nothing changes."""
    read: Callable[[Sequence[Tensor]], Tensor]
    write: Callable[[Tensor, int], Sequence[Tensor | None]]
    """The tensors; None in place of one that another rule writes or that may be absent."""


SAME = Form("", lambda tensors: tensors[0], lambda parameter, heads: [parameter])
STACKED = Form("q, k, v stacked", lambda tensors: torch.cat(list(tensors)), lambda parameter, heads: parameter.chunk(3))
PAIR = Form(
    "two matrices stacked", lambda tensors: torch.cat(list(tensors)), lambda parameter, heads: parameter.chunk(2)
)


def _without_key_bias(parameter: Tensor, heads: int) -> Sequence[Tensor]:
    q, k, v = parameter.chunk(3)
    if k.any():
        raise ValueError("the keys have a bias, which this format cannot store")
    return q, v


QUERY_VALUE_BIAS = Form(
    "q and v biases; keys have none", lambda qv: torch.cat([qv[0], torch.zeros_like(qv[0]), qv[1]]), _without_key_bias
)


def _as_kernel(tensors: Sequence[Tensor]) -> Tensor:
    side = math.isqrt(tensors[0].shape[1] // 3)
    if side * side * 3 != tensors[0].shape[1]:
        raise ValueError("its patches are not square with three channels")
    return tensors[0].unflatten(1, (side, side, 3)).permute(0, 3, 1, 2).contiguous()


PATCHES = Form("patches as a kernel", _as_kernel, lambda parameter, heads: [parameter.permute(0, 2, 3, 1).flatten(1)])
"""A dense layer of patches (D, rows × columns × 3), as a convolution's kernel (D, 3, rows, columns)."""


@dataclass(frozen=True)
class Rule:
    """A parameter, and the tensors that it is made of. Names may contain `{i}` and the like."""

    parameter: str
    tensors: tuple[str, ...]
    form: Form = SAME
    when: tuple[str, Any] | None = None
    """Field of the configuration and value: the rule writes only networks with that value."""


def same(pairs: Mapping[str, str]) -> tuple[Rule, ...]:
    """Make rules for tensors that differ only in name; `.*` stands for `.weight` and `.bias`."""
    return tuple(
        Rule(parameter.replace(".*", end), (tensor.replace(".*", end),))
        for parameter, tensor in pairs.items()
        for end in ((".weight", ".bias") if ".*" in parameter else ("",))
    )


def both(
    parameter: str, tensors: Sequence[str], form: Form, when: tuple[str, object] | None = None
) -> tuple[Rule, ...]:
    """Make one rule each for `.weight` and `.bias`, with the same form."""
    return tuple(
        Rule(parameter + end, tuple(name + end for name in tensors), form, when) for end in (".weight", ".bias")
    )


@dataclass(frozen=True)
class Match:
    """A rule applied to one block."""

    parameter: str
    tensors: tuple[str, ...]
    form: Form


@dataclass(frozen=True)
class KeyMap:
    """All rules of a format."""

    rules: tuple[Rule, ...]

    def reading(self, names: Iterable[str]) -> list[Match]:
        """Match tensors with these names; a rule applies only if all of its tensors are there."""
        have = dict.fromkeys(names)
        found: dict[str, Match] = {}
        for name in have:
            for rule in self._by_first.get(_without_numbers(name), ()):
                if (numbers := _numbers(rule.tensors[0], name)) is None:
                    continue
                match = _at(rule, numbers)
                if all(part in have for part in match.tensors):
                    found.setdefault(match.parameter, match)
        return list(found.values())

    def writing(self, parameter: str, config: object = None) -> Match | None:
        """Match a parameter to write, by the first rule for it; None if the format cannot store it."""
        for rule in self.rules:
            if rule.when and getattr(config, rule.when[0], None) != rule.when[1]:
                continue
            if (numbers := _numbers(rule.parameter, parameter)) is not None:
                return _at(rule, numbers)
        return None

    def knows(self, name: str) -> bool:
        """True if any rule mentions a tensor with this name."""
        return any(_numbers(part, name) is not None for part in self._parts.get(_without_numbers(name), ()))

    @cached_property
    def _by_first(self) -> dict[str, list[Rule]]:
        found: dict[str, list[Rule]] = {}
        for rule in self.rules:
            found.setdefault(_without_numbers(_PLACE.sub("0", rule.tensors[0])), []).append(rule)
        return found

    @cached_property
    def _parts(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for rule in self.rules:
            for part in rule.tensors:
                found.setdefault(_without_numbers(_PLACE.sub("0", part)), []).append(part)
        return found


def _without_numbers(name: str) -> str:
    """Replace every number in a name by 0, the key by which rules are looked up."""
    return re.sub(r"\d+", "0", name)


_PLACE = re.compile(r"\{([a-z])(\+1)?(:02)?\}")
"""A number in a template: its letter, `+1` if it counts from one, `:02` if it has two digits."""


@cache
def _pattern(template: str) -> tuple[re.Pattern[str], tuple[tuple[str, int], ...]]:
    """Compile a template to a pattern, with letter and first value of each number in it."""
    places = list(_PLACE.finditer(template))
    between = _PLACE.sub("\0", template).split("\0")
    digits = "([0-9]{1,4})"  # no network has more blocks
    pattern = "".join(re.escape(text) + digits for text in between[:-1]) + re.escape(between[-1])
    return re.compile(pattern), tuple((place[1], int(place[2] or 0)) for place in places)


def _numbers(template: str, name: str) -> dict[str, int] | None:
    """Numbers by letter if `name` matches the template, else None."""
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
    tensors = tuple(_filled(part, numbers) for part in rule.tensors)
    return Match(_filled(rule.parameter, numbers), tensors, rule.form)


def rename(rules: Iterable[Rule], change: Callable[[str], str]) -> tuple[Rule, ...]:
    """Apply `change` to the names of tensors in all rules, for variants of a family that differ only in names."""
    return tuple(Rule(rule.parameter, tuple(map(change, rule.tensors)), rule.form, rule.when) for rule in rules)


def fits(patterns: Iterable[str], name: str) -> str | None:
    """Find the first of these templates (`{i}` a number, `*` anything) that matches the name."""
    return next((pattern for pattern in patterns if _loose(pattern).fullmatch(name)), None)


@cache
def _loose(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\{i\}", r"\d+").replace(r"\*", ".*"))


def numbered(names: Iterable[str], before: str) -> Iterator[int]:
    """Iterate over the numbers after `before` in names: `numbered(names, "blocks.")`."""
    for name in names:
        if found := re.match(re.escape(before) + r"(\d+)\.", name):
            yield int(found[1])


def depth_of(names: Iterable[str], before: str) -> int:
    """Count the numbered blocks."""
    return max(numbered(names, before), default=-1) + 1


def layers_of(names: Iterable[str], before: str) -> tuple[int, ...]:
    """Count the blocks of each numbered stage, as in `stages.0.blocks.0`, up to the first stage without any."""
    names, found = list(names), list[int]()
    while blocks := depth_of(names, f"{before}{len(found)}.blocks."):
        found.append(blocks)
    return tuple(found)


ConfigFields = dict[str, Any]
"""Fields of a configuration, stated by a file in addition to its tensors."""
