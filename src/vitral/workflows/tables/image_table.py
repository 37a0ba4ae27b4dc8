"""A table with a row for each image, in order, that is written while images are computed and can be resumed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

from vitral._version import __version__
from vitral.distributed.ranks import ALONE, Ranks
from vitral.errors import ImageError, RunError
from vitral.inference.inputs import Item, Items
from vitral.inference.predictor import Predictor
from vitral.inference.sources import Source, count
from vitral.inference.stream import in_batches
from vitral.model.registry import config_to_json
from vitral.weights.native import digest
from vitral.workflows.tables.formats import Cell, Format, Row
from vitral.workflows.tables.row_file import Lines, RowFile

R = TypeVar("R")


@dataclass(frozen=True)
class Written:
    """A complete table."""

    path: Path
    images: int
    failed: int
    """Number of unreadable images."""
    kept: int
    """Rows kept from the interrupted command."""
    model_hash: str

    def to_json(self) -> dict[str, object]:
        """Return plain data."""
        return {
            "out": str(self.path),
            "images": self.images,
            "errors": self.failed,
            "resumed_at": self.kept,
            "model_hash": self.model_hash,
        }


class ImageTable(Generic[R]):
    """The table `out` with a row for each image of `sources`, in order: `path`, `columns`, `error`. A subclass computes
    results of the type R.
    """

    def __init__(
        self,
        predictor: Predictor,
        sources: Sequence[Source],
        out: str | Path,
        columns: Sequence[str],
        batch_size: int = 32,
        format: type[Format] | None = None,
        texts: Collection[str] = (),
    ):
        """`format` is that of the extension of `out` by default (`vitral.workflows.tables.formats`)."""
        self.predictor, self.sources, self.batch_size = predictor, sources, batch_size
        self.file = RowFile(out, ["path", *columns, "error"], batch_size, format, {"path", "error", *texts})
        self.images = count(sources)

    @property
    def nothing_to_resume(self) -> str:
        """Note for a resumed command that finds a file but no unfinished rows: it is replaced. "" for any other."""
        if self.file.partial.exists() or not self.file.target.exists():
            return ""
        return (
            f"{self.file.path} is not an unfinished file: there is nothing to resume, and all rows are computed again"
        )

    def results(self, items: Items | list[Item]) -> Iterator[R | ImageError]:
        """Compute the results of images, or their errors, in order."""
        raise NotImplementedError

    def cells(self, result: R) -> tuple[str, Sequence[Cell]]:
        """Return the path of a result, and the cells of its columns."""
        raise NotImplementedError

    def write(
        self, *, resume: bool = False, progress: Callable[[int], None] = lambda done: None, ranks: Ranks = ALONE
    ) -> Written:
        """Compute the missing rows and finish the file. `progress` receives the number of rows of each batch.

        With `resume`, rows of an interrupted command are kept; the file has the same bytes as without interruption.
        Raises the errors of `RowFile.opened`; the rows written so far stay on disk.

        Ranks compute batches in turn, and the first one writes the file: its bytes do not depend on their number.
        """
        file = self.file
        origin = ranks.agree(self.origin)
        first = ranks.share(lambda: origin)
        ranks.agree(lambda: self.check_origin(origin, first))
        with ExitStack() as stack:
            kept = ranks.share(lambda: stack.enter_context(file.opened(origin, self._names(), resume=resume)).kept)
            progress(kept)
            for batch in self._in_turn(kept, ranks):
                file.append(batch)
                progress(batch.rows)
            return ranks.share(lambda: self.finish(kept, str(origin["model_hash"])))

    def _in_turn(self, kept: int, ranks: Ranks) -> Iterator[Lines]:
        """Yield the rows after the first `kept`, batch by batch, on the first rank; none on the others."""
        items = Items(self.sources, kept, (ranks.number, ranks.count, self.batch_size))
        results = self.results(items)
        own = (self.file.lines(list(map(self._row, batch))) for batch in in_batches(results, self.batch_size))
        for first in range(kept, self.images, self.batch_size * ranks.count):
            ranks.reached(f"image {first + 1 + ranks.number * self.batch_size}")
            batches = ranks.collect(next(own, Lines(b"", 0, 0)))
            yield from () if batches is None else batches

    def finish(self, kept: int, model_hash: str) -> Written:
        """Complete the table, whose rows are all written."""
        self.file.finish()
        return Written(self.file.path, self.images, self.file.failed, kept, model_hash)

    def check_origin(self, origin: Mapping[str, object], first: Mapping[str, object]) -> None:
        """Raise `RunError` on a rank that would compute other rows than the first one, from other images or weights."""
        others = [name for name, value in first.items() if origin[name] != value and name not in ("device", "folder")]
        if others:
            why = f"it has other {' and '.join(name.replace('_', ' ') for name in others)}"
            hint = "the same images and weights on every machine"
            raise RunError("other rows than rank 0's", where=self.predictor.source, why=why, hint=hint)

    def _row(self, result: R | ImageError) -> Row:
        if isinstance(result, ImageError):
            empty = [None] * (len(self.file.columns) - 2)
            return [result.name, *empty, " ".join((result.why or "cannot be read").split())]
        path, cells = self.cells(result)
        return [path, *cells, None]

    def _names(self) -> Iterator[str]:
        return (item.name for item in Items(self.sources))

    def origin(self) -> dict[str, object]:
        """Return everything that determines the bytes of the file."""
        predictor, names, folder = self.predictor, hashlib.sha256(), ""
        for name in self._names():
            names.update(name.encode("utf-8", "surrogatepass") + b"\0")
            folder = folder or ("" if os.path.isabs(name) else os.getcwd())  # the same name elsewhere is another image
        return {
            "model_hash": model_hash(predictor),
            "images": self.images,
            "names": names.hexdigest(),
            "folder": folder,
            "columns": self.file.columns,
            "batch_size": self.batch_size,
            "device": str(predictor.machine.device),
            "precision": predictor.machine.precision,
            "engine": predictor.engine,
            "tta": predictor.tta,
            "threads": torch.get_num_threads(),
            "vitral": __version__,
            "torch": torch.__version__,
        }


def model_hash(predictor: Predictor) -> str:
    """Return a hash of all that determines a predictor's results, except the machine: the weights, the dtype that they
    compute in, the configuration, the preprocessing, the classes, the output and the int8 ranges.
    """
    network = predictor.network
    described: list[object] = [config_to_json(network.config), predictor.preprocessing.to_json(), predictor.classes]
    described += [predictor.output.to_json()] if predictor.output.to_json() else []
    dtype = str(predictor.dtype)
    text = json.dumps([digest(network.state_dict()), dtype, *described, predictor.ranges], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
