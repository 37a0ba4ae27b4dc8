"""timm and torchvision, and original releases that have timm's names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from parity import Case, Size, randomized
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

SHAPE: dict[str, Any] = {"embed_dim": 48, "depth": 2, "num_heads": 4, "num_classes": 7, "img_size": 32, "patch_size": 8}


def _timm(architecture: str, sizes: tuple[Size, ...] = ((32, 32),), **changes: Any) -> Callable[[], Case]:
    """A small network of one of timm's architectures, written as timm's hub folders are."""

    def make() -> Case:
        args = {**SHAPE, **changes}
        model = randomized(timm.create_model(architecture, pretrained=False, **args))

        def write(folder: Path) -> Path:
            save_file(model.state_dict(), folder / "model.safetensors")
            given = {k: v for k, v in args.items() if isinstance(v, str | int | float | bool | list | type(None))}
            config = {"architecture": architecture, "num_classes": args["num_classes"], "model_args": given}
            (folder / "config.json").write_text(json.dumps(config))
            return folder

        def logits(images: Tensor) -> Tensor:
            size = tuple(images.shape[2:])
            if size == (args["img_size"],) * 2:
                return model(images)
            other = timm.create_model(architecture, pretrained=False, **{**args, "img_size": size})
            weights = timm.models.vision_transformer.checkpoint_filter_fn(model.state_dict(), other)
            other.load_state_dict(weights)
            return other.eval()(images)

        return Case(write, logits, sizes)

    return make


def _bare(model: Callable[[], nn.Module], name: str, change: Callable[[dict[str, Tensor]], Any] = dict, **options: Any):
    """The same weights as a bare file, in an original release's spelling."""

    def make() -> Case:
        network = randomized(model())

        def write(folder: Path) -> Path:
            path = folder / name
            weights = change({k: v.clone() for k, v in network.state_dict().items()})
            save_file(weights, path) if name.endswith(".safetensors") else torch.save(weights, path)
            return path

        return Case(write, network, ((32, 32),), options)

    return make


def _renamed(**changes: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def change(state: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, tensor in state.items():
            for old, new in changes.items():
                name = name.replace(old.replace("__", "."), new)
            found[name] = tensor
        return found

    return change


def _tiny(**changes: Any) -> Callable[[], nn.Module]:
    return lambda: VisionTransformer(**{**SHAPE, **changes})


def _mae(state: dict[str, Tensor]) -> dict[str, Any]:
    decoder = {"mask_token": torch.zeros(1, 1, 16), "decoder_embed.weight": torch.ones(16, 48)}
    return {"model": {**{k: v for k, v in state.items() if not k.startswith("head")}, **decoder}, "epoch": 3}


def _torchvision(size: int = 32) -> torchvision.models.VisionTransformer:
    return torchvision.models.VisionTransformer(
        image_size=size, patch_size=8, num_layers=2, num_heads=4, hidden_dim=48, mlp_dim=64, num_classes=7
    )


def torchvision_case() -> Case:
    model = randomized(_torchvision())

    def write(folder: Path) -> Path:
        save_file(model.state_dict(), folder / "vit.safetensors")
        return folder / "vit.safetensors"

    def logits(images: Tensor) -> Tensor:
        if images.shape[2] == 32:
            return model(images)
        state = torchvision.models.vision_transformer.interpolate_embeddings(48, 8, dict(model.state_dict()))
        other = _torchvision(48)
        other.load_state_dict(state)
        return other.eval()(images)

    return Case(write, logits, ((32, 32), (48, 48)), {"heads": 4})


OTHER = ((32, 32), (48, 48), (40, 56))

CASES: dict[str, Callable[[], Case]] = {
    "timm/vit": _timm("vit_base_patch16_224", OTHER),
    "timm/grid-of-another-shape": _timm("vit_base_patch16_224", ((16, 64),), img_size=[16, 64]),
    "timm/patch-not-square": _timm("vit_base_patch16_224", patch_size=[8, 4]),
    "timm/gap": _timm("vit_base_patch16_224", OTHER, global_pool="avg"),
    "timm/gap-normed-tokens": _timm("vit_base_patch16_224", global_pool="avg", fc_norm=False),
    "timm/no-class-token": _timm("vit_base_patch16_224", OTHER, class_token=False, global_pool="avg"),
    "timm/registers": _timm("vit_base_patch16_224", OTHER, reg_tokens=3, no_embed_class=True),
    "timm/qk-norm": _timm("vit_base_patch16_224", qk_norm=True),
    "timm/no-bias": _timm("vit_base_patch16_224", qkv_bias=False),
    "timm/layer-scale": _timm("vit_base_patch16_224", init_values=0.1),
    "timm/features": _timm("vit_base_patch16_224", num_classes=0),
    "timm/deit": _timm("deit_base_patch16_224", OTHER),
    "timm/deit-distilled": _timm("deit_base_distilled_patch16_224", OTHER[:1]),
    "timm/deit3": _timm("deit3_base_patch16_224", OTHER[:1]),
    "timm/dinov2": _timm("vit_small_patch14_dinov2", OTHER, patch_size=8),
    "timm/dinov2-registers": _timm("vit_small_patch14_reg4_dinov2", OTHER),
    "timm/dinov2-swiglu": _timm("vit_giant_patch14_reg4_dinov2", OTHER),
    "timm/siglip": _timm("vit_base_patch16_siglip_224", OTHER[:2]),
    "timm/siglip2": _timm("vit_so400m_patch16_siglip_256", OTHER[:1]),
    "timm/siglip-gap": _timm("vit_base_patch16_siglip_gap_224", OTHER[:1]),
    "timm/clip": _timm("vit_base_patch16_clip_224", OTHER),
    "timm/clip-quickgelu": _timm("vit_base_patch16_clip_quickgelu_224", OTHER[:1]),
    "timm/norms-of-branches": _timm("vit_base_patch16_rpn_224", OTHER[:1]),
    "timm/registers-with-positions": _timm("vit_so150m_patch16_reg4_gap_256", OTHER[:1]),
    "timm/registers-not-pooled": _timm("vit_so150m_patch16_reg4_map_256", OTHER[:1]),
    "timm/beit3": _timm("beit3_base_patch16_224", OTHER[:1]),
    "timm/perception-encoder": _timm("vit_pe_core_small_patch16_384", OTHER[:1], attn_pool_num_heads=8),
    "timm/silu": _timm("vit_base_patch16_224", act_layer="silu"),
    "timm-eva/eva": _timm("eva_giant_patch14_224", OTHER[:1]),
    "timm-eva/eva02-small": _timm("eva02_small_patch14_224", OTHER[:1]),
    "timm-eva/eva02-base": _timm("eva02_base_patch14_224", OTHER[:1]),
    "timm-eva/eva02-clip": _timm("eva02_base_patch16_clip_224", OTHER[:1]),
    "timm-eva/axial": _timm("vit_small_patch16_rope_224", OTHER[:2]),
    "timm-eva/axial-with-table": _timm("vit_small_patch16_rope_ape_224", OTHER[:1]),
    "timm-eva/axial-with-registers": _timm("vit_medium_patch16_rope_reg1_gap_256", OTHER[:1]),
    "timm-eva/mixed": _timm("vit_small_patch16_rope_mixed_224", OTHER[:2]),
    "timm-eva/mixed-with-table": _timm("vit_small_patch16_rope_mixed_ape_224", OTHER[:1]),
    "timm-naflex/mean": _timm("naflexvit_base_patch16_gap", OTHER[:1], pos_embed_grid_size=[4, 4]),
    "timm-naflex/map": _timm(
        "naflexvit_so150m2_patch16_reg1_map", OTHER[:1], pos_embed_grid_size=[4, 4], attn_pool_num_heads=4
    ),
    "timm-eva/plain": _timm("vit_small_patch16_dinov3", OTHER),
    "timm-eva/biases": _timm("vit_small_patch16_dinov3_qkvb", OTHER[:1]),
    "timm-eva/swiglu": _timm("vit_huge_plus_patch16_dinov3", OTHER[:1], num_heads=3, mlp_ratio=4),
    "timm-eva/class-token": _timm("vit_small_patch16_dinov3", OTHER[:1], global_pool="token"),
    "timm/augreg-file": _bare(_tiny(), "augreg.safetensors", heads=4),
    "timm/deit-release": _bare(_tiny(), "deit.pth", lambda s: {"model": s}, heads=4),
    "timm/mae-fine-tuned": _bare(_tiny(global_pool="avg"), "mae_finetuned.pth", lambda s: {"model": s}, heads=4),
    "deit/release": _bare(_tiny(), "deit.pth", lambda s: {"model": s}, heads=4, format="deit"),
    "mae/pre-trained": _bare(_tiny(num_classes=0), "mae_pretrain.pth", _mae, heads=4),
    "deit3/release": _bare(
        _tiny(init_values=0.1, no_embed_class=True),
        "deit3.pth",
        lambda s: {"model": _renamed(ls1__gamma="gamma_1", ls2__gamma="gamma_2")(s)},
        heads=4,
    ),
    "torchvision/vit": torchvision_case,
}
