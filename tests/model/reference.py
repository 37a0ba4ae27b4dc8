"""Reference implementation of the network in numpy, as the formulas are written.

Slow on purpose: heads and positions are loops, softmax is explicit, rotary positions are complex numbers.
"""

from __future__ import annotations

import math

import numpy as np
from numpy import ndarray as Array

from vitral.model import ViTConfig

State = dict[str, Array]


def logits(state: State, config: ViTConfig, images: Array, mask: Array | None = None) -> Array:
    """Images (B, C, H, W) to logits (B, K); mask (B, patches) True where a patch counts."""
    return np.stack([one(state, config, x, None if mask is None else mask[i]) for i, x in enumerate(images)])


def one(s: State, c: ViTConfig, image: Array, mask: Array | None) -> Array:
    x = tokens(s, c, patches(s, c, image))
    if c.norm_pre:
        x = norm(s, "norm_pre", x, c)
    seen = np.ones(len(x), bool)
    if mask is not None:
        seen[c.prefix :] = mask
    for i in range(c.depth):
        own = {k.removeprefix(f"blocks.{i}."): v for k, v in s.items() if k.startswith(f"blocks.{i}.")}
        if "rope_freqs" in s:
            own["rope_freqs"] = s["rope_freqs"][:, i]
        x = block(own, c, x, seen)
    x = pooled(s, c, x, seen)
    if c.dist_token:
        return (dense(s, "head", x[0]) + dense(s, "head_dist", x[1])) / 2
    if c.pre_logits:
        x = np.tanh(dense(s, "pre_logits", x))
    if c.classes:
        x = dense(s, "head", x)
    return np.tanh(x) * c.logit_scale if c.logits_tanh else x


def patches(s: State, c: ViTConfig, image: Array) -> Array:
    if c.stem is not None:
        image = hybrid_stem(s, c, image)
    for layer, (_, stride) in enumerate(c.conv_stem or ()):
        image = conv_layer(s, f"patch_embed.backbone.layers.{layer}", image, stride, pool=c.conv_pool and layer > 0)
    (rows, columns), (p, q) = c.grid, s["patch_embed.proj.weight"].shape[2:]
    cut = [image[:, r * p : (r + 1) * p, k * q : (k + 1) * q].ravel() for r in range(rows) for k in range(columns)]
    kernel = s["patch_embed.proj.weight"]
    return np.array(cut) @ kernel.reshape(len(kernel), -1).T + s.get("patch_embed.proj.bias", 0.0)


def hybrid_stem(s: State, c: ViTConfig, x: Array) -> Array:
    """ResNet of vit_jax `models_resnet.py` on one image (C, H, W), with vitral's parameter names."""
    s = {k.removeprefix("patch_embed.backbone."): v for k, v in s.items() if k.startswith("patch_embed.backbone.")}
    x = np.maximum(group_norm(s, c, "stem.norm", conv(s, c, "stem.conv", x, 2)), 0)
    x = slide(x, 3, 2, -np.inf).max(axis=(1, 2))
    for stage, units in enumerate(c.stem or ()):
        for unit in range(units):
            name, stride = f"stages.{stage}.blocks.{unit}", 2 if stage and not unit else 1
            residual = x
            if not unit:
                residual = group_norm(s, c, f"{name}.downsample.norm", conv(s, c, f"{name}.downsample.conv", x, stride))
            y = np.maximum(group_norm(s, c, f"{name}.norm1", conv(s, c, f"{name}.conv1", x, 1)), 0)
            y = np.maximum(group_norm(s, c, f"{name}.norm2", conv(s, c, f"{name}.conv2", y, stride)), 0)
            y = group_norm(s, c, f"{name}.norm3", conv(s, c, f"{name}.conv3", y, 1))
            x = np.maximum(residual + y, 0)
    return x


def conv_layer(s: State, name: str, x: Array, stride: int, pool: bool) -> Array:
    """3×3 convolution with padding of one pixel, norm by running statistics, GELU."""
    seen = np.lib.stride_tricks.sliding_window_view(np.pad(x, [(0, 0), (1, 1), (1, 1)]), (3, 3), axis=(1, 2))
    out = np.einsum("cijpq,ocpq->oij", seen, s[f"{name}.conv.weight"])
    if pool:
        out = out.reshape(len(out), out.shape[1] // stride, stride, out.shape[2] // stride, stride).max(axis=(2, 4))
    else:
        out = out[:, ::stride, ::stride]
    mean, variance, weight, bias = (
        s[f"{name}.norm.{part}"][:, None, None] for part in ("running_mean", "running_var", "weight", "bias")
    )
    y = gelu((out - mean) / np.sqrt(variance + 1e-5) * weight + bias)
    return x + y if x.shape == y.shape else y


def gelu(x: Array) -> Array:
    return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def conv(s: State, c: ViTConfig, name: str, x: Array, stride: int) -> Array:
    kernel = s[f"{name}.weight"]
    centered = kernel - kernel.mean(axis=(1, 2, 3), keepdims=True)
    variance = (centered**2).mean(axis=(1, 2, 3), keepdims=True)
    spread = np.sqrt(variance) + 1e-5 if c.stem_numerics == "authors" else np.sqrt(variance + 1e-8)
    return np.einsum("cijhw,ocij->ohw", slide(x, kernel.shape[2], stride, 0.0), centered / spread)


def slide(x: Array, kernel: int, stride: int, border: float) -> Array:
    """Windows (C, kernel, kernel, rows, columns) of a convolution with XLA's SAME padding."""
    places = [-(-n // stride) for n in x.shape[1:]]
    short = [max((m - 1) * stride + kernel - n, 0) for m, n in zip(places, x.shape[1:], strict=True)]
    x = np.pad(x, [(0, 0), *((n // 2, n - n // 2) for n in short)], constant_values=border)
    out = np.empty((len(x), kernel, kernel, *places))
    for i, j in np.ndindex(kernel, kernel):
        out[:, i, j] = x[:, i:, j:][:, ::stride, ::stride][:, : places[0], : places[1]]
    return out


def group_norm(s: State, c: ViTConfig, name: str, x: Array) -> Array:
    groups = x.reshape(32, -1)
    centered = groups - groups.mean(axis=1, keepdims=True)
    eps = 1e-6 if c.stem_numerics == "authors" else 1e-5
    y = (centered / np.sqrt((centered**2).mean(axis=1, keepdims=True) + eps)).reshape(x.shape)
    return y * s[f"{name}.weight"][:, None, None] + s[f"{name}.bias"][:, None, None]


def tokens(s: State, c: ViTConfig, x: Array) -> Array:
    front = [s["cls_token"][0]] if c.cls_token else []
    if c.dist_token:
        front.append(s["dist_token"][0])
    if c.register_position:
        front.append(s["reg_token"][0])
        front = [np.concatenate(front)]
    if c.position == "learned" and (c.register_position or (c.cls_token and c.cls_position)):
        places = s["pos_embed"][0]
        front = [np.concatenate(front)]
        front = [front[0] + places[: len(front[0])]]
        x = x + places[len(front[0]) :]
    elif c.position == "learned":
        x = x + s["pos_embed"][0]
    elif c.position == "sincos":
        x = x + np.array([wave(column, c.dim) + wave(row, c.dim) for row, column in np.ndindex(*c.grid)])
    if c.registers and not c.register_position:
        front.append(s["reg_token"][0])
    return np.concatenate([*front, x])


def wave(place: int, dim: int) -> list[float]:
    n = dim // 4
    angles = [place / 10_000 ** (k / (n - 1)) for k in range(n)]
    return [math.sin(a) for a in angles] + [math.cos(a) for a in angles]


def turn(c: ViTConfig, x: Array) -> Array:
    """Rotary positions: the pair (i, i + d/2) of each patch is complex; rows rotate the first half of pairs."""
    half = x.shape[1] // 2
    z = x[:, :half] + 1j * x[:, half:]
    (rows, columns), quarter = c.grid, half // 2
    for n, (row, column) in enumerate(np.ndindex(rows, columns)):
        for i in range(quarter):
            speed = 2 * math.pi / 100 ** (i / quarter)
            z[c.prefix + n, i] *= np.exp(1j * speed * ((2 * row + 1) / rows - 1))
            z[c.prefix + n, quarter + i] *= np.exp(1j * speed * ((2 * column + 1) / columns - 1))
    return np.concatenate([z.real, z.imag], axis=1)


def turn_by_rope(s: State, c: ViTConfig, x: Array, head: int) -> Array:
    """Rotary positions with integer coordinates, of one head (N, d)."""
    d, z = x.shape[1], np.array(x)
    pairs = [(2 * i, 2 * i + 1) if c.rope.adjacent else (i, i + d // 2) for i in range(d // 2)]
    for n, place in enumerate(np.ndindex(*c.grid)):
        at = [i + c.rope.offset for i in place]
        if c.rope.reference:
            at = [i / size * to for i, size, to in zip(at, c.grid, c.rope.reference, strict=True)]
        first, second = reversed(at) if c.rope.columns_first else at
        for i, (a, b) in enumerate(pairs):
            if c.rope.kind == "mixed":
                angle = first * s["rope_freqs"][0, head, i] + second * s["rope_freqs"][1, head, i]
            else:
                angle = (first if i < d // 4 else second) / c.rope.base ** (i % (d // 4) / (d // 4))
            row = x[c.prefix + n]
            z[c.prefix + n, a] = row[a] * math.cos(angle) - row[b] * math.sin(angle)
            z[c.prefix + n, b] = row[b] * math.cos(angle) + row[a] * math.sin(angle)
    return z


def block(s: State, c: ViTConfig, x: Array, seen: Array) -> Array:
    gamma1, gamma2 = (s["ls1.gamma"], s["ls2.gamma"]) if c.layer_scale is not None else (1.0, 1.0)
    if c.norm == "pre":
        x = x + gamma1 * attention(s, c, norm(s, "norm1", x, c), seen)
        return x + gamma2 * mlp(s, "mlp", c, norm(s, "norm2", x, c))
    if c.norm == "res-post":
        x = x + gamma1 * norm(s, "norm1", attention(s, c, x, seen), c)
        return x + gamma2 * norm(s, "norm2", mlp(s, "mlp", c, x), c)
    x = norm(s, "norm1", x + gamma1 * attention(s, c, x, seen), c)
    return norm(s, "norm2", x + gamma2 * mlp(s, "mlp", c, x), c)


def attention(s: State, c: ViTConfig, x: Array, seen: Array) -> Array:
    width = c.dim // c.heads
    queries, keys, values = np.split(dense(s, "attn.qkv", x), 3, axis=1)
    out = []
    for head in range(c.heads):
        q, k, v = (part[:, head * width : (head + 1) * width] for part in (queries, keys, values))
        if c.qk_norm:
            q, k = norm(s, "attn.q_norm", q, c), norm(s, "attn.k_norm", k, c)
        if c.position == "rotary":
            q, k = turn(c, q), turn(c, k)
        if c.rope:
            q, k = turn_by_rope(s, c, q, head), turn_by_rope(s, c, k, head)
        scale = math.sqrt(width if c.attention_scale == "head" else c.dim)
        out.append(weights(np.einsum("qd,kd->qk", q, k) / scale, seen) @ v)
    y = np.concatenate(out, axis=1)
    return dense(s, "attn.proj", norm(s, "attn.norm", y, c) if c.attn_norm else y)


def weights(scores: Array, seen: Array) -> Array:
    scores = np.where(seen[None], scores, -np.inf)
    raised = np.exp(scores - scores.max(axis=1, keepdims=True))
    return raised / raised.sum(axis=1, keepdims=True)


def mlp(s: State, name: str, c: ViTConfig, x: Array) -> Array:
    x = dense(s, f"{name}.fc1", x)
    if c.activation == "swiglu":
        gate, value = np.split(x, 2, axis=-1)
        x = gate / (1 + np.exp(-gate)) * value
    elif c.activation == "gelu":
        x = gelu(x)
    elif c.activation == "relu":
        x = np.maximum(x, 0)
    elif c.activation in ("silu", "quick-gelu"):
        x = x / (1 + np.exp(-x * (1.702 if c.activation == "quick-gelu" else 1)))
    else:
        x = x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if f"{name}.norm.weight" in s:
        x = norm(s, f"{name}.norm", x, c)
    return dense(s, f"{name}.fc2", x)


def pooled(s: State, c: ViTConfig, x: Array, seen: Array) -> Array:
    if c.final_norm == "tokens":
        x = norm(s, "norm", x, c)
    if c.pool == "cls":
        x = x[:2] if c.dist_token else x[0]
    elif c.pool == "cls-mean":
        x = np.concatenate([x[0], x[c.prefix :][seen[c.prefix :]].mean(axis=0)])
    elif c.pool == "mean":
        x = x[c.prefix :][seen[c.prefix :]].mean(axis=0)
    elif c.pool == "mean-all":
        x = x[seen].mean(axis=0)
    else:
        x = attention_pool(s, c, x, seen if c.pool_prefix else seen & (np.arange(len(seen)) >= c.prefix))
    return norm(s, "fc_norm", x, c) if c.final_norm == "pooled" else x


def attention_pool(s: State, c: ViTConfig, x: Array, seen: Array) -> Array:
    heads = c.pool_heads or c.heads
    width = c.dim // heads
    query = dense(s, "attn_pool.q", s["attn_pool.latent"][0])
    keys, values = np.split(dense(s, "attn_pool.kv", x), 2, axis=1)
    out = []
    for head in range(heads):
        q, k, v = (part[:, head * width : (head + 1) * width] for part in (query, keys, values))
        out.append(weights(q @ k.T / math.sqrt(width), seen) @ v)
    y = dense(s, "attn_pool.proj", np.concatenate(out, axis=1))
    return (y + mlp(s, "attn_pool.mlp", c, norm(s, "attn_pool.norm", y, c)))[0]


def dense(s: State, name: str, x: Array) -> Array:
    return np.einsum("...i,oi->...o", x, s[f"{name}.weight"]) + s.get(f"{name}.bias", 0.0)


def norm(s: State, name: str, x: Array, c: ViTConfig) -> Array:
    centered = x - x.mean(axis=-1, keepdims=True)
    spread = np.sqrt((centered**2).mean(axis=-1, keepdims=True) + c.norm_eps)
    return centered / spread * s[f"{name}.weight"] + s[f"{name}.bias"]
