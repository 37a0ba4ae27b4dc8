"""The Vision Transformer, in the order of the data: patches, tokens, blocks, pooling, head.

    images (B, C, H, W) ─ patch_embed ─ + positions ─ blocks ─ norm ─ pool ─ head ─ logits (B, K)

Shapes: batch B, tokens N, width D, head width d, classes K. Equation numbers refer to "An Image is Worth 16x16 Words"
(arXiv 2010.11929). Optional parts that a configuration leaves out do not exist in the module, so `print(model)` and the
state dict list exactly the parts in use.

Operators with faster kernels go through `vitral.kernels`, which decides if a kernel applies. A module declares that
function as its `backend`, which can be replaced. An `observer` records attention without changing it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitral import kernels
from vitral.errors import UsageError
from vitral.kernels import linear, random
from vitral.model.config import Activation, ViTConfig
from vitral.model.conv_stem import ConvStem
from vitral.model.dropout import drop_path, random_places, tokens_at
from vitral.model.heads import reset_head
from vitral.model.initialization import init_vit_
from vitral.model.masks import check_images, check_mask, key_mask, masked_mean, pool_mask
from vitral.model.position import POSITIONS, Grid, PositionTables, Rotation, rotate, rotation_at
from vitral.model.resnet import HybridStem, stem_width
from vitral.model.watched import is_watched, pooled_queries

Observer = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor], None]
"""Arguments: q, k and v (B, heads, tokens, d), the mask, and softmax(q kᵀ · scale) v."""


class PatchEmbed(nn.Module):
    """Cut images (B, C, H, W) into patches and project each: (B, rows × columns, D). Equation 1, `x_p E`.

    With a stem, patches are cut from the features of `backbone`: a ResNet or a few convolutions.
    """

    backbone: HybridStem | ConvStem
    backend: Callable[..., Tensor] = staticmethod(kernels.patch_embed)
    """conv(x).flatten(2).transpose(1, 2)"""

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
        self.proj = nn.Conv2d(channels, config.dim, kernel_size=kernel, stride=kernel, bias=config.patch_bias)

    def forward(self, images: Tensor, recompute: bool = False) -> Tensor:
        """With `recompute`, backward recomputes the ResNet to save memory."""
        x = self.backbone(images, recompute) if self.hybrid else images
        return self.backend(x, self.proj, features=self.hybrid)


class Attention(nn.Module):
    """Multi-head self-attention over tokens (B, N, D) (appendix A, equations 5 to 8)."""

    backend: Callable[..., Tensor] = staticmethod(kernels.attention)
    """softmax(q kᵀ · scale) v, with the arguments of `F.scaled_dot_product_attention`."""
    observer: Observer | None = None
    """If set, called in each forward pass with q, k, v, the mask and the result."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.heads, self.head_dim = config.heads, config.dim // config.heads
        self.scale = (self.head_dim if config.attention_scale == "head" else config.dim) ** -0.5
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=config.qkv_bias)
        if config.qk_norm:
            self.q_norm = nn.LayerNorm(self.head_dim, eps=config.norm_eps)
            self.k_norm = nn.LayerNorm(self.head_dim, eps=config.norm_eps)
        if config.attn_norm:
            self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.proj = nn.Linear(config.dim, config.dim, bias=config.proj_bias)
        self.qk_norm, self.inner_norm = config.qk_norm, config.attn_norm
        self.attention_dropout, self.dropout = config.attention_dropout, config.dropout
        self.adjacent = config.rope is not None and config.rope.adjacent

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        rotation: Rotation | None = None,
        num_queries: int | None = None,
    ) -> Tensor:
        """Attend from all tokens, or from the first `num_queries`, to all tokens: (B, N or num_queries, D)."""
        x = self.mix(x, mask, rotation, num_queries)
        if self.inner_norm:
            x = self.norm(x)
        return random.dropout(linear(x, self.proj), self.dropout, self.training)

    def mix(self, x: Tensor, mask: Tensor | None, rotation: Rotation | None, num_queries: int | None) -> Tensor:
        """Concatenated outputs of all heads, (B, N or num_queries, D), before the projection."""
        q, k, v = self.project(x, num_queries)
        if self.qk_norm:
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        if rotation is not None:
            cos, sin = rotation
            q = rotate(q, (cos[..., :num_queries, :], sin[..., :num_queries, :]), self.adjacent)
            k = rotate(k, rotation, self.adjacent)
        return self.attend(q, k, v, mask).transpose(1, 2).flatten(2)

    def project(self, x: Tensor, num_queries: int | None) -> tuple[Tensor, ...]:
        """q of the first `num_queries` tokens (None: all), k and v of all tokens, each (B, heads, tokens, d)."""
        B, N, D = x.shape
        if num_queries is None or not kernels.untouched(self.qkv, nn.Linear):
            q, k, v = linear(x, self.qkv).view(B, N, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind()
            return q if num_queries is None else q[:, :, :num_queries], k, v
        q = kernels.linear_part(x[:, :num_queries], self.qkv, 0, D).view(B, num_queries, 1, self.heads, self.head_dim)
        kv = kernels.linear_part(x, self.qkv, D, 3 * D).view(B, N, 2, self.heads, self.head_dim)
        return q.permute(2, 0, 3, 1, 4)[0], *kv.permute(2, 0, 3, 1, 4).unbind()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """softmax(q kᵀ · scale) v, (B, heads, tokens, d). `mask`: bool, True where a key counts, or added to scores."""
        if self.observer is not None:
            v = v.clone()  # no longer a part of one tensor with q and k: gradients pass through what is observed
        out = self.backend(q, k, v, attn_mask=mask, dropout_p=self.dropout_p, scale=self.scale)
        if self.observer is not None:
            self.observer(q, k, v, mask, out)
        return out

    @property
    def dropout_p(self) -> float:
        """Dropout rate of attention weights, 0 outside training."""
        return self.attention_dropout if self.training else 0.0


def linear_activation(x: Tensor, layer: nn.Module, activation: Activation) -> Tensor:
    """activation(layer(x)), the first half of the MLP. SwiGLU halves the width."""
    if activation in ("gelu", "gelu-tanh"):
        return kernels.linear_gelu(x, layer, "tanh" if activation == "gelu-tanh" else "none")
    x = linear(x, layer)
    if activation == "swiglu":
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value
    if activation == "quick-gelu":
        return x * torch.sigmoid(1.702 * x)
    return F.relu(x) if activation == "relu" else F.silu(x)


class MLP(nn.Module):
    """Two dense layers on each token (B, N, D). With SwiGLU the first is twice as wide: gate and value."""

    backend: Callable[[Tensor, nn.Module, Activation], Tensor] = staticmethod(linear_activation)
    """activation(fc1(x))"""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.activation, self.dropout = config.activation, config.dropout
        width = config.mlp_dim * (2 if config.activation == "swiglu" else 1)
        self.fc1 = nn.Linear(config.dim, width, bias=config.mlp_bias)
        if config.mlp_norm:
            self.norm = nn.LayerNorm(config.mlp_dim, eps=config.norm_eps)
        self.inner_norm = config.mlp_norm
        self.fc2 = nn.Linear(config.mlp_dim, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        x = random.dropout(self.hidden(x), self.dropout, self.training)
        return random.dropout(linear(x, self.fc2), self.dropout, self.training)

    def hidden(self, x: Tensor) -> Tensor:
        """Activations between the two layers."""
        x = self.backend(x, self.fc1, self.activation)
        return self.norm(x) if self.inner_norm else x


class LayerScale(nn.Module):
    """Learned scale of each channel of a branch (CaiT)."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(config.dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    """Attention, then MLP, each with a residual and a norm.

    The norm applies to the branch's input (pre, equations 2 and 3), to the sum (post, as in BERT) or to the branch's
    output (res-post, as in Swin V2).
    """

    def __init__(self, config: ViTConfig, drop_path: float = 0.0):
        super().__init__()
        self.pre_norm, self.res_post, self.drop_path = config.norm == "pre", config.norm == "res-post", drop_path
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
        rotation: Rotation | None = None,
        num_queries: int | None = None,
    ) -> Tensor:
        """(B, N, D) to (B, N, D), or to its first `num_queries` tokens only."""
        x = self.attention_branch(x, mask, rotation, num_queries)
        return self.mlp_branch(x)

    def attention_branch(
        self, x: Tensor, mask: Tensor | None, rotation: Rotation | None, num_queries: int | None
    ) -> Tensor:
        """Equation 2: x + attention."""
        residual = x if num_queries is None else x[:, :num_queries]  # backward would copy the gradient of x[:, :None]
        if self.pre_norm:
            return residual + self.scaled(1, self.attn(self.norm1(x), mask, rotation, num_queries))
        if self.res_post:
            return residual + self.scaled(1, self.norm1(self.attn(x, mask, rotation, num_queries)))
        return self.norm1(residual + self.scaled(1, self.attn(x, mask, rotation, num_queries)))

    def mlp_branch(self, x: Tensor) -> Tensor:
        """Equation 3: x + MLP, token by token."""
        if self.pre_norm:
            return x + self.scaled(2, self.mlp(self.norm2(x)))
        if self.res_post:
            return x + self.scaled(2, self.norm2(self.mlp(x)))
        return self.norm2(x + self.scaled(2, self.mlp(x)))

    def scaled(self, branch: int, x: Tensor) -> Tensor:
        """Apply LayerScale and stochastic depth to the output of branch 1 or 2."""
        if self.layer_scale:
            x = (self.ls1 if branch == 1 else self.ls2)(x)
        return drop_path(x, self.drop_path, self.training)


class AttentionPool(nn.Module):
    """MAP head (big_vision): one learned query attends to all tokens, then a residual MLP. (B, N, D) to (B, D)."""

    backend: Callable[..., Tensor] = F.scaled_dot_product_attention
    observer: Observer | None = None
    """As in `Attention`."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        D = config.dim
        self.heads = config.pool_heads or config.heads
        self.head_dim = D // self.heads
        self.scale = self.head_dim**-0.5
        self.latent = nn.Parameter(torch.empty(1, 1, D))
        self.q, self.kv = nn.Linear(D, D), nn.Linear(D, 2 * D)
        self.proj = nn.Linear(D, D)
        self.norm = nn.LayerNorm(D, eps=config.norm_eps)
        self.mlp = MLP(replace(config, mlp_norm=False, mlp_bias=True))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B, N, _ = x.shape
        q = linear(self.latent, self.q).view(1, 1, self.heads, self.head_dim).transpose(1, 2).expand(B, -1, -1, -1)
        k, v = linear(x, self.kv).view(B, N, 2, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        mixed = self.attend(q.to(k.dtype), k, v, mask).transpose(1, 2).flatten(2)
        x = linear(mixed, self.proj)
        return (x + self.mlp(self.norm(x)))[:, 0]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """As `Attention.attend`, with one query."""
        out = self.backend(q, k, v, attn_mask=mask, scale=self.scale)
        if self.observer is not None:
            self.observer(q, k, v, mask, out)
        return out


class ViT(nn.Module):
    """Vision Transformer: images (B, C, H, W), standardized as the weights expect, to logits (B, K).

    Example:
        model = vitral.create("Ti/16", classes=2, image_size=64)
        logits = model(torch.zeros(1, 3, 64, 64))
        maps = model.features(torch.zeros(1, 3, 64, 64), layers=[3, -1])
    """

    tanh: Callable[[Tensor], Tensor] = torch.tanh
    """The activation of pre-logits and of bounded logits."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        self.position = POSITIONS[config.position]
        self.checkpointing = False  # recompute blocks in backward: less memory, more time
        self.any_size = False  # resize learned positions for other image sizes instead of refusing them
        self.prune_last_block = True  # compute only the pooled tokens in the last block, unless it is hooked
        self.fp32_residual = False  # keep tokens between blocks in fp32, not bf16, under autocast on a GPU
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
        if config.rope is not None and config.rope.kind == "mixed":
            self.rope_freqs = nn.Parameter(torch.empty(2, config.depth, config.heads, D // config.heads // 2))
        if config.norm_pre:
            self.norm_pre = nn.LayerNorm(D, eps=config.norm_eps)
        rates = [config.drop_path * i / max(config.depth - 1, 1) for i in range(config.depth)]
        self.blocks = nn.ModuleList(Block(config, rate) for rate in rates)
        if config.final_norm == "tokens":
            self.norm = nn.LayerNorm(D, eps=config.norm_eps)
        if config.pool == "map":
            self.attn_pool = AttentionPool(config)
        if config.final_norm == "pooled":
            self.fc_norm = nn.LayerNorm(config.features, eps=config.norm_eps)
        if config.pre_logits:
            self.pre_logits = nn.Linear(config.features, config.features)
        if config.classes:
            self.head = nn.Linear(config.features, config.classes)
        if config.classes and config.dist_token:
            self.head_dist = nn.Linear(config.features, config.classes)
        self._tables = PositionTables(config.position, config.rope, D, config.heads, config.prefix)
        if not next(self.parameters()).is_meta:  # a meta tensor has no values to draw
            self.init_weights()

    def init_weights(self) -> None:
        """Initialize every parameter as the authors' code does."""
        init_vit_(self, self.config)

    @property
    def num_features(self) -> int:
        """Width of the pooled features, the input of the head."""
        return self.config.features

    def reset_classifier(self, classes: int) -> None:
        """Replace the head by a new one for so many classes; 0 leaves it out. Build the optimizer afterwards."""
        self.config = replace(self.config, classes=classes)
        for name in ("head", "head_dist") if self.config.dist_token else ("head",):
            reset_head(self, name, self.num_features, classes, self.config.head_bias_init)

    def features(self, images: Tensor, layers: Sequence[int]) -> list[Tensor]:
        """Patches (B, D, rows, columns) after each of these blocks, before the final norm.

        `layers` count from 0, or from −1 for the last block. Raises `UsageError` for a block that does not exist.
        """
        if not all(-len(self.blocks) <= layer < len(self.blocks) for layer in layers):
            raise UsageError(f"layers {list(layers)} of a network of {len(self.blocks)} blocks")
        x, grid = self.embed(images)
        rotations, after = self.rotations(grid, x.device), list[Tensor]()
        for number, block in enumerate(self.blocks):
            x = block(x, None, rotations[number % len(rotations)])
            after.append(x[:, self.config.prefix :].transpose(1, 2).unflatten(2, grid))
        return [after[layer] for layer in layers]

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits (B, K); with `classes=0` the pooled features (B, D).

        `mask` (B, rows × columns), bool, is True where a patch counts. To batch images of different sizes, pad them to
        one size and mask the padding, which then has no effect.
        """
        return self.answer(*self.embed(images), mask)

    def answer(self, x: Tensor, grid: Grid, mask: Tensor | None = None) -> Tensor:
        """Logits (B, K) from the output of `embed`."""
        return self.classify(self.pool(self.transform(x, grid, mask, pooled_queries(self)), mask))

    def encode(self, images: Tensor, mask: Tensor | None = None, num_queries: int | None = None) -> Tensor:
        """Tokens (B, prefix + rows × columns, D), or the first `num_queries`, between last block and final norm."""
        return self.transform(*self.embed(images), mask, num_queries)

    def embed(self, images: Tensor) -> tuple[Tensor, Grid]:
        """Equation 1: tokens (class token, registers, patches, with positions added) and the grid of patches."""
        check_images(images, self.config, self.position.learned and not self.any_size)
        grid = images.shape[2] // self.config.patch[0], images.shape[3] // self.config.patch[1]
        return self.place(self.patch_embed(images, self.checkpointing), grid), grid

    def place(self, x: Tensor, grid: Grid) -> Tensor:
        """Tokens from patches (B, rows × columns, D): positions added, class token and registers in front."""
        config = self.config
        prefix: list[Tensor] = [self.cls_token] if config.cls_token else []
        if config.dist_token:
            prefix.append(self.dist_token)
        if config.register_position:
            prefix.append(self.reg_token)
        if self.position.learned:
            placed, table = self.pos_embed[:, : config.placed], self.pos_embed[:, config.placed :]
            if config.placed:
                prefix = [torch.cat(prefix, dim=1) + placed]
            x = x + (table if grid == config.grid else self._tables.resized(table, config.grid, grid))
        elif (added := self._tables.added(grid, x.device)) is not None:
            x = x + added.to(x.dtype)
        if config.registers and not config.register_position:
            prefix.append(self.reg_token)
        if prefix:
            x = torch.cat([*(token.to(x.dtype).expand(x.shape[0], -1, -1) for token in prefix), x], dim=1)
        if not self.fp32_residual:
            x = kernels.residual_stream(x)
        x = x.contiguous()  # without a prefix, tokens have the convolution's layout, which every norm would copy
        x = random.dropout(x, config.dropout, self.training)
        return self.norm_pre(x) if config.norm_pre else x

    def transform(
        self,
        x: Tensor,
        grid: Grid,
        mask: Tensor | None = None,
        num_queries: int | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """Run the blocks on the output of `embed`. The last block computes `num_queries` tokens (None: all).

        With `places` (B, n), indices into each image's tokens, all other tokens are dropped.
        """
        check_mask(mask, x.shape[0], grid)  # len() would fix the batch size of an exported network
        keys = key_mask(mask, self.config.prefix)
        rotations = self.rotations(grid, x.device)
        if places is None and self.training and self.config.patch_dropout:
            places = random_places(x, self.config.patch_dropout, self.config.prefix)
        if places is not None:
            if mask is not None:
                raise UsageError("patch dropout goes with no mask", why="it could leave an image without a patch")
            x = tokens_at(x, places)
            rotations = [rotation and rotation_at(rotation, places) for rotation in rotations]
        return self.run_blocks(x, keys, rotations, num_queries)

    def run_blocks(
        self, x: Tensor, keys: Tensor | None, rotations: Sequence[Rotation | None], num_queries: int | None = None
    ) -> Tensor:
        """Run the blocks on tokens (B, T, D) that attend to the `keys`, with rotations of their places."""
        for number, block in enumerate(self.blocks):
            queries = num_queries if block is self.blocks[-1] else None
            rotation = rotations[number % len(rotations)]
            if self.checkpointing and self.training:
                x = checkpoint(block, x, keys, rotation, queries, use_reentrant=False)
            else:
                x = block(x, keys, rotation, queries)
        return x

    def pool(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Pooled features (B, D), equation 4 for the class token; (B, 2, D) with a distillation token."""
        config = self.config
        if config.final_norm == "tokens" and config.num_queries is not None and not is_watched(self.norm):
            x = x[:, : config.num_queries]  # LayerNorm is per token: normalize only what the head reads
        if config.final_norm == "tokens":
            x = self.norm(x)
        if config.pool == "cls":
            x = x[:, :2] if config.dist_token else x[:, 0]
        elif config.pool == "map":
            x = self.attn_pool(x, pool_mask(x, mask, config.prefix, config.pool_prefix))
        else:
            skipped = 0 if config.pool == "mean-all" else config.prefix
            mean = masked_mean(x[:, skipped:], mask, config.prefix - skipped)
            x = torch.cat([x[:, 0], mean], dim=-1) if config.pool == "cls-mean" else mean
        return self.fc_norm(x) if config.final_norm == "pooled" else x

    def classify(self, x: Tensor) -> Tensor:
        """Logits (B, K) from the output of `pool`."""
        if self.config.dist_token:
            of_cls, of_dist = x.unbind(1)
            return (self.head(of_cls) + self.head_dist(of_dist)) / 2 if self.config.classes else x.mean(1)
        if self.config.pre_logits:
            x = self.tanh(linear(x, self.pre_logits))
        if self.config.classes:
            x = self.head(x)
        return self.tanh(x) * self.config.logit_scale if self.config.logits_tanh else x

    def rotations(self, grid: Grid, device: torch.device) -> list[Rotation | None]:
        """Rotations of the blocks, one each or a single one that all share; `[None]` without rotary positions."""
        config = self.config
        if config.rope is not None and config.rope.kind == "mixed":
            return [config.rope.learned_rotation(of, grid, config.prefix) for of in self.rope_freqs.unbind(1)]
        return [self._tables.rotation(grid, device)]
