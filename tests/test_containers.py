"""Limits of a container, users without a home, and odd settings of language and time."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from vitral import containers, folders


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty tree of control groups on a machine with eight cores."""
    monkeypatch.setattr(containers, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(containers, "_OWN", tmp_path / "own")
    monkeypatch.setattr(containers, "_affinity", lambda: 8)
    return tmp_path / "cgroup"


def place(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)],
)
def test_a_quota_of_version_2_limits_the_cores(groups, quota, cores):
    place(groups / "cpu.max", quota + "\n")
    assert containers.cores() == cores


def test_the_least_quota_above_a_process_counts(groups, tmp_path):
    place(tmp_path / "own", "0::/pods/one/inner\n")
    place(groups / "pods/one/inner/cpu.max", "max 100000\n")
    place(groups / "pods/one/cpu.max", "300000 100000\n")
    place(groups / "pods/cpu.max", "600000 100000\n")
    place(groups / "pods/memory.max", f"{3 << 20}\n")
    assert containers.cores() == 3
    assert containers.memory_limit() == 3 << 20


@pytest.mark.parametrize("path", ["/docker/abc", "/"], ids=["its own group", "root of the container"])
@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("250000", 3)])
def test_a_quota_of_version_1_limits_the_cores(groups, tmp_path, path, quota, cores):
    place(tmp_path / "own", "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/docker/abc\n")
    for name, text in {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": "100000"}.items():
        place(groups / "cpu" / path.lstrip("/") / name, text + "\n")
    place(groups / "memory" / path.lstrip("/") / "memory.limit_in_bytes", f"{5 << 20}\n")
    assert containers.cores() == cores
    assert containers.memory_limit() == 5 << 20


THREADS = """
import os, sys
from pathlib import Path
from vitral import containers
containers._GROUPS, containers._affinity = Path(sys.argv[1]), lambda: 8
from vitral.cli.main import COMMANDS, main
def models() -> int:
    import torch
    print(torch.get_num_threads())
    return 0
COMMANDS["models"] = models
if sys.argv[2] == "torch first":
    import torch
    torch.set_num_threads(8)
main(["models"])
"""


@pytest.mark.parametrize(
    ("when", "given", "threads"),
    # Not more than two: MKL starts as many threads as the machine has cores.
    [("at once", {}, 1), ("torch first", {}, 1), ("at once", {"OMP_NUM_THREADS": "2"}, 2)],
)
def test_commands_compute_with_as_many_threads(tmp_path, when, given, threads):
    place(tmp_path / "cpu.max", "100000 100000\n")
    changed = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    command = [sys.executable, "-c", THREADS, str(tmp_path), when]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**changed, **given})
    assert done.stdout.split() == [str(threads)]


# ---- without a home


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder for temporary files of a user without an entry in passwd, without HOME."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # so that what the test sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders.substitute.cache_clear()
    yield tmp_path
    folders.substitute.cache_clear()


def test_a_user_without_a_home_has_a_private_cache(homeless):
    cache = folders.cache_folder("pixels")
    assert cache == homeless / f"vitral-{os.getuid()}" / "vitral" / "pixels"
    assert (homeless / f"vitral-{os.getuid()}").stat().st_mode & 0o777 == 0o700
    note = folders.settle_caches()
    assert "XDG_CACHE_HOME" in note
    assert str(homeless) in note
    assert folders.cache_folder("pixels") == cache
    assert not folders.settle_caches(), "said once"


def test_a_home_that_cannot_be_written_holds_no_cache(homeless, monkeypatch):
    monkeypatch.setenv("HOME", str(homeless / "home"))
    assert folders.cache_folder("pixels") == homeless / "home/.cache/vitral/pixels"
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert folders.cache_folder("pixels").is_relative_to(homeless / f"vitral-{os.getuid()}")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert folders.cache_folder("pixels") == Path("/somewhere/vitral/pixels")


def test_a_folder_that_others_can_write_is_no_cache(homeless):
    planted = homeless / f"vitral-{os.getuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    assert not folders.cache_folder("kernels").is_relative_to(planted)


# ---- language and time


@pytest.mark.slow
def test_language_and_time_zone_change_nothing(tmp_path):
    """Turkish has another lower case of I, and a decimal comma; Apia is half a day ahead."""
    said = set()
    for changed in ({"LANG": "C.UTF-8"}, {"LC_ALL": "C"}, {"LC_ALL": "tr_TR.UTF-8"}, {"TZ": "Pacific/Apia"}):
        given = {**{k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG"))}, **changed}
        command = [sys.executable, "-m", "vitral", "summary", "S/16", "--format", "json"]
        said.add(subprocess.run(command, capture_output=True, check=True, env=given, cwd=tmp_path).stdout)
    assert len(said) == 1
