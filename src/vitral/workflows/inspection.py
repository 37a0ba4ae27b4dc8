"""`vitral inspect`: load the network and the images, and write the page; `explanation.inspect` measures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from vitral.atomic import write_text
from vitral.data import DataSet, Split
from vitral.data import load as load_data
from vitral.data.checks.validate import left_out
from vitral.data.dataset import spread
from vitral.data.images.depth import leveled
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.options import DataOptions
from vitral.device import choose, plain_modes, seeded
from vitral.errors import DataError, ImageError, UsageError, VitralError, check_positive, unknown
from vitral.evaluation import figures
from vitral.evaluation.pages import environment, finished
from vitral.explanation.inspect.attention_distance import PREFIXES, Prefix
from vitral.explanation.inspect.drawing import Theme
from vitral.explanation.inspect.panels import Inspection, Panel, inspect_network, worked_example
from vitral.explanation.methods import METHODS
from vitral.inference.options import InferenceOptions
from vitral.inference.predictor import Predictor
from vitral.kinds import checked
from vitral.model import BiTConfig, EncoderDecoder, ModelConfig, Network, ViT, ViTConfig, config, network
from vitral.training.run_folder import RunFolder
from vitral.weights.in_memory import unwrapped
from vitral.weights.load import read
from vitral.weights.read.references import is_weights
from vitral.workflows.planning.run_data import load_run_data

IMAGES = 128
"""Default number of images, as in the paper's Figure 11."""


@checked
@plain_modes()
def inspect(
    model: str | Path | Predictor | nn.Module,
    data: str | Path | Tensor | None = None,
    *,
    split: str | None = None,
    images: int = IMAGES,
    layers: Sequence[int] | None = None,
    prefix: Prefix = "drop",
    components: int = 28,
    out: str | Path | None = None,
    data_root: str | Path = "data",
    device: str = "auto",
    precision: str = "fp32",
    progress: Callable[[int], None] | None = None,
) -> Inspection:
    """Inspect a network: Figure 7 of the ViT paper and related figures, as numbers, drawings and a page.

    Without images, only the figures of the weights are drawn, with a note.

    Args:
        model: A run folder, a weights file, `timm:NAME`, `hf:ORG/NAME`, a name such as "S/16" (with random weights), a
            predictor, or a module of vitral, timm, torchvision or transformers.
        data: A data set (default: the data of the run), or standardized images (B, C, H, W) as a tensor. A module of
            vitral needs a tensor, because its preprocessing is not known.
        split: The split to use (default: val, otherwise test, otherwise train).
        images: Number of images, evenly spread over the split.
        layers: Numbers of the layers to draw (default: all).
        prefix: As for `attention_distance`: `drop` leaves the class token and the registers out.
        components: Number of principal components of the patch embedding.
        out: Folder for `inspect.html`, `inspect.json`, and every figure as PNG and SVG.
        data_root: Folder for data sets that vitral downloads by name, such as `cifar10`.
        device: `auto`, `cpu`, `cuda` or `mps`.
        precision: `auto`, `bf16` or `fp32`.
        progress: Function that is called with the number of images that are done.

    Returns:
        An `Inspection`: the measurements as numbers. Its methods `figures` and `save_drawings` draw them.

    Raises:
        UsageError: The network has no attention, or no such layer.
        DataError: No image can be read.

    Example:
        found = vitral.inspect("runs/photos", images=4)
        print(found)
    """
    check_positive(images=(images, 128))
    if prefix not in PREFIXES:
        raise unknown("prefix", prefix, PREFIXES)
    subject = _subject(model, InferenceOptions(device, precision))
    seen = _images(subject, data if isinstance(data, Tensor) else DataOptions(data, split, data_root), images)
    inspection = inspect_network(
        subject.network,
        seen.images,
        seen.image,
        name=subject.name,
        source=seen.source,
        prefix=prefix,
        layers=layers,
        components=components,
        notes=(*subject.notes, *seen.notes),
        progress=progress,
    )
    if out is not None:
        typed = "" if data is None or isinstance(data, Tensor) else f" --data {data}"
        write(inspection, Path(out), f"vitral inspect {subject.name}{typed}")
    return inspection


@dataclass(frozen=True, eq=False)
class _Subject:
    """The network to inspect."""

    network: nn.Module
    preprocessing: Preprocessing | None
    name: str
    folder: RunFolder | None
    notes: tuple[str, ...] = ()


def _subject(model: str | Path | Predictor | nn.Module, options: InferenceOptions) -> _Subject:
    if isinstance(model, nn.Module) and not isinstance(unwrapped(model), Network):
        loaded = read(model)
        device_of = next(model.parameters()).device
        network = _with_attention(loaded.build().to(device_of), loaded.reference)
        return _Subject(network, loaded.weights.preprocessing, loaded.reference, None)
    if isinstance(model, nn.Module):
        return _Subject(_with_attention(model, "the module"), None, type(model).__name__, None)
    if isinstance(model, Predictor):
        folder = RunFolder(model.source)
        network = _with_attention(model.model, model.source)
        return _Subject(network, model.preprocessing, model.source, folder if folder.is_run() else None)
    text = str(model)
    if is_weights(text):
        return _subject(options.load(text).cast(), options)
    return _named(text, options)


def _named(name: str, options: InferenceOptions) -> _Subject:
    """Create an untrained network."""
    try:
        shape = config(name)
    except UsageError as error:
        hint = "a run folder, a weights file, timm:NAME, hf:ORG/NAME, or a name of `vitral models`"
        raise UsageError(f"no such run, file or model: {name}", why=error.why or error.what, hint=hint) from error
    if not isinstance(shape, ViTConfig):
        raise _no_attention(name, shape)
    with seeded(0):
        built = network(shape)
    half = (0.5,) * shape.channels
    preprocessing = Preprocessing(shape.image, shape.channels, mean=half, std=half)
    machine = choose(options.device, options.precision, dim=shape.dim)
    predictor = Predictor(
        built, preprocessing, tuple(map(str, range(shape.classes))), machine=machine, source=name
    ).cast()
    note = "a model name without weights means random weights: this network is untrained"
    return _Subject(predictor.model, preprocessing, name, None, (note,))


def _with_attention(network: nn.Module, name: str) -> nn.Module:
    if isinstance(network, EncoderDecoder):
        raise UsageError("cannot inspect a network that reads text", where=name, hint=f"vitral summary {name}")
    if isinstance(network, Network) and not isinstance(network, ViT):
        raise _no_attention(name, network.config)
    return network


def _no_attention(name: str, shape: ModelConfig) -> UsageError:
    resnet = isinstance(shape, BiTConfig)
    supported = [method for method, one in METHODS.items() if one.any_network and (resnet or method != "grad-cam")]
    hint = f"vitral summary {name}"  # an untrained network has no predictions to explain
    if supported and is_weights(name):
        hint = f"vitral explain {name} IMAGE --method {supported[0]}"
    kind = "a ResNet" if resnet else "a network of another library"
    whose = "a ResNet does not have" if resnet else "are those of vitral's ViT"
    why = f"the figures show patches, positions and attention, which {whose}"
    return UsageError(f"cannot inspect {kind}", where=name, why=why, hint=hint)


# Images -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Images:
    """Standardized images as input of the network, or None."""

    images: Tensor | None
    image: np.ndarray | None = None
    source: str = ""
    notes: tuple[str, ...] = ()


def _images(subject: _Subject, data: DataOptions | Tensor, count: int) -> _Images:
    if isinstance(data, Tensor):
        return _Images(data[:count], source=f"{min(count, len(data))} images")
    if subject.preprocessing is None:
        if data.data is not None:
            raise UsageError("the preprocessing of a bare module is unknown", hint="pass a tensor (B, C, H, W)")
        return _Images(None, notes=(_WEIGHTS_ONLY.format("pass data=TENSOR"),))
    if data.data is None:
        dataset, notes = _own(subject)
        if dataset is None:
            return _Images(None, notes=notes)
    else:
        dataset = leveled(load_data(data.data, root=data.data_root), subject.preprocessing.levels)
    chosen = data.split or next(name for name in ("val", "test", "train") if name in dataset.splits)
    return _sample(subject.preprocessing, dataset[chosen], count, f"{chosen} images of {dataset.source}")


_WEIGHTS_ONLY = "only figures of the weights; for attention, norms and similarity of layers {}"


def _own(subject: _Subject) -> tuple[DataSet | None, tuple[str, ...]]:
    """Load the run's own data; without a run, or if they are missing, return a note instead."""
    if subject.folder is None:
        return None, (_WEIGHTS_ONLY.format("add images: --data DATA"),)
    try:
        return load_run_data(subject.folder.read_plan()).dataset, ()
    except VitralError as error:
        why = f"the run's own images cannot be loaded ({error.what}{f': {error.where}' if error.where else ''})"
        return None, (why, _WEIGHTS_ONLY.format("add images: --data DATA"))


def _sample(preprocessing: Preprocessing, split: Split, count: int, source: str) -> _Images:
    """Read `count` images, evenly spread over a split; unreadable ones are left out and reported."""
    if not len(split):
        raise DataError("there are no images to inspect", where=source)
    split = split.with_levels(preprocessing.levels)
    pixels, bad = [], []
    for index in spread(len(split), count):
        try:
            pixels.append(preprocessing.geometry(split.image(int(index), preprocessing.channels)))
        except ImageError as error:
            bad.append(error)
    if not pixels:
        raise DataError("no readable image to inspect", where=source, why=f"{bad[0].name}: {bad[0].why}")
    notes = tuple(filter(None, [left_out([error.name for error in bad])]))
    images = torch.stack(pixels)
    image = images[0].permute(1, 2, 0).numpy()
    return _Images(preprocessing.standardize(images), image, f"{len(images)} {source}", notes)


# The page -------------------------------------------------------------------------------------------------------------

_ON_PAGE = Theme(figures.INK, figures.MUTED, figures.LINE, figures.FIRST, figures.SECOND)


def folder_for(model: str) -> Path:
    """Return the default folder of the page: RUN/inspect if it can be written, else inspect/NAME here."""
    if place := RunFolder(model).place_for("inspect"):
        return place
    return Path("inspect") / (re.sub(r"[^\w.+-]+", "-", model).strip("-.") or "model")


def write(inspection: Inspection, folder: Path, command: str) -> Path:
    """Write `inspect.html`, `inspect.json` and the figures into a folder, and return the path of the page."""
    inspection.save_drawings(folder)
    write_text(folder / "inspect.json", json.dumps(inspection.to_json(), allow_nan=False))
    page = folder / "inspect.html"
    write_text(page, render(inspection, command).encode("utf-8", errors="replace").decode())
    return page


def render(inspection: Inspection, command: str) -> str:
    """Render the page."""
    from vitral._version import __version__

    panels = [_on_page(panel) for panel in inspection.panels()]
    text = (
        environment("vitral.explanation.inspect")
        .get_template("page.html.jinja")
        .render(
            title=inspection.name,
            source=inspection.source,
            facts=inspection.facts,
            notes=inspection.notes,
            panels=panels,
            example=worked_example(),
            command=command,
            version=__version__,
        )
    )
    return finished(text)


def _on_page(panel: Panel) -> dict[str, object]:
    """Return the template variables of a panel; `width` in pixels, so that all panels have the same font size."""
    figure = panel.draw(_ON_PAGE)
    width = 100 * figure.get_figwidth()
    svg = figures.inline(figure, panel.name)
    return {"name": panel.name, "title": panel.title, "caption": panel.caption, "svg": svg, "width": round(width)}
