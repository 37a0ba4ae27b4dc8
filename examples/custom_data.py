"""A data set of one's own: images in a database, to train on as they are, or as shards for every command of vitral.

    python examples/custom_data.py images.db shards
    vitral data check shards
    vitral train shards

The database has a table `images` with the columns `file` (an encoded image) and `label`. A package can also add such a
source to vitral itself, so that `vitral train images.db` works: examples/plugin.
"""

from __future__ import annotations

import sqlite3
import sys

import vitral
from vitral.data.shards.writing import write_shards


class Database:
    """Pairs of an encoded image and its label. It holds no connection, so that worker processes can have it."""

    def __init__(self, file: str):
        self.file = file
        with sqlite3.connect(file) as connection:
            rows = connection.execute("SELECT rowid, label FROM images ORDER BY rowid").fetchall()
        self.rows, self.labels = [row for row, _ in rows], [label for _, label in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[bytes, str]:
        with sqlite3.connect(self.file) as connection:
            (file,) = connection.execute("SELECT file FROM images WHERE rowid = ?", (self.rows[index],)).fetchone()
        return bytes(file), self.labels[index]


def main(database: str, out: str) -> None:
    """Write the images as shards into the new folder `out`. `vitral.train(Database(database))` needs no shards."""
    written = write_shards(vitral.load_data(Database(database)), out)
    print(f"{out}: {written.splits['train'][1]:,} images in {written.splits['train'][0]} shards")


if __name__ == "__main__":
    main(*sys.argv[1:])
