"""Two machines as network namespaces with a link between them, which is cut during a run."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_runs import at_step, command
from together import codes, start

from running import same_bits, weights_of
from vitral.cli.main import main
from vitral.distributed import heartbeat

ADDRESSES = ("10.213.7.1", "10.213.7.2")
CLONE_NEWNET = 0x40000000


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def enter(namespace: str) -> None:
    """Move this process into a network namespace."""
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(descriptor)


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Two network namespaces, each with one end of a cable."""
    if shutil.which("ip") is None:
        pytest.skip("needs the program ip of iproute2")
    names = [f"vitral-{os.getpid()}-{number}" for number in range(2)]
    cable = [f"v{os.getpid()}-{number}" for number in range(2)]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        for name, end, address in zip(names, cable, ADDRESSES, strict=True):
            ip("link", "set", end, "netns", name)
            for words in (f"link set {end} name cable", "link set lo up", "link set cable up"):
                ip("-n", name, *words.split())
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.mark.slow
def test_a_cut_link_ends_both_machines_and_the_run_goes_on(machines, make_images, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("vitral.workflows.running.execute._report", lambda *_: None)  # drawing is slow
    monkeypatch.setattr(heartbeat, "LOST", 8.0)
    photos, out, cut = make_images({"a": 15, "b": 15}), tmp_path / "cut", tmp_path / "link is cut"
    link = {"MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": "cable", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}

    def on_machines(folder: Path, *more: str) -> list[int]:
        def work() -> int:
            enter(machines[int(os.environ["RANK"])])
            return main(command(photos, folder, *more))

        return codes(start(2, work, link))

    def pull() -> None:
        cut.touch()
        ip("link", "set", "cable", "down")

    with monkeypatch.context() as patched:
        at_step(7, 1, pull, patched)
        assert on_machines(out) == [heartbeat.LOST_CODE] * 2
        seconds = time.time() - cut.stat().st_mtime
    printed = capfd.readouterr().err
    assert "Traceback" not in printed
    assert "error: lost rank 1 on " in printed, "as rank 0 sees it"
    assert "error: lost rank 0's machine" in printed, "as rank 1 sees it"
    assert printed.count("error: ") == 2, printed
    assert len(re.findall("--resume", printed)) >= 2
    assert seconds < 30
    ip("-n", machines[1], "link", "set", "cable", "up")
    assert on_machines(out, "--resume") == [0, 0]
    assert on_machines(tmp_path / "whole") == [0, 0]
    assert same_bits(weights_of(out), weights_of(tmp_path / "whole"))
