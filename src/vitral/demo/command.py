"""The whole of `vitral demo`: draw, predict, explain, and write pictures and maps into a folder."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from vitral.demo.drawings import SCENES, draw
from vitral.errors import UsageError
from vitral.evaluation.report import duration
from vitral.explanation.drawing import contact_sheet, save
from vitral.explanation.files import explain_files, question
from vitral.explanation.heatmap import Heatmap
from vitral.predict import Prediction, load
from vitral.weights import native
from vitral.weights.files import replacing, write_text
from vitral.weights.references import DEMO, is_demo

SHOWN = "ship"
"""The picture that has a page of its own, and that the commands to try next are about."""

_OWN = "demo.json"  # says which files of the folder are ours to overwrite


@dataclass(frozen=True, eq=False)
class Demo:
    """What the network in the package says of the drawings, and where everything was written."""

    folder: Path
    trained: Mapping[str, Any]
    """Where the network comes from, as its file tells: data, command, time, accuracy, licence."""
    predictions: Sequence[Prediction]
    """One for each picture, in the order of the classes."""
    heatmaps: Sequence[Heatmap]
    """What these answers rest on."""
    page: Path
    """The map of one picture."""
    sheet: Path
    """All maps."""

    @property
    def right(self) -> int:
        """Pictures that are answered with the class that they were drawn as."""
        return sum(Path(one.name).stem == one.label for one in self.predictions)

    def about(self) -> list[str]:
        """How good the network is and what it was not made for, in lines for a person."""
        told, test = self.trained, self.trained["test"]
        low, high = test["accuracy_interval"]
        return [
            f"Network  {told['model']}, {told['parameters']:,} parameters, trained in {duration(told['seconds'])} "
            f"({told['device']}) on {told['training_pictures']:,} photographs of {told['data']}",
            f"Accuracy {test['accuracy']:.2%} ({low:.1%} to {high:.1%}) on {test['images']:,} test photographs, never "
            "seen in training",
            "Pictures drawings, one of each class: not the photographs that it learned from; they show how it is used, "
            "not how good it is",
            "",
        ]

    def next_commands(self) -> list[str]:
        """What to type then, without the program's name."""
        name = "demo" if is_demo("demo") else shlex.quote(str(DEMO))  # somebody's own run is called so here
        picture = shlex.quote(str(self.folder / f"{SHOWN}.png"))
        return [
            f"predict {name} {picture}",
            f"explain {name} {picture} --check",
            f"summary {name}",
            f"train YOUR_PICTURES/ --init {name}",
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "model": dict(self.trained),
            "predictions": [one.to_json(3) for one in self.predictions],
            "explanations": [one.to_json() for one in self.heatmaps],
            "right": self.right,
            "page": str(self.page),
            "sheet": str(self.sheet),
        }


def demo(folder: Path) -> Demo:
    """Let the network in the package name and explain the drawings; write these and the maps into `folder`.

    Raises `UsageError` for a folder that cannot be written and for files in it that an earlier call has not written.
    """
    asked = question(load(DEMO, precision="fp32"))
    pictures = [folder / f"{name}.png" for name in SCENES]
    page = folder / "explained" / f"{SHOWN}-{asked.name}.png"
    sheet = folder / "explained" / f"contact-sheet-{asked.name}.png"
    _open(folder, [*pictures, page, sheet])
    for path in pictures:
        with replacing(path) as temporary:
            Image.fromarray(draw(path.stem)).save(temporary, "PNG")
    predictions = load(DEMO)([str(path) for path in pictures])
    heatmaps = [one for maps in explain_files(asked, pictures) if isinstance(maps, list) for one in maps]
    save([one for one in heatmaps if Path(one.name).stem == SHOWN], page)
    contact_sheet(heatmaps, sheet)
    return Demo(folder, native.read(DEMO).trained, predictions, heatmaps, page, sheet)


def _open(folder: Path, files: Sequence[Path]) -> None:
    """Make the folder and note which files in it are ours; `UsageError` where it cannot be written or has others."""
    hint = "vitral demo --out ANOTHER_FOLDER"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError("cannot make this folder", where=folder, why=error.strerror, hint=hint) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError("cannot write into this folder", where=folder, why="it may not be written", hint=hint)
    others = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if others and not (folder / _OWN).exists():  # pictures among somebody's data would be taken for data
        told = ", ".join(others[:3]) + " …" * (len(others) > 3)
        raise UsageError("this folder is not empty", where=folder, why=f"it holds {told}", hint=hint)
    names = [_OWN, *(path.relative_to(folder).as_posix() for path in files)]
    ours = _ours(folder / _OWN)
    if strangers := [name for name in names if (folder / name).exists() and name not in ours]:
        why = f"vitral demo did not write {', '.join(strangers[:3])}{' …' if len(strangers) > 3 else ''}"
        raise UsageError("will not overwrite what is in this folder", where=folder, why=why, hint=hint)
    write_text(folder / _OWN, json.dumps({"written by": "vitral demo", "files": names}, indent=1) + "\n")


def _ours(record: Path) -> set[str]:
    """The files that an earlier call has written."""
    try:
        return set(json.loads(record.read_text("utf-8"))["files"])
    except (OSError, ValueError, TypeError, KeyError):
        return set()
