"""A ViT's forward pass for inference on a CPU with the dense layers of its blocks in 8-bit integers.

    ranges = observe(network, batches)       # what enters each layer, on pictures of the kind it is for
    logits = quantized(network, ranges)(images)

Weights are int8 with a scale for each output, symmetric; what enters a layer is uint8 with one scale and zero point,
fixed by `ranges`, so that a picture's logits do not depend on the others in its batch. The residual stream is fp32;
attention, norms, patches and head are as precise as the network given. The operators are oneDNN's, as in `packed`, or
on processors that it is for `avx512` computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.errors import UsageError
from vitral.model import avx512
from vitral.model.linear import sample
from vitral.model.packed import attend, beside_the_blocks, by_one_kernel, one_kernel, sharing
from vitral.model.vit import Block, ViT

Ranges = Mapping[str, tuple[float, float]]
"""Name of a dense layer ("blocks.0.attn.qkv") → least and greatest value of what enters it."""

_LAYERS = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")


@torch.inference_mode()
def observe(network: ViT, batches: Iterable[Tensor]) -> Ranges:
    """The range of what enters each dense layer of the blocks, over batches (B, C, H, W) of standardised pictures."""
    seen: dict[str, tuple[float, float]] = {}

    def look(name: str, _: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        least, greatest = (float(x) for x in arguments[0].aminmax())
        before = seen.get(name, (0.0, 0.0))  # 0 is always among them, and must have a number of its own
        seen[name] = min(before[0], least), max(before[1], greatest)

    hooks = [
        network.get_submodule(name).register_forward_pre_hook(partial(look, name)) for name in layer_names(network)
    ]
    lean, network.lean = network.lean, False  # a lean last block has a way of its own through its first layer
    try:
        for images in batches:
            network(images)
    finally:
        network.lean = lean
        for hook in hooks:
            hook.remove()
    if len(seen) != len(hooks):
        raise UsageError("there are no pictures to calibrate on")
    return seen


def layer_names(network: ViT) -> list[str]:
    """The layers that become integers."""
    return [f"blocks.{i}.{layer}" for i in range(len(network.blocks)) for layer in _LAYERS]


def quantized(network: ViT, ranges: Ranges) -> ViT:
    """A network that computes nearly the same with integers. `network` is on a CPU and stays as it is; changes of its
    weights do not reach the other. For inference alone. `UsageError` where `ranges` are those of another network.
    """
    _check(network, ranges)
    twin = beside_the_blocks(network)
    plain: Any = network.blocks
    blocks = [_Block(block, _of(ranges, i)) for i, block in enumerate(plain)]
    blocks[-1].dtype = plain[-1].norm1.weight.dtype
    twin._modules["blocks"] = nn.ModuleList(blocks)
    return twin


def quick(network: ViT) -> bool:
    """Whether every block of this network, on a CPU, is computed by kernels of `avx512` alone."""
    blocks: Any = network.blocks
    return network.config.position != "rotary" and all(map(by_one_kernel, blocks))


def rounded(network: ViT, ranges: Ranges) -> ViT:
    """A network that computes in numbers of the given type what the integers of `quantized` stand for: its dense
    layers round weights and input to the same 256 values. For a compiler that finds integers in that.

    `UsageError` where `ranges` are those of another network.
    """
    _check(network, ranges)
    twin = sharing(network)
    blocks: Any = network.blocks
    twin._modules["blocks"] = nn.ModuleList(_rounded_block(block, _of(ranges, i)) for i, block in enumerate(blocks))
    return twin


def _check(network: ViT, ranges: Ranges) -> None:
    if set(ranges) != set(layer_names(network)):
        raise UsageError("these ranges were measured on another network", hint="measure again: vitral quantize RUN")


def _of(ranges: Ranges, block: int) -> list[_Scale]:
    return [_Scale(*ranges[f"blocks.{block}.{layer}"]) for layer in _LAYERS]


WRONG = "integers come out wrong on this processor (without VNNI instructions, sums are cut off at 16 bits)"
"""What a trial finds on x86 processors with AVX2 or AVX-512 alone: two products of uint8 and int8 are added in 16 bits,
which 255 × 127 × 2 exceeds. Who multiplies them by oneDNN, as torch and OpenVINO do, is not told.
"""


@cache
def lacking() -> str:
    """Why torch's integers are of no use here; empty where it has the operators and they do what they should."""
    with torch.autocast("cpu", enabled=False):  # whoever asks may be under one
        return _tried()


def refusal(network: nn.Module, trial: Callable[[], str] | None = None) -> str:
    """Why a network cannot be computed in integers here, by torch or who has another `trial`; empty where it can."""
    if not isinstance(network, ViT):
        return "only a ViT computes in int8"
    if next(network.parameters()).device.type != "cpu":
        return "integers are for a processor, and the network is on a GPU"
    return (trial or lacking)()


def probe() -> tuple[_Rounded, Tensor]:
    """A layer between roundings and its input (5, 64), which integers must compute to 0.05: always the same."""
    linear, x, _ = sample(torch.float32)
    return _Rounded(linear, _Scale(float(x.min()), float(x.max()))), x


def _tried() -> str:
    linear, x, other = sample(torch.float32)
    narrow = nn.Linear(1, 1, device="meta")  # of 24 outputs: where `avx512` is for the one, it is not for the other
    narrow.weight, narrow.bias = nn.Parameter(linear.weight[:24]), nn.Parameter(linear.bias[:24])
    try:
        right = _right(linear, x, other) and _right(narrow, x, other[:, :24])
    except (AttributeError, RuntimeError, TypeError):
        return "this torch lacks oneDNN's operators for integers"
    return "" if right else WRONG


def _right(linear: nn.Linear, x: Tensor, other: Tensor) -> bool:
    scale = _Scale(float(x.min()), float(x.max()))
    layer = _Linear(linear, scale)
    found = torch.stack([layer.to(scale(x), torch.float32), layer.added(scale(x), other)])
    raised = layer.gelu(scale(x), "none", _Scale(-0.2, 4.0))
    plain = F.linear(x, linear.weight, linear.bias)
    near = torch.allclose(found, torch.stack([plain, plain + other]), atol=0.05)
    return near and torch.allclose((raised.float() - 12) * (4.2 / 255), F.gelu(plain), atol=0.05)


class _Scale:
    """Numbers of a range as uint8: round(x / step) + zero, cut off at 0 and 255."""

    def __init__(self, least: float, greatest: float):
        self.step = max(greatest - least, 1e-8) / 255
        self.zero = round(-least / self.step)

    def __call__(self, x: Tensor) -> Tensor:
        return self.cut(x.float() / self.step + (self.zero + 0.5))

    @staticmethod
    def cut(shifted: Tensor) -> Tensor:
        """x / step + zero + ½, fp32, which is overwritten, to uint8."""
        return shifted.clamp_(0, 255).to(torch.uint8)  # towards 0, which after adding ½ is rounding


class _Linear:
    """x Wᵀ + b for x (…, in) uint8 with W int8, times a factor for each output where one is given."""

    def __init__(self, linear: nn.Linear, scale: _Scale, factor: Tensor | None = None):
        weight = linear.weight.detach().float()
        bias = torch.zeros(len(weight)) if linear.bias is None else linear.bias.detach().float()
        if factor is not None:
            weight, bias = factor.float()[:, None] * weight, factor.float() * bias
        steps = weight.abs().amax(1).clamp_min(1e-12) / 127
        whole = (weight / steps[:, None]).round().to(torch.int8)
        self.ours = None
        if avx512.serves(weight, weight, bias):
            self.ours = avx512.integers(whole, steps, bias, scale.step, scale.zero)
        else:
            self.matrix = torch.ops.onednn.qlinear_prepack(whole, None)
            self.scale, self.bias, self.steps = scale, bias, steps
            self.zeros = torch.zeros(len(weight), dtype=torch.int32)

    def to(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The product as numbers of a type."""
        if self.ours:
            return avx512.dense_integers(x, self.ours, dtype)
        return torch.ops.onednn.qlinear_pointwise(*self._with(x), 1.0, 0, dtype, "none", [], "")

    def gelu(self, x: Tensor, form: str, scale: _Scale) -> Tensor:
        """GELU of it as uint8 on another scale; `form` is "none" (by erf) or "tanh"."""
        if self.ours:
            then = scale.step, scale.zero
            return avx512.dense_integers(x, self.ours, torch.uint8, gelu=form, then=then)
        return torch.ops.onednn.qlinear_pointwise(*self._with(x), scale.step, scale.zero, torch.uint8, "gelu", [], form)

    def added(self, x: Tensor, other: Tensor) -> Tensor:
        """The sum with `other` (…, out) fp32."""
        if self.ours:
            return avx512.dense_integers(x, self.ours, torch.float32, other=other)
        *operands, bias = self._with(x)
        return torch.ops.onednn.qlinear_pointwise.binary(
            *operands, other.contiguous(), bias, 1.0, 0, torch.float32, 1.0, 0, "add", 1.0, "none", [], ""
        )

    def _with(self, x: Tensor) -> tuple[Any, ...]:
        return x, self.scale.step, self.scale.zero, self.matrix, self.steps, self.zeros, self.bias


class _Block(nn.Module):
    """`Block` with integer layers: the same two equations."""

    def __init__(self, block: Block, scales: list[_Scale]):
        super().__init__()
        of_qkv, of_proj, of_fc1, of_fc2 = scales
        factors: tuple[Any, Any] = (block.ls1.gamma, block.ls2.gamma) if block.layer_scale else (None, None)
        kind = block.norm1.weight.dtype
        self.pre_norm, self.mlp, self.dtype = block.pre_norm, block.mlp, torch.float32
        self.norm1, self.norm2 = _norm(block.norm1), _norm(block.norm2)
        self.proj, self.fc2 = _Linear(block.attn.proj, of_proj, factors[0]), _Linear(block.mlp.fc2, of_fc2, factors[1])
        self.fc1, self.scales = _Linear(block.mlp.fc1, of_fc1), scales
        self.attn = sharing(block.attn)
        qkv, heads = _Linear(block.attn.qkv, of_qkv), (3, block.attn.heads, block.attn.head_dim)

        def project(x: Tensor, read: int | None) -> tuple[Tensor, ...]:
            q, k, v = qkv.to(x, kind).unflatten(-1, heads).permute(2, 0, 3, 1, 4).unbind()
            return q[:, :, :read], k, v

        self.attn.__dict__ |= {"project": project, "attend": partial(attend, block.attn.scale)}
        layers = [layer.ours for layer in (qkv, self.proj, self.fc1, self.fc2) if layer.ours]
        self.whole = one_kernel(block, layers) if by_one_kernel(block) else None

    def forward(
        self, x: Tensor, mask: Tensor | None, rotation: tuple[Tensor, Tensor] | None, read: int | None
    ) -> Tensor:
        """(B, N, D), or only the first `read` tokens of it."""
        return self.process(self.gather(x, mask, rotation, read))

    def gather(
        self, x: Tensor, mask: Tensor | None, rotation: tuple[Tensor, Tensor] | None, read: int | None
    ) -> Tensor:
        """Equation 2, in fp32."""
        of_qkv, of_proj, _, _ = self.scales
        x = x.float()
        if self.whole is not None and mask is None and rotation is None:
            return self.whole.gather(x, read)
        mixed = self.attn.mix(of_qkv(self.norm1(x) if self.pre_norm else x), mask, rotation, read)
        x = self.proj.added(of_proj(mixed), x[:, :read])
        return x if self.pre_norm else self.norm1(x)

    def process(self, x: Tensor) -> Tensor:
        """Equation 3."""
        if self.whole is not None:
            return self.whole.process(x).to(self.dtype)
        x = self.fc2.added(self.hidden(self.scales[2](self.norm2(x) if self.pre_norm else x)), x)
        return (x if self.pre_norm else self.norm2(x)).to(self.dtype)

    def hidden(self, x: Tensor) -> Tensor:
        """The activations between the layers of the MLP, uint8."""
        if self.mlp.activation == "swiglu":
            gate, value = self.fc1.to(x, torch.float32).chunk(2, dim=-1)
            return self.scales[3](F.silu(gate) * value)
        return self.fc1.gelu(x, "tanh" if self.mlp.activation == "gelu-tanh" else "none", self.scales[3])


def _norm(norm: nn.LayerNorm) -> nn.LayerNorm:
    """The norm in fp32."""
    twin = nn.LayerNorm(norm.normalized_shape, eps=norm.eps).requires_grad_(False)
    twin.load_state_dict(norm.state_dict())
    return twin


def _rounded_block(block: Block, scales: list[_Scale]) -> Block:
    twin, attn, mlp = sharing(block), sharing(block.attn), sharing(block.mlp)
    layers = (attn.qkv, attn.proj, mlp.fc1, mlp.fc2)
    qkv, proj, fc1, fc2 = (_Rounded(layer, scale) for layer, scale in zip(layers, scales, strict=True))
    attn._modules |= {"qkv": qkv, "proj": proj}
    mlp._modules |= {"fc1": fc1, "fc2": fc2}
    twin._modules |= {"attn": attn, "mlp": mlp}

    def project(x: Tensor, read: int | None) -> tuple[Tensor, ...]:
        q, k, v = qkv(x).unflatten(-1, (3, attn.heads, attn.head_dim)).permute(2, 0, 3, 1, 4).unbind()
        return q[:, :, :read], k, v

    attn.__dict__["project"] = project
    return twin


class _Rounded(nn.Module):
    """x Wᵀ + b with x rounded to the 256 values of a scale and W to 255 for each output."""

    def __init__(self, linear: nn.Linear, scale: _Scale):
        super().__init__()
        self.linear, self.scale = linear, scale
        self.steps = linear.weight.detach().abs().amax(1).clamp_min(1e-12) / 127
        self.zeros = torch.zeros(len(self.steps), dtype=torch.int32)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.fake_quantize_per_tensor_affine(x, self.scale.step, self.scale.zero, 0, 255)
        weight = torch.fake_quantize_per_channel_affine(self.linear.weight, self.steps, self.zeros, 0, -127, 127)
        return F.linear(x, weight, self.linear.bias)
