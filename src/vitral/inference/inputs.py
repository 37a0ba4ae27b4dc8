"""Input formats: paths, folders, lists, archives, encoded files, arrays, tensors, and iterables of these.

`expand` turns all of them into a stream of `Item`, one for each image, and decodes nothing. `pixels_of` decodes one.
"""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitral.data.dataset import Split
from vitral.data.files import Files, respelled
from vitral.data.images.decode import MAX_BYTES, read_image
from vitral.data.images.levels import Limits, array_levels
from vitral.data.tables_in_memory import columns_of, why_no_image
from vitral.errors import ImageError, type_of
from vitral.inference.sources import Archive, ListFile, ManyImages, Shards, Source, count, source_at

ImageInput = str | os.PathLike[str] | bytes | bytearray | memoryview | IO[bytes] | Image.Image | np.ndarray | Tensor
"""A path, an encoded file or an open one, a PIL image, pixels (H, W) or (H, W, C), a tensor (C, H, W)."""

Images = ImageInput | Iterable[Any]
"""An `ImageInput`, several in one array (B, H, W, C) or tensor (B, C, H, W), a folder, a list of paths (.txt), an
archive, or an iterable of any of these.
"""

ACCEPTED = (
    "a path, folder, .txt list or archive; bytes or an open file; a PIL image; a numpy array (H, W, C); "
    "a torch tensor (C, H, W) or (B, C, H, W); an iterable of these"
)


@dataclass(frozen=True)
class Item:
    """One image: its name, and its content in any form that `pixels_of` accepts."""

    name: str
    image: Any


@dataclass(frozen=True)
class Member:
    """A file in an archive, read only when it is decoded."""

    files: Files
    path: str


@dataclass(frozen=True)
class Record:
    """An image in shards, read only when it is decoded."""

    split: Split
    index: int


@dataclass(frozen=True)
class Row:
    """An image of a batch of floats, which has one scale."""

    image: np.ndarray | Tensor
    limits: Limits


@dataclass(frozen=True)
class Listed:
    """An image file that a list names in one of its lines."""

    path: str
    where: str
    """`list.txt, line 3`."""


def is_single(images: object) -> bool:
    """True if `images` is one image; False if it stands for any number."""
    if isinstance(images, str | os.PathLike):
        return _source(images) is None
    if isinstance(images, np.ndarray):
        return images.ndim != 4 and images.dtype.kind not in "UO"
    if isinstance(images, Tensor):
        return images.ndim != 4
    return not _is_iterable(images)


def expand(images: object) -> Iterator[Item]:
    """Yield one `Item` for each image, in order. Images without a path are named by their number: `image 0`.

    An object of another type becomes an item, too: `pixels_of` refuses it by its type. Raises `DataError` for a folder
    that is unreadable or has no image, and for a damaged archive or list.
    """
    for number, (name, image) in enumerate(_expand(images)):
        yield Item(name or f"image {number}", image)


def _expand(images: Any) -> Iterator[tuple[str | None, object]]:
    if isinstance(images, Item):
        yield images.name, images.image
    elif isinstance(images, str | os.PathLike):
        if (source := _source(images)) is None:
            yield os.fsdecode(images), images
        else:
            yield from _members(source)
    elif isinstance(images, np.ndarray | Tensor):
        if is_single(images):
            yield None, images
        elif isinstance(images, np.ndarray) and images.ndim != 4:  # of paths
            yield from _expand(images.ravel().tolist())
        else:
            yield from ((None, image) for image in _rows(images))
    elif hasattr(images, "read"):
        yield _read(images)
    elif hasattr(images, "as_py"):  # a value of pyarrow
        yield from _expand(images.as_py())
    elif _is_iterable(images):
        for one in images:
            yield from _expand(one)
    else:
        yield None, images


def _rows(batch: np.ndarray | Tensor) -> Iterator[Any]:
    """Yield the images of one array."""
    floats = batch.dtype.kind == "f" if isinstance(batch, np.ndarray) else batch.is_floating_point()
    try:
        limits = Limits.of(_values(batch)) if floats else None
    except (RuntimeError, TypeError, ValueError):  # each image has the reason
        limits = None
    yield from batch if limits is None else (Row(image, limits) for image in batch)


def _is_iterable(images: object) -> bool:
    """True for an iterable of images; False for one image and for a table, which would yield names of columns."""
    single = (bytes, bytearray, memoryview, Image.Image, np.ndarray, Tensor, Item)
    if not isinstance(images, Iterable) or isinstance(images, single) or hasattr(images, "read"):
        return False
    return columns_of(images) is None


def _source(path: str | os.PathLike[str]) -> ManyImages | None:
    """Return the source at a path of many images; None for the path of one image."""
    text: str | bytes = os.fspath(path)
    if not isinstance(text, str):
        return None
    try:
        return source_at(text)
    except ValueError:  # a null byte, which opening the file reports
        return None


def _members(source: ManyImages) -> Iterator[tuple[str, object]]:
    source.check()
    if isinstance(source, Shards):
        yield from ((split.names[number], Record(split, number)) for split, number in source)
    elif isinstance(source, Archive):
        yield from ((source.name(path), Member(source.files, path)) for path in source)
    elif isinstance(source, ListFile):
        yield from ((path, Listed(path, f"{source.where}, line {line}")) for line, path in source)
    else:
        yield from ((path, path) for path in source)


class Items:
    """The images of `vitral.inference.sources.find`, without the first `skip`; of the rest, with `turn` = (number,
    count, size), batches of `size` images: the `number`-th of each `count`.
    """

    def __init__(self, sources: Sequence[Source], skip: int = 0, turn: tuple[int, int, int] = (0, 1, 1)):
        self.sources, self.skip, self.turn = sources, skip, turn

    def __len__(self) -> int:
        number, turns, size = self.turn
        rounds, rest = divmod(count(self.sources) - self.skip, turns * size)
        return rounds * size + min(max(rest - number * size, 0), size)

    def __iter__(self) -> Iterator[Item]:
        number, turns, size = self.turn
        rest = itertools.islice(self._all(), self.skip, None)
        return rest if turns == 1 else (item for i, item in enumerate(rest) if i // size % turns == number)

    def _all(self) -> Iterator[Item]:
        for source in self.sources:
            if isinstance(source, str):
                yield Item(source, source)
            else:
                yield from (Item(name, image) for name, image in _members(source))


def _read(file: Any) -> tuple[str | None, Any]:
    """Return the name and the rest of an open file. It is read now: the next image may come from the same file."""
    name = getattr(file, "name", None)
    try:
        data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        data = ImageError("", f"cannot be read: {getattr(error, 'strerror', None) or error}")
    if isinstance(data, str):
        data = ImageError("", "the file is open as text", hint="open(path, 'rb')")
    return name if isinstance(name, str) else None, data


def pixels_of(image: Any, *, name: str = "image", channels: int, levels: tuple[int, int] | None = None) -> np.ndarray:
    """Decode one image as `read_image` does: uint8 (H, W, C), upright. Raises `ImageError` with `name` if it is
    unreadable or no image.
    """
    if isinstance(image, ImageError):
        raise ImageError(name, image.why or "", hint=image.hint)
    limits: Limits | None = None
    if isinstance(image, Row):
        image, limits = image.image, image.limits
    if isinstance(image, Tensor):
        image = _of_tensor(image, name)
    if isinstance(image, np.ndarray):
        levels = _levels_of(image, limits, name, levels)
    elif isinstance(image, Record):
        image = image.split.raw(image.index)
    elif isinstance(image, Member):
        try:
            image = image.files.read(image.path, MAX_BYTES)
        except (OSError, ValueError) as error:
            raise ImageError(name, getattr(error, "strerror", None) or str(error)) from error
    elif isinstance(image, Listed):
        path = image.path if os.path.lexists(image.path) else respelled(image.path)
        if path is None:  # another kind of text is no list
            why, hint = f"{image.path}: no such file", "a .txt is a list of one path per line"
            raise ImageError(name, why, where=image.where, hint=hint)
        image = path
    elif isinstance(image, io.IOBase) or hasattr(image, "read"):
        return pixels_of(_read(image)[1], name=name, channels=channels, levels=levels)
    elif not isinstance(image, str | os.PathLike | bytes | bytearray | memoryview | Image.Image):
        columns = columns_of(image)
        why, hint = (f"{type_of(image)} is no image", ACCEPTED) if columns is None else why_no_image(image, columns)
        raise ImageError(name, why, hint=hint)
    return read_image(image, name=name, channels=channels, levels=levels)


def _levels_of(
    image: np.ndarray, limits: Limits | None, name: str, levels: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Levels of an array, by default by its own limits; `ImageError` for floats whose scale is not sure."""
    if image.dtype.kind != "f" or not image.size:
        return levels
    try:
        return array_levels(limits or Limits.of([image]), levels)
    except ValueError as error:
        raise ImageError(name, str(error)) from error


def _shape_hint(shape: tuple[int, ...]) -> str:
    """Return the change that makes images of a tensor of another shape."""
    if len(shape) == 2:
        return "tensor[None], with its one channel"
    if len(shape) > 3:
        return "tensor.flatten(0, -4), outside a list: several images are (B, C, H, W)"
    return "permute(2, 0, 1)" if len(shape) == 3 and 1 <= shape[2] <= 4 else "a numpy array may be (H, W) or (H, W, C)"


def _of_tensor(image: Tensor, name: str) -> np.ndarray:
    """Convert a tensor (C, H, W) to an array (H, W, C), of the same values."""
    shape = tuple(image.shape)
    if image.ndim != 3 or not 1 <= shape[0] <= 4 or not image.numel():
        raise ImageError(name, f"a tensor {shape} is not (C, H, W) with C from 1 to 4", hint=_shape_hint(shape))
    try:
        return np.moveaxis(_values(image), 0, 2)
    except (RuntimeError, TypeError) as error:
        hint = "uint8, or floats from 0 to 1"
        raise ImageError(name, f"a tensor of {image.dtype} and {image.layout}", hint=hint) from error


def _values(images: np.ndarray | Tensor) -> np.ndarray:
    """The values of an array or a tensor on any device. RuntimeError or TypeError for a tensor that numpy lacks."""
    if isinstance(images, np.ndarray):
        return images
    images = images.detach().cpu()
    return (images.float() if images.dtype == torch.bfloat16 else images).numpy()
