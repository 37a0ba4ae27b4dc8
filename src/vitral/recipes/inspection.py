"""`vitral inspect`: which network, which pictures, and the page; what is measured is `explanation.inspect`'s."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup
from torch import Tensor, nn

from vitral.data import DataSet, Split
from vitral.data import load as load_data
from vitral.data.dataset import some
from vitral.data.transforms import Preprocessing
from vitral.device import choose, seeded
from vitral.errors import DataError, ImageError, UsageError, VitralError
from vitral.evaluation import figures
from vitral.explanation.drawing_inspect import Theme
from vitral.explanation.figure7 import Prefix
from vitral.explanation.inspect import Inspection, Panel, look, worked_example
from vitral.explanation.methods import METHODS
from vitral.model import BiT, BiTConfig, config, network
from vitral.predict import Predictor, load
from vitral.recipes.run_data import own_data
from vitral.training.run import RunFolder
from vitral.weights.files import write_text
from vitral.weights.references import is_weights

PICTURES = 128
"""As many as the paper's Figure 11 averages over."""


def inspect(
    model: str | Path | Predictor | nn.Module,
    data: str | Path | Tensor | None = None,
    *,
    split: str | None = None,
    pictures: int = PICTURES,
    layers: Sequence[int] | None = None,
    prefix: Prefix = "drop",
    components: int = 28,
    out: str | Path | None = None,
    data_root: str | Path = "data",
    device: str = "auto",
    precision: str = "fp32",
    progress: Callable[[int], None] | None = None,
) -> Inspection:
    """Look inside a network: Figure 7 of the paper and its relatives, as numbers, drawings and a page.

    `model` is a run folder, a weights file, `timm:NAME`, `hf:ORG/NAME`, a name such as "S/16" (then with random
    weights), a predictor or a module. `data` is a set of pictures as everywhere, by default the run's own; of it
    `pictures` are taken, evenly spread over `split` (by default val, else test, else train). With a module it is a
    tensor of standardised pictures (B, C, H, W). Without pictures only what the weights tell is shown, and a note says
    so. With `out`, `inspect.html`, `inspect.json` and every figure as PNG and SVG are written there.

    `prefix` and `components` are those of `attention_distance` and `patch_filters`. Raises `UsageError` for a network
    without attention and for layers that there are not, `DataError` where no picture can be read.
    """
    if pictures < 1:
        raise UsageError(f"{pictures} pictures", why="there must be at least one", hint="--pictures 128")
    subject = _subject(model, device, precision)
    seen = _pictures(subject, data, split, pictures, data_root)
    found = look(
        subject.network, seen.images, seen.picture, name=subject.name, source=seen.source, prefix=prefix, layers=layers,
        components=components, notes=(*subject.notes, *seen.notes), progress=progress,
    )  # fmt: skip
    if out is not None:
        typed = "" if data is None or isinstance(data, Tensor) else f" --data {data}"
        write(found, Path(out), f"vitral inspect {subject.name}{typed}")
    return found


@dataclass(frozen=True, eq=False)
class _Subject:
    """The network to look into."""

    network: nn.Module
    preprocessing: Preprocessing | None
    name: str
    folder: RunFolder | None
    notes: tuple[str, ...] = ()


def _subject(model: str | Path | Predictor | nn.Module, device: str, precision: str) -> _Subject:
    if isinstance(model, nn.Module):
        return _Subject(_with_attention(model, "the module"), None, type(model).__name__, None)
    if isinstance(model, Predictor):
        folder = RunFolder(model.source)
        network = _with_attention(model.model, model.source)
        return _Subject(network, model.preprocessing, model.source, folder if folder.is_run() else None)
    text = str(model)
    if is_weights(text):
        return _subject(load(text, device=device, precision=precision), device, precision)
    return _named(text, device, precision)


def _named(name: str, device: str, precision: str) -> _Subject:
    """A network that has learned nothing yet."""
    try:
        shape = config(name)
    except UsageError as error:
        hint = "a run folder, a weights file, timm:NAME, hf:ORG/NAME, or a name of `vitral models`"
        raise UsageError(f"no such run, file or model: {name}", why=error.why or error.what, hint=hint) from error
    if isinstance(shape, BiTConfig):
        raise _no_attention(name)
    with seeded(0):
        built = network(shape)
    half = (0.5,) * shape.channels
    preprocessing = Preprocessing(shape.image, shape.channels, mean=half, std=half)
    machine = choose(device, precision, dim=shape.dim)
    predictor = Predictor(built, preprocessing, tuple(map(str, range(shape.classes))), machine=machine, source=name)
    note = "a name alone has random weights: this is what a network looks like before it has learned anything"
    return _Subject(predictor.model, preprocessing, name, None, (note,))


def _with_attention(network: nn.Module, name: str) -> nn.Module:
    if isinstance(network, BiT):
        raise _no_attention(name)
    return network


def _no_attention(name: str) -> UsageError:
    able = [method for method, one in METHODS.items() if one.any_network]
    hint = f"vitral summary {name}"  # of a name; what has no weights has no answers to explain
    if able and is_weights(name):
        hint = f"vitral explain {name} IMAGE --method {able[0]}"
    why = "figures are of patches, positions and attention, which Vision Transformers and hybrids have and ResNets lack"
    return UsageError("there is nothing of Figure 7 in a ResNet", where=name, why=why, hint=hint)


# Pictures -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Pictures:
    """What the network is shown: standardised, or None."""

    images: Tensor | None
    picture: np.ndarray | None = None
    source: str = ""
    notes: tuple[str, ...] = ()


def _pictures(
    subject: _Subject, data: str | Path | Tensor | None, split: str | None, count: int, data_root: str | Path
) -> _Pictures:
    if isinstance(data, Tensor):
        return _Pictures(data[:count], source=f"{min(count, len(data))} pictures")
    if subject.preprocessing is None:
        if data is not None:
            raise UsageError("a bare module does not say how it wants its pictures", hint="pass a tensor (B, C, H, W)")
        return _Pictures(None, notes=(_WEIGHTS_ALONE.format("pass data=TENSOR"),))
    if data is None:
        dataset, notes = _own(subject)
        if dataset is None:
            return _Pictures(None, notes=notes)
    else:
        dataset = load_data(data, root=data_root)
    chosen = split or next(name for name in ("val", "test", "train") if name in dataset.splits)
    return _sample(subject.preprocessing, dataset[chosen], count, f"{chosen} pictures of {dataset.source}")


_WEIGHTS_ALONE = "only what the weights tell is shown; for attention, norms and likeness of layers {}"


def _own(subject: _Subject) -> tuple[DataSet | None, tuple[str, ...]]:
    """The data of the run itself; without a run, or where they are no longer there, a note instead."""
    if subject.folder is None:
        return None, (_WEIGHTS_ALONE.format("there must be pictures: --data DATA"),)
    try:
        return own_data(subject.folder.read_plan()).dataset, ()
    except VitralError as error:
        why = f"the run's own pictures cannot be had ({error.what}{f': {error.where}' if error.where else ''})"
        return None, (why, _WEIGHTS_ALONE.format("there must be pictures: --data DATA"))


def _sample(preprocessing: Preprocessing, split: Split, count: int, source: str) -> _Pictures:
    """`count` pictures evenly spread over a split; those that cannot be read are left out and named."""
    if not len(split):
        raise DataError("there are no pictures to look at", where=source)
    indices = np.unique(np.linspace(0, len(split) - 1, min(count, len(split))).round().astype(int))
    pixels, bad = [], []
    for index in indices:
        try:
            pixels.append(preprocessing.geometry(split.image(int(index), preprocessing.channels)))
        except ImageError as error:
            bad.append(error)
    if not pixels:
        raise DataError("no readable picture to look at", where=source, why=f"{bad[0].name}: {bad[0].why}")
    notes = (f"left out, unreadable: {some(error.name for error in bad)}",) if bad else ()
    images = torch.stack(pixels)
    picture = images[0].permute(1, 2, 0).numpy()
    return _Pictures(preprocessing.standardise(images), picture, f"{len(images)} {source}", notes)


# The page -------------------------------------------------------------------------------------------------------------

_ON_PAGE = Theme(figures.INK, figures.MUTED, figures.LINE, figures.FIRST, figures.SECOND)


def folder_for(model: str) -> Path:
    """Where the page goes when nobody says: into the run, else `inspect/NAME` here."""
    if RunFolder(model).is_run():
        return Path(model) / "inspect"
    return Path("inspect") / (re.sub(r"[^\w.+-]+", "-", model).strip("-.") or "model")


def write(found: Inspection, folder: Path, command: str) -> Path:
    """Write `inspect.html`, `inspect.json` and the figures into a folder; the page's path."""
    found.save_drawings(folder)
    write_text(folder / "inspect.json", json.dumps(found.to_json(), allow_nan=False))
    page = folder / "inspect.html"
    write_text(page, render(found, command).encode("utf-8", errors="replace").decode())
    return page


def render(found: Inspection, command: str) -> str:
    """The page as text."""
    from vitral import __version__

    panels = [_on_page(panel) for panel in found.panels()]
    text = _environment().get_template("inspect.html.jinja").render(
        title=found.name, source=found.source, facts=found.facts, notes=found.notes, panels=panels,
        example=worked_example(), command=command, version=__version__,
    )  # fmt: skip
    return re.sub("[\x00-\x08\x0b-\x1f\x7f]", "�", text)  # HTML forbids them; names may hold them


def _on_page(panel: Panel) -> dict[str, Any]:
    """What the page shows of a panel; `width` in pixels, so that letters are of one size on all of them."""
    figure = panel.draw(_ON_PAGE)
    width = 100 * figure.get_figwidth()
    svg = figures._inline(figure, panel.name)
    return {"name": panel.name, "title": panel.title, "caption": panel.caption, "svg": svg, "width": round(width)}


def _environment() -> Environment:
    homes = {"report.css": "vitral.evaluation", "inspect.html.jinja": "vitral.explanation"}
    environment = Environment(
        loader=FunctionLoader(lambda name: resources.files(homes[name]).joinpath(name).read_text("utf-8")),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(svg=Markup)
    return environment
