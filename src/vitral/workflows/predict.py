"""Write predictions of any number of images to a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from vitral.errors import ImageError, UsageError
from vitral.inference.generation import Search, search_of
from vitral.inference.inputs import Item, Items
from vitral.inference.predictions import Prediction
from vitral.inference.predictor import Predictor
from vitral.inference.sources import Source
from vitral.workflows.tables.formats import Cell
from vitral.workflows.tables.image_table import ImageTable


class PredictionFile(ImageTable[Prediction]):
    """The table `out` of predictions, with the `Columns` of the network's output."""

    def __init__(
        self,
        predictor: Predictor,
        sources: Sequence[Source],
        out: str | Path,
        *,
        top: int = 3,
        all: bool = False,
        batch_size: int = 32,
    ):
        if not predictor.classes:
            hint = f"vitral embed {predictor.source} …"
            raise UsageError("this network has no classes to predict", why="its output is features", hint=hint)
        self.columns = predictor.output.columns(top, all)
        super().__init__(predictor, sources, out, self.columns.names, batch_size, texts=self.columns.texts)

    def results(self, items: Items | list[Item]) -> Iterator[Prediction | ImageError]:
        return self.predictor.stream(items, self.batch_size)

    def cells(self, result: Prediction) -> tuple[str, Sequence[Cell]]:
        return result.name, self.columns.cells(result)

    def origin(self) -> dict[str, object]:
        search, output = search_of(self.predictor.network), self.predictor.output
        origin = super().origin() | ({} if search == Search() else vars(search))  # greedy has no options
        if (threshold := getattr(output, "threshold", None)) is not None:
            origin["threshold of --coverage"] = threshold
        if cut := getattr(output, "cut", None):
            origin["threshold of --right"] = cut.probability
        return origin
