"""Class names: those of ImageNet and of published configs, and matching between two lists of names.

Each class of ImageNet-1k has three names: its WordNet id (`n01440764`, a data set's folders), torchvision's short name
(`tench`), and WordNet's list of lemmas (`tench, Tinca tinca`, Hugging Face). The order is the same in all published
weights: sorted by WordNet id.

The classes of ImageNet-21k are named by their numbers. Files with 21,843 outputs (Google, the ids of the fall 2011
release) and with 21,841 count differently, and none of them states its names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from vitral.data.images.lazy_torchvision import torchvision
from vitral.errors import UsageError, WeightsError
from vitral.weights.notes import AssumedNames, DoubtfulNames, OfClassNames
from vitral.wording import natural

SYNSETS: tuple[str, ...] = tuple(files("vitral.weights").joinpath("imagenet_synsets.txt").read_text("ascii").split())
"""The WordNet ids of ImageNet-1k (ILSVRC 2012), sorted: the class with index i in every published 1000-way head."""

_NUMBER = {synset: index for index, synset in enumerate(SYNSETS)}


@cache
def imagenet_names() -> tuple[str, ...]:
    """Return torchvision's 1000 short English names, all different.

    WordNet has two cranes and two maillots; torchvision writes `crane bird` (134) and `maillot tank suit` (639) for one
    of each. If a release has the same name twice, `distinct` numbers them.
    """
    torchvision()
    # A private name of a public table: `Weights.meta["categories"]`, without importing all the models.
    from torchvision.models._meta import _IMAGENET_CATEGORIES

    return distinct(_IMAGENET_CATEGORIES)


def distinct(names: Iterable[str]) -> tuple[str, ...]:
    """Append the class number to names that occur twice: `crane (134)`, `crane (517)`."""
    names = tuple(names)
    count = Counter(names)
    found = tuple(name if count[name] == 1 else f"{name} ({index})" for index, name in enumerate(names))
    return found if len(set(found)) == len(found) else tuple(f"{n} ({i})" for i, n in enumerate(names))


def default(classes: int) -> tuple[str, ...]:
    """Return names for a head without any: ImageNet's for 1000 classes, else the numbers `0` … (also ImageNet-21k)."""
    return imagenet_names() if classes == len(SYNSETS) else tuple(map(str, range(classes)))


ORDERS = ("natural", "text")
"""Orders of folders whose numbers are the outputs of a network: 2 before 10, as timm's reader and vitral have it, or
10 before 2, as torchvision's `ImageFolder`."""


def in_order(names: Iterable[str], order: str) -> tuple[str, ...]:
    """Sort names in one of `ORDERS`."""
    return tuple(sorted(names, key=natural if order == "natural" else str))


def given(classes: int, order: str) -> tuple[str, ...]:
    """Return names for a head without any, by an order of the numbers, or from a file with a name in each line."""
    if order in ORDERS:
        return in_order(map(str, range(classes)), order)
    try:
        text = Path(order).read_text("utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        hint = f"{' or '.join(ORDERS)}, or a file with a name in each line"
        raise UsageError("cannot read the names of the classes", where=order, why=why, hint=hint) from error
    names = tuple(line.strip() for line in text.splitlines() if line.strip())
    if len(names) != classes or len(set(names)) != classes:
        what = f"{len(set(names))} different names for {classes} classes"
        raise UsageError(what, where=order, hint="pass a file with one name per line, in the order of the outputs")
    return names


class Naming(NamedTuple):
    """Names of the classes of a head, and where they are from."""

    names: tuple[str, ...]
    nameless: bool = False
    """True if no file states them."""
    order: str | None = None
    """The order that the user stated for a head without names."""
    notes: tuple[str, ...] = ()


def naming(stated: tuple[str, ...] | None, count: int, order: str | None, where: object) -> Naming:
    """Return the stated names if there are `count` of them, otherwise names by the user's order or assumed ones.

    Raises `UsageError` for an order of classes whose names the weights state.
    """
    if stated is None or len(stated) != count:
        return _assumed(count, order)
    if order is not None:
        raise stated_twice(where)
    return Naming(stated)


def stated_twice(where: object) -> UsageError:
    """Make the error for an order of classes whose names the weights state."""
    hint = "leave out --class-order, or class_order in Python"
    return UsageError("these weights already contain the names of their classes", where=str(where), hint=hint)


def _assumed(count: int, order: str | None) -> Naming:
    """Name the classes of a head without names."""
    if not count:
        return Naming((), order=order)
    if order is not None:
        note = OfClassNames(f"class names by --class-order {order}; the weights state none")
        return Naming(given(count, order), True, order, (note,))
    if count == len(SYNSETS):
        note = AssumedNames("class names assumed: ImageNet-1k's, because the weights contain none")
        return Naming(default(count), True, None, (note,))
    text = "class names assumed: the numbers of the outputs, because the weights contain none"
    doubt = (
        "Output 2 is taken for class 2; if the network was trained with torchvision's ImageFolder, which sorts "
        "folders as text (0, 1, 10, 11, 2 …): --class-order text"
    )
    note = DoubtfulNames(f"WARNING {text}. {doubt}") if count > 10 else AssumedNames(text)
    return Naming(default(count), True, None, (note,))


def from_config(config: Mapping[str, object]) -> tuple[str, ...] | None:
    """Read class names from a Hugging Face or timm `config.json`; None if it has none.

    Hugging Face: `id2label`, a mapping from "0", "1" …; the placeholders LABEL_0 … are ignored. timm: `label_names`
    (formerly `labels`), at the top or in `pretrained_cfg`, a list or a mapping from numbers; WordNet ids are kept:
    `alias` finds their English names. Raises `WeightsError` unless there is one name for each number.
    """
    inner = config.get("pretrained_cfg")
    for place in (config, inner if isinstance(inner, Mapping) else {}):
        for field in ("id2label", "label_names", "labels"):
            if place.get(field):
                names = _listed(place[field], field)
                if all(name == f"LABEL_{index}" for index, name in enumerate(names)):
                    return None
                return distinct(names)
    return None


def _listed(value: object, field: str) -> list[str]:
    if isinstance(value, Mapping):
        by_number = {str(key): name for key, name in value.items()}
        value = [by_number.get(str(index)) for index in range(len(by_number))]
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) and name for name in value):
        why = f"'{field}' should be one name for each number from 0"
        raise WeightsError("cannot read the class names of the weights", where="config.json", why=why)
    return list(value)


# ---------------------------------------------------------------- matching


def match(wanted: Sequence[str], known: Sequence[str]) -> list[int | None]:
    """Find for each name in `wanted` the index of the same class in `known`; None if there is none.

    First by the same name; then by the same ImageNet class under another of its names; then by the same name except for
    case and `_` for a space. A match must be unique in its step: an ambiguous name has none. No two names get the same
    class: an earlier step takes precedence.
    """
    found: list[int | None] = [None] * len(wanted)
    for key_wanted, key_known in (
        (list(wanted), list(known)),
        (_imagenet(wanted), _imagenet(known)),
        ([_folded(n) for n in wanted], [_folded(n) for n in known]),
    ):
        taken = {index for index in found if index is not None}
        open_wanted = Counter(key for key, index in zip(key_wanted, found, strict=True) if index is None)
        open_known = Counter(key for index, key in enumerate(key_known) if index not in taken)
        place = {key: index for index, key in enumerate(key_known) if index not in taken and open_known[key] == 1}
        for number, key in enumerate(key_wanted):
            if found[number] is None and key is not None and open_wanted[key] == 1:
                found[number] = place.get(key)
    return found


def _folded(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").split())


def _imagenet(names: Sequence[str]) -> list[int | None]:
    """Find the number in ImageNet-1k of each class, None if undetermined.

    A WordNet id determines it, alone or at the start (`n01440764_tench`). A name determines it only if all names are
    ImageNet's: a `nail` in a set of tools may be another. `crane` and `maillot` are determined only in the whole list.
    """
    if _whole_list(names):
        return list(range(len(names)))
    numbers = [_NUMBER.get(name[:9]) if _STARTS_WITH_ID.match(name) else None for name in names]
    if any(number is not None for number in numbers):
        return numbers
    by_name = {_folded(name): None if name in _TWICE else i for i, name in enumerate(imagenet_names())}
    if all(_folded(name) in by_name for name in names):
        return [by_name[_folded(name)] for name in names]
    return numbers


_STARTS_WITH_ID = re.compile(r"n\d{8}([ _-]|$)")
_TWICE = ("crane", "maillot")  # each the first lemma of two classes


def _whole_list(names: Sequence[str]) -> bool:
    """True if these are ImageNet's 1000 names in order: the first lemma is torchvision's name for nearly all."""
    if len(names) != len(SYNSETS):
        return False
    pairs = zip(names, imagenet_names(), strict=True)
    return sum(_folded(name.split(",")[0]) == _folded(own) for name, own in pairs) >= 990
