"""Capture attention and tokens during a forward pass, which changes by rounding at most.

    with capture(model) as captured:
        logits = model(images)
    captured.attention(0)                # (B, heads, N, N) of the first block
    captured.tokens[11]                  # (B, N, D) after the last one

Attention still runs as the fused kernel. An observer records its q and k, from which softmax(q kᵀ) is computed on
demand, in fp32. If all maps would not fit into memory, `reduce` receives the attention of each layer in turn, and
nothing is stored. `backward` receives attention × gradient of each layer in the backward pass. At the end of the `with`
block, hooks, backends, observers and settings are restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vitral.errors import UsageError
from vitral.model import ViT
from vitral.model.edited import edited
from vitral.model.vit import Observer
from vitral.weights.in_memory import replaced_product

Layer = int | Literal["pool", "input"]
"""The number of a block, from 0, or `POOL` or `INPUT`."""

POOL: Layer = "pool"
"""The MAP head, with attention (B, heads, 1, N)."""

INPUT: Layer = "input"
"""The input of the first block, for tokens only."""

Reduce = Callable[[Layer, Tensor], None]
"""Called with a layer and its attention (B, heads, N, N), detached, in fp32 unless `explicit`."""

Backward = Callable[[Layer, Tensor], None]
"""Called with a layer and A ⊙ ∂y/∂A of its attention A, (B, heads, N, N), in the network's dtype."""


@dataclass
class Captured:
    """Tensors of the last forward pass in the block, by layer."""

    layers: tuple[int, ...]
    """Numbers of the captured blocks."""
    prefix: int
    """Number of tokens before the patches."""
    grid: tuple[int, int] = (0, 0)
    """Rows and columns of patches."""
    q: dict[Layer, Tensor] = field(default_factory=dict)
    """(B, heads, N, d), as used in the product: normalized and rotated."""
    k: dict[Layer, Tensor] = field(default_factory=dict)
    v: dict[Layer, Tensor] = field(default_factory=dict)
    mixed: dict[Layer, Tensor] = field(default_factory=dict)
    """(B, heads, N, d): attention × v, in the graph, before heads are concatenated."""
    tokens: dict[Layer, Tensor] = field(default_factory=dict)
    """(B, N, D) after each block; under `INPUT` before the first one."""
    masks: dict[Layer, Tensor | None] = field(default_factory=dict)
    scales: dict[Layer, float] = field(default_factory=dict)

    def attention(self, layer: Layer) -> Tensor:
        """softmax(q kᵀ · scale) of a layer, (B, heads, N, N), in fp32 at least; in the graph if q and k are."""
        if layer not in self.q:
            raise UsageError(f"layer {layer} was not captured", why=f"captured: {', '.join(map(str, self.q))}")
        return attention_of(self.q[layer], self.k[layer], self.masks[layer], self.scales[layer])

    def attention_gradient(self, layer: Layer, of_mixed: Tensor) -> Tensor:
        """∂y/∂attention (B, heads, N, N) fp32. Since mixed = attention × v, it is G vᵀ with G = ∂y/∂mixed.

        This is exact, although the fused kernel never materializes the attention matrix.
        """
        return wide(of_mixed) @ wide(self.v[layer].detach()).transpose(-2, -1)


def attention_of(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(q kᵀ · scale), (B, heads, N, N) in fp32 at least."""
    return weights_of(wide(q), wide(k), mask, scale)


def weights_of(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(q kᵀ · scale), (B, heads, N, N) in the dtype of q and k."""
    scores = (q * scale) @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(dim=-1)


def wide(x: Tensor) -> Tensor:
    """Convert to fp32; fp64 stays."""
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
    explicit: bool = False,
    backward: Backward | None = None,
    prune_last_block: bool = False,
) -> Iterator[Captured]:
    """Record forward passes of `model` in the `with` block, for `layers` (default all; negative ones from the end).

    `attention`: record q and k of each layer.
    `tokens`: record the output of each block.
    `graph`: keep tensors in the graph, for gradients, and record v and attention × v, too.
    `reduce`: called with the attention of each layer, which is dropped afterwards.
    `explicit`: with `reduce`, compute attention in the network's dtype, and use it in the forward pass instead of the
    fused kernel. Faster, and equal up to rounding.
    `backward`: called in each backward pass, from the last layer to the first. The forward pass uses explicit
    attention, too. To reach every layer, differentiate with respect to `captured.v` of the first one.
    `prune_last_block`: allow the last block to compute only the tokens that the head reads, and their rows of
    attention. By default it computes every token.

    Raises `UsageError` for a compiled or exported model, one without attention, attention that its user changed,
    invalid layers, `explicit` without `reduce`, and `reduce` with `backward`.
    """
    network = require_vit(model)
    if explicit and reduce is None:
        raise UsageError("explicit=True goes with reduce", why="otherwise no attention is computed explicitly")
    if reduce and backward:
        raise UsageError("reduce and backward do not go together", hint="capture twice")
    numbers = _numbers(layers, len(network.blocks))
    captured = Captured(numbers, network.config.prefix)
    with ExitStack() as undo:
        undo.callback(setattr, network, "prune_last_block", network.prune_last_block)
        network.prune_last_block = network.prune_last_block and prune_last_block
        _record_input(network, captured, undo, tokens, graph)
        parts: list[tuple[Layer, Any]] = [(i, network.blocks[i].attn) for i in numbers]
        if network.config.pool == "map":
            parts.append((POOL, network.attn_pool))
        if attention or graph or reduce or backward:
            for layer, part in parts:
                check_product(part)
                if backward:
                    override(undo, part, "backend", partial(_backward_backend, captured, layer, backward))
                elif reduce and explicit:
                    override(undo, part, "backend", partial(_reducing_backend, layer, reduce))
                elif reduce:
                    _observe(undo, part, partial(_reducing_observer, layer, reduce, part.scale))
                else:
                    _observe(undo, part, partial(_recording_observer, captured, layer, graph, part.scale))
        if tokens:
            for layer in numbers:
                _record_output(network.blocks[layer], layer, captured, undo, graph)
        yield captured


def require_vit(model: nn.Module) -> ViT:
    """Return `model` if it is a ViT; `UsageError` for other networks and for compiled or exported ones."""
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
        what, why = f"{type(model).__name__} has no attention to look at", "it is not a Vision Transformer"
        raise UsageError(what, why=why, hint=ANY_NETWORK)
    return model


def check_product(attention: nn.Module, *, any_backend: bool = False) -> None:
    """Raise `UsageError` for attention that its user changed: softmax(q kᵀ) would belong to another network.

    `any_backend`: allow a backend of the user's.
    """
    if changed := replaced_product(attention, any_backend=any_backend):
        why = f"{changed}, so it is not softmax(q kᵀ)"
        raise UsageError("cannot look into this attention", why=why, hint=ANY_NETWORK)


def check_unedited(part: str) -> None:
    """Raise `UsageError` if a part of vit.py was edited, of which a method has a form of its own."""
    if changed := edited(part):
        raise UsageError("cannot explain this network", why=f"{changed}, which this method replaces", hint=ANY_NETWORK)


ANY_NETWORK = "methods for any network: input-gradient, integrated-gradients, smoothgrad, occlusion, rise"
"""Hint for networks whose attention cannot be read. `METHODS` is above this module: a test compares them."""


def _numbers(layers: Sequence[int] | None, depth: int) -> tuple[int, ...]:
    if layers is None:
        return tuple(range(depth))
    if bad := [layer for layer in layers if not -depth <= layer < depth]:
        raise UsageError(
            f"there is no layer {bad[0]}", why=f"the network has {depth}", hint=f"--layers 0 … {depth - 1}"
        )
    return tuple(sorted({layer % depth for layer in layers}))


def override(undo: ExitStack, module: nn.Module, name: str, value: object) -> None:
    """Set a declared attribute (`backend`, `observer`, …) of a module until `undo` closes."""
    own = module.__dict__
    if name in own:
        undo.callback(own.__setitem__, name, own[name])
    else:
        undo.callback(own.pop, name)  # restores the class attribute
    own[name] = value


def _observe(undo: ExitStack, part: Any, observer: Observer) -> None:
    """Add an observer until `undo` closes. An existing observer stays active."""
    existing: Observer | None = part.observer

    def both(*arguments: Tensor) -> None:
        if existing is not None:
            existing(*arguments)
        observer(*arguments)

    override(undo, part, "observer", both)


def _recording_observer(
    captured: Captured,
    layer: Layer,
    graph: bool,
    scale: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mixed: Tensor,
) -> None:
    """Record q and k; with `graph` keep them in the graph, and record v and the result, too."""
    keep = (lambda x: x) if graph else Tensor.detach
    captured.q[layer], captured.k[layer] = keep(q), keep(k)
    captured.masks[layer], captured.scales[layer] = mask, scale
    if graph:
        captured.v[layer], captured.mixed[layer] = v, mixed


@torch.no_grad()
def _reducing_observer(
    layer: Layer, reduce: Reduce, scale: float, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, mixed: Tensor
) -> None:
    """Pass the attention to `reduce`, without recording it."""
    reduce(layer, attention_of(q.detach(), k.detach(), mask, scale))


def explicit_backend(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, *, scale: float
) -> Tensor:
    """Attention in elementary operators, for graphs whose target has no fused backward pass."""
    return weights_of(q, k, attn_mask, scale) @ v


def _reducing_backend(
    layer: Layer,
    reduce: Reduce,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    *,
    scale: float,
    **_: object,
) -> Tensor:
    """Compute attention explicitly, pass it to `reduce`, and use it."""
    attention = weights_of(q, k, attn_mask, scale)
    reduce(layer, attention.detach())
    return attention @ v


def _backward_backend(
    captured: Captured,
    layer: Layer,
    backward: Backward,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    *,
    scale: float,
    **_: object,
) -> Tensor:
    """Compute attention explicitly; the backward pass calls `backward`."""
    captured.v[layer] = v
    return _ExplicitAttention.apply(q, k, v, attn_mask, scale, partial(backward, layer))


class _Context(Protocol):
    """State that autograd carries from forward to backward."""

    saved_tensors: tuple[Tensor, ...]
    scale: float
    callback: Callable[[Tensor], None]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _ExplicitAttention(torch.autograd.Function):
    """attention × v, whose backward passes A ⊙ ∂y/∂A to a callback."""

    @staticmethod
    def forward(
        ctx: _Context,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float,
        callback: Callable[[Tensor], None],
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()  # each product would copy strided tensors
        attention = weights_of(q, k, mask, scale)
        ctx.save_for_backward(q, k, v, attention)
        ctx.scale, ctx.callback = scale, callback
        return attention @ v

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, attention = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_attention = gradient @ v.transpose(-2, -1)
        scores = torch.ops.aten._softmax_backward_data(of_attention, attention, -1, attention.dtype)
        ctx.callback(of_attention.mul_(attention))
        of_q, of_k = ctx.scale * (scores @ k), ctx.scale * (scores.transpose(-2, -1) @ q)
        return of_q, of_k, attention.transpose(-2, -1) @ gradient, None, None, None


def _record_input(network: ViT, captured: Captured, undo: ExitStack, tokens: bool, graph: bool) -> None:
    """Record the grid of the images and, with `tokens`, the input of the first block."""
    rows, columns = network.config.patch

    def keep_grid(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        captured.grid = arguments[0].shape[2] // rows, arguments[0].shape[3] // columns

    def keep_tokens(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        captured.tokens[INPUT] = arguments[0] if graph else arguments[0].detach()

    undo.callback(network.patch_embed.register_forward_pre_hook(keep_grid).remove)
    if tokens:
        undo.callback(network.blocks[0].register_forward_pre_hook(keep_tokens).remove)


def _record_output(block: nn.Module, layer: int, captured: Captured, undo: ExitStack, graph: bool) -> None:
    def keep(_: nn.Module, __: object, output: Tensor) -> None:
        captured.tokens[layer] = output if graph else output.detach()

    undo.callback(block.register_forward_hook(keep).remove)
