"""Hugging Face's own networks, as its `save_pretrained` writes them and as its memory names the tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from parity import Case, Size, randomized
from safetensors.torch import save_file
from torch import Tensor

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 5,
}
WIDE = {"intermediate_size": 80}
OTHER = ((32, 32), (48, 48), (40, 56))
Output = Callable[[Any], Tensor]


def of_logits(found: Any) -> Tensor:
    return found.logits


def of_pooler(found: Any) -> Tensor:
    return found.pooler_output


def of_mean(found: Any) -> Tensor:
    return found.last_hidden_state.mean(1)


def of_first_token(found: Any) -> Tensor:
    return found.last_hidden_state[:, 0]


def as_patches(images: Tensor, side: int) -> dict[str, Tensor]:
    """Arguments of SigLIP 2's networks for images of any size: rows of patches, channels last, and grids."""
    rows, columns = images.shape[2] // side, images.shape[3] // side
    cut = images.unflatten(2, (rows, side)).unflatten(4, (columns, side)).permute(0, 2, 4, 3, 5, 1)
    patches = cut.flatten(3).flatten(1, 2)
    grids = torch.tensor([[rows, columns]]).expand(len(images), -1)
    return {
        "pixel_values": patches,
        "pixel_attention_mask": patches.new_ones(patches.shape[:2]),
        "spatial_shapes": grids,
    }


def built(name: str, config: str, **changes: Any) -> Any:
    """A network of transformers with random weights. SigLIP with a text tower has its image's part inside."""
    torch.manual_seed(0)
    settings = {**SHAPE, **changes}
    if config.startswith("Siglip2"):
        settings["num_patches"] = (settings.pop("image_size") // settings["patch_size"]) ** 2
    if config in ("SiglipConfig", "Siglip2Config", "CLIPConfig"):
        text = {"hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
        tokens = {"vocab_size": 11, "bos_token_id": 1, "eos_token_id": 2}
        settings = {"vision_config": settings, "text_config": {**text, **tokens}, "num_labels": settings["num_labels"]}
    return randomized(getattr(transformers, name)(getattr(transformers, config)(**settings)))


def case(
    name: str,
    config: str,
    out: Output,
    sizes: Sequence[Size] = ((32, 32),),
    *,
    interpolate: bool = True,
    save: Callable[[Any, Path], Path] | None = None,
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> Callable[[], Case]:
    def make() -> Case:
        model = built(name, config, **changes)

        def write(folder: Path) -> Path:
            if save is not None:
                return save(model, folder)
            model.save_pretrained(folder)
            return folder

        def logits(images: Tensor) -> Tensor:
            if config.startswith("Siglip2"):
                return out(model(**as_patches(images, 8)))
            at_own = tuple(images.shape[2:]) == tuple(sizes[0])
            return out(model(images, **({} if at_own or not interpolate else {"interpolate_pos_encoding": True})))

        return Case(write, logits, tuple(sizes), options or {})

    return make


def in_memory(model: Any, folder: Path) -> Path:
    """The names that transformers 5 uses in memory, beside the same config.json."""
    model.save_pretrained(folder)
    save_file({name: t.clone() for name, t in model.state_dict().items()}, folder / "model.safetensors")
    return folder


def bare(model: Any, folder: Path) -> Path:
    """One file without a configuration beside it."""
    (folder / "saved").mkdir()
    model.save_pretrained(folder / "saved")
    return (folder / "saved" / "model.safetensors").rename(folder / "weights.safetensors")


def with_unread_pooler(model: Any, folder: Path) -> Path:
    """Files of older releases have a pooler that the classifier does not read."""
    in_memory(model, folder)
    more = {"vit.pooler.dense.weight": torch.ones(48, 48), "vit.pooler.dense.bias": torch.ones(48)}
    save_file({**{n: t.clone() for n, t in model.state_dict().items()}, **more}, folder / "model.safetensors")
    return folder


def with_older_prefix(model: Any, folder: Path) -> Path:
    """SiglipVisionModel of transformers 4 kept its network under a name."""
    in_memory(model, folder)
    state = {f"vision_model.{n}": t.clone() for n, t in model.state_dict().items()}
    save_file(state, folder / "model.safetensors")
    return folder


def silent(model: Any, folder: Path) -> Path:
    """config.json of google/siglip-*: nearly all is left to the class."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    inner = config["vision_config"]
    config["vision_config"] = {name: inner[name] for name in ("model_type", "image_size", "num_attention_heads")}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _mae(name: str) -> Callable[[], Case]:
    """MAE's encoder with nothing masked; its shuffling of patches is switched off by noise in ascending order."""

    def make() -> Case:
        decoder = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
        settings = {**WIDE, **decoder, "decoder_intermediate_size": 32, "mask_ratio": 0.0}
        model = built(name, "ViTMAEConfig", **settings)
        encoder = model.vit if name == "ViTMAEForPreTraining" else model

        def write(folder: Path) -> Path:
            model.save_pretrained(folder)
            return folder

        def logits(images: Tensor) -> Tensor:
            patches = images.shape[2] * images.shape[3] // 64
            noise = torch.arange(patches, dtype=torch.float32).expand(len(images), -1)
            return of_first_token(encoder(images, noise=noise, interpolate_pos_encoding=True))

        return Case(write, logits, OTHER)

    return make


def _vit(**more: Any) -> Callable[[], Case]:
    return case("ViTForImageClassification", "ViTConfig", of_logits, **{**WIDE, **more})


def _dinov2(name: str = "Dinov2ForImageClassification", out: Output = of_logits, **more: Any) -> Callable[[], Case]:
    return case(name, "Dinov2Config", out, **{"mlp_ratio": 2, "interpolate": False, "sizes": OTHER, **more})


def _registers(name: str, out: Output, **more: Any) -> Callable[[], Case]:
    settings = {"mlp_ratio": 2, "interpolate": False, "sizes": OTHER, **more}
    return case(f"Dinov2WithRegisters{name}", "Dinov2WithRegistersConfig", out, **settings)


def _dinov3(**more: Any) -> Callable[[], Case]:
    settings = {**WIDE, "interpolate": False, "sizes": OTHER, **more}
    return case("DINOv3ViTModel", "DINOv3ViTConfig", of_pooler, **settings)


def _deit(name: str, out: Output = of_logits, **more: Any) -> Callable[[], Case]:
    return case(name, "DeiTConfig", out, **{**WIDE, "sizes": OTHER, **more})


def _siglip(name: str, config: str, out: Output, **more: Any) -> Callable[[], Case]:
    return case(name, config, out, **{**WIDE, "sizes": OTHER, **more})


TEACHER = "DeiTForImageClassificationWithTeacher"
GATED = {"use_gated_mlp": True, "hidden_act": "silu"}

CASES: dict[str, Callable[[], Case]] = {
    "hf-vit/classifier": _vit(sizes=OTHER),
    "hf-vit/in-memory": _vit(save=in_memory),
    "hf-vit/unread-pooler": _vit(save=with_unread_pooler),
    "hf-vit/bare-file": _vit(save=bare, options={"heads": 4}),
    "hf-vit/oblong": _vit(sizes=((32, 48),), image_size=[32, 48]),
    "hf-vit/no-bias": _vit(qkv_bias=False),
    "hf-vit/gelu-tanh": _vit(hidden_act="gelu_new"),
    "hf-vit/eps": _vit(layer_norm_eps=1e-3),
    "hf-vit/model-with-pooler": case("ViTModel", "ViTConfig", of_pooler, OTHER, **WIDE),
    "hf-vit/model-in-memory": case("ViTModel", "ViTConfig", of_pooler, save=in_memory, **WIDE),
    "hf-vit/mae": _mae("ViTMAEModel"),
    "hf-vit/mae-with-decoder": _mae("ViTMAEForPreTraining"),
    "hf-vit/msn": case("ViTMSNForImageClassification", "ViTMSNConfig", of_logits, OTHER, **WIDE),
    "hf-deit/classifier": _deit("DeiTForImageClassification"),
    "hf-deit/in-memory": _deit("DeiTForImageClassification", save=in_memory),
    "hf-deit/model-with-pooler": _deit("DeiTModel", of_pooler),
    "hf-deit-distilled/two-heads": _deit(TEACHER),
    "hf-deit-distilled/in-memory": _deit(TEACHER, save=in_memory),
    "hf-deit-distilled/bare-file": _deit(TEACHER, save=bare, options={"heads": 4}),
    "hf-dinov2/model": _dinov2("Dinov2Model", of_pooler),
    "hf-dinov2/classifier": _dinov2(),
    "hf-dinov2/in-memory": _dinov2(save=in_memory),
    "hf-dinov2/swiglu": _dinov2(use_swiglu_ffn=True),
    "hf-dinov2/swiglu-in-memory": _dinov2(use_swiglu_ffn=True, save=in_memory),
    "hf-dinov2/bare-file": _dinov2(save=bare, options={"heads": 4}),
    "hf-dinov2-registers/model": _registers("Model", of_pooler),
    "hf-dinov2-registers/classifier": _registers("ForImageClassification", of_logits, num_register_tokens=3),
    "hf-dinov2-registers/swiglu": _registers("ForImageClassification", of_logits, use_swiglu_ffn=True),
    "hf-dinov2-registers/in-memory": _registers("Model", of_pooler, save=in_memory),
    "hf-dinov3/registers": _dinov3(num_register_tokens=4),
    "hf-dinov3/no-registers": _dinov3(),
    "hf-dinov3/gated": _dinov3(num_register_tokens=4, **GATED),
    "hf-dinov3/gated-in-memory": _dinov3(num_register_tokens=4, save=in_memory, **GATED),
    "hf-dinov3/key-bias": _dinov3(key_bias=True),
    "hf-dinov3/no-bias": _dinov3(query_bias=False, value_bias=False, proj_bias=False),
    "hf-dinov3/bare-file": _dinov3(
        num_register_tokens=4, save=bare, sizes=((32, 32),), options={"heads": 4, "image_size": 32}
    ),
    "hf-siglip/vision": _siglip("SiglipVisionModel", "SiglipVisionConfig", of_pooler),
    "hf-siglip/older-prefix": _siglip("SiglipVisionModel", "SiglipVisionConfig", of_pooler, save=with_older_prefix),
    "hf-siglip/exact-gelu": _siglip("SiglipVisionModel", "SiglipVisionConfig", of_pooler, hidden_act="gelu"),
    "hf-siglip/both-towers": lambda: both_towers(),
    "hf-siglip-classifier/head-unread": _siglip("SiglipForImageClassification", "SiglipConfig", of_logits),
    "hf-siglip-classifier/silent": _siglip("SiglipForImageClassification", "SiglipConfig", of_logits, save=silent),
    "hf-siglip2/vision": _siglip("Siglip2VisionModel", "Siglip2VisionConfig", of_pooler),
    "hf-siglip2/bare-file": _siglip(
        "Siglip2VisionModel", "Siglip2VisionConfig", of_pooler, save=bare, options={"heads": 4}
    ),
    "hf-siglip2-classifier/head-unread": _siglip("Siglip2ForImageClassification", "Siglip2Config", of_logits),
    "hf-siglip-classifier/no-head": _siglip(
        "SiglipForImageClassification", "SiglipConfig", of_logits, vision_use_head=False
    ),
    "hf-clip/vision": case("CLIPVisionModel", "CLIPVisionConfig", of_pooler, OTHER, **WIDE),
    "hf-clip/exact-gelu": case("CLIPVisionModel", "CLIPVisionConfig", of_pooler, OTHER, hidden_act="gelu", **WIDE),
    "hf-clip/both-towers": lambda: both_towers("CLIP"),
    "hf-clip-classifier/norm-unread": case("CLIPForImageClassification", "CLIPConfig", of_logits, OTHER, **WIDE),
    "hf-ijepa/model": case("IJepaModel", "IJepaConfig", of_mean, OTHER, **WIDE),
    "hf-ijepa/classifier": case("IJepaForImageClassification", "IJepaConfig", of_logits, OTHER, **WIDE),
}


def both_towers(family: str = "Siglip") -> Case:
    model = built(f"{family}Model", f"{family}Config", **WIDE)

    def write(folder: Path) -> Path:
        model.save_pretrained(folder)
        return folder

    return Case(write, lambda images: model.vision_model(images, interpolate_pos_encoding=True).pooler_output, OTHER)
