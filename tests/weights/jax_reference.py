"""The authors' networks in plain NumPy, from their formulas, on the arrays of their `.npz` files: nothing of vitral's.

Formulas: arXiv 2010.11929 and vit_jax `models_vit.py`, `models_resnet.py`; big_vision `models/vit.py` (positions, MAP
head) and `models/bit_paper.py`; big_transfer (ResNets). Images are (B, H, W, C), everything is computed in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.ndimage

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]


@dataclass(frozen=True)
class Spelling:
    """Names of the arrays in a file of a ViT."""

    prefix: str = ""
    linen: bool = False
    stacked: bool = False
    table: str = "Transformer/posembed_input/pos_embedding"
    map_head: str = "MAPHead_0/"
    cls_position: bool = True

    @property
    def parts(self) -> tuple[str, str, str]:
        """Attention, second norm and MLP of a block."""
        attention, norm, layers = (0, 1, 0) if self.linen else (1, 2, 3)
        return f"MultiHeadDotProductAttention_{attention}", f"LayerNorm_{norm}", f"MlpBlock_{layers}"


PAPER = Spelling()


# ---- arithmetic


def layer_norm(x: Array, scale: Array, bias: Array) -> Array:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-6) * scale + bias


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softmax(x: Array) -> Array:
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def attention(a: Arrays, queries: Array, tokens: Array) -> Array:
    q = np.einsum("bnd,dhk->bhnk", queries, a["query/kernel"]) + a["query/bias"][:, None]
    k = np.einsum("bnd,dhk->bhnk", tokens, a["key/kernel"]) + a["key/bias"][:, None]
    v = np.einsum("bnd,dhk->bhnk", tokens, a["value/kernel"]) + a["value/bias"][:, None]
    weights = softmax(np.einsum("bhqk,bhnk->bhqn", q, k) / np.sqrt(q.shape[-1]))
    read = np.einsum("bhqn,bhnk->bqhk", weights, v)
    return np.einsum("bqhk,hkd->bqd", read, a["out/kernel"]) + a["out/bias"]


def mlp(a: Arrays, x: Array) -> Array:
    hidden = gelu(x @ a["Dense_0/kernel"] + a["Dense_0/bias"])
    return hidden @ a["Dense_1/kernel"] + a["Dense_1/bias"]


def same_padding(x: Array, kernel: int, stride: int, value: float) -> Array:
    pads = [(0, 0)]
    for n in x.shape[1:3]:
        total = max((-(-n // stride) - 1) * stride + kernel - n, 0)
        pads.append((total // 2, total - total // 2))
    return np.pad(x, [*pads, (0, 0)], constant_values=value)


def windows(x: Array, kernel: tuple[int, int], stride: tuple[int, int]) -> Array:
    """(B, rows, columns, C, kernel rows, kernel columns)."""
    found = np.lib.stride_tricks.sliding_window_view(x, kernel, (1, 2))
    return found[:, :: stride[0], :: stride[1]]


def conv(x: Array, kernel: Array, stride: int | tuple[int, int]) -> Array:
    """Without padding; the kernel is HWIO."""
    strides = (stride, stride) if isinstance(stride, int) else stride
    return np.einsum("brcihw,hwio->brco", windows(x, kernel.shape[:2], strides), kernel, optimize=True)


def group_norm(x: Array, scale: Array, bias: Array, eps: float) -> Array:
    groups = x.reshape(*x.shape[:3], 32, -1)
    groups = groups - groups.mean((1, 2, 4), keepdims=True)
    groups = groups / np.sqrt((groups**2).mean((1, 2, 4), keepdims=True) + eps)
    return groups.reshape(x.shape) * scale.ravel() + bias.ravel()


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


# ---- ViT and hybrid


def vit(arrays: Mapping[str, Array], images: Array, spelling: Spelling = PAPER) -> Array:
    """Logits (B, K), or what is before a head that is not there."""
    a = {k.removeprefix(spelling.prefix): np.asarray(v, np.float64) for k, v in arrays.items()}
    x = images.astype(np.float64)
    if "conv_root/kernel" in a:
        x = hybrid_stem(a, x)
    kernel = a["embedding/kernel"]
    x = conv(x, kernel, kernel.shape[:2]) + a["embedding/bias"]
    grid = x.shape[1:3]
    x = x.reshape(len(x), -1, x.shape[-1])
    tokens = "cls" in a
    table = a[spelling.table] if spelling.table else sincos(grid, x.shape[-1])
    if tokens and spelling.table and spelling.cls_position:
        cls = a["cls"] + table[:, :1]
        table = table[:, 1:]
    else:
        cls = a.get("cls")
    x = x + zoomed(table, grid)
    if tokens:
        x = np.concatenate([np.repeat(cls, len(x), 0), x], 1)
    for block in blocks(a, spelling):
        x = encoder_block(block, x, spelling)
    x = layer_norm(x, a["Transformer/encoder_norm/scale"], a["Transformer/encoder_norm/bias"])
    if f"{spelling.map_head}probe" in a:
        x = map_head(inside(a, spelling.map_head), x)
    else:
        x = x[:, 0] if tokens else x.mean(1)
    if "pre_logits/kernel" in a:
        x = np.tanh(x @ a["pre_logits/kernel"] + a["pre_logits/bias"])
    return x @ a["head/kernel"] + a["head/bias"] if "head/kernel" in a else x


def inside(a: Mapping[str, Array], start: str) -> Arrays:
    return {k[len(start) :]: v for k, v in a.items() if k.startswith(start)}


def blocks(a: Arrays, spelling: Spelling) -> Iterator[Arrays]:
    if spelling.stacked:
        stack = inside(a, "Transformer/encoderblock/")
        yield from ({k: v[i] for k, v in stack.items()} for i in range(len(stack["LayerNorm_0/scale"])))
        return
    number = 0
    while block := inside(a, f"Transformer/encoderblock_{number}/"):
        yield block
        number += 1


def encoder_block(a: Arrays, x: Array, spelling: Spelling) -> Array:
    heads, norm, layers = spelling.parts
    y = layer_norm(x, a["LayerNorm_0/scale"], a["LayerNorm_0/bias"])
    x = x + attention(inside(a, f"{heads}/"), y, y)
    return x + mlp(inside(a, f"{layers}/"), layer_norm(x, a[f"{norm}/scale"], a[f"{norm}/bias"]))


def map_head(a: Arrays, x: Array) -> Array:
    probe = np.repeat(a["probe"], len(x), 0)
    y = attention(inside(a, "MultiHeadDotProductAttention_0/"), probe, x)
    y = y + mlp(inside(a, "MlpBlock_0/"), layer_norm(y, a["LayerNorm_0/scale"], a["LayerNorm_0/bias"]))
    return y[:, 0]


def sincos(grid: tuple[int, ...], width: int) -> Array:
    y, x = np.mgrid[: grid[0], : grid[1]]
    omega = 1 / 10_000 ** (np.arange(width // 4) / (width // 4 - 1))
    y, x = (axis.reshape(-1, 1) * omega for axis in (y, x))
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], 1)[None]


def zoomed(table: Array, grid: tuple[int, ...]) -> Array:
    """Positions of a square grid for another one, as vit_jax and big_vision do it."""
    side = round(table.shape[1] ** 0.5)
    if table.shape[1] == grid[0] * grid[1]:
        return table
    assert side * side == table.shape[1]
    new = scipy.ndimage.zoom(table.reshape(side, side, -1), (grid[0] / side, grid[1] / side, 1), order=1)
    return new.reshape(1, grid[0] * grid[1], -1)


def hybrid_stem(a: Arrays, x: Array) -> Array:
    def std_conv(x: Array, kernel: Array, stride: int = 1) -> Array:
        kernel = (kernel - kernel.mean((0, 1, 2))) / (kernel.std((0, 1, 2)) + 1e-5)
        return conv(same_padding(x, kernel.shape[0], stride, 0.0), kernel, stride)

    def norm(a: Arrays, name: str, x: Array) -> Array:
        return group_norm(x, a[f"{name}/scale"], a[f"{name}/bias"], 1e-6)

    x = relu(norm(a, "gn_root", std_conv(x, a["conv_root/kernel"], 2)))
    x = windows(same_padding(x, 3, 2, -np.inf), (3, 3), (2, 2)).max((-1, -2))
    stage = 1
    while inside(a, f"block{stage}/"):
        unit = 1
        while u := inside(a, f"block{stage}/unit{unit}/"):
            stride = 2 if stage > 1 and unit == 1 else 1
            past = norm(u, "gn_proj", std_conv(x, u["conv_proj/kernel"], stride)) if "conv_proj/kernel" in u else x
            y = relu(norm(u, "gn1", std_conv(x, u["conv1/kernel"])))
            y = relu(norm(u, "gn2", std_conv(y, u["conv2/kernel"], stride)))
            x = relu(past + norm(u, "gn3", std_conv(y, u["conv3/kernel"])))
            unit += 1
        stage += 1
    return x


# ---- BiT


def bit(arrays: Mapping[str, Array], images: Array, border: float = 0.0) -> Array:
    """Logits (B, K) from big_transfer's names; `border` is what stands around the image at the root's maximum."""
    a = {k.removeprefix("resnet/"): np.asarray(v, np.float64) for k, v in arrays.items()}

    def std_conv(x: Array, name: str, stride: int = 1) -> Array:
        kernel = next(v for k, v in a.items() if k.startswith(f"{name}/standardized_conv2d"))
        kernel = kernel - kernel.mean((0, 1, 2))
        kernel = kernel / np.sqrt((kernel**2).mean((0, 1, 2)) + 1e-10)
        side = kernel.shape[0] // 2
        return conv(np.pad(x, [(0, 0), (side, side), (side, side), (0, 0)]), kernel, stride)

    def norm_relu(x: Array, name: str) -> Array:
        return relu(group_norm(x, a[f"{name}group_norm/gamma"], a[f"{name}group_norm/beta"], 1e-5))

    x = std_conv(images.astype(np.float64), "root_block", 2)
    x = np.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)], constant_values=border)
    x = windows(x, (3, 3), (2, 2)).max((-1, -2))
    stage = 1
    while inside(a, f"block{stage}/"):
        unit = 1
        while inside(a, name := f"block{stage}/unit{unit:02}/"):
            stride = 2 if stage > 1 and unit == 1 else 1
            y = norm_relu(x, f"{name}a/")
            past = std_conv(y, f"{name}a/proj", stride) if inside(a, f"{name}a/proj/") else x
            y = std_conv(y, f"{name}a")
            y = std_conv(norm_relu(y, f"{name}b/"), f"{name}b", stride)
            x = past + std_conv(norm_relu(y, f"{name}c/"), f"{name}c")
            unit += 1
        stage += 1
    x = norm_relu(x, "").mean((1, 2))
    return x @ a["head/conv2d/kernel"][0, 0] + a["head/conv2d/bias"] if "head/conv2d/kernel" in a else x


# ---- random weights


class Random:
    """Arrays of random numbers, float32, none at its initial value."""

    def __init__(self, seed: int = 0):
        self.rng = np.random.default_rng(seed)

    def __call__(self, *shape: int, std: float = 0.2) -> Array:
        return (self.rng.standard_normal(shape) * std).astype(np.float32)

    def norm(self, name: str, *shape: int, ends: tuple[str, str] = ("scale", "bias")) -> Arrays:
        return {f"{name}/{ends[0]}": 1 + self(*shape, std=0.3), f"{name}/{ends[1]}": self(*shape, std=0.3)}

    def dense(self, name: str, *shape: int, out: int = 1) -> Arrays:
        """The last `out` axes of the kernel are the bias's."""
        return {f"{name}/kernel": self(*shape), f"{name}/bias": self(*shape[-out:])}

    def attention(self, name: str, dim: int, heads: int) -> Arrays:
        found: Arrays = {}
        for part in ("query", "key", "value"):
            found |= self.dense(f"{name}/{part}", dim, heads, dim // heads, out=2)
        return found | self.dense(f"{name}/out", heads, dim // heads, dim)

    def mlp(self, name: str, dim: int, hidden: int) -> Arrays:
        return self.dense(f"{name}/Dense_0", dim, hidden) | self.dense(f"{name}/Dense_1", hidden, dim)


def random_vit(
    spelling: Spelling = PAPER,
    *,
    dim: int = 32,
    depth: int = 3,
    heads: int = 4,
    hidden: int = 48,
    patch: tuple[int, int] = (8, 8),
    grid: tuple[int, int] = (4, 4),
    classes: int = 7,
    channels: int = 3,
    cls: bool = True,
    map_head: bool = False,
    pre_logits: bool = False,
    stages: tuple[int, ...] | None = None,
    norm_shape: tuple[int, ...] = (),
    seed: int = 0,
) -> Arrays:
    """A file's arrays. `patch` is the embedding's kernel, in pixels or, with `stages`, in features of the ResNet."""
    r = Random(seed)
    found: Arrays = {}
    if stages is not None:
        found |= _random_stem(r, stages, channels, norm_shape)
        channels = 256 * 2 ** (len(stages) - 1) if stages else 64
    found |= r.dense("embedding", *patch, channels, dim)
    if cls:
        found["cls"] = r(1, 1, dim)
    if spelling.table:
        found[spelling.table] = r(1, grid[0] * grid[1] + int(cls and spelling.cls_position), dim)
    attention, norm, layers = spelling.parts
    stack = [
        r.norm("LayerNorm_0", dim) | r.attention(attention, dim, heads) | r.norm(norm, dim) | r.mlp(layers, dim, hidden)
        for _ in range(depth)
    ]
    if spelling.stacked:
        found |= {f"Transformer/encoderblock/{k}": np.stack([block[k] for block in stack]) for k in stack[0]}
    else:
        found |= {f"Transformer/encoderblock_{i}/{k}": v for i, block in enumerate(stack) for k, v in block.items()}
    found |= r.norm("Transformer/encoder_norm", dim)
    if map_head:
        head = spelling.map_head
        found[f"{head}probe"] = r(1, 1, dim)
        found |= r.attention(f"{head}MultiHeadDotProductAttention_0", dim, heads)
        found |= r.norm(f"{head}LayerNorm_0", dim) | r.mlp(f"{head}MlpBlock_0", dim, hidden)
    if pre_logits:
        found |= r.dense("pre_logits", dim, dim)
    if classes:
        found |= r.dense("head", dim, classes)
    return {f"{spelling.prefix}{k}": v for k, v in found.items()}


def _random_stem(r: Random, stages: tuple[int, ...], channels: int, norm_shape: tuple[int, ...]) -> Arrays:
    found = {"conv_root/kernel": r(7, 7, channels, 64)} | r.norm("gn_root", *norm_shape, 64)
    width = 64
    for stage, units in enumerate(stages, 1):
        mid = 32 * 2**stage
        for unit in range(1, units + 1):
            name = f"block{stage}/unit{unit}"
            if unit == 1:
                found[f"{name}/conv_proj/kernel"] = r(1, 1, width, 4 * mid)
                found |= r.norm(f"{name}/gn_proj", *norm_shape, 4 * mid)
            found |= {
                f"{name}/conv1/kernel": r(1, 1, width, mid),
                f"{name}/conv2/kernel": r(3, 3, mid, mid),
                f"{name}/conv3/kernel": r(1, 1, mid, 4 * mid),
            }
            for n, size in enumerate((mid, mid, 4 * mid), 1):
                found |= r.norm(f"{name}/gn{n}", *norm_shape, size)
            width = 4 * mid
    return found


def random_bit(
    stages: tuple[int, ...] = (1, 2), *, width: int = 1, classes: int = 7, channels: int = 3, suffix: str = ""
) -> Arrays:
    """The arrays of a file of big_transfer's; `suffix` is what some have after `standardized_conv2d`."""
    r, conv_name, ends = Random(), f"standardized_conv2d{suffix}/kernel", ("gamma", "beta")
    root = 64 * width
    found = {f"resnet/root_block/{conv_name}": r(7, 7, channels, root)}
    have = root
    for stage, units in enumerate(stages, 1):
        mid = root * 2 ** (stage - 1)
        for unit in range(1, units + 1):
            name = f"resnet/block{stage}/unit{unit:02}"
            if unit == 1:
                found[f"{name}/a/proj/{conv_name}"] = r(1, 1, have, 4 * mid)
            for letter, side, into, out in (("a", 1, have, mid), ("b", 3, mid, mid), ("c", 1, mid, 4 * mid)):
                found[f"{name}/{letter}/{conv_name}"] = r(side, side, into, out)
                found |= r.norm(f"{name}/{letter}/group_norm", into, ends=ends)
            have = 4 * mid
    found |= r.norm("resnet/group_norm", have, ends=ends)
    if classes:
        found |= {"resnet/head/conv2d/kernel": r(1, 1, have, classes), "resnet/head/conv2d/bias": r(classes)}
    return found


def in_big_visions_names(arrays: Mapping[str, Array], prefix: str = "params/") -> Arrays:
    """The same ResNet as big_vision saves it (`bit_paper.py`)."""
    found: Arrays = {}
    for name, array in arrays.items():
        parts = [part for part in name.split("/")[1:] if not part.startswith("standardized_conv2d")]
        if parts[0] == "root_block":
            found["root_block/conv_root/kernel"] = array
        elif parts[0] == "head":
            found[f"head/{parts[-1]}"] = array[0, 0] if parts[-1] == "kernel" else array
        elif parts[0] == "group_norm":
            found[f"norm-pre-head/{_END[parts[-1]]}"] = array[None, None, None]
        elif "proj" in parts:
            found[f"{parts[0]}/{parts[1]}/conv_proj/kernel"] = array
        elif "group_norm" in parts:
            number = "abc".index(parts[2]) + 1
            found[f"{parts[0]}/{parts[1]}/gn{number}/{_END[parts[-1]]}"] = array[None, None, None]
        else:
            found[f"{parts[0]}/{parts[1]}/conv{'abc'.index(parts[2]) + 1}/kernel"] = array
    return {f"{prefix}{k}": v for k, v in found.items()}


_END = {"gamma": "scale", "beta": "bias"}
