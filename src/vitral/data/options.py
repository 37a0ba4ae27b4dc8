"""Options of the images that a command reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from vitral.data.dataset import DataSet
from vitral.data.tables_in_memory import Examples
from vitral.data.targets import ClassFolders
from vitral.errors import unknown

BAD_IMAGES = ("error", "skip")


@dataclass(frozen=True)
class DataOptions:
    """A data set and its treatment. Raises `UsageError` for an unknown `bad_images`."""

    data: str | Path | DataSet | Examples | None = None
    """The data set; None for the data of the model's own run."""
    split: str | None = None
    """The split; None for the default of the command."""
    data_root: str | Path = "data"
    """The folder of the named data sets."""
    bad_images: str = "error"
    """Treatment of unreadable images: `error` names them, `skip` leaves them out."""
    label_separator: str | None = None
    """Separator of several labels in a column of a table; None for that of the model's run, or what is found."""
    class_folders: ClassFolders | None = None
    """Folders that are classes (`vitral.data.targets.Labeling`); None for those of the model's run."""

    def __post_init__(self) -> None:
        if self.bad_images not in BAD_IMAGES:
            raise unknown("choice for bad images:", self.bad_images, BAD_IMAGES)
        if self.class_folders not in (None, *get_args(ClassFolders)):
            raise unknown("choice of class folders:", str(self.class_folders), get_args(ClassFolders))

    @property
    def skip(self) -> bool:
        """True if unreadable images are left out."""
        return self.bad_images == "skip"


OWN_DATA = DataOptions()
"""The data of the model's own run; unreadable images are an error."""
