"""Networks written for transformers compute the same there and come back bit for bit; unsupported ones are refused."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from cases_huggingface import CASES, TEACHER, WIDE, built
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitral.data.images.decode import read_image
from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import WeightsError
from vitral.model import ViT, ViTConfig
from vitral.weights import native
from vitral.weights.convert import write
from vitral.weights.formats import huggingface_writing
from vitral.weights.load import read
from vitral.weights.native import Weights
from vitral.weights.preprocessing_configs import differences

SHAPE: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "classes": 5,
    "dim": 48,
    "depth": 2,
    "heads": 4,
    "mlp_dim": 96,
}
NAMES = ("ant", "bee", "cat", "dog", "eel")


def weights_of(**changes: Any) -> Weights:
    torch.manual_seed(0)
    config = ViTConfig(**{**SHAPE, **changes})
    model = ViT(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.5 if parameter.ndim == 1 else 0.2)
            if name.endswith("qkv.bias") and config.position == "rotary":
                parameter[config.dim : 2 * config.dim] = 0
    half = (0.5,) * config.channels
    preprocessing = Preprocessing(config.image, config.channels, interpolation="bilinear", mean=half, std=half)
    return Weights(config, model.state_dict(), preprocessing, NAMES[: config.classes], {})


def logits(weights: Weights, images: Tensor) -> Tensor:
    with torch.no_grad():
        return native.build(weights)(images)


def random_images(size: tuple[int, int], channels: int = 3) -> Tensor:
    return torch.randn(2, channels, *size, generator=torch.Generator().manual_seed(1))


def close(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= 1e-5 * theirs.abs().max())


@pytest.fixture
def strict(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """transformers only warns of tensors that it misses or does not know: here such a warning fails."""
    logger = transformers.utils.logging.get_logger("transformers")
    before = logger.level, logger.propagate
    logger.setLevel("WARNING")
    logger.propagate = True
    yield
    logger.setLevel(before[0])
    logger.propagate = before[1]
    told = [record.getMessage() for record in caplog.records if record.name.startswith("transformers")]
    assert not [text for text in told if "newly initialized" in text or "MISSING" in text or "UNEXPECTED" in text]


CLASSIFIERS = {
    "cls": ("ViT", {}),
    "sincos": ("ViT", {"position": "sincos"}),
    "no-positions": ("ViT", {"position": "none"}),
    "cls-without-position": ("ViT", {"cls_position": False}),
    "no-bias": ("ViT", {"qkv_bias": False}),
    "tanh": ("ViT", {"activation": "gelu-tanh"}),
    "norm-after-pooling": ("ViT", {"final_norm": "pooled"}),
    "oblong": ("ViT", {"image_size": (16, 32), "patch_size": (8, 4)}),
    "odd-mlp": ("ViT", {"mlp_dim": 50}),
    "one-register": ("DeiT", {"registers": 1}),
    "distilled": ("DeiT", {"dist_token": True}),
    "distilled-without-positions": ("DeiT", {"dist_token": True, "cls_position": False}),
    "trained-here": ("Dinov2", {"pool": "mean"}),
    "trained-here-sincos": ("Dinov2", {"pool": "mean", "position": "sincos"}),
    "both": ("Dinov2", {"pool": "cls-mean"}),
    "layer-scale": ("Dinov2", {"layer_scale": 0.1}),
    "swiglu": ("Dinov2", {"activation": "swiglu", "mlp_dim": 64, "pool": "mean"}),
    "registers": ("Dinov2WithRegisters", {"registers": 3}),
    "mean-with-registers": ("Dinov2WithRegisters", {"registers": 1, "pool": "mean", "layer_scale": 1.0}),
    "no-class-token": ("Siglip", {"cls_token": False, "pool": "mean"}),
    "all-are-patches": ("Siglip", {"cls_token": False, "pool": "mean-all", "position": "none"}),
}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_opens_in_transformers_with_the_same_logits(name: str, tmp_path: Path, strict: None):
    wanted, changes = CLASSIFIERS[name]
    weights = weights_of(**changes)
    write(weights, tmp_path / "out", "hf")
    model = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out").eval()
    teacher = "WithTeacher" if weights.config.dist_token else ""
    assert type(model).__name__ == f"{wanted}ForImageClassification{teacher}"
    assert model.config.id2label == dict(enumerate(NAMES))
    images = random_images(weights.config.image)
    with torch.no_grad():
        assert close(logits(weights, images), model(images).logits)
    again = read(tmp_path / "out").weights
    assert close(logits(weights, images), logits(again, images))
    assert again.classes == NAMES
    assert not differences(weights.preprocessing, again.preprocessing)
    assert_same_bits(weights, again)


def assert_same_bits(ours: Weights, again: Weights) -> None:
    """Every tensor that both have; of a wider head the half that is not zero, of a longer table what was there."""
    for name, tensor in ours.state.items():
        other = again.state[name.replace("fc_norm", "norm")]
        if other.shape != tensor.shape and name == "head.weight":
            halves = other.split(ours.config.dim, dim=1)
            kept, rest = halves if ours.config.pool == "cls" else halves[::-1]
            assert not rest.any()
            other = kept
        if name == "pos_embed":
            extra = other.shape[1] - tensor.shape[1]
            assert not other[:, :extra].any()
            other = other[:, extra:]
        assert torch.equal(tensor, other), name


MODELS = {
    "vit": ("ViTModel", {}, "first"),
    "pre-logits": ("ViTModel", {"pre_logits": True}, "pooler"),
    "deit": ("DeiTModel", {"registers": 1}, "first"),
    "deit-pre-logits": ("DeiTModel", {"registers": 1, "pre_logits": True}, "pooler"),
    "dinov2": ("Dinov2Model", {"layer_scale": 1.0}, "pooler"),
    "dinov2-registers": ("Dinov2WithRegistersModel", {"registers": 2}, "pooler"),
    "siglip": ("SiglipVisionModel", {"pool": "map", "cls_token": False, "activation": "gelu-tanh"}, "pooler"),
    "rotary": ("DINOv3ViTModel", {"position": "rotary", "registers": 4, "layer_scale": 1.0}, "pooler"),
    "rotary-plain": ("DINOv3ViTModel", {"position": "rotary", "qkv_bias": False, "proj_bias": False}, "pooler"),
    "rotary-gated": ("DINOv3ViTModel", {"position": "rotary", "activation": "swiglu"}, "pooler"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_network_without_classes_opens_as_a_model(name: str, tmp_path: Path):
    wanted, changes, out = MODELS[name]
    weights = weights_of(classes=0, **changes)
    write(weights, tmp_path / "out", "hf")
    model = transformers.AutoModel.from_pretrained(tmp_path / "out").eval()
    assert type(model).__name__ == wanted
    images = random_images(weights.config.image)
    with torch.no_grad():
        found = model(images)
    assert close(logits(weights, images), found.pooler_output if out == "pooler" else found.last_hidden_state[:, 0])
    assert_same_bits(weights, read(tmp_path / "out").weights)


def test_keys_with_a_bias_are_written_for_every_block(tmp_path: Path, strict: None):
    weights = weights_of(classes=0, position="rotary")
    with torch.no_grad():
        weights.state["blocks.1.attn.qkv.bias"][48:96] = 0.3
    write(weights, tmp_path / "out", "hf")
    model = transformers.AutoModel.from_pretrained(tmp_path / "out").eval()
    images = random_images((32, 32))
    with torch.no_grad():
        assert close(logits(weights, images), model(images).pooler_output)


def test_siglip_2_is_prepared_at_one_size_and_says_so(tmp_path: Path):
    CASES["hf-siglip2/vision"]().write(tmp_path)
    transformers.Siglip2ImageProcessor(patch_size=8, max_num_patches=16).save_pretrained(tmp_path)
    loaded = read(tmp_path)
    assert loaded.weights.config.image == (32, 32)
    assert loaded.weights.preprocessing == Preprocessing((32, 32), crop_fraction=1.0, interpolation="bilinear")
    notes = "\n".join(loaded.account.notes)
    assert "preprocessor_config.json" in notes
    assert "all images are stretched to one size" in notes


UNROUND = ("bare-file", "silent", "older-prefix", "mae-with-decoder")
READ_ALONE = ("hf-clip", "hf-ijepa", "hf-siglip2")
ROUND = [name for name in CASES if name.split("/")[1] not in UNROUND and not name.startswith(READ_ALONE)]


@pytest.mark.parametrize("name", [n for n in ROUND if "in-memory" not in n and "unread" not in n and "both" not in n])
def test_theirs_to_ours_and_back_keeps_every_bit(name: str, tmp_path: Path):
    case = CASES[name]()
    source = case.write(tmp_path)
    loaded = read(source, **case.options).weights
    write(loaded, tmp_path / "again", "hf")
    # ViTMSN saves its blocks without the prefix of its embeddings, SiglipVisionModel of transformers 5 has none
    theirs, back = (
        {key.removeprefix("vit.").removeprefix("vision_model."): t for key, t in load_file(file).items()}
        for file in (source / "model.safetensors", tmp_path / "again" / "model.safetensors")
    )
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "again"))
    msn = new["model_type"] == "vit" and old["model_type"] in ("vit_msn", "vit_mae")  # the same network
    assert old["model_type"] == new["model_type"] or msn
    # the sum of distillation token and its position is what the network knows
    merged = ("distillation_token", "position_embeddings") if name.startswith("hf-deit/") else ()
    for key in theirs.keys() & back.keys():
        if not key.endswith((*merged, "mask_token")):
            assert torch.equal(theirs[key], back[key]), key
    missing = {key for key in theirs.keys() - back.keys() if "mask_token" not in key}
    assert missing <= ({k for k in theirs if k.startswith("head.")} if "classifier" in name else set())
    assert not back.keys() - theirs.keys()
    reread = read(tmp_path / "again").weights
    assert reread.config == loaded.config
    assert all(torch.equal(loaded.state[n], reread.state[n]) for n in loaded.state)


# ---------------------------------------------------------------- the pipeline


def drawing(folder: Path, gray: bool = False) -> Path:
    """Smooth shapes and edges in three different channels."""
    rows, columns = np.mgrid[0:90, 0:120] / 15
    channels = [np.sin(rows + columns * k) * 100 + 128 + 20 * (columns > 4 + k) for k in range(3)]
    pixels = np.stack(channels, -1).clip(0, 255).astype(np.uint8)
    image = Image.fromarray(pixels)
    (image.convert("L").convert("RGB") if gray else image).save(folder / "image.png")
    return folder / "image.png"


@pytest.mark.parametrize("name", ["cls", "distilled", "trained-here", "registers", "no-class-token"])
@pytest.mark.parametrize("resize", ["stretch", "crop"])
def test_the_pipeline_gives_our_labels_and_probabilities(name: str, resize: Any, tmp_path: Path):
    weights = weights_of(**CLASSIFIERS[name][1])
    preprocessing = Preprocessing(
        (32, 32),
        resize=resize,
        crop_fraction=0.875,
        resize_size=(36, 36) if resize == "crop" else None,
        interpolation="bicubic",
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        center="floor",
    )
    weights = Weights(weights.config, weights.state, preprocessing, NAMES, {})
    write(weights, tmp_path / "out", "hf")
    compare(weights, tmp_path / "out", drawing(tmp_path), tolerance=1e-6)


def test_the_pipeline_agrees_on_photographs(shared_data: Path, tmp_path: Path):
    """On those without a color profile, which transformers ignores."""
    compared = 0
    weights = weights_of(pool="mean")
    write(weights, tmp_path / "out", "hf")
    with tarfile.open(shared_data / "hymenoptera.tar") as archive:
        names = sorted(name for name in archive.getnames() if name.endswith(".jpg"))
        for name in names[::97]:
            found = archive.extractfile(name)
            assert found is not None
            (tmp_path / "photograph.jpg").write_bytes(found.read())
            with Image.open(tmp_path / "photograph.jpg") as image:
                if "icc_profile" in image.info:
                    continue
            compare(weights, tmp_path / "out", tmp_path / "photograph.jpg", tolerance=1e-6)
            compared += 1
    assert compared > 1


@pytest.mark.parametrize("gray_image", [True, False])
def test_a_gray_network_takes_colors_there(gray_image: bool, tmp_path: Path):
    weights = weights_of(channels=1, pool="mean")
    write(weights, tmp_path / "out", "hf")
    # a gray level of ours is rounded before it is resized, colors are weighted after
    compare(weights, tmp_path / "out", drawing(tmp_path, gray_image), tolerance=1e-6 if gray_image else 1e-3)


def compare(weights: Weights, folder: Path, image: Path, tolerance: float) -> None:
    """Labels in the same order, and probabilities that differ by no more than the resize does."""
    classify = transformers.pipeline("image-classification", model=str(folder))
    theirs = {found["label"]: found["score"] for found in classify(str(image), top_k=5)}
    prepared = weights.preprocessing
    pixels = read_image(image, channels=prepared.channels)
    images = prepared.standardize(torch.as_tensor(prepared.geometry(pixels))[None])
    probabilities = logits(weights, images)[0].softmax(-1)
    ours = dict(zip(NAMES, probabilities.tolist(), strict=True))
    assert sorted(ours, key=ours.__getitem__)[::-1] == list(theirs)
    assert max(abs(ours[name] - theirs[name]) for name in NAMES) <= tolerance


# ---------------------------------------------------------------- what is refused

REFUSED = {
    "post": ({"norm": "post"}, "norm is post"),
    "scale": ({"attention_scale": "model"}, "attention scale"),
    "qk-norm": ({"qk_norm": True}, "qk norm"),
    "stem": ({"stem": (1, 1), "patch_size": 8, "image_size": 16}, "stem"),
    "pre-logits": ({"pre_logits": True}, "no layer between"),
    "mean-of-all": ({"pool": "mean-all"}, "pool is mean-all"),
    "gap": ({"pool": "mean", "final_norm": "pooled"}, "final norm"),
    "map": ({"pool": "map"}, "no variant with a classifier"),
    "rotary": ({"position": "rotary"}, "no variant with a classifier"),
    "two-sorts": ({"dist_token": True, "registers": 1}, "registers is 1"),
    "mlp": ({"pool": "mean", "mlp_dim": 50}, "whole multiple"),
    "oblong": ({"pool": "mean", "image_size": (16, 32)}, "square"),
    "features": ({"pool": "mean", "classes": 0}, "not the mean"),
    "gated": ({"cls_token": False, "pool": "mean", "activation": "swiglu"}, "activation is swiglu"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_parts_that_no_class_of_transformers_has(name: str, tmp_path: Path):
    """They are written with a modeling file (`test_transformers_code.py`), but for features."""
    changes, part = REFUSED[name]
    written = huggingface_writing.write if name != "features" else partial(write, to="hf")
    with pytest.raises(WeightsError) as refused:
        written(weights_of(**changes), tmp_path / "out")
    assert part in f"{refused.value.what} {refused.value.why}"
    assert not (tmp_path / "out").exists()


def written(folder: Path, name: str = "ViTForImageClassification", config: str = "ViTConfig", **more: Any) -> Path:
    built(name, config, **{**WIDE, **more}).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("hidden_act", "gelu_10", "hidden_act"),
        ("hidden_act", ["gelu"], "hidden_act"),
        ("model_type", "beit", "beit"),
        ("num_attention_heads", "4", "num_attention_heads"),
        ("num_attention_heads", True, "num_attention_heads"),
        ("layer_norm_eps", -1e-6, "layer_norm_eps"),
        ("layer_norm_eps", float("nan"), "NaN"),
        ("image_size", [32, 32, 32], "image_size"),
    ],
)
def test_a_configuration_that_cannot_be_honored(field: str, value: Any, told: str, tmp_path: Path):
    folder = written(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(WeightsError, match=told):
        read(folder)


@pytest.mark.parametrize(
    ("name", "config", "changes", "told"),
    [
        ("ViTModel", "ViTConfig", {"pooler_act": "relu", **WIDE}, "pooler_act"),
        ("DINOv3ViTModel", "DINOv3ViTConfig", {"rope_theta": 10.0, **WIDE}, "rope_theta"),
        ("DINOv3ViTModel", "DINOv3ViTConfig", {"use_gated_mlp": True, **WIDE}, "hidden_act"),
    ],
)
def test_arithmetic_of_another_kind_is_refused(name: str, config: str, changes: Any, told: str, tmp_path: Path):
    built(name, config, **changes).save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match=told):
        read(tmp_path)


def test_fields_that_name_code_are_ignored(tmp_path: Path):
    folder = written(tmp_path)
    before = read(folder).weights.config
    config = json.loads((folder / "config.json").read_text())
    code = {"auto_map": {"AutoModel": "evil.Model"}, "_class_name": "os.system", "trust_remote_code": True}
    (folder / "config.json").write_text(json.dumps({**config, **code}))
    (folder / "evil.py").write_text("raise SystemExit('executed')")
    assert read(folder).weights.config == before


def test_the_report_lists_omissions_and_assumptions(tmp_path: Path):
    case = CASES["hf-vit/bare-file"]()
    account = read(case.write(tmp_path), heads=4).account
    assert any("no config.json" in note and "1e-12" in note for note in account.notes)
    (tmp_path / "siglip").mkdir()
    account = read(CASES["hf-siglip-classifier/head-unread"]().write(tmp_path / "siglip")).account
    left = [line for line in account.lines if line.fate == "left out"]
    assert len(left) == 11
    assert {line.note for line in left} == {"the classifier reads the mean of all tokens"}


def test_images_are_prepared_as_the_folder_says(tmp_path: Path):
    folder = written(tmp_path)
    told = {"image_processor_type": "ViTImageProcessor", "size": {"height": 40, "width": 40}, "resample": 3}
    (folder / "preprocessor_config.json").write_text(json.dumps({**told, "image_mean": [0.1, 0.2, 0.3]}))
    found = read(folder).weights.preprocessing
    assert (found.interpolation, found.mean, found.image_size) == ("bicubic", (0.1, 0.2, 0.3), (32, 32))


def test_a_damaged_table_is_an_error_of_ours(tmp_path: Path):
    folder = written(tmp_path, TEACHER, "DeiTConfig")
    state = load_file(folder / "model.safetensors")
    state["deit.embeddings.position_embeddings"] = torch.zeros(1, 9, 48)
    save_file(state, folder / "model.safetensors")
    with pytest.raises(WeightsError, match="pos_embed"):
        read(folder)
