"""The table of golden copies: name of a file → the function that makes its text anew.

Functions run inside the folder of `place.py`. They reach vitral through its command line, `vitral.__all__` and files of
runs alone: a refactor moves modules.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from tests.golden import api, weights
from tests.golden.normal import as_json, as_text, normal
from tests.golden.place import RUNS, command, inside

import vitral

FOLDER = Path(__file__).parent / "files"
"""Folder of the copies."""

HASHES = "weights.json"
"""The copy that holds one entry for each kind of CPU."""

_RUN = "runs/seeded"
_EXACT = "--device cpu --precision fp32"


def _help() -> str:
    overview = command("--help")
    names = re.findall(r"^  (\w+(?: \w+)?)  ", overview, flags=re.MULTILINE)
    pages = [f"$ vitral {name} --help-all\n{command(f'{name} --help-all')}" for name in names]
    return as_text("\n".join([f"$ vitral --help\n{overview}", *pages]))


def _variants() -> str:
    names = [entry["name"] for entry in json.loads(command("models --format json"))]
    with torch.device("meta"):
        return as_text("\n\n".join(f"{name}: {weights.listing(vitral.create(name).state_dict())}" for name in names))


def _api() -> str:
    return as_text(api.listing())


def _run_file(name: str) -> str:
    return as_json(json.loads(Path(_RUN, name).read_text("utf-8")))


def _metrics(run: str) -> str:
    lines = Path(run, "metrics.jsonl").read_text("utf-8").splitlines()
    return "".join(json.dumps(normal(json.loads(line))) + "\n" for line in lines)


def _header(name: str) -> str:
    return as_json(weights.header(Path(_RUN, name)))


def _files() -> str:
    return "\n".join(sorted(str(file) for file in Path(_RUN).rglob("*") if file.is_file())) + "\n"


def _hashes() -> str:
    return as_json({weights.machine(): {run: weights.sha256(Path(run, "model.safetensors")) for run in RUNS}})


def _printed(words: str) -> str:
    return as_json(json.loads(command(f"{words} --format json")))


def _converted(words: str) -> str:
    """The report of reading weights in another library's format; they are written first."""
    file, to = words.split()
    command(f"convert {_RUN} {file} --to {to}")
    return _printed(f"convert {file} back.safetensors --image-size 12")


COPIES: dict[str, Callable[[], str]] = {
    "help.txt": _help,
    "variants.txt": _variants,
    "api.txt": _api,
    "run/config.json": functools.partial(_run_file, "config.json"),
    "run/result.json": functools.partial(_run_file, "result.json"),
    "run/metrics.jsonl": functools.partial(_metrics, _RUN),
    "run/files.txt": _files,
    "run/model-header.json": functools.partial(_header, "model.safetensors"),
    "run/last-header.json": functools.partial(_header, "checkpoints/last.safetensors"),
    "run/planned-metrics.jsonl": functools.partial(_metrics, "runs/planned"),
    HASHES: _hashes,
    "evaluate.json": functools.partial(_printed, f"evaluate {_RUN} --engine plain {_EXACT}"),
    "evaluate-features.json": functools.partial(_printed, f"evaluate {_RUN} --knn 5 --few-shot 1,5 {_EXACT}"),
    "predict.json": functools.partial(_printed, f"predict {_RUN} images --engine plain {_EXACT}"),
    "explain.json": functools.partial(_printed, f"explain {_RUN} images --check --out maps {_EXACT}"),
    "explain-compare.json": functools.partial(
        _printed, f"explain {_RUN} images/1.png --compare --out maps/1.png {_EXACT}"
    ),
    "inspect.json": functools.partial(_printed, f"inspect {_RUN} --out looked {_EXACT}"),
    "summary-run.json": functools.partial(_printed, f"summary {_RUN}"),
    "summary-named.json": functools.partial(_printed, "summary R26+S/32"),
    "models.json": functools.partial(_printed, "models"),
    "verify.json": functools.partial(_printed, f"verify {_RUN}"),
    "data-check.json": functools.partial(_printed, "data check digits"),
    "convert-to-timm.json": functools.partial(_printed, f"convert {_RUN} timm.safetensors --to timm"),
    "convert-from-timm.json": functools.partial(_converted, "timm.safetensors timm"),
    "convert-from-hf.json": functools.partial(_converted, "hf hf"),
}


def make(name: str, place: Path) -> str:
    """The text of one copy, made in a copy of the prepared folder `place`, since commands write into runs."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder).resolve() / "place"
        shutil.copytree(place, work)
        with inside(work):
            return COPIES[name]()
