"""FullGrad+: input × gradient of every layer, and bias × gradient, with LibraGrad's backward pass.

Sources: Mehri et al., CVPR 2025, arXiv 2411.16760; FullGrad: Srinivas & Fleuret, NeurIPS 2019, arXiv 1905.00780.

The value of a token is Σ_l Σ_c x_l ∂y/∂x_l over the tokens x_l that enter each block, and Σ_c b ∂y/∂z for each bias b
of a layer whose output z has a place for each token: the blocks, the final norm, a MAP head's keys and values. The
tokens after the last block are not counted: where the class token is read, theirs would be zero.

The promise is FullGrad's: input × gradient at the first block, where class token and positions are in the tokens, and
bias × gradient of everything behind it, the head too, add up to the logit. With LibraGrad they do, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from vitral.explanation.capture import capture, plain, wide
from vitral.explanation.libra import libra as balanced
from vitral.explanation.methods.gradients import block_inputs, gradients_of
from vitral.explanation.methods.method import Maps, Method, patches_of
from vitral.model import ViT

Terms = list[tuple[str, Tensor]]


@torch.enable_grad()
def fullgrad(model: ViT, images: Tensor, targets: Tensor, *, libra: bool = True, biases: bool = True) -> Maps:
    """Maps (B, T, rows, columns), signed; without `libra` by the plain gradient, without `biases` of tokens alone.

    Completeness is |Σ of all contributions − logit| / |logit|, biases included.
    """
    network = plain(model)
    with (
        capture(network, attention=False),
        balanced(network) if libra else nullcontext(),
        block_inputs(network) as inputs,
        bias_terms(network) as terms,
    ):
        logits = network(images)
    values, sums = [], []
    for gradients in gradients_of(logits, targets, inputs):
        products = [
            (x.detach().double() * one.double()).sum(-1) for x, one in zip(inputs, gradients, strict=True)
        ]  # (B, N) each
        per_token, all_of_them = torch.stack(products).sum(0), products[0].sum(1)
        for name, term in terms:
            all_of_them = all_of_them + term.sum(1)
            if biases and name.startswith(("blocks.", "norm", "attn_pool.kv")):
                per_token[:, : term.shape[1]] += term
        terms.clear()
        values.append(per_token)
        sums.append(all_of_them)
    promised = logits.detach().double().gather(1, targets)
    missing = (torch.stack(sums, dim=1) - promised).abs() / promised.abs().clamp_min(torch.finfo(torch.float).tiny)
    return Maps(patches_of(torch.stack(values, dim=1), network, images).float().cpu(), missing.float().cpu())


@contextmanager
def bias_terms(model: nn.Module) -> Iterator[Terms]:
    """What each bias contributes. Every backward pass through what ran while this was open adds, for each module, its
    name and Σ_c bias × gradient at its output, (B, places), in double precision; one place where the output is (B, C).
    """
    terms: Terms = []
    with ExitStack() as undo:
        for name, module in model.named_modules():
            if isinstance(getattr(module, "bias", None), Tensor):
                undo.callback(module.register_forward_hook(_watching(name, terms)).remove)
        yield terms


def _watching(name: str, terms: Terms) -> Any:
    def keep(module: nn.Module, _: object, output: Tensor) -> None:
        bias: Any = module.bias
        axis = 1 if isinstance(module, nn.Conv2d | nn.GroupNorm) else -1

        def add(gradient: Tensor) -> None:
            term = (wide(gradient).movedim(axis, -1) @ wide(bias.detach())).double()
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
