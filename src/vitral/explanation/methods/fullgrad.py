"""FullGrad+: input × gradient of every layer plus bias × gradient, with LibraGrad's backward pass.

Sources: Mehri et al., CVPR 2025, arXiv 2411.16760; FullGrad: Srinivas & Fleuret, NeurIPS 2019, arXiv 1905.00780.

The value of a token is Σ_l Σ_c x_l ∂y/∂x_l over the input tokens x_l of each block, plus Σ_c b ∂y/∂z for each bias b of
a layer whose output z has one vector per token: the blocks, the final norm, keys and values of a MAP head. Tokens after
the last block do not count: if the head reads the class token, their gradient is zero.

It is complete as FullGrad is: input × gradient at the first block, where tokens include class token and positions, plus
bias × gradient of all later layers with the head, is the logit. With LibraGrad this holds up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.device import dot_float64
from vitral.explanation.capture import capture, require_vit, wide
from vitral.explanation.libra import libra_backward
from vitral.explanation.methods.gradients import block_inputs, gradients_of
from vitral.explanation.methods.method import Maps, Method, patches_of
from vitral.model import ViT

Terms = list[tuple[str, Tensor]]


@torch.enable_grad()
def fullgrad(model: ViT, images: Tensor, targets: Tensor, *, libra: bool = True, biases: bool = True) -> Maps:
    """Signed maps (B, T, rows, columns). Without `libra`, by the plain gradient; without `biases`, of tokens only.

    Completeness is |Σ of all contributions − logit| / |logit|, including biases.
    """
    network = require_vit(model)
    with (
        capture(network, attention=False),
        libra_backward(network) if libra else nullcontext(),
        block_inputs(network) as inputs,
        bias_terms(network) as terms,
    ):
        logits = network(images)
    values, sums = [], []
    for gradients in gradients_of(logits, targets, inputs):
        products = [dot_float64(x.detach(), one) for x, one in zip(inputs, gradients, strict=True)]  # (B, N) each
        values.append(token_values(products, terms if biases else []))
        sums.append(sum((term.sum(1) for _, term in terms), start=products[0].sum(1)))
        terms.clear()
    expected = logits.detach().cpu().double().gather(1, targets.cpu())
    error = (torch.stack(sums, dim=1) - expected).abs() / expected.abs().clamp_min(torch.finfo(torch.float).tiny)
    return Maps(patches_of(torch.stack(values, dim=1), network, images).float(), error.float())


def token_values(products: Sequence[Tensor], terms: Terms) -> Tensor:
    """Values (B, N) of the tokens: products of tokens and gradients (B, N) for each block, and the terms of biases of
    layers whose output has one vector per token.
    """
    per_token = torch.stack(list(products)).sum(0)
    for name, term in terms:
        if name.startswith(("blocks.", "norm", "attn_pool.kv")):
            per_token = per_token + F.pad(term, (0, per_token.shape[1] - term.shape[1]))
    return per_token


@contextmanager
def bias_terms(model: nn.Module, dtype: torch.dtype = torch.double) -> Iterator[Terms]:
    """Record the contributions of biases in backward passes through a forward pass in the `with` block.

    Each backward pass appends for each module its name and Σ_c bias × gradient of its output, (B, tokens), as `dtype`;
    float64 on the CPU, since Apple GPUs have none. An output (B, C) counts as one token.
    """
    terms: Terms = []
    with ExitStack() as undo:
        for name, module in model.named_modules():
            if isinstance(getattr(module, "bias", None), Tensor):
                undo.callback(module.register_forward_hook(_recording(name, terms, dtype)).remove)
        yield terms


def _recording(name: str, terms: Terms, dtype: torch.dtype) -> object:
    def keep(module: nn.Module, _: object, output: Tensor) -> None:
        bias: Any = module.bias
        axis = 1 if isinstance(module, nn.Conv2d | nn.GroupNorm) else -1

        def add(gradient: Tensor) -> None:
            term = wide(gradient).movedim(axis, -1) @ wide(bias.detach())
            term = term.cpu().double() if dtype == torch.double else term.to(dtype)
            terms.append(
                (name, term[:, None] if term.ndim == 1 else term.reshape(len(term), -1, term.shape[-1]).sum(1))
            )

        if output.requires_grad:
            output.register_hook(add)

    return keep


FULLGRAD = Method(
    "fullgrad+",
    fullgrad,
    "FullGrad+ with LibraGrad",
    "Mehri et al., arXiv 2411.16760; Srinivas & Fleuret, 1905.00780",
    signed=True,
)
