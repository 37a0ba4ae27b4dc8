"""Features of a network: the input of its head, or a vector for each patch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.data.images.preprocessing import Preprocessing
from vitral.device import Machine
from vitral.errors import UsageError
from vitral.model import BiT, EncoderDecoder, Foreign, Network, ViT
from vitral.model.modes import evaluating
from vitral.model.watched import pooled_queries


@torch.inference_mode()
def head_features(model: nn.Module, images: Tensor, preprocessing: Preprocessing, machine: Machine) -> Tensor:
    """Return the input of the head, (B, D) fp32 on the CPU, for uint8 pixels (B, C, H, W). The mode is restored."""
    return head_inputs(model, images, preprocessing, machine).cpu()


@torch.inference_mode()
def head_inputs(model: nn.Module, images: Tensor, preprocessing: Preprocessing, machine: Machine) -> Tensor:
    """`head_features` on the device of the network; images may also be floats from 0 to 255, which are changed."""
    if isinstance(model, EncoderDecoder):
        raise _reads_text()
    with evaluating(model), machine.autocast(), head_inputs_of(model) as inputs:
        pixels = preprocessing.standardize(images).to(next(model.parameters()).dtype)
        if isinstance(model, ViT) and model.config.dist_token and not model.config.classes:
            return model.pool(model.encode(pixels, num_queries=pooled_queries(model)))[:, 0].float()
        out = model(pixels)
        if isinstance(model, Foreign) and not inputs:
            why = "it does not end in a dense layer with an output for each class"
            raise UsageError(f"no features of {model.config.source}", why=why)
        return (inputs[0] if inputs else out).float()


@contextmanager
def head_inputs_of(model: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list that records the input of the head. It stays empty without a head: the output is the features."""
    recorded: list[Tensor] = []
    head = getattr(model, "head", None)
    handle = head.register_forward_pre_hook(lambda _, given: recorded.append(given[0])) if head is not None else None
    try:
        yield recorded
    finally:
        if handle:
            handle.remove()


@torch.inference_mode()
def patch_tokens(model: Network, images: Tensor, preprocessing: Preprocessing, machine: Machine) -> Tensor:
    """Return a vector for each patch, (B, rows × columns, D) fp32 on the CPU, for uint8 pixels (B, C, H, W).

    For a ViT: the patch tokens after the final norm, without class token, distillation token and registers. For a
    ResNet: the positions of the last feature map, after its norm.
    """
    if isinstance(model, EncoderDecoder):
        raise _reads_text()
    if isinstance(model, Foreign):
        why = "only its classes and the input of its head are known"
        raise UsageError(f"no patches of {model.config.source}", why=why, hint="vitral embed without --tokens")
    with machine.autocast():
        x = model.encode(preprocessing.standardize(images).to(next(model.parameters()).dtype))
        if isinstance(model, BiT):
            return F.relu(model.norm(x)).flatten(2).transpose(1, 2).float().cpu()
        x = x[:, model.config.prefix :]
        return (model.norm(x) if model.config.final_norm == "tokens" else x).float().cpu()


@torch.inference_mode()
def inner_tokens(model: Network, images: Tensor, preprocessing: Preprocessing, machine: Machine, layer: int) -> Tensor:
    """Return a vector for each patch after a block, (B, rows × columns, D) fp32 on the CPU, before the final norm.

    `layer` counts from 0, or from −1 for the last block. Raises `UsageError` for another block or network.
    """
    if not isinstance(model, ViT):
        raise UsageError(f"no layers of {type(model).__name__} to choose", why="only a ViT has blocks of one shape")
    with machine.autocast():
        (maps,) = model.features(preprocessing.standardize(images).to(next(model.parameters()).dtype), [layer])
    return maps.flatten(2).transpose(1, 2).float().cpu()


def _reads_text() -> UsageError:
    return UsageError("a network that reads text has no features of an image", hint="vitral predict RUN IMAGES")
