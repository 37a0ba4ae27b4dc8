"""From pictures and class names to heat maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitral.data.transforms import Preprocessing
from vitral.errors import UsageError, unknown
from vitral.explanation.heatmap import Heatmap
from vitral.explanation.methods import METHODS, Maps, Method
from vitral.explanation.methods.method import quiet
from vitral.model import ViT
from vitral.predict import Picture, Predictor

DEFAULT = "fullgrad+"
"""The best of the methods that cost a few passes, in the tables of docs/explain.md; RISE is no better within its
interval, at some ninety times the time.
"""

Target = int | str | None
"""A class by number or by name; None is the class that the network answers."""


def explain(
    model: Predictor | nn.Module,
    pictures: Any,
    target: Target | Sequence[Target] = None,
    *,
    method: str | None = None,
    batch_size: int = 8,
    check: bool = False,
    **options: Any,
) -> list[Heatmap]:
    """Maps of what the network's answer rests on: one for each picture and each target, in that order.

    With a `Predictor`, `pictures` are what it predicts: paths, encoded files, PIL pictures, uint8 pixels, one or many.
    With a bare module they are standardised tensors (B, C, H, W) or (C, H, W). `target` is a class by name or number,
    several of them, or None for the class that is answered; no `method` is the best for the network. `options` are the
    method's own (`layer`, `discard`, …).
    With `check` each map's `checks` say whether it can be believed, for some hundred forward passes a picture.

    Raises `UsageError` for an unknown class or method and for a method that this network has no parts for, `ImageError`
    for a picture that cannot be read.
    """
    network: Any = model.model if isinstance(model, Predictor) else model
    method = method or default_method(network)
    chosen = find_method(method)
    check_method(chosen, network)
    classes = _class_names(model, network)
    if not classes:
        raise UsageError("this network has no classes to explain", why="it ends in features", hint="train a head on it")
    images, shown, names = _images(model, pictures)
    targets = [target] if target is None or isinstance(target, int | str) else list(target)
    found: list[Heatmap] = []
    with quiet(network):
        for start in range(0, len(images), batch_size):
            part = slice(start, start + batch_size)
            batch = _standardised(model, images[part], network)
            with torch.no_grad():
                probabilities = network(batch).float().softmax(1).cpu()
            numbers = resolve_targets(targets, probabilities, classes)
            numbers = numbers.to(batch.device)
            made = chosen.run(network, batch, numbers, **options)
            maps, checks = made.values, checked(network, batch, numbers, chosen, made, options) if check else None
            found += [
                Heatmap(
                    maps[i, t].numpy().astype(np.float32), int(numbers[i, t]), classes[int(numbers[i, t])],
                    float(probabilities[i, numbers[i, t]]), method, shown[start + i], names[start + i],
                    checks[i * len(targets) + t] if checks else {},
                )
                for i in range(len(batch))
                for t in range(len(targets))
            ]  # fmt: skip
    return found


def default_method(network: nn.Module) -> str:
    """The method that is used where none is named: the best, or for a ResNet the first that needs no attention."""
    if isinstance(getattr(network, "_orig_mod", network), ViT):
        return DEFAULT
    return next((name for name, one in METHODS.items() if one.any_network), DEFAULT)


def checked(
    network: nn.Module, images: Tensor, targets: Tensor, method: Method, maps: Maps, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """`faithfulness.believe` of maps that are there already."""
    from vitral.explanation.faithfulness import believe  # which needs this module

    return believe(network, images, targets, method, maps=maps, **options)


def find_method(name: str) -> Method:
    """The method of this name; `UsageError` with the nearest ones."""
    if name not in METHODS:
        raise unknown("method", name, METHODS, hint=f"--method {DEFAULT}")
    return METHODS[name]


def check_method(method: Method, network: nn.Module) -> None:
    """Refuse a method that needs attention for a network that has none."""
    if not method.any_network and not isinstance(getattr(network, "_orig_mod", network), ViT):
        able = ", ".join(name for name, one in METHODS.items() if one.any_network)
        why = f"{type(network).__name__} has no attention"
        raise UsageError(f"'{method.name}' cannot explain this network", why=why, hint=f"--method {able}")


def resolve_targets(targets: Sequence[Target], probabilities: Tensor, classes: Sequence[str]) -> Tensor:
    """Class numbers (B, T); None becomes the class that each picture is answered with."""
    answers = probabilities.argmax(1)
    return torch.stack(
        [answers if t is None else torch.full_like(answers, _number(t, classes)) for t in targets], dim=1
    )


def _number(target: int | str, classes: Sequence[str]) -> int:
    if isinstance(target, str) and target in classes:
        return list(classes).index(target)
    if isinstance(target, str) and not target.isdigit():
        raise unknown("class", target, classes)
    if not 0 <= int(target) < len(classes):
        raise UsageError(f"there is no class {target}", why=f"the network has {len(classes)}, numbered from 0")
    return int(target)


def _images(model: Predictor | nn.Module, pictures: Any) -> tuple[Tensor, list[np.ndarray], list[str]]:
    """Tensors for the network, uint8 pictures to show, and names."""
    if isinstance(model, Predictor):
        several = isinstance(pictures, Sequence) and not isinstance(pictures, str | bytes)
        given: list[Picture] = list(pictures) if several else [pictures]
        if not given:
            raise UsageError("there is no picture to explain")
        names = [
            str(one) if isinstance(one, str) or hasattr(one, "__fspath__") else f"image {i}"
            for i, one in enumerate(given)
        ]
        images = torch.stack([model.prepare(one, name) for one, name in zip(given, names, strict=True)])
        return images, [image.permute(1, 2, 0).numpy() for image in images], names
    images = pictures[None] if pictures.ndim == 3 else pictures
    if not len(images):
        raise UsageError("there is no picture to explain")
    return images, [_shown(image) for image in images], [f"image {i}" for i in range(len(images))]


def _shown(image: Tensor) -> np.ndarray:
    """A standardised picture (C, H, W) as uint8, from its own darkest to its brightest value."""
    low, high = image.min(), image.max()
    return ((image - low) / (high - low).clamp_min(1e-12) * 255).round().byte().permute(1, 2, 0).cpu().numpy()


def _standardised(model: Predictor | nn.Module, images: Tensor, network: nn.Module) -> Tensor:
    parameter = next(network.parameters())
    if not isinstance(model, Predictor):
        return images.to(parameter.device, parameter.dtype)
    preprocessing: Preprocessing = model.preprocessing
    return preprocessing.standardise(images.to(parameter.device)).to(parameter.dtype)


def _class_names(model: Predictor | nn.Module, network: Any) -> Sequence[str]:
    if isinstance(model, Predictor):
        return model.classes
    return tuple(map(str, range(network.config.classes)))
