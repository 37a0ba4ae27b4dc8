"""From images and class names to heat maps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vitral.device import plain_modes
from vitral.errors import UsageError
from vitral.explanation.faithfulness import check_faithfulness
from vitral.explanation.heatmap import Heatmap, Heatmaps
from vitral.explanation.methods.method import quiet
from vitral.explanation.methods.select import (
    METHOD_OPTIONS,
    Target,
    check_method,
    check_options,
    default_method,
    find_method,
    resolve_targets,
)
from vitral.explanation.subject import subject_of
from vitral.explanation.texts import explain_texts, refuse_for_text
from vitral.inference.loading import load
from vitral.inference.outputs.output import require_classes
from vitral.inference.predictor import Predictor
from vitral.kinds import checked


@partial(checked, but=("model", "images"), options=METHOD_OPTIONS, others=True)  # `subject_of` and `expand` check
@plain_modes()
def explain(
    model: str | Path | Predictor | nn.Module,
    images: Any,
    target: Target | Sequence[Target] = None,
    *,
    method: str | None = None,
    batch_size: int = 8,
    check: bool = False,
    **options: Any,
) -> Heatmaps:
    """Compute attribution maps: which parts of an image a prediction depends on.

    A module of timm, torchvision or transformers is converted to a network of vitral. Modules that vitral cannot
    convert, and modules for which `layer` is a name, are used as they are. They support only gradients of the input,
    occlusion, RISE, and Grad-CAM of that layer. If the layer returns tokens, `prefix` is the number of tokens before
    the patches. Maps of methods that use
    no layer have a `grid` of (rows, columns), by default about 14 on the short side. The module is not changed.

    A predictor that reads text gets a map for each character of each text, in order. The `label` of a map is the
    character.

    Args:
        model: A run folder or other weights, as `vitral.load` reads them, a predictor, or a module.
        images: One or many: paths, encoded files, PIL images, or uint8 pixels. A module of your own takes standardized
            tensors (B, C, H, W) or (C, H, W).
        target: A class by name or number, several of them, or None for the predicted class.
        method: Name of the method, such as `fullgrad+`, `legrad`, or `rise` (docs/explain-methods.md lists all).
            The default for a ViT is `fullgrad+`, the best of the fast methods, otherwise one that needs no attention.
        batch_size: Images that are computed together.
        check: Measure how faithful each map is (`checks` of the map). This takes (40 + 3 · targets) · 26 forward passes
            per image: 1,118 for one target.
        options: Options of the method, such as `layer` or `discard`.

    Returns:
        A list of maps: for each image one per target, in this order.

    Raises:
        UsageError: The class, method, option or layer is not known, or the network does not support the method.
        ImageError: An image is not readable.

    Example:
        (heatmap,) = vitral.explain("runs/photos", "cat.jpg")
        heatmap.save("why.png")
    """
    model = load(model) if isinstance(model, str | Path) else model
    targets = [target] if target is None or isinstance(target, int | str) else list(target)
    if isinstance(model, Predictor) and model.output.sequence:
        refuse_for_text(targets, check=check)
        texts = explain_texts(model, images, method, batch_size=batch_size, **options)
        return Heatmaps(one for text in texts for one in text.maps)
    grid = options.pop("grid", None)
    subject = subject_of(model, images, options.get("layer"), grid)
    network: Any = subject.network
    method = method or default_method(network, options)
    entry = find_method(method)
    check_method(entry, network)
    check_options(entry, options)
    if subject.classes is not None and not subject.classes:
        raise UsageError("this network has no classes to explain", why="it ends in features", hint="train a head on it")
    if check and subject.predictor is not None:
        require_classes(subject.predictor.output, "a check of faithfulness", "leave out the check")
    prepared, pixels, names = subject.images(images)
    heatmaps = Heatmaps()
    with quiet(network):
        for start in range(0, len(prepared), batch_size):
            part = slice(start, start + batch_size)
            batch = subject.standardized(prepared[part])
            with torch.no_grad():
                probabilities = subject.values(network(batch).float()).cpu()
            classes = subject.names(probabilities.shape[1])
            numbers = resolve_targets(targets, probabilities, classes, subject.predicted)
            numbers = numbers.to(batch.device)
            result = entry.run(network, batch, numbers, **options)
            maps = result.values
            checks = check_faithfulness(network, batch, numbers, entry, maps=result, **options) if check else None
            heatmaps += [
                Heatmap(
                    maps[i, t].numpy().astype(np.float32),
                    int(numbers[i, t]),
                    classes[int(numbers[i, t])],
                    float(probabilities[i, numbers[i, t]]),
                    method,
                    pixels[start + i],
                    names[start + i],
                    checks[i * len(targets) + t] if checks else {},
                    text=subject.text(float(probabilities[i, numbers[i, t]])),
                )
                for i in range(len(batch))
                for t in range(len(targets))
            ]
    return heatmaps
