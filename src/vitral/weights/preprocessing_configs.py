"""Convert the preprocessing configs of published networks to `Preprocessing`, and back.

timm writes a `pretrained_cfg`, Hugging Face a `preprocessor_config.json`; for formats without a config, `DEFAULTS` has
the recipe of the origin's evaluation code. Only the fields named here are read, each must have the right type
(`WeightsError`), and names are looked up in tables: nothing from a file is ever imported or run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from vitral.data.images.levels import BYTES, FRACTIONS, LEVELS
from vitral.data.images.preprocessing import INTERPOLATIONS, Center, Preprocessing, Resize, before_crop
from vitral.errors import UsageError, WeightsError
from vitral.weights.notes import Alarm

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)
_T = TypeVar("_T")
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

Size = tuple[int, int]
"""Height and width in pixels."""

# ---------------------------------------------------------------- the formats' documented defaults


def _fraction(image_size: Size, crop_fraction: float, **recipe: Any) -> Preprocessing:
    """Short side to `image_size / crop_fraction`, rounded down, then the center."""
    resized = before_crop(image_size, crop_fraction)
    return Preprocessing(image_size, resize="crop", crop_fraction=crop_fraction, resize_size=resized, **recipe)


def _imagenet(image_size: Size, crop_fraction: float, interpolation: str = "bicubic") -> Preprocessing:
    return _fraction(image_size, crop_fraction, interpolation=interpolation, mean=IMAGENET_MEAN, std=IMAGENET_STD)


def _torchvision_l16(image_size: Size) -> Preprocessing:
    recipe = _imagenet((224, 224), 224 / 242, "bilinear")
    return dataclasses.replace(recipe, resize_size=(242, 242)).at(image_size)


DEFAULTS: dict[str, Callable[[Size], Preprocessing]] = {
    # vit_jax/input_pipeline.py: tf.image.resize to the square, then (x - 127.5) / 127.5. It keeps fractions of a level,
    # which are rounded here after each axis: the two differ by less than one level of 255.
    "jax": lambda size: Preprocessing(size, antialias=False),
    # timm/models/vision_transformer.py, the augreg entries: 0.9 at 224, all at 384.
    "timm-augreg": lambda size: _fraction(size, 0.9 if max(size) < 384 else 1.0, interpolation="bicubic"),
    # facebookresearch/deit datasets.py, eval_crop_ratio 0.875; DeiT-III (arXiv 2204.07118): test crop ratio 1.0.
    "deit": lambda size: _imagenet(size, 0.875),
    "deit3": lambda size: _imagenet(size, 1.0),
    # facebookresearch/mae util/datasets.py
    "mae": lambda size: _imagenet(size, 0.875 if max(size) <= 224 else 1.0),
    # torchvision/models/vision_transformer.py: trained there; ViT-L/16 alone 242 → 224; SWAG weights.
    "torchvision": lambda size: _imagenet(size, 0.875, "bilinear"),
    "torchvision-l16": _torchvision_l16,
    "torchvision-swag": lambda size: _imagenet(size, 1.0),
    # facebookresearch/dinov2 dinov2/data/preprocessing.py (256 → 224)
    "dinov2": lambda size: _imagenet(size, 0.875),
    # facebookresearch/dinov3 README.md: Resize((size, size), antialias=True)
    "dinov3": lambda size: Preprocessing(size, mean=IMAGENET_MEAN, std=IMAGENET_STD),
    "huggingface-vit": lambda size: Preprocessing(size),
    "siglip": lambda size: Preprocessing(size, interpolation="bicubic"),
    # openai/clip-vit-*: preprocessor_config.json
    "clip": lambda size: _fraction(size, 1.0, interpolation="bicubic", mean=CLIP_MEAN, std=CLIP_STD),
    # google-research/big_transfer bit_pytorch/train.py
    "bit": lambda size: Preprocessing(size),
}
"""Format or family → the recipe for an image size, for weights without one."""

# ---------------------------------------------------------------- timm

_CROP_MODES: dict[str, Resize] = {"center": "crop", "squash": "stretch", "border": "letterbox"}


def from_timm(pretrained_cfg: Mapping[str, object], image_size: Size | None = None) -> Preprocessing:
    """Read a `pretrained_cfg` as the evaluation of `timm.data.create_transform`, with timm's defaults.

    `image_size` replaces that of the file, with the same share cropped. timm resizes by Pillow: pixels differ from
    vitral's by one level of 255 at most, for bicubic by more at a few pixels beside hard edges, where both clip. Raises
    `WeightsError` naming an invalid field.
    """
    read = _Fields(pretrained_cfg, "pretrained_cfg")
    channels, height, width = read.numbers("input_size", (3, 224, 224), 3, whole=True)
    mean = read.numbers("mean", IMAGENET_MEAN, int(channels))
    std = read.numbers("std", IMAGENET_STD, int(channels))
    fraction = read.number("crop_pct", 0.875)
    resize = read.choice("crop_mode", "center", _CROP_MODES)
    interpolation = read.choice("interpolation", "bicubic", {name: name for name in INTERPOLATIONS})
    size = image_size or (int(height), int(width))
    if not 0 < fraction <= 1:
        raise read.wrong("crop_pct", "a share above 0, up to 1")
    resized = before_crop(size, fraction)
    plain = resize == "stretch" and resized == size  # nothing is cropped: one size is enough
    return read.build(size, int(channels), resize, fraction, interpolation, True, mean, std, None if plain else resized)


def to_timm(preprocessing: Preprocessing) -> dict[str, object]:
    """Write the part of a `pretrained_cfg` on preprocessing.

    timm has no resize without antialias: `differences(preprocessing, from_timm(to_timm(preprocessing)))` lists what is
    lost. A `crop` without `resize_size` rounds the sides differently (by at most one pixel) and does not change images
    of the right size, which timm does.
    """
    size, resized = preprocessing.image_size, _resize_size(preprocessing)
    known = before_crop(size, preprocessing.crop_fraction) == resized
    modes = {rule: mode for mode, rule in _CROP_MODES.items()}
    return {
        "input_size": [preprocessing.channels, *size],
        "interpolation": preprocessing.interpolation,
        "mean": list(preprocessing.mean),
        "std": list(preprocessing.std),
        "crop_pct": preprocessing.crop_fraction if known else _crop_fraction(size, resized),
        "crop_mode": modes.get(preprocessing.resize, modes["letterbox"]),  # timm keeps no image's own size
    }


def _resize_size(preprocessing: Preprocessing) -> Size:
    """Size before the center crop, also if not stated as a field."""
    if preprocessing.resize_size is not None:
        return preprocessing.resize_size
    if preprocessing.resize != "crop":
        return preprocessing.image_size
    height, width = (round(n / preprocessing.crop_fraction) for n in preprocessing.image_size)
    return height, width


def _crop_fraction(image_size: Size, resized: Size) -> float:
    """Find a share for which `before_crop` returns `resized`, with few digits if possible; else the nearest."""
    sides = list(zip(image_size, resized, strict=True))
    low, high = max(new / (old + 1) for new, old in sides), min(1.0, *(new / old for new, old in sides))
    for digits in range(2, 8):
        short = math.floor(high * 10**digits) / 10**digits
        if short > low and before_crop(image_size, short) == resized:
            return short
    return high


# ---------------------------------------------------------------- Hugging Face

_RESAMPLE = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # Pillow's codes 0 to 5


@dataclass(frozen=True)
class _Processor:
    """Defaults of an image processor's class (transformers/models/*/image_processing_*)."""

    size: Size | int = (224, 224)  # an int is the short side
    crop: Size | None = None
    resample: int = 2
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    square: bool = True  # True if a single number is both sides, not the short one


_PROCESSORS: dict[str, _Processor] = {
    "ViT": _Processor(mean=HALF, std=HALF),
    "DeiT": _Processor((256, 256), (224, 224), 3, HALF, HALF),
    "Bit": _Processor(224, (224, 224), 3, CLIP_MEAN, CLIP_STD, square=False),  # DINOv2 names this one
    "DINOv3ViT": _Processor(),
    "Siglip": _Processor(resample=3, mean=HALF, std=HALF),
    "Siglip2": _Processor((256, 256), resample=2, mean=HALF, std=HALF),  # of 256 patches of 16 pixels, at any aspect
    "CLIP": _Processor(224, (224, 224), 3, CLIP_MEAN, CLIP_STD, square=False),
}


def from_huggingface(config: Mapping[str, object], image_size: Size | None = None) -> Preprocessing:
    """Read a `preprocessor_config.json`, with the defaults of the processor that it names (ViT's if none).

    `image_size` is the network's: if it differs from the final size of the file (DINOv2's files state 224 for networks
    of 518), the same share is cropped at that size. transformers resizes by torchvision, to the same bits, or by
    Pillow: pixels then differ as in `from_timm`. DINOv3's processor keeps fractions of a level. Raises `WeightsError`
    naming a field that cannot be honored.
    """
    read = _Fields(config, "preprocessor_config.json")
    own = _PROCESSORS[_processor(read)]
    do = {name: read.flag(f"do_{name}", True) for name in ("resize", "rescale", "normalize")}
    cropped = read.flag("do_center_crop", own.crop is not None)
    if cropped and not do["resize"]:
        raise read.wrong("do_resize", "true, because of do_center_crop")
    size, resize = _huggingface_size(read, own)
    final = _sides(read, "crop_size", own.crop or (224, 224)) if cropped else size
    if resize == "crop" and not cropped:
        raise read.wrong("do_center_crop", "true: with 'shortest_edge' alone images have different sizes")
    mean, std = _huggingface_scaling(read, own, do["rescale"], do["normalize"])
    code = int(read.number("resample", own.resample))
    if not 0 <= code < len(_RESAMPLE):
        raise read.wrong("resample", f"a code of Pillow, 0 to {len(_RESAMPLE) - 1}")
    plain = resize == "stretch" and size == final
    fraction = min(1.0, _crop_fraction(final, size))
    recipe = read.build(
        final,
        len(mean),
        resize,
        fraction,
        _RESAMPLE[code],
        True,
        mean,
        std,
        None if plain else size,
        "floor" if cropped else "round",
    )
    if config.get("levels") is not None:
        black, white = map(int, read.numbers("levels", (), 2))
        recipe = dataclasses.replace(recipe, levels=(black, white))
    return recipe if image_size is None else recipe.at(image_size)


def to_huggingface(preprocessing: Preprocessing) -> dict[str, object]:
    """Write a `preprocessor_config.json` for an equivalent image processor.

    `ViTImageProcessor` stretches; the center is cropped by `BitImageProcessor` (short side) or `DeiTImageProcessor`
    (stretched first), because older releases of `ViTImageProcessor` ignore the fields. transformers has no letterbox,
    which becomes a stretch, and no resize without antialias; `levels` is a field that vitral alone reads.
    `differences(preprocessing, from_huggingface(written))` lists what is lost. The center may differ from vitral's by
    one pixel, see `Preprocessing.center`, and so may the sides of a `crop` without `resize_size`.
    """
    height, width = preprocessing.image_size
    resized = _resize_size(preprocessing)
    square = preprocessing.resize == "crop"
    cropped = square or (preprocessing.resize == "stretch" and resized != (height, width))
    data: dict[str, object] = {
        "image_processor_type": f"{'Bit' if square else 'DeiT' if cropped else 'ViT'}ImageProcessor",
        "do_resize": True,
        "size": {"height": height, "width": width},
        "resample": _RESAMPLE.index(preprocessing.interpolation),
        "do_center_crop": cropped,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocessing.mean),
        "image_std": list(preprocessing.std),
        "do_convert_rgb": preprocessing.channels == 3,
    }
    if cropped:
        data["size"] = (
            {"shortest_edge": max(resized)} if square else dict(zip(("height", "width"), resized, strict=True))
        )
        data["crop_size"] = {"height": height, "width": width}
    if preprocessing.levels is not None:
        data["levels"] = list(preprocessing.levels)
    return data


def _processor(read: _Fields) -> str:
    """Find the key in `_PROCESSORS` of the named class, by name alone: nothing is imported."""
    field = next((f for f in ("image_processor_type", "feature_extractor_type") if read.data.get(f) is not None), None)
    if field is None:
        return "ViT"
    name = read.text(field)
    for ending in ("Fast", "Pil"):
        name = name.removesuffix(ending)
    stem = name.removesuffix("ImageProcessor").removesuffix("FeatureExtractor")
    if stem not in _PROCESSORS:
        raise read.wrong(field, f"one of {', '.join(f'{known}ImageProcessor' for known in _PROCESSORS)}")
    return stem


def _huggingface_size(read: _Fields, own: _Processor) -> tuple[Size, Resize]:
    """Read the size of the resize, and its rule: stretch to it, or scale the short side to it."""
    value = read.data.get("size")
    if value is None:
        value = own.size
    elif isinstance(value, Mapping):
        if set(value) == {"shortest_edge"}:
            side = _whole(value["shortest_edge"])
            if side is None:
                raise read.wrong("size", "a number of pixels in 'shortest_edge'")
            return (side, side), "crop"
        return _sides(read, "size", (224, 224)), "stretch"
    elif own.square or not isinstance(value, int):
        return _sides(read, "size", (224, 224)), "stretch"
    if isinstance(value, int):
        if _whole(value) is None:
            raise read.wrong("size", "a number of pixels")
        return (value, value), "crop"
    return value, "stretch"


def _sides(read: _Fields, field: str, default: Size) -> Size:
    """Read {"height", "width"}, a pair, or one number for both."""
    value = read.data.get(field)
    if value is None:
        return default
    if isinstance(value, Mapping) and set(value) == {"height", "width"}:
        value = [value["height"], value["width"]]
    sides = [_whole(n) for n in (value if isinstance(value, list | tuple) else [value, value])]
    if len(sides) != 2 or sides[0] is None or sides[1] is None:
        raise read.wrong(field, "{'height': pixels, 'width': pixels}")
    return sides[0], sides[1]


def _huggingface_scaling(
    read: _Fields, own: _Processor, rescale: bool, normalize: bool
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Read mean and std of pixels scaled to 0..1: transformers computes (x · factor - mean) / std of x in 0..255."""
    factor = 255 * read.number("rescale_factor", 1 / 255) if rescale else 255.0
    if factor <= 0:
        raise read.wrong("rescale_factor", "above 0")
    if abs(factor - 1) < 1e-6:  # files state it with 6 to 17 digits
        factor = 1.0
    mean = read.numbers("image_mean", own.mean, None) if normalize else (0.0,) * 3
    std = read.numbers("image_std", own.std, len(mean)) if normalize else (1.0,) * 3
    return tuple(m / factor for m in mean), tuple(s / factor for s in std)


# ---------------------------------------------------------------- differences


def with_levels(trained: Preprocessing, levels: tuple[int, int] | None) -> tuple[Preprocessing, list[Alarm]]:
    """Return the preprocessing with stated levels, if any, and a warning if others were trained with."""
    if levels in (None, trained.levels):
        return trained, []
    used = dataclasses.replace(trained, levels=levels)
    return used, [] if trained.levels is None else [Alarm(f"WARNING {one}") for one in differences(trained, used)]


def differences(trained: Preprocessing, used: Preprocessing) -> list[str]:
    """Describe how preprocessing differs from that of training; empty if it is the same.

    Used for warnings in training and evaluation. Image size and rounding of the center do not count.
    """
    found = []
    if trained.channels != used.channels:
        found.append(f"channels: trained with {trained.channels}, used with {used.channels}")
    for name in ("mean", "std"):
        one, other = getattr(trained, name), getattr(used, name)
        if len(one) == len(other) and any(abs(a - b) > 5e-4 for a, b in zip(one, other, strict=True)):
            found.append(f"{name} of the pixels: trained with {_formatted(one)}, used with {_formatted(other)}")
    if (one := _rule(trained)) != (other := _rule(used)):
        found.append(f"resize: trained with {one}, used with {other}")
    if trained.levels != used.levels and not (trained.levels is None and used.levels in (FRACTIONS, BYTES)):
        one, other = ("{:,} to {:,}".format(*(each or LEVELS)) for each in (trained.levels, used.levels))
        found.append(f"levels of 16 bits: trained with {one}, used with {other}")
    if trained.interpolation != used.interpolation:
        found.append(f"interpolation: trained with {trained.interpolation}, used with {used.interpolation}")
    if trained.antialias != used.antialias and "nearest" not in (trained.interpolation, used.interpolation):
        words = {True: "with antialias", False: "without antialias"}
        found.append(f"downscaling: trained {words[trained.antialias]}, used {words[used.antialias]}")
    return found


def _rule(preprocessing: Preprocessing) -> str:
    shares = [n / m for n, m in zip(preprocessing.image_size, _resize_size(preprocessing), strict=True)]
    kept = f"the central {max(shares):.0%}"
    if preprocessing.resize == "crop":
        return f"crop ({kept} of the short side)"
    if max(shares) == 1:
        return preprocessing.resize
    return f"{preprocessing.resize} ({kept} of each side)"


def _formatted(values: tuple[float, ...]) -> str:
    return ", ".join(f"{v:.4g}" for v in values)


# ---------------------------------------------------------------- reading fields of a foreign file


def _whole(value: object) -> int | None:
    """Return a positive whole number of pixels, else None; `True` is not one."""
    return value if type(value) is int and 0 < value < 1 << 14 else None


@dataclass(frozen=True)
class _Fields:
    """Typed access to a mapping from a file; absent and null fields have the default."""

    data: Mapping[str, Any]
    name: str

    def wrong(self, field: str, wanted: str) -> WeightsError:
        why = f"'{field}' should be {wanted}, not {str(self.data.get(field))[:60]!r}"
        return WeightsError("cannot honor the preprocessing of the weights", where=self.name, why=why)

    def number(self, field: str, default: float) -> float:
        value = self.data.get(field)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.wrong(field, "a number")
        return value

    def flag(self, field: str, default: bool) -> bool:
        value = self.data.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(field, "true or false")
        return value

    def text(self, field: str) -> str:
        value = self.data.get(field)
        if not isinstance(value, str):
            raise self.wrong(field, "a name")
        return value

    def choice(self, field: str, default: str, table: Mapping[str, _T]) -> _T:
        name = default if self.data.get(field) is None else self.text(field)
        if name not in table:
            raise self.wrong(field, f"one of {', '.join(table)}")
        return table[name]

    def numbers(
        self, field: str, default: tuple[float, ...], count: int | None, *, whole: bool = False
    ) -> tuple[float, ...]:
        value = self.data.get(field)
        if value is None:
            value = default
        kind = "positive whole numbers" if whole else "numbers"
        if not isinstance(value, list | tuple) or not value or (count is not None and len(value) != count):
            raise self.wrong(field, f"{count or 'some'} {kind}")
        for number in value:
            plain = isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)
            if not plain or (whole and _whole(number) is None):
                raise self.wrong(field, f"{count or 'some'} {kind}")
        return tuple(value)

    def build(
        self,
        size: Size,
        channels: int,
        resize: Resize,
        fraction: float,
        interpolation: str,
        antialias: bool,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        resized: Size | None,
        center: Center = "round",
    ) -> Preprocessing:
        """Build `Preprocessing` from the fields; its `UsageError` becomes `WeightsError`."""
        try:
            return Preprocessing(size, channels, resize, fraction, interpolation, antialias, mean, std, resized, center)
        except UsageError as error:
            raise WeightsError(
                "cannot honor the preprocessing of the weights", where=self.name, why=error.what
            ) from error
