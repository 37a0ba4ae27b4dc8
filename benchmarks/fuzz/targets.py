"""Fuzzing targets: one function per parser, with small real files as seeds."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save

from vitral.model import ViTConfig
from vitral.model.registry import config_to_json

_FOLDER = Path("/dev/shm") if os.path.isdir("/dev/shm") else Path(tempfile.gettempdir())


@dataclass(frozen=True)
class Target:
    """A parser: `run` returns or raises, `seeds` are valid inputs."""

    run: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]


def _in_file(suffix: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    path = _FOLDER / f"vitral-fuzz-{os.getpid()}{suffix}"

    def run(data: bytes) -> object:
        path.write_bytes(data)
        try:
            return read(path)
        finally:
            path.unlink(missing_ok=True)

    return run


# ---- weights


def _safetensors(path: Path) -> object:
    from vitral.weights.read.safetensors_mmap import read_safetensors

    return read_safetensors(path)


def _native(path: Path) -> object:
    from vitral.weights.native import read

    return read(path)


def _npz(path: Path) -> object:
    from vitral.weights.read.npz import read_npz

    return read_npz(path)


def _pickle(data: bytes) -> object:
    """Run the restricted unpickler here; vitral runs it in a separate process and refuses whatever it raises."""
    from vitral.errors import WeightsError
    from vitral.weights.read.sandbox import choose, flatten
    from vitral.weights.read.unpickle import UNWANTED, WRAPPERS

    try:
        tree = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        return flatten(choose(tree, WRAPPERS, UNWANTED)[0])
    except MemoryError:
        raise
    except Exception as error:  # `confined.main` reports every exception, and `unpickle` makes an error of it
        raise WeightsError("refused") from error


def _sandbox(path: Path) -> object:
    from vitral.weights.read.unpickle import read_pickle

    return read_pickle(path, seconds=20)


def _config(data: bytes) -> object:
    """Parse the configuration of a network, or of its preprocessing, as in headers and `config.json`."""
    from vitral import bounded
    from vitral.data.images.preprocessing import Preprocessing
    from vitral.errors import WeightsError
    from vitral.model.registry import config_from_json

    try:
        found = bounded.parse(data)
    except ValueError as error:
        raise WeightsError("refused") from error
    if isinstance(found, dict) and "mean" in found:
        try:
            return Preprocessing.from_json(found)
        except TypeError as error:  # `native.read` catches it: a field is missing
            raise WeightsError("refused") from error
    try:
        return config_from_json(found)
    except TypeError as error:
        raise WeightsError("refused") from error


_STRANGE = [
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    2**31,
    2**70,
    0.5,
    -0.0,
    1e-300,
    1e300,
    "",
    "8",
    "gelu",
    "vit",
    "\x1b[2J",
    "a" * 300,
    [],
    [8],
    [8, 8],
    [0, -1],
    [[8, 8]],
    ["a", "a"],
    {},
    {"a": 1},
    {"kind": "vit"},
]


def _fields(data: bytes) -> object:
    """Parse valid JSON: each three bytes of `data` put an unexpected value, or another field's value, into a field."""
    found: dict[str, Any] = {**config_to_json(_config_of_a_network()), **(_PREPROCESSING if data[:1] < b"\x40" else {})}
    for place in range(1, len(data) - 2, 3):
        names = sorted(found)
        name, kind = names[data[place] % len(names)], data[place + 1]
        if kind < 200:
            found[name] = _STRANGE[data[place + 2] % len(_STRANGE)]
        elif kind < 240:
            found[name] = found[names[data[place + 2] % len(names)]]
        elif len(names) > 1:
            del found[name]
    return _config(json.dumps(found).encode())


# ---- data


def _archive(path: Path) -> object:
    from vitral.data.archives import open_files

    files = open_files(str(path))
    with contextlib.suppress(OSError, ValueError):  # counted among the images that cannot be read
        for name in files.paths[:3]:
            files.read(name, 1 << 20)
    return files.notes


def _image(data: bytes) -> object:
    from vitral.data.images.decode import probe, read_image

    found = probe(data)
    return read_image(data) if found.height * found.width < 1 << 20 else None


def _table(data: bytes) -> object:
    from vitral.data import load

    with tempfile.TemporaryDirectory(dir=_FOLDER) as folder:
        (Path(folder) / "labels.csv").write_bytes(data)
        (Path(folder) / "a.png").write_bytes(_encoded("PNG"))
        return load(Path(folder) / "labels.csv")


def _idx(data: bytes) -> object:
    from vitral.data import load

    with tempfile.TemporaryDirectory(dir=_FOLDER) as folder:
        for name in ("train-images-idx3-ubyte", "t10k-images-idx3-ubyte"):
            (Path(folder) / name).write_bytes(data)
        for name in ("train-labels-idx1-ubyte", "t10k-labels-idx1-ubyte"):
            (Path(folder) / name).write_bytes(b"\0\0\x08\x01\0\0\0\x02\0\x01")
        return load(folder)


def _command_line(data: bytes) -> object:
    """Parse a command line that starts no work; an internal error is a finding."""
    from vitral.cli.main import main

    words = [word.decode("utf-8", "replace") for word in data.split(b"\n")]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            main([*words, "--no-such-option-as-this"])
        except SystemExit as stopped:
            if stopped.code not in (0, 1, 2):
                raise RuntimeError(f"exit code {stopped.code}") from stopped
    if "bug in vitral" in output.getvalue() or "Traceback" in output.getvalue():
        raise RuntimeError(output.getvalue()[-500:])
    return None


# ---- seeds


def _encoded(format: str, mode: str = "RGB", **options: object) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (7, 9, 3), dtype=np.uint8)  # the same seeds every time
    Image.fromarray(pixels).convert(mode).save(file := io.BytesIO(), format, **options)
    return file.getvalue()


def _images() -> list[bytes]:
    kinds = [("JPEG", "RGB"), ("PNG", "RGBA"), ("PNG", "P"), ("GIF", "P"), ("BMP", "RGB"), ("WEBP", "RGB")]
    kinds += [("PPM", "RGB"), ("TIFF", "RGB"), ("TIFF", "F"), ("TIFF", "CMYK"), ("JPEG", "CMYK"), ("PNG", "I;16")]
    plain = [_encoded(format, mode) for format, mode in kinds if mode != "I;16"]
    return [*plain, _encoded("JPEG", progressive=True), _encoded("TIFF", compression="tiff_lzw"), b"P2 2 1 9\n3 4\n"]


def _tensors() -> list[bytes]:
    return [save({"a": torch.ones(2, 3), "b.c": torch.arange(4)}), save({"a": torch.ones(1)}, {"x": "y"})]


def _natives() -> list[bytes]:
    """Write a small network without its digest, which would refuse every change before any other check."""
    from vitral.model import ViT

    torch.manual_seed(0)
    header = {"format": 1, "preprocessing": _PREPROCESSING, "classes": ["a", "b"], "trained": {}}
    config = _config_of_a_network()
    return [save(ViT(config).state_dict(), {"vitral": json.dumps({**header, "model": config_to_json(config)})})]


def _configs() -> list[bytes]:
    return [json.dumps(one).encode() for one in (config_to_json(_config_of_a_network()), _PREPROCESSING)]


def _config_of_a_network() -> ViTConfig:
    return ViTConfig(image_size=8, patch_size=4, dim=8, depth=1, heads=2, mlp_dim=8, classes=2)


_PREPROCESSING = {"image_size": [8, 8], "channels": 3, "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}


def _npzs() -> list[bytes]:
    made = []
    for write in (np.savez, np.savez_compressed):
        write(file := io.BytesIO(), a=np.arange(6.0), b=np.ones((2, 3), np.float32))
        made.append(file.getvalue())
    return made


def _pickles() -> list[bytes]:
    made = []
    for zipped in (True, False):
        torch.save({"model": {"w": torch.ones(2)}}, file := io.BytesIO(), _use_new_zipfile_serialization=zipped)
        made.append(file.getvalue())
    return made


def _zips() -> list[bytes]:
    with zipfile.ZipFile(file := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("cat/a.png", _encoded("PNG"))
        archive.writestr("dog/b.png", _encoded("PNG"))
    return [file.getvalue()]


def _tars() -> list[bytes]:
    with tarfile.open(fileobj=(file := io.BytesIO()), mode="w") as archive:
        member = tarfile.TarInfo("cat/a.png")
        member.size = len(_encoded("PNG"))
        archive.addfile(member, io.BytesIO(_encoded("PNG")))
    return [file.getvalue()]


TARGETS: dict[str, Target] = {
    "safetensors": Target(_in_file(".safetensors", _safetensors), _tensors),
    "native": Target(_in_file(".safetensors", _native), _natives),
    "npz": Target(_in_file(".npz", _npz), _npzs),
    "pickle": Target(_pickle, _pickles),
    "sandbox": Target(_in_file(".pth", _sandbox), _pickles),
    "config": Target(_config, _configs),
    "fields": Target(_fields, lambda: [bytes([first, 3, 7, 9, 12, 210, 4]) for first in (0, 99)]),
    "table": Target(_table, lambda: [b"image,label\na.png,cat\n", b'image;label\n"a.png";"dog"\n']),
    "idx": Target(_idx, lambda: [b"\0\0\x08\x03" + b"\0\0\0\x02" * 3 + bytes(8)]),
    "zip": Target(_in_file(".zip", _archive), _zips),
    "tar": Target(_in_file(".tar", _archive), _tars),
    "tar.gz": Target(_in_file(".tar.gz", _archive), lambda: [gzip.compress(one, mtime=0) for one in _tars()]),
    "image": Target(_image, _images),
    "command": Target(_command_line, lambda: [b"train\nmnist\n--lr\n0.1", b"predict\ndemo\nx.jpg", b"summary\nS/16"]),
}
