"""Near-duplicates: the same image resized, compressed again, mirrored or cropped by up to a tenth of its sides.

    thumbnail(pixels) -> (1026,) uint8                what is kept of an image
    near_pairs(thumbnails) -> list[Pair]              the pairs, by three filters, each finer than the one before

The perceptual hash of an image is its thumbnail's lowest DCT coefficients without the mean, weighted by frequency and
scaled to unit length; the similarity of two images is the product of their hashes. (The well-known pHash keeps the
signs of such coefficients.) A mirror changes the sign of the coefficients of odd horizontal frequency only, so
|even| + |odd| parts of the product compare an image with another one and with its mirror image at once. A crop is found
by comparing crops of one image with the whole of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
from PIL import Image

SIDE = 32
"""Height and width of a thumbnail."""
LEAST_SIDE = 32
"""Median side in pixels below which a set has too little detail: half of MNIST's digits would resemble another."""
MOST = 300_000
"""Images up to which pairs are searched: the time grows with the square, and this many take some ten minutes."""

_FLAT = 3.0  # standard deviation of gray below which an image has nothing to compare
_PARTNERS = 20  # most similar images of each image that the last filter compares
_BLOCK = 1024  # images of a block of the first filter: its products stay in a CPU's cache
_CHROMA = 12.0  # largest difference of the mean colors (Cb, Cr) of near-duplicates


class _Filter(NamedTuple):
    """A hash, the crops of an image to compare, and the least similarity to pass."""

    size: int
    """Lowest frequencies of each axis."""
    power: float
    """Exponent of the frequency in a coefficient's weight."""
    least: float
    crops: Sequence[tuple[float, float, float]]
    """(share of the side, vertical and horizontal place from 0 to 1)."""


_WHOLE = (1.0, 0.5, 0.5)
_QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)
_FIRST = _Filter(6, 0.5, 0.66, [(0.9, 0.5, 0.5)])
_SECOND = _Filter(8, 1.0, 0.90, [_WHOLE, (0.95, 0.5, 0.5), *product((0.9,), (0.2, 0.8), (0.2, 0.8))])
_LAST = _Filter(
    12,
    0.5,
    0.92,
    [_WHOLE, *product((0.95,), (0.0, 0.5, 1.0), (0.0, 0.5, 1.0)), *product((0.9,), _QUARTERS, _QUARTERS)],
)
"""Measured by `python -m benchmarks duplicates`: each filter loses about one planted crop of a hundred."""


class Pair(NamedTuple):
    """Two near-duplicates, by number."""

    first: int
    second: int
    similarity: float
    mirrored: bool


class _Hashes(NamedTuple):
    """Hashes of n images: parts of even and of odd horizontal frequency, (n, K) each."""

    even: np.ndarray
    odd: np.ndarray


def thumbnail(pixels: np.ndarray) -> np.ndarray:
    """Reduce uint8 pixels (H, W, C) to (1026,) uint8: gray, stretched to 32 × 32, and the mean of Cb and of Cr."""
    height, width, channels = pixels.shape
    image = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
    small = min(height, width) < 2 * SIDE
    image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR if small else Image.Resampling.BOX)
    if channels == 1:
        return np.append(np.asarray(image).reshape(-1), np.array([128, 128], np.uint8))
    ycbcr = np.asarray(image.convert("YCbCr"))
    return np.append(ycbcr[:, :, 0].reshape(-1), ycbcr[:, :, 1:].mean((0, 1)).round().astype(np.uint8))


def near_pairs(thumbnails: np.ndarray, progress: Callable[[int, int], object] | None = None) -> list[Pair]:
    """Find the pairs of near-duplicates among thumbnails (n, 1026), the most similar first.

    Of an image with more than 20 near-duplicates only the most similar ones are listed. `progress` is called with
    (images compared, images in total). The time grows with n².
    """
    gray = np.ascontiguousarray(thumbnails[:, : SIDE * SIDE]).reshape(-1, SIDE, SIDE)
    chroma = thumbnails[:, SIDE * SIDE :].astype(np.int16)
    best: dict[tuple[int, int], Pair] = {}
    for first, second in _candidates(gray, progress):
        alike = np.abs(chroma[first] - chroma[second]).max(1, initial=0) <= _CHROMA
        first, second = first[alike], second[alike]
        similarity, mirrored = _finest(gray, first, second)
        for one, other, value, flipped in zip(first, second, similarity, mirrored, strict=True):
            place = (min(int(one), int(other)), max(int(one), int(other)))
            if value >= _LAST.least and (place not in best or best[place].similarity < value):
                best[place] = Pair(*place, float(value), bool(flipped))
    return sorted(best.values(), key=lambda pair: (-pair.similarity, pair.first, pair.second))


def unsearchable(count: int, side: int) -> str:
    """Reason that near-duplicates are not searched among `count` images of this median side; "" if there is none."""
    if side < LEAST_SIDE:
        return f"not searched: images below {LEAST_SIDE} pixels have too little detail"
    return f"not searched: {count:,} images are more than {MOST:,}" if count > MOST else ""


def _candidates(
    gray: np.ndarray, progress: Callable[[int, int], object] | None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield numbers of images (first, second) that pass two filters: a crop of the first is like the second."""
    count = len(gray)
    whole, crops = _hashes(gray, _FIRST, _WHOLE), _hashes(gray, _FIRST, _FIRST.crops[0])
    finer = [_hashes(gray, _SECOND, crop) for crop in _SECOND.crops]
    for start in range(0, count, _BLOCK):
        tiles = [_alike(crops, start, whole, column) for column in range(0, count, _BLOCK)]
        first, second = (np.concatenate(numbers) for numbers in zip(*tiles, strict=True))
        yield _second_filter(finer, first, second)
        if progress:
            progress(min(start + _BLOCK, count), count)


def _alike(crops: _Hashes, row: int, whole: _Hashes, column: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of images (first, second) in one block of all pairs that pass the first filter."""
    rows, columns = slice(row, row + _BLOCK), slice(column, column + _BLOCK)
    products = crops.odd[rows] @ whole.odd[columns].T
    np.abs(products, out=products)
    products += crops.even[rows] @ whole.even[columns].T
    first, second = np.divmod(np.flatnonzero(products > _FIRST.least), products.shape[1])
    first, second = first + row, second + column
    different = first != second
    return first[different], second[different]


def _second_filter(finer: Sequence[_Hashes], first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    kept_first, kept_second, values = [first[:0]], [second[:0]], [np.zeros(0, np.float32)]
    for start in range(0, len(first), 1 << 16):
        one, other = first[start : start + (1 << 16)], second[start : start + (1 << 16)]
        value = np.max([_similarity(crop, one, finer[0], other)[0] for crop in finer], 0)
        passed = value >= _SECOND.least
        kept_first.append(one[passed])
        kept_second.append(other[passed])
        values.append(value[passed])
    first, second = np.concatenate(kept_first), np.concatenate(kept_second)
    order = np.lexsort((-np.concatenate(values), first))  # of each image, the most similar ones
    first, second = first[order], second[order]
    rank = np.arange(len(first)) - np.searchsorted(first, first)
    return first[rank < _PARTNERS], second[rank < _PARTNERS]


def _finest(gray: np.ndarray, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Similarity of pairs by the last filter, and True for mirrored ones."""
    similarity, mirrored = np.zeros(len(first), np.float32), np.zeros(len(first), bool)
    for start in range(0, len(first), 1024):
        part = slice(start, start + 1024)
        one, every = gray[first[part]], np.arange(len(first[part]))
        whole = _hashes(gray[second[part]], _LAST, _WHOLE)
        for crop in _LAST.crops:
            value, flipped = _similarity(_hashes(one, _LAST, crop), every, whole, every)
            better = value > similarity[part]
            similarity[part] = np.where(better, value, similarity[part])
            mirrored[part] = np.where(better, flipped, mirrored[part])
    return similarity, mirrored


def _similarity(one: _Hashes, first: np.ndarray, other: _Hashes, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    even = np.einsum("nk,nk->n", one.even[first], other.even[second])
    odd = np.einsum("nk,nk->n", one.odd[first], other.odd[second])
    return even + np.abs(odd), odd < 0


def _hashes(gray: np.ndarray, how: _Filter, crop: tuple[float, float, float]) -> _Hashes:
    """Hashes of a crop of gray thumbnails (n, 32, 32); zeros for a flat image."""
    share, top, left = crop
    basis = _basis(how.size)
    vertical, horizontal = (basis @ _window(share, place) for place in (top, left))
    number = np.arange(how.size)
    frequency = np.hypot(number.reshape(-1, 1), number)
    weight = np.where(frequency > 0, np.maximum(frequency, 1) ** how.power, 0).astype(np.float32)
    parts = [np.zeros((0, how.size, how.size), np.float32)]
    for start in range(0, len(gray), 4096):
        part = gray[start : start + 4096].astype(np.float32)
        coefficients = vertical @ part @ horizontal.T * weight
        length = np.sqrt(np.square(coefficients).sum((1, 2), keepdims=True))
        flat = part.std((1, 2), keepdims=True) < _FLAT
        parts.append(np.where(flat, 0, coefficients / np.maximum(length, 1e-6)))
    both = np.concatenate(parts)
    return _Hashes(*(np.ascontiguousarray(both[:, :, odd::2]).reshape(len(gray), -1) for odd in (0, 1)))


@cache
def _basis(size: int) -> np.ndarray:
    """The lowest vectors of the DCT of 32 values, (size, 32)."""
    frequency = np.arange(size).reshape(-1, 1)
    vectors: np.ndarray = np.sqrt(2 / SIDE) * np.cos(np.pi * frequency * (np.arange(SIDE) + 0.5) / SIDE)
    vectors[0] = np.sqrt(1 / SIDE)
    return vectors.astype(np.float32)


@cache
def _window(share: float, place: float) -> np.ndarray:
    """The matrix (32, 32) that stretches a window of a row, by areas, to the whole row."""
    edges = SIDE * (place * (1 - share) + share * np.arange(SIDE + 1) / SIDE)
    pixel = np.arange(SIDE)
    covered = np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel)
    matrix = np.maximum(covered, 0)
    return (matrix / matrix.sum(1, keepdims=True)).astype(np.float32)
