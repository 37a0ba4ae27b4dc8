"""ViT inference on a CPU with the dense layers of blocks in int8.

    ranges = observe(network, batches)       # input ranges of each layer, on representative images
    logits = quantized(network, ranges)(images)

Weights are int8, symmetric, with a scale for each output. Inputs of layers are uint8 with one scale and zero point,
fixed by `ranges`, so that the logits of an image do not depend on the rest of its batch. The residual stream is fp32;
attention, norms, patches and head keep the network's precision. The operators are oneDNN's, as in `packed`, or those of
`vitral.kernels.cpu` where supported.

x86 without VNNI adds two products of uint8 and int8 in 16 bits, which 2 · 255 · 127 exceeds. There oneDNN, in torch and
in OpenVINO, silently computes wrong sums. Weights of 7 bits fit, 2 · 255 · 64 = 32,640. A self-test decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.device import cpu_by_default
from vitral.errors import UsageError
from vitral.inference.engines.packed import (
    attention,
    fused_block,
    pack_embed_and_head,
    shallow_copy,
    supports_fused_block,
)
from vitral.kernels import cpu
from vitral.kernels.dense import sample
from vitral.model.vit import Block, ViT

Ranges = Mapping[str, tuple[float, float]]
"""Name of a dense layer ("blocks.0.attn.qkv") → minimum and maximum of its input."""

_LAYERS = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")

EIGHT_BITS, SEVEN_BITS = 127, 64
"""The largest weight as an integer."""


@torch.inference_mode()
def observe(network: ViT, batches: Iterable[Tensor]) -> Ranges:
    """Input range of each dense layer of the blocks, over batches (B, C, H, W) of standardized images."""
    ranges: dict[str, tuple[float, float]] = {}

    def update(name: str, _: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        low, high = (float(x) for x in arguments[0].aminmax())
        before = ranges.get(name, (0.0, 0.0))  # always includes 0, which must be exact
        ranges[name] = min(before[0], low), max(before[1], high)

    hooks = [
        network.get_submodule(name).register_forward_pre_hook(partial(update, name)) for name in layer_names(network)
    ]
    pruned, network.prune_last_block = network.prune_last_block, False  # otherwise only the class token is seen
    try:
        for images in batches:
            network(images)
    finally:
        network.prune_last_block = pruned
        for hook in hooks:
            hook.remove()
    if len(ranges) != len(hooks):
        raise UsageError("there are no images to calibrate on")
    return ranges


def layer_names(network: ViT) -> list[str]:
    """Names of the layers that become int8."""
    return [f"blocks.{i}.{layer}" for i in range(len(network.blocks)) for layer in _LAYERS]


def quantized(network: ViT, ranges: Ranges) -> ViT:
    """Quantize a network on a CPU to int8. For inference only.

    `network` stays as it is; later changes of its weights do not affect the result. `UsageError` if `ranges` belong to
    another network.
    """
    _check(network, ranges)
    twin = pack_embed_and_head(network)
    plain: Any = network.blocks
    blocks = [_Block(block, _of(ranges, i)) for i, block in enumerate(plain)]
    blocks[-1].dtype = plain[-1].norm1.weight.dtype
    twin._modules["blocks"] = nn.ModuleList(blocks)
    return twin


def has_fused_blocks(network: ViT) -> bool:
    """True if fused kernels of `vitral.kernels.cpu` compute every block of this network on a CPU."""
    config, blocks = network.config, network.blocks
    no_rotation = config.position != "rotary" and config.rope is None
    return no_rotation and all(map(supports_fused_block, blocks))  # type: ignore[arg-type]


def fake_quantized(network: ViT, ranges: Ranges, most: int = EIGHT_BITS) -> ViT:
    """Fake-quantized form of `quantized`, in the network's dtype, from which a compiler derives int8 layers.

    Dense layers round weights to ±`most` steps and inputs to 256 values. `UsageError` if `ranges` belong to another
    network.
    """
    _check(network, ranges)
    twin = shallow_copy(network)
    blocks: Any = network.blocks
    twin._modules["blocks"] = nn.ModuleList(
        _fake_quantized_block(block, _of(ranges, i), most) for i, block in enumerate(blocks)
    )
    return twin


def _check(network: ViT, ranges: Ranges) -> None:
    if set(ranges) != set(layer_names(network)):
        raise UsageError("these ranges were measured on another network", hint="measure again: vitral quantize RUN")


def _of(ranges: Ranges, block: int) -> list[_Scale]:
    return [_Scale(*ranges[f"blocks.{block}.{layer}"]) for layer in _LAYERS]


WRONG = "int8 results are wrong on this CPU, with weights of 8 bits and of 7"
"""Reason if neither width of weights passes the self-test."""


def unavailable_reason() -> str:
    """Reason why torch's int8 is unavailable; empty if its operators exist and pass the self-test."""
    return _trial()[1]


def max_weight() -> int:
    """Largest integer weight with which oneDNN is correct here: 127, or 64 on x86 without VNNI."""
    return _trial()[0]


def unsupported_reason(network: nn.Module, trial: Callable[[], str] | None = None) -> str:
    """Reason why a network cannot run in int8 here; empty if it can. `trial` replaces torch's self-test."""
    if not isinstance(network, ViT):
        return "only a ViT computes in int8"
    if not network.config.kernel_blocks:
        return "its blocks have parts that int8 does not support"
    if (device := next(network.parameters()).device.type) != "cpu":
        return f"int8 runs on a CPU, and the network is on the device {device}"
    return (trial or unavailable_reason)()


def probe(most: int = EIGHT_BITS) -> tuple[_FakeQuantLinear, Tensor]:
    """Deterministic fake-quantized layer and input (5, 64), which int8 must compute to within 0.05."""
    linear, x, _ = sample(torch.float32)
    return _FakeQuantLinear(linear, _Scale(float(x.min()), float(x.max())), most), x


@cache
def _trial() -> tuple[int, str]:
    """Largest correct integer weight, and the reason if there is none."""
    with torch.autocast("cpu", enabled=False), cpu_by_default():  # the caller may be under others
        for most in (EIGHT_BITS, SEVEN_BITS):
            if not (why := _self_test(most)):
                return most, ""
    return EIGHT_BITS, why


def _self_test(most: int) -> str:
    """Reason why weights up to `most` fail; empty if they pass."""
    linear, x, other = sample(torch.float32)
    narrow = nn.Linear(1, 1, device="meta")  # 24 outputs: `cpu` may support only one of the layers
    narrow.weight, narrow.bias = nn.Parameter(linear.weight[:24]), nn.Parameter(linear.bias[:24])
    try:
        correct = _is_correct(linear, x, other, most) and _is_correct(narrow, x, other[:, :24], most)
    except (AttributeError, RuntimeError, TypeError):
        return "this torch lacks oneDNN's int8 operators"
    return "" if correct else WRONG


def _is_correct(linear: nn.Linear, x: Tensor, other: Tensor, most: int) -> bool:
    scale = _Scale(float(x.min()), float(x.max()))
    layer = _Linear(linear, scale, most=most)
    sums = torch.stack([layer.to(scale(x), torch.float32), layer.added(scale(x), other)])
    gelu = layer.gelu(scale(x), "none", _Scale(-0.2, 4.0))
    expected = F.linear(x, linear.weight, linear.bias)
    close = torch.allclose(sums, torch.stack([expected, expected + other]), atol=0.05)
    return close and torch.allclose((gelu.float() - 12) * (4.2 / 255), F.gelu(expected), atol=0.05)


class _Scale:
    """Quantizer of a range to uint8: round(x / step) + zero, clamped to 0 … 255."""

    def __init__(self, least: float, greatest: float):
        self.step = max(greatest - least, 1e-8) / 255
        self.zero = round(-least / self.step)

    def __call__(self, x: Tensor) -> Tensor:
        shifted = x.float() / self.step + (self.zero + 0.5)
        return shifted.clamp_(0, 255).to(torch.uint8)  # truncation after adding ½ rounds


class _Linear:
    """x Wᵀ + b for x (…, in) uint8 and W int8, each output times an optional `factor`.

    `most` is the largest integer weight for oneDNN, by default `max_weight()`. The kernels of `cpu` use 8 bits.
    """

    def __init__(self, linear: nn.Linear, scale: _Scale, factor: Tensor | None = None, most: int | None = None):
        weight = linear.weight.detach().float()
        bias = torch.zeros(len(weight)) if linear.bias is None else linear.bias.detach().float()
        if factor is not None:
            weight, bias = factor.float()[:, None] * weight, factor.float() * bias
        by_kernel = cpu.supports_linear(weight, weight, bias)
        steps = weight.abs().amax(1).clamp_min(1e-12) / (EIGHT_BITS if by_kernel else most or max_weight())
        quantized = (weight / steps[:, None]).round().to(torch.int8)
        self.kernel_layer = None
        if by_kernel:
            self.kernel_layer = cpu.int8_layer(quantized, steps, bias, scale.step, scale.zero)
        else:
            self.matrix = torch.ops.onednn.qlinear_prepack(quantized, None)
            self.scale, self.bias, self.steps = scale, bias, steps
            self.zeros = torch.zeros(len(weight), dtype=torch.int32)

    def to(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Output in `dtype`."""
        if self.kernel_layer:
            return cpu.dense_int8(x, self.kernel_layer, dtype)
        return torch.ops.onednn.qlinear_pointwise(*self._arguments(x), 1.0, 0, dtype, "none", [], "")

    def gelu(self, x: Tensor, form: str, scale: _Scale) -> Tensor:
        """GELU of the output, as uint8 on another scale; `form` is "none" (by erf) or "tanh"."""
        if self.kernel_layer:
            quantization = scale.step, scale.zero
            return cpu.dense_int8(x, self.kernel_layer, torch.uint8, gelu=form, quantization=quantization)
        output = scale.step, scale.zero, torch.uint8
        return torch.ops.onednn.qlinear_pointwise(*self._arguments(x), *output, "gelu", [], form)

    def added(self, x: Tensor, other: Tensor) -> Tensor:
        """Output plus `other` (…, out) fp32."""
        if self.kernel_layer:
            return cpu.dense_int8(x, self.kernel_layer, torch.float32, other=other)
        *operands, bias = self._arguments(x)
        return torch.ops.onednn.qlinear_pointwise.binary(
            *operands, other.contiguous(), bias, 1.0, 0, torch.float32, 1.0, 0, "add", 1.0, "none", [], ""
        )

    def _arguments(self, x: Tensor) -> tuple[object, ...]:
        return x, self.scale.step, self.scale.zero, self.matrix, self.steps, self.zeros, self.bias


class _QKV(nn.Module):
    """q, k and v, concatenated, in the network's dtype, from tokens in uint8."""

    def __init__(self, layer: _Linear, dtype: torch.dtype):
        super().__init__()
        self.layer, self.dtype = layer, dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.layer.to(x, self.dtype)


class _Block(nn.Module):
    """`Block` with int8 layers, or one fused kernel."""

    forward = Block.forward

    def __init__(self, block: Block, scales: list[_Scale]):
        super().__init__()
        of_qkv, of_proj, of_fc1, of_fc2 = scales
        factors = (block.ls1.gamma, block.ls2.gamma) if block.layer_scale else (None, None)
        self.pre_norm, self.mlp, self.dtype = block.pre_norm, block.mlp, torch.float32
        self.norm1, self.norm2 = _norm(block.norm1), _norm(block.norm2)
        self.proj, self.fc2 = _Linear(block.attn.proj, of_proj, factors[0]), _Linear(block.mlp.fc2, of_fc2, factors[1])
        self.fc1, self.scales = _Linear(block.mlp.fc1, of_fc1), scales
        qkv = _Linear(block.attn.qkv, of_qkv)
        self.attn = shallow_copy(block.attn)
        self.attn._modules["qkv"] = _QKV(qkv, block.norm1.weight.dtype)
        self.attn.backend = attention
        layers = [layer.kernel_layer for layer in (qkv, self.proj, self.fc1, self.fc2) if layer.kernel_layer]
        self.fused = fused_block(block, layers) if supports_fused_block(block) else None

    def attention_branch(
        self, x: Tensor, mask: Tensor | None, rotation: tuple[Tensor, Tensor] | None, num_queries: int | None
    ) -> Tensor:
        """Equation 2, in fp32."""
        of_qkv, of_proj, _, _ = self.scales
        x = x.float()
        if self.fused is not None and mask is None and rotation is None:
            return self.fused.attention_branch(x, num_queries)
        mixed = self.attn.mix(of_qkv(self.norm1(x) if self.pre_norm else x), mask, rotation, num_queries)
        x = self.proj.added(of_proj(mixed), x[:, :num_queries])
        return x if self.pre_norm else self.norm1(x)

    def mlp_branch(self, x: Tensor) -> Tensor:
        """Equation 3."""
        if self.fused is not None:
            return self.fused.mlp_branch(x).to(self.dtype)
        x = self.fc2.added(self.hidden(self.scales[2](self.norm2(x) if self.pre_norm else x)), x)
        return (x if self.pre_norm else self.norm2(x)).to(self.dtype)

    def hidden(self, x: Tensor) -> Tensor:
        """Activations between the layers of the MLP, uint8."""
        if self.mlp.activation == "swiglu":
            gate, value = self.fc1.to(x, torch.float32).chunk(2, dim=-1)
            return self.scales[3](F.silu(gate) * value)
        return self.fc1.gelu(x, "tanh" if self.mlp.activation == "gelu-tanh" else "none", self.scales[3])


def _norm(norm: nn.LayerNorm) -> nn.LayerNorm:
    """Copy a norm in fp32."""
    twin = nn.LayerNorm(norm.normalized_shape, eps=norm.eps).requires_grad_(False)
    twin.load_state_dict(norm.state_dict())
    return twin


def _fake_quantized_block(block: Block, scales: list[_Scale], most: int) -> Block:
    twin, attn, mlp = shallow_copy(block), shallow_copy(block.attn), shallow_copy(block.mlp)
    layers = (attn.qkv, attn.proj, mlp.fc1, mlp.fc2)
    qkv, proj, fc1, fc2 = (_FakeQuantLinear(layer, scale, most) for layer, scale in zip(layers, scales, strict=True))
    attn._modules |= {"qkv": qkv, "proj": proj}
    mlp._modules |= {"fc1": fc1, "fc2": fc2}
    twin._modules |= {"attn": attn, "mlp": mlp}
    return twin


class _FakeQuantLinear(nn.Module):
    """x Wᵀ + b with x rounded to the 256 values of a scale, and W to ±`most` steps for each output.

    The declared range is always ±127 steps, since a compiler recognizes only 255 levels as int8.
    """

    def __init__(self, linear: nn.Linear, scale: _Scale, most: int = EIGHT_BITS):
        super().__init__()
        self.linear, self.scale = linear, scale
        self.steps = linear.weight.detach().abs().amax(1).clamp_min(1e-12) / most
        self.zeros = torch.zeros(len(self.steps), dtype=torch.int32)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.fake_quantize_per_tensor_affine(x, self.scale.step, self.scale.zero, 0, 255)
        weight = torch.fake_quantize_per_channel_affine(self.linear.weight, self.steps, self.zeros, 0, -127, 127)
        return F.linear(x, weight, self.linear.bias)
