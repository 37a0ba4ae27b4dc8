"""The Vision Transformer, in the order in which data flows: patches, tokens, blocks, pooling, head.

    images (B, C, H, W) ─ patch_embed ─ + positions ─ blocks ─ norm ─ pool ─ head ─ logits (B, K)

Equation numbers are those of "An Image is Worth 16x16 Words" (arXiv 2010.11929). Parts that a configuration does not
have are absent from the module, so `print(model)` and its state dict show what is really there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitral.errors import UsageError, unknown
from vitral.model import fused
from vitral.model.conv_stem import ConvLayers, ConvStem
from vitral.model.linear import Linear, as_made, by_kernels, linear
from vitral.model.position import POSITIONS, Grid, rotate
from vitral.model.resnet import HybridNumerics, HybridStem, lecun_normal_, stem_stride, stem_width
from vitral.model.schema import Schema, pair

Pool = Literal["cls", "mean", "mean-all", "map", "cls-mean"]
Activation = Literal["gelu", "gelu-tanh", "swiglu"]


@dataclass(frozen=True)
class ViTConfig(Schema):
    """Everything that decides the shape and the arithmetic of a network. Defaults: ViT-B/16 as in the paper.

    Sizes are pixels; an integer stands for a square. `patch_size` is what one token sees of the image, with a stem
    too. `classes=0` leaves the head out.
    """

    image_size: int | tuple[int, int] = 224
    patch_size: int | tuple[int, int] = 16
    channels: int = 3
    classes: int = 1000

    stem: tuple[int, ...] | None = None  # stages of a ResNet before the patches; () is its root alone; None is none
    stem_numerics: HybridNumerics = "authors"  # a name in HYBRID_NUMERICS: timm's small numbers differ
    conv_stem: ConvLayers | None = None  # or 3×3 convolutions before them: (channels, stride) of each
    conv_pool: bool = False  # whether those after the first take maxima instead of a stride

    dim: int = 768
    depth: int = 12
    heads: int = 12
    mlp_dim: int = 3072

    position: str = "learned"  # a name in POSITIONS
    cls_token: bool = True
    cls_position: bool = True  # the class token has a learned position too (paper; not in DeiT-III)
    dist_token: bool = False  # DeiT's distillation token, with a head of its own; logits are the mean of both heads
    registers: int = 0  # extra tokens without a job (arXiv 2309.16588)
    pool: Pool = "cls"  # mean is over patches; mean-all over every token, prefix too; cls-mean is both, side by side

    norm: Literal["pre", "post"] = "pre"
    norm_eps: float = 1e-6
    final_norm: Literal["tokens", "pooled", "none"] = "tokens"
    qkv_bias: bool = True
    proj_bias: bool = True
    qk_norm: bool = False
    attention_scale: Literal["head", "model"] = "head"  # logits / √(head width), or / √dim as write-up 000
    layer_scale: float | None = None  # initial γ (CaiT, DeiT-III)
    activation: Activation = "gelu"  # exact, by erf; the authors' JAX code has the tanh form

    pre_logits: bool = False  # Linear(D→D) + tanh before the head, as at pre-training (§3.2)
    logits_tanh: bool = False  # write-up 001
    logit_scale: float = 1.0  # constant factor behind that tanh, without which the loss cannot tell classes apart

    dropout: float = 0.0  # after positions and after every dense layer but qkv (B.1)
    attention_dropout: float = 0.0
    drop_path: float = 0.0  # stochastic depth of the last block; grows linearly from 0
    patch_dropout: float = 0.0  # share of its patches that a picture loses in training (arXiv 2208.07220)

    cls_init: Literal["zeros", "normal"] = "zeros"
    pos_init: Literal["normal-0.02", "normal", "uniform", "zeros"] = "normal-0.02"
    head_bias_init: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", pair(self.image_size))
        object.__setattr__(self, "patch_size", pair(self.patch_size))
        self.check_kinds()
        self._check()
        self._check_stem()

    def _check(self) -> None:
        sizes = ("channels", "dim", "depth", "heads", "mlp_dim")
        if bad := [f"{name}={getattr(self, name)}" for name in sizes if getattr(self, name) < 1]:
            raise UsageError(f"sizes must be positive: {', '.join(bad)}")
        for name in ("dropout", "attention_dropout", "drop_path", "patch_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)} is not a probability below 1")
        if self.logit_scale <= 0 or (self.logit_scale != 1 and not self.logits_tanh):
            why = "it is a factor above 0 on logits that a tanh bounds"
            raise UsageError(f"no network has a logit scale of {self.logit_scale:g} here", why=why, hint="leave it out")
        if self.classes < 0 or self.registers < 0:
            raise UsageError("classes and registers cannot be negative")
        (height, width), (p, q) = self.image, self.patch
        if min(height, width, p, q) < 1 or height % p or width % q:
            fit = (max(1, round(height / max(p, 1))) * max(p, 1), max(1, round(width / max(q, 1))) * max(q, 1))
            raise UsageError(
                f"image size {height}×{width} is not divisible by patch size {p}×{q}",
                hint=f"--image-size {fit[0]}" if fit[0] == fit[1] else f"an image size of {fit[0]}×{fit[1]}",
            )
        if self.dim % self.heads:
            divisors = [h for h in range(1, self.dim + 1) if self.dim % h == 0]
            near = min(divisors, key=lambda h: abs(h - self.heads))
            raise UsageError(f"width {self.dim} is not divisible by {self.heads} heads", hint=f"--heads {near}")
        if self.position not in POSITIONS:
            raise unknown("position", self.position, POSITIONS)
        for position, what, width in (("sincos", "width", self.dim), ("rotary", "head width", self.dim // self.heads)):
            if self.position == position and width % 4:
                raise UsageError(f"{position} positions need a {what} divisible by 4, not {width}")
        if self.pool in ("cls", "cls-mean") and not self.cls_token:
            raise UsageError("pooling by class token needs a class token", hint="--pool mean")
        if self.dist_token and (self.pool != "cls" or self.pre_logits):
            raise UsageError("a distillation token goes with pooling by class token and a plain head")

    def _check_stem(self) -> None:
        if self.stem is not None and self.conv_stem is not None:
            raise UsageError("two stems before the patches", hint="stem or conv_stem")
        if min(self.stem or (), default=1) < 1:
            raise UsageError(f"a stem's stages have at least one layer, not {self.stem}")
        if self.conv_stem is not None and (not self.conv_stem or min(map(min, self.conv_stem)) < 1):
            raise UsageError(f"a stem's layers have channels and a stride, not {self.conv_stem}")
        if self.conv_pool and self.conv_stem is None:
            raise UsageError("conv_pool is for a convolutional stem, and there is none", hint="leave it out")
        if any(side % self.stem_stride for side in self.patch):
            why = f"what is before the patches has a stride of {self.stem_stride} already"
            hint = f"a patch size of {-(-max(self.patch) // self.stem_stride) * self.stem_stride}"
            raise UsageError(f"patch size {self.patch[0]}×{self.patch[1]} does not fit the stem", why=why, hint=hint)

    @property
    def hybrid(self) -> bool:
        """Whether patches are cut from features, not from the picture itself."""
        return self.stem is not None or self.conv_stem is not None

    @property
    def stem_stride(self) -> int:
        """Pixels of the picture for one of what patches are cut from; 1 without a stem."""
        if self.conv_stem is not None:
            return math.prod(stride for _, stride in self.conv_stem)
        return 1 if self.stem is None else stem_stride(self.stem)

    @property
    def image(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.image_size  # type: ignore[return-value]

    @property
    def patch(self) -> tuple[int, int]:
        """Height and width of a patch in pixels."""
        return self.patch_size  # type: ignore[return-value]

    @property
    def grid(self) -> Grid:
        """Rows and columns of patches."""
        return self.image[0] // self.patch[0], self.image[1] // self.patch[1]

    @property
    def prefix(self) -> int:
        """Tokens before the patches: the class token, the distillation token, the registers."""
        return int(self.cls_token) + int(self.dist_token) + self.registers

    @property
    def placed(self) -> int:
        """Tokens before the patches that have a learned position of their own."""
        return int(self.cls_token) + int(self.dist_token) if self.cls_position else 0

    @property
    def read(self) -> int | None:
        """How many of the first tokens the head reads; None where it reads the patches too."""
        return 1 + int(self.dist_token) if self.pool == "cls" else None

    @property
    def features(self) -> int:
        """Width of the pooled features."""
        return self.dim * (2 if self.pool == "cls-mean" else 1)


class PatchEmbed(nn.Module):
    """Cut images (B, C, H, W) into patches and project each: (B, rows × columns, D). Equation 1, `x_p E`.

    In a hybrid the patches are cut from the features of a ResNet or a few convolutions, `backbone`.
    """

    backbone: HybridStem | ConvStem
    plain = False
    """Ask for the convolution everywhere."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.hybrid = config.hybrid
        channels = config.channels
        if config.stem is not None:
            self.backbone = HybridStem(config.channels, config.stem, config.stem_numerics)
            channels = stem_width(config.stem)
        elif config.conv_stem is not None:
            self.backbone = ConvStem(config.channels, config.conv_stem, config.conv_pool)
            channels = config.conv_stem[-1][0]
        kernel = (config.patch[0] // config.stem_stride, config.patch[1] // config.stem_stride)
        self.proj = nn.Conv2d(channels, config.dim, kernel_size=kernel, stride=kernel)

    def forward(self, images: Tensor, recompute: bool = False) -> Tensor:
        """`recompute`: what the ResNet computes is computed again in the backward pass, for less memory."""
        x = self.backbone(images, recompute) if self.hybrid else images
        if not self.plain and as_made(self.proj, nn.Conv2d) and self._multiplied(x):
            return self.product(x)
        return self.proj(x).flatten(2).transpose(1, 2)

    def _multiplied(self, x: Tensor) -> bool:
        if x.device.type == "cpu":
            return not self.hybrid and by_kernels(x, self.proj.weight.flatten(1))
        return x.device.type == "cuda"

    def product(self, x: Tensor) -> Tensor:
        """What `proj` gives, (B, rows × columns, D), as a product of patches and a matrix: kernels that do not overlap
        are one. Of three channels cuDNN's convolution, there and back, took 9 % of a step of S/16, and oneDNN's takes
        half as long again as the product by `avx512` (docs/log.md).
        """
        B, C, H, W = x.shape
        p, q = self.proj.kernel_size
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # before they are laid out anew, which is half the work
        patches = x.reshape(B, C, H // p, p, W // q, q).permute(0, 2, 4, 1, 3, 5).reshape(B, -1, C * p * q)
        return linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class Attention(nn.Module):
    """Multi-head self-attention over tokens (B, N, D) (appendix A, equations 5 to 8)."""

    plain = False
    """Ask for torch's attention everywhere."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.heads, self.head_dim = config.heads, config.dim // config.heads
        self.scale = (self.head_dim if config.attention_scale == "head" else config.dim) ** -0.5
        self.attention_dropout = config.attention_dropout
        self.qkv = Linear(config.dim, 3 * config.dim, bias=config.qkv_bias)
        if config.qk_norm:
            self.q_norm = nn.LayerNorm(self.head_dim, eps=config.norm_eps)
            self.k_norm = nn.LayerNorm(self.head_dim, eps=config.norm_eps)
        self.proj = Linear(config.dim, config.dim, bias=config.proj_bias)
        self.qk_norm, self.dropout = config.qk_norm, config.dropout

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
        read: int | None = None,
    ) -> Tensor:
        """(B, N, D), or (B, read, D): what the first `read` tokens gather from all of them."""
        return F.dropout(self.proj(self.mix(x, mask, rotation, read)), self.dropout, self.training)

    def mix(self, x: Tensor, mask: Tensor | None, rotation: tuple[Tensor, Tensor] | None, read: int | None) -> Tensor:
        """What heads gather, side by side, before the projection."""
        if mask is None and rotation is None and read is None and self._fused(x):
            return fused.attention(self.qkv(x).unflatten(2, (3, self.heads, self.head_dim)), self.scale)
        q, k, v = self.project(x, read)  # each (B, heads, tokens, d)
        if self.qk_norm:
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        if rotation is not None:
            cos, sin = rotation  # (N, d), or one for each picture (B, 1, N, d)
            q, k = rotate(q, (cos[..., :read, :], sin[..., :read, :])), rotate(k, rotation)
        return self.attend(q, k, v, mask).transpose(1, 2).flatten(2)

    def _fused(self, x: Tensor) -> bool:
        """Whether the gradients of queries, keys and values can be written side by side (`vitral.model.fused`)."""
        if self.plain or self.qk_norm or self.attention_dropout or not self.training or not torch.is_grad_enabled():
            return False
        if type(self).attend is not Attention.attend or "attend" in vars(self) or "project" in vars(self):
            return False  # someone looks inside
        return as_made(self.qkv) and fused.serves(x, self.qkv.weight) and fused.attends(x, self.head_dim)

    def project(self, x: Tensor, read: int | None) -> tuple[Tensor, ...]:
        """Queries of the first `read` tokens (None: all), keys and values of all, each (B, heads, tokens, d)."""
        B, N, D = x.shape
        if read is None:
            return self.qkv(x).view(B, N, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind()
        weight, bias = self.qkv.weight, self.qkv.bias
        parts = (None, None) if bias is None else (bias[:D], bias[D:])
        product = F.linear if self.plain else linear
        q = product(x[:, :read], weight[:D], parts[0]).view(B, read, 1, self.heads, self.head_dim)
        kv = product(x, weight[D:], parts[1]).view(B, N, 2, self.heads, self.head_dim)
        return q.permute(2, 0, 3, 1, 4)[0], *kv.permute(2, 0, 3, 1, 4).unbind()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """softmax(q kᵀ · scale) v. The one place where tokens meet; whoever looks inside wraps this call.

        `mask` is bool, True where a key counts, or numbers that are added to the scores.
        """
        dropout = self.attention_dropout if self.training else 0.0
        if explicit_is_faster(q, k):
            if mask is None and not dropout and not self.plain and fused.gathers(q, k, v):
                return fused.gather(q, k, v, self.scale)
            q, k, v = (q * self.scale).contiguous(), k.contiguous(), v.contiguous()  # else each product copies its own
            scores = q @ k.transpose(-2, -1)
            return F.dropout(masked(scores, mask).softmax(dim=-1), dropout) @ v
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=self.scale)


def masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """The scores with a mask as `F.scaled_dot_product_attention` takes it: bool, or numbers to add."""
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


def explicit_is_faster(q: Tensor, k: Tensor) -> bool:
    """Whether plain matrix products beat the fused kernel: in bf16 on a CPU, whose fused backward pass is 3 to 6 times
    slower at the lengths of pictures (benchmarks/attention.py). Long sequences stay fused, for memory's sake.
    """
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and k.shape[-2] <= 2048


class MLP(nn.Module):
    """Two dense layers on each token (B, N, D). With SwiGLU the first one is twice as wide: gate and value."""

    plain = False
    """Ask for torch's GELU everywhere."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.activation, self.dropout = config.activation, config.dropout
        self.fc1 = Linear(config.dim, config.mlp_dim * (2 if config.activation == "swiglu" else 1))
        self.fc2 = Linear(config.mlp_dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.hidden(x), self.dropout, self.training)
        return F.dropout(self.fc2(x), self.dropout, self.training)

    def _fused(self, x: Tensor) -> bool:
        """Whether GELU is a kernel of ours (`vitral.model.fused`)."""
        if self.plain or not as_made(self.fc1) or self.fc1.bias is None:
            return False
        return fused.serves(x, self.fc1.weight)

    def hidden(self, x: Tensor) -> Tensor:
        """The activations between the two layers."""
        tanh = self.activation == "gelu-tanh"
        if self.activation != "swiglu" and self._fused(x):
            return fused.linear_gelu(x, self.fc1.weight, self.fc1.bias, tanh)
        x = self.fc1(x)
        if self.activation == "swiglu":
            gate, value = x.chunk(2, dim=-1)
            return F.silu(gate) * value
        return F.gelu(x, approximate="tanh" if tanh else "none")


class LayerScale(nn.Module):
    """A learned factor for each channel of a branch."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(config.dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    """Attention, then MLP, each with a residual and a norm: equations 2 and 3 (pre-norm), or BERT's post-norm."""

    def __init__(self, config: ViTConfig, drop_path: float = 0.0):
        super().__init__()
        self.pre_norm, self.drop_path = config.norm == "pre", drop_path
        self.norm1 = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.attn = Attention(config)
        if config.layer_scale is not None:
            self.ls1 = LayerScale(config)
        self.norm2 = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.mlp = MLP(config)
        if config.layer_scale is not None:
            self.ls2 = LayerScale(config)
        self.layer_scale = config.layer_scale is not None

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
        read: int | None = None,
    ) -> Tensor:
        """(B, N, D), or only the first `read` tokens of it."""
        return self.process(self.gather(x, mask, rotation, read))

    def gather(
        self, x: Tensor, mask: Tensor | None, rotation: tuple[Tensor, Tensor] | None, read: int | None
    ) -> Tensor:
        """Attention and what belongs to it: equation 2."""
        wanted = x if read is None else x[:, :read]  # a slice of all would be copied on the way back
        if self.pre_norm:
            return wanted + self.branch(1, self.attn(self.norm1(x), mask, rotation, read))
        return self.norm1(wanted + self.branch(1, self.attn(x, mask, rotation, read)))

    def process(self, x: Tensor) -> Tensor:
        """The MLP and what belongs to it, each token by itself: equation 3."""
        if self.pre_norm:
            return x + self.branch(2, self.mlp(self.norm2(x)))
        return self.norm2(x + self.branch(2, self.mlp(x)))

    def branch(self, which: int, x: Tensor) -> Tensor:
        """What happens to a branch before it is added: LayerScale, stochastic depth."""
        if self.layer_scale:
            x = (self.ls1 if which == 1 else self.ls2)(x)
        return drop_path(x, self.drop_path, self.training)


def drop_path(x: Tensor, rate: float, training: bool) -> Tensor:
    """Stochastic depth (arXiv 1603.09382): leave out a picture's whole branch, scale the others up."""
    if rate == 0.0 or not training:
        return x
    kept = torch.rand(x.shape[0], 1, 1, device=x.device) >= rate
    return x * (kept.to(x.dtype) / (1 - rate))


class AttentionPool(nn.Module):
    """MAP head (big_vision): one learned query looks at all tokens; then a residual MLP. (B, N, D) → (B, D)."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        D = config.dim
        self.heads, self.head_dim = config.heads, D // config.heads
        self.scale = self.head_dim**-0.5
        self.latent = nn.Parameter(torch.empty(1, 1, D))
        self.q, self.kv = Linear(D, D), Linear(D, 2 * D)
        self.proj = Linear(D, D)
        self.norm = nn.LayerNorm(D, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B, N, _ = x.shape
        q = self.q(self.latent).view(1, 1, self.heads, self.head_dim).transpose(1, 2).expand(B, -1, -1, -1)
        k, v = self.kv(x).view(B, N, 2, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        x = self.proj(self.attend(q.to(k.dtype), k, v, mask).transpose(1, 2).flatten(2))
        return (x + self.mlp(self.norm(x)))[:, 0]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """As `Attention.attend`, with one query."""
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)


class ViT(nn.Module):
    """The whole network: images (B, C, H, W), standardised as the weights expect, in; logits (B, K) out."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        self.position = POSITIONS[config.position]
        self.checkpointing = False  # recompute blocks in the backward pass: less memory, more time
        self.any_size = False  # learned positions follow pictures of other sizes, which else are refused
        self.lean = True  # the last block computes only the token that is pooled; the logits are the same
        self.wide = False  # under autocast on a GPU tokens go from block to block in fp32, not in bf16
        D = config.dim

        self.patch_embed = PatchEmbed(config)
        if config.cls_token:
            self.cls_token = nn.Parameter(torch.empty(1, 1, D))
        if config.dist_token:
            self.dist_token = nn.Parameter(torch.empty(1, 1, D))
        if config.registers:
            self.reg_token = nn.Parameter(torch.empty(1, config.registers, D))
        if self.position.learned:
            self.pos_embed = nn.Parameter(torch.empty(1, config.placed + config.grid[0] * config.grid[1], D))
        rates = [config.drop_path * i / max(config.depth - 1, 1) for i in range(config.depth)]
        self.blocks = nn.ModuleList(Block(config, rate) for rate in rates)
        if config.final_norm == "tokens":
            self.norm = nn.LayerNorm(D, eps=config.norm_eps)
        if config.pool == "map":
            self.attn_pool = AttentionPool(config)
        if config.final_norm == "pooled":
            self.fc_norm = nn.LayerNorm(config.features, eps=config.norm_eps)
        if config.pre_logits:
            self.pre_logits = Linear(config.features, config.features)
        if config.classes:
            self.head = nn.Linear(config.features, config.classes)
        if config.classes and config.dist_token:
            self.head_dist = nn.Linear(config.features, config.classes)
        self._computed: dict[tuple[Any, ...], Any] = {}  # sin-cos tables and rotations by grid, device, kind
        if not next(self.parameters()).is_meta:  # there are no numbers to draw
            self.init_weights()

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits (B, K); with `classes=0` the pooled features (B, D).

        `mask` (B, rows × columns), bool, is True where a patch counts. Pictures of different sizes share a batch by
        padding to one canvas and masking the padding, which then changes nothing.
        """
        return self.answer(*self.embed(images), mask)

    def answer(self, x: Tensor, grid: Grid, mask: Tensor | None = None) -> Tensor:
        """Logits (B, K) from what `embed` gives."""
        read = self.config.read if self.lean else None
        return self.classify(self.pool(self.transform(x, grid, mask, read), mask))

    def encode(self, images: Tensor, mask: Tensor | None = None, read: int | None = None) -> Tensor:
        """Tokens (B, prefix + rows × columns, D) after the last block, before the final norm; or the first `read`."""
        return self.transform(*self.embed(images), mask, read)

    def transform(self, x: Tensor, grid: Grid, mask: Tensor | None = None, read: int | None = None) -> Tensor:
        """The blocks: `encode` from what `embed` gives."""
        if mask is not None and (mask.dtype != torch.bool or mask.shape != (len(x), grid[0] * grid[1])):
            why = f"got {mask.dtype} {tuple(mask.shape)}, want torch.bool {(len(x), grid[0] * grid[1])}"
            raise UsageError("a mask of the wrong kind or shape", why=why)  # as floats it would be added to the logits
        keys = self._key_mask(mask, prefix=self.config.prefix)
        rotation = self._rotation(grid, x.device)
        if self.training and self.config.patch_dropout:
            if mask is not None:
                raise UsageError("patch dropout goes with no mask", why="it could leave a picture without a patch")
            x, rotation = self._drop_patches(x, rotation)
        for block in self.blocks:
            wanted = read if block is self.blocks[-1] else None
            if self.checkpointing and self.training:
                x = checkpoint(block, x, keys, rotation, wanted, use_reentrant=False)
            else:
                x = block(x, keys, rotation, wanted)
        return x

    def _drop_patches(
        self, x: Tensor, rotation: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Tokens (B, N, D) without a random `patch_dropout` of each picture's patches (PatchDropout, arXiv 2208.07220),
        and the rotations (B, 1, n, d) of those that stay: the prefix, and of each picture as many patches, at least 1.
        """
        (B, N, D), prefix = x.shape, self.config.prefix
        count = max(1, round((N - prefix) * (1 - self.config.patch_dropout)))
        drawn = torch.rand(B, N - prefix, device=x.device).argsort(1)[:, :count] + prefix
        places = torch.cat([torch.arange(prefix, device=x.device).expand(B, -1), drawn], dim=1)
        rows = places + N * torch.arange(B, device=x.device)[:, None]  # of (B × N, D): rows are the fastest to gather
        x = x.flatten(0, 1).index_select(0, rows.flatten()).view(B, -1, D)
        return x, rotation and (rotation[0][places][:, None], rotation[1][places][:, None])

    def embed(self, images: Tensor) -> tuple[Tensor, Grid]:
        """Equation 1: patches, class token in front, positions added, registers between, dropout. Also the grid."""
        self._check_images(images)
        config = self.config
        grid = images.shape[2] // config.patch[0], images.shape[3] // config.patch[1]
        x = self.patch_embed(images, self.checkpointing)
        prefix: list[Tensor] = [self.cls_token] if config.cls_token else []
        if config.dist_token:
            prefix.append(self.dist_token)
        if self.position.learned:
            placed, table = self.pos_embed[:, : config.placed], self.pos_embed[:, config.placed :]
            if config.placed:
                prefix = [torch.cat(prefix, dim=1) + placed]
            x = x + (table if grid == config.grid else self._resized(table, grid))
        elif (added := self._table(grid, x.device)) is not None:
            x = x + added.to(x.dtype)
        if config.registers:
            prefix.append(self.reg_token)
        if prefix:
            x = torch.cat([*(token.to(x.dtype).expand(x.shape[0], -1, -1) for token in prefix), x], dim=1)
        if not self.wide and x.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
            x = x.to(torch.get_autocast_dtype("cuda"))
        x = x.contiguous()  # else, without a prefix, every norm would copy tokens that lie as the convolution made them
        return F.dropout(x, config.dropout, self.training), grid

    def pool(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """One vector (B, D) for each picture; equation 4 for the class token. With a distillation token (B, 2, D)."""
        config = self.config
        if config.read is not None:
            x = x[:, : config.read]  # LayerNorm is per token: what is not read need not be normalised
        if config.final_norm == "tokens":
            x = self.norm(x)
        if config.pool == "cls":
            x = x if config.dist_token else x[:, 0]
        elif config.pool == "map":
            x = self.attn_pool(x, self._key_mask(mask, prefix=config.prefix))
        else:
            skipped = 0 if config.pool == "mean-all" else config.prefix
            mean = _mean(x[:, skipped:], mask, config.prefix - skipped)
            x = torch.cat([x[:, 0], mean], dim=-1) if config.pool == "cls-mean" else mean
        return self.fc_norm(x) if config.final_norm == "pooled" else x

    def classify(self, x: Tensor) -> Tensor:
        """Logits (B, K) from what `pool` gives."""
        if self.config.dist_token:
            of_cls, of_dist = x.unbind(1)
            return (self.head(of_cls) + self.head_dist(of_dist)) / 2 if self.config.classes else x.mean(1)
        if self.config.pre_logits:
            x = torch.tanh(self.pre_logits(x))
        if self.config.classes:
            x = self.head(x)
        return torch.tanh(x) * self.config.logit_scale if self.config.logits_tanh else x

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise as the authors' code does (vit_jax `models_vit.py`, Flax defaults).

        The first pattern that fits a parameter's name decides; a parameter that none fits is a mistake of ours.
        """
        config = self.config
        table: list[tuple[str, Callable[[Tensor], object]]] = [
            ("cls_token", TOKEN_INITS[config.cls_init]),
            ("dist_token", TOKEN_INITS["normal-0.02"]),
            ("pos_embed", TOKEN_INITS[config.pos_init]),
            ("reg_token", TOKEN_INITS["normal-0.02"]),
            ("attn_pool.latent", nn.init.xavier_uniform_),
            ("patch_embed.proj.weight", lecun_normal_),
            ("patch_embed.backbone.*conv*.weight", lecun_normal_),
            ("patch_embed.backbone.*.norm3.weight", nn.init.zeros_),  # a new bottleneck is the identity
            ("pre_logits.weight", lecun_normal_),
            ("head*.weight", nn.init.zeros_),
            ("head*.bias", partial(nn.init.constant_, val=config.head_bias_init)),
            ("*.ls[12].gamma", partial(nn.init.constant_, val=config.layer_scale or 1.0)),
            ("*norm*.weight", nn.init.ones_),
            ("*.qkv.weight", xavier_uniform_each_),
            ("*.kv.weight", xavier_uniform_each_),
            ("*.mlp.fc[12].bias", partial(nn.init.normal_, std=1e-6)),
            ("*.weight", nn.init.xavier_uniform_),
            ("*.bias", nn.init.zeros_),
        ]
        for name, parameter in self.named_parameters():
            next(initialise for pattern, initialise in table if fnmatchcase(name, pattern))(parameter)

    def _check_images(self, images: Tensor) -> None:
        config = self.config
        if images.ndim != 4 or images.shape[1] != config.channels:
            wanted = f"(B, {config.channels}, {config.image[0]}, {config.image[1]})"
            raise UsageError("images of the wrong shape", why=f"got {tuple(images.shape)}, want {wanted}")
        size = images.shape[2], images.shape[3]
        if self.position.learned and not self.any_size and size != config.image:
            raise UsageError(
                f"images are {size[0]}×{size[1]}, the learned positions are for {config.image[0]}×{config.image[1]}",
                hint="resize the images, or build the model with position='sincos' or 'rotary'",
            )
        if min(size) < 1 or size[0] % config.patch[0] or size[1] % config.patch[1]:
            raise UsageError(f"image size {size[0]}×{size[1]} is not divisible by patch size {config.patch}")

    def _table(self, grid: Grid, device: torch.device) -> Tensor | None:
        def make() -> Tensor | None:
            table = self.position.table(grid, self.config.dim)
            return table if table is None else table.to(device)

        return self._once(("table", grid, device), make)

    def _resized(self, table: Tensor, grid: Grid) -> Tensor:
        """Learned positions (1, rows × columns, D) for another grid: bilinear, antialiased; centres of cells coincide.

        A product with a matrix, whose backward pass adds in the same order every time; that of `F.interpolate` does
        not on a GPU, and a run that goes on would not have the same bits.
        """

        def make() -> Tensor:
            rows, columns = map(_means, self.config.grid, grid)
            return torch.kron(rows, columns).to(table)

        with torch.autocast(table.device.type, enabled=False):  # positions stay fp32, as those of the whole grid
            return self._once(("resizing", grid, table.device, table.dtype), make) @ table

    def _rotation(self, grid: Grid, device: torch.device) -> tuple[Tensor, Tensor] | None:
        def make() -> tuple[Tensor, Tensor] | None:
            config = self.config
            rotation = self.position.rotation(grid, config.dim // config.heads, config.prefix)
            return rotation and (rotation[0].to(device), rotation[1].to(device))

        return self._once(("rotation", grid, device), make)

    def _once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """What `make` gives, made at the first call. Not as a tensor of inference mode, which no backward pass may use:
        whoever calls next may want gradients.
        """
        if key not in self._computed:
            with torch.inference_mode(False):
                self._computed[key] = make()
        return self._computed[key]

    @staticmethod
    def _key_mask(mask: Tensor | None, prefix: int) -> Tensor | None:
        """(B, patches) to (B, 1, 1, tokens): prefix tokens are always looked at."""
        return None if mask is None else F.pad(mask, (prefix, 0), value=True)[:, None, None]


def _mean(x: Tensor, mask: Tensor | None, prefix: int) -> Tensor:
    """Mean over tokens (B, N, D); with a mask over the patches, over those that count and the prefix."""
    if mask is None:
        return x.mean(1)
    weights = F.pad(mask, (prefix, 0), value=True).to(x.dtype)[..., None]
    return (x * weights).sum(1) / weights.sum(1)


def _means(old: int, new: int) -> Tensor:
    """What antialiased bilinear resizing does along one axis, as a matrix (new, old)."""
    each = torch.eye(old, dtype=torch.float64)[:, None, None]
    return F.interpolate(each, size=(1, new), mode="bilinear", antialias=True)[:, 0, 0].T.contiguous()


def xavier_uniform_each_(p: Tensor) -> None:
    """q, k and v are separate (D, D) matrices to the authors: the fan of each, not of the fused one, sets the bound."""
    for part in p.split(p.shape[1]):
        nn.init.xavier_uniform_(part)


TOKEN_INITS: dict[str, Callable[[Tensor], object]] = {
    "zeros": nn.init.zeros_,
    "normal": nn.init.normal_,
    "normal-0.02": partial(nn.init.normal_, std=0.02),
    "uniform": nn.init.uniform_,
}
