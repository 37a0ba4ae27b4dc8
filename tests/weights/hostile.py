"""Files of weights that are damaged, inconsistent or run code; the code would create the file named by `PROOF`."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch


def safetensors(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A file with any header, honest or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(first: int, last: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


def damaged_safetensors(folder: Path) -> dict[str, Path]:
    """Map expected error text → file."""
    a, data = entry(0, 8, [2]), bytes(8)
    files = {
        "the header claims 1,099,511,627,776 bytes; at most": ({"a": a}, data, 2**40),
        "the header claims 60,000 bytes; the file has": ({"a": a}, data, 60_000),
        "the header is not JSON": (b'{"a": {"dtype": "F32", ', data, None),
        "the header is not a JSON object": (b"[1, 2]   ", data, None),
        "the header has 'a' twice": (b'{"a": %b, "a": %b}' % ((json.dumps(a).encode(),) * 2), data, None),
        "'b' overlaps 'a'": ({"a": a, "b": entry(4, 12, [2])}, bytes(12), None),
        "'a' leaves a gap after 'the header'": ({"a": entry(4, 12, [2])}, bytes(12), None),
        "'a' ends at byte": ({"a": entry(0, 16, [4])}, data, None),
        "the tensors end at byte": ({"a": a}, bytes(9), None),
        "'a' of shape [1099511627776, 1099511627776]": ({"a": entry(0, 8, [2**40, 2**40])}, data, None),
        "'a' has shape [-2]": ({"a": entry(0, 8, [-2])}, data, None),
        "'a' has shape [2.0]": ({"a": entry(0, 8, [2.0])}, data, None),
        "'a' has elements of type F31": ({"a": entry(0, 8, [2], "F31")}, data, None),
        "'a' has no shape, dtype and data_offsets": ({"a": {"shape": [2]}}, data, None),
        "expected a string": ({"__metadata__": {"x": 1}, "a": a}, data, None),
        "JSON nested more than 64 deep": (b"[" * 100_000, data, None),
        "the header is not JSON: 'utf-8' codec": (b'{"\xff": 1}', data, None),
        "values in JSON; at most 500,000": (b"[" + b"[]," * 500_000 + b"1]", data, None),
        "5,001 tensors; at most 5,000": ({f"t{i}": entry(0, 0, [0]) for i in range(5_001)}, b"", None),
        "a tensor's name holds a control character: 'a  [31m'": ({"a\0\x1b[31m": a}, data, None),
    }
    return {
        said: safetensors(folder / f"{number}.safetensors", *content)
        for number, (said, content) in enumerate(files.items())
    }


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array)
    return file.getvalue()


def npy_header(text: str, data: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H", len(text)) + text.encode() + data


def zipped(path: Path, files: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def patched(path: Path, old: bytes, new: bytes, which: int = -1) -> Path:
    """The file with the last (or the `which`th) place of `old` replaced."""
    content = path.read_bytes()
    at = [i for i in range(len(content)) if content.startswith(old, i)][which]
    path.write_bytes(content[:at] + new + content[at + len(old) :])
    return path


def hostile_npz(folder: Path) -> dict[str, Path]:
    """Map expected error text → file."""
    good = npy(np.arange(6, dtype=np.float32))
    objects = io.BytesIO()
    np.lib.format.write_array(objects, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    lie = "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 1000), }"
    deep = "(" * 4000 + ")" * 4000
    files = {
        "a pickle, which can run code": {"a.npy": objects.getvalue()},
        "the header states (1000000000000, 1000)": {"a.npy": npy_header(lie, bytes(24))},
        "shape (-6,)": {"a.npy": good.replace(b"(6,)", b"(-6,)").replace(b" \n", b"\n", 1)},
        "elements are structures": {"a.npy": npy(np.zeros(2, dtype=[("x", "<f4"), ("y", "<i4")]))},
        "format version": {"a.npy": npy_header("{}", version=(3, 0))},
        "'../a.npy' would lie outside": {"../a.npy": good},
        "'/etc/a.npy' would lie outside": {"/etc/a.npy": good},
        "'C:/a.npy' would lie outside": {"C:/a.npy": good},
        "elements of 4 bytes without a type": {"a.npy": npy(np.zeros(2, dtype="V4"))},
        "magic string": {"a.npy": b"not an array at all"},
        "damaged or hostile array": {"a.npy": npy_header(deep)},
        "multi-line statement": {"a.npy": npy_header("{'descr': '<f4', (")},
        "no arrays": {"folder/": b""},
    }
    made = {said: zipped(folder / f"{number}.npz", content) for number, (said, content) in enumerate(files.items())}
    bomb = folder / "bomb.npz"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("a.npy", "w") as file:
        file.write(npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (8388608,), }"))
        for _ in range(32):
            file.write(bytes(2**20))
    made["a zip bomb"] = bomb
    size = struct.pack("<I", len(good))
    declared = zipped(folder / "declared.npz", {"a.npy": good}, zipfile.ZIP_DEFLATED)
    made["a zip bomb: "] = patched(declared, size, struct.pack("<I", 2**31))
    short = zipped(folder / "short.npz", {"a.npy": npy(np.arange(1000.0))}, zipfile.ZIP_DEFLATED)
    made["ends after|Error|invalid|bytes"] = patched(
        short, b"\x93NUMPY"[:0] + struct.pack("<I", 8128), struct.pack("<I", 8136)
    )
    twins = zipped(folder / "twins.npz", {"a.npy": good, "b.npy": good})
    made["'a.npy' occurs twice"] = patched(twins, b"b.npy", b"a.npy")
    encrypted = zipped(folder / "encrypted.npz", {"a.npy": good})
    content = bytearray(encrypted.read_bytes())
    content[content.index(b"PK\1\2") + 8] |= 1
    encrypted.write_bytes(content)
    made["'a.npy' is encrypted"] = encrypted
    strange = zipped(folder / "strange.npz", {"a.npy": good}, zipfile.ZIP_DEFLATED)
    made["compressed patched data"] = patched(strange, b"PK\1\2\x14\3\x14\0\0", b"PK\1\2\x14\3\x14\0\x20")
    renamed = zipped(folder / "renamed.npz", {"a.npy": good})
    made["another name in its local header"] = patched(renamed, b"a.npy", b"x.npy", 0)
    made["compressed by method 12"] = zipped(folder / "bzip2.npz", {"a.npy": good}, zipfile.ZIP_BZIP2)
    cut = zipped(folder / "cut.npz", {"a.npy": good})
    cut.write_bytes(cut.read_bytes()[:-30])
    made["cut short or not a zip archive"] = cut
    overlapping = zipped(folder / "overlapping.npz", {"a.npy": good, "a.npy ": good})
    made["overlap|contradicts|another name"] = _overlapped(overlapping)
    return made


def _overlapped(path: Path) -> Path:
    """Both entries of the directory lead to the first member."""
    content = bytearray(path.read_bytes())
    second = content.index(b"PK\1\2", content.index(b"PK\1\2") + 4)
    content[second + 42 : second + 46] = bytes(4)
    path.write_bytes(content)
    return path


class Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function: Any, *arguments: object):
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[object, ...]]:
        return self.function, self.arguments


def hostile_pickles(folder: Path, proof: Path) -> dict[str, Path]:
    """Map expected error text → a file that creates the file `proof` if its code runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to give quantized tensors up
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    files: dict[str, Any] = {
        "posix.system": {"model": {"a": torch.ones(2), "b": Calls(os.system, f"touch {proof}")}},
        "eval": {"a": torch.ones(2), "b": Calls(eval, f"open({str(proof)!r}, 'w')")},
        "two tensors have the name 'a.b'": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
        "'q' is quantized": {"q": quantized},
        "'s' is sparse": {"s": torch.eye(3).to_sparse()},
        "'m' is sparse, or has no values": {"m": torch.ones(2, device="meta")},
        "there are no tensors": {"epoch": 3},
        "one tensor without a name": torch.ones(2),
        "out of proportion": {"a": torch.zeros(1).expand(2**40)},
        "nested more than": _laughs(),
        "names are text": {("a", 1): torch.ones(1)},
    }
    made = {}
    for number, (said, content) in enumerate(files.items()):
        made[said] = folder / f"{number}.pth"
        torch.save(content, made[said])
    bare = folder / "bare.pth"
    bare.write_bytes(pickle.dumps(Calls(os.system, f"touch {proof}"), protocol=2))
    modern = folder / "modern.bin"
    modern.write_bytes(pickle.dumps(Calls(os.system, f"touch {proof}"), protocol=4))
    return made | {"posix.system ": bare, "not written by torch.save": modern}


def _laughs() -> dict[str, Any]:
    """Half a billion entries in 29 lists."""
    inner: list[Any] = [1, 2]
    for _ in range(28):
        inner = [inner, inner]
    return {"a": torch.ones(1), "b": inner}
