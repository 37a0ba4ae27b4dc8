"""The model to explain, and its images: a predictor, a network of vitral, or any module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vitral.errors import UsageError, WeightsError, type_of
from vitral.explanation.methods.any_network import AnyNetwork
from vitral.inference.inputs import expand
from vitral.inference.loading import load
from vitral.inference.predictor import Predictor
from vitral.model import BiT, EncoderDecoder, Foreign, ViT
from vitral.model.settings import check_head
from vitral.weights.in_memory import names_of, unwrapped
from vitral.weights.load import read


@dataclass(frozen=True, eq=False)
class Subject:
    """A network to explain, with its preprocessing and classes, if known."""

    network: nn.Module
    classes: Sequence[str] | None = None
    """Class names; None if only the first output shows the number of classes."""
    predictor: Predictor | None = None
    """Prepares images; None if images are standardized tensors."""

    def images(self, given: object) -> tuple[Tensor, list[np.ndarray], list[str]]:
        """Tensors for `standardized`, uint8 images for display, and names."""
        if self.predictor is not None:
            return _prepared(self.predictor, given)
        if not isinstance(given, Tensor) or given.ndim not in (3, 4):
            got = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            why = f"the preprocessing of this module is not known, and it got {got}"
            raise UsageError("images for this network are standardized tensors (B, C, H, W)", why=why)
        images = given[None] if given.ndim == 3 else given
        if not len(images):
            raise UsageError("there is no image to explain")
        if not images.isfinite().all():
            raise UsageError("images hold NaN or infinite values", hint="torch.nan_to_num")
        if images.is_inference():  # made under `torch.inference_mode`: no gradients
            images = images.clone()
        return images, [to_pixels(image) for image in images], [f"image {i}" for i in range(len(images))]

    def standardized(self, images: Tensor) -> Tensor:
        """Standardize images, and move them to the network's device and dtype."""
        parameter = next(self.network.parameters(), images)
        if self.predictor is not None:
            images = self.predictor.preprocessing.standardize(images.to(parameter.device))
        return images.to(parameter.device, parameter.dtype)

    def values(self, logits: Tensor) -> Tensor:
        """Values of a prediction, such as probabilities, from logits (B, K)."""
        return logits.softmax(1) if self.predictor is None else self.predictor.output.values(logits)

    def predicted(self, values: Tensor) -> Tensor:
        """Number of the output (B,) that is explained by default, from values (B, K)."""
        return values.argmax(1) if self.predictor is None else self.predictor.output.predicted(values)

    def text(self, value: float) -> str:
        """A predicted value as text; empty for a probability."""
        return "" if self.predictor is None else self.predictor.output.text(value)

    def names(self, count: int) -> Sequence[str]:
        """Class names for `count` logits."""
        inner = self.network.inner if isinstance(self.network, AnyNetwork) else self.network
        return names_of(inner, count) if self.classes is None else self.classes


def subject_of(
    model: Predictor | nn.Module, images: object, layer: int | str | None, grid: tuple[int, int] | None
) -> Subject:
    """The network that is explained for `model`.

    A module of timm, torchvision or transformers is converted to a network of vitral if possible. It is used as it is
    if not, or if `layer` is a name or a `grid` is given.
    """
    named = isinstance(layer, str) or grid is not None
    if isinstance(model, Predictor):
        check_head(model.network, len(model.classes))
        if isinstance(model.network, Foreign):
            return Subject(of_foreign(model.network, grid), model.classes, model)
        network: nn.Module = AnyNetwork(model.network, grid) if named else model.network
        return Subject(network, model.classes, model)
    given: object = model
    if not isinstance(given, nn.Module):
        hint = "vitral.explain(vitral.load('runs/photos'), images)"
        raise UsageError(f"cannot explain {type_of(given)}, only a network", hint=hint)
    module = unwrapped(model)
    if isinstance(module, EncoderDecoder):
        why = "its texts need the characters of its tokens, which a predictor has"
        raise UsageError("a network that reads text is explained by a predictor", why=why, hint="vitral.load(…)")
    if isinstance(module, Foreign):
        return Subject(of_foreign(module, grid), tuple(map(str, range(module.config.classes))))
    if isinstance(module, ViT | BiT):
        check_head(module, module.config.classes)
        classes = tuple(map(str, range(module.config.classes)))
        return Subject(AnyNetwork(module, grid) if named else module, classes)
    if named:
        return Subject(AnyNetwork(module, grid))
    if not isinstance(images, Tensor):
        predictor = _loaded(module)
        return Subject(predictor.network, predictor.classes, predictor)
    try:
        loaded = read(module)
    except WeightsError as reason:
        return Subject(AnyNetwork(module, why=reason.why or reason.what))
    device = next(module.parameters()).device
    return Subject(loaded.build().to(device), loaded.weights.classes)


def of_foreign(network: Foreign, grid: tuple[int, int] | None = None) -> AnyNetwork:
    """A network trained from another library, by the names of its own layers."""
    return AnyNetwork(network.body, grid, f"{network.config.source} is used as it is, by the names of its layers")


def _loaded(module: nn.Module) -> Predictor:
    try:
        return load(module, precision="fp32")
    except WeightsError as reason:
        what = "images for this network are standardized tensors (B, C, H, W)"
        raise UsageError(what, why=f"vitral cannot prepare them: {reason.why}") from reason


def _prepared(predictor: Predictor, given: object) -> tuple[Tensor, list[np.ndarray], list[str]]:
    items = list(expand(given))
    if not items:
        raise UsageError("there is no image to explain")
    images = torch.stack([predictor.prepare(item.image, item.name) for item in items])
    return images, [image.permute(1, 2, 0).numpy() for image in images], [item.name for item in items]


def to_pixels(image: Tensor) -> np.ndarray:
    """A standardized image (C, H, W) as uint8 (H, W, C), its minimum as 0 and its maximum as 255."""
    low, high = image.min(), image.max()
    return ((image - low) / (high - low).clamp_min(1e-12) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
