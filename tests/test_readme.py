"""The first block of README.md runs as it stands, from `git clone` on, in an environment that make sets up.

One thing is replaced: the libraries are those of the environment of the tests, which pip finds on the path, so that
nothing is fetched. vitral itself is installed from the clone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from images import MakeImages

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.skipif(not all(map(shutil.which, ("git", "make"))), reason="needs git and make")
def test_the_first_block_works_in_a_new_folder(make_images: MakeImages, tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    block = re.findall(r"^```console\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[0]
    words = [line.removeprefix("$ ") for line in block.splitlines()]
    assert [word.split()[0] for word in words] == ["git", "cd", "make", ".venv/bin/vitral"]
    words.insert(-1, f"cp -r {make_images({'cat': 20, 'dog': 20})} photos")

    home = tmp_path / "home"
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "OMP_NUM_THREADS")}
    environment |= {"PYTHONPATH": sysconfig.get_path("purelib"), "PIP_NO_BUILD_ISOLATION": "0"}
    script = "set -e\n" + "\n".join(words).replace("REPOSITORY", str(ROOT))
    done = subprocess.run(["bash", "-c", script], cwd=home, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    accuracy = re.findall(r"^Accuracy ([0-9.]+)%.* on 360 test images", done.stderr, re.MULTILINE)
    assert accuracy
    assert float(accuracy[0]) > 95
    assert (home / "vitral/runs/digits/report.html").is_file()
    assert (home / "vitral/runs/photos/report.html").is_file()
    assert (home / "vitral/.venv/bin/vitral").is_file()
