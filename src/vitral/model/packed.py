"""A ViT's forward pass for inference on a CPU, with the weights of dense layers laid out once.

A dense layer on a CPU first brings its weights into the order in which the processor's matrix instructions read them,
at every call. Here that is done once, and what follows a layer is done while its result is still in the cache: GELU
after the first layer of the MLP, the residual after attention and MLP, with LayerScale multiplied into the weights. In
bf16 attention goes a few pictures at a time, so that scores stay in the cache too. Everything else is the network's own
code. Results differ by rounding alone (tests/model/test_packed.py). Weights are in memory twice, as they were and laid
out.

The operators are those that torch.compile calls for the same purpose (oneDNN, `torch.ops.mkldnn`). They are no promise
of torch's: `packable` tries them, and where they are not there or say something else, nothing is packed. In bf16 on
processors that it is for, `avx512` computes in their place, and patches, head and whole blocks besides.
"""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.model import avx512, fused
from vitral.model.linear import as_made, sample
from vitral.model.vit import MLP, Block, PatchEmbed, ViT, explicit_is_faster, masked


def packed(network: ViT) -> ViT:
    """A network that computes the same from weights that are laid out for this machine. `network` is on a CPU, in bf16
    or fp32, and stays as it is; changes of its weights do not reach the packed one. For inference alone: there are no
    gradients.
    """
    twin = beside_the_blocks(network)
    twin._modules["blocks"] = nn.ModuleList(_Block(block) for block in network.blocks)  # type: ignore[arg-type]
    return twin


def beside_the_blocks(network: ViT) -> ViT:
    """A network of the same parts with patches and head laid out, where `avx512` computes them."""
    twin, embed = sharing(network), network.patch_embed
    if as_made(embed, PatchEmbed) and as_made(embed.proj, nn.Conv2d) and _Patches.takes(embed):
        twin._modules["patch_embed"] = _Patches(embed)
    for name in ("head", "head_dist"):
        head: Any = network._modules.get(name)
        if head is not None and as_made(head, nn.Linear) and _Head.takes(head):
            twin._modules[name] = _Head(head)
    return twin


def packable(network: nn.Module) -> bool:
    """Whether `packed` can take this network here."""
    kinds = {(p.device.type, p.dtype) for p in network.parameters()}
    if not isinstance(network, ViT) or len(kinds) != 1:
        return False
    ((device, kind),) = kinds
    return device == "cpu" and kind in (torch.bfloat16, torch.float32) and works(kind)


def pays(network: ViT) -> bool:
    """Whether a packable network is faster packed: in bf16 every one, in fp32 wide ones, on a processor with AVX-512.
    With AVX2 alone a single picture gains 5 to 10 % and batches lose 11 to 13 (docs/log.md).
    """
    if next(network.parameters()).dtype == torch.bfloat16:
        return True
    return network.config.dim >= _WIDE and "AVX512" in torch.backends.cpu.get_cpu_capability()


_WIDE = 384
"""Width of ViT-S. In fp32 narrower networks lose more by the calls than their products gain."""


@cache
def works(kind: torch.dtype) -> bool:
    """Whether torch has the operators, and they do what they are called for."""
    linear, x, other = sample(kind)
    with torch.autocast("cpu", enabled=False):  # whoever asks may be under one
        try:
            layer = _Linear(linear)
            found = torch.stack([layer(x), layer.gelu(x, "none"), layer.gelu(x, "tanh"), layer.added(x, other)])
        except (AttributeError, RuntimeError, TypeError):
            return False
        plain = F.linear(x.float(), linear.weight.float(), linear.bias.float())
    wanted = torch.stack([plain, F.gelu(plain), F.gelu(plain, approximate="tanh"), plain + other.float()])
    within = 0.02 if kind == torch.bfloat16 else 1e-4
    return torch.allclose(found.float(), wanted, rtol=within, atol=within)


_Module = TypeVar("_Module", bound=nn.Module)


def sharing(module: _Module) -> _Module:
    """A module of the same parts, of which some can be replaced without touching the original."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


class _Linear(nn.Module):
    """x Wᵀ + b for x (…, in) with W packed, times a factor for each output where one is given."""

    weight: Tensor
    bias: Tensor | None
    matrix: Tensor
    ours: bool

    def __init__(self, linear: nn.Linear, factor: Tensor | None = None):
        super().__init__()
        weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach().clone()
        if factor is not None:
            weight = (factor[:, None].float() * weight.float()).to(weight.dtype)
            bias = None if bias is None else (factor.float() * bias.float()).to(bias.dtype)
        # No parameters: nothing here is trained or saved. The plain ones are for who reads a part of them.
        self.__dict__.update(weight=linear.weight, bias=bias)
        self.__dict__["ours"] = weight.dtype == torch.bfloat16 and avx512.serves(weight, weight, bias)
        if self.ours:
            self.__dict__["matrix"] = avx512.pack(weight.contiguous())
        else:
            self.__dict__["matrix"] = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        if self.ours:
            return avx512.dense(*self._with(x))
        return torch.ops.mkldnn._linear_pointwise(x, self.matrix, self.bias, "none", [], "")

    def gelu(self, x: Tensor, form: str) -> Tensor:
        """GELU of it; `form` is "none" (by erf) or "tanh"."""
        if self.ours:
            return avx512.dense_gelu(*self._with(x), form == "tanh")
        return torch.ops.mkldnn._linear_pointwise(x, self.matrix, self.bias, "gelu", [], form)

    def added(self, x: Tensor, other: Tensor) -> Tensor:
        """The sum with `other` (…, out)."""
        if self.ours:
            return avx512.dense(*self._with(x), avx512.taken(other, len(self.weight)))
        return torch.ops.mkldnn._linear_pointwise.binary(x, other.contiguous(), self.matrix, self.bias, "add")

    @property
    def laid_out(self) -> avx512.Layer:
        """What kernels read of a layer that is `ours`."""
        return avx512.Layer(len(self.weight), self.weight.shape[1], self.matrix, self.bias)

    def _with(self, x: Tensor) -> tuple[Tensor, Tensor, int, Tensor | None]:
        return avx512.taken(x, self.weight.shape[1]), self.matrix, len(self.weight), self.bias


class _Head(nn.Module):
    """x Wᵀ + b for any number of outputs: rows of zeros make it one that kernels compute, and their answers are left
    out.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.outputs, missing = linear.out_features, -linear.out_features % avx512.LANES
        whole = nn.Linear(1, 1, bias=linear.bias is not None, device="meta")  # no number is drawn
        whole.weight = nn.Parameter(F.pad(linear.weight.detach(), (0, 0, 0, missing)), requires_grad=False)
        if linear.bias is not None:
            whole.bias = nn.Parameter(F.pad(linear.bias.detach(), (0, missing)), requires_grad=False)
        self.whole = _Linear(whole)

    @staticmethod
    def takes(layer: nn.Linear) -> bool:
        """Whether this is for a layer."""
        return layer.weight.dtype == torch.bfloat16 and avx512.serves(layer.weight, layer.weight[:0])

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x)[..., : self.outputs].contiguous()


class _Patches(nn.Module):
    """`PatchEmbed` without a backbone."""

    def __init__(self, embed: PatchEmbed):
        super().__init__()
        weight, bias = embed.proj.weight.detach().flatten(1), embed.proj.bias
        self.size: tuple[int, int] = embed.proj.kernel_size  # type: ignore[assignment]  # of two dimensions
        packed = avx512.pack(weight.contiguous())
        self.layer = avx512.Layer(len(weight), weight.shape[1], packed, None if bias is None else bias.detach().clone())

    @staticmethod
    def takes(embed: PatchEmbed) -> bool:
        """Whether this is for the patches of a network."""
        weight = embed.proj.weight.flatten(1)
        return not (embed.hybrid or embed.plain) and weight.dtype == torch.bfloat16 and avx512.serves(weight, weight)

    def forward(self, images: Tensor, recompute: bool = False) -> Tensor:
        """(B, rows × columns, D); there is nothing to compute again."""
        if torch.is_autocast_enabled("cpu"):
            images = images.to(torch.get_autocast_dtype("cpu"))
        return avx512.patches(avx512.taken(images, images.shape[-1]), self.size, self.layer)


def _norm(norm: nn.LayerNorm) -> nn.Module:
    return _Norm(norm) if avx512.norms(norm.weight, norm.bias) else norm


class _Norm(nn.Module):
    """`nn.LayerNorm` in bf16."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.__dict__.update(weight=norm.weight.detach().clone(), bias=norm.bias.detach().clone(), eps=norm.eps)

    def forward(self, x: Tensor) -> Tensor:
        return avx512.layer_norm(avx512.taken(x, len(self.weight)), self.weight, self.bias, self.eps)


def by_one_kernel(block: Block) -> bool:
    """Whether `avx512.Block` computes a block, where tokens go into it without a mask or rotation."""
    attn, mlp = block.attn, block.mlp
    if not block.pre_norm or mlp.activation == "swiglu" or attn.qk_norm or attn.head_dim % avx512.LANES:
        return False
    norms: list[Any] = [block.norm1, block.norm2]
    layers: list[Any] = [attn.qkv, attn.proj, mlp.fc1, mlp.fc2]
    if not all(avx512.norms(norm.weight, norm.bias) for norm in norms):
        return False
    return all(avx512.serves(layer.weight, layer.weight, layer.bias) for layer in layers)


def one_kernel(block: Block, layers: list[avx512.Layer]) -> avx512.Block:
    """What computes a block that is `by_one_kernel`, its dense layers laid out."""
    norms = [(norm.weight, norm.bias, norm.eps) for norm in (block.norm1, block.norm2)]
    return avx512.Block(block.attn.heads, block.attn.scale, block.mlp.activation == "gelu-tanh", norms, layers)


class _Block(nn.Module):
    """`Block` with packed layers: the same two equations."""

    def __init__(self, block: Block):
        super().__init__()
        scales: tuple[Any, Any] = (block.ls1.gamma, block.ls2.gamma) if block.layer_scale else (None, None)
        self.pre_norm, self.norm1, self.norm2 = block.pre_norm, _norm(block.norm1), _norm(block.norm2)
        self.attn = sharing(block.attn)
        self.attn.__dict__["attend"] = partial(attend, self.attn.scale)
        self.attn._modules |= {"qkv": _Linear(block.attn.qkv), "proj": _Linear(block.attn.proj, scales[0])}
        self.mlp = _MLP(block.mlp, scales[1])
        layers: list[Any] = [self.attn.qkv, self.attn.proj, self.mlp.plain.fc1, self.mlp.plain.fc2]
        self.whole: avx512.Block | None = None
        if by_one_kernel(block):
            self.whole = one_kernel(block, [layer.laid_out for layer in layers])

    def forward(
        self, x: Tensor, mask: Tensor | None, rotation: tuple[Tensor, Tensor] | None, read: int | None
    ) -> Tensor:
        """(B, N, D), or only the first `read` tokens of it."""
        return self.process(self.gather(x, mask, rotation, read))

    def gather(
        self, x: Tensor, mask: Tensor | None, rotation: tuple[Tensor, Tensor] | None, read: int | None
    ) -> Tensor:
        """Equation 2."""
        if self.whole is not None and mask is None and rotation is None:
            return self.whole.gather(x, read)
        mixed = self.attn.mix(self.norm1(x) if self.pre_norm else x, mask, rotation, read)
        x = self.attn.proj.added(mixed, x[:, :read])  # type: ignore[operator]
        return x if self.pre_norm else self.norm1(x)

    def process(self, x: Tensor) -> Tensor:
        """Equation 3."""
        if self.whole is not None:
            return self.whole.process(x)
        return self.mlp(self.norm2(x), x) if self.pre_norm else self.norm2(self.mlp(x, x))


def attend(scale: float, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q kᵀ · scale) v, (B, heads, queries, d). As in the network, torch's fused kernel does it in fp32, and
    where there are so many keys that the scores of one picture fill the memory.
    """
    if not explicit_is_faster(q, k):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    if mask is None and fused.gathers(q, k, v):
        return fused.gather(q, k, v, scale)
    B, heads, queries, d = q.shape
    mixed = torch.empty(B, queries, heads, d, dtype=q.dtype).transpose(1, 2)  # as the next layer reads it
    step = max(1, _IN_CACHE // (q.element_size() * heads * queries * k.shape[2]))
    for i in range(0, B, step):
        part = slice(i, i + step)
        scores = masked(_scores(scale, q[part], k[part]), None if mask is None else mask[part])
        _gather(scores, v[part].contiguous(), mixed[part])
    return mixed


def _scores(scale: float, q: Tensor, k: Tensor) -> Tensor:
    """q kᵀ · scale of each head. Matrices are laid out here: a product would lay out kᵀ, which is dearer."""
    queries, keys = (x.contiguous().flatten(0, 1) for x in (q, k))
    nothing = q.new_empty(1)  # `beta=0`: it is not read
    scores = torch.baddbmm(nothing, queries, keys.transpose(1, 2), beta=0, alpha=scale)
    return scores.unflatten(0, q.shape[:2])


_IN_CACHE = 2 << 20
"""Bytes of scores at a time; about what a core's second-level cache holds."""


def _gather(scores: Tensor, v: Tensor, out: Tensor) -> None:
    """softmax(scores) v, without looking for the largest score of a row first, as long as that goes well.

    It is there lest exp overflow, and bf16 reaches as far as fp32: scores up to 87. Whether they come near that is seen
    by the sum, with room for values of v up to 10⁸.
    """
    raised = scores.exp()
    sums = raised.sum(-1, keepdim=True)
    least, greatest = sums.aminmax()
    if least > 1e-30 and greatest < 1e30:
        torch.div(raised @ v, sums, out=out)
    else:
        out.copy_(scores.softmax(-1) @ v)


class _MLP(nn.Module):
    """`MLP` of x (…, D), and the sum with `other`."""

    def __init__(self, mlp: MLP, factor: Tensor | None):
        super().__init__()
        self.plain = sharing(mlp)
        self.plain._modules |= {"fc1": _Linear(mlp.fc1), "fc2": _Linear(mlp.fc2, factor)}

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        mlp: Any = self.plain
        if mlp.activation == "swiglu":
            hidden = mlp.hidden(x)
        else:
            hidden = mlp.fc1.gelu(x, "tanh" if mlp.activation == "gelu-tanh" else "none")
        return mlp.fc2.added(hidden, other)
