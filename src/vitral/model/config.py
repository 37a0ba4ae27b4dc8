"""`ViTConfig`: all choices of a Vision Transformer, checked together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from vitral.errors import UsageError, unknown
from vitral.kinds import named_fields
from vitral.model.config_base import ConfigBase, pair
from vitral.model.conv_stem import ConvLayers
from vitral.model.position import POSITIONS, Grid, Rope
from vitral.model.resnet import HybridNumerics, stem_stride

Pool = Literal["cls", "mean", "mean-all", "map", "cls-mean"]
Activation = Literal["gelu", "gelu-tanh", "swiglu", "quick-gelu", "relu", "silu"]


@named_fields
@dataclass(frozen=True)
class ViTConfig(ConfigBase):
    """Shape and arithmetic of a ViT. Defaults: ViT-B/16 as in the paper.

    Sizes are in pixels; an integer is a square.

    Args:
        image_size: Height and width of the images.
        patch_size: Height and width of the part of the image that a token represents; a stem does not change it.
        channels: Channels of the images.
        classes: Outputs of the head; 0 leaves the head out.
        stem: ResNet before the patches: the number of blocks in each stage. (): only its first convolution and pooling;
            None: no ResNet.
        stem_numerics: A name in `HYBRID_NUMERICS`; timm's epsilons differ from the authors'.
        conv_stem: 3×3 convolutions before the patches, (channels, stride) of each; None: no convolutions.
        conv_pool: Max pooling instead of strides, after the first convolution.
        dim: Width D of the tokens.
        depth: Number of blocks.
        heads: Attention heads of each block.
        mlp_dim: Hidden width of each MLP.
        patch_bias: Bias of the patch projection.
        position: Kind of positions, a name in `POSITIONS`.
        rope: Rotary positions with settings of their own, in addition to `position`, which may be "none". The settings
            of `position="rotary"` are DINOv3's.
        cls_token: Add a class token.
        cls_position: The class token has a learned position too (paper; not in DeiT-III).
        dist_token: Add DeiT's distillation token and second head; logits are the mean of both heads.
        registers: Number of extra tokens that no head reads (arXiv 2309.16588).
        register_position: Registers have learned positions too, like the class token.
        pool_heads: Heads of attention pooling; None: as `heads`.
        pool_prefix: Attention pooling reads the tokens before the patches too.
        pool: cls: the class token; mean: the mean of the patches; mean-all: of all tokens; cls-mean: class token and
            mean, concatenated; map: attention pooling.
        norm: Norm of a branch's input (pre), of the sum (post), or of the branch's output (res-post).
        norm_eps: Epsilon of all norms.
        norm_pre: A norm after the embeddings (CLIP).
        attn_norm: A norm before the projection of the attention (BEiT-3, EVA-02).
        mlp_norm: A norm before the second layer of the MLP.
        final_norm: Norm after the last block: of the tokens, of the pooled vector, or none.
        qkv_bias: Bias of queries, keys and values.
        proj_bias: Bias of the projection of the attention.
        mlp_bias: Bias of both layers of the MLP.
        qk_norm: Norms of queries and keys.
        attention_scale: Scores are divided by √(head width) (head), or by √dim as in write-up 000 (model).
        layer_scale: Initial factor γ of each branch (CaiT, DeiT-III); None: no factor.
        activation: Activation of the MLP. gelu is exact, by erf; the authors' JAX code uses gelu-tanh.
        pre_logits: A linear layer of D outputs and a tanh before the head, as at pretraining (§3.2).
        logits_tanh: Apply tanh to the logits, as in reproduction 001 (docs/write-ups.md).
        logit_scale: With `logits_tanh`: factor on the bounded logits. With 1, the loss can hardly separate the classes.
        dropout: Rate after positions and after every dense layer but qkv (B.1).
        attention_dropout: Dropout rate of the attention weights.
        drop_path: Stochastic depth of the last block; grows linearly from 0.
        patch_dropout: Fraction of the patches dropped in training (arXiv 2208.07220).
        cls_init: Initial values of the class token.
        pos_init: Initial values of learned positions.
        head_bias_init: Initial bias of the head.

    Example:
        config = vitral.ViTConfig(image_size=32, patch_size=4, classes=10, dim=64, depth=2, heads=2, mlp_dim=128)
        model = vitral.ViT(config)
    """

    image_size: int | tuple[int, int] = 224
    patch_size: int | tuple[int, int] = 16
    channels: int = 3
    classes: int = 1000

    stem: tuple[int, ...] | None = None
    stem_numerics: HybridNumerics = "authors"
    conv_stem: ConvLayers | None = None
    conv_pool: bool = False

    dim: int = 768
    depth: int = 12
    heads: int = 12
    mlp_dim: int = 3072

    patch_bias: bool = True

    position: str = "learned"
    rope: Rope | None = None
    cls_token: bool = True
    cls_position: bool = True
    dist_token: bool = False
    registers: int = 0
    register_position: bool = False
    pool_heads: int | None = None
    pool_prefix: bool = True
    pool: Pool = "cls"

    norm: Literal["pre", "post", "res-post"] = "pre"
    norm_eps: float = 1e-6
    norm_pre: bool = False
    attn_norm: bool = False
    mlp_norm: bool = False
    final_norm: Literal["tokens", "pooled", "none"] = "tokens"
    qkv_bias: bool = True
    proj_bias: bool = True
    mlp_bias: bool = True
    qk_norm: bool = False
    attention_scale: Literal["head", "model"] = "head"
    layer_scale: float | None = None
    activation: Activation = "gelu"

    pre_logits: bool = False
    logits_tanh: bool = False
    logit_scale: float = 1.0

    dropout: float = 0.0
    attention_dropout: float = 0.0
    drop_path: float = 0.0
    patch_dropout: float = 0.0

    cls_init: Literal["zeros", "normal"] = "zeros"
    pos_init: Literal["normal-0.02", "normal", "uniform", "zeros"] = "normal-0.02"
    head_bias_init: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", pair(self.image_size))
        object.__setattr__(self, "patch_size", pair(self.patch_size))
        self.check_kinds()
        self._check_bounds()
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
            raise UsageError(f"logit scale {self.logit_scale:g} is not possible here", why=why, hint="leave it out")
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
            small = [h for h in range(1, math.isqrt(self.dim) + 1) if self.dim % h == 0]
            near = min(sorted({*small, *(self.dim // h for h in small)}), key=lambda h: abs(h - self.heads))
            raise UsageError(f"width {self.dim} is not divisible by {self.heads} heads", hint=f"--heads {near}")
        if self.pool_heads is not None and (self.pool_heads < 1 or self.dim % self.pool_heads):
            raise UsageError(f"width {self.dim} is not divisible by {self.pool_heads} heads of attention pooling")
        if self.position not in POSITIONS:
            raise unknown("position", self.position, POSITIONS)
        for position, what, width in (("sincos", "width", self.dim), ("rotary", "head width", self.dim // self.heads)):
            if self.position == position and width % 4:
                raise UsageError(f"{position} positions need a {what} divisible by 4, not {width}")
        if self.rope and (self.position == "rotary" or self.dim // self.heads % 4):
            raise UsageError("rotary positions are of one kind, and need a head width divisible by 4")
        if self.register_position and not (self.registers and (self.cls_position or not self.cls_token)):
            raise UsageError("registers with positions need registers, and a class token with a position if any")
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
            why = f"the stem has a stride of {self.stem_stride} already"
            hint = f"a patch size of {-(-max(self.patch) // self.stem_stride) * self.stem_stride}"
            raise UsageError(f"patch size {self.patch[0]}×{self.patch[1]} does not fit the stem", why=why, hint=hint)

    @property
    def hybrid(self) -> bool:
        """True if patches are cut from the features of a stem, not from the image itself."""
        return self.stem is not None or self.conv_stem is not None

    @property
    def stem_stride(self) -> int:
        """Stride of the stem in pixels; 1 without a stem."""
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
        """Number of tokens before the patches: class token, distillation token, registers."""
        return int(self.cls_token) + int(self.dist_token) + self.registers

    @property
    def placed(self) -> int:
        """Number of prefix tokens with a learned position."""
        registers = self.registers if self.register_position else 0
        return (int(self.cls_token) + int(self.dist_token) if self.cls_position else 0) + registers

    @property
    def kernel_blocks(self) -> bool:
        """True if the packed and integer engines support every part of the blocks."""
        usual = self.norm in ("pre", "post") and self.activation in ("gelu", "gelu-tanh", "swiglu")
        return usual and not (self.attn_norm or self.mlp_norm) and (self.rope is None or self.rope.kind == "axial")

    @property
    def num_queries(self) -> int | None:
        """Number of leading tokens whose outputs the head reads; None if it reads the patches too."""
        return 1 + int(self.dist_token) if self.pool == "cls" else None

    @property
    def features(self) -> int:
        """Width of the pooled features."""
        return self.dim * (2 if self.pool == "cls-mean" else 1)
