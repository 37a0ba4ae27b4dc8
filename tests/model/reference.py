"""The network once more, in numpy and as the formulas are written, for the tests to compare with.

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
    seen = np.ones(len(x), bool)
    if mask is not None:
        seen[c.prefix :] = mask
    for i in range(c.depth):
        x = block({k.removeprefix(f"blocks.{i}."): v for k, v in s.items() if k.startswith(f"blocks.{i}.")}, c, x, seen)
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
    return np.array(cut) @ kernel.reshape(len(kernel), -1).T + s["patch_embed.proj.bias"]


def hybrid_stem(s: State, c: ViTConfig, x: Array) -> Array:
    """The ResNet of vit_jax `models_resnet.py` on one picture (C, H, W), under our names."""
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
    """A 3×3 convolution with a border of one pixel all around, the norm by what it has seen of batches, GELU."""
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
    centred = kernel - kernel.mean(axis=(1, 2, 3), keepdims=True)
    variance = (centred**2).mean(axis=(1, 2, 3), keepdims=True)
    spread = np.sqrt(variance) + 1e-5 if c.stem_numerics == "authors" else np.sqrt(variance + 1e-8)
    return np.einsum("cijhw,ocij->ohw", slide(x, kernel.shape[2], stride, 0.0), centred / spread)


def slide(x: Array, kernel: int, stride: int, border: float) -> Array:
    """(C, kernel, kernel, rows, columns): what each place of a window sees, with XLA's SAME padding."""
    places = [-(-n // stride) for n in x.shape[1:]]
    short = [max((m - 1) * stride + kernel - n, 0) for m, n in zip(places, x.shape[1:], strict=True)]
    x = np.pad(x, [(0, 0), *((n // 2, n - n // 2) for n in short)], constant_values=border)
    out = np.empty((len(x), kernel, kernel, *places))
    for i, j in np.ndindex(kernel, kernel):
        out[:, i, j] = x[:, i:, j:][:, ::stride, ::stride][:, : places[0], : places[1]]
    return out


def group_norm(s: State, c: ViTConfig, name: str, x: Array) -> Array:
    groups = x.reshape(32, -1)
    centred = groups - groups.mean(axis=1, keepdims=True)
    eps = 1e-6 if c.stem_numerics == "authors" else 1e-5
    y = (centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + eps)).reshape(x.shape)
    return y * s[f"{name}.weight"][:, None, None] + s[f"{name}.bias"][:, None, None]


def tokens(s: State, c: ViTConfig, x: Array) -> Array:
    front = [s["cls_token"][0]] if c.cls_token else []
    if c.dist_token:
        front.append(s["dist_token"][0])
    if c.position == "learned" and c.cls_token and c.cls_position:
        places = s["pos_embed"][0]
        front = [token + places[i] for i, token in enumerate(front)]
        x = x + places[len(front) :]
    elif c.position == "learned":
        x = x + s["pos_embed"][0]
    elif c.position == "sincos":
        x = x + np.array([wave(column, c.dim) + wave(row, c.dim) for row, column in np.ndindex(*c.grid)])
    if c.registers:
        front.append(s["reg_token"][0])
    return np.concatenate([*front, x])


def wave(place: int, dim: int) -> list[float]:
    n = dim // 4
    angles = [place / 10_000 ** (k / (n - 1)) for k in range(n)]
    return [math.sin(a) for a in angles] + [math.cos(a) for a in angles]


def turn(c: ViTConfig, x: Array) -> Array:
    """Rotary positions: the pair (i, i + d/2) of each patch is a complex number; rows turn the first half of pairs."""
    half = x.shape[1] // 2
    z = x[:, :half] + 1j * x[:, half:]
    (rows, columns), quarter = c.grid, half // 2
    for n, (row, column) in enumerate(np.ndindex(rows, columns)):
        for i in range(quarter):
            speed = 2 * math.pi / 100 ** (i / quarter)
            z[c.prefix + n, i] *= np.exp(1j * speed * ((2 * row + 1) / rows - 1))
            z[c.prefix + n, quarter + i] *= np.exp(1j * speed * ((2 * column + 1) / columns - 1))
    return np.concatenate([z.real, z.imag], axis=1)


def block(s: State, c: ViTConfig, x: Array, seen: Array) -> Array:
    gamma1, gamma2 = (s["ls1.gamma"], s["ls2.gamma"]) if c.layer_scale is not None else (1.0, 1.0)
    if c.norm == "pre":
        x = x + gamma1 * attention(s, c, norm(s, "norm1", x, c), seen)
        return x + gamma2 * mlp(s, "mlp", c, norm(s, "norm2", x, c))
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
        scale = math.sqrt(width if c.attention_scale == "head" else c.dim)
        out.append(weights(np.einsum("qd,kd->qk", q, k) / scale, seen) @ v)
    return dense(s, "attn.proj", np.concatenate(out, axis=1))


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
    else:
        x = x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
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
        x = attention_pool(s, c, x, seen)
    return norm(s, "fc_norm", x, c) if c.final_norm == "pooled" else x


def attention_pool(s: State, c: ViTConfig, x: Array, seen: Array) -> Array:
    width = c.dim // c.heads
    query = dense(s, "attn_pool.q", s["attn_pool.latent"][0])
    keys, values = np.split(dense(s, "attn_pool.kv", x), 2, axis=1)
    out = []
    for head in range(c.heads):
        q, k, v = (part[:, head * width : (head + 1) * width] for part in (query, keys, values))
        out.append(weights(q @ k.T / math.sqrt(width), seen) @ v)
    y = dense(s, "attn_pool.proj", np.concatenate(out, axis=1))
    return (y + mlp(s, "attn_pool.mlp", c, norm(s, "attn_pool.norm", y, c)))[0]


def dense(s: State, name: str, x: Array) -> Array:
    return np.einsum("...i,oi->...o", x, s[f"{name}.weight"]) + s.get(f"{name}.bias", 0.0)


def norm(s: State, name: str, x: Array, c: ViTConfig) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    spread = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + c.norm_eps)
    return centred / spread * s[f"{name}.weight"] + s[f"{name}.bias"]
