"""Find the network in a file that holds more: below a wrapper's prefix, beside copies and the tensors of losses."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vitral.errors import WeightsError
from vitral.weights.notes import Alarm
from vitral.weights.read.source import Source

AVERAGED = ("ema", "ema_model", "model_ema", "averaged", "avg_model", "swa_model", "teacher", "target")
"""Parts of prefixes of a copy that is preferred to the others: averaged weights, and the teacher of a student."""

_FOREIGN = re.compile(
    r"(n_averaged|num_updates|step|epoch|criterion|loss|losses|\w+_loss|loss_\w+|\w*metrics?|(train|val|valid|test)_\w+"
    r"|\w+_(acc|accuracy|f1|auroc|auc)|dino_head|ibot_head|projector|projection_head|prototypes|queue|queue_ptr|center)"
    r"(\.|$)"
)
"""Names beside a network that are no part of it: counters, losses, metrics, heads of self-supervision."""

_DEEPEST = 4
"""Parts that a prefix may have."""

Fits = Callable[[dict[str, Tensor]], bool]
"""True if tensors have exactly the names of one format."""


def rooted(source: Source, fits: Fits, key: str | None = None) -> Source:
    """Return the source with the tensors of its largest whole network, and notes on what was left out.

    A network at the root of the names is taken as it is. Of several equally large ones the averaged one is taken. `key`
    is the prefix of the one to take. Raises `WeightsError` for a key below which there is none, and if it is unclear
    which one is meant. Without any the source is returned as it is: nothing fits, which the format's error explains.
    """
    if key is None and fits(source.tensors):
        return source
    found = {prefix: kept for prefix in _prefixes(source) if (kept := _below(source.tensors, prefix, fits))}
    if key is not None:
        prefix = key.rstrip(".") + "."
        if prefix not in found:
            why = f"networks are below {_listed(found)}" if found else "no network is found in it"
            raise WeightsError(f"there is no whole network below '{key}'", where=source.where, why=why)
        return _taken(source, prefix, found[prefix], {})
    if not found:
        return source
    most = max(map(_size, found.values()))
    largest = [prefix for prefix, kept in found.items() if _size(kept) == most]
    averaged = [prefix for prefix in largest if any(part in AVERAGED for part in prefix.split("."))]
    chosen = averaged if len(averaged) == 1 else largest
    if len(chosen) > 1 and not _alike([found[prefix] for prefix in chosen]):
        names = _listed(chosen)
        hint = f"vitral convert {shlex.quote(source.where)} NEW --weights-key {chosen[0].rstrip('.')}"
        raise WeightsError(
            f"{len(chosen)} networks in one file", where=source.where, why=f"equally large, below {names}", hint=hint
        )
    taken = found.pop(chosen[0])
    return _taken(source, chosen[0], taken, found)


def _prefixes(source: Source) -> list[str]:
    """Every prefix of names that may be a network's, "" first, without those of single blocks."""
    found = {""}
    for name in source.tensors:
        parts = name.split(".")[:-1]
        for depth in range(1, min(len(parts), _DEEPEST) + 1):
            if parts[depth - 1].isdigit():
                break
            found.add(".".join(parts[:depth]) + ".")
    return sorted(found, key=lambda prefix: (prefix.count("."), prefix))


def _below(tensors: dict[str, Tensor], prefix: str, fits: Fits) -> dict[str, Tensor] | None:
    """Tensors of a whole network below a prefix, under its own names; None if there is none."""
    inside = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    own = {name: tensor for name, tensor in inside.items() if not _FOREIGN.match(name)}
    return own if len(own) > 4 and fits(own) else None


def _size(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def _alike(copies: Sequence[dict[str, Tensor]]) -> bool:
    """True if all copies have the same tensors."""
    first, *others = copies
    return all(
        first.keys() == other.keys() and all(torch.equal(first[name], other[name]) for name in first)
        for other in others
    )


def _taken(source: Source, prefix: str, tensors: dict[str, Tensor], others: dict[str, dict[str, Tensor]]) -> Source:
    """The source with these tensors alone, and a note on the other networks in it: a warning if they differ."""
    used = {prefix + name for name in tensors}
    left = {name: tuple(tensor.shape) for name, tensor in source.tensors.items() if name not in used}
    notes = [f"the network below '{prefix.rstrip('.')}' is taken"] if prefix else []
    if copies := [other for other in others if not prefix.startswith(other)]:
        note = f"networks also there: {_listed(copies)}; --weights-key takes another one"
        alike = _alike([tensors, *(others[copy] for copy in copies)])
        notes.append(note if alike else Alarm(f"WARNING {note}"))
    return dataclasses.replace(source, tensors=tensors, notes=(*source.notes, *notes), left=left)


def _listed(prefixes: object) -> str:
    names = [prefix.rstrip(".") or "the root" for prefix in prefixes]  # type: ignore[attr-defined]
    return ", ".join(f"'{name}'" for name in names[:6])
