"""Project files: classes that a visitor taught in the browser, on the page of `vitral label --export`.

A project is a safetensors file, written by `web/teach/project.js`. Its head belongs to a built-in model, whose name and
hash it states. Metadata `vitral_project`, as JSON:

    format           1
    vitral           version that wrote the page
    model, weights   name of the built-in model, and "sha256:" with the hash of its tensors
    classes          K names
    temperature      divisor of the logits
    names            n names of images

Tensors: `head.weight` (K, D) and `head.bias` (K,) in fp32, absent before the first fit; `features` (n, D) in fp32;
`labels` and `groups` (n,) in int32. Optional are `thumbnails` (bytes,) in uint8, with `thumbnail_ends` (n,) in int32,
and `looks` (n × 1026,) in uint8, which find near-duplicates.

Features, labels and thumbnails are for the page, which opens the file again. The network needs the head only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitral import bounded
from vitral.errors import WeightsError
from vitral.model import ViTConfig
from vitral.weights import native
from vitral.weights.loaded import Loaded
from vitral.weights.native import Weights
from vitral.weights.read.references import BUILT_IN
from vitral.weights.read.source import Source, non_finite, open_source
from vitral.weights.report import Line, LoadReport
from vitral.wording import shown, some

NAME = "project"
"""Format of a network that is loaded from a project."""
KEY = "vitral_project"
"""Name of the project's JSON in the metadata."""
FORMAT = 1
MOST_CLASSES = 1000
MOST_IMAGES = 100_000
LONGEST_NAME = 255
"""Characters of the name of a class."""
_HEAD = ("head.weight", "head.bias")
_PAGE = {"features": torch.float32, "labels": torch.int32, "groups": torch.int32}
_THUMBNAILS = {"thumbnails": torch.uint8, "thumbnail_ends": torch.int32, "looks": torch.uint8}
_LOOK = 1026  # bytes: 32 × 32 pixels and two mean colors, as of `vitral.data.checks.near.thumbnail`
_KEPT = ("model", "positions", "license")  # of the origin of the built-in model
_WHAT = "damaged project file"


@dataclass(frozen=True, eq=False)
class Project:
    """A checked project, without its network."""

    model: str
    """Name of a built-in model."""
    weights: str
    """Hash of the tensors of that model, as `hash_of` returns it."""
    version: str
    """Version of vitral that wrote the page."""
    classes: tuple[str, ...]
    temperature: float
    images: int
    head: Mapping[str, Tensor]
    """`head.weight` (K, D) and `head.bias` (K,); empty before the first fit."""


def is_project(metadata: Mapping[str, str]) -> bool:
    """True for the metadata of a project file."""
    return KEY in metadata


def hash_of(weights: Weights) -> str:
    """Return "sha256:" and the hash of the tensors of a built-in model, which a project states."""
    return f"sha256:{native.digest(weights.state)}"


def built_in_weights(name: str) -> Weights:
    """Read a built-in model of the package."""
    file = BUILT_IN[name].file
    source = open_source(file)
    return native.from_metadata(file, source.tensors, source.metadata)


def load(source: Source, reference: str) -> Loaded:
    """Return the built-in model of a project with the project's head.

    Raises `WeightsError` for a file that is damaged, was not taught yet, or belongs to another model or version of it.
    """
    project = read(source)
    if not project.head:
        why = "no classes were taught when it was saved"
        hint = "on the page, give two classes three images each, and save it again"
        raise WeightsError("this project has no head yet", where=source.where, why=why, hint=hint)
    base = built_in_weights(project.model)
    if project.weights != hash_of(base):
        why = f"it was taught with '{project.model}' of vitral {project.version}, and this vitral has other weights"
        hint = f"pip install vitral=={project.version}, or teach it again on a page of this version"
        raise WeightsError("this project belongs to another model", where=source.where, why=why, hint=hint)
    width = base.state["head.weight"].shape[1]
    if project.head["head.weight"].shape[1] != width:
        why = f"its head reads {project.head['head.weight'].shape[1]:,} features, and the model has {width:,}"
        raise WeightsError(_WHAT, where=source.where, why=why)
    assert isinstance(base.config, ViTConfig), "built-in models are ViTs"
    weights = Weights(
        dataclasses.replace(base.config, classes=len(project.classes)),
        {**base.state, **project.head},
        base.preprocessing,
        project.classes,
        {**{name: base.trained[name] for name in _KEPT if name in base.trained}, "origin": source.where},
        {"task": "class", "temperature": project.temperature} if project.temperature != 1 else {},
    )
    scheme = base.trained.get("positions", Loaded.scheme)
    return Loaded(weights, _report(source, project, base), NAME, reference, scheme)


def _report(source: Source, project: Project, base: Weights) -> LoadReport:
    lines = [Line(name, tuple(one.shape), "loaded", name) for name, one in base.state.items() if name not in _HEAD]
    lines += [Line(name, tuple(one.shape), "loaded", name) for name, one in project.head.items()]
    rest = {name: one for name, one in source.tensors.items() if name not in _HEAD}
    lines += [Line(name, tuple(one.shape), "left out", None, "for the page") for name, one in rest.items()]
    note = f"a head for the built-in model '{project.model}', taught in a browser"
    return LoadReport(source.where, NAME, tuple(lines), notes=(note,))


def read(source: Source) -> Project:
    """Check the contents of a project file; `WeightsError` with the first fault."""
    try:
        header = bounded.parse(source.metadata[KEY])
        if not isinstance(header, dict):
            raise ValueError("its description is not a JSON object")
        if header.get("format") != FORMAT:
            raise ValueError(f"version {header.get('format')!r:.20} of the form; this vitral reads {FORMAT}")
        return _project(header, source.tensors)
    except ValueError as error:  # of bounded.parse, too
        if isinstance(error, WeightsError):
            raise
        hint = "save it on the page again"
        raise WeightsError(_WHAT, where=source.where, why=str(error), hint=hint) from error


def _project(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Project:
    """Build a project; `ValueError` with the first fault."""
    model, weights, version = (_text(header, name) for name in ("model", "weights", "vitral"))
    if model not in BUILT_IN:
        raise ValueError(f"it names the model '{model}'; built in are {', '.join(BUILT_IN)}")
    classes = _classes(header.get("classes"))
    temperature = header.get("temperature", 1.0)
    if type(temperature) not in (int, float) or not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"a temperature of {temperature!r:.20}")
    images = _check_images(header, tensors, len(classes))
    return Project(model, weights, version, classes, float(temperature), images, _head(tensors, len(classes)))


def _text(header: Mapping[str, Any], name: str) -> str:
    value = header.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= 100 or not value.isprintable():
        raise ValueError(f"its '{name}' is not a short text")
    return value


def _classes(names: Any) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise ValueError("its classes are not a list of names")
    if len(names) > MOST_CLASSES:
        raise ValueError(f"{len(names):,} classes; at most {MOST_CLASSES:,} are read")
    if bad := [one for one in names if not (0 < len(one) <= LONGEST_NAME and shown(one) == one.strip())]:
        raise ValueError(f"'{shown(bad[0][:40])}' cannot be the name of a class")
    if len(set(names)) < len(names):
        raise ValueError(f"two classes have the name '{next(one for one in names if names.count(one) > 1)}'")
    return tuple(names)


def _head(tensors: Mapping[str, Tensor], classes: int) -> Mapping[str, Tensor]:
    """Return the head, if there is one; `ValueError` for another shape. `load` checks that its values are finite."""
    found = {name: tensors[name] for name in _HEAD if name in tensors}
    if not found:
        return {}
    if len(found) < len(_HEAD):
        raise ValueError(f"it lacks {next(name for name in _HEAD if name not in found)}")
    if classes < 2:
        raise ValueError(f"a head for {classes} classes")
    weight, bias = found.values()
    if weight.dtype != torch.float32 or bias.dtype != torch.float32:
        raise ValueError(f"its head is {weight.dtype} and {bias.dtype}, not fp32".replace("torch.", ""))
    if weight.ndim != 2 or tuple(bias.shape) != (classes,) or len(weight) != classes:
        shapes = f"{tuple(weight.shape)} and {tuple(bias.shape)}"
        raise ValueError(f"its head has shapes {shapes}, for {classes} classes")
    return found


def _check_images(header: Mapping[str, Any], tensors: Mapping[str, Tensor], classes: int) -> int:
    """Return the number of images; `ValueError` for features, labels or thumbnails that do not fit together."""
    known = {*_HEAD, *_PAGE, *_THUMBNAILS}
    if strange := [name for name in tensors if name not in known]:
        raise ValueError(f"it has a tensor '{some(strange[:1])}', which no project has")
    thumbnails = any(name in tensors for name in _THUMBNAILS)
    for name, dtype in {**_PAGE, **(_THUMBNAILS if thumbnails else {})}.items():
        if name not in tensors:
            raise ValueError(f"it lacks {name}")
        if tensors[name].dtype != dtype or tensors[name].ndim != (2 if name == "features" else 1):
            kind = str(tensors[name].dtype).removeprefix("torch.")
            raise ValueError(f"its {name} are {kind} {tuple(tensors[name].shape)}")
    count, names = len(tensors["features"]), header.get("names")
    if count > MOST_IMAGES:
        raise ValueError(f"{count:,} images; at most {MOST_IMAGES:,} are read")
    lengths = {name: len(tensors[name]) for name in ("labels", "groups", "thumbnail_ends") if name in tensors}
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise ValueError("its names of images are not a list of texts")
    for name, length in {"names": len(names), **lengths}.items():
        if length != count:
            raise ValueError(f"{length:,} {name} for {count:,} images")
    labels = tensors["labels"]
    if count and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ValueError(f"labels from {int(labels.min())} to {int(labels.max())}, for {classes} classes")
    if non_finite({"features": tensors["features"]}):
        raise ValueError("features that are not finite")
    if thumbnails:
        _check_ends(tensors["thumbnail_ends"].long(), len(tensors["thumbnails"]))
        if len(tensors["looks"]) != _LOOK * count:
            raise ValueError(f"{len(tensors['looks']):,} bytes of looks for {count:,} images")
    return count


def _check_ends(ends: Tensor, total: int) -> None:
    """Raise `ValueError` unless the ends of the thumbnails rise to the number of bytes."""
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
    if int(starts[-1]) != total or bool((starts.diff() < 0).any()):
        raise ValueError("the lengths of its thumbnails are wrong")
