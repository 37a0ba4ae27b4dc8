"""Images in one folder, each named after its ImageNet class: n01440764_tench.JPEG, n01440764_18.JPEG."""

from __future__ import annotations

import re

from vitral.data.dataset import DataSet
from vitral.data.files import Files, build_dataset, is_image

_NAME = re.compile(r"(?:.*/)?(n\d{8})[_.].*")


def read(files: Files, name: str) -> DataSet | None:
    """Read images by the WordNet id at the start of their names.

    None if a name has no id, if images are in several folders, or if there is only one id.
    """
    images = [path for path in files.paths if is_image(path)]
    matches = [_NAME.fullmatch(path) for path in images]
    labels = [match[1] for match in matches if match]
    folders = {path.rpartition("/")[0] for path in images}
    if len(labels) < len(images) or len(folders) != 1 or len(set(labels)) < 2:
        return None
    notes = [*files.notes, "classes are the WordNet ids at the start of the file names"]
    return build_dataset(files, name, files.where, {"train": (images, labels)}, notes)
