"""Pictures in one folder, each named after its ImageNet class: n01440764_tench.JPEG, n01440764_18.JPEG."""

from __future__ import annotations

import re

from vitral.data.dataset import DataSet
from vitral.data.files import Files, is_picture, labelled

_NAME = re.compile(r"(?:.*/)?(n\d{8})[_.].*")


def read(files: Files, name: str) -> DataSet | None:
    """The pictures by the WordNet id that their names begin with; None where a name has none, or folders tell them
    apart.
    """
    pictures = [path for path in files.paths if is_picture(path)]
    found = [_NAME.fullmatch(path) for path in pictures]
    labels = [match[1] for match in found if match]
    folders = {path.rpartition("/")[0] for path in pictures}
    if len(labels) < len(pictures) or len(folders) != 1 or len(set(labels)) < 2:
        return None
    notes = [*files.notes, "classes are the WordNet ids that the files' names begin with"]
    return labelled(files, name, files.where, {"train": (pictures, labels)}, notes)
