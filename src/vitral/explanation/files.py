"""Explaining picture files: from paths to heat maps to files beside each other in a folder."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitral.errors import ImageError, UsageError
from vitral.explanation.drawing import SUFFIXES, check_suffix, contrast
from vitral.explanation.explain import Target, check_method, default_method, explain, find_method, resolve_targets
from vitral.explanation.heatmap import Heatmap
from vitral.explanation.methods import METHODS, Method
from vitral.model import ViT
from vitral.predict import Predictor

_TOGETHER = 8
_LONG = 80  # characters of a name that many classes are asked of
_OTHER_FILES = (".html", ".htm", ".pdf", ".jpg", ".jpeg", ".gif", ".webp", ".tif", ".tiff", ".txt", ".csv", ".npy")
"""Ends of names that are meant as files, though not as ours."""


@dataclass(frozen=True)
class Question:
    """What is to be explained of every picture, found to be possible before the first one is read."""

    predictor: Predictor
    targets: tuple[Target, ...]
    methods: tuple[str, ...]
    options: dict[str, Any]
    """Of each method that takes them."""
    check: bool = False

    @property
    def name(self) -> str:
        """What files about it are called: by all that was asked, so that no answer takes another's place."""
        asked = [self.methods[0] if len(self.methods) == 1 else "compared"]
        asked += [re.sub(r"[^\w.+]+", "_", str(target)) for target in self.targets if target is not None]
        asked += [f"layer{layer}" for layer in (self.options.get("layer"),) if layer is not None]
        return "-".join(asked)[:_LONG]

    @property
    def used(self) -> list[Method]:
        """The entries of the methods."""
        return [METHODS[name] for name in self.methods]


def question(
    predictor: Predictor, targets: Sequence[Target] = (), method: str | None = None, *, compare: bool = False,
    layer: int | None = None, check: bool = False,
) -> Question:  # fmt: skip
    """A question that this network can be asked; no target is the class that it answers, `compare` asks all methods.

    Raises `UsageError` for an unknown class or method, a method without its parts here, and a layer that there is not.
    """
    network = predictor.model
    if compare and method is not None:
        raise UsageError("--compare draws all methods, --method names one", hint="one of the two")
    if compare:
        methods = tuple(name for name, one in METHODS.items() if one.any_network or isinstance(network, ViT))
    else:
        methods = (method or default_method(network),)
        check_method(find_method(methods[0]), network)
    if predictor.classes:  # else `explain` says so
        resolve_targets(targets or (None,), torch.zeros(1, len(predictor.classes)), predictor.classes)
    options = {} if layer is None else {"layer": _layer(network, layer, methods)}
    return Question(predictor, tuple(targets) or (None,), methods, options, check)


def _layer(network: Any, layer: int, methods: Sequence[str]) -> int:
    if not any("layer" in _options(name) for name in methods):
        able = ", ".join(name for name in METHODS if "layer" in _options(name))
        raise UsageError(f"'{methods[0]}' has no layer to choose", why="it reads all of them", hint=f"--method {able}")
    depth = len(network.blocks)
    if not -depth <= layer < depth:
        raise UsageError(f"there is no layer {layer}", why=f"the network has {depth}", hint=f"--layer 0 … {depth - 1}")
    return layer


def _options(method: str) -> set[str]:
    return set(inspect.signature(METHODS[method].run).parameters)


def explain_files(asked: Question, paths: Iterable[Path]) -> Iterator[list[Heatmap] | ImageError]:
    """For each picture its maps, method by method, target by target and, where there are several targets, contrasts
    with the first; or the error of a picture that cannot be read.
    """
    paths = list(paths)
    for start in range(0, len(paths), _TOGETHER):
        part: dict[str, list[Heatmap] | ImageError] = {str(path): [] for path in paths[start : start + _TOGETHER]}
        while good := [name for name, found in part.items() if isinstance(found, list)]:
            try:
                part.update(_explained(asked, good))
                break
            except ImageError as error:  # the others of its batch go on without it
                part[error.name] = error
        yield from (part[str(path)] for path in paths[start : start + _TOGETHER])


def _explained(asked: Question, names: list[str]) -> dict[str, list[Heatmap]]:
    found: dict[str, list[Heatmap]] = {name: [] for name in names}
    for method in asked.methods:
        options = {key: value for key, value in asked.options.items() if key in _options(method)}
        if asked.check:
            options["check"] = True
        maps = explain(asked.predictor, names, asked.targets, method=method, batch_size=_TOGETHER, **options)
        count = len(asked.targets)
        for i, name in enumerate(names):
            found[name] += with_contrasts(maps[i * count : (i + 1) * count])
    return found


def with_contrasts(maps: Sequence[Heatmap]) -> list[Heatmap]:
    """The maps of one picture by one method, and how the first differs from each of the others; for a routing method
    there is no difference to show.
    """
    others = [one for one in maps[1:] if one.target != maps[0].target and not METHODS[one.method].routing]
    return [*maps, *(contrast(maps[0], one) for one in others)]


def files_for(paths: Sequence[Path], asked: Question, out: str | None, folder: Path) -> list[Path]:
    """Where the pictures of each go: into `out`, a folder or (for one picture) a file, by default into `folder`.

    Pictures of one name in several folders get numbers. Raises `UsageError` for a file of a kind that we do not write.
    """
    if out and not Path(out).is_dir() and Path(out).suffix.lower() in (*SUFFIXES, *_OTHER_FILES):
        file = check_suffix(out)
        if len(paths) > 1:
            why = f"{len(paths)} pictures were given"
            raise UsageError("one file is for one picture", where=out, why=why, hint=f"--out {file.with_suffix('')}")
        return [file]
    taken: dict[str, None] = {}
    for path in paths:
        names = (path.stem, *(f"{path.stem}-{number}" for number in range(2, len(paths) + 2)))
        taken[next(name for name in names if name not in taken)] = None
    return [(Path(out) if out else folder) / f"{name}-{asked.name}.png" for name in taken]
