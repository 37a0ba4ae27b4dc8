"""Looking into a network while it computes, without changing what it computes.

    with capture(model) as seen:
        logits = model(images)
    seen.attention(0)                # (B, heads, N, N) of the first block
    seen.tokens[11]                  # (B, N, D) after the last one

Attention stays the fused kernel: queries and keys are taken where they enter it, and softmax(q kᵀ) is computed from
them when it is asked for, in fp32. Where whole maps would not fit, `reduce` is given each layer's attention as it
comes, and nothing is kept; `backward` is given what a layer's attention does for a logit as the backward pass comes by.
When the block ends, hooks, methods and settings are as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vitral.errors import UsageError
from vitral.model import ViT

Reduce = Callable[[int, Tensor], None]
"""Called with the layer's number and its attention (B, heads, N, N), detached; in fp32 unless `once` is asked for."""

Backward = Callable[[int, Tensor], None]
"""Called with the layer's number and A ⊙ ∂y/∂A of its attention A, (B, heads, N, N), in the network's precision."""

POOL = -1
"""The layer's number under which a MAP head's attention (B, heads, 1, N) is found."""


@dataclass
class Seen:
    """What was seen in one forward pass; of several passes the last. Layers count from 0; `POOL` is a MAP head."""

    layers: tuple[int, ...]
    prefix: int
    """Tokens before the patches."""
    grid: tuple[int, int] = (0, 0)
    """Rows and columns of patches."""
    q: dict[int, Tensor] = field(default_factory=dict)
    """(B, heads, N, d), as they enter the product: normalised and rotated."""
    k: dict[int, Tensor] = field(default_factory=dict)
    v: dict[int, Tensor] = field(default_factory=dict)
    mixed: dict[int, Tensor] = field(default_factory=dict)
    """(B, heads, N, d): attention × v, in the graph, before heads are joined."""
    tokens: dict[int, Tensor] = field(default_factory=dict)
    """(B, N, D) after each block; under `POOL` before the first one."""
    masks: dict[int, Tensor | None] = field(default_factory=dict)
    scales: dict[int, float] = field(default_factory=dict)

    def attention(self, layer: int) -> Tensor:
        """softmax(q kᵀ · scale) of a layer, (B, heads, N, N), in fp32 at least; in the graph where they are."""
        if layer not in self.q:
            raise UsageError(f"layer {layer} was not captured", why=f"captured: {', '.join(map(str, sorted(self.q)))}")
        return attention_of(self.q[layer], self.k[layer], self.masks[layer], self.scales[layer])

    def attention_gradient(self, layer: int, of_mixed: Tensor) -> Tensor:
        """∂y/∂attention (B, heads, N, N) fp32 from ∂y/∂mixed (B, heads, N, d): mixed = attention × v, so it is G vᵀ.

        The fused kernel never made the matrix, and need not have: this is exact.
        """
        return wide(of_mixed) @ wide(self.v[layer].detach()).transpose(-2, -1)


def attention_of(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(q kᵀ · scale), (B, heads, N, N) in fp32 at least."""
    return weights_of(wide(q), wide(k), mask, scale)


def weights_of(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(q kᵀ · scale), (B, heads, N, N) in the precision of q and k."""
    scores = (q * scale) @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(dim=-1)


def wide(x: Tensor) -> Tensor:
    """In fp32 at least."""
    return x if x.dtype == torch.float64 else x.float()


@contextmanager
def capture(
    model: nn.Module,
    layers: Sequence[int] | None = None,
    *,
    attention: bool = True,
    tokens: bool = False,
    graph: bool = False,
    reduce: Reduce | None = None,
    once: bool = False,
    backward: Backward | None = None,
    lean: bool = False,
) -> Iterator[Seen]:
    """Record what `model` computes while this is open: of `layers` (default all; negative ones count from the end).

    `attention` keeps q and k of each layer, `tokens` what each block gives. With `graph` tensors stay in the graph, so
    that gradients can be asked for, and v and attention × v are kept too. With `reduce` nothing is kept of attention:
    each layer's is computed, handed over and dropped. With `once` that is in the network's precision, and the network
    goes on with it instead of the fused kernel's result: faster, and the same up to rounding. `backward` is called in
    each backward pass, from the last layer to the first; there too the network goes on with the matrix;
    a gradient with respect to the first layer's `v` is the least that makes it come by all of them.

    The last block computes every token, unless `lean` lets it go on with those that the head reads: then its attention
    may have only their rows.

    Raises `UsageError` for a compiled or exported model, one without attention, and layers that there are not.
    """
    network = plain(model)
    numbers = _numbers(layers, len(network.blocks))
    seen = Seen(numbers, network.config.prefix)
    with ExitStack() as undo:
        undo.callback(setattr, network, "lean", network.lean)
        network.lean = network.lean and lean
        _watch_input(network, seen, undo, tokens, graph)
        parts: list[tuple[int, Any]] = [(i, network.blocks[i].attn) for i in numbers]
        if network.config.pool == "map":
            parts.append((POOL, network.attn_pool))
        if attention or graph or reduce or backward:
            for layer, part in parts:
                part.attend = _watching(part, layer, seen, graph, reduce, once, backward)
                undo.callback(delattr, part, "attend")
        if tokens:
            for layer in numbers:
                _watch_output(network.blocks[layer], layer, seen, undo, graph)
        yield seen


def plain(model: nn.Module) -> ViT:
    """The ViT that was passed; `UsageError` where it is none, or is compiled or exported."""
    if hasattr(model, "_orig_mod"):
        hint = "pass the network that was compiled: model._orig_mod"
        raise UsageError("cannot look into a compiled network", why="its parts are no longer called", hint=hint)
    if getattr(model, "_compiled_call_impl", None) is not None:
        hint = "load it again, or look inside before model.compile()"
        raise UsageError("cannot look into a compiled network", why="its parts are no longer called", hint=hint)
    if isinstance(model, torch.fx.GraphModule):
        hint = "pass the network that it was exported from"
        raise UsageError("cannot look into an exported network", why="its parts are gone", hint=hint)
    if not isinstance(model, ViT):
        raise UsageError(
            f"{type(model).__name__} has no attention to look at", why="it is no Vision Transformer",
            hint="methods for any network: input-gradient, integrated-gradients, smoothgrad, occlusion, rise",
        )  # fmt: skip
    return model


def _numbers(layers: Sequence[int] | None, depth: int) -> tuple[int, ...]:
    if layers is None:
        return tuple(range(depth))
    if bad := [layer for layer in layers if not -depth <= layer < depth]:
        raise UsageError(
            f"there is no layer {bad[0]}", why=f"the network has {depth}", hint=f"--layers 0 … {depth - 1}"
        )
    return tuple(sorted({layer % depth for layer in layers}))


def _watching(
    part: Any, layer: int, seen: Seen, graph: bool, reduce: Reduce | None, once: bool, backward: Backward | None
) -> Callable[..., Tensor]:
    original = part.attend

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if backward is not None:
            seen.v[layer] = v
            return _Mixed.apply(q, k, v, mask, part.scale, partial(backward, layer))
        if reduce is not None and once:
            matrix = weights_of(q, k, mask, part.scale)
            reduce(layer, matrix.detach())
            return matrix @ v
        mixed = original(q, k, v, mask)
        if reduce is not None:
            with torch.no_grad():
                reduce(layer, attention_of(q.detach(), k.detach(), mask, part.scale))
            return mixed
        keep = (lambda x: x) if graph else Tensor.detach
        seen.q[layer], seen.k[layer] = keep(q), keep(k)
        seen.masks[layer], seen.scales[layer] = mask, part.scale
        if graph:
            seen.v[layer], seen.mixed[layer] = v, mixed
        return mixed

    return attend


class _Mixed(torch.autograd.Function):
    """attention × v, whose backward pass hands over A ⊙ ∂y/∂A, both of which it has at hand."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float,
        hand_over: Callable[[Tensor], None],
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()  # each product would copy what is strided
        attention = weights_of(q, k, mask, scale)
        ctx.save_for_backward(q, k, v, attention)
        ctx.scale, ctx.hand_over = scale, hand_over
        return attention @ v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, attention = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_attention = gradient @ v.transpose(-2, -1)
        scores = torch.ops.aten._softmax_backward_data(of_attention, attention, -1, attention.dtype)
        ctx.hand_over(of_attention.mul_(attention))
        of_q, of_k = ctx.scale * (scores @ k), ctx.scale * (scores.transpose(-2, -1) @ q)
        return of_q, of_k, attention.transpose(-2, -1) @ gradient, None, None, None


def _watch_input(network: ViT, seen: Seen, undo: ExitStack, tokens: bool, graph: bool) -> None:
    """The grid of the pictures at hand, and the tokens that enter the first block."""
    original = network.embed

    def embed(images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        x, seen.grid = original(images)
        if tokens:
            seen.tokens[POOL] = x if graph else x.detach()
        return x, seen.grid

    network.embed = embed  # type: ignore[method-assign]
    undo.callback(delattr, network, "embed")


def _watch_output(block: nn.Module, layer: int, seen: Seen, undo: ExitStack, graph: bool) -> None:
    def keep(_: nn.Module, __: object, output: Tensor) -> None:
        seen.tokens[layer] = output if graph else output.detach()

    undo.callback(block.register_forward_hook(keep).remove)
