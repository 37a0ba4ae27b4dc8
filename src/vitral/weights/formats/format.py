"""What a format of published weights is: names, arithmetic, preprocessing; all of it data or short functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from vitral.data.transforms import Preprocessing
from vitral.errors import WeightsError
from vitral.model import ModelConfig
from vitral.weights.keymap import Facts, KeyMap, Rule, fits, numbered
from vitral.weights.native import Weights
from vitral.weights.source import Source


def _unchanged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors


def _nothing(source: Source) -> Facts:
    return {}


@dataclass(frozen=True)
class Format:
    """A way in which weights lie in a file.

    Its declared names are those of `rules` and `ignored`; a file is of this format where every one of its tensors has a
    declared name and each of `required` is there.
    """

    name: str
    rules: tuple[Rule, ...]
    required: tuple[str, ...]
    """Names (`{i}` a number, `*` anything) that tell this format from the others; none where nothing does, and the
    format has to be asked for."""
    scheme: str
    """How weights from here are resized to another grid: a name in `vitral.weights.resize.SCHEMES`."""
    preprocessing: Callable[[Source, Any], tuple[Preprocessing, str]]
    """What the weights expect of a picture, and where that is known from."""
    facts: Callable[[Source], Facts] = _nothing
    """Fields of the configuration that the file or its companions tell; the shapes tell the rest."""
    assumed: Callable[[Source], Sequence[str]] = lambda source: ()
    """What is taken for granted because neither the file nor its companions tell, a sentence each for the account."""
    config: Callable[[Mapping[str, Tensor], Facts, object], ModelConfig] | None = None
    """The configuration from tensors under our names, the facts, and the place to name in errors; None for a ViT's."""
    classes: Callable[[Source, int], tuple[str, ...] | None] = lambda source, count: None
    """Class names, where the file has them."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors that are left out → why."""
    canonical: Callable[[dict[str, Tensor]], dict[str, Tensor]] = _unchanged
    """Older or packed spellings of the same names, made into those of the rules."""
    fixed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Fields of the configuration → the values that this format's own program can compute; others cannot be written."""
    write: Callable[[Weights, Path], Sequence[Path]] | None = None
    """Write a file or folder that the format's own program opens; gives what was written."""

    @cached_property
    def keymap(self) -> KeyMap:
        """The rules, looked up fast."""
        return KeyMap(self.rules)

    def strange(self, names: Iterable[str]) -> list[str]:
        """Tensors that this format does not have."""
        return [n for n in names if not self.keymap.knows(n) and fits(self.ignored, n) is None]

    def missing(self, names: Sequence[str]) -> list[str]:
        """Required tensors that are not among these."""
        return [want for want in self.required if not any(fits((want,), name) for name in names)]


def translated(kind: Format, weights: Weights) -> dict[str, Tensor]:
    """Our weights under the names and in the layout of `kind`.

    `WeightsError` for a network that the format's own program could not compute, with the reason.
    """
    config = weights.config
    for name, values in kind.fixed.items():
        value = getattr(config, name, None)
        if value not in values:
            why = f"{name.replace('_', ' ')} is {value}; there it is {' or '.join(map(str, values))}"
            raise WeightsError(f"this network cannot be written for {kind.name}", why=why)
    found: dict[str, Tensor] = {}
    for ours, tensor in weights.state.items():
        match = kind.keymap.writing(ours, config)
        if match is None:
            raise WeightsError(f"this network cannot be written for {kind.name}", why=f"it has no place for '{ours}'")
        try:
            parts = match.form.write(tensor, getattr(config, "heads", 1))
        except ValueError as error:
            raise WeightsError(f"this network cannot be written for {kind.name}", why=f"'{ours}': {error}") from None
        found |= {name: part for name, part in zip(match.theirs, parts, strict=True) if part is not None}
    return found


def depth_of(names: Iterable[str], before: str) -> int:
    """How many numbered blocks there are."""
    return max(numbered(names, before), default=-1) + 1


def layers_of(names: Iterable[str], before: str) -> tuple[int, ...]:
    """How many numbered blocks each numbered stage has, as in `stages.0.blocks.0`, up to the first stage without."""
    names, found = list(names), list[int]()
    while blocks := depth_of(names, f"{before}{len(found)}.blocks."):
        found.append(blocks)
    return tuple(found)
