"""Images of a split as the loader keeps them, and as its workers prepare them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from vitral.data import Split
from vitral.data.images.augmentation import Augmentation
from vitral.data.images.preprocessing import Preprocessing, channels_first
from vitral.data.pixel_cache import Entry
from vitral.device import seeded
from vitral.errors import ImageError

_SAMPLED = 64  # images decoded to estimate the size of the decoded set


class Images(Dataset[Tensor]):
    """Images of a split with per-image geometry: (seed, epoch, index) to uint8 (C, height, width)."""

    def __init__(self, split: Split, preprocessing: Preprocessing, augmentation: Augmentation | None):
        self.split, self.preprocessing = split.with_levels(preprocessing.levels), preprocessing
        self.augmentation = augmentation
        self.decoded: Sequence[Tensor] | Entry | None = None
        """Decoded images by number, if they are kept."""

    def __getitem__(self, position: tuple[int, int, int]) -> Tensor:
        seed, epoch, index = position
        pixels = (self.decode(index) if self.decoded is None else self.decoded[index]).permute(1, 2, 0)
        if self.augmentation is None:
            return self.preprocessing.geometry(pixels).contiguous()
        with seeded(seed, epoch, index):
            return self.augmentation.geometry(pixels, self.preprocessing).contiguous()

    @property
    def cropped(self) -> bool:
        """True if each image gets a new random crop in every epoch."""
        return self.augmentation is not None and self.augmentation.crop == "random-resized"

    @property
    def scaled(self) -> bool:
        """True if large JPEGs are decoded at a fraction of their size."""
        return self.augmentation is not None and self.augmentation.scaled

    @property
    def enough(self) -> tuple[int, int] | None:
        """Height and width that an image cropped at random is decoded to at least; None decodes it whole."""
        height, width = self.preprocessing.image_size
        return (2 * height, 2 * width) if self.scaled else None

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """(C, height, width) of every image; None with per-image geometry."""
        return None if self.cropped else (self.preprocessing.channels, *self.preprocessing.kept_size)

    @property
    def settings(self) -> dict[str, object]:
        """Everything besides the image that determines `kept`, as plain data."""
        fields = self.preprocessing.to_json()
        if self.cropped:
            used = ("image_size", "channels", "interpolation", "antialias", "levels")
            return {"crop": True, "scaled": self.scaled, **{k: fields[k] for k in used if k in fields}}
        unused = ("std",) if self.preprocessing.resize == "letterbox" else ("std", "mean")  # letterbox fills with mean
        return {"crop": False, **{k: v for k, v in fields.items() if k not in unused}}

    def verify(self, indices: np.ndarray) -> None:
        """Raise the `ImageError` of the first of these images that cannot be decoded."""
        for index in indices.tolist() if self.decoded is None else ():
            self.image(index)

    def image(self, index: int, at_least: tuple[int, int] | None = None) -> np.ndarray:
        return self.split.image(index, self.preprocessing.channels, at_least=at_least)

    def kept(self, index: int) -> Tensor:
        """The pixels to keep of an image (C, H, W): at the network's size, or larger for random crops."""
        return self.decode(index) if self.cropped else self.preprocessing.geometry(self.image(index))

    def decode(self, index: int) -> Tensor:
        """Decode to (C, H, W); for random crops, resize to cover twice the network's size at most.

        Kept and streamed images are the same, so that a run does not depend on the available memory. A large JPEG is
        decoded no larger than needed, which takes a third of the time for a photograph of 12 megapixels. In memory the
        channels of a pixel stay together, as decoders write and resizing reads them.
        """
        if not self.cropped:
            return channels_first(self.image(index))
        image = channels_first(self.image(index, at_least=self.enough))
        scale = max(2 * n / m for n, m in zip(self.preprocessing.image_size, image.shape[-2:], strict=True))
        if scale >= 1:
            return image
        return self.preprocessing.resized(image, tuple(round(n * scale) for n in image.shape[-2:]))

    @property
    def kept_bytes(self) -> float:
        """Size of the whole set after `kept`."""
        return self.decoded_bytes if self.shape is None else len(self.split) * math.prod(self.shape)

    @cached_property
    def decoded_bytes(self) -> float:
        """Size of the whole set after `decode`, estimated from evenly spaced images."""
        count = len(self.split)
        sample = np.linspace(0, count - 1, min(count, _SAMPLED)).astype(int)
        sizes = []
        for index in sample:
            with contextlib.suppress(ImageError):
                sizes.append(self.decode(int(index)).nbytes)
        return count * float(np.mean(sizes)) if sizes else 0.0
