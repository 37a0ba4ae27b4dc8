"""Explain image files: from paths to heat maps to files in a folder."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitral.errors import ImageError, UsageError
from vitral.explanation.drawing import SUFFIXES, check_suffix
from vitral.explanation.explain import explain
from vitral.explanation.heatmap import Heatmap, contrast
from vitral.explanation.methods import METHODS, Method, method_named
from vitral.explanation.methods.any_network import AnyNetwork
from vitral.explanation.methods.select import Target, check_method, default_method, find_method, resolve_targets
from vitral.explanation.subject import of_foreign
from vitral.explanation.texts import TextExplanation, explain_texts, refuse_for_text, text_method
from vitral.inference.predictor import Predictor
from vitral.model import EncoderDecoder, Foreign, ViT

_BATCH_SIZE = 8
_MAX_NAME = 80  # characters of a file name, which many classes would exceed
_OTHER_FILES = (".html", ".htm", ".pdf", ".jpg", ".jpeg", ".gif", ".webp", ".tif", ".tiff", ".txt", ".csv", ".npy")
"""Suffixes that mean a file, though not one that heat maps can be written to."""


@dataclass(frozen=True)
class ExplainOptions:
    """Options for explaining every image, validated before the first one is read."""

    predictor: Predictor
    targets: tuple[Target, ...]
    methods: tuple[str, ...]
    options: dict[str, Any]
    """Options of methods, for those that take them."""
    check: bool = False

    @property
    def name(self) -> str:
        """Part of the file name, unique for these options, so that no result overwrites another."""
        parts = [self.methods[0] if len(self.methods) == 1 else "compared"]
        parts += [re.sub(r"[^\w.+]+", "_", str(target)) for target in self.targets if target is not None]
        parts += [f"layer{layer}" for layer in (self.options.get("layer"),) if layer is not None]
        return "-".join(parts)[:_MAX_NAME]

    @property
    def used(self) -> list[Method]:
        """Entries of the methods in `METHODS`."""
        return [method_named(name) for name in self.methods]


def explain_options(
    predictor: Predictor,
    targets: Sequence[Target] = (),
    method: str | None = None,
    *,
    compare: bool = False,
    layer: int | None = None,
    check: bool = False,
) -> ExplainOptions:
    """Validate options for a network. Without targets, the predicted class is explained; `compare` runs all methods.

    Raises `UsageError` for an unknown class or method, an unsupported method, and an invalid layer.
    """
    if isinstance(predictor.network, EncoderDecoder):
        refuse_for_text(targets, check=check, compare=compare)
        name = text_method(method).name
        options = {} if layer is None else {"layer": _layer(predictor.network.decoder, layer, [name])}
        return ExplainOptions(predictor, (None,), (name,), options)
    foreign = isinstance(predictor.network, Foreign)
    network = of_foreign(predictor.network) if isinstance(predictor.network, Foreign) else predictor.network
    if compare and method is not None:
        raise UsageError("--compare draws all methods, --method names one", hint="one of the two")
    if compare:
        methods = tuple(name for name, one in METHODS.items() if one.any_network or isinstance(network, ViT))
        best = default_method(network)
        others = [name for name in methods if name != best and not (foreign and "layer" in _options(name))]
        methods = (best, *others)  # a layer of a foreign network needs a name
    else:
        methods = (method or default_method(network),)
        check_method(find_method(methods[0]), network)
    if predictor.classes:  # otherwise `explain` raises the error
        values = torch.zeros(1, len(predictor.classes))
        resolve_targets(targets or (None,), values, predictor.classes, predictor.output.predicted)
    options = {} if layer is None else {"layer": _layer(network, layer, methods)}
    return ExplainOptions(predictor, tuple(targets) or (None,), methods, options, check)


def _layer(network: Any, layer: int, methods: Sequence[str]) -> int:
    if not any("layer" in _options(name) for name in methods):
        able = ", ".join(name for name in METHODS if "layer" in _options(name))
        raise UsageError(f"'{methods[0]}' has no layer to choose", why="it reads all of them", hint=f"--method {able}")
    if isinstance(network, AnyNetwork):
        hint = "in Python vitral.explain(…, method='grad-cam', layer=NAME)"
        raise UsageError(f"there is no layer {layer}", why=network.why, hint=hint)
    depth = len(network.blocks)
    if not -depth <= layer < depth:
        raise UsageError(f"there is no layer {layer}", why=f"the network has {depth}", hint=f"--layer 0 … {depth - 1}")
    return layer


def _options(method: str) -> set[str]:
    return set(inspect.signature(method_named(method).run).parameters)


def explain_files(
    options: ExplainOptions, paths: Iterable[Path]
) -> Iterator[list[Heatmap] | TextExplanation | ImageError]:
    """Yield for each image its maps or explained text, or the error of an unreadable image.

    Maps are in the order of methods, then targets; with several targets, contrasts with the first one follow.
    """
    paths = list(paths)
    for start in range(0, len(paths), _BATCH_SIZE):
        part: dict[str, list[Heatmap] | TextExplanation | ImageError]
        part = {str(path): [] for path in paths[start : start + _BATCH_SIZE]}
        while good := [name for name, maps in part.items() if isinstance(maps, list)]:
            try:
                part.update(_explained(options, good))
                break
            except ImageError as error:  # retry the rest of the batch without it
                part[error.name] = error
        yield from (part[str(path)] for path in paths[start : start + _BATCH_SIZE])


def _explained(
    options: ExplainOptions, names: list[str]
) -> Mapping[str, list[Heatmap]] | Mapping[str, TextExplanation]:
    if isinstance(options.predictor.network, EncoderDecoder):
        texts = explain_texts(options.predictor, names, options.methods[0], batch_size=_BATCH_SIZE, **options.options)
        return dict(zip(names, texts, strict=True))
    heatmaps: dict[str, list[Heatmap]] = {name: [] for name in names}
    for method in options.methods:
        own = {key: value for key, value in options.options.items() if key in _options(method)}
        if options.check:
            own["check"] = True
        maps = explain(options.predictor, names, options.targets, method=method, batch_size=_BATCH_SIZE, **own)
        count = len(options.targets)
        for i, name in enumerate(names):
            heatmaps[name] += with_contrasts(maps[i * count : (i + 1) * count])
    return heatmaps


def with_contrasts(maps: Sequence[Heatmap]) -> list[Heatmap]:
    """Maps of one image by one method, followed by contrasts of the first with each other class.

    Maps of a routing method do not depend on the class, so they have no contrasts.
    """
    others = [one for one in maps[1:] if one.target != maps[0].target and not METHODS[one.method].routing]
    return [*maps, *(contrast(maps[0], one) for one in others)]


def files_for(paths: Sequence[Path], options: ExplainOptions, out: str | None, folder: Path) -> list[Path]:
    """Output file of each image: in `out`, a folder or (for one image) a file, by default in `folder`.

    Images with the same name in several folders are numbered. Raises `UsageError` for a file with another suffix.
    """
    if out and not Path(out).is_dir() and Path(out).suffix.lower() in (*SUFFIXES, *_OTHER_FILES):
        file = check_suffix(out)
        if len(paths) > 1:
            why = f"{len(paths)} images were given"
            raise UsageError("one file is for one image", where=out, why=why, hint=f"--out {file.with_suffix('')}")
        return [file]
    taken: dict[str, str] = {}  # in lower case, because Windows and macOS take Cat and cat for one name
    for path in paths:
        names = (path.stem, *(f"{path.stem}-{number}" for number in range(2, len(paths) + 2)))
        name = next(name for name in names if name.lower() not in taken)
        taken[name.lower()] = name
    return [(Path(out) if out else folder) / f"{name}-{options.name}.png" for name in taken.values()]
