"""The predictions of an evaluation as rows: one per image, with its label."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vitral.data import Split
from vitral.data.targets import targets_of
from vitral.inference.outputs.output import Output


def rows_of(images: Split, values: np.ndarray, output: Output) -> Iterator[dict[str, object]]:
    """Yield one row per image: `image`, `true`, and the columns of `vitral predict --out`.

    `values` (n, K) are the result of `Output.values`. `true` is the label. If the network predicts numbers, it is a
    column for each, such as `true_age`.
    """
    columns, names = output.columns(), output.names
    for i, value in enumerate(values):
        name, label = images.names[i], images.labels[i]
        if np.issubdtype(images.labels.dtype, np.floating):
            true: dict[str, object] = {f"true_{target}": float(one) for target, one in zip(names, label, strict=True)}
        else:
            true = {"true": targets_of(output.task).describe(label, names)}
        cells = columns.cells(output.prediction(name, value))
        yield {"image": name, **true, **dict(zip(columns.names, cells, strict=True))}
