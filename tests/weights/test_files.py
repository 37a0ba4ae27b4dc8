"""Files of tensors: only data, whole or not at all."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from vitral.atomic import replacing, write_text
from vitral.errors import WeightsError, WriteError
from vitral.weights import files
from vitral.weights.files import read_tensors, write_tensors


def test_round_trip_of_every_kind_of_number(tmp_path):
    tensors = {
        "a": torch.randn(2, 3),
        "half": torch.randn(3).bfloat16(),
        "whole": torch.arange(4),
        "scalar": torch.tensor(2.5),
        "view": torch.randn(4, 4).t(),
    }
    header = {"list": [1, 2.5, None], "text": "Käfer 甲虫"}
    write_tensors(tmp_path / "deep/er/x.safetensors", tensors, header)
    read, told = read_tensors(tmp_path / "deep/er/x.safetensors")
    assert told == header
    assert all(torch.equal(read[name], tensors[name]) and read[name].dtype == tensors[name].dtype for name in tensors)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("No space left")])
def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch, error):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": torch.ones(1)}, {})

    def full(plain, temporary, metadata):
        temporary.write_bytes(b"half")
        raise error

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(WriteError, match="No space left") as caught:
        write_tensors(path, {"a": torch.zeros(1)}, {})
    assert len(str(caught.value).splitlines()) <= 5
    assert str(path) in str(caught.value)
    assert read_tensors(path)[0]["a"].item() == 1
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_any_other_error_leaves_the_old_file_too(tmp_path):
    write_text(tmp_path / "x.json", "old")

    def fail() -> None:
        with replacing(tmp_path / "x.json") as temporary:
            temporary.write_text("new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (tmp_path / "x.json").read_text() == "old"
    assert os.listdir(tmp_path) == ["x.json"]


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": torch.randn(100)}, {"x": 1})
    whole = path.read_bytes()
    for cut in (0, 4, 20, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(WeightsError, match="damaged weights file") as caught:
            read_tensors(path)
        assert f"{cut:,} bytes" in str(caught.value)
    with pytest.raises(WeightsError, match="no such file"):
        read_tensors(tmp_path / "gone")


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"vitral": "[1]"}, {"vitral": "{"}])
def test_foreign_files_are_refused(tmp_path, metadata):
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors", metadata=metadata)
    with pytest.raises(WeightsError):
        read_tensors(tmp_path / "x.safetensors")
