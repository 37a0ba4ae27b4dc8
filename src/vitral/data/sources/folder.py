"""A folder of class folders, of IDX files, or of images with a table."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from vitral.data.dataset import DataSet
from vitral.data.files import Folder
from vitral.data.sources.layout import read_layout
from vitral.data.targets import ANY, Labeling
from vitral.errors import DataError
from vitral.folders import is_run


def accepts(data: str) -> bool:
    """True for a folder."""
    return os.path.isdir(data)


def load(data: str, *, root: Path, download: bool, wanted: Labeling = ANY) -> DataSet:
    """Load the folder's images by its layout; `DataError` for a folder with another purpose."""
    _refuse_other(Path(data))
    name = os.path.basename(os.path.abspath(data)) or "data"
    return read_layout(Folder(data), name, wanted)


_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "pytorch_model.bin.index.json")
_PACKAGES = ("__init__.py", "pyproject.toml", "setup.py", "package.json", "Cargo.toml", "go.mod")


def _refuse_other(folder: Path) -> None:
    """Refuse runs, weights and programs: their images (figures, icons, documentation) are not training data."""
    if is_run(folder):
        typed = shlex.quote(str(folder))
        hint = (
            f"vitral train --out {typed} --resume continues; vitral train DATA --init {typed} starts from its weights"
        )
        raise DataError("a run folder is not a data set", where=folder, why="vitral trained here", hint=hint)
    names = {"HEAD", "objects", "refs"}
    if all((folder / name).exists() for name in names):
        raise DataError("a git repository is not a data set", where=folder, hint="name the folder of images")
    for what, files in (("a folder of weights", _WEIGHTS), ("the folder of a program", _PACKAGES)):
        if marker := next((name for name in files if (folder / name).is_file()), None):
            hint = "name the folder of images in it, if there is one"
            raise DataError(f"{what} is not a data set", where=folder, why=f"it contains {marker}", hint=hint)
