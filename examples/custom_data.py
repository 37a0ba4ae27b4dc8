"""A data set of one's own: images in a database become shards, which every command of vitral reads.

    python examples/custom_data.py images.db shards
    vitral data check shards
    vitral train shards

The database has a table `images` with the columns `file` (an encoded image) and `label`. A package can also add such a
source to vitral itself, so that `vitral train images.db` works: examples/plugin.
"""

from __future__ import annotations

import sqlite3
import sys
from dataclasses import dataclass

import numpy as np

import vitral
from vitral.data import Split
from vitral.data.shards.writing import write_shards


@dataclass(frozen=True)
class FromDatabase:
    """Number of an image → its file. It holds no connection, so that it can be sent to worker processes."""

    database: str
    rows: tuple[int, ...]

    def __call__(self, index: int) -> bytes:
        with sqlite3.connect(self.database) as connection:
            (file,) = connection.execute("SELECT file FROM images WHERE rowid = ?", (self.rows[index],)).fetchone()
        return bytes(file)


def load(database: str) -> vitral.DataSet:
    """Describe the images without reading one: names, labels, and a function that fetches an image."""
    with sqlite3.connect(database) as connection:
        found = connection.execute("SELECT rowid, label FROM images ORDER BY rowid").fetchall()
    classes = tuple(sorted({label for _, label in found}))
    names = [f"{label}/{row}" for row, label in found]
    labels = np.array([classes.index(label) for _, label in found])
    train = Split(names, labels, FromDatabase(database, tuple(row for row, _ in found)))
    return vitral.DataSet("images", classes, {"train": train}, database)


def main(database: str, out: str) -> None:
    """Write the images of a database as shards into the new folder `out`."""
    written = write_shards(load(database), out)
    print(f"{out}: {written.splits['train'][1]:,} images in {written.splits['train'][0]} shards")


if __name__ == "__main__":
    main(*sys.argv[1:])
