"""Read archives of NumPy arrays (`.npz`), the authors' JAX weights. Stored arrays are mapped, pickles refused."""

from __future__ import annotations

import io
import math
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from vitral.errors import WeightsError
from vitral.filesystem import mapped_array
from vitral.weights.notes import Caution
from vitral.weights.read.safetensors_mmap import MOST_TENSORS, printable
from vitral.weights.read.zip_entries import ZipEntry, check_sums, list_entries

LONGEST_HEADER = 10_000
_STEP = 2**24
# Also errors of Python's parser on endless headers, and of zipfile on unknown compression methods.
_FAULTS = (
    ValueError,
    TypeError,
    OverflowError,
    EOFError,
    OSError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_npz(path: Path) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Read tensors by name (slashes stay) in the file's order, and notes on omitted arrays.

    Stored entries are views of one private mapping of the file: changing a tensor does not change the file. They may
    begin at any byte, because zip aligns nothing. Deflated entries are unpacked after their size is checked. Two-byte
    `void` elements are JAX's bfloat16. Raises `WeightsError` for objects (pickles), structures, headers that contradict
    the size of their entry, and bytes that contradict its checksum.
    """
    found = list_entries(path)
    if len(found) > MOST_TENSORS:
        raise WeightsError("too many arrays", where=path, why=f"{len(found):,}; at most {MOST_TENSORS:,} are read")
    if not found:
        raise WeightsError("no arrays in this archive", where=path)
    check_sums(path, found)
    whole = mapped_array(path, "c")
    tensors: dict[str, Tensor] = {}
    notes = []
    with zipfile.ZipFile(path) as archive:
        for entry in found:
            name = entry.name.removesuffix(".npy")
            if not name.isprintable():
                why = f"an array's name holds a control character: '{printable(name)}'"
                raise WeightsError("damaged or hostile archive", where=path, why=why)
            if name == entry.name:
                raise WeightsError(
                    "not an archive of arrays", where=path, why=f"'{printable(name)}' is not a .npy file"
                )
            try:
                array = _unpacked(archive, entry) if entry.compressed else _mapped(whole, entry)
                tensor = _tensor(array)
            except _FAULTS as error:
                why, where = printable(str(error) or type(error).__name__), f"{path}: {printable(entry.name)}"
                raise WeightsError("damaged or hostile array", where=where, why=why) from error
            if tensor is None:
                notes.append(Caution(f"left out '{name}': torch has no dtype {array.dtype}"))
            else:
                tensors[name] = tensor
    return tensors, tuple(notes)


def _header(file: IO[bytes], size: int) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """Read shape, Fortran order, dtype and length of a `.npy` header, checked against the size of the entry."""
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"format version {version}, known: 1.0 and 2.0")
    shape, fortran, dtype = _HEADERS[version](file, max_header_size=LONGEST_HEADER)
    if dtype.hasobject:
        raise ValueError("holds Python objects: a pickle, which can run code")
    if dtype.names is not None or dtype.subdtype is not None:
        raise ValueError(f"elements are structures ({dtype})")
    if any(extent < 0 for extent in shape):
        raise ValueError(f"shape {shape}")
    length = file.tell()
    needed = length + math.prod(shape) * dtype.itemsize
    if needed != size:
        raise ValueError(f"the header states {shape} × {dtype}, {needed:,} bytes; the archive holds {size:,}")
    return shape, fortran, dtype, length


def _mapped(whole: np.ndarray, entry: ZipEntry) -> np.ndarray:
    """View the array of a stored entry in the mapped file."""
    start = whole[entry.offset : entry.offset + min(entry.size, LONGEST_HEADER + 64)]
    shape, fortran, dtype, length = _header(io.BytesIO(start.tobytes()), entry.size)
    if math.prod(shape) == 0:
        return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, whole, entry.offset + length, order="F" if fortran else "C")


def _unpacked(archive: zipfile.ZipFile, entry: ZipEntry) -> np.ndarray:
    """Unpack the array of a deflated entry; memory is allocated once header and archive agree on the size."""
    with archive.open(entry.name) as file:
        shape, fortran, dtype, length = _header(file, entry.size)
        flat = np.empty(entry.size - length, np.uint8)
        at = 0
        while at < len(flat):
            piece = file.read(min(_STEP, len(flat) - at))
            if not piece:
                raise ValueError(f"ends after {length + at:,} of {entry.size:,} bytes")
            flat[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
        if file.read(1):  # also makes zipfile compare the checksum
            raise ValueError(f"continues after {entry.size:,} bytes")
    return flat.view(dtype).reshape(shape, order="F" if fortran else "C")


def _tensor(array: np.ndarray) -> Tensor | None:
    """Convert an array to a tensor, copied only to swap its byte order; None for text, dates and the like."""
    dtype = array.dtype
    if dtype.kind == "V":
        if dtype.itemsize != 2:
            raise ValueError(f"elements of {dtype.itemsize} bytes without a type; 2 would be bfloat16")
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if dtype.kind not in "biufc":
        return None
    if not dtype.isnative:
        array = array.astype(dtype.newbyteorder("="))
    try:
        return torch.from_numpy(array)
    except TypeError:  # long double and the like
        return None
