"""The table of labels that a person checks: `vitral data check --labels --write` and `vitral label` write it.

A row for each image. `label` is the label now and `given` the one that the data came with. `checked` says where the
label comes from: `yes`, a person chose or confirmed it; `accepted`, a person accepted a suggestion for it; `no`, nobody
has looked. Images that are `unsure` or `excluded` are set aside: no command uses them, nor rows without a label.
"""

from __future__ import annotations

import csv
import io
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence

from vitral.wording import shown

NAME = "labels.csv"
"""File in a folder of images to which `vitral label` writes."""
COLUMNS = ("file", "label", "split", "given", "checked", "group", "suggested", "confidence", "doubt")
"""Columns in their order; those of `_OPTIONAL` are left out if all their cells are empty."""
_OPTIONAL = ("split", "group", "suggested", "confidence", "doubt")
CHECKED = ("no", "yes", "accepted", "unsure", "excluded")
SET_ASIDE = ("unsure", "excluded")
"""Values of `checked` whose images no command uses."""
_MARKS = {"given", "checked"}


def is_label_table(header: Sequence[str]) -> bool:
    """True if the columns of a table, in lower case, are those of this format."""
    return set(header) >= _MARKS


def labels_beside(folder: str) -> list[str]:
    """Return a note if a folder contains the table of `vitral label`, which is not read with the folder."""
    table = os.path.join(folder, NAME)
    try:
        with open(os.path.expanduser(table), newline="", encoding="utf-8") as file:
            header = next(csv.reader(file), [])
    except (OSError, ValueError, csv.Error):
        return []
    command = f"vitral train {shlex.quote(table)}"
    note = f"{NAME} contains labels from vitral label, which are not used here. To use them, type {command}"
    return [note] if is_label_table([name.strip().lower() for name in header]) else []


def is_set_aside(label: str, checked: str) -> bool:
    """True for a row of this format that is not for training."""
    return not label or checked in SET_ASIDE


def label_table(rows: Iterable[Mapping[str, str]]) -> str:
    """Return the table as text; a row has the cells of its columns."""
    given = list(rows)
    names = [name for name in COLUMNS if name not in _OPTIONAL or any(row.get(name) for row in given)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([row.get(name, "") for name in names] for row in given)
    return text.getvalue()


def file_cell(path: str) -> str:
    """Return the path of an image as a cell, from whose ends readers strip spaces."""
    return f"./{path}" if path != path.lstrip() else path


def fits_a_cell(path: str) -> bool:
    """True if a table in UTF-8 can hold this path, and readers find the file again."""
    return shown(path) == path == path.rstrip()
