"""Archives of NumPy arrays (`.npz`): the authors' JAX weights. Stored arrays are memory-mapped, pickles are refused."""

from __future__ import annotations

import io
import math
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from vitral.errors import WeightsError
from vitral.weights.mapped import printable
from vitral.weights.members import Member, members

LONGEST_HEADER = 10_000
_STEP = 2**24
# Beside the plain ones, what Python's parser makes of headers without end, and zipfile of kinds that it does not know.
_FAULTS = (
    ValueError, TypeError, OverflowError, EOFError, OSError, MemoryError, RuntimeError, SyntaxError,
    tokenize.TokenError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_npz(path: Path) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Tensors by name (slashes stay) in the file's order, and notes on what was left out.

    Stored members are views of one private mapping of the file (changing a tensor does not change the file); they may
    begin at any byte, as zip aligns nothing. Deflated members are unpacked after their size was checked. Two-byte
    `void` elements are JAX's bfloat16. The checksums of stored members are not computed: that would read the file.
    Raises `WeightsError` for objects (pickles), structures, and headers that contradict the size of their member.
    """
    found = members(path)
    if not found:
        raise WeightsError("no arrays in this archive", where=path)
    whole = np.memmap(path, dtype=np.uint8, mode="c")
    tensors: dict[str, Tensor] = {}
    notes = []
    with zipfile.ZipFile(path) as archive:
        for member in found:
            name = member.name.removesuffix(".npy")
            if name == member.name:
                raise WeightsError("not an archive of arrays", where=path, why=f"'{printable(name)}' is no .npy file")
            try:
                array = _unpacked(archive, member) if member.compressed else _mapped(whole, member)
                tensor = _tensor(array)
            except _FAULTS as error:
                why, where = printable(str(error) or type(error).__name__), f"{path}: {printable(member.name)}"
                raise WeightsError("damaged or hostile array", where=where, why=why) from error
            if tensor is None:
                notes.append(f"left out '{name}': {array.dtype} is not a number that torch has")
            else:
                tensors[name] = tensor
    return tensors, tuple(notes)


def _header(file: IO[bytes], size: int) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Shape, Fortran order, element type and length of a `.npy` header, all held against the size of the member."""
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"format version {version}, known: 1.0 and 2.0")
    shape, fortran, dtype = _HEADERS[version](file, max_header_size=LONGEST_HEADER)
    if dtype.hasobject:
        raise ValueError("holds Python objects, which are a pickle, which can run code")
    if dtype.names is not None or dtype.subdtype is not None:
        raise ValueError(f"elements are structures ({dtype})")
    if any(extent < 0 for extent in shape):
        raise ValueError(f"shape {shape}")
    length = file.tell()
    needed = length + math.prod(shape) * dtype.itemsize
    if needed != size:
        raise ValueError(f"the header tells of {shape} × {dtype}, {needed:,} bytes; the archive holds {size:,}")
    return shape, fortran, dtype, length


def _mapped(whole: np.ndarray[Any, Any], member: Member) -> np.ndarray[Any, Any]:
    """The array of a stored member as a view of the mapped file."""
    start = whole[member.offset : member.offset + min(member.size, LONGEST_HEADER + 64)]
    shape, fortran, dtype, length = _header(io.BytesIO(start.tobytes()), member.size)
    if math.prod(shape) == 0:
        return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, whole, member.offset + length, order="F" if fortran else "C")


def _unpacked(archive: zipfile.ZipFile, member: Member) -> np.ndarray[Any, Any]:
    """The array of a deflated member; its memory is taken once the header and the archive agree on the size."""
    with archive.open(member.name) as file:
        shape, fortran, dtype, length = _header(file, member.size)
        flat = np.empty(member.size - length, np.uint8)
        at = 0
        while at < len(flat):
            piece = file.read(min(_STEP, len(flat) - at))
            if not piece:
                raise ValueError(f"ends after {length + at:,} of {member.size:,} bytes")
            flat[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
        if file.read(1):  # also makes zipfile compare the checksum
            raise ValueError(f"goes on after {member.size:,} bytes")
    return flat.view(dtype).reshape(shape, order="F" if fortran else "C")


def _tensor(array: np.ndarray[Any, Any]) -> Tensor | None:
    """The array as a tensor, without a copy unless its bytes are in the other order; None for text, dates and such."""
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
    except TypeError:  # long double and its like
        return None
