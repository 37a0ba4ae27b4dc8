"""Every field of transformers' configurations, one at a time and together: the same output, or refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from cases_huggingface import as_patches, of_first_token, of_logits, of_pooler
from parity import randomized
from torch import Tensor

from running import mostly_slow, sampled
from vitral.errors import WeightsError
from vitral.weights import native
from vitral.weights.formats.huggingface_config import EVERY
from vitral.weights.formats.huggingface_config import FIELDS as USES
from vitral.weights.load import read

SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 5,
}
WIDE = {"intermediate_size": 80}
TEXT = {
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 11,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER = {
    "decoder_hidden_size": 16,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 32,
}


TOWERS = {f"{family}Config": f"{family}VisionConfig" for family in ("Siglip", "Siglip2", "CLIP")}
"""Configuration of two towers → that of the image's."""


class Model(NamedTuple):
    """A class of transformers, its configuration, the output that vitral computes too, and its own settings."""

    config: str
    output: Callable[[Any], Tensor]
    settings: dict[str, Any]


MODELS: dict[str, Model] = {
    "ViTModel": Model("ViTConfig", of_pooler, WIDE),
    "ViTForImageClassification": Model("ViTConfig", of_logits, WIDE),
    "ViTMAEModel": Model("ViTMAEConfig", of_first_token, {**WIDE, **DECODER, "mask_ratio": 0.0}),
    "ViTMSNModel": Model("ViTMSNConfig", of_first_token, WIDE),
    "ViTMSNForImageClassification": Model("ViTMSNConfig", of_logits, WIDE),
    "DeiTModel": Model("DeiTConfig", of_pooler, WIDE),
    "DeiTForImageClassification": Model("DeiTConfig", of_logits, WIDE),
    "DeiTForImageClassificationWithTeacher": Model("DeiTConfig", of_logits, WIDE),
    "BeitModel": Model("BeitConfig", of_pooler, WIDE),
    "BeitForImageClassification": Model("BeitConfig", of_logits, WIDE),
    "Dinov2Model": Model("Dinov2Config", of_pooler, {"mlp_ratio": 2}),
    "Dinov2ForImageClassification": Model("Dinov2Config", of_logits, {"mlp_ratio": 2}),
    "Dinov2WithRegistersModel": Model("Dinov2WithRegistersConfig", of_pooler, {"mlp_ratio": 2}),
    "Dinov2WithRegistersForImageClassification": Model("Dinov2WithRegistersConfig", of_logits, {"mlp_ratio": 2}),
    "DINOv3ViTModel": Model("DINOv3ViTConfig", of_pooler, WIDE),
    "SiglipVisionModel": Model("SiglipVisionConfig", of_pooler, WIDE),
    "SiglipForImageClassification": Model("SiglipConfig", of_logits, WIDE),
    "Siglip2VisionModel": Model("Siglip2VisionConfig", of_pooler, WIDE),
    "Siglip2ForImageClassification": Model("Siglip2Config", of_logits, WIDE),
    "CLIPVisionModel": Model("CLIPVisionConfig", of_pooler, WIDE),
    "CLIPForImageClassification": Model("CLIPConfig", of_logits, WIDE),
    "IJepaModel": Model("IJepaConfig", lambda found: found.last_hidden_state.mean(1), WIDE),
    "IJepaForImageClassification": Model("IJepaConfig", of_logits, WIDE),
}

ACTIVATIONS = (
    "gelu_new",
    "gelu_pytorch_tanh",
    "gelu_python",
    "gelu_fast",
    "gelu_accurate",
    "gelu_10",
    "quick_gelu",
    "relu",
    "silu",
    "swish",
    "relu6",
    "tanh",
    "leaky_relu",
    "mish",
    "linear",
    "sigmoid",
)
FIELDS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ACTIVATIONS,
    "num_attention_heads": (1, 2, 3, 6, 12),
    "num_hidden_layers": (1, 3),
    "hidden_size": (24, 96),
    "intermediate_size": (50, 48, 160),
    "mlp_ratio": (1, 3),
    "layer_norm_eps": (1e-12, 1e-3, 0.1),
    "image_size": (40, 8, [32, 48], [16, 8]),
    "patch_size": (4, [8, 4], [16, 8]),
    "num_channels": (1, 4),
    "qkv_bias": (False,),
    "query_bias": (False,),
    "key_bias": (True,),
    "value_bias": (False,),
    "proj_bias": (False,),
    "mlp_bias": (False,),
    "pooler_act": ("relu", "gelu", "linear"),
    "pooler_output_size": (24, 48),
    "layerscale_value": (0.1,),
    "layer_scale_init_value": (0.0, 0.5),
    "use_swiglu_ffn": (True,),
    "use_gated_mlp": (True,),
    "num_register_tokens": (0, 1, 3),
    "rope_theta": (10.0, 10000.0),
    "pos_embed_shift": (0.5,),
    "pos_embed_jitter": (1.5,),
    "pos_embed_rescale": (None, 4.0),
    "vision_use_head": (False,),
    "use_mask_token": (False, True),
    "use_mean_pooling": (False,),
    "use_relative_position_bias": (True,),
    "use_shared_relative_position_bias": (True,),
    "use_absolute_position_embeddings": (True,),
    "apply_layernorm": (False,),
    "reshape_hidden_states": (False,),
    "hidden_dropout_prob": (0.3,),
    "attention_probs_dropout_prob": (0.3,),
    "attention_dropout": (0.3,),
    "drop_path_rate": (0.3,),
    "initializer_range": (0.5,),
    "initializer_factor": (2.0,),
    "encoder_stride": (8,),
    "norm_pix_loss": (True,),
    "projection_dim": (24,),
    "num_labels": (1, 2),
    "head_dim": (6, 24),
    "chunk_size_feed_forward": (3,),
    "is_decoder": (True,),
    "add_cross_attention": (True,),
    "_attn_implementation": ("eager",),
}
"""Field → unusual values, each in the networks whose configuration has that field."""


def fields_of(config: str) -> list[str]:
    inner = TOWERS.get(config, config)
    known = vars(getattr(transformers, inner)())
    read_by_all = ("num_labels", "head_dim", "_attn_implementation")
    return [field for field in FIELDS if field in known or field in read_by_all]


def built(name: str, **changes: Any) -> Any:
    """A network with random weights; None where transformers has no such network."""
    model = MODELS[name]
    settings = {**SHAPE, **model.settings, **changes}
    try:
        if model.config.startswith("Siglip2"):
            settings["num_patches"] = _cells(settings)
            del settings["image_size"]
        if model.config in TOWERS:
            labels = {"num_labels": settings.pop("num_labels")}
            made = getattr(transformers, model.config)(vision_config=settings, text_config=TEXT, **labels)
        else:
            made = getattr(transformers, model.config)(**settings)
        return randomized(getattr(transformers, name)(made))
    except (TypeError, ValueError, KeyError, AttributeError, ImportError, RuntimeError, ZeroDivisionError):
        return None
    except Exception as error:
        if "Validation" in type(error).__name__:
            return None
        raise


def outcome(name: str, folder: Path, **changes: Any) -> str:
    """`equal`, `refused: …`, `differs: …`, or `none` where transformers computes no such network."""
    model = built(name, **changes)
    if model is None:
        return "none"
    settings = {**SHAPE, **changes}
    size = settings["image_size"]
    height, width = size if isinstance(size, list) else (size, size)
    images = torch.randn(2, settings.get("num_channels", 3), height, width, generator=torch.Generator().manual_seed(1))
    given = {"pixel_values": images}
    try:
        if "MAE" in name:
            given["noise"] = torch.arange(_cells(settings), dtype=torch.float32).expand(2, -1)  # masks nothing
        elif "Siglip2" in name:
            given = as_patches(images, settings["patch_size"])
        with torch.no_grad():
            found = MODELS[name].output(model(**given))
    except (RuntimeError, ValueError, TypeError, AttributeError):
        return "none"
    model.save_pretrained(folder)
    return against(folder, images, found)


def _cells(settings: dict[str, Any]) -> int:
    """Number of patches of an image."""
    (height, width), (rows, columns) = (
        size if isinstance(size, list) else (size, size) for size in (settings["image_size"], settings["patch_size"])
    )
    return (height // rows) * (width // columns)


def against(folder: Path, images: Tensor, theirs: Tensor | None, **options: Any) -> str:
    try:
        weights = read(folder, **options).weights
    except WeightsError as refused:
        return f"refused: {refused.what}; {refused.why}"
    if theirs is None:
        return "read"
    with torch.no_grad():
        ours = native.build(weights)(images)
    if ours.shape != theirs.shape:
        return f"differs: {tuple(ours.shape)} for {tuple(theirs.shape)}"
    worst = float((ours - theirs).abs().max() / theirs.abs().max())
    return "equal" if worst <= 2e-5 else f"differs: {worst:.1e}"


SUPPORTED = [name for name in MODELS if not name.startswith("Beit")]


@pytest.mark.parametrize("name", mostly_slow(MODELS, 12))
def test_one_field_at_a_time_is_equal_or_refused(name: str, tmp_path: Path):
    found = {"": outcome(name, tmp_path / "usual")}
    for field in fields_of(MODELS[name].config):
        for number, value in enumerate(FIELDS[field]):
            found[f"{field}={value}"] = outcome(name, tmp_path / f"{field}-{number}", **{field: value})
    assert not {change: said for change, said in found.items() if said.startswith("differs")}
    if name in SUPPORTED:
        honored = ("", "hidden_act=relu", "hidden_act=quick_gelu", "num_attention_heads=3", "layer_norm_eps=0.1")
        assert {change: found[change] for change in honored} == dict.fromkeys(honored, "equal")
    else:
        assert set(found.values()) - {"none"}
        assert all(said.startswith(("refused", "none")) for said in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(SUPPORTED, 3))
def test_fields_together_are_equal_or_refused(name: str, tmp_path: Path):
    rng, fields, found = random.Random(name), fields_of(MODELS[name].config), {}
    for number in range(12):
        changes = {field: rng.choice(FIELDS[field]) for field in rng.sample(fields, rng.randint(2, 5))}
        found[str(changes)] = outcome(name, tmp_path / str(number), **changes)
    assert not {changes: said for changes, said in found.items() if said.startswith("differs")}


CONTRADICTIONS: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 24,
    "intermediate_size": 40,
    "mlp_ratio": 3,
    "patch_size": 4,
    "num_channels": 1,
    "qkv_bias": False,
    "query_bias": False,
    "value_bias": False,
    "key_bias": True,
    "proj_bias": False,
    "mlp_bias": False,
    "use_swiglu_ffn": True,
    "use_gated_mlp": True,
    "num_register_tokens": 1,
    "head_dim": 6,
    "quantization_config": {"bits": 8},
    "is_decoder": True,
}
"""Fields of a configuration that the tensors, as saved with the usual values, contradict."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(SUPPORTED, 3))
def test_a_configuration_that_the_tensors_contradict_is_refused(name: str, tmp_path: Path):
    built(name).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    inner = config.get("vision_config", config)
    known = USES[inner["model_type"]] | EVERY
    for field, value in CONTRADICTIONS.items():
        if field in known:
            changed = {**config, "vision_config": {**inner, field: value}} if inner is not config else config
            changed = changed if inner is not config else {**config, field: value}
            (tmp_path / "config.json").write_text(json.dumps(changed))
            said = against(tmp_path, torch.zeros(1, 3, 32, 32), None)
            assert said.startswith("refused"), (field, said)


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_class_of_another_name_is_refused(name: str, tmp_path: Path):
    built(name).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["MyViTForImageClassification"]}))
    with pytest.raises(WeightsError, match=r"'architectures' in .* is 'MyViT"):
        read(tmp_path)


def test_quantized_weights_of_two_towers_are_refused(tmp_path: Path):
    built("CLIPForImageClassification").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"bits": 8}}))
    with pytest.raises(WeightsError, match="quantization_config"):
        read(tmp_path)


def test_a_classifier_that_is_named_and_not_there_is_refused(tmp_path: Path):
    built("ViTModel").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["ViTForImageClassification"]}))
    with pytest.raises(WeightsError, match="classifier is missing"):
        read(tmp_path)


def test_pooling_that_is_switched_off_is_refused(tmp_path: Path):
    built("SiglipVisionModel").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vision_use_head": False}))
    with pytest.raises(WeightsError, match="vision_use_head"):
        read(tmp_path)


@pytest.mark.parametrize("config", sorted({model.config for model in MODELS.values()} - {"BeitConfig"}))
def test_every_field_of_a_configuration_has_its_use(config: str):
    """A field that a later transformers adds fails here until it is known to be honored, without effect or refused."""
    inner = TOWERS.get(config, config)
    made = getattr(transformers, inner)()
    known = USES[made.model_type] | EVERY
    internal = {"_name_or_path", "_output_attentions", "_post_init_done"}
    fields = {field for field in vars(made) if not field.endswith("_implementation_internal")}
    assert fields - known.keys() - internal == set()
