"""Pixels as timm, transformers and torchvision prepare them, from their own descriptions and back.

Those resize an image by Pillow or by torch's uint8 kernel: the same filters, weights in fixed point, rounding and
clipping after each axis, but not with the same number of bits, nor always with the same axis first. Two results differ
by one level of 255 at most for bilinear; bicubic overshoots at hard edges, and where it is clipped between the axes,
few pixels differ by more. (The images here have hard edges of noise for that reason.) What torch resizes is the same.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from images import noise
from vitral.data.images.augmentation import Augmentation
from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import WeightsError
from vitral.weights.preprocessing_configs import (
    CLIP_MEAN,
    DEFAULTS,
    IMAGENET_MEAN,
    IMAGENET_STD,
    differences,
    from_huggingface,
    from_timm,
    to_huggingface,
    to_timm,
)

LEVELS = {"bilinear": 1, "bicubic": 12}  # of 255, see above; what is not named is resized by Pillow itself
SIZES = [(61, 47), (47, 61), (32, 32), (37, 38), (35, 90), (200, 29)]


def photograph(size: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Smooth noise with hard edges in it, so that both kinds of difference would show."""
    small = Image.fromarray(noise(seed, (max(2, size[0] // 5), max(2, size[1] // 5))))
    pixels = np.array(small.resize((size[1], size[0]), Image.Resampling.BICUBIC))
    pixels[size[0] // 3 : size[0] // 2] = noise(seed + 1, (size[0] // 2 - size[0] // 3, size[1]))
    return pixels


def ours(recipe: Preprocessing, pixels: np.ndarray) -> torch.Tensor:
    return recipe.standardize(recipe.geometry(pixels)[None])[0]


def assert_same_pixels(ours: torch.Tensor, theirs: torch.Tensor, std: tuple[float, ...], levels: float) -> None:
    assert ours.shape == theirs.shape
    apart = ((ours - theirs) * torch.tensor(std)[:, None, None] * 255).abs()
    assert apart.max() <= levels + 1e-2
    assert apart.mean() <= 0.35
    assert (apart > 1.01).float().mean() <= 0.01


TIMM = [
    {"input_size": (3, 32, 32), "crop_pct": 0.9, "interpolation": "bicubic", "mean": (0.5,) * 3, "std": (0.5,) * 3},
    {"input_size": (3, 32, 32), "crop_pct": 0.875, "interpolation": "bilinear"},
    {"input_size": (3, 32, 32), "crop_pct": 1.0, "crop_mode": "center"},
    {"input_size": (3, 32, 32), "crop_pct": 0.95, "interpolation": "lanczos"},
    {"input_size": (3, 32, 32), "crop_pct": 0.9, "interpolation": "nearest"},
    {"input_size": (3, 32, 32), "crop_pct": 0.9, "interpolation": "box"},
    {"input_size": (3, 32, 32), "crop_pct": 1.0, "interpolation": "hamming"},
    {"input_size": (3, 32, 32), "crop_pct": 1.0, "crop_mode": "squash"},
    {"input_size": (3, 32, 32), "crop_pct": 0.9, "crop_mode": "squash", "interpolation": "bilinear"},
    {"input_size": (3, 32, 32), "crop_pct": 1.0, "crop_mode": "border"},
    {"input_size": (3, 32, 32), "crop_pct": 0.9, "crop_mode": "border", "interpolation": "bilinear"},
    {"input_size": (3, 24, 40), "crop_pct": 0.9},
    {"input_size": (3, 40, 24), "crop_pct": 0.9, "crop_mode": "border"},
]


@pytest.mark.parametrize("config", TIMM, ids=lambda c: "-".join(str(v) for v in c.values() if not isinstance(v, tuple)))
def test_timm_sees_the_same_pixels(config):
    data = pytest.importorskip("timm.data")
    theirs = data.create_transform(**data.resolve_data_config({}, pretrained_cfg=config), is_training=False)
    recipe = from_timm(config)
    for size in SIZES:
        pixels = photograph(size)
        assert_same_pixels(
            ours(recipe, pixels), theirs(Image.fromarray(pixels)), recipe.std, LEVELS.get(recipe.interpolation, 0)
        )


def test_timm_without_a_word_has_timms_defaults():
    assert from_timm({}) == Preprocessing(
        (224, 224), 3, "crop", 0.875, "bicubic", True, IMAGENET_MEAN, IMAGENET_STD, (256, 256)
    )
    assert from_timm({"crop_pct": 0.9}).resize_size == (248, 248)  # rounded down: 224 / 0.9 is 248.9
    assert from_timm({"crop_pct": 0.9}, image_size=(384, 384)).resize_size == (426, 426)
    assert from_timm({"crop_pct": 0.9}).at((384, 384)) == from_timm({"crop_pct": 0.9}, (384, 384))


@pytest.mark.parametrize("config", TIMM, ids=str)
def test_timms_description_comes_back(config):
    recipe = from_timm(config)
    written = json.loads(json.dumps(to_timm(recipe)))
    again = from_timm(written)
    assert again == recipe
    assert differences(recipe, again) == []


PROCESSORS = [
    {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": 32, "width": 32},
        "resample": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    },
    {
        "feature_extractor_type": "ViTFeatureExtractor",
        "size": 32,
        "do_resize": True,
        "do_normalize": True,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.6, 0.7],
        "resample": 3,
    },
    {"image_processor_type": "ViTImageProcessor", "size": {"height": 24, "width": 40}, "resample": 0},
    {
        "image_processor_type": "BitImageProcessor",
        "size": {"shortest_edge": 37},
        "resample": 3,
        "crop_size": {"height": 32, "width": 32},
        "image_mean": list(IMAGENET_MEAN),
        "image_std": list(IMAGENET_STD),
    },
    {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 32}, "crop_size": 32, "resample": 2},
    {
        "image_processor_type": "BitImageProcessor",
        "size": {"shortest_edge": 36},
        "resample": 1,
        "crop_size": {"height": 24, "width": 32},
    },
    {"image_processor_type": "DeiTImageProcessor", "size": 38, "crop_size": 32},
    {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": 32, "width": 32},
        "rescale_factor": 0.00392156862,
    },
    {"image_processor_type": "DINOv3ViTImageProcessorFast", "size": {"height": 32, "width": 32}},
    {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}, "do_normalize": False},
    {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": 32, "width": 32},
        "rescale_factor": 1 / 127.5,
        "image_mean": [1.0] * 3,
        "image_std": [1.0] * 3,
    },
    {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": 32, "width": 32},
        "do_rescale": False,
        "image_mean": [120.0] * 3,
        "image_std": [60.0] * 3,
    },
]


def transformers_processors(config: dict[str, object]) -> list[object]:
    """The processor that the file names, by torchvision and by Pillow where transformers has both."""
    transformers = pytest.importorskip("transformers")
    name = str(config.get("image_processor_type", config.get("feature_extractor_type")))
    stem = name.replace("FeatureExtractor", "ImageProcessor").removesuffix("Fast")
    fields = {k: v for k, v in config.items() if not k.endswith("_type")}
    classes = [getattr(transformers, name, None) for name in (stem, f"{stem}Pil")]
    # torchvision's nearest takes the other of two pixels that are as near, and it has no box and no hamming.
    by_pillow_alone = config.get("resample") in (0, 4, 5)
    return [own(**fields) for own in classes[by_pillow_alone:] if own is not None]


def theirs(processor: object, pixels: np.ndarray) -> torch.Tensor:
    return processor(Image.fromarray(pixels), return_tensors="pt")["pixel_values"][0].float()  # type: ignore[operator]


@pytest.mark.parametrize("config", PROCESSORS, ids=lambda c: str(list(c.values())[:3]))
def test_transformers_sees_the_same_pixels(config):
    from transformers.image_processing_backends import TorchvisionBackend

    recipe = from_huggingface(config)
    processors = transformers_processors(config)
    assert processors
    for processor in processors:
        for size in SIZES:
            pixels = photograph(size)
            same = isinstance(processor, TorchvisionBackend) and recipe.interpolation in LEVELS
            levels = 0 if same and "DINOv3" not in str(config) else _levels(recipe)
            assert_same_pixels(ours(recipe, pixels), theirs(processor, pixels), recipe.std, levels)


@pytest.mark.parametrize(
    "recipe",
    [from_huggingface(config) for config in PROCESSORS]
    + [from_timm(config) for config in TIMM if config["crop_pct"] == 1.0 and "border" not in config.values()]
    + [
        Preprocessing((16, 24)),
        Preprocessing((24, 24), 1, mean=(0.2,), std=(0.3,)),
    ],
    ids=str,
)
def test_transformers_reads_what_is_written_for_it(recipe):
    """The processor named in the written file gives the pixels that ours gives."""
    written = json.loads(json.dumps(to_huggingface(recipe)))
    assert differences(recipe, from_huggingface(written)) == []
    for processor in transformers_processors(written):
        for size in [(61, 47), (48, 64)]:
            pixels = photograph(size)[..., : recipe.channels]
            image = pixels[..., 0] if recipe.channels == 1 else pixels
            if recipe.center == "round" and _middle_falls_apart(recipe, size):
                continue
            assert_same_pixels(ours(recipe, pixels), theirs(processor, image), recipe.std, _levels(recipe))


def _levels(recipe: Preprocessing) -> float:
    return LEVELS.get(recipe.interpolation, 1)


def _middle_falls_apart(recipe: Preprocessing, size: tuple[int, int]) -> bool:
    """True if `round` and `floor` put the center at different pixels."""
    if recipe.resize != "crop":
        return False
    assert recipe.resize_size is not None
    long = int(max(recipe.resize_size) * max(size) / min(size))
    return (long - max(recipe.image_size)) % 4 == 3


def test_our_own_crop_is_written_to_within_a_pixel():
    """Without `resize_size` the long side is rounded otherwise: smooth images stay near, edges move by a fraction."""
    recipe = Preprocessing((32, 32), resize="crop")
    smooth = np.array(Image.fromarray(noise(3, (6, 5))).resize((47, 61), Image.Resampling.BICUBIC))
    for processor in transformers_processors(to_huggingface(recipe)):
        apart = (ours(recipe, smooth) - theirs(processor, smooth)).abs() * 127.5
        assert apart.mean() < 10
    assert from_timm(to_timm(recipe)).resize_size == (37, 37)


def test_the_network_has_the_last_word_on_the_size():
    """DINOv2's files say 256 → 224 for networks of 518: the share that is cut away stays."""
    config = {
        "image_processor_type": "BitImageProcessor",
        "size": {"shortest_edge": 256},
        "crop_size": {"height": 224, "width": 224},
    }
    assert from_huggingface(config).image_size == (224, 224)
    recipe = from_huggingface(config, (518, 518))
    assert (recipe.image_size, recipe.resize_size) == ((518, 518), (592, 592))


def test_torchvisions_weights_see_the_same_pixels():
    models = pytest.importorskip("torchvision.models")
    for weights, name in [
        (models.ViT_B_16_Weights.IMAGENET1K_V1, "torchvision"),
        (models.ViT_L_16_Weights.IMAGENET1K_V1, "torchvision-l16"),
        (models.ViT_B_16_Weights.IMAGENET1K_SWAG_LINEAR_V1, "torchvision-swag"),
    ]:
        recipe = DEFAULTS[name]((224, 224))
        for size in [(301, 260), (224, 224)]:
            pixels = photograph(size)
            prepared = weights.transforms()(Image.fromarray(pixels))
            assert_same_pixels(ours(recipe, pixels), prepared, recipe.std, _levels(recipe))


def test_the_authors_evaluation_is_bilinear_without_antialias():
    """tf.image.resize: weights of the two pixels around the half-pixel center; here in numpy, with fractions."""
    pixels = photograph((61, 47)).astype(np.float64)
    for axis, side in ((0, 32), (1, 32)):
        at = (np.arange(side) + 0.5) * pixels.shape[axis] / side - 0.5
        low = np.clip(np.floor(at).astype(int), 0, pixels.shape[axis] - 1)
        share = np.clip(at - low, 0, 1).reshape([-1 if i == axis else 1 for i in range(3)])
        high = np.minimum(low + 1, pixels.shape[axis] - 1)
        pixels = pixels.take(low, axis) * (1 - share) + pixels.take(high, axis) * share
    wanted = torch.from_numpy((pixels - 127.5) / 127.5).permute(2, 0, 1).float()
    assert_same_pixels(ours(DEFAULTS["jax"]((32, 32)), photograph((61, 47))), wanted, (0.5,) * 3, 1)


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_default_prepares_images(name):
    for size in ((32, 32), (24, 40), (384, 384)):
        recipe = DEFAULTS[name](size)
        assert recipe.geometry(photograph((50, 70))).shape == (3, *size)
        assert Preprocessing.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
        assert recipe.at((48, 48)).geometry(photograph((50, 70))).shape == (3, 48, 48)
    half = name in ("jax", "timm-augreg", "huggingface-vit", "siglip", "bit")
    wanted = {"clip": CLIP_MEAN}.get(name, (0.5,) * 3 if half else IMAGENET_MEAN)
    assert DEFAULTS[name]((224, 224)).mean == wanted


def test_differences_are_described():
    paper, deit = DEFAULTS["jax"]((224, 224)), DEFAULTS["deit"]((224, 224))
    assert differences(deit, deit) == differences(deit, DEFAULTS["deit"]((384, 384))) == []
    assert differences(paper, deit) == [
        "mean of the pixels: trained with 0.5, 0.5, 0.5, used with 0.485, 0.456, 0.406",
        "std of the pixels: trained with 0.5, 0.5, 0.5, used with 0.229, 0.224, 0.225",
        "resize: trained with stretch, used with crop (the central 88% of the short side)",
        "interpolation: trained with bilinear, used with bicubic",
        "downscaling: trained without antialias, used with antialias",
    ]
    # What a format cannot say is found by reading back what was written.
    assert differences(paper, from_timm(to_timm(paper))) == [
        "downscaling: trained without antialias, used with antialias"
    ]
    boxed = Preprocessing((32, 32), resize="letterbox")
    assert differences(boxed, from_huggingface(to_huggingface(boxed))) == [
        "resize: trained with letterbox, used with stretch"
    ]


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"input_size": [3, 224]}, "input_size"),
        ({"input_size": [3, "224", 224]}, "input_size"),
        ({"input_size": [3, True, 224]}, "input_size"),
        ({"mean": "0.5"}, "mean"),
        ({"mean": [0.5]}, "mean"),
        ({"std": [0.5, 0.5, math.nan]}, "std"),
        ({"std": [0.5, 0.5, 0.0]}, "std"),
        ({"crop_pct": "0.9"}, "crop_pct"),
        ({"crop_pct": 1.5}, "crop_pct"),
        ({"crop_pct": 1e-9}, "resize_size"),
        ({"crop_mode": "os.system"}, "crop_mode"),
        ({"interpolation": "random"}, "interpolation"),
        ({"interpolation": ["bicubic"]}, "interpolation"),
    ],
)
def test_timm_fields_of_a_surprising_type_are_named(config, field):
    with pytest.raises(WeightsError, match=field):
        from_timm(config)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"size": "224"}, "size"),
        ({"size": {"shortest_edge": "224"}}, "size"),
        ({"size": {"longest_edge": 224}}, "size"),
        ({"size": {"height": -1, "width": 2}}, "size"),
        ({"size": {"height": 10**9, "width": 2}}, "size"),
        ({"size": {"shortest_edge": 224}}, "do_center_crop"),
        ({"do_center_crop": "yes"}, "do_center_crop"),
        ({"do_center_crop": True, "do_resize": False}, "do_resize"),
        ({"resample": 6}, "resample"),
        ({"resample": "bicubic"}, "resample"),
        ({"image_mean": [0.5, None, 0.5]}, "image_mean"),
        ({"image_std": [0.5]}, "image_std"),
        ({"rescale_factor": 0}, "rescale_factor"),
        ({"image_processor_type": "my.module.Processor"}, "image_processor_type"),
        ({"image_processor_type": {"auto_map": "x"}}, "image_processor_type"),
    ],
)
def test_huggingface_fields_of_a_surprising_type_are_named(config, field):
    with pytest.raises(WeightsError, match=field):
        from_huggingface(config)


def test_training_on_crops_works_with_every_recipe():
    torch.manual_seed(0)
    for recipe in [from_timm(config) for config in TIMM]:
        for crop in ("none", "random-resized"):
            out = Augmentation(crop=crop).geometry(photograph((61, 47)), recipe)
            assert out.shape == (3, *recipe.image_size)
            assert out.dtype == torch.uint8
