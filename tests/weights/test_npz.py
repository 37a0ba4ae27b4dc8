"""Archives of arrays: equal to the bit, mapped, and refused if inconsistent."""

from __future__ import annotations

import contextlib
import io
import re
import tracemalloc
import zipfile
from pathlib import Path

import hostile
import numpy as np
import pytest
import torch

from vitral.errors import WeightsError
from vitral.weights.read import zip_entries
from vitral.weights.read.npz import read_npz
from vitral.weights.read.zip_entries import list_entries

ARRAYS = {
    "Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel": np.random.default_rng(0).normal(size=(5, 7)),
    "half": np.arange(6, dtype=np.float16).reshape(2, 3),
    "single": np.array([1.5, np.nan, -0.0], dtype=np.float32),
    "columns": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
    "big": np.arange(4, dtype=">f4"),
    "big whole": np.arange(4, dtype=">i8"),
    "scalar": np.float64(2.5),
    "nothing": np.zeros((0, 3), np.float32),
    "bytes": np.arange(5, dtype=np.uint8),
    "truth": np.array([True, False]),
    "whole": np.arange(3),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_equal_to_the_bit(tmp_path, save):
    save(tmp_path / "x.npz", **ARRAYS)
    tensors, notes = read_npz(tmp_path / "x.npz")
    assert list(tensors) == list(ARRAYS)
    assert notes == ()
    for name, array in ARRAYS.items():
        got, native = tensors[name].numpy(), np.asarray(array, array.dtype.newbyteorder("="))
        assert (got.dtype, got.shape) == (native.dtype, native.shape), name
        assert got.tobytes() == native.tobytes(), name


def test_bfloat16_of_jax_and_text(tmp_path):
    numbers = torch.randn(3, 5).bfloat16()
    np.savez(tmp_path / "x.npz", w=numbers.view(torch.int16).numpy().view("V2"), note=np.array(["a", "b"]))
    tensors, notes = read_npz(tmp_path / "x.npz")
    assert torch.equal(tensors["w"], numbers)
    assert tensors["w"].dtype == torch.bfloat16
    assert list(tensors) == ["w"]
    assert notes == ("left out 'note': torch has no dtype <U1",)


def test_stored_arrays_are_views_of_one_mapping(tmp_path):
    """Their addresses are as far from each other as their bytes in the file; writing stays private."""
    path = tmp_path / "x.npz"
    random = np.random.default_rng(1)
    arrays = {name: random.normal(size=100).astype(np.float32) for name in ("a", "bb", "ccc")}
    np.savez(path, **arrays)
    before = path.read_bytes()
    tensors, _ = read_npz(path)
    at = {name: before.index(array.tobytes()) for name, array in arrays.items()}
    assert {tensor.data_ptr() - at[name] for name, tensor in tensors.items()} == {tensors["a"].data_ptr() - at["a"]}
    assert (tensors["a"].data_ptr() - at["a"]) % 4096 == 0
    tensors["bb"].zero_()
    assert path.read_bytes() == before
    path.unlink()
    assert tensors["ccc"].numpy().tobytes() == arrays["ccc"].tobytes()


def test_a_long_local_header_moves_the_data(tmp_path):
    """The directory's extra field and the local one differ in length."""
    array = np.arange(10, dtype=np.float64)
    file = io.BytesIO()
    np.lib.format.write_array(file, array)
    info = zipfile.ZipInfo("a.npy")
    info.extra = b"\xfe\xca\x03\x00abc"
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr(info, file.getvalue())
        info.extra = b""
    assert torch.equal(read_npz(tmp_path / "x.npz")[0]["a"], torch.from_numpy(array))


def test_a_prefix_before_the_archive_is_followed(tmp_path):
    np.savez(tmp_path / "x.npz", a=np.arange(4))
    (tmp_path / "y.npz").write_bytes(b"#!something\n" + (tmp_path / "x.npz").read_bytes())
    assert read_npz(tmp_path / "y.npz")[0]["a"].tolist() == [0, 1, 2, 3]


def test_hostile_archives_are_refused(tmp_path):
    for said, path in hostile.hostile_npz(tmp_path).items():
        with pytest.raises(WeightsError) as caught:
            read_npz(path)
        assert re.search(said if "|" in said else re.escape(said.strip()), str(caught.value)), (said, caught.value)
        assert str(path) in str(caught.value)
        assert len(str(caught.value).splitlines()) <= 5


def test_a_lie_about_the_size_takes_no_memory(tmp_path):
    """The check comes first: 10^15 values are refused immediately, whatever the archive's directory states."""
    files = hostile.hostile_npz(tmp_path)
    tracemalloc.start()
    for said in ("the header states (1000000000000, 1000)", "a zip bomb", "a zip bomb: "):
        with pytest.raises(WeightsError):
            read_npz(files[said])
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_more_than_a_network_has_is_refused(tmp_path, monkeypatch):
    array = hostile.npy(np.zeros(1))
    many = hostile.zipped(tmp_path / "many.npz", {f"{i}.npy": array for i in range(5_001)})
    with pytest.raises(WeightsError, match="5,001; at most 5,000 are read"):
        read_npz(many)
    with pytest.raises(WeightsError, match="holds a control character"):
        read_npz(hostile.zipped(tmp_path / "name.npz", {"a\x01\x1b[31m.npy": array}))
    monkeypatch.setattr(zip_entries, "LONGEST_DIRECTORY", 100_000)
    with pytest.raises(WeightsError, match=r"a table of contents of .* bytes; at most 100,000"):
        read_npz(many)


@pytest.mark.parametrize("seed", range(30))
def test_random_damage_is_an_error_or_harmless(tmp_path, seed):
    random = np.random.default_rng(seed)
    path = tmp_path / "x.npz"
    (np.savez if seed % 2 else np.savez_compressed)(path, a=np.arange(50.0), b=np.ones((3, 4), np.float32))
    content = bytearray(path.read_bytes())
    for at in random.integers(0, len(content), size=3):
        content[at] = random.integers(256)
    Path(path).write_bytes(content[: len(content) - int(random.integers(3)) * 10])
    with contextlib.suppress(WeightsError):
        read_npz(path)


@pytest.mark.parametrize("names", ["a", "ab"])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_flipped_bit_is_found(tmp_path, save, names):
    path = tmp_path / "x.npz"
    save(path, **{name: np.arange(500.0) for name in names})
    whole, (first, *_) = path.read_bytes(), list_entries(path)
    at = first.offset + first.stored // 2
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
    with pytest.raises(WeightsError, match="damaged or hostile"):
        read_npz(path)
    path.write_bytes(whole)
    assert set(read_npz(path)[0]) == set(names)
