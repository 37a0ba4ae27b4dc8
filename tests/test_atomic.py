"""Files are written whole or not at all, and nothing else is touched: real devices, pipes, links and processes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from running import in_child
from vitral.atomic import is_temporary, remove_left, replacing, replacing_folder, write_text
from vitral.errors import WriteError


def litter(folder: Path) -> list[str]:
    return [one.name for one in folder.iterdir() if is_temporary(one.name)]


def test_a_file_is_replaced_whole_with_the_usual_mode(tmp_path: Path):
    path = tmp_path / "page.html"
    write_text(path, "old")
    write_text(path, "new")
    assert path.read_text() == "new"
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    assert not litter(tmp_path)


def test_what_fails_leaves_the_file_as_it_was(tmp_path: Path):
    path = tmp_path / "page.html"
    write_text(path, "old")

    def fail() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_text() == "old"
    assert not litter(tmp_path)


def test_a_device_is_written_through_and_stays_one():
    write_text(Path("/dev/null"), "text")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(WriteError, match="cannot write") as caught:
        write_text(Path("/dev/full"), "text")
    assert "No space left" in caught.value.why
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_standard_output_is_written_through():
    program = "from vitral.atomic import write_text; from pathlib import Path; write_text(Path('/dev/stdout'), 'told')"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"told"


def test_a_pipe_is_written_to_its_reader_and_refused_without_one(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(WriteError):
        write_text(pipe, "text")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    for _ in range(1000):  # until the other thread has opened it
        try:
            write_text(pipe, "text")
            break
        except WriteError:
            reader.join(0.01)
    reader.join(10)
    assert read == ["text"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_folder_is_refused(tmp_path: Path):
    (tmp_path / "page.html").mkdir()
    with pytest.raises(WriteError, match="cannot write") as caught:
        write_text(tmp_path / "page.html", "text")
    assert caught.value.why == "it is a folder"


def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path: Path):
    (tmp_path / "real").mkdir()
    write_text(tmp_path / "real" / "page.html", "old")
    link = tmp_path / "page.html"
    link.symlink_to("real/page.html")
    write_text(link, "new")
    assert link.is_symlink()
    assert (tmp_path / "real" / "page.html").read_text() == "new"
    (tmp_path / "dangling").symlink_to("real/made.html")
    write_text(tmp_path / "dangling", "made")
    assert (tmp_path / "real" / "made.html").read_text() == "made"


@pytest.mark.parametrize("kind", ["tmp", "lock"])
def test_a_planted_temporary_name_is_not_followed(tmp_path: Path, monkeypatch, kind):
    """Even if guessed: the name is random, and an existing file is never opened."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    monkeypatch.setattr("secrets.token_hex", lambda n: "0" * 2 * n)
    for planted in (".page.html.tmp", f".page.html.{'0' * 16}.{kind}"):
        (tmp_path / planted).symlink_to(victim)
    with pytest.raises(WriteError):
        write_text(tmp_path / "page.html", "text")
    assert victim.read_text() == "mine"
    assert not (tmp_path / "page.html").exists()


@pytest.mark.real
def test_two_writers_do_not_disturb_one_another(tmp_path: Path):
    path = tmp_path / "page.html"

    def write() -> int:
        for number in range(200):
            write_text(path, f"{os.getpid()} {number}\n" * 500)
        return 0

    children = []
    for _ in range(3):
        thread = threading.Thread(target=lambda: children.append(in_child(write)))
        thread.start()
        children.append(thread)
    for thread in [one for one in children if isinstance(one, threading.Thread)]:
        thread.join()
    assert [one for one in children if isinstance(one, int)] == [0, 0, 0]
    assert len(set(path.read_text().splitlines())) == 1
    assert not litter(tmp_path)


@pytest.mark.real
def test_what_a_killed_writer_left_goes_with_the_next_one(tmp_path: Path):
    def write() -> int:
        with replacing(tmp_path / "page.html") as temporary:
            temporary.write_text("half")
            os._exit(7)

    assert in_child(write) == 7
    left = litter(tmp_path)
    assert sorted(name.rpartition(".")[2] for name in left) == ["lock", "tmp"]
    write_text(tmp_path / "page.html", "first")
    assert litter(tmp_path) == left, "on a disk without locks it may be at work yet"
    for name in left:
        os.utime(tmp_path / name, (0, 0))
    write_text(tmp_path / "page.html", "second")
    assert not litter(tmp_path)


def seem_old(folder: Path) -> None:
    """Give the temporary files the age that they have for a process whose clock has jumped."""
    for name in litter(folder):
        os.utime(folder / name, (0, 0))


@pytest.mark.real
def test_a_clock_that_jumps_takes_nothing_from_another_process(tmp_path: Path):
    path = tmp_path / "answers.csv"

    def others() -> int:
        write_text(path, "theirs")
        remove_left(tmp_path)
        return 0

    with replacing(path) as temporary:
        temporary.write_text("ours")
        seem_old(tmp_path)
        assert in_child(others) == 0
        assert path.read_text() == "theirs"
    assert path.read_text() == "ours"
    assert not litter(tmp_path)


def test_a_writer_that_replaces_its_temporary_file_keeps_it(tmp_path: Path):
    """As safetensors does: the lock is none of the file that it began with."""
    path = tmp_path / "model.safetensors"
    with replacing(path) as temporary:
        (tmp_path / "other").write_text("ours")
        (tmp_path / "other").replace(temporary)
        seem_old(tmp_path)
        write_text(path, "theirs")
    assert path.read_text() == "ours"


def test_what_killed_processes_left_in_a_run_goes_and_folders_stay(tmp_path: Path):
    (tmp_path / "maps").mkdir()
    for name in (".page.html.0123456789abcdef.tmp", "maps/.a.png.0123456789abcdef.lock"):
        (tmp_path / name).touch()
    kept = tmp_path / ".export.0123456789abcdef.tmp"
    kept.mkdir()
    (tmp_path / ".lock").touch()
    remove_left(tmp_path)
    assert sorted(one.name for one in tmp_path.rglob("*")) == [kept.name, ".lock", "maps"]


def test_names_up_to_the_limit_of_the_system_can_be_written(tmp_path: Path):
    for name in ("p" * 255, "ü" * 127):
        write_text(tmp_path / name, "text")
        assert (tmp_path / name).read_text() == "text"
    with pytest.raises(WriteError, match="cannot write"):
        write_text(tmp_path / ("p" * 256), "text")


def test_a_folder_is_replaced_whole(tmp_path: Path):
    path = tmp_path / "deep" / "export"
    for number in range(2):
        with replacing_folder(path) as made:
            assert list(made.iterdir()) == []
            (made / f"{number}.txt").write_text("new")
    assert [one.name for one in path.iterdir()] == ["1.txt"], "what was there before is gone"
    assert [one.name for one in path.parent.iterdir()] == ["export"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("wrong"), KeyboardInterrupt()])
def test_a_folder_that_fails_stays_as_it_was(tmp_path: Path, error):
    path = tmp_path / "export"
    with replacing_folder(path) as made:
        (made / "old.txt").write_text("old")

    def fail() -> None:
        with replacing_folder(path) as made:
            (made / "new.txt").write_text("half")
            raise error

    with pytest.raises(WriteError if isinstance(error, OSError) else type(error)):
        fail()
    assert [one.name for one in path.iterdir()] == ["old.txt"]
    assert os.listdir(tmp_path) == ["export"]


def test_a_folder_that_cannot_be_put_in_place_leaves_the_old_one(tmp_path: Path, monkeypatch):
    path = tmp_path / "export"
    with replacing_folder(path) as made:
        (made / "old.txt").write_text("old")
    replace = os.replace

    def refuse(source: Path, target: Path) -> None:
        if (Path(source) / "new.txt").exists():
            raise PermissionError(13, "Permission denied", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(WriteError, match="is unchanged"), replacing_folder(path) as made:
        (made / "new.txt").write_text("new")
    assert [one.name for one in path.iterdir()] == ["old.txt"]
    assert os.listdir(tmp_path) == ["export"]
