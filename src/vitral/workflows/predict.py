"""Write predictions of any number of images to a table."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitral._version import __version__
from vitral.distributed.ranks import ALONE, Ranks
from vitral.errors import ImageError, RunError, UsageError
from vitral.inference.fingerprint import model_hash
from vitral.inference.generation import Search, search_of
from vitral.inference.inputs import Items
from vitral.inference.predictions import Prediction
from vitral.inference.predictor import Predictor
from vitral.inference.sources import Source, count
from vitral.inference.stream import in_batches
from vitral.workflows.row_file import Lines, RowFile
from vitral.workflows.row_formats import Row


@dataclass(frozen=True)
class Written:
    """A complete table of predictions."""

    path: Path
    images: int
    failed: int
    """Number of unreadable images."""
    kept: int
    """Rows kept from the interrupted command."""
    model_hash: str

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "out": str(self.path), "images": self.images, "errors": self.failed, "resumed_at": self.kept,
            "model_hash": self.model_hash,
        }  # fmt: skip


class PredictionFile:
    """The table `out` with a row for each image of `sources`, in order: `path`, the `Columns`, `error`."""

    def __init__(
        self, predictor: Predictor, sources: Sequence[Source], out: str | Path, *, top: int = 3, all: bool = False,
        batch_size: int = 32,
    ):  # fmt: skip
        if not predictor.classes:
            hint = f"vitral embed {predictor.source} …"
            raise UsageError("this network has no classes to predict", why="its output is features", hint=hint)
        self.predictor, self.sources, self.batch_size = predictor, sources, batch_size
        self.columns = predictor.output.columns(top, all)
        self.file = RowFile(out, ["path", *self.columns.names, "error"], batch_size)
        self.images = count(sources)
        self._cursor = 0, iter(Items(sources))
        """Number of the image that comes next, and the images from it on, of `batch`."""

    def write(
        self, *, resume: bool = False, progress: Callable[[int], None] = lambda done: None, ranks: Ranks = ALONE,
        elsewhere: Callable[[int], Iterator[Lines]] | None = None,
    ) -> Written:  # fmt: skip
        """Predict the missing rows and finish the file. `progress` receives the number of rows of each batch.

        With `resume`, rows of an interrupted command are kept; the file has the same bytes as without interruption.
        Raises the errors of `RowFile.opened`; the rows written so far stay on disk.

        Ranks compute batches in turn, and the first one writes the file: its bytes do not depend on their number.
        `elsewhere` computes the rows after so many kept ones in the place of this process.
        """
        file = self.file
        origin = ranks.agree(self.origin)
        first = ranks.share(lambda: origin)
        ranks.agree(lambda: self.check_origin(origin, first))
        with ExitStack() as stack:
            kept = ranks.share(lambda: stack.enter_context(file.opened(origin, self._names(), resume=resume)).kept)
            progress(kept)
            for batch in elsewhere(kept) if elsewhere else self._in_turn(kept, ranks):
                file.append(batch)
                progress(batch.rows)
            return ranks.share(lambda: self._finish(kept, origin["model_hash"]))

    def _in_turn(self, kept: int, ranks: Ranks) -> Iterator[Lines]:
        """Yield the rows after the first `kept`, batch by batch, on the first rank; none on the others."""
        items = Items(self.sources, kept, (ranks.number, ranks.count, self.batch_size))
        results = self.predictor.stream(items, self.batch_size)
        own = (self.file.lines(list(map(self._row, batch))) for batch in in_batches(results, self.batch_size))
        for first in range(kept, self.images, self.batch_size * ranks.count):
            ranks.reached(f"image {first + 1 + ranks.number * self.batch_size}")
            batches = ranks.collect(next(own, Lines(b"", 0, 0)))
            yield from () if batches is None else batches

    def batch(self, first: int) -> Lines:
        """Compute the rows of the batch that begins with image `first`; batches in order list the images once."""
        place, rest = self._cursor
        if first < place:
            place, rest = 0, iter(Items(self.sources))
        items = list(itertools.islice(rest, first - place, first - place + self.batch_size))
        self._cursor = first + len(items), rest
        return self.file.lines(list(map(self._row, self.predictor.stream(items, self.batch_size))))

    def _finish(self, kept: int, model_hash: str) -> Written:
        self.file.finish()
        return Written(self.file.path, self.images, self.file.failed, kept, model_hash)

    def check_origin(self, origin: dict[str, Any], first: dict[str, Any]) -> None:
        """Raise `RunError` on a rank that would compute other rows than the first one, from other images or weights."""
        others = [name for name, value in first.items() if origin[name] != value and name not in ("device", "folder")]
        if others:
            why = f"it has other {' and '.join(name.replace('_', ' ') for name in others)}"
            hint = "the same images and weights on every machine"
            raise RunError("other rows than rank 0's", where=self.predictor.source, why=why, hint=hint)

    def _row(self, result: Prediction | ImageError) -> Row:
        if isinstance(result, ImageError):
            return [result.name, *[None] * len(self.columns.names), " ".join((result.why or "cannot be read").split())]
        return [result.name, *self.columns.cells(result), None]

    def _names(self) -> Iterator[str]:
        return (item.name for item in Items(self.sources))

    def origin(self) -> dict[str, Any]:
        """Return everything that determines the bytes of the file."""
        predictor, names, folder = self.predictor, hashlib.sha256(), ""
        for name in self._names():
            names.update(name.encode("utf-8", "surrogatepass") + b"\0")
            folder = folder or ("" if os.path.isabs(name) else os.getcwd())  # the same name elsewhere is another image
        return {
            "model_hash": model_hash(predictor), "images": self.images,
            "names": names.hexdigest(), "folder": folder, "columns": self.file.columns,
            "batch_size": self.batch_size, "device": str(predictor.machine.device),
            "precision": predictor.machine.precision, "engine": predictor.engine,
            "tta": predictor.tta, "threads": torch.get_num_threads(), "vitral": __version__,
            "torch": torch.__version__, **_searched(predictor),
        }  # fmt: skip


def _searched(predictor: Predictor) -> dict[str, Any]:
    """Return the options of a search other than greedy."""
    search = search_of(predictor.model)
    return {} if search == Search() else vars(search)
