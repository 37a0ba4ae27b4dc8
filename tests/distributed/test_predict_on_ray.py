"""`vitral predict --engine ray`: the bytes of one process, also if a worker is killed; in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import vitral
from running import printed
from vitral.workflows import predict_on_ray

PROGRAM = """
import os, signal, subprocess, sys, threading, time

def kill_a_worker():
    # the first process of a Ray worker of this session that computes a batch
    while True:
        lines = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True).stdout.splitlines()
        for line in lines:
            number, _, name = line.strip().partition(" ")
            if name.startswith("ray::_lines") and f"\\0MARK={os.getpid()}\\0" in open(f"/proc/{number}/environ").read():
                os.kill(int(number), signal.SIGKILL)
                print("killed a worker", file=sys.stderr, flush=True)
                return
        time.sleep(0.02)

os.environ["MARK"] = str(os.getpid())
import ray
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
threading.Thread(target=kill_a_worker, daemon=True).start()
from vitral.cli.main import main
code = main(sys.argv[1:])
ray.shutdown()
sys.exit(code)
"""


def predict(program: list[str], *words: object) -> subprocess.CompletedProcess[str]:
    source = str(Path(vitral.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *program, "predict", *map(str, words), "--device", "cpu", "--batch-size", "3", "--all"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=230)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the workers in /proc")
def test_a_table_has_the_bytes_of_one_process_though_a_worker_is_killed(trained, make_images, tmp_path):
    pytest.importorskip("ray", reason="needs vitral[ray]")
    photos = make_images({"day": 11, "night": 12})
    (photos / "day/3.png").write_bytes(b"no image")
    one, many = tmp_path / "one.csv", tmp_path / "many.csv"
    alone = predict(["-m", "vitral"], trained.folder, photos, "--out", one)
    assert alone.returncode == 1, alone.stderr  # an image cannot be read
    done = predict(["-c", PROGRAM], trained.folder, photos, "--out", many, "--engine", "ray")
    assert done.returncode == 1, done.stderr[-3000:]
    assert "killed a worker" in done.stderr
    assert "23 rows" in done.stderr
    assert many.read_bytes() == one.read_bytes()


def test_refusals(trained, tmp_path, monkeypatch, capsys):
    words = ["predict", str(trained.folder), str(tmp_path), "--engine", "ray"]
    assert "goes with --out" in printed(capsys, *words, code=2)[1]
    monkeypatch.setattr(predict_on_ray, "find_spec", lambda name: None)
    from vitral.demo import IMAGES

    words = ["predict", str(trained.folder), str(IMAGES), "--engine", "ray", "--out", str(tmp_path / "t.csv")]
    assert "pip install 'vitral[ray]'" in printed(capsys, *words, code=2)[1]
    assert not list(tmp_path.glob("t.csv*"))
