"""Select the method and the classes to explain by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature

import torch
from torch import Tensor, nn

from vitral.errors import UsageError, nearest, unknown
from vitral.explanation.methods import BUILT_IN, METHODS, TEXT_METHODS, Method
from vitral.explanation.methods.any_network import AnyNetwork
from vitral.kinds import keywords, kinds_of
from vitral.model import ViT

DEFAULT = "fullgrad+"
"""Best of the methods that need few passes, by the tables of docs/explain-evidence.md. RISE is not significantly
better, and takes 90 times as long.
"""
WITHOUT_ATTENTION = "grad-cam"
"""Default for vitral's networks without attention: ResNets, and foreign networks of which a layer is selected."""

Target = int | str | None
"""A class by number or by name; None is the predicted class."""


def _kinds() -> dict[str, object]:
    """Return the type of each option of the built-in methods; several types if methods differ."""
    kinds: dict[str, object] = {"grid": tuple[int, int] | None}
    for method in BUILT_IN.values():
        for name, one in signature(method.run).parameters.items():
            if one.kind is one.KEYWORD_ONLY:
                kinds[name] = kinds.get(name, kinds_of(method.run)[name]) | kinds_of(method.run)[name]
    return kinds


METHOD_OPTIONS = keywords(_kinds())
"""Options of the built-in methods, for the signature of `vitral.explain`."""


def default_method(network: nn.Module, options: Mapping[str, object] | None = None) -> str:
    """Default method: the best one, or Grad-CAM for a ResNet.

    For a network of another library it is Grad-CAM if you select a layer, otherwise input × gradient.
    """
    if isinstance(getattr(network, "_orig_mod", network), ViT):
        return DEFAULT
    if isinstance(network, AnyNetwork):
        return WITHOUT_ATTENTION if "layer" in (options or {}) else "input-gradient"
    return WITHOUT_ATTENTION


def find_method(name: str) -> Method:
    """Look up a method; `UsageError` with the nearest names."""
    if name in TEXT_METHODS:
        why = "it is for networks that read text"
        raise UsageError(f"'{name}' cannot explain this network", why=why, hint=f"--method {DEFAULT}")
    if name not in METHODS:
        raise unknown("method", name, METHODS, hint=f"--method {DEFAULT}")
    return METHODS[name]


def check_method(method: Method, network: nn.Module) -> None:
    """Refuse a method that needs attention for a network that has none."""
    if method.any_network or isinstance(getattr(network, "_orig_mod", network), ViT):
        return
    able = ", ".join(name for name, one in METHODS.items() if one.any_network)
    what = f"'{method.name}' cannot explain this network"
    if isinstance(network, AnyNetwork):
        raise UsageError(
            what, why=f"it needs attention; {network.why}", hint=f"choose one of these with method=: {able}"
        )
    raise UsageError(
        what, why=f"{type(network).__name__} has no attention", hint=f"choose one of these with --method: {able}"
    )


def check_options(method: Method, options: Mapping[str, object]) -> None:
    """Refuse an option that the method does not have."""
    known = [name for name, one in signature(method.run).parameters.items() if one.kind is one.KEYWORD_ONLY]
    if bad := next((name for name in options if name not in known), None):
        if not known:
            raise UsageError(f"'{method.name}' has no option '{bad}'", why="it has none")
        raise unknown(f"option of '{method.name}'", bad, known)


def resolve_targets(
    targets: Sequence[Target],
    probabilities: Tensor,
    classes: Sequence[str],
    predicted_of: Callable[[Tensor], Tensor] = lambda values: values.argmax(1),
) -> Tensor:
    """Class numbers (B, T); None becomes the predicted class of each image, by `predicted_of`."""
    predicted = predicted_of(probabilities) if None in targets else probabilities.new_zeros(len(probabilities)).long()
    return torch.stack(
        [predicted if t is None else torch.full_like(predicted, _number(t, classes)) for t in targets], dim=1
    )


def _number(target: int | str, classes: Sequence[str]) -> int:
    if isinstance(target, str) and target in classes:
        return list(classes).index(target)
    if isinstance(target, str):
        # Among classes that are called by numbers, a number is a name: 0 must not explain the class 1.
        numbered = all(name.isdigit() for name in classes)
        if numbered or not (target.isascii() and target.isdigit()):
            raise unknown("class", target, classes, hint=f"--target {(nearest(target, classes) or classes)[0]}")
    if not 0 <= int(target) < len(classes):
        raise UsageError(f"there is no class {target}", why=f"the network has {len(classes)}, numbered from 0")
    return int(target)
