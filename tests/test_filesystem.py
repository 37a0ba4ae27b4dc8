"""Disks that refuse single calls, full and forbidden ones, folders that cannot be renamed, paths that are no text."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from running import TINY, as_words, printed
from vitral.atomic import is_temporary, replacing, replacing_folder, write_text
from vitral.errors import WriteError
from vitral.filesystem import is_locked, locked, mapped, mapped_array, read_at, refused, relative, second_name
from vitral.weights.files import read_tensors, write_tensors
from vitral.weights.read import safetensors_mmap
from vitral.weights.read.safetensors_mmap import read_safetensors


def refuse(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, number: int) -> None:
    def refusing(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(place, name, refusing)


# ---- calls that a disk does not know


@pytest.mark.parametrize(
    ("name", "number"),
    [("chmod", errno.EPERM), ("fsync", errno.EINVAL), ("fsync", errno.ENOTSUP), ("fsync", errno.EBADF)],
)
def test_files_are_written_without_what_a_disk_cannot_do(monkeypatch, tmp_path, name, number):
    refuse(monkeypatch, os, name, number)
    write_text(tmp_path / "page.html", "text")
    with replacing_folder(tmp_path / "net") as made:
        (made / "a").write_text("whole")
    assert (tmp_path / "page.html").read_text() == "text"
    assert (tmp_path / "net/a").read_text() == "whole"


def test_a_fault_of_the_disk_is_not_left_out(monkeypatch, tmp_path):
    write_text(tmp_path / "page.html", "old")
    refuse(monkeypatch, os, "fsync", errno.EIO)
    with pytest.raises(WriteError, match="another disk"):
        write_text(tmp_path / "page.html", "new")
    assert (tmp_path / "page.html").read_text() == "old"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EINVAL])
def test_a_disk_without_locks_excludes_nobody(monkeypatch, tmp_path, number):
    import fcntl

    refuse(monkeypatch, fcntl, "flock", number)
    with locked(tmp_path / ".lock"), locked(tmp_path / ".lock"):
        assert not is_locked(tmp_path / ".lock")


def test_one_holder_has_a_lock(tmp_path):
    file = tmp_path / ".lock"
    assert not is_locked(file)
    with locked(file):
        assert is_locked(file)
        with pytest.raises(BlockingIOError), locked(file):
            pass
    assert not file.exists()
    with locked(file):
        assert is_locked(file)


def test_a_waiting_holder_comes_next(tmp_path):
    order = []

    def second() -> None:
        with locked(tmp_path / ".lock", wait=True):
            order.append("second")

    with locked(tmp_path / ".lock"):
        thread = threading.Thread(target=second)
        thread.start()
        order.append("first")
    thread.join(20)
    assert order == ["first", "second"]


def test_a_second_name_is_a_copy_where_there_are_no_links(monkeypatch, tmp_path):
    (tmp_path / "last").write_bytes(b"state")
    refuse(monkeypatch, os, "link", errno.EPERM)
    second_name(tmp_path / "last", tmp_path / "previous")
    assert (tmp_path / "previous").read_bytes() == b"state"


def test_files_are_read_where_they_cannot_be_mapped(monkeypatch, tmp_path):
    write_tensors(tmp_path / "x.safetensors", {"a": torch.arange(6.0)}, {"kind": "test"})
    refuse(monkeypatch, mmap, "mmap", errno.ENODEV)
    refuse(monkeypatch, np, "memmap", errno.ENODEV)

    def no_maps(*_: object, **__: object) -> None:
        raise RuntimeError("unable to mmap 24 bytes from file <x>: No such device (19)")

    monkeypatch.setattr(safetensors_mmap, "safe_open", no_maps)
    tensors, header = read_tensors(tmp_path / "x.safetensors")
    assert tensors["a"].tolist() == list(range(6))
    assert header == {"kind": "test"}
    assert read_safetensors(tmp_path / "x.safetensors")[0]["a"].tolist() == list(range(6))
    (tmp_path / "bytes").write_bytes(b"abc")
    with open(tmp_path / "bytes", "rb") as file, mapped(file) as data:
        assert bytes(data[1:]) == b"bc"
    assert mapped_array(tmp_path / "bytes").tolist() == [97, 98, 99]


def test_threads_read_one_file_at_offsets_without_pread(monkeypatch, tmp_path):
    (tmp_path / "numbers").write_bytes(bytes(range(256)) * 40)
    monkeypatch.delattr(os, "pread")
    wrong: list[int] = []
    with open(tmp_path / "numbers", "rb", buffering=0) as file:

        def read(first: int) -> None:
            wrong.extend(i for i in range(first, 256, 4) if read_at(file.fileno(), 3, i)[0] != i)

        threads = [threading.Thread(target=read, args=(first,)) for first in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert not wrong


def test_another_drive_has_no_relative_path(monkeypatch):
    def other_drive(*_: object) -> str:
        raise ValueError("path is on mount 'D:', start on mount 'C:'")

    assert relative("/a/b", "/a/c") == "../b"
    monkeypatch.setattr(os.path, "relpath", other_drive)
    assert relative("D:/photos", "C:/runs") is None


# ---- refusals by their kind


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "free disk space"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "your quota"),
        (OSError(errno.EROFS, "Read-only file system"), "can only be read"),
        (PermissionError(errno.EACCES, "Permission denied"), "permissions"),
        (OSError(errno.EXDEV, "Invalid cross-device link"), "remove what is there"),
        (OSError(errno.ENAMETOOLONG, "File name too long"), "shorter name"),
        (RuntimeError("Error: I/O error: No space left on device (os error 28)"), "free disk space"),
        (OSError(errno.EMFILE, "Too many open files"), "ulimit"),
    ],
)
def test_a_refusal_names_what_to_do(error, hint):
    message = refused(Path("net"), error, "net is unchanged")
    assert hint in str(message)
    assert "net is unchanged" in str(message)
    assert ("free disk space" in str(message)) == (hint == "free disk space"), "only for a full disk"


# ---- folders and files that cannot be renamed


def fixed(monkeypatch: pytest.MonkeyPatch, target: Path, number: int) -> None:
    """Let a folder or file be one that the system does not rename: a mount point, or one of a lower overlay layer."""
    real = os.replace

    def replace(source: Any, name: Any) -> None:
        if target in (Path(source), Path(name)):
            raise OSError(number, os.strerror(number))
        real(source, name)

    monkeypatch.setattr(os, "replace", replace)


def an_export(folder: Path) -> None:
    (folder / "old").mkdir(parents=True)
    (folder / "old/part").write_text("old")
    (folder / "model").write_text("old")
    (folder / "both").mkdir()
    (folder / "both/a").write_text("old")


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EBUSY])
def test_the_content_of_a_folder_is_replaced_if_it_cannot_move(monkeypatch, tmp_path, number):
    target = tmp_path / "net"
    an_export(target)
    fixed(monkeypatch, target, number)
    with replacing_folder(target) as made:
        (made / "model").write_text("new")
        (made / "both").mkdir()
        (made / "both/b").write_text("new")
        (made / "old").write_text("a file now")
    found = {str(one.relative_to(target)): one.read_text() for one in target.rglob("*") if one.is_file()}
    assert found == {"model": "new", "both/b": "new", "old": "a file now"}
    assert not [one for one in tmp_path.rglob("*") if is_temporary(one.name)]


def test_a_mount_point_is_written_inside(monkeypatch, tmp_path):
    target = tmp_path / "net"
    an_export(target)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == target)
    fixed(monkeypatch, target, errno.EBUSY)
    with replacing_folder(target) as made:
        assert made.parent == target
        (made / "model").write_text("new")
    assert [one.name for one in target.rglob("*")] == ["model"]


def test_a_file_that_is_a_mount_point_is_written_into(monkeypatch, tmp_path):
    (tmp_path / "table.csv").write_text("old")
    fixed(monkeypatch, tmp_path / "table.csv", errno.EBUSY)
    with replacing(tmp_path / "table.csv") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "table.csv").read_text() == "new"
    assert [one.name for one in tmp_path.iterdir()] == ["table.csv"]


# ---- paths that are no text


def test_weights_are_written_and_read_in_a_folder_that_is_not_utf8(tmp_path):
    file = Path(os.fsdecode(os.fsencode(tmp_path) + b"/Universit\xe9")) / "x.safetensors"
    write_tensors(file, {"a": torch.arange(6.0), "b": torch.ones(2, dtype=torch.bfloat16)}, {"kind": "test"})
    write_tensors(tmp_path / "x.safetensors", {"a": torch.arange(6.0), "b": torch.ones(2).bfloat16()}, {"kind": "test"})
    assert file.read_bytes() == (tmp_path / "x.safetensors").read_bytes()
    tensors, header = read_tensors(file)
    assert header == {"kind": "test"}
    assert tensors["a"].tolist() == list(range(6))
    assert read_safetensors(file)[0]["b"].tolist() == [1, 1]


def test_a_run_in_a_folder_that_is_not_utf8_is_trained_read_and_resumed(make_images, tmp_path, capsys):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/Universit\xe9"))
    photos = make_images({"cat": 8, "dog": 8}, size=(8, 8))
    words = ["train", str(photos), *as_words({**TINY, "init": "none"}), "--out", str(folder / "run"), "--quiet"]
    printed(capsys, *words)
    for command in (["verify"], ["evaluate"], ["replay", "--step", "1", "--out", str(folder / "sheet.png")]):
        printed(capsys, command[0], str(folder / "run"), *command[1:])
    printed(capsys, "predict", str(folder / "run"), str(photos), "--out", str(folder / "table.csv"))
    printed(capsys, "predict", str(folder / "run"), str(photos), "--out", str(folder / "table.csv"), "--resume")
    (folder / "run/result.json").unlink()
    printed(capsys, "train", "--out", str(folder / "run"), "--resume", "--quiet")
    assert (folder / "run/result.json").is_file()
