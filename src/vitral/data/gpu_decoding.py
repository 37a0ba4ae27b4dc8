"""JPEGs that a GPU decodes, for training with random crops: nvJPEG, by torchvision's operator.

Worker processes read the files and draw the crops; a thread decodes, crops and resizes the next batch while the step
computes. nvJPEG repeats colors where the CPU's decoders interpolate them (docs/log/data-path.md), so images that are
measured, predicted or kept are decoded by the CPU, and so is any file that is no plain JPEG.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitral.data.images.augmentation import Box
from vitral.data.images.decode import read_image
from vitral.data.images.jpeg_header import PlainJpeg
from vitral.data.images.preprocessing import INTERPOLATIONS, Preprocessing, channels_first
from vitral.data.prepared import Images
from vitral.device import seeded

_TRIED = 256  # images of the trial
_TOGETHER = 64  # files decoded at a time: a larger number is no faster, and takes more memory
_RGB = 3  # torchvision's ImageReadMode

Decode = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Decode files, uint8 (bytes,) each, to uint8 (3, H, W) each, on the GPU; RuntimeError for one that it cannot."""


class Encoded(NamedTuple):
    """A batch of files with their crops; images that are no plain JPEGs are cropped already."""

    files: Tensor
    """The bytes of all JPEGs, one after the other."""
    lengths: list[int]
    boxes: list[Box | None]
    """The crop of each image of the batch; None for one that is cropped."""
    names: list[str]
    cropped: Tensor
    """Those, uint8 (n, 3, height, width)."""


class EncodedImages(Images):
    """Images of a split for the GPU: (seed, epoch, index) to a file and its crop, or to pixels."""

    def __getitem__(self, position: tuple[int, int, int]) -> Any:
        seed, epoch, index = position
        data = self.split.raw(index)
        jpeg = PlainJpeg.of(data, self.enough) if isinstance(data, bytes) else None
        if jpeg is None or not jpeg.is_ycbcr or self.augmentation is None:
            return super().__getitem__(position)
        with seeded(seed, epoch, index):
            box = self.augmentation.box(jpeg.height, jpeg.width)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8), box, self.split.names[index]

    def collate(self, items: Sequence[Any]) -> Encoded:
        """Join the items of a batch: few tensors, since each one costs a descriptor between processes."""
        files = [item[0] for item in items if isinstance(item, tuple)]
        boxes = [item[1] if isinstance(item, tuple) else None for item in items]
        names = [item[2] for item in items if isinstance(item, tuple)]
        cropped = [item for item in items if isinstance(item, Tensor)]
        return Encoded(
            torch.cat(files) if files else torch.empty(0, dtype=torch.uint8), [len(file) for file in files], boxes,
            names, torch.stack(cropped) if cropped else torch.empty(0, 3, *self.preprocessing.image_size),
        )  # fmt: skip


class GpuDecoder:
    """Decoder of the batches of `EncodedImages`, on a stream of its own."""

    def __init__(self, device: torch.device, preprocessing: Preprocessing, decode: Decode | None = None):
        """`decode` takes the place of nvJPEG."""
        self.device, self.preprocessing, self._decode = device, preprocessing, decode or self._by_nvjpeg
        on_gpu = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if on_gpu else None
        self._reader: Any = torch.cuda.current_stream(device) if on_gpu else None

    @staticmethod
    def serves(images: Images, device: torch.device) -> bool:
        """True if this device may decode these images: color images that are cropped at random."""
        by_torch = isinstance(INTERPOLATIONS[images.preprocessing.interpolation], str)
        return device.type == "cuda" and images.cropped and images.preprocessing.channels == 3 and by_torch

    def __call__(self, batch: Encoded) -> Tensor:
        """Decode, crop and resize: uint8 (B, 3, height, width), complete on return. `ImageError` for a damaged file."""
        with torch.cuda.stream(self._stream):
            crops, cropped = self._crops(batch), iter(batch.cropped.to(self.device))
            images = torch.stack([next(cropped if box is None else crops) for box in batch.boxes])
        if self._stream:
            self._stream.synchronize()
            images.record_stream(self._reader)  # else the next batch could take its memory while the step reads it
        return images

    def _crops(self, batch: Encoded) -> Iterator[Tensor]:
        files, boxes = batch.files.split(batch.lengths), [box for box in batch.boxes if box is not None]
        for first in range(0, len(files), _TOGETHER):
            part = slice(first, first + _TOGETHER)
            decoded = self._decoded(files[part], batch.names[part])
            for image, (top, left, height, width) in zip(decoded, boxes[part], strict=True):
                crop = image[:, top : top + height, left : left + width]
                yield self.preprocessing.resized(crop, self.preprocessing.image_size)

    def _decoded(self, files: Sequence[Tensor], names: Sequence[str]) -> Sequence[Tensor]:
        try:
            return self._decode(files)
        except RuntimeError:  # of one of them, which the CPU's decoders can read, or name
            read = (read_image(f.numpy().tobytes(), name=n, channels=3) for f, n in zip(files, names, strict=True))
            return [channels_first(pixels).to(self.device) for pixels in read]

    def _by_nvjpeg(self, files: Sequence[Tensor]) -> Sequence[Tensor]:
        found: Sequence[Tensor] = torch.ops.image.decode_jpegs_cuda(list(files), _RGB, self.device)
        return found

    def rate(self, images: EncodedImages) -> float:
        """Images per second, by a trial; 0 if most are not JPEGs. `RuntimeError` if nvJPEG is missing."""
        chosen = np.linspace(0, len(images.split) - 1, min(len(images.split), _TRIED)).astype(int)
        batch = images.collate([images[0, 0, int(index)] for index in chosen])
        if len(batch.lengths) < len(chosen) / 2:
            return 0.0
        self._decode(batch.files.split(batch.lengths)[:1])  # loads the library
        self(batch)
        started = time.perf_counter()
        self(batch)
        return len(chosen) / (time.perf_counter() - started)
