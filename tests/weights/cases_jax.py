"""The authors' `.npz` files in all their spellings, hybrids and ResNets, against the forward passes in plain NumPy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax_reference as ref
import numpy as np
import torch
from jax_reference import Arrays, Spelling
from parity import Case, Size, randomized
from safetensors.torch import save_file
from timm.models.resnetv2 import _create_resnetv2_bit
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from timm.models.vision_transformer_hybrid import HybridEmbed, _resnetv2
from torch import Tensor

LINEN = Spelling(linen=True)
BIG_VISION = Spelling(prefix="params/", linen=True, table="pos_embedding", cls_position=False)
SCANNED = Spelling(prefix="params/", linen=True, stacked=True, table="pos_embedding", cls_position=False)
TOWER = Spelling(prefix="params/img/", linen=True, table="pos_embedding")
FIXED = Spelling(prefix="params/", linen=True, table="")
BEFORE_2022 = Spelling(prefix="opt/target/", linen=True, table="Transformer/pos_embedding")
INLINED = Spelling(prefix="params/", linen=True, table="pos_embedding", map_head="")

SIZES: tuple[Size, ...] = ((32, 32), (32, 48), (40, 24))


def case(
    arrays: Callable[[], Arrays],
    logits: Callable[[Arrays, Any], Any],
    sizes: tuple[Size, ...] = SIZES,
    channels: int = 3,
    **beside: Any,
) -> Callable[[], Case]:
    """A file of these arrays, and of some `beside` them that are no part of the network."""

    def make() -> Case:
        file = arrays()

        def write(folder: Path) -> Path:
            np.savez(folder / "vit.npz", **file, **{name.replace("__", "/"): array for name, array in beside.items()})
            return folder / "vit.npz"

        def of(images: Tensor) -> Tensor:
            return torch.from_numpy(logits(file, images.permute(0, 2, 3, 1).numpy()))

        return Case(write, of, sizes, channels=channels)

    return make


def vit(spelling: Spelling, sizes: tuple[Size, ...] = SIZES, beside: Any = None, **parts: Any) -> Callable[[], Case]:
    return case(
        lambda: ref.random_vit(spelling, **parts),
        lambda a, x: ref.vit(a, x, spelling),
        sizes,
        channels=parts.get("channels", 3),
        **(beside or {}),
    )


def hybrid(stages: tuple[int, ...], patch: int, **parts: Any) -> Callable[[], Case]:
    """Two rows and columns of patches; the other sizes show where an odd pixel of the padding goes."""
    pixels = patch * 4 * 2 ** max(len(stages) - 1, 0)
    sizes = ((2 * pixels, 2 * pixels), (2 * pixels, 3 * pixels))
    return vit(ref.PAPER, sizes, stages=stages, patch=(patch, patch), grid=(2, 2), depth=1, **parts)


def timms_bit(sizes: tuple[Size, ...] = ((224, 224), (64, 97))) -> Callable[[], Case]:
    def make() -> Case:
        model = randomized(_create_resnetv2_bit("resnetv2_50x1_bit", layers=(1, 2, 1, 1), num_classes=7))

        def write(folder: Path) -> Path:
            save_file(model.state_dict(), folder / "model.safetensors")
            return folder

        return Case(write, model, sizes)

    return make


def timms_hybrid(stages: tuple[int, ...], patch: int) -> Callable[[], Case]:
    """As timm's hub folders have it; only four stems are in its table, so that this one is a bare file."""

    def make() -> Case:
        side = 2 * patch * 4 * 2 ** max(len(stages) - 1, 0)

        def of(size: Size) -> VisionTransformer:
            backbone = _resnetv2(stages)
            embed = partial(HybridEmbed, backbone)
            return VisionTransformer(size, patch, num_classes=7, embed_dim=48, depth=1, num_heads=4, embed_layer=embed)

        model = randomized(of((side, side)))

        def write(folder: Path) -> Path:
            save_file(model.state_dict(), folder / "model.safetensors")
            return folder

        def logits(images: Tensor) -> Tensor:
            other = of((images.shape[2], images.shape[3]))
            other.load_state_dict(checkpoint_filter_fn(model.state_dict(), other))
            return other.eval()(images)

        return Case(write, logits, ((side, side), (side, side * 3 // 2)), {"heads": 4})

    return make


_OPTIMIZER = {
    "opt__state__step": np.int32(7),
    "opt__state__param_states__head__kernel__grad_ema": np.ones(3, np.float32),
}
_TOWERS = {
    "params__t": np.float32([2.3]),
    "params__b": np.float32([-10.0]),
    "params__txt__Embed_0__embedding": np.ones((3, 4), np.float32),
}

CASES: dict[str, Callable[[], Case]] = {
    "jax/paper": vit(ref.PAPER),
    "jax/pre-logits": vit(ref.PAPER, pre_logits=True),
    "jax/no-head": vit(ref.PAPER, classes=0),
    "jax/gray": vit(ref.PAPER, channels=1),
    "jax/oblong-patches": vit(ref.PAPER, ((32, 64), (48, 32)), patch=(8, 16)),
    "jax/gap": vit(ref.PAPER, cls=False),
    "jax/linen": vit(LINEN),
    "jax/before-2022": vit(BEFORE_2022, beside=_OPTIMIZER),
    "jax/big-vision": vit(BIG_VISION),
    "jax/big-vision-gap": vit(BIG_VISION, cls=False, pre_logits=True),
    "jax/scanned": vit(SCANNED),
    "jax/sincos": vit(FIXED, ((224, 224), (96, 160)), patch=(32, 32), cls=False),
    "jax/sincos-token": vit(FIXED, ((224, 224), (96, 160)), patch=(32, 32)),
    "jax/map": vit(TOWER, cls=False, map_head=True, classes=0, beside=_TOWERS),
    "jax/map-inlined": vit(INLINED, cls=False, map_head=True),
    "jax/hybrid": hybrid((1, 2), 2),
    "jax/hybrid-old-norms": hybrid((1, 1, 1), 1, norm_shape=(1, 1, 1)),
    "jax/hybrid-root": hybrid((), 8),
    "jax-bit/big-transfer": case(ref.random_bit, ref.bit, ((224, 224), (64, 97))),
    "jax-bit/suffixes": case(lambda: ref.random_bit((1, 1), suffix="_12"), ref.bit, ((224, 224),)),
    "big-vision-bit/public": case(
        lambda: ref.in_big_visions_names(ref.random_bit()),
        lambda a, x: ref.bit(ref.random_bit(), x, border=-np.inf),
        ((224, 224), (64, 97)),
    ),
    "timm-bit/r50x1": timms_bit(),
    "timm/hybrid": timms_hybrid((1, 2), 2),
    "timm/hybrid-root": timms_hybrid((), 8),
}
