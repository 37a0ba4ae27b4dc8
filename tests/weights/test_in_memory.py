"""Networks of other libraries in memory: equal logits, or refused with the reason; the module stays as it was."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from cases_huggingface import as_patches
from timm.models.eva import Eva
from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg
from timm.models.vision_transformer import VisionTransformer
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

from vitral.errors import UsageError, WeightsError
from vitral.model import ViT, ViTConfig
from vitral.weights.load import read

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": 32,
    "patch_size": 8,
}
TIMM: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4, "num_classes": 7}
TORCHVISION: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "num_layers": 2,
    "num_heads": 4,
    "hidden_dim": 48,
    "mlp_dim": 96,
    "num_classes": 7,
}


def randomized(module: nn.Module) -> nn.Module:
    """No parameter stays at its initial zero or one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return module.eval()


def hf(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**{**SIZES, **options}))


def siglip_classifier() -> nn.Module:
    vision = transformers.SiglipVisionConfig(**SIZES, layer_norm_eps=1e-3)
    return transformers.SiglipForImageClassification(
        transformers.SiglipConfig(vision_config=vision.to_dict(), num_labels=7)
    )


def clip_classifier() -> nn.Module:
    vision = transformers.CLIPVisionConfig(**SIZES, layer_norm_eps=1e-2, hidden_act="gelu")
    return transformers.CLIPForImageClassification(
        transformers.CLIPConfig(vision_config=vision.to_dict(), num_labels=7)
    )


def torchvision_vit(**options: Any) -> Callable[[], nn.Module]:
    return lambda: torchvision.models.VisionTransformer(**{**TORCHVISION, **options})


coarse = functools.partial(nn.LayerNorm, eps=1e-2)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "timm": lambda: VisionTransformer(**TIMM, norm_layer=coarse, act_layer=nn.ReLU),
    "timm created": lambda: timm.create_model("vit_tiny_patch16_224", depth=1, num_heads=6, act_layer="quick_gelu"),
    "timm registers": lambda: VisionTransformer(**TIMM, reg_tokens=2, no_embed_class=True, global_pool="avg"),
    "timm map": lambda: VisionTransformer(**TIMM, class_token=False, global_pool="map"),
    "timm gray": lambda: timm.create_model("deit_tiny_patch16_224", depth=1, in_chans=1, img_size=32, num_heads=8),
    "timm distilled": lambda: timm.create_model("deit_tiny_distilled_patch16_224", depth=1, num_heads=2),
    "timm eva": lambda: Eva(**TIMM, use_rot_pos_emb=True, ref_feat_shape=(3, 3), swiglu_mlp=True),
    "timm naflex": lambda: NaFlexVit(
        NaFlexVitCfg(patch_size=8, embed_dim=48, depth=2, num_heads=4, pos_embed_grid_size=(4, 4)), num_classes=7
    ),
    "timm bit": lambda: timm.create_model("resnetv2_50x1_bit", num_classes=7),
    "torchvision": torchvision_vit(),
    "torchvision epsilon": torchvision_vit(norm_layer=coarse, num_heads=2),
    "torchvision representation": torchvision_vit(representation_size=48),
    "hf vit": hf("ViTForImageClassification", "ViTConfig", layer_norm_eps=1e-2, hidden_act="relu", num_labels=7),
    "hf vit silu": hf("ViTForImageClassification", "ViTConfig", hidden_act="silu", qkv_bias=False),
    "hf deit": hf("DeiTForImageClassification", "DeiTConfig", num_attention_heads=6, hidden_act="gelu_new"),
    "hf deit distilled": hf("DeiTForImageClassificationWithTeacher", "DeiTConfig", num_attention_heads=8),
    "hf dinov2": hf("Dinov2ForImageClassification", "Dinov2Config", mlp_ratio=2, hidden_act="quick_gelu"),
    "hf dinov2 gated": hf("Dinov2ForImageClassification", "Dinov2Config", use_swiglu_ffn=True, num_labels=7),
    "hf registers": hf("Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", layer_norm_eps=1e-2),
    "hf msn": hf("ViTMSNForImageClassification", "ViTMSNConfig", num_attention_heads=12),
    "hf siglip": siglip_classifier,
    "hf clip": clip_classifier,
    "hf ijepa": hf("IJepaForImageClassification", "IJepaConfig", layer_norm_eps=1e-2, num_attention_heads=6),
}
"""Networks with classes, of few and unusual numbers."""

FEATURES: dict[str, Callable[[], nn.Module]] = {
    "hf vit": hf("ViTModel", "ViTConfig", layer_norm_eps=1e-2),
    "hf deit": hf("DeiTModel", "DeiTConfig"),
    "hf dinov2": hf("Dinov2Model", "Dinov2Config", mlp_ratio=2),
    "hf dinov3": hf("DINOv3ViTModel", "DINOv3ViTConfig", num_register_tokens=3, num_attention_heads=3, key_bias=True),
    "hf dinov3 gated": hf("DINOv3ViTModel", "DINOv3ViTConfig", use_gated_mlp=True, hidden_act="silu"),
    "hf clip": hf("CLIPVisionModel", "CLIPVisionConfig", num_attention_heads=6),
    "hf siglip2": hf("Siglip2VisionModel", "Siglip2VisionConfig", layer_norm_eps=1e-2, num_patches=16),
    "hf siglip": hf("SiglipVisionModel", "SiglipVisionConfig", hidden_act="quick_gelu", num_attention_heads=6),
}
"""Networks that end in features, which their class calls `pooler_output`."""


def images_for(config: ViTConfig) -> Tensor:
    return torch.randn(2, config.channels, *config.image, generator=torch.Generator().manual_seed(1))


def answer(module: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        found: Any = module(**as_patches(images, 8)) if "Siglip2" in type(module).__name__ else module(images)
    for name in ("logits", "pooler_output"):
        found = getattr(found, name, found)
    return found


def assert_equal(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5 * max(1.0, float(wanted.abs().max())))


@pytest.mark.parametrize("build", [pytest.param(one, id=name) for name, one in MODULES.items()])
def test_logits_are_equal(build: Callable[[], nn.Module]):
    module = randomized(build())
    loaded = read(module)
    images = images_for(loaded.weights.config)
    assert_equal(answer(loaded.build(), images), answer(module, images))


@pytest.mark.parametrize("build", [pytest.param(one, id=f"features of {name}") for name, one in FEATURES.items()])
def test_features_are_equal(build: Callable[[], nn.Module]):
    module = randomized(build())
    loaded = read(module)
    assert loaded.weights.config.classes == 0
    images = images_for(loaded.weights.config)
    assert_equal(answer(loaded.build(), images), answer(module, images))


def test_facts_come_from_the_module():
    config = read(MODULES["timm"]()).weights.config
    assert (config.heads, config.norm_eps, config.activation) == (4, 1e-2, "relu")
    assert read(MODULES["hf vit"]()).weights.config.activation == "relu"


def test_model_of_another_class_than_its_checkpoint():
    """`AutoModel.from_pretrained` of a classifier's weights keeps the classifier's name in its config."""
    module = hf("ViTModel", "ViTConfig", architectures=["ViTForImageClassification"])()
    assert read(module).weights.config.pre_logits
    without = hf("ViTForImageClassification", "ViTConfig", num_labels=0)()
    assert read(without).weights.config.classes == 0


def test_labels_and_preprocessing():
    names = {0: "ant", 1: "bee"}
    module = hf("ViTForImageClassification", "ViTConfig", id2label=names)()
    loaded = read(module)
    assert loaded.weights.classes == ("ant", "bee")
    assert "assumed: transformers' default for vit; not stated by the module" in "".join(loaded.account.notes)
    assert loaded.account.source == "transformers ViTForImageClassification in memory"

    created = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=1000)
    account = read(created).account
    assert "(the module's pretrained_cfg)" in "".join(account.notes)
    assert "class names assumed: ImageNet-1k's, because the weights contain none" in account.notes
    assert "assumed: torchvision's usual transforms" in "".join(read(torchvision_vit()()).account.notes)


class Subclass(VisionTransformer):
    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return super().forward_features(x) * 2


def hooked() -> nn.Module:
    module = VisionTransformer(**TIMM)
    module.blocks[1].register_forward_hook(lambda part, inputs, output: output * 2)
    return module


def pruned() -> nn.Module:
    module = VisionTransformer(**TIMM)
    prune.l1_unstructured(module.blocks[0].mlp.fc1, "weight", 0.5)
    return module


def parametrized() -> nn.Module:
    module = VisionTransformer(**TIMM)
    nn.utils.parametrizations.spectral_norm(module.blocks[0].mlp.fc1)
    return module


def patched() -> nn.Module:
    module = VisionTransformer(**TIMM)
    module.blocks[0].attn.forward = lambda x, attn_mask=None, is_causal=False: x
    return module


def replaced() -> nn.Module:
    module = VisionTransformer(**TIMM)
    module.blocks[0].mlp = nn.Sequential(nn.Linear(48, 192), nn.GELU(), nn.Linear(192, 48))
    return module


def quantized() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        return torch.ao.quantization.quantize_dynamic(VisionTransformer(**TIMM).eval(), {nn.Linear})


def squashed_tokens(build: Callable[[], nn.Module], name: str) -> Callable[[], nn.Module]:
    """A part without parameters in the place of another one without."""

    def built() -> nn.Module:
        module = build()
        module.set_submodule(name, nn.ReLU())
        return module

    return built


def adapted() -> nn.Module:
    """As adapters of low rank are put in the place of a layer."""

    class LoraLinear(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + input.mean()

    module = hf("ViTForImageClassification", "ViTConfig")()
    module.vit.layers[0].attention.q_proj = LoraLinear(48, 48)
    return module


def other_kernel() -> nn.Module:
    module = hf("ViTForImageClassification", "ViTConfig")()
    module.config._attn_implementation = "of_my_own"
    return module


def overlapping() -> nn.Module:
    module = VisionTransformer(**TIMM)
    module.patch_embed.proj.stride = (4, 4)
    return module


def turned() -> nn.Module:
    module = FEATURES["hf dinov3"]()
    module.rope_embeddings.inv_freq.mul_(2)
    return module


def other_bit() -> nn.Module:
    module = timm.create_model("resnetv2_50x1_bit")
    module.norm.eps = 1e-3
    return module


def two_epsilons() -> nn.Module:
    module = torchvision_vit()()
    module.encoder.ln.eps = 1e-3
    return module


def squashed() -> nn.Module:
    module = torchvision_vit()()
    module.heads.add_module("squash", nn.Tanh())
    return module


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a hook": (hooked, "'blocks.1' has a hook"),
    "a subclass": (lambda: Subclass(**TIMM), "is a subclass of VisionTransformer"),
    "pruned": (pruned, "'blocks.0.mlp.fc1' has a hook"),
    "parametrized": (parametrized, "ParametrizedLinear"),
    "a replaced forward": (patched, "'forward' of 'blocks.0.attn' was replaced"),
    "a replaced layer": (replaced, "'blocks.0.mlp.1' is a GELU"),
    "quantized": (quantized, "Linear"),
    "adapted": (adapted, "'vit.layers.0.attention.q_proj' is a LoraLinear"),
    "another attention": (other_kernel, "of_my_own"),
    "overlapping patches": (overlapping, "overlap"),
    "rotary frequencies": (turned, "'rope_embeddings' has other rotary frequencies"),
    "a BiT with another epsilon": (other_bit, "'norm' has other parameters than BiT's"),
    "a ResNetV2 of batch norms": (lambda: timm.create_model("resnetv2_50"), "has other parameters than BiT's"),
    "a ResNetV2 with other maxima": (
        lambda: timm.create_model("resnetv2_50x1_bit", global_pool="max"),
        "AdaptiveMaxPool2d",
    ),
    "two epsilons": (two_epsilons, "epsilons differ"),
    "more in the head": (squashed, "'heads.squash' is a Tanh"),
    "another activation in timm": (lambda: VisionTransformer(**TIMM, act_layer=nn.Hardswish), "Hardswish"),
    "another activation": (hf("ViTModel", "ViTConfig", hidden_act="mish"), "Mish"),
    "another pooler": (hf("ViTModel", "ViTConfig", pooler_act="gelu"), "GELUActivation"),
    "ReLU for dropout in timm": (squashed_tokens(MODULES["timm"], "head_drop"), "'head_drop' is a ReLU"),
    "ReLU for dropout in torchvision": (squashed_tokens(torchvision_vit(), "encoder.dropout"), "is a ReLU"),
    "ReLU for dropout in transformers": (squashed_tokens(MODULES["hf vit"], "vit.embeddings.dropout"), "is a ReLU"),
    "a ResNet": (torchvision.models.resnet18, "is not a Vision Transformer"),
    "a Swin": (torchvision.models.swin_t, "is not a Vision Transformer"),
    "a ConvNeXt": (lambda: timm.create_model("convnext_atto"), "is not a Vision Transformer"),
    "a relative ViT": (
        lambda: timm.create_model("vit_relpos_small_patch16_224", depth=1),
        "is not a Vision Transformer",
    ),
    "relative positions": (lambda: timm.create_model("beit_base_patch16_224", depth=1), "relative position bias"),
    "a convolutional stem": (
        torchvision_vit(conv_stem_configs=[torchvision.models.vision_transformer.ConvStemConfig(16, 3, 2)] * 3),
        "Conv2dNormActivation",
    ),
}


@pytest.mark.parametrize(("build", "why"), [pytest.param(*one, id=name) for name, one in REFUSED.items()])
def test_refused_with_the_reason(build: Callable[[], nn.Module], why: str):
    with pytest.raises(WeightsError) as refused:
        read(build())
    assert why in str(refused.value.why)
    assert len(str(refused.value).splitlines()) <= 5


def test_class_wide_patch_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timm.layers.Attention, "forward", lambda self, x, attn_mask=None, is_causal=False: x)
    with pytest.raises(WeightsError, match=r"'forward' of 'blocks.0.attn' was replaced"):
        read(VisionTransformer(**TIMM))


def test_observing_hooks_of_transformers_are_no_change():
    module = randomized(MODULES["hf vit"]())
    module(torch.zeros(1, 3, 32, 32), output_attentions=True, output_hidden_states=True)
    images = torch.randn(1, 3, 32, 32)
    assert_equal(answer(read(module).build(), images), answer(module, images))


class OwnSubclass(ViT):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) * 2


def test_own_networks_are_checked_too():
    config = ViTConfig(image_size=32, patch_size=8, dim=48, depth=1, heads=4, mlp_dim=96, classes=7)
    network = randomized(ViT(config))
    images = images_for(config)
    assert torch.equal(answer(read(network).build(), images), answer(network, images))
    with pytest.raises(WeightsError, match="subclass"):
        read(OwnSubclass(config))
    network.blocks[0].register_forward_hook(lambda part, inputs, output: output * 2)
    with pytest.raises(WeightsError, match=r"'blocks.0' has a hook"):
        read(network)


def test_without_values():
    with torch.device("meta"):
        module = VisionTransformer(**TIMM)
    with pytest.raises(UsageError, match="no values"):
        read(module)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_read(dtype: torch.dtype):
    module = randomized(VisionTransformer(**TIMM)).to(dtype)
    network = read(module).build()
    images = torch.randn(2, 3, 32, 32)
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    assert_equal(answer(network, images), answer(copy.deepcopy(module).float(), images))
    assert {p.dtype for p in module.parameters()} == {dtype}


def test_wrappers_are_taken_off():
    module = randomized(VisionTransformer(**TIMM))
    images = torch.randn(2, 3, 32, 32)
    for wrapped in (torch.compile(module), nn.DataParallel(module), AveragedModel(module), ModelEmaV3(module)):
        assert_equal(answer(read(wrapped).build(), images), answer(module, images))


def test_tensors_are_shared_and_the_module_untouched():
    module = VisionTransformer(**TIMM).train()
    module.blocks[0].eval()
    module.cls_token.requires_grad_(False)
    before = state_of(module)
    network = read(module).build()
    assert network.get_parameter("blocks.0.mlp.fc1.weight").data_ptr() == module.blocks[0].mlp.fc1.weight.data_ptr()
    network.to(torch.bfloat16)
    assert_same(state_of(module), before)


def state_of(module: nn.Module) -> dict[str, Any]:
    """State of a module that a caller could observe."""
    return {
        "training": [part.training for part in module.modules()],
        "hooks": [(len(p._forward_hooks), len(p._forward_pre_hooks), len(p._backward_hooks)) for p in module.modules()],
        "vars": [sorted(vars(part)) for part in module.modules()],
        "gradients": [(p.requires_grad, p.grad is None) for p in module.parameters()],
        "tensors": {name: tensor.clone() for name, tensor in module.state_dict().items()},
    }


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in found["tensors"]:
        assert torch.equal(found["tensors"][name], wanted["tensors"][name]), name
    assert {**found, "tensors": None} == {**wanted, "tensors": None}
