"""The code that is read is the code that runs: an edit of any method of vit.py changes everything that computes it."""

from __future__ import annotations

import ast
import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vitral
from vitral.model import edited, vit

SOURCE = Path(vitral.__file__).parent
CHECKS = Path(__file__).with_name("edited_checks.py")


def test_the_digests_are_those_of_the_code_that_engines_repeat():
    """Change vit.py, then the engines that repeat it, then the digest in model/edited.py."""
    found = edited.digests()
    assert {name for name in found if "." not in name} <= {*edited.DIGESTS}
    assert {name: found[name] for name in edited.DIGESTS} == edited.DIGESTS


def test_a_digest_is_of_the_code_alone():
    code = 'def f(x):\n    """A."""\n    return [x,\n        2]  # two\n'
    assert edited.digest_of(code) == edited.digest_of("def f(x):\n\n    return [x, 2]\n")
    assert edited.digest_of(code) != edited.digest_of("def f(x):\n    return [x, 3]\n")


def methods() -> list[str]:
    """Names of all functions of vit.py between images and logits."""
    found = []
    for node in ast.parse(inspect.getsource(vit)).body:
        if isinstance(node, ast.ClassDef):
            found += [f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)]
        elif isinstance(node, ast.FunctionDef):
            found.append(node.name)
    others = ("__init__", "init_weights", "dropout_p", "rotations", "encode", "num_features", "features")
    return [name for name in found if not name.endswith((*others, "reset_classifier"))]


HALF = """

def _half(x):
    if isinstance(x, tuple):
        return tuple(map(_half, x))
    return x / 2 if isinstance(x, Tensor) and x.is_floating_point() else x
"""


def halved(name: str) -> str:
    """The source of vit.py, in which a function returns half of what it computes."""
    source = inspect.getsource(vit)
    owner, _, method = name.rpartition(".")
    nodes = ast.parse(source).body
    if owner:
        nodes = next(node for node in nodes if isinstance(node, ast.ClassDef) and node.name == owner).body
    (function,) = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == method]
    lines = source.encode().splitlines(keepends=True)  # columns count bytes
    values = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]
    for value in sorted(values, key=lambda value: -value.lineno):
        last, first = int(value.end_lineno or 0) - 1, value.lineno - 1
        lines[last] = lines[last][: value.end_col_offset] + b"))" + lines[last][value.end_col_offset :]
        lines[first] = lines[first][: value.col_offset] + b"_half((" + lines[first][value.col_offset :]
    return b"".join(lines).decode() + HALF


@pytest.mark.slow
def test_every_edit_is_computed_everywhere(tmp_path):
    """Training, prediction, packed images, compiled and explained networks; engines that repeat the code step aside."""
    package = tmp_path / "vitral"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__", "*.so", "build"))
    edits = {name: halved(name) for name in methods()}
    (tmp_path / "edits.json").write_text(json.dumps(edits))
    done = subprocess.run(
        [sys.executable, "-B", str(CHECKS), str(tmp_path)], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    plain = seen.pop("")
    assert set(seen) == set(edits)
    for name, found in seen.items():
        ways = ["training", "prediction", *(["packing"] if name not in NOT_PACKED else [])]
        for way in [*ways, *(["compiled"] if found["compiled"] else [])]:
            assert found[way] != plain[way], f"{name} is not computed in {way}"
        assert found["engine"] == "plain", name
        assert "was edited in vit.py" in found["packed"], name
        assert ("was edited" in found["capture"]) == name.startswith("Attention"), name
        own = name.startswith("Attention") or name == "linear_activation"
        assert ("was edited" in found["default map"]) == own, name
        assert ("was edited" in found["together"]) == (name in OF_ONE_SIZE), name
    assert plain["packed"] == plain["capture"] == plain["default map"] == plain["together"] == ""


OF_ONE_SIZE = {"ViT.forward", "ViT.answer", "ViT.embed", "ViT.transform"}
"""Functions that packed images do without: their edits are refused there."""


NOT_PACKED = {*OF_ONE_SIZE, "AttentionPool.forward", "AttentionPool.attend"}
"""Functions that the networks of packed images here do without."""
