"""`vitral demo`: draw images, predict, explain, and write images and heat maps into a folder."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitral import activity
from vitral.atomic import replacing, write_text
from vitral.demo import IMAGES
from vitral.digest import read_json, sealed_json
from vitral.errors import UsageError
from vitral.evaluation.page_numbers import duration
from vitral.explanation.drawing import contact_sheet, save
from vitral.explanation.files import explain_files, explain_options
from vitral.explanation.heatmap import Heatmap
from vitral.inference.loading import load
from vitral.inference.predictions import Prediction
from vitral.weights import native
from vitral.weights.read.references import DEMO, is_included

SHOWN = "ship"
"""The image with a separate heat map, used in the suggested commands."""

_OWN = "demo.json"  # lists the files in the folder that may be overwritten


@dataclass(frozen=True, eq=False)
class Demo:
    """Predictions and heat maps for the drawings, and the files written."""

    folder: Path
    trained: Mapping[str, Any]
    """Origin of the model, from the header of its file: data, command, time, accuracy, license."""
    predictions: Sequence[Prediction]
    """One per image, in the order of the classes."""
    heatmaps: Sequence[Heatmap]
    """One per prediction."""
    page: Path
    """The file with the heat map of `SHOWN`."""
    sheet: Path
    """The file with all heat maps."""

    @property
    def right(self) -> int:
        """Number of correct predictions."""
        return sum(Path(one.name).stem == one.label for one in self.predictions)

    def about(self) -> list[str]:
        """Describe the model, its accuracy and its limits, in lines for the terminal."""
        origin, test = self.trained, self.trained["test"]
        low, high = test["accuracy_interval"]
        return [
            f"Network  {origin['model']}, {origin['parameters']:,} parameters, trained in "
            f"{duration(origin['seconds'])} ({origin['device']}) on {origin['training_images']:,} photographs of "
            f"{origin['data']}",
            f"Accuracy {test['accuracy']:.2%} ({low:.1%} to {high:.1%}) on {test['images']:,} test photographs, not "
            "used in training",
            "Images   drawings, one of each class; the model was trained on photographs, so this shows the usage, not "
            "the accuracy",
            "",
        ]

    def next_commands(self) -> list[str]:
        """Return suggested commands, without the program's name."""
        name = "demo" if is_included("demo") else shlex.quote(str(DEMO))  # a file or run named demo exists here
        image = shlex.quote(str(self.folder / f"{SHOWN}.png"))
        return [
            f"predict {name} {image}",
            f"explain {name} {image} --check",
            f"summary {name}",
            "train YOUR_IMAGES/",
        ]

    def to_json(self) -> dict[str, object]:
        """Return plain data."""
        return {
            "model": dict(self.trained),
            "predictions": [one.to_json(3) for one in self.predictions],
            "explanations": [one.to_json() for one in self.heatmaps],
            "right": self.right,
            "page": str(self.page),
            "sheet": str(self.sheet),
        }


def demo(folder: Path) -> Demo:
    """Classify and explain the drawings with the included model; write images and heat maps into `folder`.

    Raises `UsageError` for a folder that cannot be written to, and if it contains files that `demo` did not write.
    """
    activity.tell("loading the model")
    model = load(DEMO, precision="fp32")
    request = explain_options(model)
    images = [folder / f"{name}.png" for name in model.classes]
    page = folder / "explained" / f"{SHOWN}-{request.name}.png"
    sheet = folder / "explained" / f"contact-sheet-{request.name}.png"
    _open(folder, [*images, page, sheet])
    for path in images:
        with replacing(path) as temporary:
            shutil.copyfile(IMAGES / path.name, temporary)
    activity.tell(f"classifying and explaining {len(images)} drawings")
    predictions = load(DEMO)([str(path) for path in images])
    heatmaps = [one for maps in explain_files(request, images) if isinstance(maps, list) for one in maps]
    save([one for one in heatmaps if Path(one.name).stem == SHOWN], page)
    contact_sheet(heatmaps, sheet)
    return Demo(folder, native.read(DEMO).trained, predictions, heatmaps, page, sheet)


def _open(folder: Path, files: Sequence[Path]) -> None:
    """Create the folder and record its files. Raises `UsageError` if it is not writable or contains other files."""
    hint = "vitral demo --out ANOTHER_FOLDER"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError("cannot create this folder", where=folder, why=error.strerror, hint=hint) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError("cannot write into this folder", where=folder, why="permission denied", hint=hint)
    others = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if others and not (folder / _OWN).exists():  # drawings among the user's images could be mistaken for data
        names_found = ", ".join(others[:3]) + (" …" if len(others) > 3 else "")
        raise UsageError("this folder is not empty", where=folder, why=f"it contains {names_found}", hint=hint)
    names = [_OWN, *(path.relative_to(folder).as_posix() for path in files)]
    own = _written_before(folder / _OWN)
    if foreign := [name for name in names if (folder / name).exists() and name not in own]:
        why = f"vitral demo did not write {', '.join(foreign[:3])}{' …' if len(foreign) > 3 else ''}"
        raise UsageError("refusing to overwrite files in this folder", where=folder, why=why, hint=hint)
    write_text(folder / _OWN, sealed_json({"written by": "vitral demo", "files": names}, indent=1))


def _written_before(record: Path) -> set[str]:
    """Return the files that an earlier call has written."""
    try:
        return set(read_json(record)["files"])
    except (OSError, ValueError, TypeError, KeyError):
        return set()
