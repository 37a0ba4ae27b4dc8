"""A library that is missing or broken: one error that names it and what to install, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vitral.imports import import_failure

BROKEN = {
    "a missing library": ("torch", "raise OSError('libcudart.so.13: cannot open shared object')", "libcudart.so.13"),
    "no address space": ("torch", "raise OSError('libtorch_cpu.so: failed to map segment')", "ulimit -v unlimited"),
    "no memory": ("torch", "raise MemoryError", "ulimit -v unlimited"),
    "not installed": ("torch", "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')", "not installed"),
    "half of it": ("torch", "from torch import _C", "pip install --force-reinstall torch torchvision"),
    "another": ("safetensors", "raise ImportError('undefined symbol')", "pip install --force-reinstall safetensors"),
}
"""Kind → module, its code, and what the error says."""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the modules of a folder before all others."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env, timeout=60)


@pytest.mark.parametrize("kind", BROKEN)
def test_the_command_names_the_library(kind, tmp_path):
    module, code, said = BROKEN[kind]
    (tmp_path / module).mkdir()
    (tmp_path / module / "__init__.py").write_text(code)
    done = run(tmp_path, "-m", "vitral", "summary", "Ti/16")
    assert done.returncode == 2
    first, *rest = done.stderr.splitlines()
    assert first.startswith(f"error: {module} ")
    assert len(rest) <= 4
    assert said in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_python_raises_one_import_error(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(BROKEN["a missing library"][1])
    done = run(tmp_path, "-c", "import vitral; vitral.load")
    assert done.stderr.count("Traceback") == 1
    assert "MissingExtraError: torch cannot be imported: OSError: libcudart.so.13" in done.stderr
    code = "try:\n    from vitral import train\nexcept ImportError as error:\n    print(error)"
    assert run(tmp_path, "-c", code).stdout.startswith("torch cannot be imported")


@pytest.mark.slow
def test_a_torchvision_of_another_torch(tmp_path, make_images):
    """It raises when its operators are registered; a command that needs none of them still works."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    photos = make_images({"a": 6, "b": 6})
    train = ("train", str(photos), "--model", "mu/4", "--image-size", "8", "--init", "none", "--crop", "random-resized")
    done = run(tmp_path, "-m", "vitral", *train, "--epochs", "1", "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "error: torchvision cannot be imported: RuntimeError: operator torchvision::nms" in done.stderr
    assert "with torchvision" in done.stderr, "both versions are named"
    assert "bug in vitral" not in done.stderr
    assert run(tmp_path, "-m", "vitral", "predict", "demo", str(photos / "a/0.png")).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.parametrize("megabytes", [300, 600, 1200])
def test_too_little_address_space(megabytes, tmp_path):
    words = f"ulimit -v {megabytes * 1024}; exec {sys.executable} -m vitral summary Ti/16"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode in (0, 2)
    assert "Traceback" not in done.stderr
    assert "bug in vitral" not in done.stderr
    assert done.returncode == 0 or "ulimit -v unlimited" in done.stderr or "memory" in done.stderr


def test_an_error_of_vitral_is_no_import_failure():
    with pytest.raises(ValueError, match="its own") as caught:
        raise ValueError("its own")
    assert import_failure(caught.value) is None
