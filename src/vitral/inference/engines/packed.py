"""ViT inference on a CPU with packed weights.

On every call, a dense layer on a CPU reorders its weights for the CPU's matrix instructions. Here that happens once,
and the next operation is fused while the result is in the cache: GELU after the first layer of the MLP, the residual
after attention and MLP, with LayerScale folded into the weights. In bf16, attention processes a few images at a time,
so that scores stay in the cache, too. Everything else is the network's own code. Results differ by rounding only
(tests/inference/test_packed.py). Weights are in memory twice, original and packed.

The operators are those of torch.compile (oneDNN, `torch.ops.mkldnn`). They are not public API: `packable` tests them,
and if they are missing or wrong, nothing is packed. In bf16 on supported CPUs, `vitral.kernels.cpu` replaces them, and
also computes patches, head and fused blocks.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.device import cpu_by_default
from vitral.kernels import cpu, fused, patch_embed, untouched
from vitral.kernels.dense import sample
from vitral.kernels.reference import explicit_is_faster, masked
from vitral.model.vit import MLP, Block, PatchEmbed, ViT
from vitral.system import has_avx512


def packed(network: ViT) -> ViT:
    """Pack a network on a CPU, in bf16 or fp32, for this machine. For inference only: there are no gradients.

    `network` stays as it is; later changes of its weights do not affect the packed one.
    """
    twin = pack_embed_and_head(network)
    twin._modules["blocks"] = nn.ModuleList(_Block(block) for block in network.blocks)  # type: ignore[arg-type]
    return twin


def pack_embed_and_head(network: ViT) -> ViT:
    """Shallow copy with packed patch embedding and heads, where the kernels of `cpu` support them."""
    twin, embed = shallow_copy(network), network.patch_embed
    if untouched(embed, PatchEmbed) and untouched(embed.proj, nn.Conv2d) and _Patches.supports(embed):
        twin._modules["patch_embed"] = _Patches(embed)
    for name in ("head", "head_dist"):
        head: Any = network._modules.get(name)
        if head is not None and untouched(head, nn.Linear) and _Head.supports(head):
            twin._modules[name] = _Head(head)
    return twin


def packable(network: nn.Module, dtype: torch.dtype | None = None) -> bool:
    """True if `packed` supports this network on this machine, in its own dtype or another one."""
    kinds = {(p.device.type, dtype or p.dtype) for p in network.parameters()}
    if not isinstance(network, ViT) or len(kinds) != 1 or not network.config.kernel_blocks:
        return False
    ((device, kind),) = kinds
    return device == "cpu" and kind in (torch.bfloat16, torch.float32) and self_test(kind)


def is_faster(network: ViT, dtype: torch.dtype | None = None) -> bool:
    """True if a packable network is faster packed: always in bf16, for wide networks in fp32 with AVX-512.

    With AVX2 only, a single image gains 5 to 10% and batches lose 11 to 13% (docs/log/inference-speed.md).
    """
    if (dtype or next(network.parameters()).dtype) == torch.bfloat16:
        return True
    return network.config.dim >= _MIN_FP32_WIDTH and has_avx512()


_MIN_FP32_WIDTH = 384
"""Width of ViT-S. In fp32, narrower networks lose more by call overhead than their products gain."""


@cache
def self_test(dtype: torch.dtype) -> bool:
    """True if torch has the operators and they pass a self-test."""
    dense, x, other = sample(dtype)
    with torch.autocast("cpu", enabled=False), cpu_by_default():  # the caller may be under others
        try:
            layer = _Linear(dense)
            result = torch.stack([layer(x), layer.gelu(x, "none"), layer.gelu(x, "tanh"), layer.added(x, other)])
        except (AttributeError, RuntimeError, TypeError):
            return False
        y = F.linear(x.float(), dense.weight.float(), dense.bias.float())
    expected = torch.stack([y, F.gelu(y), F.gelu(y, approximate="tanh"), y + other.float()])
    within = 0.02 if dtype == torch.bfloat16 else 1e-4
    return torch.allclose(result.float(), expected, rtol=within, atol=within)


_Module = TypeVar("_Module", bound=nn.Module)


def shallow_copy(module: _Module) -> _Module:
    """Copy a module but share its submodules, which can be replaced without affecting the original."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


class _Linear(nn.Module):
    """x Wᵀ + b for x (…, in) with W packed, each output times an optional `factor`."""

    weight: Tensor
    bias: Tensor | None
    matrix: Tensor
    by_kernel: bool

    def __init__(self, linear: nn.Linear, factor: Tensor | None = None):
        super().__init__()
        weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach().clone()
        if factor is not None:
            weight = (factor[:, None].float() * weight.float()).to(weight.dtype)
            bias = None if bias is None else (factor.float() * bias.float()).to(bias.dtype)
        # No parameters: nothing here is trained or saved.
        self.__dict__.update(weight=linear.weight, bias=bias)
        self.__dict__["by_kernel"] = weight.dtype == torch.bfloat16 and cpu.supports_linear(weight, weight, bias)
        if self.by_kernel:
            self.__dict__["matrix"] = cpu.pack(weight.contiguous())
        else:
            self.__dict__["matrix"] = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        if self.by_kernel:
            return cpu.dense(*self._arguments(x))
        return torch.ops.mkldnn._linear_pointwise(x, self.matrix, self.bias, "none", [], "")

    def gelu(self, x: Tensor, form: str) -> Tensor:
        """GELU of the output; `form` is "none" (by erf) or "tanh"."""
        if self.by_kernel:
            return cpu.dense_gelu(*self._arguments(x), form == "tanh")
        return torch.ops.mkldnn._linear_pointwise(x, self.matrix, self.bias, "gelu", [], form)

    def added(self, x: Tensor, other: Tensor) -> Tensor:
        """Output plus `other` (…, out)."""
        if self.by_kernel:
            return cpu.dense(*self._arguments(x), cpu.as_input(other, len(self.weight)))
        return torch.ops.mkldnn._linear_pointwise.binary(x, other.contiguous(), self.matrix, self.bias, "add")

    @property
    def as_kernel_layer(self) -> cpu.Layer:
        """This layer for a fused block, if `by_kernel`."""
        return cpu.Layer(len(self.weight), self.weight.shape[1], self.matrix, self.bias)

    def _arguments(self, x: Tensor) -> tuple[Tensor, Tensor, int, Tensor | None]:
        return cpu.as_input(x, self.weight.shape[1]), self.matrix, len(self.weight), self.bias


class _Head(nn.Module):
    """x Wᵀ + b for any number of outputs: W is padded with rows of zeros for the kernels, whose outputs are dropped."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.outputs, missing = linear.out_features, -linear.out_features % cpu.LANES
        padded = nn.Linear(1, 1, bias=linear.bias is not None, device="meta")  # without initialization
        padded.weight = nn.Parameter(F.pad(linear.weight.detach(), (0, 0, 0, missing)), requires_grad=False)
        if linear.bias is not None:
            padded.bias = nn.Parameter(F.pad(linear.bias.detach(), (0, missing)), requires_grad=False)
        self.padded = _Linear(padded)

    @staticmethod
    def supports(layer: nn.Linear) -> bool:
        """True if the kernels support this head, padded."""
        return layer.weight.dtype == torch.bfloat16 and cpu.supports_linear(layer.weight, layer.weight[:0])

    def forward(self, x: Tensor) -> Tensor:
        return self.padded(x)[..., : self.outputs].contiguous()


class _Patches(nn.Module):
    """Packed `PatchEmbed` without a backbone."""

    def __init__(self, embed: PatchEmbed):
        super().__init__()
        weight, bias = embed.proj.weight.detach().flatten(1), embed.proj.bias
        self.size: tuple[int, int] = embed.proj.kernel_size  # type: ignore[assignment]  # 2-D
        packed = cpu.pack(weight.contiguous())
        self.layer = cpu.Layer(len(weight), weight.shape[1], packed, None if bias is None else bias.detach().clone())

    @staticmethod
    def supports(embed: PatchEmbed) -> bool:
        """True if the kernels support this patch embedding."""
        weight = embed.proj.weight.flatten(1)
        usual = not embed.hybrid and embed.backend is patch_embed
        return usual and weight.dtype == torch.bfloat16 and cpu.supports_linear(weight, weight)

    def forward(self, images: Tensor, recompute: bool = False) -> Tensor:
        """(B, rows × columns, D). `recompute` has no effect in inference."""
        if torch.is_autocast_enabled("cpu"):
            images = images.to(torch.get_autocast_dtype("cpu"))
        return cpu.patches(cpu.as_input(images, images.shape[-1]), self.size, self.layer)


def _norm(norm: nn.LayerNorm) -> nn.Module:
    return _Norm(norm) if cpu.supports_layer_norm(norm.weight, norm.bias) else norm


class _Norm(nn.Module):
    """`nn.LayerNorm` in bf16."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.__dict__.update(weight=norm.weight.detach().clone(), bias=norm.bias.detach().clone(), eps=norm.eps)

    def forward(self, x: Tensor) -> Tensor:
        return cpu.layer_norm(cpu.as_input(x, len(self.weight)), self.weight, self.bias, self.eps)


def supports_fused_block(block: Block) -> bool:
    """True if `cpu.Block` supports this block, for calls without mask and rotation."""
    attn, mlp = block.attn, block.mlp
    if not block.pre_norm or mlp.activation == "swiglu" or attn.qk_norm or attn.head_dim % cpu.LANES:
        return False
    norms = [block.norm1, block.norm2]
    layers = [attn.qkv, attn.proj, mlp.fc1, mlp.fc2]
    if not all(cpu.supports_layer_norm(norm.weight, norm.bias) for norm in norms):
        return False
    return all(cpu.supports_linear(layer.weight, layer.weight, layer.bias) for layer in layers)


def fused_block(block: Block, layers: list[cpu.Layer]) -> cpu.Block:
    """Fused form of a block that passes `supports_fused_block`, with packed dense layers."""
    norms = [(norm.weight, norm.bias, norm.eps) for norm in (block.norm1, block.norm2)]
    return cpu.Block(block.attn.heads, block.attn.scale, block.mlp.activation == "gelu-tanh", norms, layers)


class _Block(nn.Module):
    """`Block` with packed layers, or one fused kernel."""

    forward = Block.forward

    def __init__(self, block: Block):
        super().__init__()
        scales = (block.ls1.gamma, block.ls2.gamma) if block.layer_scale else (None, None)
        self.pre_norm, self.norm1, self.norm2 = block.pre_norm, _norm(block.norm1), _norm(block.norm2)
        self.attn = shallow_copy(block.attn)
        self.attn.backend = attention
        self.attn._modules |= {"qkv": _Linear(block.attn.qkv), "proj": _Linear(block.attn.proj, scales[0])}
        self.mlp = _MLP(block.mlp, scales[1])
        layers: list[Any] = [self.attn.qkv, self.attn.proj, self.mlp.twin.fc1, self.mlp.twin.fc2]
        self.fused: cpu.Block | None = None
        if supports_fused_block(block):
            self.fused = fused_block(block, [layer.as_kernel_layer for layer in layers])

    def attention_branch(
        self, x: Tensor, mask: Tensor | None, rotation: tuple[Tensor, Tensor] | None, num_queries: int | None
    ) -> Tensor:
        """Equation 2."""
        if self.fused is not None and mask is None and rotation is None:
            return self.fused.attention_branch(x, num_queries)
        mixed = self.attn.mix(self.norm1(x) if self.pre_norm else x, mask, rotation, num_queries)
        x = self.attn.proj.added(mixed, x[:, :num_queries])  # type: ignore[operator]
        return x if self.pre_norm else self.norm1(x)

    def mlp_branch(self, x: Tensor) -> Tensor:
        """Equation 3."""
        if self.fused is not None:
            return self.fused.mlp_branch(x)
        return self.mlp(self.norm2(x), x) if self.pre_norm else self.norm2(self.mlp(x, x))


def attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, *, scale: float
) -> Tensor:
    """softmax(q kᵀ · scale) v, (B, heads, queries, d), without dropout.

    Like the network, it uses PyTorch's fused kernel in fp32, and for so many keys that scores would fill the memory.
    """
    if not explicit_is_faster(q, k):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, scale=scale)
    if attn_mask is None and fused.supports_attention(q, k, v):
        return fused.attention(q, k, v, scale)
    B, heads, queries, d = q.shape
    mixed = torch.empty(B, queries, heads, d, dtype=q.dtype).transpose(1, 2)  # the layout that the next layer reads
    step = max(1, _IN_CACHE // (q.element_size() * heads * queries * k.shape[2]))
    for i in range(0, B, step):
        part = slice(i, i + step)
        scores = masked(_scores(scale, q[part], k[part]), None if attn_mask is None else attn_mask[part])
        _softmax_product(scores, v[part].contiguous(), mixed[part])
    return mixed


def _scores(scale: float, q: Tensor, k: Tensor) -> Tensor:
    """q kᵀ · scale of each head. q and k are made contiguous, since the product would copy kᵀ, which is slower."""
    queries, keys = (x.contiguous().flatten(0, 1) for x in (q, k))
    unused = q.new_empty(1)  # `beta=0`: never read
    scores = torch.baddbmm(unused, queries, keys.transpose(1, 2), beta=0, alpha=scale)
    return scores.unflatten(0, q.shape[:2])


_IN_CACHE = 2 << 20
"""Bytes of scores at a time, about the L2 cache of a core."""


def _softmax_product(scores: Tensor, v: Tensor, out: Tensor) -> None:
    """softmax(scores) v, without subtracting the maximum of each row unless that is necessary.

    The maximum prevents overflow of exp, and bf16 has the range of fp32: scores up to 87. The sums show if scores come
    near that, with a margin for values of v up to 10⁸.
    """
    exp = scores.exp()
    sums = exp.sum(-1, keepdim=True)
    low, high = sums.aminmax()
    if low > 1e-30 and high < 1e30:
        torch.div(exp @ v, sums, out=out)
    else:
        out.copy_(scores.softmax(-1) @ v)


class _MLP(nn.Module):
    """`MLP` of x (…, D), plus `other`."""

    def __init__(self, mlp: MLP, factor: Tensor | None):
        super().__init__()
        self.twin = shallow_copy(mlp)
        self.twin._modules |= {"fc1": _Linear(mlp.fc1), "fc2": _Linear(mlp.fc2, factor)}

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        mlp: Any = self.twin
        if mlp.activation == "swiglu":
            hidden = mlp.hidden(x)
        else:
            hidden = mlp.fc1.gelu(x, "tanh" if mlp.activation == "gelu-tanh" else "none")
        return mlp.fc2.added(hidden, other)
