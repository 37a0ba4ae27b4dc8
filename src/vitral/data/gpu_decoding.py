"""JPEGs that a GPU decodes, for training with random crops: nvJPEG, by torchvision's operator.

Worker processes read the files and draw the crops; a thread decodes, crops and resizes the next batch while the step
computes. nvJPEG repeats colors where the CPU's decoders interpolate them (docs/log/data-path.md), so images that are
measured, predicted or kept are decoded by the CPU, and so is any file that is no plain JPEG.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitral.data.images.augmentation import Box
from vitral.data.images.decode import read_image
from vitral.data.images.jpeg_header import PlainJpeg
from vitral.data.images.preprocessing import Preprocessing, channels_first
from vitral.data.prepared import Images
from vitral.device import seeded

_TRIED = 256  # images of the trial
_TOGETHER = 128  # files decoded at a time: more are hardly faster, and take more memory
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

    def collate(self, items: Sequence[object]) -> Encoded:
        """Join the items of a batch: few tensors, since each one costs a descriptor between processes."""
        files = [item[0] for item in items if isinstance(item, tuple)]
        boxes = [item[1] if isinstance(item, tuple) else None for item in items]
        names = [item[2] for item in items if isinstance(item, tuple)]
        cropped = [item for item in items if isinstance(item, Tensor)]
        none = torch.empty(0, 3, *self.preprocessing.image_size, dtype=torch.uint8)
        return Encoded(
            torch.cat(files) if files else none.flatten(),
            [len(file) for file in files],
            boxes,
            names,
            torch.stack(cropped) if cropped else none,
        )


class GpuDecoder:
    """Decoder of the batches of `EncodedImages`, on a stream of its own."""

    def __init__(self, device: torch.device, preprocessing: Preprocessing, decode: Decode | None = None):
        """`decode` takes the place of nvJPEG."""
        self.device, self.preprocessing, self._decode = device, preprocessing, decode or self._by_nvjpeg
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._reader = torch.cuda.current_stream(device) if on_gpu else None

    @staticmethod
    def serves(images: Images, device: torch.device) -> bool:
        """True if this device may decode these images: color images that are cropped at random."""
        used = images.preprocessing
        smooth = used.interpolation == "bilinear" and used.antialias
        return device.type == "cuda" and images.cropped and used.channels == 3 and smooth

    def __call__(self, batch: Encoded) -> Tensor:
        """Decode, crop and resize: uint8 (B, 3, height, width), complete on return. `ImageError` for a damaged file."""
        files, boxes = batch.files.split(batch.lengths), [box for box in batch.boxes if box is not None]
        with torch.cuda.stream(self._stream):
            parts = [batch.cropped.to(self.device)]
            for first in range(0, len(files), _TOGETHER):
                part = slice(first, first + _TOGETHER)
                decoded = self._decoded(files[part], batch.names[part])
                parts.append(resized_crops(decoded, boxes[part], self.preprocessing.image_size))
            order = np.argsort(np.argsort([box is not None for box in batch.boxes], kind="stable"))
            images = torch.cat(parts)[torch.from_numpy(order).to(self.device)]
        if self._stream and self._reader:
            self._stream.synchronize()
            images.record_stream(self._reader)  # else the next batch could take its memory while the step reads it
        return images

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


def resized_crops(images: Sequence[Tensor], boxes: Sequence[Box], size: tuple[int, int]) -> Tensor:
    """Crop uint8 images (3, H, W) of any sizes and resize them to uint8 (B, 3, height, width), all at once.

    Antialiased bilinear interpolation as that of `Preprocessing.resized`, by a matrix for each side: an image at a time
    takes ten times as long on a GPU, most of it in Python. Levels differ by one at most.
    """
    device = images[0].device
    tall, wide = (max(box[side] for box in boxes) for side in (2, 3))
    crops = torch.zeros(len(images), 3, tall, wide, dtype=torch.uint8, device=device)
    for crop, image, (top, left, height, width) in zip(crops, images, boxes, strict=True):
        crop[:, :height, :width] = image[:, top : top + height, left : left + width]
    sides = torch.tensor(boxes).to(device, non_blocking=True)
    precision = torch.float32 if device.type == "cpu" else torch.float16
    rows, columns = (_weights(sides[:, 2 + k], size[k], (tall, wide)[k]).to(precision)[:, None] for k in (0, 1))
    return (rows @ crops.to(precision) @ columns.mT).round_().clamp_(0, 255).to(torch.uint8)


def _weights(lengths: Tensor, size: int, most: int) -> Tensor:
    """Weights (B, size, most) of the pixels of sides of these lengths, at most `most`, in `size` pixels."""
    lengths = lengths[:, None, None].float()
    pixel, center = (torch.arange(n, device=lengths.device) + 0.5 for n in (most, size))
    distance = (pixel - center[:, None] * lengths / size).abs()
    weights = (1 - distance / (lengths / size).clamp(min=1)).clamp(min=0) * (pixel < lengths)
    return weights / weights.sum(-1, keepdim=True)
