"""Files as facebookresearch released them, made up here and read by timm's own conversions of such files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from parity import Case, Size
from safetensors.torch import save_file
from timm.models import eva, vision_transformer
from torch import Tensor

SHAPE: dict[str, Any] = {"embed_dim": 48, "depth": 2, "num_heads": 4, "num_classes": 0, "patch_size": 8}
OTHER = ((32, 32), (48, 48), (40, 56))
State = dict[str, Tensor]


def _random(shapes: Mapping[str, tuple[int, ...]]) -> State:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator) * (0.5 if len(shape) == 1 else 0.2)
        for name, shape in shapes.items()
    }


def _blocks(mlp: Mapping[str, tuple[int, ...]], place: Callable[[int], str]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(2):
        for name in ("norm1", "norm2"):
            shapes |= {f"{place(i)}.{name}.weight": (48,), f"{place(i)}.{name}.bias": (48,)}
        shapes |= {f"{place(i)}.attn.qkv.weight": (144, 48), f"{place(i)}.attn.qkv.bias": (144,)}
        shapes |= {f"{place(i)}.attn.proj.weight": (48, 48), f"{place(i)}.attn.proj.bias": (48,)}
        shapes |= {f"{place(i)}.ls{n}.gamma": (48,) for n in (1, 2)}
        for name, shape in mlp.items():
            shapes |= {f"{place(i)}.mlp.{name}.weight": shape, f"{place(i)}.mlp.{name}.bias": shape[:1]}
    return shapes


PLAIN = {"fc1": (192, 48), "fc2": (48, 192)}
PATCHES = {"patch_embed.proj.weight": (48, 3, 8, 8), "patch_embed.proj.bias": (48,)}
NORM = {"norm.weight": (48,), "norm.bias": (48,)}


def _case(
    state: State,
    make: Callable[[Size], torch.nn.Module],
    convert: Any,
    sizes: tuple[Size, ...],
    timms: State | None = None,
    **options: Any,
) -> Case:
    """`timms` is the same file where timm cannot read the first spelling."""

    def write(folder: Path) -> Path:
        save_file(state, folder / "weights.safetensors")
        return folder / "weights.safetensors"

    def logits(images: Tensor) -> Tensor:
        model = make(tuple(images.shape[2:]))
        model.load_state_dict(convert(dict(timms or state), model))
        return model.eval()(images)

    return Case(write, logits, sizes, options)


def _dinov2(registers: int = 0, *, gated: bool = False, chunked: bool = False) -> Callable[[], Case]:
    def make() -> Case:
        mlp = {"w12": (256, 48), "w3": (48, 128)} if gated else PLAIN
        shapes = {
            "cls_token": (1, 1, 48),
            "pos_embed": (1, 17, 48),
            "mask_token": (1, 48),
            **PATCHES,
            **({"register_tokens": (1, registers, 48)} if registers else {}),
        }
        whole = _random({**shapes, **_blocks(mlp, lambda i: f"blocks.{i}"), **NORM})
        state = {n.replace("blocks.1.", "blocks.1.1.").replace("blocks.0.", "blocks.0.0."): t for n, t in whole.items()}
        wide = {"mlp_layer": timm.layers.SwiGLUPacked, "act_layer": torch.nn.SiLU, "mlp_ratio": 256 / 48}
        args = {**SHAPE, "init_values": 1.0, "reg_tokens": registers, "no_embed_class": registers > 0}

        def network(size: Size) -> torch.nn.Module:
            return vision_transformer.VisionTransformer(img_size=size, **args, **(wide if gated else {}))

        def convert(theirs: State, model: Any) -> State:
            return vision_transformer.checkpoint_filter_fn(theirs, model, antialias=registers > 0)

        return _case(state if chunked else whole, network, convert, OTHER, whole, heads=4)

    return make


def _dinov3(*, gated: bool = False, masked: bool = True) -> Callable[[], Case]:
    """With a mask what lies under it, the keys' bias, is random: it must not count. timm drops it always."""

    def make() -> Case:
        mlp = {"w1": (64, 48), "w2": (64, 48), "w3": (48, 64)} if gated else PLAIN
        shapes = {"cls_token": (1, 1, 48), "storage_tokens": (1, 4, 48), "mask_token": (1, 48), **PATCHES}
        state = _random({**shapes, **_blocks(mlp, lambda i: f"blocks.{i}"), **NORM, "local_cls_norm.weight": (48,)})
        state["rope_embed.periods"] = (100 ** (torch.arange(3) / 3)).bfloat16()
        for i in range(2):
            if masked:
                state[f"blocks.{i}.attn.qkv.bias_mask"] = torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(48)
            else:
                state[f"blocks.{i}.attn.qkv.bias"][48:96] = 0

        def network(size: Size) -> torch.nn.Module:
            # the architecture's table is what knows of DINOv3's rotary positions; sizes are changed
            kind = "vit_small_plus_patch16_dinov3_qkvb" if gated else "vit_small_patch16_dinov3_qkvb"
            wide = {"mlp_ratio": 64 / 48, "swiglu_align_to": 64} if gated else {}
            return timm.create_model(kind, img_size=size, global_pool="token", **SHAPE, **wide)

        return _case(state, network, eva.checkpoint_filter_fn, ((128, 128), *OTHER[1:]))

    return make


def dino() -> Case:
    shapes = {"cls_token": (1, 1, 48), "pos_embed": (1, 17, 48), **PATCHES}
    blocks = {n: shape for n, shape in _blocks(PLAIN, lambda i: f"blocks.{i}").items() if ".ls" not in n}

    def network(size: Size) -> torch.nn.Module:
        return vision_transformer.VisionTransformer(img_size=size, **SHAPE)

    def convert(theirs: State, model: Any) -> State:
        return vision_transformer.checkpoint_filter_fn(theirs, model, antialias=False)

    return _case(_random({**shapes, **blocks, **NORM}), network, convert, OTHER, heads=4, format="dino")


CASES: dict[str, Callable[[], Case]] = {
    "dino/plain": dino,
    "dinov2/plain": _dinov2(),
    "dinov2/swiglu": _dinov2(gated=True),
    "dinov2/chunked-blocks": _dinov2(chunked=True),
    "dinov2-registers/plain": _dinov2(4),
    "dinov2-registers/swiglu": _dinov2(4, gated=True),
    "dinov3/masked-bias": _dinov3(),
    "dinov3/whole-bias": _dinov3(masked=False),
    "dinov3/gated": _dinov3(gated=True),
}
